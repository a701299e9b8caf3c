"""The cache whose pages are compressed, against a dict of what was written.

Every sequence's tokens are random numbers of its own, so that a token of another one, or what was there before (freed
bytes are overwritten with NaN: tests/oracle/invariants.py), is further off than any rounding.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from kernels import reference
from memory.arena import Arena
from memory.cache import KVCache
from memory.config import WARM_BITS, CacheConfig, ColdConfig, TierConfig
from memory.errors import AllocatorError
from memory.frames import OutOfPages
from memory.prefix import CachedSequence
from tools.float64 import decompress, hadamard

LAYERS, HEADS = 2, 2
# Root of the mean square of what rounding costs, over that of the numbers; going down step by step included.
LOSS = {8: 0.05, 4: 0.32, 3: 0.5, 2: 0.8}
DTYPE = {4: torch.float32, 2: torch.bfloat16}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def make_config(num_pages, dim=16, page_size=16, itemsize=4, tiers=None, **others):
    token_bytes = 2 * LAYERS * HEADS * dim * itemsize
    return CacheConfig(
        LAYERS, HEADS, dim, itemsize, num_pages * page_size * token_bytes, page_size, tiers or TierConfig(), **others
    )


def make_cache(*args, **others):
    config = make_config(*args, **others)
    return KVCache(config, DTYPE[config.itemsize], torch.device("cpu"), reference)


def new_tokens(config, count):
    """[layers, K and V, heads, count, dim]: what compression is made for, rotated numbers on both sides of 0."""
    rotated = torch.randn(LAYERS, 2, HEADS, count, config.head_dim, dtype=torch.float64)
    rotated[..., 0], rotated[..., 1] = rotated[..., 0].abs() + 0.5, -rotated[..., 1].abs() - 0.5
    return (rotated @ torch.from_numpy(hadamard(config.head_dim))).to(DTYPE[config.itemsize])


class Tokens:
    """A sequence and what it must hold."""

    def __init__(self, config):
        self.sequence = CachedSequence()
        self.truth = new_tokens(config, 0)


def write(cache, held, counts):
    """One step, as the engine takes it, up to its commit; the pages are reserved. Returns the plan."""
    plan = cache.plan([h.sequence for h in held], counts, sum(n == 1 for n in counts))
    new = [new_tokens(cache.config, n) for n in counts]
    every = torch.cat(new, dim=3)
    for layer, cached in enumerate(cache.layers):
        for plane, kept in enumerate((cached.k, cached.v)):
            kept.view(HEADS, -1, cache.config.head_dim)[:, plan.slots] = every[layer, plane]
    for h, tokens in zip(held, new, strict=True):
        h.truth = torch.cat([h.truth, tokens], dim=3)
    return plan


def append(cache, held, count, room=0):
    cache.reserve(held.sequence, held.sequence.length + count, room)
    plan = write(cache, [held], [count])
    cache.commit(held.sequence, count)
    return plan


def stored(cache, plan, row, layer, plane, head):
    """What attention would read: (exact tokens [n, dim], {bits: [pages, page_size, dim] float64})."""
    config, cached = cache.config, cache.layers[layer]
    size, dim = config.page_size, config.head_dim
    exact, units = (cached.k, cached.units_k) if plane == 0 else (cached.v, cached.units_v)
    places = [start + i for start, count in plan.pieces[row] for i in range(count)]
    tokens = exact[head].reshape(-1, dim)[places]
    raw = units[head].flatten().numpy()
    warm = {}
    for formats in plan.warm:
        found = []
        for i in range(int(formats.counts[row])):
            low = (2 if formats.bits == 3 else formats.bits) * config.unit_bytes
            code, record = int(formats.codes[row, i]) * low, int(formats.records[row, i]) * formats.record_bytes
            runs = [raw[code : code + low]]
            if formats.bits == 3:
                high = int(formats.high[row, i]) * config.unit_bytes
                runs.append(raw[high : high + config.unit_bytes])
            scales = raw[record : record + size + (dim if plane == 0 else size)]
            found.append(decompress(np.concatenate(runs), scales, formats.bits, plane == 0, size, dim))
        warm[formats.bits] = found
    return tokens, warm


def assert_holds(cache, plan, row, held, planes=((0, 0, 0), (1, 1, 1), (0, 1, 1))):
    """Exact tokens to the bit, compressed ones within the rounding of their format, of the page that is theirs."""
    size, exact_bits = cache.config.page_size, cache.config.exact_bits
    length = held.truth.shape[3]
    bits = cache._frames.bits[np.array(held.sequence.pages)][: -(-length // size)].tolist()
    for layer, plane, head in planes:
        truth = held.truth[layer, plane, head]
        tokens, warm = stored(cache, plan, row, layer, plane, head)
        exact = [truth[i * size : (i + 1) * size] for i, b in enumerate(bits) if b == exact_bits]
        expected = torch.cat([truth[:0], *exact])
        assert torch.equal(tokens[: len(expected)], expected)
        seen = dict.fromkeys(warm, 0)
        for i, b in enumerate(bits):
            if b == exact_bits:
                continue
            page, wanted = warm[b][seen[b]], truth[i * size : (i + 1) * size].double().numpy()
            seen[b] += 1
            loss = np.sqrt(((page - wanted) ** 2).mean() / (wanted**2).mean())
            assert loss < LOSS[b], f"page {i} of {b} bits is off by {loss}"
        assert all(count == len(warm[b]) for b, count in seen.items())


def assert_copies(cache, held):
    """Every copy is of its page: exact ones to the bit, those of 8 bits within half a step. Compressed pages have one,
    unless there is less place than for all."""
    frames, size = cache._frames, cache.config.page_size
    if frames.config.cold is None:
        return
    assert cache.stats()["kv_cold_bytes"] <= cache.config.cold.capacity_bytes
    for i, page in enumerate(held.sequence.pages[: held.sequence.length // size]):
        slot = int(frames.copies.slots[page])
        if slot < 0:
            assert frames.is_exact(page) or len(frames.copies.rows) < len(frames.bits)
            continue
        truth = held.truth[:, :, :, i * size : (i + 1) * size]
        rows = frames.copies.rows[slot].permute(0, 3, 1, 2, 4)  # [layers, K and V, heads, tokens, width]
        if frames.copies.exact:
            assert torch.equal(rows, truth)
        else:
            scale = rows[..., -2:].contiguous().view(torch.float16).float()
            error = (rows[..., :-2] * scale - truth.float()).abs()
            assert (error <= 0.51 * scale + 1e-6).all()


def assert_readable(cache, held):
    """Read through a plan for one more token, where there is a page for it."""
    try:
        cache.reserve(held.sequence, held.sequence.length + 1)
    except OutOfPages:
        return
    assert_holds(cache, cache.plan([held.sequence], [1], 1), 0, held)


tier_configs = st.builds(
    TierConfig,
    budget=st.none() | st.sampled_from([0.2, 0.3, 0.5, 0.8, 1.0]),
    recent_tokens=st.sampled_from([0, 16, 64]),
    hot_threshold=st.sampled_from([0.4, 1.0]),
    warm_threshold=st.sampled_from([0.0, 0.3, 1.0]),
    evict_threshold=st.sampled_from([0.0, 0.15, 1.0]),
    max_moves=st.sampled_from([0, 2, 8]),
    hot_layer_size=st.none() | st.sampled_from([0, 48, 200]),
    importance=st.sampled_from(["score", "random", "none"]),
)


class TierMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(
        num_pages=st.integers(2, 16),
        shape=st.sampled_from([(8, 16), (16, 16), (24, 16), (64, 32)]),
        itemsize=st.sampled_from([2, 4]),
        tiers=tier_configs,
        cold=st.none() | st.builds(
            ColdConfig,
            format=st.sampled_from(["exact", "int8"]),
            capacity_bytes=st.sampled_from([0, 1 << 15, 1 << 30]),
            recall=st.sampled_from([0.0, 0.1, 1.0]),
            exclusive=st.booleans(),
        ),
        seed=st.integers(0, 1000),
    )  # fmt: skip
    def setup(self, num_pages, shape, itemsize, tiers, cold, seed):
        torch.manual_seed(seed)
        self.random = np.random.default_rng(seed)
        self.cache = make_cache(num_pages, *shape, itemsize, tiers, cold=cold)
        self.held = []

    @property
    def all(self):
        return [h.sequence for h in self.held]

    @precondition(lambda self: len(self.held) < 4)
    @rule(target=sequences)
    def create(self):
        self.held.append(Tokens(self.cache.config))
        return self.held[-1]

    def room(self, pages, growing=()):
        """Whether room could be made; it can if pages at their smallest leave so many units."""
        config = self.cache.config
        least = sum(config.least_units(s.length) for s in self.all)
        # Pages that are reserved and empty, and blocks of records that hold few of them, are not counted there.
        least += sum(len(s.pages) - config.pages_for(s.length) for s in self.all) << config.exact_order
        warm = sum(
            int((self.cache._frames.bits[np.array(s.pages, dtype=int)] < config.exact_bits).sum()) for s in self.all
        )
        if config.records_per_block > 1:
            least += warm << config.record_order
        try:
            self.cache.make_room(pages, self.all, growing)
        except OutOfPages:
            assert least + (pages << config.exact_order) > config.num_units
            return False
        assert self.cache.num_free_pages >= pages
        assert not any(self.cache._frames.is_half(sequence.pages[-1]) for sequence in growing)
        assert self.cache._frames._exact.allocator.num_free(config.exact_order) >= pages
        return True

    @rule(held=sequences, count=st.integers(1, 70), settle=st.booleans())
    def append(self, held, count, settle):
        sequence = held.sequence
        length = sequence.length + count
        growing = [sequence] if self.cache.outgrows(sequence, length) else []
        if not self.room(self.cache.missing_pages(sequence, length), growing):
            return
        self.cache.reserve(sequence, length, room=int(self.random.integers(0, 100)))
        plan = write(self.cache, [held], [count])
        assert_holds(self.cache, plan, 0, held)
        if self.random.random() < 0.7:
            self.observe([held], [count], plan)
        self.cache.commit(sequence, count)
        if settle:
            self.cache.settle(self.all)

    @precondition(lambda self: len(self.held) > 1)
    @rule()
    def step_of_all(self):
        growing = [s for s in self.all if self.cache.outgrows(s, s.length + 1)]
        if not self.room(sum(self.cache.missing_pages(s, s.length + 1) for s in self.all), growing):
            return
        for sequence in self.all:
            self.cache.reserve(sequence, sequence.length + 1)
        plan = write(self.cache, self.held, [1] * len(self.held))
        for row, held in enumerate(self.held):
            assert_holds(self.cache, plan, row, held, planes=((1, 0, 1),))
        self.observe(self.held, [1] * len(self.held), plan)
        for sequence in self.all:
            self.cache.commit(sequence, 1)
        self.cache.settle(self.all)

    def observe(self, held, counts, plan):
        columns = plan.num_columns(self.cache.config.page_size) // self.cache.config.page_size
        shares = self.random.dirichlet(np.full(columns, 0.3), len(held)).astype(np.float32)
        if self.random.random() < 0.1:
            shares[0][:] = np.nan
        self.cache.observe([h.sequence for h in held], counts, plan, shares)

    @rule()
    def settle(self):
        before = [sequence.moves for sequence in self.all]
        self.cache.settle(self.all)
        moved = sum(sequence.moves for sequence in self.all) - sum(before)
        self.cache.settle(self.all)
        assert moved or sum(sequence.moves for sequence in self.all) == sum(before)

    @rule(pages=st.integers(0, 6))
    def make_room(self, pages):
        self.room(pages)

    @rule(pages=st.integers(0, 6))
    def compact(self, pages):
        """As `make_room` calls it: the units are free."""
        free = self.cache._frames.free_units()
        pages = min(pages, self.cache.num_free_pages)
        self.cache._frames.join(pages, [])
        assert self.cache._frames.free_units() == free
        assert self.cache._frames._exact.allocator.num_free(self.cache.config.exact_order) >= pages

    @rule(held=sequences, count=st.integers(1, 40))
    def reserve(self, held, count):
        """A step that failed."""
        sequence, length = held.sequence, held.sequence.length + count
        growing = [sequence] if self.cache.outgrows(sequence, length) else []
        if self.room(self.cache.missing_pages(sequence, length), growing):
            self.cache.reserve(sequence, length)

    @rule(held=sequences)
    def read(self, held):
        assert_readable(self.cache, held)

    @rule(held=consumes(sequences))
    def free(self, held):
        self.cache.free(held.sequence)
        self.held.remove(held)

    @invariant()
    def well(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check(self.all)
        for held in self.held:
            assert_copies(self.cache, held)
        reports = [self.cache.report(sequence) for sequence in self.all]
        for sequence, report in zip(self.all, reports, strict=True):
            assert report["hot_tokens"] + report["warm_tokens"] == sequence.length
            assert report["hot_bytes"] + report["warm_bytes"] == report["resident_bytes"] <= report["peak_bytes"]
            assert sum(report["pages_by_bits"].values()) == len(sequence.pages)
            assert report["moves"] == sequence.moves
        table = self.cache._frames.table_bytes
        assert sum(r["resident_bytes"] for r in reports) <= self.cache.resident_bytes - table
        assert self.cache.resident_bytes <= self.cache.capacity_bytes

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for held in self.held:
            assert_readable(self.cache, held)
        for sequence in self.all:
            self.cache.free(sequence)
        self.cache.check([])
        assert self.cache.num_free_pages == self.cache.config.num_pages
        assert self.cache.resident_bytes == self.cache._frames.table_bytes
        assert self.cache.stats()["kv_cold_bytes"] == 0


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


# Fragments.


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_pool_in_fragments_is_brought_together(itemsize):
    """Every page at 3 bits, every other one's sequence freed: units enough for frames, and no frame in one piece."""
    cache = make_cache(12, itemsize=itemsize)
    held = [Tokens(cache.config) for _ in range(24)]
    for h in held:
        cache.make_room(1, [x.sequence for x in held])
        append(cache, h, 16)
        cache._frames.compress(np.array(h.sequence.pages), 3)
    for h in held[::2]:
        cache.free(h.sequence)
    held = held[1::2]
    sequences = [h.sequence for h in held]
    cache.check(sequences)
    wanted = cache.num_free_pages
    assert cache._frames._exact.allocator.num_free(cache.config.exact_order) < wanted
    cache.make_room(wanted, sequences)
    assert cache._frames._exact.allocator.num_free(cache.config.exact_order) >= wanted
    cache.check(sequences)
    assert sum(sequence.moves for sequence in sequences) == 0, "pages went down though the units were there"
    long = Tokens(cache.config)
    append(cache, long, 16 * wanted - 1)
    assert_readable(cache, long)
    for h in held:
        assert cache._frames.bits[np.array(h.sequence.pages)].tolist() == [3]
    cache.free(long.sequence)
    for h in held:
        assert_readable(cache, h)


def test_making_room_for_more_than_there_can_be_says_so():
    cache = make_cache(4)
    held = Tokens(cache.config)
    append(cache, held, 48)
    with pytest.raises(OutOfPages, match=r"9 pages wanted, \d of 4 free"):
        cache.make_room(9, [held.sequence])
    cache.check([held.sequence])
    assert_readable(cache, held)


def test_without_tiers_nothing_is_compressed():
    config = CacheConfig(1, 1, 16, 4, 4 * 16 * 128, 16)
    cache = KVCache(config, torch.float32, torch.device("cpu"), reference)
    sequence = CachedSequence()
    cache.reserve(sequence, 64)
    cache.commit(sequence, 60)
    cache.settle([sequence])
    with pytest.raises(OutOfPages, match="1 pages wanted, 0 of 4 free"):
        cache.make_room(1, [sequence])
    assert set(cache._frames.bits[np.array(sequence.pages)]) == {32} and sequence.moves == 0


# The budget.


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("budget", [0.2, 0.25, 0.31, 0.4, 0.5, 0.6, 0.75, 0.9, 0.99])
@pytest.mark.parametrize("dim", [16, 64])
def test_the_budget_holds_after_every_step(dim, budget, itemsize):
    """Resident bytes but for the table are the budget's share of the exact ones; but full pages never fall below the
    format that it pays for, and the first page stays at 8 bits. What these two take on top does not grow; with a
    budget of 0.4 it is paid for from ten pages on."""
    config = make_config(64, dim, 16, itemsize, TierConfig(budget=budget))
    cache, held = KVCache(config, DTYPE[itemsize], torch.device("cpu"), reference), Tokens(config)
    sequence, random = held.sequence, np.random.default_rng(0)
    exact, *costs = (config.page_cost(bits) for bits in (config.exact_bits, *WARM_BITS))
    paid = max(cost for cost in costs if cost <= budget * exact)
    while sequence.length < 50 * 16:
        count = int(random.choice([1, 1, 1, 7, 16, 33, 150]))
        cache.reserve(sequence, sequence.length + count)
        cache.commit(sequence, count)
        cache.settle([sequence])
        resident = cache.resident_bytes - cache._frames.table_bytes
        share = budget * sequence.length * config.token_bytes
        full, rest = divmod(sequence.length, 16)
        filled = exact * (0 if not rest else 1 if rest > 8 else 0.5)
        floor = min(full, 1) * costs[0] + max(full - 1, 0) * paid + filled + (config.unit_bytes << config.record_order)
        assert resident <= max(share, floor * config.unit_total_bytes / config.unit_bytes)
        if full >= 10 and budget >= 0.4:
            assert resident <= share
    cache.check([sequence])
    assert cache.report(sequence)["peak_bytes"] >= cache.report(sequence)["resident_bytes"]


def test_all_that_the_budget_pays_for_stays():
    """A budget of 1 compresses nothing; one of two thirds keeps every page at 8 bits or above."""
    for budget, least in ((1.0, 16), (0.67, 8)):
        config = make_config(64, 64, 16, 2, TierConfig(budget=budget, max_moves=0))
        cache, held = KVCache(config, torch.bfloat16, torch.device("cpu"), reference), Tokens(config)
        for _ in range(40):
            append(cache, held, 16)
            cache.settle([held.sequence])
        counts = cache.report(held.sequence)["pages_by_bits"]
        assert min(counts) >= least, counts


def test_a_page_is_halved_only_where_it_is_the_last():
    """A step that fails leaves pages reserved behind the one that is being filled; the next one may be shorter."""
    cache = make_cache(40, tiers=TierConfig(budget=0.9))
    held, other = Tokens(cache.config), Tokens(cache.config)
    cache.reserve(held.sequence, 100)
    append(cache, held, 5)
    cache.settle([held.sequence])
    append(cache, held, 15)
    assert not any(cache._frames.is_half(page) for page in held.sequence.pages)
    for _ in range(12):  # its pages of 8 bits would lie in the half that is free
        append(cache, other, 16)
        cache.settle([other.sequence])
    cache.check([held.sequence, other.sequence])
    assert_readable(cache, held)
    append(cache, held, 1)
    assert_readable(cache, other)


def test_a_halved_page_is_whole_again_when_it_is_written():
    cache = make_cache(40, tiers=TierConfig(budget=0.9))
    held, other = Tokens(cache.config), Tokens(cache.config)
    for step in range(70):
        append(cache, held, 1)
        append(cache, other, 3)
        cache.settle([held.sequence, other.sequence])
        cache.check([held.sequence, other.sequence])
        assert cache._frames.is_half(held.sequence.pages[-1]) == (0 < held.sequence.length % 16 <= 8), step
    assert_readable(cache, held)
    assert_readable(cache, other)


def test_a_bound_on_exact_tokens_holds_for_all_sequences_together():
    cache = make_cache(32, tiers=TierConfig(hot_layer_size=96, max_moves=0))
    held = [Tokens(cache.config) for _ in range(3)]
    for _ in range(60):
        for h in held:
            append(cache, h, 2)
        cache.settle([h.sequence for h in held])
        hot = sum(cache.report(h.sequence)["hot_tokens"] for h in held)
        assert hot <= 96 + 3 * 16  # the pages that are being filled come on top
    assert {b for h in held for b in cache.report(h.sequence)["pages_by_bits"]} == {8, 32}
    for h in held:
        assert_readable(cache, h)


# Records.


def test_records_are_cut_from_blocks_that_come_back():
    config = make_config(8, 64, 32)
    arena = Arena(config, config.num_units, torch.device("cpu"))
    assert config.records_per_block == 2
    records = [arena.alloc_record() for _ in range(7)]
    assert len(set(records)) == 7 and arena.allocator.used_units == 4 << config.record_order
    arena.check([], records)
    for record in records[::2]:
        arena.free_record(record)
        with pytest.raises(AllocatorError, match=f"record {record} is freed twice"):
            arena.free_record(record)
    arena.check([], records[1::2])
    for record in records[1::2]:
        arena.free_record(record)
    assert arena.allocator.free_units == config.num_units
    for record in (0, 5, 10**6, -1):
        with pytest.raises(AllocatorError, match="freed twice, or was never allocated"):
            arena.free_record(record)
    arena.check([], [])


def test_a_page_freed_twice_is_an_error_in_every_build():
    cache = make_cache(4)
    held = Tokens(cache.config)
    append(cache, held, 40)
    cache._frames.compress(np.array(held.sequence.pages[:1]), 4)
    pages = held.sequence.pages.tolist()
    cache.free(held.sequence)
    for page in pages:
        with pytest.raises(AllocatorError, match="freed twice"):
            cache._frames.free(page)


# Where compressed pages lie.


def shared_segments():
    return set(os.listdir("/dev/shm"))


def test_shared_pages_lie_in_an_arena_of_their_own():
    before = shared_segments()
    cache = make_cache(8, tiers=TierConfig(budget=0.3, shared=True))
    assert shared_segments() == before, "the segment has a name that could be left behind"
    layer = cache.layers[0]
    assert layer.k.untyped_storage().data_ptr() != layer.units_k.untyped_storage().data_ptr()
    assert layer.units_k.is_shared() and layer.units_v.is_shared()
    held = Tokens(cache.config)
    assert cache.stats()["kv_shared_bytes"] == 0
    for _ in range(8):
        append(cache, held, 15)
        cache.settle([held.sequence])
    report = cache.report(held.sequence)
    assert cache.stats()["kv_shared_bytes"] == report["warm_bytes"] > 0  # a record is a block of its own here
    assert cache.resident_bytes == report["resident_bytes"] + cache._frames.table_bytes
    cache.check([held.sequence])
    assert_readable(cache, held)
    cache.make_room(4, [held.sequence])
    assert_readable(cache, held)
    cache.free(held.sequence)
    assert cache.stats()["kv_shared_bytes"] == 0
    cache.check([])


KILLED = """
import os, sys, time
import torch
from test_tiers import *
cache = make_cache(64, tiers=TierConfig(budget=0.3, shared=True))
held = Tokens(cache.config)
append(cache, held, 300)
cache.settle([held.sequence])
assert cache.stats()["kv_shared_bytes"]
print("ready", flush=True)
time.sleep(60)
"""


def test_nothing_is_left_of_shared_memory_after_a_kill():
    before = shared_segments()
    root = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join([str(root), str(root / "tests")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, env=env, cwd=root)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert shared_segments() <= before


def test_a_full_shared_arena():
    cache = make_cache(4, tiers=TierConfig(hot_layer_size=0, shared=True))
    held = Tokens(cache.config)
    for _ in range(cache.config.most_tokens // 16 - 1):
        cache.make_room(1, [held.sequence])
        append(cache, held, 16)
        cache.settle([held.sequence])
        cache.check([held.sequence])
    assert set(WARM_BITS) & set(cache.report(held.sequence)["pages_by_bits"])
