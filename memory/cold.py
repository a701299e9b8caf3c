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
        self.overlay: Overlay | None = None  # of all layers
        self.overlays: list[Overlay | None] = [None] * config.num_layers  # each layer's part of it
        try:
            self.rows = torch.empty(shape, dtype=dtype if exact else torch.int8, pin_memory=device.type == "cuda")
            if count := config.overlay_rows:
                rows = torch.empty(*shape[1:3], count, *shape[4:], dtype=dtype, device=device)
                self.overlay = Overlay.of(rows)
                parts = zip(*self.overlay[:3], strict=True)
                self.overlays = [Overlay(*part, self.overlay.counts) for part in parts]
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
            if self.overlay is not None:  # what it has of these slots was of other pages
                of, written = self.overlay.keys // self._page_size, torch.tensor(slots, device=chosen.device)
                self.overlay.keys.masked_fill_(torch.isin(of, written), -1)
            self.slots[pages[new]], self.lossy[pages[new]] = slots, lossy[new]  # not before all of it is done
            del self._free[-len(new) :]

    @property
    def overlay_bytes(self) -> int:
        """On the device."""
        return sum(x.nbytes for x in self.overlay or ())

    @property
    def overlay_hit_rate(self) -> float:
        """Of the rows that steps of decoding read, the share that was in the overlay."""
        read, here = self.overlay.counts.tolist() if self.overlay else (0, 0)
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
