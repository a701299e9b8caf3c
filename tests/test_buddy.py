"""The buddy arena against bitmaps: the oracle knows only which unit belongs to which block."""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memory.buddy import BuddyAllocator, OutOfUnits
from memory.errors import AllocatorError


def maximal_free_blocks(free, max_order):
    """The one way to cut the free units (list or array of bool) into aligned blocks with no two free buddies.

    Returns one set of starts per order. Level k says for each aligned block of 2^k units whether all of it is free.
    """
    level = np.array(free, dtype=bool)
    blocks = []
    for order in range(max_order + 1):
        if order == max_order:
            parents = np.zeros(len(level), dtype=bool)
        else:
            above = level[: len(level) // 2 * 2].reshape(-1, 2).all(axis=1)
            parents = np.zeros(len(level), dtype=bool)  # an odd last block has no buddy
            parents[: 2 * len(above)] = np.repeat(above, 2)
        blocks.append({int(i) << order for i in np.flatnonzero(level & ~parents)})
        if order < max_order:
            level = above
    return blocks


def assert_same_blocks(buddy, free):
    expected = maximal_free_blocks(free, buddy.max_order)
    assert [set(starts) for starts in buddy._free] == expected
    assert buddy.free_units == int(np.sum(free))
    assert buddy.free_units + buddy.used_units == buddy.num_units
    for order in range(buddy.max_order + 2):
        longest = max((1 << k for k in range(order, buddy.max_order + 1) if expected[k]), default=0)
        assert buddy.longest_run(order) == longest >> order


@pytest.mark.parametrize(("num_units", "max_order", "seed"), [(1000, 63, 0), (4096, 63, 1), (777, 5, 2)])
def test_a_million_random_operations_against_a_bitmap(num_units, max_order, seed):
    rng = random.Random(seed)
    buddy = BuddyAllocator(num_units, max_order)
    is_free = np.ones(num_units, dtype=bool)
    blocks = []  # (start, order) of every used block

    def claim(start, count, order):
        size = count << order
        assert start % (1 << order) == 0
        assert start + size <= num_units
        assert is_free[start : start + size].all(), f"block {start} overlaps another"
        is_free[start : start + size] = False
        blocks.extend((start + (i << order), order) for i in range(count))

    failures = 0
    operations = 1_000_000 if num_units == 1000 else 100_000
    for i in range(operations):
        # Drift between nearly empty and full, so that both ends and everything between are visited.
        filling = (i // 5000) % 2 == 0
        action = rng.random()
        if blocks and action < (0.35 if filling else 0.65):
            j = rng.randrange(len(blocks))
            blocks[j], blocks[-1] = blocks[-1], blocks[j]
            start, order = blocks.pop()
            buddy.free(start)
            is_free[start : start + (1 << order)] = True
        elif action < 0.8:
            order = min(int(rng.expovariate(0.8)), 6)
            try:
                claim(buddy.alloc(order), 1, order)
            except OutOfUnits:
                failures += 1
                assert not any(maximal_free_blocks(is_free, buddy.max_order)[order:])
        elif action < 0.9:
            order, count = rng.randrange(3), rng.randint(1, 16)
            try:
                claim(buddy.alloc_run(count, order, room=rng.choice((0, 0, 8))), count, order)
            except OutOfUnits:
                failures += 1
                assert buddy.longest_run(order) < count
        elif blocks:
            start, order = blocks[rng.randrange(len(blocks))]
            end = start + (1 << order)
            expected = end + (1 << order) <= num_units and bool(is_free[end : end + (1 << order)].all())
            assert buddy.extend(end, order) == expected
            if expected:
                claim(end, 1, order)
        if i % 1000 == 0:
            buddy.check()
            assert_same_blocks(buddy, is_free)
    assert failures > 100, "the arena never filled up: the test does not test exhaustion"
    for start, order in blocks:
        assert buddy.block_order(start) == order
        buddy.free(start)
    buddy.check()
    assert_same_blocks(buddy, np.ones(num_units, dtype=bool))


class BuddyMachine(RuleBasedStateMachine):
    """Every public method on a small arena of any size; the model is one block id per unit (None: free)."""

    @initialize(num_units=st.integers(0, 70), max_order=st.just(63) | st.integers(0, 7))
    def build(self, num_units, max_order):
        self.buddy = BuddyAllocator(num_units, max_order)
        self.free = [True] * num_units
        self.blocks = {}

    def shortest_free(self, order):
        """The order of the shortest free block with at least 2^order units, or None."""
        blocks = maximal_free_blocks(self.free, self.buddy.max_order)
        return next((k for k in range(order, self.buddy.max_order + 1) if blocks[k]), None)

    def home(self, start):
        """The order of the free block that `start` lies in."""
        blocks = maximal_free_blocks(self.free, self.buddy.max_order)
        return next(k for k in range(self.buddy.max_order + 1) if (start >> k << k) in blocks[k])

    def claim(self, start, count, order):
        for i in range(count):
            block = start + (i << order)
            assert block % (1 << order) == 0
            assert all(self.free[block : block + (1 << order)]) and block + (1 << order) <= len(self.free)
            self.free[block : block + (1 << order)] = [False] * (1 << order)
            self.blocks[block] = order

    @rule(order=st.integers(0, 7))
    def alloc(self, order):
        wanted = self.shortest_free(order)
        if wanted is None:
            with pytest.raises(OutOfUnits):
                self.buddy.alloc(order)
            return
        start = self.buddy.alloc(order)
        assert self.home(start) == wanted
        self.claim(start, 1, order)

    @rule(count=st.integers(1, 20), order=st.integers(0, 4), room=st.integers(0, 20))
    def alloc_run(self, count, order, room):
        shortest = self.shortest_free(((count << order) - 1).bit_length())
        if shortest is None:
            assert self.buddy.longest_run(order) < count
            with pytest.raises(OutOfUnits):
                self.buddy.alloc_run(count, order, room=room)
            return
        roomy = self.shortest_free((((count + room) << order) - 1).bit_length())
        longest = self.buddy.longest_run(0).bit_length() - 1
        start = self.buddy.alloc_run(count, order, room=room)
        assert self.home(start) == (longest if roomy is None else roomy)
        self.claim(start, count, order)

    @rule(data=st.data(), order=st.integers(0, 7))
    def extend(self, data, order):
        start = data.draw(st.integers(0, len(self.free) >> order)) << order
        end = start + (1 << order)
        can = order <= self.buddy.max_order and end <= len(self.free) and all(self.free[start:end])
        assert self.buddy.extend(start, order) == can
        if can:
            self.claim(start, 1, order)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), again=st.booleans())
    def release(self, data, again):
        start = data.draw(st.sampled_from(sorted(self.blocks)))
        order = self.blocks.pop(start)
        self.buddy.free(start)
        self.free[start : start + (1 << order)] = [True] * (1 << order)
        if again:
            with pytest.raises(AllocatorError):
                self.buddy.free(start)

    @rule(start=st.integers(-80, 160))
    def free_foreign(self, start):
        if start in self.blocks:
            assert self.buddy.block_order(start) == self.blocks[start]
            return
        with pytest.raises(AllocatorError):
            self.buddy.free(start)
        with pytest.raises(AllocatorError):
            self.buddy.block_order(start)

    @invariant()
    def well(self):
        self.buddy.check()
        assert_same_blocks(self.buddy, self.free)


TestBuddyMachine = BuddyMachine.TestCase
TestBuddyMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_drawing_at_the_top_of_the_module():
    buddy = BuddyAllocator(13)
    assert buddy.extend(0, 1) and buddy.extend(2, 0) and buddy.extend(8, 2)
    assert list(buddy._used) == [2, 0, 1, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0]
    assert [set(starts) for starts in buddy._free] == [{3, 12}, set(), {4}, set()]


@pytest.mark.parametrize("num_units", [0, 1, 2, 3, 7, 8, 63, 64, 65, 1000])
def test_every_unit_of_an_arena_of_any_size_can_be_used_and_comes_back(num_units):
    buddy = BuddyAllocator(num_units)
    longest = buddy.longest_run(0)
    starts = sorted(buddy.alloc(0) for _ in range(num_units))
    assert starts == list(range(num_units))
    assert (buddy.free_units, buddy.used_units, buddy.longest_run(0)) == (0, num_units, 0)
    with pytest.raises(OutOfUnits, match=f"0 of {num_units} are free"):
        buddy.alloc(0)
    random.Random(num_units).shuffle(starts)
    for start in starts:
        buddy.free(start)
        buddy.check()
    assert (buddy.free_units, buddy.longest_run(0)) == (num_units, longest)


def test_double_and_foreign_free_raise_and_change_nothing():
    buddy = BuddyAllocator(16)
    start = buddy.alloc(2)
    for foreign in (start + 1, start + 2, 8, 15, 16, 10**9, -1, -16):
        with pytest.raises(AllocatorError, match=str(foreign)):
            buddy.free(foreign)
    buddy.free(start)
    with pytest.raises(AllocatorError, match="freed twice"):
        buddy.free(start)
    buddy.check()
    assert buddy.free_units == 16


def test_blocks_longer_than_the_arena_are_out_of_units_and_senseless_numbers_are_value_errors():
    buddy = BuddyAllocator(8)
    for call in (lambda: buddy.alloc(4), lambda: buddy.alloc(10**9), lambda: buddy.alloc_run(9, 0),
                 lambda: buddy.alloc_run(1, 10**9), lambda: buddy.alloc_run(2**62, 3)):  # fmt: skip
        with pytest.raises(OutOfUnits):
            call()
    assert not buddy.extend(0, 10**9)
    for call in (lambda: buddy.alloc(-1), lambda: buddy.alloc_run(0, 0), lambda: buddy.alloc_run(-1, 0),
                 lambda: buddy.alloc_run(1, -1), lambda: buddy.alloc_run(1, 0, room=-1), lambda: buddy.extend(1, 1),
                 lambda: buddy.extend(-2, 1), lambda: buddy.extend(0, -1),
                 lambda: BuddyAllocator(-1), lambda: BuddyAllocator(1, -1)):  # fmt: skip
        with pytest.raises(ValueError):
            call()
    buddy.check()
    assert buddy.free_units == 8


def test_a_run_is_freed_block_by_block_and_its_tail_stays_free():
    buddy = BuddyAllocator(64)
    start = buddy.alloc_run(5, 1)
    assert buddy.used_units == 10
    assert [buddy.block_order(start + 2 * i) for i in range(5)] == [1] * 5
    assert buddy.longest_run(0) == 32
    for i in (3, 0, 4, 1, 2):
        buddy.free(start + 2 * i)
        buddy.check()
    assert buddy.longest_run(0) == 64


def test_room_behind_a_run_lets_it_grow_in_place():
    buddy = BuddyAllocator(64)
    first = buddy.alloc_run(3, 0, room=13)
    second = buddy.alloc_run(3, 0, room=13)
    assert all(buddy.extend(first + 3 + i, 0) for i in range(13))
    assert abs(second - first) >= 16
    # Nowhere 64 blocks: the longest free block is taken, not the shortest that would do.
    longest = buddy.longest_run(0)
    buddy.alloc_run(2, 0, room=62)
    assert buddy.longest_run(0) < longest


def test_extend_claims_only_what_is_wholly_free():
    buddy = BuddyAllocator(24)
    assert buddy.extend(8, 3)
    assert not buddy.extend(8, 0)
    assert not buddy.extend(8, 3)
    assert not buddy.extend(0, 4)
    assert buddy.extend(16, 3)
    assert not buddy.extend(24, 3)
    assert buddy.extend(7, 0)
    assert not buddy.extend(0, 3)
    buddy.check()
    assert buddy.free_units == 7


@pytest.mark.parametrize("break_it", [
    lambda b: b._free[0].update({b._free[0].popitem()[0] + 1: None}),
    lambda b: b._free[1].clear(),
    lambda b: b._used.__setitem__(0, 0),
    lambda b: b._used.__setitem__(1, 1),
    lambda b: setattr(b, "free_units", b.free_units + 1),
    lambda b: (b._free[1].popitem(), b._free[0].update({2: None, 3: None})),
])  # fmt: skip
def test_check_sees_each_broken_invariant_and_shows_the_blocks(break_it):
    buddy = BuddyAllocator(8)
    buddy.alloc(0)
    buddy.check()
    break_it(buddy)
    with pytest.raises(AssertionError, match=r"\d (used|free) 2\^\d"):
        buddy.check()
