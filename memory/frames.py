"""Where each page's bytes are: the frame table over the arena, and the moves of pages from one format to a smaller one.

    page id     0    1    2    3        logical; the same in all layers, and kept when the bytes move
    bits        4   16   16    3        format: bits of an element (16 or 32: exact)
    start       8   16   32    2        first unit of its code run (3 bits: of the low two)
    high                       1        3 bits: unit of the high plane
    record      3              0        compressed: number of its record of scales
    owners      1    3    1    2        sequences that hold it, and the tree of prefixes: it is freed with the last

                0   1   2   3   4       8      12      16              32
    arena     | r | h3| low3|       free      | code0 | free | frame 1     | frame 2     | ...

The arena is one uint8 buffer [layers, K or V, heads, units, unit bytes]. A page has the same units in every layer, for
K, for V and in every head, so one allocation and one table entry place it everywhere; within one head's plane a frame
is [page_size, head_dim], and frames side by side are one contiguous run of tokens. That is why growth asks for the unit
behind the last page first: attention on a CPU reads a sequence piece by piece, and a GPU tile is one block copy.

Invariants (tests/oracle/invariants.py asserts them):
  - a page in use has blocks of its format's orders (an exact one that is half filled perhaps the lower half only), and
    a record exactly if it is compressed; no unit has two owners;
  - what a page's entries say beyond that is stale and never read.

Rejected: frames with all layers inside ([frame, layer, ...]): moves are one copy, but side by side frames are then not
contiguous in any layer; tokens outermost ([token, head, dim]): torch's matrix products read it at a third of the speed;
scales in a slab of their own: a tenth of the pool would be set aside for pages that may never be compressed, so records
are cut from units of the arena instead.
"""

import numpy as np
import torch
from torch import Tensor

from kernels.ops import LayerCache, Ops, WarmPages
from memory.arena import Arena
from memory.buddy import OutOfUnits
from memory.cold import HostCopies
from memory.config import WARM_BITS, CacheConfig
from memory.errors import AllocatorError

# Elements of exact pages that one call compresses: its temporaries are some ten times as many bytes.
_MOVE_ELEMENTS = 1 << 22


OutOfPages = OutOfUnits  # Normal flow: the scheduler waits or makes room, and retries.


class Frames:
    """The bytes of all pages. One owner: not safe for threads."""

    def __init__(self, config: CacheConfig, dtype: torch.dtype, device: torch.device, ops: Ops) -> None:
        """Allocates the arena. Raises CapacityError if the device does not have the bytes."""
        self.config = config
        self.device = device
        self._ops = ops
        self._exact = Arena(config, config.num_units, device)
        # Compressed pages share the arena of the exact ones unless they are to lie in the host's memory.
        shared = config.tiers is not None and config.tiers.shared
        # That one has twice the units the pool may use, so that holes between runs of several sizes do no harm.
        self._warm = Arena(config, 2 * config.num_units, device, shared=True) if shared else self._exact
        shape = (config.num_layers, 2, config.num_kv_heads, -1, config.page_size, config.head_dim)
        self._frames = self._exact.bytes.view(dtype).view(shape)
        self.page_shape = (*self._frames.shape[:3], *self._frames.shape[4:])  # of what `read` gives and `write` takes
        count = config.num_units // (WARM_BITS[-1] if config.tiers else config.exact_bits)
        self.copies = HostCopies(config, count, dtype, device)
        rows = self.copies.rows.unbind(1) if config.cold else [None] * config.num_layers
        parts = zip(self._frames, self._warm.bytes, rows, self.copies.overlays, config.recall_shares, strict=True)
        self.layers = [LayerCache(*exact, *units, *below) for exact, units, *below in parts]
        self.bits = np.zeros(count, dtype=np.uint8)
        self._start = np.zeros(count, dtype=np.int32)
        self._high = np.zeros(count if config.tiers else 0, dtype=np.int32)
        self._record = np.zeros(count if config.tiers else 0, dtype=np.int32)
        tables = (self._start, self.bits, self._high, self._record) if config.tiers else (self._start,)
        below = self.copies.slots.nbytes + self.copies.overlay_bytes if config.cold else 0
        self.table_bytes = sum(table.nbytes for table in tables) + below  # resident whatever the pages are
        self.owners = np.zeros(count, dtype=np.int32)
        self.lossy = np.zeros(count, dtype=bool)  # K and V are rounded, or were computed over some that are
        self._free_pages = list(range(count - 1, -1, -1))
        self._halves: set[int] = set()
        self._costs = np.array([config.page_cost(bits) for bits in range(config.exact_bits + 1)])

    def free_units(self, growing: int = 0) -> int:
        """Units of the pool that whole frames can be made of, wherever they lie now, once `growing` halved pages are
        whole: the second half of a page that stays halved takes in smaller blocks, but no frame. Below 0 where not even
        the growing ones can."""
        allocator, half = self._exact.allocator, 1 << self.config.exact_order - 1
        exact = int(np.count_nonzero(self.bits == self.config.exact_bits))
        small = allocator.used_units - 2 * half * exact + half * len(self._halves)
        idle = max(half * (len(self._halves) - growing) - small, 0)
        elsewhere = self.shared_bytes // self.config.unit_total_bytes
        return allocator.free_units - elsewhere - half * growing - idle

    @property
    def resident_bytes(self) -> int:
        """Bytes allocated to pages and scales, whole blocks, to the frame table and the overlay."""
        used = self._exact.allocator.used_units * self.config.unit_total_bytes
        return used + self.shared_bytes + self.table_bytes

    @property
    def shared_bytes(self) -> int:
        """Of the resident bytes, those in shared host memory."""
        used = self._warm.allocator.used_units if self._warm is not self._exact else 0
        return used * self.config.unit_total_bytes

    def alloc(self, after: int | None, missing: int, room: int) -> list[int]:
        """`missing` exact pages: behind the page `after` while there is place, else in runs as long as can be, with
        room for further ones behind. Raises OutOfPages, and changes nothing, if the pool is short."""
        if missing > len(self._free_pages):
            raise OutOfPages(f"{missing} pages wanted, {len(self._free_pages)} of {len(self.bits)} free")
        allocator, order = self._exact.allocator, self.config.exact_order
        last = int(self._start[after]) if after is not None and self.is_exact(after) else None
        starts: list[int] = []
        try:
            while (left := missing - len(starts)) > 0:
                if last is not None and allocator.extend(last + (1 << order), order):
                    first, count = last + (1 << order), 1
                else:
                    count = min(left, max(1, allocator.longest_run(order)))
                    first = allocator.alloc_run(count, order, room=room + left - count)
                starts.extend(range(first, first + (count << order), 1 << order))
                last = starts[-1]
        except BaseException:
            for start in starts:
                allocator.free(start)
            raise
        pages = [self._free_pages.pop() for _ in starts]
        self._start[pages] = starts
        self.bits[pages] = self.config.exact_bits
        self.owners[pages] = 1
        self.lossy[pages] = False
        return pages

    def num_copied(self, pages: np.ndarray) -> int:
        """How many of the pages are compressed and have a copy."""
        return int(np.count_nonzero((self.copies.slots[pages] >= 0) & (self.bits[pages] < self.config.exact_bits)))

    def is_exact(self, page: int) -> bool:
        return int(self.bits[page]) == self.config.exact_bits

    def is_half(self, page: int) -> bool:
        """Whether the page is exact and has the frame of its first page_size / 2 tokens only."""
        return page in self._halves

    def costs(self, pages: np.ndarray) -> np.ndarray:
        """Bytes of each page in one plane of one head."""
        found: np.ndarray = self._costs[self.bits[pages]]
        found[np.isin(pages, list(self._halves))] //= 2
        return found

    def halve(self, page: int) -> None:
        """Give back the second half of an exact page's frame, in which nothing is."""
        if page not in self._halves:
            self._exact.allocator.halve(int(self._start[page]))
            self._halves.add(page)

    def complete(self, page: int) -> None:
        """Give a halved page a whole frame, where it is if that is free, else elsewhere. Raises OutOfPages."""
        start, order = int(self._start[page]), self.config.exact_order
        if not self._exact.allocator.double(start):
            new = self._exact.allocator.alloc(order)
            half = 1 << order - 1
            self._exact.bytes[:, :, :, new : new + half] = self._exact.bytes[:, :, :, start : start + half]
            self._exact.allocator.free(start)
            self._start[page] = new
        self._halves.discard(page)

    def join(self, num_pages: int, growing: list[int]) -> None:
        """Make the halved pages `growing` whole, and have num_pages exact pages free in one piece each: bring the free
        units together if they lie otherwise. There must be as many."""
        allocator = self._exact.allocator
        doubled = [allocator.double(int(self._start[page])) for page in growing]
        self._halves.difference_update(growing)
        if not all(doubled) or allocator.num_free(self.config.exact_order) < num_pages:
            self._compact()

    def share(self, pages: list[int]) -> None:
        """Have one owner more for each of the pages, which are in use and differ."""
        assert self.owners[pages].all(), "a page that nobody owns is shared"
        self.owners[pages] += 1

    def is_known(self, page: int, exact: bool = False) -> bool:
        """Whether what was written to the page is still there to be read, in it or in its copy; exact: and was computed
        over exact K and V."""
        here = self.is_exact(page)
        known = here or (self.copies.exact and bool(self.copies.slots[page] >= 0))
        return known and not (exact and (self.lossy if here else self.copies.lossy)[page])

    def read(self, page: int) -> tuple[Tensor, bool]:
        """What was written to a page that `is_known`, [layers, 2, KV heads, page_size, D], and whether it was computed
        over rounded K and V."""
        if self.is_exact(page):
            return self._frames[:, :, :, int(self._start[page]) >> self.config.exact_order], bool(self.lossy[page])
        return self.copies.get(np.array([page]))[:, :, :, 0], bool(self.copies.lossy[page])

    def write(self, page: int, values: Tensor, lossy: bool) -> None:
        """Give an exact page its first tokens, [layers, 2, KV heads, tokens, D]."""
        target = int(self._start[page]) >> self.config.exact_order
        self._frames[:, :, :, target, : values.shape[3]] = values
        self.lossy[page] = lossy

    def restore(self, page: int) -> bool:
        """Make a compressed page what it was, by its copy; says whether there was a frame for it."""
        values, lossy = self.read(page)
        try:
            start = self._exact.allocator.alloc(self.config.exact_order)
        except OutOfPages:
            return False
        try:
            self._frames[:, :, :, start >> self.config.exact_order] = values
        except BaseException:
            self._exact.allocator.free(start)
            raise
        self._free_codes(page)
        self._warm.free_record(int(self._record[page]))
        self.bits[page], self._start[page], self.lossy[page] = self.config.exact_bits, start, lossy
        if self.config.cold and self.config.cold.exclusive:
            self.copies.drop(page)
        return True

    def free(self, page: int) -> None:
        """Take one owner from the page; with the last one everything that it has. AllocatorError if it has none."""
        if self.owners[page] < 1:
            raise AllocatorError(f"page {page} is in nobody's use: freed twice, or never allocated")
        self.owners[page] -= 1
        if self.owners[page]:
            return
        self._free_codes(page)
        if not self.is_exact(page):
            self._warm.free_record(int(self._record[page]))
        self.copies.drop(page)
        self._halves.discard(page)
        self.bits[page] = 0
        self._free_pages.append(page)

    def _free_codes(self, page: int) -> None:
        allocator = (self._exact if self.is_exact(page) else self._warm).allocator
        allocator.free(int(self._start[page]))
        if self.bits[page] == 3:
            allocator.free(int(self._high[page]))

    def compress(self, pages: np.ndarray, bits: int) -> None:
        """Make the pages, of any wider formats, ones of `bits`."""
        step = max(1, _MOVE_ELEMENTS * self.config.itemsize // self.config.page_bytes)
        for source in np.unique(self.bits[pages]).tolist():
            same = pages[self.bits[pages] == source]
            for first in range(0, len(same), step):
                self._compress_some(same[first : first + step], source, bits)

    def _compress_some(self, pages: np.ndarray, source: int, bits: int) -> None:
        """Pages of one format; few enough for the temporary copies that are made of them."""
        assert bits < source
        lossy = self.lossy[pages]
        self.lossy[pages] = True
        shape = (self.config.num_layers, self.config.num_kv_heads, len(pages), -1)
        kept, exact = [], None
        if source == self.config.exact_bits:
            exact = self._frames.index_select(3, self.tensor(self._start[pages] >> self.config.exact_order))
            if self.config.cold:
                self.copies.put(pages, exact, lossy)
        elif self.copies.exact and (self.copies.slots[pages] >= 0).all():
            exact = self.copies.get(pages).to(self.device)  # so that rounding does not add up
        for plane in range(2):
            if exact is not None:
                x = exact[:, plane].flatten(0, 2)
            else:
                *parts, records = (rows[:, plane].index_select(2, index) for rows, index in self._places(pages, source))
                codes = torch.cat(parts, dim=-1).flatten(0, 2)
                x = self._ops.decompress(codes, records.flatten(0, 2), source, plane == 0, self._frames)
            kept.append(self._ops.compress(x, bits, plane == 0))
        # The copies are made, so the new blocks may lie where the old ones did.
        for page in pages.tolist():
            self._free_codes(page)
            if source == self.config.exact_bits:
                self._record[page] = self._warm.alloc_record()
            self.bits[page] = bits
            self._start[page] = self._warm.allocator.alloc(_order(bits))
            if bits == 3:
                self._high[page] = self._warm.allocator.alloc(0)
        places = self._places(pages, bits)
        for plane, (codes, records) in enumerate(kept):
            parts = codes.view(shape).split([rows.shape[-1] for rows, _ in places[:-1]], dim=-1)
            for (rows, index), part in zip(places, (*parts, records.view(shape)), strict=True):
                rows[:, plane, ..., : part.shape[-1]].index_copy_(2, index.long(), part)

    def _places(self, pages: np.ndarray, bits: int) -> list[tuple[Tensor, Tensor]]:
        """For each plane of the pages' codes, then for their records: the arena as such rows, and which are theirs."""
        planes = ((1, self._start), (0, self._high)) if bits == 3 else ((_order(bits), self._start),)
        rows = [(self.config.unit_bytes << order, table[pages] >> order) for order, table in planes]
        rows.append((self.config.record_bytes, self._record[pages]))
        return [(self._warm.rows(width), self.tensor(index)) for width, index in rows]

    def _compact(self) -> None:
        """Bring the free units together; exact pages that are not halved get whole frames."""
        exact = np.flatnonzero(self.bits == self.config.exact_bits)
        mine = np.flatnonzero(self.bits) if self._warm is self._exact else exact
        three, warm = mine[self.bits[mine] == 3], mine[self.bits[mine] < self.config.exact_bits]
        frames = {int(self._start[page]): page in self._halves for page in exact.tolist()}
        places = self._exact.compact(frames)
        self._start[mine] = places[self._start[mine]]
        self._high[three] = places[self._high[three]]
        self._record[warm] = self._exact.moved_records(self._record[warm], places)

    def exact_frames(self, pages: np.ndarray) -> np.ndarray:
        """Numbers of the frames of exact pages."""
        return self._start.take(pages) >> self.config.exact_order

    def warm_pages(self, tables: list[np.ndarray], bits: int, rounded: bool = False) -> WarmPages:
        """Those of the sequences' pages that have `bits`; tables: the pages of each sequence; rounded: see
        `padded`."""
        pages = [table[self.bits[table] == bits] for table in tables]

        def rows(values: np.ndarray, shift: int = 0) -> Tensor:
            return self.tensor(padded([values[mine] >> shift for mine in pages], rounded))

        return WarmPages(
            bits=bits,
            record_bytes=self.config.record_bytes,
            codes=rows(self._start, _order(bits)),
            high=rows(self._high) if bits == 3 else None,
            records=rows(self._record),
            counts=self.tensor(np.array([len(mine) for mine in pages], dtype=np.int32)),
            copies=rows(self.copies.slots) if self.config.cold else None,
        )

    def tensor(self, values: np.ndarray) -> Tensor:
        """The values on the cache's device."""
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def _order(bits: int) -> int:
    """Of the block that holds a page's codes; of 3 bits, the low two."""
    return bits.bit_length() - 1


def padded(rows: list[np.ndarray], rounded: bool = False) -> np.ndarray:
    """[rows, longest] int32, zero past the end of each. rounded: as wide as a power of two."""
    width = max(1, *map(len, rows))
    table = np.zeros((len(rows), 1 << (width - 1).bit_length() if rounded else width), dtype=np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table
