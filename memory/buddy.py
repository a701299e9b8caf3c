"""The buddy arena: which units of one device buffer are free, and which belong to a page.

    unit    0   1   2   3   4   5   6   7   8   9  10  11  12         (num_units = 13)
          +-------+---+---+---------------+---------------+---+
          | used  |use|   |     free      |     used      |   |
          +-------+---+---+---------------+---------------+---+
    used    2   0   1   0   0   0   0   0   3   0   0   0   0         bytearray: order + 1 at the start of a used block
    free    order 0: {3, 12}   order 1: {}   order 2: {4}   order 3: {}     dicts of the starts of free blocks

Terms. The arena has the *units* 0 .. num_units - 1. A *block* is 2^order units that start at a multiple of 2^order; a
page of any format is one block, so pages of 8, 4 and 2 bits (orders k, k - 1, k - 2) share one arena with no boundary
between them. The *buddy* of a block is the other half of the block twice as long: start XOR 2^order. A *run* is several
blocks side by side: a sequence laid out in runs is read as a few contiguous pieces.

Invariants (`check()` asserts them):
  - every unit lies in exactly one block, used or free;
  - two free blocks are never buddies (they would have been merged), so an aligned block whose units are all free lies
    inside *one* free block: `extend` needs to look at no more than one block per order;
  - `_free_units` is the sum over the free blocks.
Used blocks are recorded in the bytearray only and free ones in the dicts only, so nothing can disagree.
num_units need not be a power of two: the arena starts as the few largest aligned blocks that cover it, and a block
whose buddy would lie past the end has none: no dict ever lists it.

The newest free block of an order is taken first (`dict.popitem`): the order is deterministic, and its memory is warm.

Rejected (steady state at 70 % use of 2^17 units, nanoseconds for alloc / free of one page; a prototype of this design,
measured beside them: 214 / 293; this code: `tools.bench buddy`):
  - a list of page ids, 247 / 169: no contiguity, and 2,515 / 1,485 for requests of 1..4096 pages;
  - stacks with lazy deletion, 393 / 454: a merge leaves stale entries that every later pop has to skip;
  - one big-int bitmap per order, 16,296 / 3,120: each change copies the whole number;
  - rounding a run up to a power of two wastes 20-28 % of the units: `alloc_run` gives the tail back instead.
"""

from __future__ import annotations

from memory.errors import AllocatorError

_MARKS = [bytes((order + 1,)) for order in range(64)]  # what `_used` holds at the start of a used block


class OutOfUnits(Exception):
    """No free block is long enough. Normal flow: the cache frees or demotes pages, or asks for less, and retries."""


class BuddyAllocator:
    """Hands out aligned blocks of 2^order units, and runs of them; merges buddies again when they are freed.

    Plain Python, no torch: it deals in numbers only. Not safe for threads: one owner calls it.
    """

    def __init__(self, num_units: int, max_order: int | None = None) -> None:
        """An arena with every unit free.

        num_units: units in the arena, any number >= 0. max_order: longest block (and so the longest run) is
        2^max_order units; default: as long as the arena allows.
        Raises ValueError for a negative number. Runtime and memory O(num_units).
        """
        if num_units < 0 or (max_order is not None and max_order < 0):
            raise ValueError(f"need num_units >= 0 and max_order >= 0, got {num_units} and {max_order}")
        longest = max(num_units.bit_length() - 1, 0)
        self.num_units = num_units
        self.max_order = longest if max_order is None else min(max_order, longest)
        self._used = bytearray(num_units)
        self._free: list[dict[int, None]] = [{} for _ in range(self.max_order + 1)]
        self._mergeable = [self._free[order:-1] for order in range(self.max_order + 1)]  # the dicts from `order` up
        self._free_units = num_units
        # From the back, so that the first allocation takes the lowest start.
        end = num_units
        while end:
            order = min(self.max_order, (end & -end).bit_length() - 1)
            end -= 1 << order
            self._free[order][end] = None

    @property
    def free_units(self) -> int:
        """Units in free blocks. O(1)."""
        return self._free_units

    @property
    def used_units(self) -> int:
        """Units in used blocks. O(1)."""
        return self.num_units - self._free_units

    def block_order(self, start: int) -> int:
        """The order of the used block at `start`. AllocatorError if there is none. O(1)."""
        value = self._used[start] if 0 <= start < self.num_units else 0
        if not value:
            raise AllocatorError(f"no used block starts at unit {start} (of {self.num_units})")
        return value - 1

    def longest_run(self, order: int) -> int:
        """How many blocks of `order` the longest free block holds; 0 if none. ValueError if order < 0. O(orders)."""
        if order < 0:
            raise ValueError(f"order must be >= 0, got {order}")
        for k in range(self.max_order, order - 1, -1):
            if self._free[k]:
                return 1 << (k - order)
        return 0

    def num_free(self, order: int) -> int:
        """How many blocks of `order` could be allocated as things lie. O(orders)."""
        return sum(len(self._free[k]) << (k - order) for k in range(order, self.max_order + 1))

    def alloc(self, order: int) -> int:
        """One block of 2^order units from the shortest free block that holds it; returns its start.

        Raises OutOfUnits if there is none, ValueError for a negative order. O(orders).
        """
        if order < 0:
            raise ValueError(f"order must be >= 0, got {order}")
        free = self._free
        k = order
        try:
            while not free[k]:
                k += 1
        except IndexError:
            raise OutOfUnits(self._shortage(1, order)) from None
        start, _ = free[k].popitem()
        while k > order:  # keep the left half, free the right one
            k -= 1
            free[k][start + (1 << k)] = None
        self._used[start] = order + 1
        self._free_units -= 1 << order
        return start

    def free(self, start: int) -> None:
        """Give the block at `start` back, and merge it with its buddies as far as they are free.

        Raises AllocatorError if no used block starts there (freed twice, or never handed out). O(orders).
        """
        used = self._used
        try:
            value = used[start]
        except IndexError:
            value = 0
        if not value or start < 0:
            raise AllocatorError(f"no used block starts at unit {start}: freed twice, or never allocated")
        used[start] = 0
        order = value - 1
        size = 1 << order
        self._free_units += size
        for starts in self._mergeable[order]:
            buddy = start ^ size
            if buddy not in starts:
                break
            del starts[buddy]
            start &= buddy  # the lower of the two
            size += size
        else:
            starts = self._free[self.max_order]
        starts[start] = None

    def alloc_run(self, count: int, order: int, *, room: int = 0) -> int:
        """`count` blocks of 2^order units side by side; returns the first start. Each is freed on its own.

        room: blocks wanted free behind the run, so that the sequence can grow there by `extend`. Taken is the shortest
        free block that holds count + room, else the longest one, if it holds count; what is not used of it stays free.
        Raises OutOfUnits if no free block holds count (`longest_run` says what would fit), ValueError for count < 1 or
        a negative number. O(orders + count).
        """
        if count < 1 or order < 0 or room < 0:
            raise ValueError(f"need count >= 1, order >= 0, room >= 0, got {count}, {order}, {room}")
        shortest = order + (count - 1).bit_length()
        roomy = order + (count + room - 1).bit_length()
        free, top = self._free, self.max_order
        k = roomy
        while k <= top and not free[k]:
            k += 1
        if k > top:  # nowhere with that much room: then the longest block there is
            k = min(roomy - 1, top)
            while k >= shortest and not free[k]:
                k -= 1
            if k < shortest:
                raise OutOfUnits(self._shortage(count, order))
        start, _ = free[k].popitem()
        # [start, start + units)         blocks of `order`, ours
        # [start + units, start + 2^k)   the tail stays free. At offset o the longest aligned block has as many units as
        #                                o's lowest set bit; the buddies of these blocks are not free
        units = offset = count << order
        self._used[start : start + units : 1 << order] = _MARKS[order] * count
        end = 1 << k
        while offset < end:
            size = offset & -offset
            free[size.bit_length() - 1][start + offset] = None
            offset += size
        self._free_units -= units
        return start

    def extend(self, start: int, order: int) -> bool:
        """Claim exactly the block [start, start + 2^order) if its units are free; says whether it did.

        For a sequence that grows: `start` is the end of its last run. Past the end of the arena nothing is free.
        Raises ValueError if start is negative or no multiple of 2^order. O(orders).
        """
        if order < 0 or start < 0 or start >> order << order != start:
            raise ValueError(f"start must be a multiple >= 0 of 2^order, got start {start}, order {order}")
        if start >= self.num_units:
            return False
        free = self._free
        for k in range(order, self.max_order + 1):
            first = start >> k << k
            if first not in free[k]:
                continue
            del free[k][first]
            while k > order:  # free the half that does not hold `start`
                k -= 1
                free[k][(start >> k ^ 1) << k] = None
            self._used[start] = order + 1
            self._free_units -= 1 << order
            return True
        return False

    def halve(self, start: int) -> int:
        """Give back the upper half of the used block at `start`; returns where that began. The lower half stays used.

        Raises AllocatorError if no used block of two units or more starts there. O(1).
        """
        order = self.block_order(start) - 1
        if order < 0:
            raise AllocatorError(f"the block at unit {start} is one unit, which has no half")
        self._used[start] = order + 1
        self._free[order][start + (1 << order)] = None
        self._free_units += 1 << order
        return start + (1 << order)

    def double(self, start: int) -> bool:
        """Make the used block at `start`, a lower half, one with its buddy if that is free; says whether it did.

        Raises AllocatorError if no used block starts there. O(orders).
        """
        order = self.block_order(start)
        upper = start + (1 << order)
        if start >> order & 1 or not self.extend(upper, order):
            return False
        self._used[upper] = 0
        self._used[start] = order + 2
        return True

    def check(self) -> None:
        """Assert the invariants of the module's docstring, with the blocks in the message. O(blocks log blocks)."""
        blocks = self._blocks()
        end = 0  # of the blocks so far
        for start, order, kind in blocks:
            size = 1 << order
            assert start == end, f"blocks overlap or leave a gap at unit {min(start, end)}: {_text(blocks)}"
            assert order <= self.max_order, f"block {start} is longer than 2^{self.max_order} units: {_text(blocks)}"
            assert start % size == 0, f"block {start} is not aligned to its {size} units: {_text(blocks)}"
            if kind == "free" and order < self.max_order:
                assert start ^ size not in self._free[order], f"block {start} and its buddy are free: {_text(blocks)}"
            end = start + size
        assert end == self.num_units, f"the blocks end at {end} of {self.num_units} units: {_text(blocks)}"
        free_units = sum(1 << order for _, order, kind in blocks if kind == "free")
        assert free_units == self._free_units, f"{free_units} units free, counted {self._free_units}: {_text(blocks)}"

    def _blocks(self) -> list[tuple[int, int, str]]:
        """All blocks by start: (start, order, "used" or "free")."""
        used = [(start, value - 1, "used") for start, value in enumerate(self._used) if value]
        free = [(start, order, "free") for order, starts in enumerate(self._free) for start in starts]
        return sorted(used + free)

    def _shortage(self, count: int, order: int) -> str:
        return (
            f"no free block holds {count} x 2^{order} units: {self._free_units} of {self.num_units} are free, "
            f"the longest run has {self.longest_run(0)}"
        )


def _text(blocks: list[tuple[int, int, str]], limit: int = 64) -> str:
    """The blocks for a message, e.g. "0 used 2^1, 2 free 2^0"; at most `limit` of them."""
    text = ", ".join(f"{start} {kind} 2^{order}" for start, order, kind in blocks[:limit])
    return text + (", ..." if len(blocks) > limit else "")
