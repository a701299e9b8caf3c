"""The plan of moves from numbers alone: what goes down, in which order, how far, and never more than bounded."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory.config import WARM_BITS, TierConfig
from memory.policy import Pages, plan

COSTS = {16: 160, 8: 82, 4: 42, 3: 32, 2: 22}
FORMATS = sorted(COSTS, reverse=True)
TIERS = TierConfig(recent_tokens=0, max_moves=0)


def make(scores, bits=16, ages=None, recent=(), sinks=()):
    n = len(scores)
    flags = [np.isin(np.arange(n), list(chosen)) for chosen in (recent, sinks)]
    return Pages(
        scores=np.array(scores, dtype=float),
        bits=np.broadcast_to(np.asarray(bits, dtype=np.int64), n).copy(),
        ages=np.arange(n)[::-1] * 10 if ages is None else np.array(ages),
        recent=flags[0],
        sinks=flags[1],
        shares=np.ones(n),
    )


def moved(pages, excess, exact_excess=0, tiers=TIERS):
    """The bits of every page after the plan."""
    bits = plan(pages, COSTS, excess, exact_excess, tiers)
    assert (bits <= pages.bits).all(), "a page moved up"
    return bits.tolist()


def total(bits):
    return sum(COSTS[b] for b in bits)


@pytest.mark.parametrize("excess", [0, -1, -(10**9)])
def test_nothing_moves_while_all_fit(excess):
    """Not even the pages that would be moved ahead."""
    tiers = TierConfig(warm_threshold=1.0, evict_threshold=1.0)
    for bits in FORMATS:
        assert moved(make([0.0] * 9, bits), excess, 0, tiers) == [bits] * 9
        assert moved(make([0.0] * 9, bits), excess, -3, tiers) == [bits] * 9


def test_no_pages():
    for tiers in (TIERS, TierConfig(hot_ratio=0.5, cold_ratio=0.2)):
        assert moved(make([]), 1000, 5, tiers) == []


def test_the_lowest_scores_go_first_and_no_more_than_needed():
    pages = make([0.5, 0.1, 0.9, 0.3])
    assert moved(pages, 1) == [16, 8, 16, 16]
    assert moved(pages, 78) == [16, 8, 16, 16]  # to the last byte that one page frees
    assert moved(pages, 79) == [16, 8, 16, 8]
    assert moved(pages, 3 * 78) == [8, 8, 16, 8]


def test_all_exact_pages_fall_to_8_bits_before_any_falls_to_4():
    pages = make([0.5, 0.1, 0.9, 0.3])
    assert moved(pages, 4 * 78) == [8, 8, 8, 8]
    assert moved(pages, 4 * 78 + 1) == [8, 4, 8, 8]
    # Also where some are far down already.
    assert moved(make([0.5, 0.1, 0.9, 0.3], [16, 2, 4, 16]), 157) == [8, 2, 4, 4]


def test_the_whole_ladder():
    """Byte by byte: the order of the steps, each of all pages before the next."""
    pages, seen = make([0.2, 0.1], sinks=()), []
    for excess in range(1, 2 * 160):
        bits = tuple(moved(pages, excess))
        if not seen or seen[-1] != bits:
            seen.append(bits)
    assert seen == [(16, 8), (8, 8), (8, 4), (4, 4), (4, 3), (3, 3), (3, 2), (2, 2)]


@pytest.mark.parametrize("hot", ["sink", "score"])
def test_sinks_and_hot_pages_stay_a_step_above(hot):
    """And sinks at 8 bits, whatever is asked."""
    tiers = TierConfig(recent_tokens=0, max_moves=0, hot_threshold=0.9)
    pages = make([0.0, 0.5, 0.4], sinks=[0]) if hot == "sink" else make([0.95, 0.5, 0.4])
    seen = []
    for excess in range(1, 3 * 160):
        bits = tuple(moved(pages, excess, tiers=tiers))
        if not seen or seen[-1] != bits:
            seen.append(bits)
    if hot == "sink":
        assert seen == [(16, 16, 8), (16, 8, 8), (16, 8, 4), (16, 4, 4), (8, 4, 4), (8, 4, 3), (8, 3, 3), (8, 3, 2),
                        (8, 2, 2)]  # fmt: skip
    else:
        assert seen == [(16, 16, 8), (16, 8, 8), (16, 8, 4), (16, 4, 4), (8, 4, 4), (8, 4, 3), (8, 3, 3), (4, 3, 3),
                        (4, 3, 2), (4, 2, 2), (3, 2, 2), (2, 2, 2)]  # fmt: skip


def test_recent_pages_go_last_in_every_step():
    """Whatever their scores; but before the next step begins."""
    pages = make([0.9, 0.8, 0.0], recent=[2])
    assert moved(pages, 78) == [16, 8, 16]
    assert moved(pages, 2 * 78) == [8, 8, 16]
    assert moved(pages, 3 * 78) == [8, 8, 8]
    assert moved(pages, 3 * 78 + 2 * 40) == [4, 4, 8]


def test_everything_possible_is_done_where_it_is_not_enough():
    assert moved(make([0.1, math.nan, 1.0, 1.0], [16, 3, 2, 16], recent=[0, 1, 2]), 10**9) == [2, 2, 2, 2]
    assert moved(make([0.1, 0.2, 0.3], [16, 16, 4], sinks=[0, 2]), 10**9) == [8, 2, 4]
    assert moved(make([0.5] * 4, 2), 10**9, 4) == [2] * 4


# Moves that are not needed.


def test_low_pages_are_moved_ahead_when_one_has_to_go():
    tiers = TierConfig(recent_tokens=0, warm_threshold=0.3, evict_threshold=0.15, max_moves=8)
    assert moved(make([0.1, 0.2, 0.29, 0.3, 0.5]), 1, tiers=tiers) == [8, 8, 8, 16, 16]
    assert moved(make([0.1, 0.2, 0.29, 0.3, 0.5], recent=[1]), 1, tiers=tiers) == [8, 16, 8, 16, 16]
    # Of compressed pages the lower threshold decides.
    assert moved(make([0.1, 0.12, 0.2, 0.5], 8), 1, tiers=tiers) == [4, 4, 8, 8]


@pytest.mark.parametrize("most", [0, 1, 3, 100])
@pytest.mark.parametrize("needed", [1, 5])
def test_moves_ahead_are_bounded(most, needed):
    tiers = TierConfig(recent_tokens=0, warm_threshold=1.0, max_moves=most)
    bits = moved(make([0.0] * 40), 78 * needed, 0, tiers)
    assert bits.count(8) == min(40, needed + most) == 40 - bits.count(16)


# Scores that say nothing.


@pytest.mark.parametrize("value", [0.0, 0.5, math.nan])
def test_equal_scores_go_oldest_first(value):
    ages = [5, 40, 20, 80]
    pages = make([value] * 4, ages=ages)
    assert [moved(pages, 78 * n).count(8) for n in range(1, 5)] == [1, 2, 3, 4]
    assert moved(pages, 1) == [16, 16, 16, 8]
    assert moved(pages, 79) == [16, 8, 16, 8]
    assert moved(pages, 78 * 3) == [16, 8, 8, 8]


def test_equal_scores_and_ages_go_in_their_order():
    pages = make([0.5] * 6, ages=[0] * 6)
    assert moved(pages, 79) == [8, 8, 16, 16, 16, 16]


def test_nan_counts_as_nothing():
    assert moved(make([0.2, math.nan, 0.1], ages=[9, 0, 9]), 1) == [16, 8, 16]
    tiers = TierConfig(recent_tokens=0, max_moves=0, hot_threshold=0.0)  # all are at or above it
    assert sorted(moved(make([math.nan, math.nan]), 1, tiers=tiers)) == [8, 16]


# Bounds on the exact pages.


def test_exact_pages_over_their_number_leave():
    """`hot_layer_size` and `warm_layer_ratio`: though no bytes are short."""
    pages = make([0.5, 0.1, 0.9, 0.3])
    assert moved(pages, 0, 2) == [16, 8, 16, 8]
    assert moved(pages, 1, 3) == [8, 8, 16, 8]
    assert moved(pages, 3 * 78, 1) == [8, 8, 16, 8]
    assert moved(pages, 0, 100) == [8, 8, 8, 8]
    # The sinks are the last that leave, and none goes further down than to 8 bits.
    assert moved(make([0.0, 0.1, 0.9, 0.3], sinks=[0]), 0, 3) == [16, 8, 8, 8]
    assert moved(make([0.0, 0.1, 0.9, 0.3], sinks=[0]), 0, 4) == [8, 8, 8, 8]
    assert moved(make([0.0, 0.1, 0.9, 0.3], 8, sinks=[0]), 0, 4) == [8, 8, 8, 8]


# Shares.


def test_shares_of_the_proposal():
    tiers = TierConfig(hot_ratio=0.1, cold_ratio=0.2)
    bits = moved(make([i / 10 for i in range(10)]), 0, tiers=tiers)
    assert bits == [2, 2, 4, 4, 4, 4, 4, 4, 4, 16]
    # Downwards only, and by score whatever the order.
    assert moved(make([0.9, 0.1], [2, 16]), 0, tiers=TierConfig(hot_ratio=0.5, cold_ratio=0.5)) == [2, 2]
    assert moved(make([0.2, 0.1, 0.3], [16, 3, 8]), 0, tiers=TierConfig(hot_ratio=0.1)) == [4, 3, 4]
    assert moved(make([math.nan, 0.5]), 0, tiers=TierConfig(hot_ratio=0.5, cold_ratio=0.5)) == [2, 16]


@given(n=st.integers(0, 60), hot=st.floats(0.01, 1), cold=st.floats(0, 1))
def test_shares_are_kept(n, hot, cold):
    bits = moved(make(np.linspace(0, 1, n)), 0, tiers=TierConfig(hot_ratio=hot, cold_ratio=cold))
    # No more pages stay exact than their share, and never one more than needed has 2 bits.
    assert bits.count(16) <= max(hot * n + 1e-9, n - n * cold if hot + cold > 1 else 0)
    assert bits.count(2) <= cold * n + 1e-9
    assert len(bits) == n


# Whatever the numbers are.

page = st.tuples(
    st.floats(0, 1) | st.just(math.nan), st.sampled_from(FORMATS), st.integers(0, 100), st.booleans(), st.booleans()
)


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(page, max_size=30),
    excess=st.integers(-100, 4000),
    exact_excess=st.integers(-5, 35),
    tiers=st.builds(
        TierConfig, hot_threshold=st.sampled_from([0.0, 0.5, 1.0]), warm_threshold=st.floats(0, 1),
        evict_threshold=st.floats(0, 1), max_moves=st.integers(0, 10),
    ),
)  # fmt: skip
def test_any_plan(rows, excess, exact_excess, tiers):
    scores, bits, ages, recent, sinks = zip(*rows, strict=True) if rows else ((),) * 5
    pages = Pages(
        np.array(scores, dtype=float), np.array(bits, dtype=np.int64), np.array(ages, dtype=np.int64),
        np.array(recent, dtype=bool), np.array(sinks, dtype=bool), np.ones(len(rows)),
    )  # fmt: skip
    before = [x.copy() for x in (pages.scores, pages.bits, pages.ages, pages.recent, pages.sinks)]
    result = moved(pages, excess, exact_excess, tiers)
    after = (pages.scores, pages.bits, pages.ages, pages.recent, pages.sinks)
    assert all(np.array_equal(a, b, equal_nan=a.dtype == float) for a, b in zip(before, after, strict=True))
    assert moved(pages, excess, exact_excess, tiers) == result, "not deterministic"
    assert set(result) <= set(FORMATS)
    freed = total(bits) - total(result)
    least = [min(b, WARM_BITS[0] if sink else WARM_BITS[-1]) for b, sink in zip(bits, sinks, strict=True)]
    assert freed >= min(excess, total(bits) - total(least))
    assert all(b >= low for b, low in zip(result, least, strict=True))
    exact = list(bits).count(16)
    assert exact - result.count(16) >= min(exact_excess, exact)
    if excess <= 0 and exact_excess <= 0:
        assert result == list(bits)


@settings(max_examples=100, deadline=None)
@given(scores=st.lists(st.floats(0, 1), min_size=1, max_size=20), steps=st.lists(st.integers(1, 300), max_size=10))
def test_one_step_after_another_ends_where_a_single_one_does(scores, steps):
    """Without moves ahead, and with the scores unchanged: how much was asked for at a time does not matter."""
    pages, bits = make(scores), np.full(len(scores), 16)
    for excess in steps:
        bits = np.array(moved(make(scores, bits), excess))
    assert sorted(moved(pages, total(pages.bits) - total(bits))) == sorted(bits.tolist())
