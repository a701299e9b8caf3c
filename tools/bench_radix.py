"""`tools.bench radix`: what a lookup in the radix tree costs, beside three other structures, and what each bound gains.

Shapes of the tree, for sequences of one length; what a sequence has for itself is at most 64 tokens, or half of it:
    chat    8 system prompts with a history; dialogues leave it at one of 4 turns
    code    one header before 200 files; versions of a file leave it at one of 4 places

A lookup gets an int32 array, the tokens of a stored sequence and one more, and finds all of the sequence. Times are CPU
time of this process, medians over interleaved rounds. The others store the same sequences, with the same values:
    plain        a radix tree that compares whole edges by memcmp, too, with none of the three improvements: dicts of
                 any size, paths of any length, and each lookup writes its time to all nodes on the path
    page_hash    a dict of 64-token pages by the hash of the page and all before it; compares the page it finds; whole
                 pages only, so a prompt of fewer tokens costs it nothing and finds nothing
    token_tree   a radix tree that compares token by token. It holds no more sequences than have 20 million tokens in
                 all: its inserts cost as much as its lookups. Those looked up are among them

The improvements, each with (`on`) and without: max_children 8; max_depth 4; lazy updates, where a use is written to one
node only. `lock` is a lookup, the lock and the unlock, while others hold the shared part; `matched` the tokens found.
For them there is a third shape, whose paths are as long as the text:
    comb    one text; in its second half, a version leaves it at every 16th token
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from memory.radix import Match, Node, RadixTree

_PAGE = 64
_QUERIES = 16
_ROUNDS = 9
_DEPTH = 4  # max_depth where that is measured


def measure(tokens: Sequence[int], sequences: Sequence[int], seed: int, nodes: int = 100_000) -> dict[str, Any]:
    """Three tables: "rows", "improvements" and "floors".

    tokens, sequences: one row for each pair and shape; improvements with the most sequences, but at most 10,000.
    nodes: of the tree that is evicted from.
    """
    cases = [(shape, length, count) for shape in _SHAPES for length in tokens for count in sequences]
    few = min(10_000, max(sequences))
    gc.disable()  # a collection would walk through all nodes in the middle of a lookup
    try:
        return {
            "rows": [_compare(*case, seed) for case in cases],
            "improvements": [row for shape in _ALL for length in tokens for row in _improve(shape, length, few, seed)],
            "floors": [*(_hit(*hit, min(1000, few), seed) for hit in _FLOORS), _eviction(nodes, seed)],
        }
    finally:
        gc.enable()


def _chat(tokens: int, rng: np.random.Generator) -> Callable[[], np.ndarray]:
    own = min(tokens // 2, _PAGE)
    histories = rng.integers(0, 32000, (8, tokens), dtype=np.int32)

    def draw() -> np.ndarray:
        start = tokens - own + own // 4 * int(rng.integers(4))
        return np.concatenate((histories[rng.integers(8), :start], rng.integers(0, 32000, tokens - start, np.int32)))

    return draw


def _code(tokens: int, rng: np.random.Generator) -> Callable[[], np.ndarray]:
    own = min(tokens // 2, _PAGE)
    files = rng.integers(0, 32000, (200, tokens), dtype=np.int32)
    files[:, : tokens // 4] = files[0, : tokens // 4]

    def draw() -> np.ndarray:
        start = tokens - own + own // 4 * int(rng.integers(4))
        return np.concatenate((files[rng.integers(200), :start], rng.integers(0, 32000, tokens - start, np.int32)))

    return draw


def _comb(tokens: int, rng: np.random.Generator) -> Callable[[], np.ndarray]:
    text, step = rng.integers(0, 32000, tokens, dtype=np.int32), min(tokens // 2, 16)

    def draw() -> np.ndarray:
        start = step * int(rng.integers(tokens // 2 // step, tokens // step))
        return np.concatenate((text[:start], rng.integers(0, 32000, step, np.int32)))

    return draw


_SHAPES = {"chat": _chat, "code": _code}
_ALL = {**_SHAPES, "comb": _comb}
_FLOORS: list[tuple[int, float | None]] = [(16, None), (128, 3.0), (32768, 20.0)]


class _Node:
    __slots__ = ("children", "edge", "last_used", "start", "values")

    def __init__(self, edge: Any, start: int, values: list[int]) -> None:
        self.edge, self.start, self.values = edge, start, values
        self.children: dict[Any, _Node] = {}
        self.last_used = 0


class PlainTree:
    """A radix tree of bytes without bounds, and with the time of each lookup on its path."""

    width = 4

    def __init__(self) -> None:
        self.root = _Node(self.key(np.zeros(0, np.int32)), 0, [])
        self.clock = 0

    def key(self, tokens: np.ndarray) -> Any:
        return tokens.tobytes()

    def first(self, key: Any, position: int) -> Any:
        return key[position : position + 4]

    def match(self, key: Any) -> tuple[_Node, int, list[int]]:
        """The deepest node, how many tokens match, and the values of the full pages."""
        self.clock += 1
        node, values, position = self.root, [], 0
        while position < len(key):
            child = node.children.get(key[position : position + 4])
            if child is None:
                break
            node, edge = child, child.edge
            node.last_used = self.clock
            values += node.values
            if not key.startswith(edge, position):
                count = min(len(edge), len(key) - position)
                differ = np.frombuffer(key, np.uint8, count, position) != np.frombuffer(edge, np.uint8, count)
                position += (int(differ.argmax()) if differ.any() else count) // 4 * 4
                break
            position += len(edge)
        length = position // 4
        del values[length // _PAGE :]
        return node, length, values

    def insert(self, tokens: np.ndarray, values: list[int]) -> None:
        key, width = self.key(tokens), self.width
        node, length, _ = self.match(key)
        if length == len(tokens):
            return
        cut = (length - node.start) * width
        if cut < len(node.edge):  # split: `node` stays the upper part
            full = length // _PAGE - node.start // _PAGE
            lower = _Node(node.edge[cut:], length, node.values[full:])
            lower.children, lower.last_used = node.children, node.last_used
            node.edge, node.values, node.children = node.edge[:cut], node.values[:full], {}
            node.children[self.first(lower.edge, 0)] = lower
        leaf = _Node(key[length * width :], length, values[length // _PAGE :])
        leaf.last_used = self.clock
        node.children[self.first(leaf.edge, 0)] = leaf


class TokenTree(PlainTree):
    """The same on lists of ints, compared one by one."""

    width = 1

    def key(self, tokens: np.ndarray) -> Any:
        return tokens.tolist()

    def first(self, key: Any, position: int) -> Any:
        return key[position]

    def match(self, key: Any) -> tuple[_Node, int, list[int]]:
        self.clock += 1
        node, values, position = self.root, [], 0
        while position < len(key):
            child = node.children.get(key[position])
            if child is None:
                break
            node = child
            node.last_used = self.clock
            values += node.values
            matched = 0
            for token, other in zip(node.edge, itertools.islice(key, position, None)):  # noqa: B905 - the key goes on
                if token != other:
                    break
                matched += 1
            position += matched
            if matched < len(node.edge):
                break
        del values[position // _PAGE :]
        return node, position, values


class PageHashes:
    """A dict from the hash of a page and all pages before it to the page's bytes and value."""

    def __init__(self) -> None:
        self.pages: dict[int, tuple[bytes, int]] = {}

    def key(self, tokens: np.ndarray) -> bytes:
        return tokens.tobytes()

    def match(self, key: bytes) -> list[int]:
        """The values of the full pages that are there."""
        pages, values, chain = self.pages, [], 0
        for start in range(0, len(key) - 4 * _PAGE + 1, 4 * _PAGE):
            page = key[start : start + 4 * _PAGE]
            chain = hash((chain, page))
            entry = pages.get(chain)
            if entry is None or entry[0] != page:
                break
            values.append(entry[1])
        return values

    def insert(self, tokens: np.ndarray, values: list[int]) -> None:
        key, chain = tokens.tobytes(), 0
        for i in range(len(tokens) // _PAGE):
            page = key[4 * _PAGE * i : 4 * _PAGE * (i + 1)]
            chain = hash((chain, page))
            self.pages.setdefault(chain, (page, values[i]))


class _EagerTree(RadixTree[int]):
    """Ours, but a lock and an unlock write to each node on the path: the time, and one user more or less."""

    def _hold(self, match: Match, step: int) -> None:
        node, length = match.node, match.length
        while node:
            pins = node.pins
            i = pins.index(length) if step < 0 else len(pins)
            node.pins = pins[:i] + pins[i + 1 :] if step < 0 else (*pins, length)
            node.last_used = self._clock
            if node.values and not node.heights:
                self._queue(node)
            node, length = node.parent, node.start


def _compare(shape: str, tokens: int, count: int, seed: int) -> dict[str, Any]:
    draw = _SHAPES[shape](tokens, np.random.default_rng(seed))
    ours, plain, hashes, by_token = RadixTree[int](_PAGE), PlainTree(), PageHashes(), TokenTree()
    values = list(range(-(-tokens // _PAGE)))
    stored = []
    for i in range(count):
        sequence = draw()
        ours.insert(sequence.tobytes(), values)
        plain.insert(sequence, values)
        hashes.insert(sequence, values)
        if i * tokens < 20_000_000:
            by_token.insert(sequence, values)
            if i < 8 * _QUERIES:
                stored.append(sequence)
    queries = _queries(stored)
    for query in queries:
        assert ours.match(query.tobytes()).length == plain.match(plain.key(query))[1] == tokens
        assert by_token.match(by_token.key(query))[1] == tokens
        assert len(hashes.match(query.tobytes())) == tokens // _PAGE
    times = _interleaved(queries, {
        "ours_us": lambda array: ours.match(array.tobytes()),
        "plain_us": lambda array: plain.match(plain.key(array)),
        "page_hash_us": lambda array: hashes.match(hashes.key(array)),
        "token_tree_us": lambda array: by_token.match(by_token.key(array)),
    })  # fmt: skip
    return {"tokens": tokens, "sequences": count, "shape": shape, **times}


def _improve(shape: str, tokens: int, count: int, seed: int) -> list[dict[str, Any]]:
    """One row for each improvement: what it gains and what it costs."""
    pairs: dict[str, tuple[RadixTree[int], RadixTree[int]]] = {
        "max_children 8": (RadixTree(_PAGE), RadixTree(_PAGE, max_children=None)),
        f"max_depth {_DEPTH}": (RadixTree(_PAGE, max_depth=_DEPTH), RadixTree(_PAGE)),
        "lazy updates": (RadixTree(_PAGE), _EagerTree(_PAGE)),
    }
    rows = []
    for name, pair in pairs.items():
        on, off = _costs(pair, shape, tokens, count, seed)
        changes = {key: on[key] / off[key] - 1 for key in on}
        changes["matched"] = -changes["matched"]  # the one of which more is better
        said: list[list[str]] = [[], []]  # better, worse: by a tenth at least, for the noise is a few hundredths
        for key, change in changes.items():
            if abs(change) >= 0.1:
                said[change > 0].append(f"{key} {abs(change):.0%}")
        row: dict[str, Any] = {"improvement": name, "shape": shape, "tokens": tokens, "sequences": count}
        for key in on:
            row |= {f"{key}_on": on[key], f"{key}_off": off[key]}
        rows.append(row | {"gains": ", ".join(said[0]) or "nothing", "costs": ", ".join(said[1]) or "nothing"})
    return rows


def _costs(
    trees: tuple[RadixTree[int], RadixTree[int]], shape: str, tokens: int, count: int, seed: int
) -> list[dict[str, float]]:
    """Fill both trees, use them, and evict from them, in turns."""
    draw = _ALL[shape](tokens, np.random.default_rng(seed))
    stored = []
    insert, evict = ([0, 0], [0, 0])
    for i in range(count):
        stored.append(draw())
        key, values = stored[-1].tobytes(), list(range(-(-len(stored[-1]) // _PAGE)))
        for j in (i % 2, 1 - i % 2):
            start = time.process_time_ns()
            trees[j].insert(key, values)
            insert[j] += time.process_time_ns() - start
        if i >= 8 * _QUERIES:
            stored.pop()
    kept = [_bytes(tree) / count for tree in trees]
    queries, handles = _queries(stored), []
    for tree in trees:
        for sequence in stored[:8]:
            match = tree.match(sequence.tobytes())
            shared = len(sequence) - min(len(sequence) // 2, _PAGE)
            handles.append((tree, tree.lock(match._replace(length=min(match.length, shared)))))
    lookup = _interleaved(queries, {j: _reader(tree) for j, tree in enumerate(trees)})
    lock = _interleaved(queries, {j: _locker(tree) for j, tree in enumerate(trees)})
    matched = [statistics.mean(tree.match(query.tobytes()).length for query in queries) for tree in trees]
    for tree, handle in handles:
        tree.unlock(handle)
    victims = min(2000, *(sum(len(node.values) for node in _nodes(tree)) // 2 for tree in trees))
    for i in range(victims):
        for j in (i % 2, 1 - i % 2):
            start = time.process_time_ns()
            trees[j].evict(1)
            evict[j] += time.process_time_ns() - start
    return [
        {
            "lookup": lookup[j], "lock": lock[j], "insert": round(insert[j] / count / 1000, 2),
            "evict": round(evict[j] / victims / 1000, 2), "bytes": round(kept[j]), "matched": round(matched[j]),
        }
        for j in range(2)
    ]  # fmt: skip


def _reader(tree: RadixTree[int]) -> Callable[[np.ndarray], object]:
    return lambda array: tree.match(array.tobytes())


def _locker(tree: RadixTree[int]) -> Callable[[np.ndarray], object]:
    return lambda array: tree.unlock(tree.lock(tree.match(array.tobytes())))


def _bytes(tree: RadixTree[int]) -> int:
    """Of nodes, edges and what hangs on them; values are the caller's."""
    total, nodes = 0, [tree._top]
    for node in nodes:
        nodes += tree._children(node)
        parts = [node, node.edge, node.values, node.heights, node.pins]
        levels = [node.children]
        for level in levels:
            levels += (below for below in level.values() if isinstance(below, dict))
        total += sum(map(sys.getsizeof, parts)) + sum(map(sys.getsizeof, levels))
    return total


def _hit(tokens: int, floor: float | None, count: int, seed: int) -> dict[str, Any]:
    """A lookup in trees of both shapes; the slower one."""
    slowest = 0.0
    for shape in _SHAPES:
        draw = _SHAPES[shape](tokens, np.random.default_rng(seed))
        tree, stored = RadixTree[int](_PAGE), [draw() for _ in range(count)]
        for sequence in stored:
            tree.insert(sequence.tobytes(), list(range(-(-tokens // _PAGE))))
        slowest = max(slowest, *_interleaved(_queries(stored), {0: _reader(tree)}).values())
    return {"what": f"hit of {tokens} tokens", "us": slowest, "floor_us": floor}


def _nodes(tree: RadixTree[int]) -> list[Node[int]]:
    """The root, and all nodes below it."""
    nodes = list(tree._roots.values())
    for node in nodes:
        nodes += tree._children(node)
    return nodes


def _eviction(nodes: int, seed: int) -> dict[str, Any]:
    """All values of a tree of so many nodes, one at a time, after each leaf has been used once since it came."""
    rng = np.random.default_rng(seed)
    draw, tree, keys = _chat(256, rng), RadixTree[int](_PAGE), []
    while (missing := nodes - len(_nodes(tree)) + 1) > 0:
        for _ in range(-(-missing // 2)):  # each of which adds two nodes at most
            keys.append(draw().tobytes())
            tree.insert(keys[-1], [0, 1, 2, 3])
    for i in rng.permutation(len(keys)).tolist():
        tree.unlock(tree.lock(tree.match(keys[i])))
    count = sum(len(node.values) for node in _nodes(tree))
    start = time.process_time_ns()
    for _ in range(count):
        tree.evict(1)
    spent = (time.process_time_ns() - start) / count / 1000
    return {"what": f"evict 1 of {nodes} nodes", "us": round(spent, 2), "floor_us": 20.0}


def _queries(stored: list[np.ndarray]) -> list[np.ndarray]:
    return [np.append(sequence, np.int32(40_000)) for sequence in stored[-_QUERIES:]]


def _interleaved(queries: list[np.ndarray], lookups: dict[Any, Callable[[np.ndarray], object]]) -> dict[Any, float]:
    """Microseconds of CPU time for one query, by name: the median round of several, in which each had its turn."""
    repeats = dict.fromkeys(lookups, 1)
    times: dict[Any, list[float]] = {name: [] for name in lookups}
    for warm in range(-1, _ROUNDS):
        for name, lookup in lookups.items():
            start = time.process_time_ns()
            for _ in range(repeats[name]):
                for query in queries:
                    lookup(query)
            spent = time.process_time_ns() - start
            if warm < 0:  # long enough for the clock: some 5 ms
                repeats[name] = max(1, 5_000_000 // max(spent, 1))
            else:
                times[name].append(spent / repeats[name] / len(queries) / 1000)
    return {name: round(statistics.median(each), 2) for name, each in times.items()}
