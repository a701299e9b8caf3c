"""What goes first: the policies on small traces, against brute force, and on a real trace where it is at hand."""

import random
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from memory.eviction import Importance
from memory.radix import RadixTree
from tools.bench_eviction import WORKLOADS, belady, read, replay

TRACE = Path(__file__).resolve().parents[2] / "shared/data/trace-mooncake/conversation_trace.jsonl"


def leaf(page, score=0.0, end=1):
    return SimpleNamespace(values=[page], score=score, end=end)


def order(keep, pages):
    return sorted(pages, key=lambda page: keep.keep(leaf(page)))


def one(keep, name, page):
    """A new request for one block of that name, which becomes that page."""
    keep.added(name.to_bytes(4, "little"), b"", [page])


def test_before_anything_is_learned_the_order_is_that_of_lru():
    keep = Importance(64, 4, float("inf"))
    for page in range(64):
        one(keep, page, page)
    priorities = [keep.keep(leaf(page)) for page in range(64)]
    assert priorities == sorted(priorities) and priorities[0] < priorities[-1]


def test_a_used_page_stays_longer_than_a_new_one_and_is_remembered_when_it_has_gone():
    keep = Importance(8, 4, float("inf"))
    for name in range(4):
        one(keep, name, name)
    keep.used([1])
    keep.used([2])
    keep.used([2])
    assert order(keep, range(4))[-2:] == [1, 2]
    keep.removed(2)
    one(keep, 9, 2)  # other content in the same page
    one(keep, 2, 5)  # and its old content in another one
    assert order(keep, [2, 5]) == [2, 5]


def test_score_and_cost_raise_the_priority_and_nan_counts_as_none():
    keep = Importance(8, 4, 100.0)
    one(keep, 1, 1)
    plain = keep.keep(leaf(1, end=0))
    assert keep.keep(leaf(1, score=1.0, end=0)) == 2 * plain == keep.keep(leaf(1, end=100))
    tree = RadixTree(1, keep=keep.keep)
    for name in (1, 2, 3):
        tree.insert(name.to_bytes(4, "little"), [name + 1], score=float("nan"))
    assert tree.evict(3) == [2, 3, 4]  # all alike: the least recently used first


def test_a_page_that_is_not_full_has_no_past_and_leaves_none():
    keep = Importance(8, 8, float("inf"))
    keep.added(b"abcdefgh" + b"abcd", b"", [0, 1])
    keep.removed(1)
    keep.added(b"abcdefgh" + b"abcd", b"", [0, 2])
    assert keep.keep(leaf(2)) == pytest.approx(keep.keep(leaf(0)), rel=0.02)  # a use would be a third more
    keep.used([0])
    keep.added(b"abcdefgh" + b"abcd", b"", [0, 2])  # again, as each chunk of a prompt does: no use of page 0
    assert order(keep, [0, 2]) == [2, 0]


def test_other_namespaces_share_no_memory():
    keep = Importance(8, 4, float("inf"))
    for tenant in (b"a", b"b"):
        keep.added(b"same", tenant, [0])
        keep.used([0])
        keep.used([0])
        keep.removed(0)
        keep.added(b"same", b"c", [1])
        keep.added(b"new.", b"c", [2])
        assert order(keep, [1, 2]) == [1, 2] or keep.keep(leaf(1)) == keep.keep(leaf(2))
        keep.removed(1)
        keep.removed(2)


def test_scans_do_not_drive_out_what_is_used():
    """Eight prompts of 5 blocks in turn, and after each 30 blocks that never come again, in a cache of 80: LRU has
    nothing when a prompt comes again, for 280 blocks lie between; the optimum has all."""
    requests, scanned = [], 1000
    for i in range(800):
        first = i % 8 * 5
        requests += [list(range(first, first + 5)), list(range(scanned, scanned + 30))]
        scanned += 30
    assert replay(requests, 80, "lru") == 0
    assert belady(requests, 80) == 792 * 5
    assert replay(requests[800:], 80, "importance") >= 0.8 * belady(requests[800:], 80)


def brute_force(requests, blocks):
    """The most hits that any choice of victims gives."""
    paths = [frozenset(tuple(ids[: i + 1]) for i in range(len(ids))) for ids in requests]

    @lru_cache(None)
    def best(i, cached):
        if i == len(paths):
            return 0
        path = paths[i]
        after = {cached | path}
        while len(next(iter(after))) > blocks:  # all that may be left when one more leaf has gone
            after = {
                kept - {block}
                for kept in after
                for block in kept - path
                if not any(len(other) > len(block) and other[: len(block)] == block for other in kept)
            }
        return len(cached & path) + max(best(i + 1, kept) for kept in after)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(30))
def test_belady_is_the_optimum(seed):
    rng = random.Random(seed)
    requests = [[rng.randint(0, 2) for _ in range(rng.randint(1, 3))] for _ in range(10)]
    best = belady(requests, 5)
    assert best == brute_force(requests, 5)
    assert best >= max(replay(requests, 5, name) for name in ("lru", "importance"))


@pytest.mark.parametrize("name", WORKLOADS)
def test_never_behind_lru_by_more_than_a_hundredth_of_the_blocks(name):
    requests = WORKLOADS[name](random.Random(1), 300)[:1500]
    total, best = sum(map(len, requests)), belady(requests, 300)
    lru, ours = (replay(requests, 300, kind) for kind in ("lru", "importance"))
    assert lru - total / 100 <= ours <= best


def test_replays_are_repeatable():
    requests = WORKLOADS["agents"](random.Random(2), 200)[:400]
    assert len({replay(requests, 200, "importance") for _ in range(2)}) == 1


@pytest.mark.skipif(not TRACE.exists(), reason="the Mooncake trace is not at hand")
def test_a_quarter_of_the_way_from_lru_to_the_optimum_on_a_real_trace():
    requests = read(str(TRACE))
    lru, ours, best = replay(requests, 1000, "lru"), replay(requests, 1000, "importance"), belady(requests, 1000)
    assert ours - lru >= (best - lru) / 4
