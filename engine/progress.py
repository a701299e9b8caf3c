"""Progress bars, on a terminal only."""

from __future__ import annotations

from tqdm import tqdm


class Progress(tqdm):  # type: ignore[misc]
    """tqdm without its monitor thread, which would outlive the bar."""

    monitor_interval = 0

    def __init__(self, *args: object, shown: bool, **options: object) -> None:
        # disable=None is tqdm's "unless this is a terminal".
        super().__init__(*args, disable=None if shown else True, leave=False, **options)
