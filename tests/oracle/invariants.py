"""The invariants of what memory/ builds, as its modules' docstrings state them.

Only tests ask for them, so they lie with the tests; here they become methods `check` of the classes. So does what
only tests count, and what makes bytes that are read after they were freed an error: they are NaN.
"""

from collections import Counter

import numpy as np

from memory.arena import Arena
from memory.buddy import BuddyAllocator
from memory.cache import KVCache
from memory.config import WARM_BITS
from memory.flash import FlashStore
from memory.frames import Frames, _order
from memory.radix import RadixTree


def check_tree(self):
    """Assert the invariants of the module's docstring. O(nodes + pages)."""
    nodes = [(self._top, -1)]
    queued, size = Counter(id(entry[-1]) for entry in self._heap), self._page_size
    for node, depth in nodes:
        children = list(self._children(node))
        nodes += ((child, depth + 1) for child in children)
        what = f"items [{node.start}, {node.end}) at depth {depth}, {len(children)} children"
        pages = (node.end if children else node.end + size - 1) // size - node.start // size
        heights = Counter(child.height for child in children)
        height = min(1 + max(heights, default=0), self._cap)
        got = [node.queued, len(node.values), len(node.edge), node.height, node.heights]
        want = [queued[id(node)], pages, (node.end - node.start) * self._width, height, heights]
        assert got == want, f"{what}: queued, values, bytes and heights are {got}, not {want}"
        assert node.pins.count(node.end) >= sum(bool(child.pins) for child in children), f"{what}: {node.pins}"
        assert depth <= (self._max_depth or depth), f"{what}: too deep"
        held = node.values and not self._evictable(node)
        assert depth < 0 or children or node.queued or held, f"{what}: a leaf that has nothing, or cannot go"
        for child in children:
            assert child.parent is node and child.start == node.end, f"{what}: a child at {child.start}"
            level = self._level(child)
            assert level[child.first] is child, f"{what}: {child.first!r} leads to another child"
            assert depth < 0 or child.edge[: self._width] == child.first, f"{what}: {child.first!r}"
            assert depth < 0 or sum(isinstance(key, bytes) for key in level) <= self._fan, f"{what}: fan-out"


def nodes_of(tree):
    """All nodes that have an edge or values, from the roots down."""
    nodes = list(tree._roots.values())
    for node in nodes:
        nodes += tree._children(node)
    return nodes


def check_arena(self, blocks, records):
    """Assert that exactly these blocks, and the blocks of these records, are in use."""
    self.allocator.check()
    self._records.check()
    assert sorted(records) == self._records.used_blocks(), "a record is lost, or of two pages"
    cut = {record >> self._shift << self.config.record_order for record in records}
    assert len(set(blocks)) == len(blocks), "two pages have the same block"
    assert sorted([*blocks, *cut]) == self.allocator.used_blocks(), "the allocator holds blocks that no page has"


def check_frames(self, used):
    """Assert the invariants; `used` are the pages of all owners, one entry for each."""
    owners = np.bincount(np.array(used, dtype=np.int64), minlength=len(self.bits))
    assert (owners == self.owners).all(), "owners of pages are counted wrong"
    held = np.flatnonzero(owners)
    assert sorted(held.tolist() + self._free_pages) == list(range(len(owners))), "a page is lost, or free and in use"
    bits = self.bits[held]
    exact, warm, three = (held[which] for which in (bits > WARM_BITS[0], bits <= WARM_BITS[0], bits == 3))
    for arena, pages in ((self._exact, exact), (self._warm, warm)):
        orders = [arena.allocator.block_order(start) for start in self._start[pages].tolist()]
        wanted = [_order(int(self.bits[page])) - self.is_half(page) for page in pages.tolist()]
        assert orders == wanted, "a frame has the wrong order"
    whole, codes = self._start[exact].tolist(), [*self._start[warm].tolist(), *self._high[three].tolist()]
    records = self._record[warm].tolist()
    if self._warm is self._exact:
        self._exact.check(whole + codes, records)
    else:
        self._exact.check(whole, [])
        self._warm.check(codes, records)


def check_cache(self, sequences):
    """Assert the invariants; `sequences` are all that are alive."""
    sequences = list(sequences)
    used = [page for sequence in sequences for page in sequence.pages]
    self.prefixes.tree.check()
    used += np.repeat(np.arange(len(self.prefixes._kept)), self.prefixes._kept).tolist()
    self._frames.check(used)
    filled = []
    for sequence in sequences:
        assert len(sequence.pages) >= self.config.pages_for(sequence.length), "a sequence lacks pages"
        if sequence.length % self.config.page_size:
            filled.append(sequence.pages[sequence.length // self.config.page_size])
            assert self._frames.is_exact(filled[-1]), "a page that is being filled is compressed"
    assert len(set(filled)) == len(filled), "two sequences fill one page"


def check_allocator(self):
    """Assert the invariants of the module's docstring, with the blocks in the message. O(blocks * orders)."""
    used = [(start, self._used[start] - 1, "used") for start in self.used_blocks()]
    free = [(start, order, "free") for order, starts in enumerate(self._free) for start in starts]
    text = ", ".join(f"{start} {kind} 2^{order}" for start, order, kind in sorted(used + free)[:64])
    fresh = BuddyAllocator(self.num_units, self.max_order)
    for start, order, _ in used:
        fits = start >> order << order == start and fresh.extend(start, order)
        assert fits, f"block {start} is not aligned, too long, or not alone there: {text}"
    assert (self.free_units, self._free) == (fresh.free_units, fresh._free), f"free should be others: {text}"


def free_codes(self, page):
    arena = self._exact if self.is_exact(page) else self._warm
    for table in (self._start, self._high) if self.bits[page] == 3 else (self._start,):
        start = int(table[page])
        _poison(arena, start, 1 << arena.allocator.block_order(start))
    PLAIN["_free_codes"](self, page)


def halve(self, page):
    half = 1 << self.config.exact_order - 1
    if not self.is_half(page):
        _poison(self._exact, int(self._start[page]) + half, half)
    PLAIN["halve"](self, page)


def complete(self, page):
    start = int(self._start[page])
    PLAIN["complete"](self, page)
    if self._start[page] != start:
        _poison(self._exact, start, 1 << self.config.exact_order - 1)


def _poison(arena, start, units):
    arena.bytes[:, :, :, start : start + units] = 0xFF  # NaN in every float type


PLAIN = {name: getattr(Frames, name) for name in ("_free_codes", "halve", "complete")}
Frames._free_codes, Frames.halve, Frames.complete = free_codes, halve, complete
BuddyAllocator.check = check_allocator
FlashStore.flush = lambda self: self._writer.submit(int).result()  # waits until all that is queued is written
RadixTree.check = check_tree
RadixTree.num_nodes = property(lambda self: sum(bool(node.edge) for node in nodes_of(self)))
RadixTree.num_values = property(lambda self: sum(len(node.values) for node in nodes_of(self)))
RadixTree.num_evictable = property(lambda self: sum(self._evictable(node) for node in nodes_of(self)))  # without a lock
Arena.check = check_arena
Frames.check = check_frames
KVCache.check = check_cache
