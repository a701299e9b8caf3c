"""Progress bars, on a terminal only, and on none that says it is dumb. They have no colours, so NO_COLOR is kept."""

import os

from tqdm import tqdm


class Progress(tqdm):  # type: ignore[misc]
    """tqdm without its monitor thread, which would outlive the bar."""

    monitor_interval = 0

    def __init__(self, *args: object, shown: bool, **options: object) -> None:
        # disable=None is tqdm's "unless this is a terminal".
        super().__init__(*args, disable=not shown or os.environ.get("TERM") == "dumb" or None, leave=False, **options)
        columns = getattr(self, "ncols", None)
        if columns is not None and columns <= 0:
            self.ncols, self.nrows = 79, 24  # a terminal that does not know its size, where tqdm would draw nothing
