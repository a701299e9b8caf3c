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

Invariants (tests/oracle/invariants.py asserts them: what is free is what the used blocks leave, in blocks as long as
can be):
  - every unit lies in exactly one block, used or free;
  - two free blocks are never buddies (they would have been merged), so an aligned block whose units are all free lies
    inside *one* free block: `extend` needs to look at no more than one block per order;
  - `free_units` is the sum over the free blocks.
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

from memory.errors import AllocatorError

_MARKS = [bytes((order + 1,)) for order in range(64)]  # what `_used` holds at the start of a used block


class OutOfUnits(Exception):
    """No free block is long enough. Normal flow: the cache frees or demotes pages, or asks for less, and retries."""


class BuddyAllocator:
    """Hands out aligned blocks of 2^order units, and runs of them; merges buddies again when they are freed.

    Plain Python, no torch: it deals in numbers only. Not safe for threads: one owner calls it.
    """

    def __init__(self, num_units: int, max_order: int = 63, unit: str = "unit") -> None:
        """An arena with every unit free.

        num_units: units in the arena, any number >= 0. max_order: longest block (and so the longest run) is
        2^max_order units, or as long as the arena allows. unit: what one is, for messages.
        Runtime and memory O(num_units).
        """
        self.num_units = self.free_units = num_units  # in all; in free blocks
        self.max_order = min(max_order, max(num_units.bit_length() - 1, 0))
        self._unit = unit
        self._used = bytearray(num_units)
        self._free: list[dict[int, None]] = [{} for _ in range(self.max_order + 1)]
        self._mergeable = [self._free[order:-1] for order in range(self.max_order + 1)]  # the dicts from `order` up
        # From the back, so that the first allocation takes the lowest start.
        end = num_units
        while end:
            order = min(self.max_order, (end & -end).bit_length() - 1)
            end -= 1 << order
            self._free[order][end] = None

    @property
    def used_units(self) -> int:
        """Units in used blocks. O(1)."""
        return self.num_units - self.free_units

    def block_order(self, start: int) -> int:
        """The order of the used block at `start`. AllocatorError if there is none. O(1)."""
        value = self._used[start] if 0 <= start < self.num_units else 0
        if not value:
            raise AllocatorError(f"no used block starts at unit {start} (of {self.num_units})")
        return value - 1

    def longest_run(self, order: int) -> int:
        """How many blocks of `order`, >= 0, the longest free block holds; 0 if none. O(orders)."""
        return next((1 << (k - order) for k in range(self.max_order, order - 1, -1) if self._free[k]), 0)

    def used_blocks(self) -> list[int]:
        """The starts of all used blocks, in their order. O(units)."""
        return [start for start, value in enumerate(self._used) if value]

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
        self.free_units -= 1 << order
        return start

    def free(self, start: int) -> None:
        """Give the block at `start` back, and merge it with its buddies as far as they are free.

        Raises AllocatorError if no used block starts there (freed twice, or never handed out). O(orders).
        """
        used = self._used
        order = used[start] - 1 if 0 <= start < self.num_units else -1
        if order < 0:
            raise AllocatorError(f"{self._unit} {start} is freed twice, or was never allocated")
        used[start] = 0
        size = 1 << order
        self.free_units += size
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
        roomy = order + (count + room - 1).bit_length()
        free, top = self._free, self.max_order
        k = roomy
        while k <= top and not free[k]:
            k += 1
        if k > top:  # nowhere with that much room: then the longest block there is
            k = order + self.longest_run(order).bit_length() - 1
            if k < order + (count - 1).bit_length():
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
        self.free_units -= units
        return start

    def extend(self, start: int, order: int) -> bool:
        """Claim exactly the block [start, start + 2^order) if its units are free; says whether it did.

        For a sequence that grows: `start` is the end of its last run. Past the end of the arena nothing is free.
        Raises ValueError if start is negative or no multiple of 2^order. O(orders).
        """
        if order < 0 or start < 0 or start >> order << order != start:
            raise ValueError(f"start must be a multiple >= 0 of 2^order, got start {start}, order {order}")
        free = self._free
        k = next((k for k in range(order, self.max_order + 1) if start >> k << k in free[k]), -1)
        if k < 0:
            return False
        del free[k][start >> k << k]
        while k > order:  # free the half that does not hold `start`
            k -= 1
            free[k][(start >> k ^ 1) << k] = None
        self._used[start] = order + 1
        self.free_units -= 1 << order
        return True

    def halve(self, start: int) -> None:
        """Give back the upper half of the used block at `start`. The lower half stays used.

        Raises AllocatorError if no used block of two units or more starts there. O(1).
        """
        order = self.block_order(start) - 1
        if order < 0:
            raise AllocatorError(f"the block at unit {start} is one unit, which has no half")
        upper = start + (1 << order)
        self._used[start] = self._used[upper] = order + 1
        self.free(upper)

    def double(self, start: int) -> bool:
        """Make the used block at `start`, a lower half, one with its buddy if that is free; says whether it did.

        Raises AllocatorError if no used block starts there. O(orders).
        """
        order = self.block_order(start)
        upper = start + (1 << order)
        if start >> order & 1 or not self.extend(upper, order):
            return False
        self._used[start], self._used[upper] = order + 2, 0
        return True

    def _shortage(self, count: int, order: int) -> str:
        found = f"{self.free_units} of {self.num_units} are free, the longest run has {self.longest_run(0)}"
        return f"no free block holds {count} x 2^{order} units: {found}"
