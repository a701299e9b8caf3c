"""`tools.bench eviction`: how many of a trace's blocks a prefix cache of so many blocks has, by what goes first.

A request is the list of its blocks. Those at its beginning that the cache has are hits; the others are computed and
kept, and if the cache is full, blocks at the ends of prefixes go that the request does not need itself.

    lru      the radix tree with the policy `lru`
    ours     with `importance`, which learns from the trace as it comes and never looks ahead. A trace says nothing of
             attention or cost, so all blocks are worth the same
    belady   what is asked for again last goes first. A block is never asked for later than one behind it, so the worst
             block is always at an end, and no policy, whatever it knows, hits more of such a trace: of what a request
             does not need itself, exchanging one choice for the later one loses nothing

The synthetic workloads are seeded. They are not to be won, but to show where a policy that does well on one trace
might do badly: each names what it is like.
"""

from __future__ import annotations

import json
import random
from array import array
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any

from memory.eviction import Importance
from memory.radix import RadixTree
from models.errors import ConfigError

Requests = list[list[int]]


def rows(trace: str, blocks: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """For each number of blocks: lru, ours and belady (shares of the trace's blocks that hit), and gap_closed, the
    share of the way from lru to belady that ours goes. trace: a file of JSON lines with hash_ids, or `synthetic`."""
    if trace != "synthetic":
        return [_row({}, read(trace), count) for count in blocks]
    return [
        _row({"workload": name}, make(random.Random(seed), count), count)
        for name, make in WORKLOADS.items()
        for count in blocks
    ]


def _row(what: dict[str, Any], requests: Requests, blocks: int) -> dict[str, Any]:
    total = sum(map(len, requests))
    lru, ours = (replay(requests, blocks, name) / total for name in ("lru", "importance"))
    best = belady(requests, blocks) / total
    closed = round((ours - lru) / (best - lru), 3) if best > lru else None
    return {**what, "blocks": blocks, "lru": round(lru, 4), "ours": round(ours, 4), "belady": round(best, 4),
            "gap_closed": closed}  # fmt: skip


def read(path: str) -> Requests:
    """The hash_ids of each line. Raises ConfigError for a file that is no such trace."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        requests = [json.loads(line)["hash_ids"] for line in lines if line.strip()]
        keys = [array("i", ids) for ids in requests]
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(f"{path}: need JSON lines with hash_ids, lists of 32-bit numbers: {error!r}") from error
    if not any(keys):
        raise ConfigError(f"{path}: no request has a block")
    return requests


def replay(requests: Requests, blocks: int, name: str) -> int:
    """Hits of a radix tree with one item a page, under the policy of that name."""
    uses = Importance(blocks, 4, float("inf"))
    tree: RadixTree[int] = RadixTree(1, keep=attrgetter("last_used") if name == "lru" else uses.keep)
    free, hits = list(range(blocks)), 0
    for ids in requests:
        key = array("i", ids).tobytes()
        match = tree.match(key)
        held = tree.lock(match)
        uses.used(match.values)
        hits += match.length
        gone = tree.evict(max(0, len(ids) - match.length - len(free)))
        for page in gone:
            uses.removed(page)
        free += gone
        pages = match.values + [free.pop() for _ in range(min(len(free), len(ids) - match.length))]
        tree.insert(key[: 4 * len(pages)], pages)
        uses.added(key, b"", pages)
        tree.unlock(held)
    return hits


def belady(requests: Requests, blocks: int) -> int:
    """Hits of the policy that knows the future."""
    names: dict[tuple[int, int], int] = {}  # a block is what it holds and all before it
    paths = []
    for ids in requests:
        path = [0]
        for block in ids:
            path.append(names.setdefault((path[-1], block), len(names) + 1))
        paths.append(path[1:])
    never, following = len(paths), []
    later: dict[int, int] = {}
    for i in range(len(paths) - 1, -1, -1):
        following.append([later.get(name, never) for name in paths[i]])
        later.update(dict.fromkeys(paths[i], i))
    cached: dict[int, int] = {}  # block -> the request that asks for it next
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for now, path in enumerate(paths):
        known = next((i for i, name in enumerate(path) if name not in cached), len(path))
        hits += known
        for name in path[:known]:
            del cached[name]  # so that it cannot go
        while heap and len(cached) + len(path) > blocks:
            coming, _, name = heappop(heap)
            if cached.get(name) == -coming:
                del cached[name]
        after = following[-1 - now]
        for depth, name in enumerate(path[: blocks - len(cached)]):
            cached[name] = after[depth]
            heappush(heap, (-after[depth], -depth, name))
    return hits


class _Text:
    """Blocks of texts: each number is given out once."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


def _zipf(rng: random.Random, count: int, power: float = 1.0) -> Callable[[], int]:
    total = list(accumulate(1 / (i + 1) ** power for i in range(count)))
    return lambda: bisect(total, rng.random() * total[-1])


def _timed(events: Iterator[tuple[float, list[int]]]) -> Requests:
    return [ids for _, ids in sorted(events, key=lambda event: event[0])]


def _chats(rng: random.Random, pause: Callable[[], float], turns: float) -> Requests:
    """Dialogues behind one of three system prompts; each turn asks with the whole history."""
    text = _Text()
    systems = [text(4), text(2), text(8)]

    def events() -> Iterator[tuple[float, list[int]]]:
        for start in range(2500):
            when, ids = start + rng.random(), rng.choice(systems) + text(rng.randint(1, 20))
            while True:
                yield when, ids
                if rng.random() > turns:
                    break
                when, ids = when + pause(), ids + text(rng.randint(1, 5))

    return _timed(events())


def _steady_chats(rng: random.Random, blocks: int) -> Requests:
    return _chats(rng, lambda: rng.expovariate(1 / 100), 0.7)


def _slow_chats(rng: random.Random, blocks: int) -> Requests:
    return _chats(rng, lambda: 20 * rng.paretovariate(0.9), 0.6)


def _popular(rng: random.Random, blocks: int) -> Requests:
    text = _Text()
    prompts = [text(rng.randint(2, 60)) for _ in range(1000)]
    pick = _zipf(rng, len(prompts))
    return [prompts[pick()] + text(rng.randint(1, 6)) for _ in range(5000)]


def _scans(rng: random.Random, blocks: int) -> Requests:
    text = _Text()
    prompts = [text(20) for _ in range(400)]
    pick = _zipf(rng, len(prompts), 0.8)
    return [text(100) if rng.random() < 0.2 else prompts[pick()] + text(2) for _ in range(5000)]


def _loop(rng: random.Random, blocks: int) -> Requests:
    text = _Text()
    documents = [text(20) for _ in range(blocks * 11 // 200)]
    return [documents[i % len(documents)] for i in range(max(3000, 6 * len(documents)))]


def _shift(rng: random.Random, blocks: int) -> Requests:
    text = _Text()
    prompts = [text(30) for _ in range(3000)]
    pick = _zipf(rng, 500)
    return [prompts[(pick() + i // 1000 * 300) % len(prompts)] + text(2) for i in range(8000)]


def _recent(rng: random.Random, blocks: int) -> Requests:
    """The more recently a document was asked for, the likelier it comes again: nothing is better than LRU."""
    text = _Text()
    stack = [text(20) for _ in range(2000)]
    asked = []
    for _ in range(6000):
        stack.append(stack.pop(-1 - min(int(rng.paretovariate(0.5)) - 1, len(stack) - 1)))
        asked.append(stack[-1])
    return asked


def _editor(rng: random.Random, blocks: int) -> Requests:
    """Files that grow at a cursor, a request after each change; an edit further up changes all below."""
    text = _Text()

    def events() -> Iterator[tuple[float, list[int]]]:
        for start in range(150):
            when, file = start * 5.0, text(rng.randint(1, 40))
            for _ in range(rng.randint(5, 150)):
                when += rng.expovariate(1) if rng.random() < 0.95 else rng.expovariate(1 / 300)
                if rng.random() < 0.2:
                    file = file[: rng.randrange(len(file))]
                file = file + text(1)
                yield when, file

    return _timed(events())


def _agents(rng: random.Random, blocks: int) -> Requests:
    """Tasks of many quick steps that share their tools' prompt, fork now and then, and never come back."""
    text = _Text()
    tools = [text(10) for _ in range(5)]

    def events() -> Iterator[tuple[float, list[int]]]:
        for start in range(300):
            when, ids = start * 1.5, rng.choice(tools) + text(rng.randint(2, 30))
            for _ in range(rng.randint(1, 25)):
                yield when, ids
                for i in range(rng.choice((0, 0, 0, 3))):
                    yield when + i / 9, ids + text(1)
                when, ids = when + rng.expovariate(1 / 3), ids + text(rng.randint(1, 4))

    return _timed(events())


WORKLOADS: dict[str, Callable[[random.Random, int], Requests]] = {
    "chats, steady": _steady_chats,
    "chats, heavy-tailed": _slow_chats,
    "popular prompts": _popular,
    "scans": _scans,
    "loop of 1.1 caches": _loop,
    "shifting popularity": _shift,
    "recency alone": _recent,
    "editor": _editor,
    "agents": _agents,
}
