"""Sequences that share pages, against lists of tokens: what is adopted is the longest beginning that was kept, and
every sequence reads what its own tokens say, whoever had its pages before and whoever has them still.

K and V of a token are a function of its salt and of all tokens up to it, as a model's are. Where one is computed over
compressed pages it is another number, a little off, so that what is called exact can be told from what is not.
"""

import functools
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from test_tiers import DTYPE, HEADS, LAYERS, LOSS, new_tokens, one_thread, stored, tier_configs

from kernels import reference
from memory.cache import KVCache
from memory.config import CacheConfig, TierConfig
from memory.errors import AllocatorError
from memory.frames import OutOfPages
from memory.prefix import CachedSequence

__all__ = ["one_thread"]  # a fixture for all tests here

# Of the machine; 1,000,000 take a quarter of an hour, and pytest's --timeout 0.
OPERATIONS = int(os.environ.get("ISOTHERM_TEST_OPERATIONS", "10000"))
STEPS = 50
OFF = 1 + 2**-5  # what a token is multiplied by that was computed over compressed pages
SALTS = ("", "a")
EVERYWHERE = [(layer, plane, head) for layer in range(LAYERS) for plane in range(2) for head in range(HEADS)]


def make_cache(num_pages, shape=(16, 16), itemsize=4, tiers=None, fingerprint=b"", **others):
    dim, size = shape
    capacity = num_pages * size * 2 * LAYERS * HEADS * dim * itemsize
    others = {"prefix_caching": True, **others}
    config = CacheConfig(LAYERS, HEADS, dim, itemsize, capacity, size, tiers, **others)
    return KVCache(config, DTYPE[itemsize], torch.device("cpu"), reference, fingerprint=fingerprint)


@functools.cache
def numbers(dim, itemsize):
    """[2 (as it is, off), layers, K and V, heads, 4096, dim]: K and V that a token can have."""
    torch.manual_seed(0)
    pure = new_tokens(SimpleNamespace(head_dim=dim, itemsize=itemsize), 4096)
    return torch.stack([pure, pure * OFF])


def histories(salt, tokens):
    """For each token a number in [0, 4096) that depends on all up to it."""
    state, found = len(salt), []
    for token in tokens:
        state = (state * 6364136223846793005 + token * 1442695040888963407 + 1) % (1 << 64)
        found.append(state >> 52)
    return np.array(found, dtype=np.int64)


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def longest(texts):
    """Those that are not the beginning of another one."""
    return {text for text in texts if not any(len(other) > len(text) and other[: len(text)] == text for other in texts)}


class Held:
    """A sequence, and what it must hold."""

    def __init__(self, salt, exact, tokens):
        self.sequence = CachedSequence()
        self.salt, self.exact, self.tokens = salt, exact, tokens
        self.off = np.zeros(0, dtype=np.int64)  # 1 for each cached token that is off

    @property
    def cached(self):
        return tuple(self.tokens[: self.sequence.length])


class Pages:
    """Reads pages of a cache, as attention does."""

    def __init__(self, cache):
        self.cache = cache
        self.size, self.exact_bits = cache.config.page_size, cache.config.exact_bits
        self.numbers = numbers(cache.config.head_dim, cache.config.itemsize)

    def plan(self, pages, length):
        """What `stored` reads of a plan: the pages one by one."""
        frames = self.cache._frames
        pages = np.array(pages, dtype=np.int64)[: -(-length // self.size)]
        bits = frames.bits[pages]
        exact = np.flatnonzero(bits == self.exact_bits).tolist()
        starts = (frames.exact_frames(pages[exact]).astype(int) * self.size).tolist()
        pieces = [(start, min(self.size, length - i * self.size)) for start, i in zip(starts, exact, strict=True)]
        warm = [frames.warm_pages([pages], b) for b in sorted(set(bits.tolist()) - {self.exact_bits})]
        return bits.tolist(), SimpleNamespace(pieces=[pieces], warm=warm)

    def check(self, pages, salt, tokens, off=None, places=EVERYWHERE):
        """The pages have these tokens, exact ones to the bit; returns which are off, where that is not given."""
        known, length, size = histories(salt, tokens), len(tokens), self.size
        bits, plan = self.plan(pages, length)
        every = np.arange(length)
        is_exact = np.repeat([b == self.exact_bits for b in bits], size)[:length]
        found = np.zeros(length, dtype=np.int64) if off is None else off
        for layer, plane, head in places:
            exact, warm = stored(self.cache, plan, 0, layer, plane, head)
            pure, rounded = self.numbers[:, layer, plane, head, known]
            if off is None:
                seen = torch.full_like(pure, torch.nan)
                seen[is_exact] = exact
                found = np.where((seen == rounded).all(1), 1, found)
                off = found
            wanted = self.numbers[found, layer, plane, head, known]
            assert torch.equal(exact, wanted[is_exact]), f"tokens {every[is_exact][(exact != wanted[is_exact]).any(1)]}"
            taken = dict.fromkeys(warm, 0)
            for i, b in enumerate(bits):
                if b == self.exact_bits:
                    continue
                page, truth = warm[b][taken[b]], pure[i * size : (i + 1) * size].double().numpy()
                taken[b] += 1
                loss = np.sqrt(((page - truth) ** 2).mean() / (truth**2).mean())
                assert loss < LOSS[b] + OFF - 1, f"page {i} of {b} bits is off by {loss}"
        return found


def paths(cache):
    """(namespace, tokens, pages) from the root to each leaf of the tree."""
    tree = cache.prefixes.tree
    stack = [(root, root.first, (), ()) for root in tree._children(tree._top)]
    while stack:
        node, namespace, tokens, pages = stack.pop()
        tokens, pages = tokens + tuple(np.frombuffer(bytes(node.edge), np.int32).tolist()), pages + tuple(node.values)
        below = list(tree._children(node))
        stack += [(child, namespace, tokens, pages) for child in below]
        if not below:
            yield namespace, tokens, pages


class SharingMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(
        num_pages=st.integers(2, 24),
        shape=st.sampled_from([(8, 16), (16, 16), (64, 32), (8, 64)]),
        itemsize=st.sampled_from([2, 4]),
        tiers=st.none() | tier_configs,
        policy=st.sampled_from(["importance", "lru"]),
        depth=st.none() | st.integers(1, 3),
        children=st.sampled_from([2, 8, None]),
        seed=st.integers(0, 1000),
    )
    def setup(self, num_pages, shape, itemsize, tiers, policy, depth, children, seed):
        limits = {"max_prefix_depth": depth, "max_prefix_children": children}
        self.cache = make_cache(num_pages, shape, itemsize, tiers, eviction_policy=policy, **limits)
        self.size, self.tiers, self.depth = shape[1], tiers, depth
        self.pages = Pages(self.cache)
        self.random = np.random.default_rng(seed)
        self.held = []
        self.texts = [[0] * 40]
        self.kept = {salt: set() for salt in SALTS}
        self.evicted = False
        tree = self.cache.prefixes.tree
        evict = tree.evict

        def watched(count):
            pages = evict(count)
            self.evicted |= bool(pages)
            return pages

        tree.evict = watched

    @property
    def all(self):
        return [held.sequence for held in self.held]

    def live_pages(self):
        return {page for sequence in self.all for page in sequence.pages}

    # What a request does.

    @precondition(lambda self: len(self.held) < 5)
    @rule(
        target=sequences, which=st.integers(0, 30), cut=st.integers(0, 300), tail=st.integers(1, 60),
        flavour=st.integers(0, 2), salt=st.sampled_from(SALTS), exact=st.booleans(),
    )  # fmt: skip
    def begin(self, which, cut, tail, flavour, salt, exact):
        """A text that begins like an earlier one, up to any token."""
        tokens = self.texts[which % len(self.texts)][:cut] + [flavour * 3 + i % 3 for i in range(tail)]
        self.texts.append(tokens)
        held = Held(salt, exact, tokens)
        size, sequence = self.size, held.sequence
        live = self.live_pages()
        expected = max((common(tokens[:-1], text) for text in self.kept[salt]), default=0)
        found, shared = self.cache.cached_tokens(tokens[:-1], salt, exact)
        self.cache.adopt(sequence, tokens[:-1], salt, exact)
        self.held.append(held)
        length = sequence.length
        full = sequence.pages[: length // size].tolist()
        assert length <= found <= expected
        assert found == expected or self.tiers, "more was kept"
        assert exact or found >= expected // size * size
        if length < found:
            # There was no place for a copy of the rest, or none but the one that it had and that was let go for it.
            left, _ = self.cache.cached_tokens(tokens[:-1], salt, exact)
            assert length == found // size * size and (self.cache.num_free_pages == 0 or left == length)
        assert len(sequence.pages) == -(-length // size)
        assert shared == len(live.intersection(full))
        if length % size:
            assert sequence.pages[-1] not in live
        held.off = self.pages.check(sequence.pages, salt, held.cached)
        if exact:
            assert not held.off.any() and self.all_exact(held), "computed over compressed pages"
        return held

    def all_exact(self, held):
        return (self.cache._frames.bits[np.array(held.sequence.pages)] == self.cache.config.exact_bits).all()

    def room(self, pages, squeezed, growing=()):
        """Whether there could be made; it can where what sequences hold, at its smallest, leaves so much."""
        config = self.cache.config
        live = self.live_pages()
        if self.tiers is None:
            least = len(live) << config.exact_order
        else:
            full = {page for s in self.all for page in s.pages[: s.length // self.size]}
            least = config.least_units(len(full) * self.size, len(self.held))
            least += sum(len(s.pages) - config.pages_for(s.length) for s in self.all) << config.exact_order
            least += len(live) << config.record_order if config.records_per_block > 1 else 0
        try:
            self.cache.make_room(pages, squeezed, growing)
        except OutOfPages:
            # Who is not squeezed keeps what it holds of the tree, and its formats.
            assert least + (pages << config.exact_order) > config.num_units or len(squeezed) < len(self.held)
            assert self.tiers or squeezed or len(live) + pages + self.locked() > config.num_pages
            return False
        assert self.cache.num_free_pages >= pages
        return True

    def locked(self):
        """Pages that only the tree owns and that some sequence's path has."""
        tree = self.cache.prefixes.tree
        return sum(page not in self.live_pages() for _, _, pages in paths(self.cache) for page in set(pages)) and (
            tree.num_values - tree.num_evictable
        )

    def advance(self, work, squeezed, observe=True):
        """One step of the engine: work: (held, tokens to compute)."""
        work = sorted(work, key=lambda entry: entry[1] > 1)
        for held, count in work:
            beyond = held.sequence.length + count - len(held.tokens)
            held.tokens += [9] * max(beyond, 0)
        pairs = [(held.sequence, held.sequence.length + count) for held, count in work]
        growing = [sequence for sequence, length in pairs if self.cache.outgrows(sequence, length)]
        if not self.room(sum(self.cache.missing_pages(*pair) for pair in pairs), squeezed, growing):
            return
        for sequence, length in pairs:
            self.cache.reserve(sequence, length, room=int(self.random.integers(0, 60)))
        counts = [count for _, count in work]
        plan = self.cache.plan([held.sequence for held, _ in work], counts, counts.count(1))
        self.write(work, plan)
        for row, (held, count) in enumerate(work):
            self.check_plan(plan, row, held, count)
        if observe and self.tiers and self.random.random() < 0.5:
            columns = plan.num_columns(self.size) // self.size
            shares = self.random.dirichlet(np.full(columns, 0.3), len(work)).astype(np.float32)
            self.cache.observe([held.sequence for held, _ in work], counts, plan, shares)
        for held, count in work:
            self.cache.commit(held.sequence, count)

    def write(self, work, plan):
        new = []
        for held, count in work:
            sequence = held.sequence
            mine = set(sequence.pages[sequence.length // self.size :])
            others = [page for other in self.all if other is not sequence for page in other.pages]
            assert mine.isdisjoint(others), "a page is written that another sequence has"
            off = int(held.off.any() or not self.all_exact(held))
            held.off = np.append(held.off, np.full(count, off))
            known = histories(held.salt, held.tokens[: sequence.length + count])[sequence.length :]
            new.append(self.pages.numbers[off][:, :, :, known])
        every = torch.cat(new, dim=3)
        assert len(set(plan.slots.tolist())) == len(plan.slots)
        for layer, cached in enumerate(self.cache.layers):
            for plane, kept in enumerate((cached.k, cached.v)):
                kept.view(HEADS, -1, self.cache.config.head_dim)[:, plan.slots] = every[layer, plane]

    def check_plan(self, plan, row, held, count):
        """What this step's attention reads of the exact pages is what the pages have, in their order."""
        length = held.sequence.length + count
        _, direct = self.pages.plan(held.sequence.pages, length)
        for place in ((0, 0, 0), (1, 1, 1)):
            by_plan, by_page = (stored(self.cache, p, r, *place)[0] for p, r in ((plan, row), (direct, 0)))
            assert torch.equal(by_plan, by_page)
        self.pages.check(held.sequence.pages, held.salt, held.tokens[:length], held.off, self.places())

    def places(self):
        return [EVERYWHERE[int(self.random.integers(len(EVERYWHERE)))]]

    @rule(held=sequences, count=st.integers(1, 90), keep=st.booleans(), squeeze=st.booleans())
    def grow(self, held, count, keep, squeeze):
        before = held.sequence.length
        self.advance([(held, count)], self.all if squeeze else [])
        if keep and held.sequence.length > before:
            self.keep(held)

    @precondition(lambda self: len(self.held) > 1)
    @rule(counts=st.lists(st.just(1) | st.integers(1, 20), min_size=5, max_size=5), squeeze=st.booleans())
    def step_of_all(self, counts, squeeze):
        self.advance(list(zip(self.held, counts, strict=False)), self.all if squeeze else [])
        self.cache.settle(self.all)

    @rule(held=sequences, count=st.integers(1, 40))
    def a_step_that_fails(self, held, count):
        sequence, length = held.sequence, held.sequence.length + count
        growing = [sequence] if self.cache.outgrows(sequence, length) else []
        if self.room(self.cache.missing_pages(sequence, length), self.all, growing):
            self.cache.reserve(sequence, length)

    @rule(held=sequences)
    def keep(self, held):
        """The beginning of a text, however often, changes nothing for who looks for it."""
        self.cache.keep(held.sequence, held.tokens, held.salt)
        if held.sequence.length:
            self.kept[held.salt].add(held.cached)

    @rule(held=consumes(sequences), keep=st.booleans())
    def free(self, held, keep):
        if keep:
            self.keep(held)
        self.cache.free(held.sequence)
        self.held.remove(held)
        assert not held.sequence.pages and held.sequence.held is None

    # What the engine does.

    @rule()
    def settle(self):
        before = sum(sequence.moves for sequence in self.all)
        self.cache.settle(self.all)
        moved = sum(sequence.moves for sequence in self.all) - before
        self.cache.settle(self.all)
        assert moved or sum(sequence.moves for sequence in self.all) == before

    @rule(pages=st.integers(0, 8), squeeze=st.booleans())
    def make_room(self, pages, squeeze):
        self.room(pages, self.all if squeeze else [])

    @rule(pages=st.integers(1, 4))
    def evict(self, pages):
        live = {page: self.cache._frames.owners[page] for page in self.live_pages()}
        tree = self.cache.prefixes.tree
        left = tree.num_values - min(pages, tree.num_evictable)
        self.cache.prefixes.evict(pages)
        assert tree.num_values == left, "as many go as were asked for"
        assert all(0 < self.cache._frames.owners[page] <= owners for page, owners in live.items())

    @rule()
    def forget(self):
        self.cache.forget()
        assert self.cache.prefixes.tree.num_evictable == 0

    @rule()
    def compact(self):
        free = self.cache._frames.free_units()
        self.cache._frames.join(self.cache.num_free_pages, [])
        assert self.cache._frames.free_units() == free

    @invariant()
    def well(self):
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        cache.check(self.all)
        tree = list(paths(cache))
        counts = self.check_owners(tree)
        self.check_texts(tree)
        for held in self.held:
            assert held.sequence.length == len(held.off)
            self.pages.check(held.sequence.pages, held.salt, held.cached, held.off, self.places())
        live = self.live_pages()
        idle = [page for page in np.flatnonzero(counts).tolist() if page not in live]
        assert cache.prefixes.idle_pages().tolist() == idle
        assert cache.stats()["kv_prefix_bytes"] <= cache.resident_bytes <= cache.capacity_bytes
        if self.tiers is None:
            size = cache.config.page_bytes
            assert cache.stats()["kv_prefix_bytes"] == len(idle) * size
            assert cache.resident_bytes - cache._frames.table_bytes == (len(live) + len(idle)) * size
            assert cache.idle_units() == (cache.config.num_pages - len(live)) << cache.config.exact_order

    def check_owners(self, tree):
        """Nobody counts: each sequence, and each place in the tree, is one owner."""
        places = {(namespace, tokens[: (i + 1) * self.size], page)
                  for namespace, tokens, pages in tree for i, page in enumerate(pages)}  # fmt: skip
        inner = np.bincount([page for _, _, page in places], minlength=len(self.cache._frames.bits))
        assert (inner == self.cache.prefixes._kept).all(), "the tree has other pages than it is counted for"
        owners = inner.copy()
        for sequence in self.all:
            assert len(set(sequence.pages)) == len(sequence.pages)
            owners[list(sequence.pages)] += 1
        assert (owners == self.cache._frames.owners).all()
        assert inner.max(initial=0) <= 1, "the tree has a page twice"
        return inner

    def check_texts(self, tree):
        for salt in SALTS:
            namespace = self.cache.prefixes.namespace(salt)
            found = {tokens for space, tokens, _ in tree if space == namespace}
            assert all(any(text[: len(t)] == t for text in self.kept[salt]) for t in found), "nobody kept this"
            if self.evicted or self.depth:
                self.kept[salt] = found
            else:
                assert longest(found) == longest(self.kept[salt])
        self.evicted = False

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        salts = {cache.prefixes.namespace(salt): salt for salt in SALTS}
        for namespace, tokens, pages in paths(cache):
            bits, size = cache._frames.bits, self.size
            # A page that was kept while it was being filled may have been compressed since: nobody is given it.
            whole = len(tokens) if len(tokens) % size == 0 or bits[pages[-1]] == cache.config.exact_bits else (
                len(tokens) // size * size
            )  # fmt: skip
            self.pages.check(pages, salts[namespace], tokens[:whole])
        for held in self.held:
            self.pages.check(held.sequence.pages, held.salt, held.cached, held.off)
        for sequence in self.all:
            cache.free(sequence)
        cache.check([])
        cache.forget()
        cache.check([])
        assert cache.prefixes.tree.num_values == cache.stats()["kv_prefix_bytes"] == 0
        assert cache.num_free_pages == cache.config.num_pages
        assert cache.resident_bytes == cache._frames.table_bytes


TestSharingMachine = SharingMachine.TestCase
TestSharingMachine.settings = settings(
    max_examples=OPERATIONS // STEPS, stateful_step_count=STEPS, deadline=None, suppress_health_check=list(HealthCheck)
)


# One by one what chance seldom meets.


class Few:
    """A cache, and sequences by name."""

    def __init__(self, num_pages, tiers=None, **others):
        self.cache = make_cache(num_pages, tiers=tiers, **others)
        self.pages, self.held = Pages(self.cache), {}

    def begin(self, name, tokens, exact=False, salt=""):
        """Returns how many were found."""
        held = self.held[name] = Held(salt, exact, list(tokens))
        self.cache.adopt(held.sequence, held.tokens, salt, exact)
        held.off = self.pages.check(held.sequence.pages, salt, held.cached)
        self.cache.check(self.all)
        return held.sequence.length

    @property
    def all(self):
        return [held.sequence for held in self.held.values()]

    def compute(self, name, upto=None, keep=True):
        """The tokens up to `upto`, or all."""
        held = self.held[name]
        sequence, tokens = held.sequence, held.tokens[:upto]
        bits = self.cache._frames.bits[np.array(sequence.pages)]
        off = int(held.off.any() or (bits != self.cache.config.exact_bits).any())
        count = len(tokens) - sequence.length
        self.cache.make_room(self.cache.missing_pages(sequence, len(tokens)), self.all)
        self.cache.reserve(sequence, len(tokens))
        plan = self.cache.plan([sequence], [count], int(count == 1))
        new = self.pages.numbers[off][:, :, :, histories(held.salt, tokens)[sequence.length :]]
        for layer, cached in enumerate(self.cache.layers):
            for plane, kept in enumerate((cached.k, cached.v)):
                kept.view(HEADS, -1, self.cache.config.head_dim)[:, plan.slots] = new[layer, plane]
        self.cache.commit(sequence, count)
        held.off = np.append(held.off, np.full(count, off))
        if keep:
            self.cache.keep(sequence, held.tokens, held.salt)
        self.check()

    def free(self, *names):
        for name in names:
            self.cache.free(self.held.pop(name).sequence)
        self.check()

    def check(self):
        self.cache.check(self.all)
        for held in self.held.values():
            self.pages.check(held.sequence.pages, held.salt, held.cached, held.off)

    def compress(self, name, *pages, bits=8):
        self.cache._frames.compress(np.array(self.held[name].sequence.pages)[list(pages)], bits)


def test_a_page_is_found_to_its_last_token_and_copied():
    few = Few(8)
    few.begin("a", range(40))
    few.compute("a", 37)
    for length in (1, 15, 16, 17, 31, 32, 33, 36, 37, 38, 40):
        found = min(length, 37)
        assert few.cache.cached_tokens(list(range(length))) == (found, found // 16)
        assert few.begin("b", range(length)) == found
        b, a = (few.held[name].sequence for name in "ba")
        assert b.pages[: found // 16] == a.pages[: found // 16]
        assert len(b.pages) == -(-found // 16) and (found % 16 == 0 or b.pages[-1] not in a.pages)
        few.free("b")
    # Both write behind what they share.
    few.begin("b", [*range(35), 99, 98, 97])
    few.compute("b")
    few.compute("a")
    few.free("a")
    few.compute("b")
    assert few.begin("c", range(40)) == 40


def test_the_same_tokens_of_another_salt_or_another_model_are_not_found():
    few = Few(8)
    few.begin("a", range(40), salt="a")
    few.compute("a")
    assert few.cache.cached_tokens(list(range(40)), "a") == (40, 2)
    for salt in ("", "b", "aa", "a\0"):
        assert few.cache.cached_tokens(list(range(40)), salt) == (0, 0)
    spaces = {make_cache(2, fingerprint=f).prefixes.namespace(s) for f in (b"", b"x", b"x\0y") for s in ("", "y", "z")}
    assert len(spaces) == 9


def test_what_was_computed_over_compressed_pages_is_known_when_they_are_exact_again():
    """The second request computes the first page again, exactly, and the tree takes that one."""
    few = Few(12, TierConfig())
    few.begin("a", range(80))
    few.compute("a", 36)
    few.compress("a", 0)
    few.compute("a", 70)  # behind token 36 over what is rounded
    assert few.begin("b", range(80), exact=True) == 0
    few.compute("b", 20)
    few.free("a", "b")
    # The third page is exact in part only.
    assert few.begin("c", range(80), exact=True) == 32
    assert few.begin("d", range(40), exact=True) == 32
    assert few.begin("e", range(80)) == 70 and few.held["e"].off.sum() == 34
    few.free("d", "e")
    # What is copied of such a page, and what is written behind it, are no better.
    text = [*range(38), *[99] * 20]
    assert few.begin("d", text) == 38
    few.compute("d")
    assert few.begin("e", text, exact=True) == 32
    few.compute("e")
    few.free("c", "d", "e")
    assert few.begin("f", text, exact=True) == len(text), "the tree has the better of two pages"


def test_a_page_that_was_compressed_is_as_good_as_new_for_others():
    few = Few(2, TierConfig())
    few.begin("a", range(32))
    few.compute("a")
    few.compress("a", 0, 1)
    few.free("a")
    few.cache.forget()
    few.begin("b", range(32))
    few.compute("b")
    few.free("b")
    assert few.begin("c", range(32), exact=True) == 32


def test_a_page_in_part_exact_is_used_as_far_as_it_is():
    few = Few(12, TierConfig())
    few.begin("a", range(60))
    few.compute("a", 40)
    assert few.begin("b", range(60), exact=True) == 40
    few.compress("a", 1)  # which b has too
    assert few.begin("c", range(60), exact=True) == 16
    few.compute("c", 40)
    assert few.begin("d", range(60), exact=True) == 40, "the tree has the better of two pages"
    few.compute("d", 60)
    few.free(*"abcd")
    assert few.begin("e", range(60), exact=True) == 60


def test_a_page_that_was_compressed_after_it_was_kept_in_part_is_not_copied():
    few = Few(12, TierConfig())
    few.begin("a", range(60))
    few.compute("a", 20)
    assert few.begin("b", range(60)) == 20
    few.compute("a", 40, keep=False)
    few.compress("a", 1)
    assert few.begin("c", range(60)) == 16
    few.compute("c", 20)
    assert few.begin("d", range(60)) == 20, "the tree has the better of two pages"
    few.compute("a", keep=True)
    assert few.begin("e", range(60)) == 60


def test_a_copy_does_not_let_go_of_what_it_copies():
    """Case 40. The pool is full, and the page to copy from is the one that would go first."""
    few = Few(3)
    few.begin("a", range(20))
    few.compute("a")
    few.free("a")
    few.begin("b", [50 + i for i in range(16)])
    few.compute("b")
    assert few.cache.num_free_pages == 0
    assert few.begin("c", range(20)) == 16, "b's page stays, so there is no place for a copy"
    few.free("b")
    few.compute("c")
    assert few.begin("d", range(20)) == 20


@pytest.mark.parametrize("fails_at", range(4))
def test_no_place_for_a_copy_is_a_shorter_match(monkeypatch, fails_at):
    """Case 39: whichever allocation fails, nothing is lost and nothing is held."""
    few = Few(8)
    few.begin("a", range(40))
    few.compute("a", 37)
    calls, place = iter(range(100)), few.cache._frames.alloc

    def failing(*args):
        if next(calls) == fails_at:
            raise OutOfPages("injected")
        return place(*args)

    monkeypatch.setattr(few.cache._frames, "alloc", failing)
    found = [few.begin(name, range(40)) for name in "bcd"]
    assert found == [32 if i == fails_at else 37 for i in range(3)]
    few.free(*"abcd")
    few.cache.forget()
    assert few.cache.num_free_pages == 8


def test_freeing_what_is_shared_and_freeing_twice():
    """Case 32: who has not the page cannot free it, in any build; case 31: who has it keeps it."""
    few = Few(8)
    few.begin("a", range(40))
    few.compute("a")
    few.begin("b", range(32))
    pages = few.held["a"].sequence.pages.tolist()
    few.free("a")
    assert few.begin("c", range(32)) == 32
    few.free("b")
    few.check()
    few.free("c")
    few.cache.forget()
    for page in pages:
        with pytest.raises(AllocatorError, match="freed twice"):
            few.cache._frames.free(page)
    few.check()


def test_a_shared_page_pays_its_part_of_each_budget_and_is_as_exact_as_the_one_who_needs_it_most():
    few = Few(64, TierConfig(budget=0.5, recent_tokens=0))
    few.begin("a", range(330))
    few.compute("a", 320)
    for name in "bcd":
        assert few.begin(name, range(330)) == 320
    few.cache.settle(few.all)
    config = few.cache.config
    costs = few.cache._frames.costs(np.unique([page for sequence in few.all for page in sequence.pages]))
    assert costs.sum() <= 4 * 0.5 * 320 * config.page_cost(config.exact_bits) / 16
    shared = {int(page) for page in few.held["a"].sequence.pages}
    assert all(few.cache._frames.is_exact(page) for page in shared), "four budgets pay for twice the pages"
    few.free("b", "c", "d")
    few.cache.settle(few.all)
    alone = few.cache._frames.costs(np.array(few.held["a"].sequence.pages)).sum()
    assert alone <= 0.5 * 320 * config.page_cost(config.exact_bits) / 16
    few.check()


def test_a_shared_page_is_as_recent_as_it_is_for_the_one_it_is_most_recent_for():
    few = Few(30, TierConfig(importance="none", recent_tokens=64, max_moves=0, warm_layer_ratio=0.0))
    few.begin("a", range(64))
    few.compute("a")
    few.begin("b", range(400))
    few.compute("b")
    few.cache.make_room(10, few.all)
    bits = few.cache._frames.bits[np.array(few.held["b"].sequence.pages)].tolist()
    assert bits[:4] == [32] * 4 and bits[-4:] == [32] * 4 and bits.count(8) >= 5, bits
    few.free("a")
    few.cache.make_room(14, few.all)
    bits = few.cache._frames.bits[np.array(few.held["b"].sequence.pages)].tolist()
    assert bits[1:4] == [8] * 3 and bits[-4:] == [32] * 4, bits


def test_what_nobody_holds_goes_before_what_somebody_does():
    """Even if it was used later."""
    few = Few(8)
    few.begin("a", range(40))
    few.compute("a")
    few.begin("b", range(100, 160))
    few.compute("b")
    few.free("b")
    few.cache.make_room(3, few.all)
    assert few.cache.cached_tokens(list(range(40))) == (40, 2)
    assert few.cache.cached_tokens(list(range(100, 160))) == (32, 0)
    few.check()


def test_pages_that_the_tree_has_twice_over_go_when_there_is_no_other_place():
    """Two compute the same at once. The tree has the pages of the first; the second holds them there, and needs none
    of them."""
    few = Few(6)
    few.begin("a", range(48))
    few.begin("b", range(48))
    few.compute("a")
    few.compute("b")
    few.free("a")
    assert few.cache.num_free_pages == 0
    assert few.cache.prefixes.idle_pages().size == 3
    with pytest.raises(OutOfPages):
        few.cache.make_room(1, ())
    few.cache.make_room(3, few.all)
    few.check()
    few.cache.keep(few.held["b"].sequence, list(range(48)))
    assert few.cache.cached_tokens(list(range(48))) == (48, 3)


def test_room_is_made_of_shared_pages_without_compressing_more_than_must_be():
    """What four sequences have is freed once, and whole."""
    few = Few(21, TierConfig(budget=1.0, recent_tokens=0, max_moves=0, warm_layer_ratio=0.0))
    few.begin("a", range(330))
    few.compute("a", 320)
    for name in "bcd":
        few.begin(name, range(330))
    few.cache.make_room(2, few.all)
    bits = few.cache._frames.bits[np.array(few.held["a"].sequence.pages)]
    # A page of 8 bits and its scales frees three quarters of an exact one, or a little less.
    assert np.count_nonzero(bits < 32) == 2, bits


def test_a_million_tokens():
    """Case 48: kept, found, let go; and a text that branches at every page."""
    length = 1_000_000
    config = CacheConfig(1, 1, 8, 2, 20_000 * 64 * 32, 64, prefix_caching=True)
    cache = KVCache(config, torch.bfloat16, torch.device("cpu"), reference)
    tokens = np.random.default_rng(0).integers(0, 50_000, length).tolist()
    sequence, other = CachedSequence(), CachedSequence()
    cache.reserve(sequence, length)
    cache.commit(sequence, length)
    cache.keep(sequence, tokens)
    assert cache.cached_tokens(tokens) == (length, length // 64)
    cache.adopt(other, tokens[: length // 2])
    assert other.length == length // 2
    cache.check([sequence, other])
    cache.free(other)
    for i in range(200):
        cache.adopt(other, [*tokens[: 64 * i], -1])
        cache.reserve(other, 64 * i + 1)
        cache.commit(other, 1)
        cache.keep(other, [*tokens[: 64 * i], -1])
        cache.free(other)
    assert cache.prefixes.tree.depth >= 20
    assert cache.cached_tokens([*tokens[: 64 * 199], -1]) == (64 * 199 + 1, 199)
    cache.check([sequence])
    cache.free(sequence)
    cache.make_room(config.num_pages, ())
    cache.check([])
    assert cache.prefixes.tree.num_nodes == 0 and cache.num_free_pages == config.num_pages
