"""The paged cache against the dumbest oracle: each sequence's tokens in a Python list.

Every token is a number of its own (a canary), written as K and V through the engine's own way (`plan.slots` and
`rope_store`) and read back both ways that attention has: by the page table and by the pieces.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from kernels import reference
from kernels.reference import rope_store
from memory.cache import KVCache
from memory.config import CacheConfig
from memory.errors import CapacityError
from memory.frames import OutOfPages
from memory.prefix import CachedSequence

LAYERS, HEADS, DIM = 2, 3, 8
TOKEN_BYTES = LAYERS * 2 * HEADS * DIM * 4
EXACT_ORDER = 5  # a page of float32 is 32 units


def make_cache(num_pages, page_size=16, spare_bytes=0):
    capacity = num_pages * page_size * TOKEN_BYTES + spare_bytes
    config = CacheConfig(LAYERS, HEADS, DIM, itemsize=4, capacity_bytes=capacity, page_size=page_size)
    cache = KVCache(config, torch.float32, torch.device("cpu"), reference)
    for layer in cache.layers:
        layer.k.fill_(torch.nan)
        layer.v.fill_(torch.nan)
    return cache


def allocator_of(cache):
    return cache._frames._exact.allocator


def rows(canaries, layer, is_value):
    """What a token's K or V is: [tokens, heads, dim], each element its own function of the canary, exact in float32."""
    place = np.arange(HEADS * DIM).reshape(1, HEADS, DIM) + 100 * (2 * layer + is_value)
    return torch.from_numpy((np.asarray(canaries)[:, None, None] * 1024 + place).astype(np.float32))


def write(cache, sequences, new, num_decodes=0):
    """One step of the engine: plan, store in every layer, commit. new: the canaries of each sequence's next tokens."""
    counts = [len(tokens) for tokens in new]
    plan = cache.plan(sequences, counts, num_decodes)
    canaries = [canary for tokens in new for canary in tokens]
    unturned = torch.cat([torch.ones(len(canaries), DIM // 2), torch.zeros(len(canaries), DIM // 2)], dim=1)
    for layer, cached in enumerate(cache.layers):
        k, v = rows(canaries, layer, False), rows(canaries, layer, True)
        rope_store(k.clone(), k, v, unturned, plan.slots, cached.k, cached.v)
    for sequence, count in zip(sequences, counts, strict=True):
        cache.commit(sequence, count)
    return plan


def assert_holds(cache, plan, row, canaries):
    """Sequence `row` of the plan has these tokens in the cache, read by page table and by pieces."""
    size, n = cache.config.page_size, len(canaries)
    assert int(plan.exact_lens[row]) == n
    assert not plan.warm
    pages = -(-n // size)
    assert (plan.page_table[row, pages:] == 0).all()
    by_table = [int(plan.page_table[row, i // size]) * size + i % size for i in range(n)]
    by_pieces = [start + i for start, count in plan.pieces[row] for i in range(count)]
    assert by_pieces == by_table
    # As few pieces as there can be: no two of them touch.
    for (start, count), (following, _) in zip(plan.pieces[row], plan.pieces[row][1:], strict=False):
        assert start + count != following
    slots = torch.tensor(by_table)
    for layer, (k_cache, v_cache, *_) in enumerate(cache.layers):
        for cached, is_value in ((k_cache, False), (v_cache, True)):
            stored = cached.flatten(1, 2)[:, slots].transpose(0, 1)
            np.testing.assert_array_equal(stored.numpy(), rows(canaries, layer, is_value).numpy())


class CacheMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(num_pages=st.integers(1, 24), page_size=st.sampled_from([16, 32, 64]))
    def setup(self, num_pages, page_size):
        self.cache = make_cache(num_pages, page_size)
        self.tokens = {}  # sequence -> its canaries
        self.next_canary = 1

    def new_tokens(self, count):
        self.next_canary += count
        return list(range(self.next_canary - count, self.next_canary))

    def snapshot(self):
        frames, allocator = self.cache._frames, allocator_of(self.cache)
        used, free = bytes(allocator._used), [dict(starts) for starts in allocator._free]
        owned = [(sequence.pages.tolist(), sequence.length) for sequence in self.tokens]
        return used, free, list(frames._free_pages), frames._start.tolist(), frames.bits.tolist(), owned

    def pages_held(self):
        return sum(len(sequence.pages) for sequence in self.tokens)

    def reserve(self, sequence, length, room):
        """Whether it could; if not, nothing changed. It can if and only if there are the pages."""
        size, cache = self.cache.config.page_size, self.cache
        missing = max(-(-length // size) - len(sequence.pages), 0)
        before, free = self.snapshot(), cache.config.num_pages - self.pages_held()
        try:
            cache.reserve(sequence, length, room)
        except OutOfPages as error:
            assert missing > free, f"{missing} pages wanted, {free} free: {error}"
            assert self.snapshot() == before
            return False
        assert missing <= free
        assert len(sequence.pages) * size >= length
        assert cache.config.num_pages - self.pages_held() == free - missing, "more pages taken than needed"
        return True

    @rule(target=sequences)
    def create(self):
        sequence = CachedSequence()
        self.tokens[sequence] = []
        return sequence

    @rule(sequence=sequences, more=st.integers(0, 300), room=st.integers(0, 300))
    def reserve_only(self, sequence, more, room):
        self.reserve(sequence, len(self.tokens[sequence]) + more, room)

    @rule(sequence=sequences, count=st.integers(1, 100), room=st.integers(0, 300))
    def append(self, sequence, count, room):
        if not self.reserve(sequence, len(self.tokens[sequence]) + count, room):
            return
        new = self.new_tokens(count)
        plan = write(self.cache, [sequence], [new], num_decodes=int(count == 1))
        self.tokens[sequence] += new
        assert_holds(self.cache, plan, 0, self.tokens[sequence])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def step_of_a_batch(self, data):
        """Several sequences at once: those with one token first, as decodes."""
        chosen = data.draw(st.permutations(list(self.tokens)).map(lambda x: x[:4]))
        counts = sorted(
            data.draw(st.lists(st.just(1) | st.integers(1, 40), min_size=len(chosen), max_size=len(chosen)))
        )
        work = []
        for sequence, count in zip(chosen, counts, strict=True):
            if self.reserve(sequence, len(self.tokens[sequence]) + count, 0):
                work.append((sequence, self.new_tokens(count)))
        if not work:
            return
        ones = sum(len(new) == 1 for _, new in work)
        plan = write(self.cache, [s for s, _ in work], [new for _, new in work], ones)
        assert plan.num_decodes == ones
        assert plan.query_start.tolist() == [0, *np.cumsum([len(new) for _, new in work])]
        assert plan.max_query_len == max([len(new) for _, new in work if len(new) > 1], default=0)
        assert len(set(plan.slots.tolist())) == len(plan.slots) == plan.query_start[-1]
        for row, (sequence, new) in enumerate(work):
            self.tokens[sequence] += new
            assert_holds(self.cache, plan, row, self.tokens[sequence])

    @rule(sequence=consumes(sequences))
    def free(self, sequence):
        pages = len(sequence.pages)
        before = self.cache.num_free_pages
        self.cache.free(sequence)
        assert self.cache.num_free_pages == before + pages
        self.cache.free(sequence)  # has nothing any more
        assert self.cache.num_free_pages == before + pages
        del self.tokens[sequence]

    @invariant()
    def well(self):
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        cache.check(self.tokens)
        held = self.pages_held()
        assert cache.num_free_pages == cache.config.num_pages - held
        table = 4 * cache.config.num_pages
        assert cache.capacity_bytes == cache.config.num_pages * cache.config.page_size * TOKEN_BYTES + table
        assert cache.resident_bytes == held * cache.config.page_size * TOKEN_BYTES + table
        for sequence, tokens in self.tokens.items():
            assert sequence.length == len(tokens)

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        # What each sequence has is still what was written: read through a plan for one more token, not written.
        size = self.cache.config.page_size
        for sequence, tokens in self.tokens.items():
            if tokens and len(tokens) < len(sequence.pages) * size:
                plan = self.cache.plan([sequence], [1], 1)
                seen = [start + i for start, count in plan.pieces[0] for i in range(count)][:-1]
                stored = self.cache.layers[0][0].flatten(1, 2)[:, seen].transpose(0, 1)
                np.testing.assert_array_equal(stored.numpy(), rows(tokens, 0, False).numpy())
        for sequence in self.tokens:
            self.cache.free(sequence)
        self.cache.check([])
        assert self.cache.num_free_pages == self.cache.config.num_pages
        whole = CachedSequence()
        self.cache.reserve(whole, self.cache.config.num_pages * size)
        self.cache.check([whole])


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


# Where sequences lie.


@pytest.mark.parametrize("step", [1, 7, 64, 1000])
@pytest.mark.parametrize(
    ("num_pages", "room", "pieces"),
    [(5, True, 1), (8, True, 1), (13, True, 1), (8, False, 1), (16, False, 1), (5, False, 2), (13, False, 3)],
    ids=lambda x: str(x),
)  # fmt: skip
def test_a_single_sequence_stays_one_piece(num_pages, room, pieces, step):
    """However it grows, to the end of the pool. (Not announcing that it will, it begins in the smallest of the arena's
    blocks, and has as many pieces as the pool's size has binary ones.)"""
    cache, sequence = make_cache(num_pages), CachedSequence()
    total, length, most = num_pages * 16, 0, 0
    while length < total:
        new = min(step, total - length)
        cache.reserve(sequence, length + new, room=total - length - new if room else 0)
        plan = write(cache, [sequence], [list(range(length + 1, length + new + 1))])
        length += new
        most = max(most, len(plan.pieces[0]))
        cache.check([sequence])
    assert_holds(cache, plan, 0, list(range(1, total + 1)))
    assert cache.num_free_pages == 0
    assert most == 1 if pieces == 1 else most <= pieces
    with pytest.raises(OutOfPages):
        cache.reserve(sequence, total + 1)


def test_sequences_that_grow_in_turn_stay_whole_where_room_was_asked_for():
    cache = make_cache(64)
    sequences = [CachedSequence() for _ in range(4)]
    for length in range(1, 16 * 16 + 1, 16):
        for sequence in sequences:
            cache.reserve(sequence, length, room=16 * 16 - length)
            plan = write(cache, [sequence], [list(range(sequence.length + 1, length + 1))])
            assert len(plan.pieces[0]) == 1
    cache.check(sequences)


def test_a_scattered_pool_is_used_to_the_last_page():
    cache = make_cache(20)
    singles = [CachedSequence() for _ in range(20)]
    for i, sequence in enumerate(singles):
        cache.reserve(sequence, 16)
        write(cache, [sequence], [list(range(1000 * i + 1, 1000 * i + 17))])
    for sequence in singles[::2]:
        cache.free(sequence)
    long = CachedSequence()
    cache.reserve(long, 10 * 16)
    plan = write(cache, [long], [list(range(1, 161))])
    assert_holds(cache, plan, 0, list(range(1, 161)))
    assert len(plan.pieces[0]) == 10
    cache.check([long, *singles[1::2]])
    # Who was there before has what it had.
    for i, sequence in list(enumerate(singles))[1::2]:
        slot = int(cache._frames.exact_frames(np.array(sequence.pages))[0]) * 16
        stored = cache.layers[1][1].flatten(1, 2)[:, slot : slot + 16].transpose(0, 1)
        np.testing.assert_array_equal(stored.numpy(), rows(list(range(1000 * i + 1, 1000 * i + 17)), 1, True).numpy())


def test_a_failure_half_way_gives_back_what_was_taken():
    """Pages of fewer bits will leave units between the exact ones: as many page ids are free, but not the blocks."""
    cache = make_cache(8)
    allocator, free_pages = allocator_of(cache), cache._frames._free_pages
    small = [allocator.alloc(EXACT_ORDER - 1), allocator.alloc(EXACT_ORDER)]
    allocator.free(small[1])
    before = bytes(allocator._used), allocator.free_units, list(free_pages)
    sequence = CachedSequence()
    assert cache.num_free_pages == 7
    with pytest.raises(OutOfPages):
        cache.reserve(sequence, 8 * 16)
    assert (bytes(allocator._used), allocator.free_units, list(free_pages)) == before
    assert not sequence.pages
    allocator.check()
    cache.reserve(sequence, 7 * 16)
    allocator.check()


def test_reserving_what_is_there_changes_nothing():
    cache, sequence = make_cache(4), CachedSequence()
    cache.reserve(sequence, 33)
    pages = sequence.pages.tolist()
    for length in (0, 1, 33, 48):
        cache.reserve(sequence, length, room=1000)
        assert sequence.pages.tolist() == pages


def test_committing_past_the_reserved_pages_is_our_bug():
    cache, sequence = make_cache(4), CachedSequence()
    cache.reserve(sequence, 16)
    with pytest.raises(AssertionError, match="past the reserved pages"):
        cache.commit(sequence, 17)


def one_place(cache, page, other):
    cache._frames._start[page] = cache._frames._start[other]


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda cache, a, b: a.pages.append(b.pages[0]), "owners of pages are counted wrong"),
        (lambda cache, a, b: a.pages.pop(), "owners of pages are counted wrong"),
        (lambda cache, a, b: cache._frames._free_pages.append(a.pages[0]), "lost, or free and in use"),
        (lambda cache, a, b: one_place(cache, a.pages[0], b.pages[0]), "the same block"),
        (lambda cache, a, b: allocator_of(cache).alloc(EXACT_ORDER), "blocks that no page has"),
        (lambda cache, a, b: setattr(a, "length", 1000), "lacks pages"),
    ],
    ids=["shared", "lost", "free-and-used", "one-frame-twice", "leak", "short"],
)  # fmt: skip
def test_check_sees_what_is_broken(break_it, message):
    cache, a, b = make_cache(6), CachedSequence(), CachedSequence()
    cache.reserve(a, 20)
    cache.reserve(b, 20)
    cache.check([a, b])
    break_it(cache, a, b)
    with pytest.raises(AssertionError, match=message):
        cache.check([a, b])


# Numbers.


def config(**changes):
    good = {
        "num_layers": 2,
        "num_kv_heads": 3,
        "head_dim": 8,
        "itemsize": 2,
        "capacity_bytes": 1 << 20,
        "page_size": 32,
    }
    return CacheConfig(**{**good, **changes})


def test_sizes_by_hand():
    made = config()
    assert made.token_bytes == 2 * 2 * 3 * 8 * 2 == 192
    assert made.page_bytes == 32 * 192
    assert made.num_pages == (1 << 20) // 6144 == 170
    assert made.num_units == 170 * 16
    assert (made.exact_bits, made.exact_order, made.unit_bytes) == (16, 4, 32 * 8 / 8)
    assert made.unit_total_bytes == made.unit_bytes * 2 * 2 * 3
    assert made.num_units * made.unit_total_bytes == made.num_pages * made.page_bytes
    assert [made.pages_for(n) for n in (0, 1, 32, 33, 64)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({key: value}, key) for key in ("num_layers", "num_kv_heads", "head_dim", "itemsize") for value in (0, -1)),
        *(({"page_size": value}, f"page_size.*{value}") for value in (0, 1, 8, 48, 128, -16)),
        *(({"capacity_bytes": value}, f"6144 bytes, got {value}") for value in (0, -1, 6143)),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_numbers_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_the_pool_is_whole_pages_of_its_bytes():
    cache = make_cache(3, spare_bytes=16 * TOKEN_BYTES - 1)
    assert cache.config.num_pages == 3
    planes = [x for layer in cache.layers for x in (layer.k, layer.v)]
    units = [x for layer in cache.layers for x in (layer.units_k, layer.units_v)]
    assert sum(x.nbytes for x in planes) == sum(x.nbytes for x in units) == 3 * 16 * TOKEN_BYTES
    assert [tuple(x.shape) for x in planes[:2]] == [(HEADS, 3, 16, DIM)] * 2
    assert [tuple(x.shape) for x in units[:2]] == [(HEADS, 3 * 32, 16 * DIM // 8)] * 2
    # All one buffer, each element once; the units are the same bytes.
    assert len({x.untyped_storage().data_ptr() for x in planes + units}) == 1
    assert [x.data_ptr() for x in planes] == [x.data_ptr() for x in units]
    for i, x in enumerate(planes):
        x.fill_(i)
    assert [x.unique().tolist() for x in planes] == [[0.0], [1.0], [2.0], [3.0]]
    assert all(torch.equal(x.view(torch.uint8).view(y.shape), y) for x, y in zip(planes, units, strict=True))


def test_a_pool_beyond_the_machine_is_a_capacity_error():
    huge = config(capacity_bytes=1 << 60)
    with pytest.raises(CapacityError, match=f"{huge.num_pages} pages.*--kv-cache-memory"):
        KVCache(huge, torch.bfloat16, torch.device("cpu"), reference)
