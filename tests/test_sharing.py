"""The engine with what requests share: answers are those of an engine that shares nothing, given each request alone.

Ids and log-probabilities are compared, and that the path was taken is read off `num_cached_tokens` and `stats()`.
Freed bytes are NaN throughout (tests/oracle/invariants.py): an answer from a page that is no longer theirs is an error.
"""

import itertools
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle.checkpoint import make_checkpoint
from test_tiers_engine import INT8_MEAN, INT8_WORST, greedily, live, prompt

from engine import LLM, CapacityError, SamplingParams

PAGE = 16
PAGE_BYTES = 512 * PAGE  # exact, of the tiny model
STORIES = Path(os.environ.get("ISOTHERM_TEST_MODELS", "/work/shared/data")) / "stories260k-hf"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint(path)
    return LLM(path, threads=1, dtype="float32", page_size=PAGE, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def alone(plain):
    return Alone(plain)


class Alone:
    """What an engine that shares nothing answers to one request, remembered."""

    def __init__(self, llm):
        self.llm, self.answers = llm, {}

    def __call__(self, tokens, count=24):
        tokens = tuple(tokens)
        known = self.answers.get(tokens)
        if known is None or len(known.token_ids) < count:
            (known,) = self.llm.generate([list(tokens)], greedily(max(count, 24), logprobs=1))
            assert known.num_cached_tokens == 0
            self.answers[tokens] = known
        return known

    def check(self, output, count=None):
        """The output, or what there is of it, is the answer to its prompt."""
        count = len(output.token_ids) if count is None else count
        known = self(output.prompt_token_ids, count)
        assert output.finish_reason != "error"
        assert output.token_ids == known.token_ids[:count]
        for token, ours, wanted in zip(output.token_ids, output.logprobs, known.logprobs, strict=False):
            assert abs(ours[token] - wanted[token]) < 2e-4


def sharing(plain, **settings):
    return plain.twin(**{"enable_prefix_caching": True, **settings})


def params(count=24, **settings):
    return greedily(count, **{"logprobs": 1, **settings})


def ask(llm, tokens, count=24, **settings):
    return llm.generate([tokens], params(count, **settings))[0]


def assert_empty(llm):
    """Nothing is left but prefixes, and after they went nothing at all."""
    stats, cache = llm.stats(), llm._cache
    cache.check([])
    assert not llm._requests and stats["num_requests_running"] == stats["num_requests_waiting"] == 0
    assert stats["kv_prefix_bytes"] <= stats["kv_resident_bytes"]
    if cache.config.tiers is None:
        assert stats["kv_prefix_bytes"] == stats["kv_resident_bytes"] - cache._frames.table_bytes
        assert stats["kv_cache_usage"] == 0
    cache.forget()
    cache.check([])
    assert cache.num_free_pages == cache.config.num_pages and llm.stats()["kv_prefix_bytes"] == 0
    assert cache.resident_bytes == cache._frames.table_bytes and cache.stats()["kv_shared_bytes"] == 0


def run(llm, each_step=lambda: None, limit=5000):
    """Step to the end; the last output of every request."""
    done = {}
    for _ in range(limit):
        if not llm.has_unfinished_requests():
            return done
        done |= {output.request_id: output for output in llm.step()}
        llm._cache.check(live(llm))
        each_step()
    raise AssertionError("the requests never end")


# Cold, warm, and how far.


@pytest.mark.parametrize("page", [16, 32, 64])
def test_warm_answers_are_cold_answers(plain, alone, page):
    """A prompt that is cached whole still computes its last token; what differs from there on is computed, also where
    that is inside a page."""
    llm = sharing(plain, page_size=page, max_num_batched_tokens=50, kv_cache_memory=1 << 22)
    for length in (1, 2, 15, 16, 17, 63, 64, 65, 200):
        tokens = prompt(length, length)
        for found in (0, length - 1, length - 1):
            output = ask(llm, tokens)
            assert output.num_cached_tokens == found
            alone.check(output)
    for length in (1, 15, 16, 17, 33, 64, 127, 199):
        output = ask(llm, prompt(200, 200)[:length] + prompt(30, length))
        assert output.num_cached_tokens == length
        alone.check(output)
    stats = llm.stats()
    assert stats["num_cached_tokens"] == 2 * (1 + 14 + 15 + 16 + 62 + 63 + 64 + 199) + 1 + 15 + 16 + 17 + 33 + 64 + 326
    assert_empty(llm)


@pytest.mark.skipif(not STORIES.is_dir(), reason=f"no {STORIES}")
def test_warm_answers_are_cold_answers_of_a_real_model():
    settings = {"threads": 1, "dtype": "float32", "page_size": 32}
    plain = LLM(STORIES, **settings, enable_prefix_caching=False)
    llm, cold = plain.twin(enable_prefix_caching=True), Alone(plain)
    story = "Once upon a time, there was a little girl named Lily. She liked to play in the"
    texts = [story + end for end in (" park", " park with her dog", " garden", "")]
    for _ in range(2):
        outputs = llm.generate(texts, params(60))
        for output in outputs:
            cold.check(output, 60)
    assert all(output.num_cached_tokens == len(output.prompt_token_ids) - 1 for output in outputs)
    assert_empty(llm)


def test_every_turn_of_a_chat_computes_its_own_tokens(plain, alone):
    llm, tokens = sharing(plain), []
    for turn in range(14):
        known, new = len(tokens), prompt(7 + 3 * (turn % 5), turn)
        output = ask(llm, tokens + new, 11)
        alone.check(output)
        assert output.num_cached_tokens == max(known - 1, 0), "the last token of an answer is never computed"
        tokens = output.prompt_token_ids + output.token_ids
    assert llm.stats()["prefix_tree_depth"] == 1
    assert_empty(llm)


def test_scores_use_nothing_and_leave_nothing(plain, alone):
    llm, tokens = sharing(plain), prompt(100)
    np.testing.assert_array_equal(llm.score([tokens])[0], plain.score([tokens])[0])
    assert ask(llm, tokens).num_cached_tokens == 0
    before = llm.stats()["num_cached_tokens"]
    np.testing.assert_array_equal(llm.score([tokens])[0], plain.score([tokens])[0])
    assert torch.equal(torch.cat(list(llm.logits(tokens))), torch.cat(list(plain.logits(tokens))))
    assert llm.stats()["num_cached_tokens"] == before
    alone.check(ask(llm, tokens))
    assert_empty(llm)


# Company.


def test_two_equal_prompts_in_one_step(plain, alone):
    """One computes, the other waits for its pages, not for nothing: a hit on pages of the same batch that are not
    computed yet would be garbage."""
    for length, budget in ((100, 512), (100, 30), (16, 512), (17, 16), (5, 512)):
        llm = sharing(plain, max_num_batched_tokens=budget)
        outputs = llm.generate([prompt(length)] * 3, params())
        for output in outputs:
            alone.check(output, 24)
        cached = sorted(output.num_cached_tokens for output in outputs)
        # Only what lies in a page of which less than all is alike may be computed thrice.
        assert cached[0] == 0 and cached[1] >= (length - 1) // PAGE * PAGE
        assert_empty(llm)


def test_n_answers_share_their_prompt(plain, alone):
    llm = sharing(plain)
    outputs = llm.generate([prompt(90), prompt(40, 1)], params(n=4))
    for output in outputs:
        alone.check(output, 24)
    assert [output.num_cached_tokens for output in outputs] == [0, 89, 89, 89, 0, 39, 39, 39]
    # With randomness each is what its seed gives alone.
    drawn = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, n=4, seed=5)
    ours, theirs = (engine.generate([prompt(90)], drawn) for engine in (llm, plain))
    assert [o.token_ids for o in ours] == [o.token_ids for o in theirs]
    assert len({tuple(o.token_ids) for o in ours}) == 4 and all(o.num_cached_tokens == 89 for o in ours)
    assert_empty(llm)


def family(size=4, length=120):
    """Texts that branch from one another, inside pages and between them."""
    texts = [prompt(length)]
    for i, cut in zip(range(1, size), itertools.cycle((40, 48, 5, 71))):
        texts.append(texts[i // 2][:cut] + prompt(length - cut, i))
    return texts


def test_any_company_in_any_order(plain, alone):
    texts = [text[:cut] for text in family(6) for cut in (30, 64, 101)]
    rng = random.Random(1)
    for budget in (24, 512):
        llm = sharing(plain, max_num_batched_tokens=budget, kv_cache_memory=1 << 22)
        for _ in range(3):
            rng.shuffle(texts)
            outputs = llm.generate(texts, params(12))
            for output in outputs:
                alone.check(output, 12)
            found = sum(output.num_cached_tokens for output in outputs)
        assert found == sum(len(text) - 1 for text in texts), "all of it was cached in the end"
        assert_empty(llm)


def test_a_request_joins_at_any_step_of_one_that_it_begins_like(plain, alone):
    first, second = prompt(100), prompt(100)[:70] + prompt(20, 1)
    for steps in range(0, 30, 3):
        llm = sharing(plain, max_num_batched_tokens=16)
        ids = [llm.add_request(first, params(20))]
        done = {output.request_id: output for _ in range(steps) for output in llm.step()}
        ids.append(llm.add_request(second, params(20)))
        done |= run(llm)
        for i in ids:
            alone.check(done[i], 20)
        assert done[ids[1]].num_cached_tokens == (64 if steps < 5 else 70)
        assert_empty(llm)


@pytest.mark.parametrize("budget", [32, 512])
def test_an_abort_of_one_who_shares_at_any_step(plain, alone, budget):
    """Case 31: whoever goes takes nothing from the others, and what it leaves is right."""
    texts = [text[:90] for text in family(3)]
    texts.append(texts[0])
    for victim, steps in itertools.product(range(4), (0, 1, 2, 3, 4, 5, 7, 9, 12)):
        llm = sharing(plain, max_num_batched_tokens=budget)
        ids = [llm.add_request(text, params(8)) for text in texts]
        done = {output.request_id: output for _ in range(steps) for output in llm.step()}
        llm.abort(ids[victim])
        llm._cache.check(live(llm))
        done |= run(llm)
        for i, request in enumerate(ids):
            if i != victim:
                alone.check(done[request], 8)
        again = ask(llm, texts[victim], 8)
        alone.check(again)
        assert steps == 0 or again.num_cached_tokens > 0
        assert_empty(llm)


# A pool that is full.


@pytest.mark.parametrize("settings", [{"max_model_len": 256}, {"kv_cache_memory": 16 * PAGE_BYTES}], ids=str)
@pytest.mark.parametrize("policy", ["importance", "lru"])
def test_a_prefix_that_was_let_go_is_not_found(plain, alone, settings, policy):
    """The pool is filled four times over; then what came first comes again: of what is gone nothing is found, and
    whatever is found is right."""
    llm = sharing(plain, eviction_policy=policy, **settings)
    first = [prompt(100, seed) for seed in range(2)]
    for tokens in first:
        alone.check(ask(llm, tokens, 10))
    pages = llm._cache.config.num_pages
    for seed in range(10, 10 + 4 * pages * PAGE // 80):
        alone.check(ask(llm, prompt(80, seed), 5))
        assert llm._cache.num_free_pages <= pages
    assert llm._cache.num_free_pages <= 1, "the pool is not full"
    for tokens in [*first, *first[::-1]]:
        output = ask(llm, tokens, 10)
        alone.check(output)
    assert llm.stats()["num_preemptions"] == 0
    llm._cache.forget()
    output = ask(llm, first[0], 10)
    alone.check(output)
    assert output.num_cached_tokens == 0
    assert_empty(llm)


@pytest.mark.parametrize("settings", [{"max_model_len": 160}, {"kv_cache_memory": 10 * PAGE_BYTES}], ids=str)
@pytest.mark.parametrize("alike", [False, True])
def test_preempted_requests_answer_as_if_they_were_alone(plain, alone, settings, alike):
    """Ten pages, six answers of three and a half: some wait, find what they had computed if it is still there, and go
    on as if nothing had happened."""
    llm = sharing(plain, **settings)
    texts = [prompt(16) + prompt(12, seed) if alike else prompt(28, seed) for seed in range(6)]
    outputs = llm.generate(texts, params(30))
    for output in outputs:
        alone.check(output, 30)
    stats = llm.stats()
    assert stats["num_preemptions"] > 0
    assert all(output.num_cached_tokens == (16 if alike else 0) for output in outputs[1:])
    again = llm.generate(texts[::-1], params(30))
    for output in again:
        alone.check(output, 30)
    assert sum(output.num_cached_tokens for output in again) > 0
    assert llm.stats()["num_prompt_tokens"] == 2 * 6 * 28
    assert_empty(llm)


def test_a_preempted_request_finds_its_own_tokens(plain, alone):
    """In the middle of its answer, and of its prompt."""
    for steps in (4, 6, 12):
        llm = sharing(plain, max_num_batched_tokens=32)
        texts = [prompt(60, seed) for seed in range(3)]
        ids = [llm.add_request(text, params(20)) for text in texts]
        done = {output.request_id: output for _ in range(steps) for output in llm.step()}
        had = llm._requests[ids[2]].sequence.length
        assert llm._scheduler.preempt()
        assert had and llm._cache.cached_tokens(llm._requests[ids[2]].tokens)[0] == had
        done |= run(llm)
        for i in ids:
            alone.check(done[i], 20)
        assert done[ids[2]].num_cached_tokens == 0, "its own tokens are no hits"
        assert llm.stats()["num_preemptions"] == 1
        assert_empty(llm)


@pytest.mark.parametrize("settings", [{"max_model_len": 128}, {"kv_cache_memory": 8 * PAGE_BYTES}], ids=str)
def test_a_request_that_takes_the_whole_pool(plain, alone, settings):
    """It fits to the last token, whatever prefixes fill the pool, its own among them; one token more is refused."""
    llm = sharing(plain, **settings)
    for seed in range(3):
        ask(llm, prompt(60, seed), 10)
    for cut in (60, 30):
        output = ask(llm, prompt(60)[:cut] + prompt(118 - cut, 9), 10)
        alone.check(output)
        assert output.cache_report["moves"] == 0
    assert_empty(llm)


def test_a_request_larger_than_the_pool_is_refused_whatever_is_cached(plain):
    llm = sharing(plain, kv_cache_memory=2 * PAGE_BYTES)
    most = llm._cache.config.most_tokens
    assert ask(llm, prompt(most - 4), 5).finish_reason == "length"
    with pytest.raises(CapacityError, match=rf"needs {most + 1} tokens .*{most} fit in 0\.\d MB.*--kv-cache-memory"):
        ask(llm, prompt(most - 4), 6)
    assert ask(llm, prompt(most - 4), 5).finish_reason == "length"
    assert_empty(llm)


# Everything at once.


WORLDS = {
    "plenty": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "a small pool": {"max_model_len": 160, "max_num_batched_tokens": 48},
    "long answers": {"max_model_len": 144, "max_num_seqs": 9},
    "a pool of bytes": {"kv_cache_memory": 11 * PAGE_BYTES, "eviction_policy": "lru"},
    "large pages": {"page_size": 32, "max_model_len": 160, "max_num_batched_tokens": 40},
    "flat": {"max_model_len": 256, "max_prefix_depth": 1, "max_prefix_children": 2},
    "nothing shared": {"max_model_len": 160, "enable_prefix_caching": False},
}
SOAK = int(os.environ.get("ISOTHERM_TEST_REQUESTS", "40"))  # in each world


@pytest.mark.parametrize("world", WORLDS)
def test_any_workload(plain, alone, world):
    """Requests come, begin alike or not, wait, are preempted, aborted or fail for lack of memory; each that ends has
    the answer that it has alone, and at the end there is as much place as there was."""
    llm = sharing(plain, **WORLDS[world])
    rng = random.Random(world)
    texts = family(5, 100)
    wanted, ended, aborted, added, forced = {}, {}, set(), 0, 0
    while added < SOAK or llm.has_unfinished_requests():
        if added < SOAK and rng.random() < 0.5:
            tokens = rng.choice(texts)[: rng.choice((1, 15, 16, 17, 40, 47, 48, 64, 90))]
            if ended and rng.random() < 0.2:  # a turn of a chat
                last = rng.choice(list(ended.values()))
                tokens = [*(last.prompt_token_ids + last.token_ids)[:90], rng.randint(3, 9)]
            count = 50 if world == "long answers" else rng.choice((1, 3, 8, 20))
            salt = "s" * (rng.random() < 0.1)
            wanted[llm.add_request(tokens, params(count, cache_salt=salt))] = count
            added += 1
        if rng.random() < 0.04 and llm._requests:
            victim = rng.choice(list(llm._requests))
            aborted.add(victim)
            llm.abort(victim)
        if rng.random() < 0.02:
            forced += llm._scheduler.preempt()
        if rng.random() < 0.02:
            llm._cache.forget()
        ended |= {output.request_id: output for output in llm.step() if output.finish_reason}
        llm._cache.check(live(llm))
    assert ended.keys() == wanted.keys() - aborted
    for request, output in ended.items():
        alone.check(output, wanted[request])
    stats = llm.stats()
    assert stats["num_preemptions"] > forced or world != "long answers"
    assert (stats["num_cached_tokens"] > 0) == llm.config.enable_prefix_caching
    assert stats["num_cached_tokens"] == 0 or stats["num_cached_tokens"] < stats["num_prompt_tokens"]
    assert_empty(llm)


# What must not be shared.


def test_a_salt_keeps_requests_apart(plain, alone):
    """Case 68, and two of them in one step."""
    llm, tokens = sharing(plain), prompt(80)
    outputs = [ask(llm, tokens, cache_salt=salt) for salt in ("a", "b", "", "a")]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 79]
    for output in outputs:
        alone.check(output)
    ids = [llm.add_request(prompt(80, 1), params(cache_salt=salt)) for salt in "aabb"]
    done = run(llm)
    assert sorted(done[i].num_cached_tokens for i in ids) == [0, 0, 79, 79]
    for i in ids:
        alone.check(done[i], 24)
    assert_empty(llm)


def test_another_model_or_format_has_other_keys(tmp_path):
    """Case 38."""
    make_checkpoint(tmp_path / "a")
    make_checkpoint(tmp_path / "b", rope_theta=20000.0)
    make_checkpoint(tmp_path / "c", rms_norm_eps=1e-6)
    base = {"threads": 1, "dtype": "float32", "page_size": PAGE}
    engines = [
        LLM(tmp_path / "a", **base),
        LLM(tmp_path / "b", **base),
        LLM(tmp_path / "c", **base),
        LLM(tmp_path / "a", **{**base, "dtype": "bfloat16"}),
        LLM(tmp_path / "a", **{**base, "page_size": 32}),
        LLM(tmp_path / "a", **base, rope_scaling={"rope_type": "linear", "factor": 2}),
    ]
    spaces = [llm._cache.prefixes.namespace("") for llm in engines]
    assert len(set(spaces)) == len(spaces)
    assert engines[0].twin()._cache.prefixes.namespace("") == spaces[0]


def nan_keys(llm, monkeypatch, when):
    """Have rope_store write NaN instead of the keys of tokens for which `when` (token id) says so."""
    ops, forward = llm._runner.ops, llm._model.forward
    tokens = []

    def watched(ids, positions, attention):
        tokens[:] = ids.tolist()
        return forward(ids, positions, attention)

    original = ops.rope_store

    def store(q, k, v, cos_sin, slots, k_cache, v_cache):
        k[[i for i, token in enumerate(tokens) if when(token)]] = torch.nan
        original(q, k, v, cos_sin, slots, k_cache, v_cache)

    monkeypatch.setattr(llm._model, "forward", watched)
    monkeypatch.setattr(ops, "rope_store", store)


def test_what_is_no_number_is_not_kept(plain, alone, monkeypatch):
    """Case 29: keys become NaN. The request fails; one that shares its beginning goes on; one that shares the NaN fails
    too, and when they are gone the prompt is computed anew."""
    llm = sharing(plain)
    start = prompt(40)
    bad, good, worse = [*start, 350, *prompt(30, 1)], [*start, *prompt(30, 2)], [*start, 350, *prompt(30, 1), 7]
    ids = [llm.add_request(tokens, params(10)) for tokens in (bad, good, worse)]
    with monkeypatch.context() as patch:
        nan_keys(llm, patch, lambda token: token == 350)
        done = run(llm)
    assert [done[i].finish_reason for i in ids] == ["error", "length", "error"]
    alone.check(done[ids[1]], 10)
    assert llm.stats()["num_requests_failed"] == 2
    for tokens in (bad, worse, good):
        alone.check(ask(llm, tokens, 10))
    assert_empty(llm)


def test_what_failed_is_not_kept_by_who_shares_it(plain, alone, monkeypatch):
    """Case 29: it is still being read by another request when the first one fails; who comes then computes it anew."""
    llm = sharing(plain, max_num_batched_tokens=16)
    bad = [350, *prompt(40, 1)]
    first = llm.add_request(bad, params(10))
    with monkeypatch.context() as patch:
        nan_keys(llm, patch, lambda token: token == 350)
        llm.step()
    long = llm.add_request(bad + prompt(300, 2), params(10))
    done = {}
    while first not in done:
        done |= {output.request_id: output for output in llm.step()}
    assert done[first].finish_reason == "error" and long not in done
    later = llm.add_request(bad, params(10))
    done = run(llm)
    alone.check(done[later], 10)
    assert_empty(llm)


def test_a_step_without_memory_costs_no_answer(plain, alone, monkeypatch):
    """Case 45: the newest request is preempted, and found again."""
    llm = sharing(plain, max_num_batched_tokens=40)
    original, calls, failures = llm._runner.ops.silu_mul, itertools.count(), []

    def failing(*args):
        if next(calls) % 9 == 5 and len(failures) < 12:
            failures.append(args)
            raise torch.OutOfMemoryError("injected")
        return original(*args)

    monkeypatch.setattr(llm._runner.ops, "silu_mul", failing)
    texts = [text[:70] for text in family(4)]
    ids = [llm.add_request(text, params(12)) for text in texts]
    done = run(llm)
    for i in ids:
        alone.check(done[i], 12)
    assert len(failures) == 12 and llm.stats()["num_preemptions"] > 0
    assert_empty(llm)


# Over a cache that is compressed.


def test_who_wants_exact_prefixes_gets_exact_answers(plain, alone):
    """A text larger than the pool is compressed, and kept; one that begins alike uses it unless it asks not to."""
    llm = sharing(plain, kv_cache_memory=12 * PAGE_BYTES, max_num_batched_tokens=64)
    long = prompt(400)
    assert ask(llm, long, 10).cache_report["moves"] > 0
    for length in (100, 150):
        tokens = [*long[:length], *prompt(10, 1)]
        exact = ask(llm, tokens, exact_prefix=True)
        alone.check(exact)
        assert exact.num_cached_tokens < 100
    ask(llm, long, 10)
    llm._cache.check([])
    tokens = [*long[:130], *prompt(10, 2)]
    near = ask(llm, tokens)
    assert near.num_cached_tokens >= 100 and near.finish_reason == "length"
    known = alone(tokens)
    assert near.token_ids != known.token_ids or any(
        abs(ours[i] - wanted.get(i, 0)) > 1e-3
        for i, ours, wanted in zip(near.token_ids, near.logprobs, known.logprobs, strict=True)
    ), "what is compressed shows"
    alone.check(ask(llm, tokens, exact_prefix=True))
    assert_empty(llm)


@pytest.mark.parametrize("budget", [0.15, 0.3, 0.6])
def test_the_budget_holds_while_requests_share(plain, budget):
    """All pages that running requests hold, each once, take no more than the budgets of all together."""
    llm = sharing(plain, kv_budget=budget, kv_cache_memory=1 << 22, max_num_batched_tokens=80)
    config = llm._cache.config
    texts = [text[:cut] for text in family(4, 200) for cut in (90, 200)]

    def check():
        held, frames = live(llm), llm._cache._frames
        pages = {page for sequence in held for page in sequence.pages}
        taken = sum(int(frames.costs(np.array([page]))[0]) for page in pages) * config.unit_total_bytes
        taken //= config.unit_bytes
        share = budget * sum(sequence.length for sequence in held) * config.token_bytes
        # For each a page at 8 bits, one that is being filled, and a block of records.
        assert taken <= share + 3 * len(held) * config.page_bytes

    for _ in range(2):
        ids = [llm.add_request(text, params(30)) for text in texts]
        done = run(llm, check)
        assert all(done[i].finish_reason == "length" and len(done[i].token_ids) == 30 for i in ids)
        assert all(math.isfinite(p) for i in ids for each in done[i].logprobs for p in each.values())
    assert sum(done[i].num_cached_tokens for i in ids) > 800
    assert llm.stats()["kv_moves"] > 0
    assert_empty(llm)


@pytest.mark.parametrize(("budget", "worst", "mean"), [(0.5, INT8_WORST, INT8_MEAN), (0.3, 2.5, 1.0)])
def test_a_prompt_from_a_compressed_cache_is_near_the_exact_one(plain, alone, budget, worst, mean):
    """Of the best token's log-probability; the first budget pays for 8 bits."""
    llm, errors = sharing(plain, kv_budget=budget, kv_cache_memory=1 << 22), []
    for seed in range(8):
        tokens = prompt(150, seed)
        ask(llm, tokens)
        output = ask(llm, tokens, 1, logprobs=20)
        assert output.num_cached_tokens >= 144
        (chosen, *_), (known, *_) = alone(tokens).token_ids, alone(tokens).logprobs
        errors.append(abs(output.logprobs[0][chosen] - known[chosen]))
    assert 1e-4 < max(errors) < worst and np.mean(errors) < mean
    assert_empty(llm)


@pytest.mark.parametrize(
    "settings", [{"kv_budget": 0.25}, {"hot_layer_size": 64}, {"warm_placement": "shared", "kv_budget": 0.3}], ids=str
)
@pytest.mark.parametrize("pages", [6, 24])
def test_any_workload_over_a_compressed_cache(plain, settings, pages):
    """Nothing is lost and nothing is no number; room is found for every request that fits at its smallest."""
    llm = sharing(plain, kv_cache_memory=pages * PAGE_BYTES, max_num_batched_tokens=64, max_num_seqs=6, **settings)
    rng = random.Random(pages)
    texts, ended, wanted, aborted, added = family(4, 150), {}, {}, set(), 0
    while added < SOAK or llm.has_unfinished_requests():
        if added < SOAK and rng.random() < 0.4:
            tokens, count = rng.choice(texts)[: rng.randint(1, 150)], rng.randint(1, 30)
            exact = rng.random() < 0.2
            wanted[llm.add_request(tokens, params(count, exact_prefix=exact))] = count
            added += 1
        if rng.random() < 0.05 and llm._requests:
            victim = rng.choice(list(llm._requests))
            aborted.add(victim)
            llm.abort(victim)
        if rng.random() < 0.05:
            llm._scheduler.preempt()
        ended |= {output.request_id: output for output in llm.step() if output.finish_reason}
        llm._cache.check(live(llm))
    assert ended.keys() == wanted.keys() - aborted
    assert all(output.finish_reason == "length" and len(output.token_ids) == wanted[i] for i, output in ended.items())
    assert all(math.isfinite(p) for output in ended.values() for each in output.logprobs for p in each.values())
    stats = llm.stats()
    assert stats["kv_moves"] > 0 and stats["num_cached_tokens"] > 0
    assert_empty(llm)


@pytest.mark.parametrize("value", [math.nan, 0.5, math.inf], ids=str)
def test_scores_that_say_nothing(plain, monkeypatch, value):
    """Case 43, of what is kept too."""
    llm = sharing(plain, kv_budget=0.3, kv_cache_memory=24 * PAGE_BYTES)
    monkeypatch.setattr("memory.replacement.score_pages", lambda *args: np.full(len(args[2]), value))
    for seed in range(8):
        assert ask(llm, prompt(100) + prompt(150, seed)).finish_reason == "length"
    assert llm.stats()["num_cached_tokens"] > 0
    assert_empty(llm)


def test_any_text_is_a_salt(plain, alone):
    """One that cannot be written as UTF-8 is as good as another, and stops nobody."""
    llm = sharing(plain)
    for salt in ("\ud800", "", "\ud800"):
        alone.check(ask(llm, prompt(40), cache_salt=salt))
    assert llm.stats()["num_cached_tokens"] == 39


def test_a_prompt_that_is_scored_is_scored_once(plain):
    """Also if it is preempted on the way, which sharing a prefix with others must not bring about."""
    llm, tokens = sharing(plain, max_model_len=160, max_num_batched_tokens=16), prompt(100)
    expected = plain.score([tokens])[0]
    llm.add_request(tokens, greedily(50))
    for _ in range(9):
        llm.step()
    np.testing.assert_allclose(llm.score([tokens])[0], expected, atol=1e-4)
    llm = sharing(plain, max_num_batched_tokens=16)
    llm.add_request(prompt(5), greedily(100))
    llm.step()
    original, calls = llm._runner.forward, itertools.count()

    def failing(schedule):
        if next(calls) == 2:
            raise torch.OutOfMemoryError("injected")
        return original(schedule)

    llm._runner.forward = failing
    np.testing.assert_allclose(llm.score([tokens])[0], expected, atol=1e-4)
    assert llm.stats()["num_preemptions"] == 1
    rows = list(llm.logits(tokens))
    assert sum(map(len, rows)) == len(tokens)


def test_the_oldest_prompt_advances_beside_as_many_decodes_as_a_step_may_have(plain, alone):
    llm = sharing(plain, max_num_batched_tokens=4, max_num_seqs=8)
    warm = prompt(30, 1)
    ask(llm, warm)
    for i in range(4):
        llm.add_request(warm, greedily(5 + i))
    llm.step()
    old = llm.add_request(prompt(50, 7), greedily(2))
    for _ in range(80):
        outputs = llm.step()
        for output in outputs:
            if output.finish_reason and output.request_id != old:
                llm.add_request(warm, greedily(6))
        if any(output.request_id == old and output.finish_reason for output in outputs):
            return
    raise AssertionError("it never ends")
