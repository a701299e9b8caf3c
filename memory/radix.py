"""The radix tree: which pages of earlier sequences a new one can use.

    page_size 4    insert(abcdefghij) with the values A B C, where C is for the two items that page 2 has so far

                   [abcdefghij] A B C

                   insert(abcdefxyz) with A' D E splits the edge after f, and gives A' back, for A is there
                   [abcdef] A                 A value lies where the last item of its page lies. Page 1 begins above the
                    |      |                  split and ends below it, so each branch has its own: B for efgh, D for
                   [ghij]  [xyz]              efxy.
                    B C     D E

                   match(abcdefgh..)  8 items: A B; no tail
                   match(abcdefg..)   7 items: A; B is the tail, a value that covers the 3 items behind A
                   evict(4)           C B E D; [abcdef] has no value for ef any more, and is cut to [abcd] A

    max_children 2, children whose first items are 2 3 5 7: 5 = 101 and 7 = 111 found the level full, and went to the
                   one below it for the last digit of their number; there, the digit before it would decide
                   {2: . 3: .  1: {5: . 7: .}}

Terms. A *key* is the bytes of a sequence of *items* of one size (tokens: little-endian int32). A *value* stands for a
*page*: page_size items of a sequence, the last page perhaps fewer. It covers all that comes before the page, too:
pages are shared by sequences that are alike from the start. A *namespace* has a root of its own: what was computed by
another model, in another format or for another tenant is never found.

How it works. A leaf that a sequence continues is extended in place, so a chat of many turns is one edge, and paths are
only as long as texts branch. A lock is a number, the place in an edge where a match ended, and in the parent the place
where the child begins; a parent is told of a child's first lock and last unlock only. Locks change no edge and no
depth. Time and score of a use are recorded where it ended, and handed up when that node is evicted: nobody asks an
inner node for them, and when it has become a leaf, it has got them all. Leaves wait in a heap, under the priority they
had when they got there, and are asked for it again when they come up.

Invariants (tests/oracle/invariants.py asserts them):
  - every edge but a root's has items, and no two children of a node begin with the same;
  - a node has one value for each page that ends in its edge, and a leaf one for a rest behind them: so whatever is
    matched inside a page has a tail, there or further down;
  - each leaf that has a value without a lock is in the heap, once;
  - a level has at most max_children children and as many levels below it, a path at most max_depth nodes;
  - heights are what a walk finds.

Runtime: match O(bytes + nodes on the path), insert O(height) more; lock O(nodes up to one that is locked); evict O(log
leaves) a value. n children are O(log n) levels deep, or if their items agree in many low digits, as tokens do not, as
deep as an item has digits. Nothing recurses.

Rejected (figures: `tools.bench radix`):
  - a dict of pages by hash chain: hashes the whole prompt, shares whole pages only, and has to compare the tokens;
  - comparing item by item: a loop in Python, where `bytes.startswith` is one memcmp of the whole edge;
  - splitting edges while looking up, or for a lock: reading becomes writing, and paths grow by who looked;
  - joining a node with the one child that eviction left: the rest of one text would inherit the score of the prefix
    that many had in common, and the next text would split them again;
  - times along the whole path at each use; a walk through the tree for leaves at each eviction;
  - levels by ranges of items, as in a B-tree: these have to be balanced, digits do not.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from sys import maxsize
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

V = TypeVar("V")


@dataclass(eq=False, slots=True)
class Node(Generic[V]):
    """Items [start, end) of all sequences that pass here. Opaque but to the tree and to `keep`, which may read `start`,
    `end`, `values`, `score` (the highest that an insert gave to what ends here, or did before it was evicted further
    down) and `last_used` (the time of the tree's clock when a lock or insert ended here, or there)."""

    parent: Any  # Node[V]; the top has None
    first: bytes  # its key among the parent's children: the first item of the edge, or a root's namespace
    start: int
    end: int
    edge: bytearray  # the items; a bytearray, so that a leaf grows and shrinks at its end without a copy
    values: list[V]  # of the pages whose last item lies in the edge
    children: Any = field(default_factory=dict)  # a level: {first: Node[V]}, and {digit: level} when it has been full
    heights: dict[int, int] = field(default_factory=dict)  # how many children have this height; a leaf has none
    height: int = 1  # nodes on the longest path down, this one included
    pins: tuple[int, ...] = ()  # where locked matches end in the edge; `end` for each pinned child
    queued: bool = False
    last_used: int = 0
    score: float = 0.0


class Match(NamedTuple):
    """What `match` found. It may be shortened with `_replace`, and is good until the tree changes, or once locked."""

    node: Node[Any]  # the deepest one reached
    length: int  # items
    values: list[Any]  # of the length // page_size full pages
    tail: Any  # a value whose page covers the other length % page_size items too; None if there are none


class RadixTree(Generic[V]):
    """Sequences of items, and a value for each of their pages. Not safe for threads: one owner calls it."""

    def __init__(
        self, page_size: int, *, item_bytes: int = 4, max_children: int | None = 8, max_depth: int | None = None,
        keep: Callable[[Node[V]], Any] = attrgetter("last_used")) -> None:  # fmt: skip
        """An empty tree.

        page_size: items in a page. item_bytes: bytes of an item. max_children: entries of an inner level at most;
        max_depth: nodes on a path at most, beyond which nothing is inserted; None: no bound.
        keep: the priority of a leaf, the lowest is evicted first, and of equals the least recently used. It may change:
        what rose is seen when the leaf comes up, what sank after a quarter as many evictions as there are leaves.
        Raises ValueError for numbers that make no sense.
        """
        if page_size < 1 or item_bytes < 1 or (max_children or 2) < 2 or (max_depth or 1) < 1:
            raise ValueError(f"need 1, 2 children or more, got {page_size=} {item_bytes=} {max_depth=} {max_children=}")
        self._page_size, self._width, self._max_depth, self._keep = page_size, item_bytes, max_depth, keep
        self._fan, self._cap, self._clock = max_children or maxsize, max(max_depth or 0, 20) + 2, 0
        self._sinking = 0  # values evicted since a priority was seen to have sunk, and not all were looked at again
        self._heap: list[tuple[Any, int, int, Node[V]]] = []
        self._top: Node[V] = Node(None, b"", 0, 0, bytearray(), [])  # its children are the roots, by namespace
        self._roots: dict[bytes, Node[V]] = self._top.children

    @property
    def depth(self) -> int:
        """Nodes on the longest path, roots and levels not counted. Counts to 20, or max_depth if that is more. O(1)."""
        return max(self._top.height - 2, 0)

    def match(self, key: bytes, namespace: bytes = b"") -> Match:
        """The longest beginning of `key` that the tree has, to the item. Changes nothing."""
        node = self._roots.get(namespace) or Node(self._top, namespace, 0, 0, bytearray(), [])
        width, fan = self._width, self._fan
        values: list[V] = []
        position, size = 0, len(key)
        while position < size:
            first, level = key[position : position + width], node.children
            child = level.get(first)
            if child is None and level:
                number = int.from_bytes(first, "little")
                while child is None and (level := level.get(number % fan)):
                    child, number = level.get(first), number // fan
            if child is None:
                break
            node, edge = child, child.edge
            values += node.values
            if not key.startswith(edge, position):
                count = min(size - position, len(edge))
                differ = np.frombuffer(key, np.uint8, count, position) != np.frombuffer(edge, np.uint8, count)
                alike = int(differ.argmax())
                position += alike if differ[alike] else count  # not so where the key ends in the edge
                break
            position += len(edge)
        length = position // width
        full, tail, below = length // self._page_size, None, node
        if length % self._page_size:
            while len(values) <= full:  # the page ends further down, on any path
                below = next(self._children(below))
                values += below.values
            tail = values[full]
        del values[full:]
        return tuple.__new__(Match, (node, length, values, tail))  # Match(...) goes through Python, and costs twice

    def lock(self, match: Match) -> Match:
        """Keep the full pages of the match, `match.length // page_size` values and no more, until `unlock` gets what
        this returns. A use. The tree must not have changed since the match, which may have been shortened."""
        self._use(match.node, 0.0)
        self._hold(match, 1)
        return match

    def unlock(self, match: Match) -> None:
        """End one lock. The edges may have been split, extended or cut since."""
        self._hold(match, -1)

    def insert(
        self, key: bytes, values: Sequence[V], namespace: bytes = b"", *, score: float = 0.0,
        better: Callable[[V, V], bool] | None = None) -> list[V]:  # fmt: skip
        """Add a sequence, and one reference to each of its values; returns the values that the tree does not keep.

        values: one for each page, ceil(items / page_size). score: importance of the sequence; NaN counts as none.
        Not kept is a value for a page that the tree has already, unless better(new, old): then the old one is returned;
        what max_depth refuses; and the tree's own value for a last page that this sequence fills further.
        Raises ValueError if the numbers of bytes and values do not fit each other, and changes nothing then.
        """
        page_size, width = self._page_size, self._width
        size, given = len(key) // width, list(values)
        if len(key) % width or len(given) != -(-size // page_size):
            need = f"a multiple of {width} bytes, and a value for each page of {page_size} items"
            raise ValueError(f"need {need}, got {len(key)} bytes and {len(given)} values")
        node, length, _, _ = self.match(key, namespace)
        pages, ends = length // page_size, bool(node.values) and length == node.end and not node.heights
        above: Node[V] | None = node
        while better and above:
            begin = above.start // page_size
            for i, old in enumerate(above.values[: (len(given) if ends and length == size else pages) - begin]):
                if better(given[begin + i], old):
                    above.values[i], given[begin + i] = given[begin + i], old
            above = above.parent
        if length == size or not (ends or self._fits(node, length)):
            self._use(node, score)
            return given
        kept, given = given[pages:], given[:pages]
        if ends:  # a leaf, which the sequence continues
            begin = pages - node.start // page_size
            given += node.values[begin:]
            node.values[begin:] = kept
            node.edge += key[length * width :]
            node.end = size
        else:
            if length < node.end:
                node = self._split(node, length)
            elif namespace not in self._roots:
                self._roots[namespace] = node
                self._resize(self._top, 0, 1)
            first, level = key[length * width : (length + 1) * width], node.children
            number = int.from_bytes(first, "little")
            while len(level) >= self._fan:
                level, number = level.setdefault(number % self._fan, {}), number // self._fan
            self._resize(node, 0, 1)
            node = level[first] = Node(node, first, length, size, bytearray(key[length * width :]), kept)
        self._use(node, score)
        self._queue(node)
        return given

    def evict(self, count: int) -> list[V]:
        """Take `count` values, or all that no lock needs, from the ends of leaves, worst first; returns them."""
        freed: list[V] = []
        heap = self._heap
        while heap and len(freed) < count:
            if self._sinking > max(64, len(heap) // 4):
                self._sinking = 0
                heap[:] = [self._entry(node) for *_, node in heap]
                heapify(heap)
            node = heap[0][-1]
            node.queued = self._evictable(node) > 0
            if not node.queued:
                heappop(heap)
            elif (entry := self._entry(node)) > heap[0]:
                heapreplace(heap, entry)
            else:
                self._sinking += self._sinking > 0 or entry < heap[0]
                freed.append(node.values.pop())
                if not node.values:
                    heappop(heap)
                self._trim(node)
        return freed

    def _use(self, node: Node[V], score: float) -> None:
        node.last_used = self._clock = self._clock + 1
        node.score = max(node.score, score)  # NaN is never more

    def _evictable(self, node: Node[V]) -> int:
        """How many of its values no pin needs."""
        begin = node.start // self._page_size
        return len(node.values) + begin - max(node.pins, default=node.start) // self._page_size

    def _hold(self, match: Match, step: int) -> None:
        """Pin (1) or unpin (-1) the path to where the match ends. A parent is told of a child's first pin and last."""
        node, length = match.node, match.length
        while node:
            while node.edge and node.start >= length:
                node = node.parent
            pins = (*node.pins, length)
            if step < 0:
                assert length in node.pins, f"unlocked at item {length}, but locked at {node.pins}"
                i = node.pins.index(length)
                pins = node.pins[:i] + node.pins[i + 1 :]
            node.pins = pins
            if node.values and not node.heights:
                self._queue(node)
            if len(pins) != max(step, 0):
                break
            node, length = node.parent, node.start

    def _queue(self, node: Node[V]) -> None:
        if not node.queued:
            node.queued = True
            heappush(self._heap, self._entry(node))

    def _entry(self, node: Node[V]) -> tuple[Any, int, int, Node[V]]:
        return self._keep(node), node.last_used, id(node), node

    def _fits(self, node: Node[V], length: int) -> bool:
        """Whether a new leaf may leave the path at item `length`, in the edge of `node` or at its end."""
        below = node.height if length < node.end else 1
        while self._max_depth and node.edge:
            below, node = below + 1, node.parent
        return below <= (self._max_depth or below)

    def _split(self, node: Node[V], length: int) -> Node[V]:
        """Cut the edge of `node` at item `length`. Returns the new upper part; `node` stays the lower one."""
        cut, pages = (length - node.start) * self._width, length // self._page_size - node.start // self._page_size
        upper = replace(node, end=length, edge=node.edge[:cut], values=node.values[:pages], queued=False, heights={})
        del node.edge[:cut], node.values[:pages]
        upper.pins = tuple(pin for pin in node.pins if pin <= length)
        node.pins = tuple(pin for pin in node.pins if pin > length)
        upper.pins += (length,) if node.pins else ()
        node.start, node.parent, node.first = length, upper, bytes(node.edge[: self._width])
        self._level(upper)[upper.first] = upper
        upper.children = {node.first: node}
        self._resize(upper, 0, node.height)
        return upper

    def _trim(self, node: Node[V]) -> None:
        """Cut a leaf's edge to the pages that it still has. Without any it goes, and its parent may be next."""
        while not (node.values or node.heights or node is self._top):
            parent: Node[V] = node.parent
            del self._level(node)[node.first]
            self._resize(parent, node.height, 0)
            parent.score, parent.last_used = max(parent.score, node.score), max(parent.last_used, node.last_used)
            node = parent
        if node.values and not node.heights:
            node.end = (node.start // self._page_size + len(node.values)) * self._page_size
            del node.edge[(node.end - node.start) * self._width :]
            node.children = {}
            self._queue(node)

    def _level(self, node: Node[V]) -> Any:
        """The dict that has the node, or one of the same first item, among its parent's children."""
        level, number = node.parent.children, int.from_bytes(node.first, "little")
        while node.first not in level:
            level, number = level[number % self._fan], number // self._fan
        return level

    def _children(self, node: Node[V]) -> Iterator[Node[V]]:
        levels = [node.children]
        for level in levels:
            yield from (child for child in level.values() if isinstance(child, Node))
            levels += (child for child in level.values() if isinstance(child, dict))

    def _resize(self, node: Node[V], old: int, new: int) -> None:
        """A child of `node` whose height was `old` (0: it is new) now has `new` (0: it is gone). Heights count to a
        cap, so that what changes far down a path is no concern of those far up."""
        while node and old != new:
            heights = node.heights
            for height, step in ((new, 1), (old, -1)):
                heights[height] = heights.get(height, 0) + step
                if not heights[height] or not height:
                    del heights[height]
            old, new = node.height, min(1 + max(heights, default=0), self._cap)
            node.height, node = new, node.parent
