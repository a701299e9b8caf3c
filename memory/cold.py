"""COLD: what compressed pages were, kept in the host's memory, and read from there token by token.

    page                 0    1    2    3          written once, when the page is first compressed, and dropped with it
    slot                -1    0    1   -1          -1: exact itself, or there was no place left for a copy

    rows  [slots, layers, KV heads, page_size, 2, D]    K and V of a token in a head lie together: a query that recalls
                                                        the token reads one row

Tiers are inclusive: a page that is promoted keeps its copy, so that compressing it again copies nothing.

Rejected: copies of all pages as they are filled (twice the bytes while nothing is compressed yet); whole pages as what
is recalled (at equal bytes three to four times the KL: a page has few tokens that matter).
"""

import functools
import logging

import numpy as np
import torch
from torch import Tensor

from kernels.ops import Overlay
from memory.config import CacheConfig
from memory.errors import CapacityError

log = logging.getLogger("isotherm")


class HostCopies:
    """Copies of pages, by page id. Bounded: what finds no place has none; without a ColdConfig nothing does."""

    def __init__(self, config: CacheConfig, num_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        """On a CPU the system backs the buffer with memory only as copies are written. Raises CapacityError without the
        bytes for copies or overlay."""
        self.slots = np.full(num_pages, -1, dtype=np.int32)
        self.page_bytes = config.copy_bytes
        count = min(num_pages, config.cold.capacity_bytes // self.page_bytes) if config.cold else 0
        # Whether what comes back is what was copied, bit for bit.
        exact = self.exact = config.cold is not None and config.cold.format == "exact"
        shape = (count, config.num_layers, config.num_kv_heads, config.page_size, 2, config.head_dim + 2 * (not exact))
        self._page_size, self._free = config.page_size, list(range(count - 1, -1, -1))
        self.overlays: list[Overlay | None] = [None] * config.num_layers
        try:
            self.rows = torch.empty(shape, dtype=dtype if exact else torch.int8, pin_memory=device.type == "cuda")
            if count := config.overlay_rows:  # and each layer's in proportion to what it recalls
                sizes = [(shape[2], max(count * share // 64, 1), *shape[4:]) for share in config.recall_shares]
                self.overlays = [Overlay.of(torch.empty(size, dtype=dtype, device=device)) for size in sizes]
        except RuntimeError as error:  # as in Arena
            way = "use a smaller --host-cache-size or --overlay-size"
            raise CapacityError(
                f"the copies of what is compressed, or their overlay, find no place: {error}; {way}"
            ) from error
        self.lossy = np.zeros(num_pages, dtype=bool)  # whether the copy was computed over rounded K and V

    def put(self, pages: np.ndarray, exact: Tensor, lossy: np.ndarray) -> None:
        """Copy those of the pages that have none; exact [layers, 2, KV heads, pages, page_size, D]."""
        new = np.flatnonzero(self.slots[pages] < 0)
        if len(new) > len(self._free):
            _warn_full(len(self.rows), self.page_bytes)
            new = new[: len(self._free)]
        if len(new):
            slots = self._free[-len(new) :]
            chosen = exact.index_select(3, torch.from_numpy(new).to(exact.device)).permute(3, 0, 2, 4, 1, 5)
            self.rows.index_copy_(0, torch.tensor(slots), self._encode(chosen).to(self.rows.device))
            for overlay in filter(None, self.overlays):  # what they have of these slots was of other pages
                of, written = overlay.keys // self._page_size, torch.tensor(slots, device=chosen.device)
                overlay.keys.masked_fill_(torch.isin(of, written), -1)
            self.slots[pages[new]], self.lossy[pages[new]] = slots, lossy[new]  # not before all of it is done
            del self._free[-len(new) :]

    @property
    def overlay_bytes(self) -> int:
        """On the device."""
        return sum(x.nbytes for overlay in filter(None, self.overlays) for x in overlay)

    @property
    def overlay_hit_rate(self) -> float:
        """Of the rows that steps of decoding read, the share that was in the overlay."""
        counts = [overlay.counts for overlay in filter(None, self.overlays)]
        read, here = torch.stack(counts).sum(0).tolist() if counts else (0, 0)
        return here / max(read, 1)

    def get(self, pages: np.ndarray) -> Tensor:
        """What exact copies are of, [layers, 2, KV heads, pages, page_size, D]; each of the pages has one."""
        return self.rows[torch.from_numpy(self.slots[pages]).long()].permute(1, 4, 2, 0, 3, 5)

    def _encode(self, x: Tensor) -> Tensor:
        if self.rows.dtype == x.dtype:
            return x
        scale = (x.abs().amax(-1, keepdim=True).float() / 127).half()
        codes = (x.float() / scale.float().clamp_min(2.0**-24)).round_().clamp_(-127, 127).to(torch.int8)
        return torch.cat([codes, scale.contiguous().view(torch.int8)], dim=-1)

    def drop(self, page: int) -> None:
        """Forget the page's copy, if it has one."""
        if self.slots[page] >= 0:
            self._free.append(int(self.slots[page]))
            self.slots[page] = -1


@functools.cache
def _warn_full(num_slots: int, page_bytes: int) -> None:
    """Once."""
    log.warning(
        "copies of compressed pages fill their %.1f MB: what is compressed from now on cannot be recalled; a larger "
        "--host-cache-size holds more", num_slots * page_bytes / 1e6)  # fmt: skip
