"""The engine over a cache that is compressed: what stays the same, what the budget bounds, and that nothing is lost."""

import itertools
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle.checkpoint import make_checkpoint
from oracle.invariants import PLAIN
from oracle.llama64 import forward, greedy, load_config, load_weights, logprobs

from engine import LLM, CapacityError, ConfigError, SamplingParams
from memory.config import WARM_BITS
from memory.frames import Frames

PAGE = 16
STORIES = Path(os.environ.get("ISOTHERM_TEST_MODELS", "/work/shared/data")) / "stories260k-hf"
# With 8 bits in every page, of logits of size 2.4: the worst of all tokens and the mean.
INT8_WORST, INT8_MEAN = 1.5, 0.08


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def plain(directory):
    return load(directory)


def load(path, **settings):
    """What requests share is tests/test_sharing.py's: here a text is always read anew."""
    fixed = {"threads": 1, "dtype": "float32", "page_size": PAGE, "enable_prefix_caching": False}
    return LLM(path, **{**fixed, **settings})


def prompt(length, seed=0):
    return random.Random(seed).choices(range(3, 350), k=length)


def greedily(max_tokens=24, **settings):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **settings})


def live(llm):
    return [request.sequence for request in llm._requests.values()]


def assert_empty(llm):
    cache = llm._cache
    cache.check([])
    assert cache.num_free_pages == cache.config.num_pages
    assert cache.resident_bytes == cache._frames.table_bytes and cache.stats()["kv_shared_bytes"] == 0
    assert not llm._requests and llm.stats()["kv_cache_usage"] == 0


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


def least_budget(llm):
    config = llm._cache.config
    return config.page_cost(WARM_BITS[-1]) / config.page_cost(config.exact_bits)


# What stays the same.


@pytest.mark.parametrize("settings", [{"kv_budget": 1.0}, {"kv_cache_memory": 1 << 22}, {"hot_layer_size": 1 << 20}])
def test_all_exact_is_the_plain_engine(directory, plain, settings):
    """The law: with room for everything, the answers of the engine without tiers, and of the float64 oracle."""
    settings = {"kv_cache_memory": 1 << 22, **settings}
    llm = load(directory, max_num_batched_tokens=48, **settings)
    assert llm._cache.config.tiers is not None
    config, weights = load_config(directory), load_weights(directory)
    prompts = [prompt(n, n) for n in (1, 15, 16, 17, 100, 300)]
    outputs = llm.generate(prompts, greedily(20))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain.generate(prompts, greedily(20))]
    for output in outputs[:5]:
        assert output.token_ids == greedy(config, weights, output.prompt_token_ids, 20)
        assert output.cache_report["warm_mass"] == 0
        assert output.cache_report["moves"] == 0
    np.testing.assert_allclose(llm.score([prompts[4]])[0], logprobs(config, weights, prompts[4]), atol=2e-4)
    assert_empty(llm)


@pytest.mark.skipif(not STORIES.is_dir(), reason=f"no {STORIES}")
def test_all_exact_is_the_plain_engine_on_a_real_model():
    plain, llm = load(STORIES, page_size=32), load(STORIES, page_size=32, kv_cache_memory=1 << 22)
    params = greedily(200, ignore_eos=False)
    story = "Once upon a time, there was a little girl"
    assert llm.generate(story, params)[0].text == plain.generate(story, params)[0].text


@pytest.mark.parametrize("budget", [None, 0.3, 0.15])
def test_poison_is_never_seen(directory, monkeypatch, budget):
    """Case 35: freed bytes are NaN; whoever reads one has no answer any more."""
    prompts = [prompt(n, n) for n in (200, 31, 90)]
    settings = {"kv_budget": budget} if budget else {}
    with monkeypatch.context() as patch:
        for name, plain in PLAIN.items():
            patch.setattr(Frames, name, plain)
        expected = [o.token_ids for o in load(directory, **settings).generate(prompts, greedily())]
    llm = load(directory, **settings)
    for _ in range(2):  # also in pages that others had before
        outputs = llm.generate(prompts, greedily())
        assert [o.token_ids for o in outputs] == expected
        assert all(o.finish_reason == "length" for o in outputs)
    assert_empty(llm)


# What compression costs.


def test_8_bits_are_near(directory):
    """Every full page at 8 bits, decoding as well as chunks after the first."""
    llm = load(directory, hot_layer_size=0, max_num_batched_tokens=48, kv_cache_memory=1 << 22)
    ids = prompt(400)
    ours = torch.cat(list(llm.logits(ids))).double().numpy()
    wanted = forward(load_config(directory), load_weights(directory), ids)
    error = np.abs(ours - wanted)
    assert error[:48].max() < 1e-3, "nothing was compressed yet"
    assert error.max() < INT8_WORST and error.mean() < INT8_MEAN
    assert llm.stats()["kv_moves"] > 0
    assert_empty(llm)


def test_fewer_bytes_cost_more(directory, plain):
    ids = prompt(400, 3)
    (exact,) = plain.score([ids])
    errors = []
    for budget in (0.5, 0.3, 0.17, 0.12):
        (ours,) = load(directory, kv_budget=budget, max_num_batched_tokens=64).score([ids])
        assert np.isfinite(ours).all()
        errors.append(float(np.abs(ours - exact).mean()))
    assert errors[0] < errors[1] < errors[-1] and errors[0] < 0.1
    assert errors[-1] < 3, "what is left says nothing"


# The budget.


@pytest.mark.parametrize("importance", ["score", "random", "none"])
@pytest.mark.parametrize("budget", [0.15, 0.3, 0.6, 0.95])
def test_the_budget_holds_at_every_step(directory, budget, importance):
    """Of the tokens that are in the cache, pages in flight and the table apart."""
    llm = load(directory, kv_budget=budget, importance=importance, max_num_batched_tokens=40)
    config = llm._cache.config
    llm.add_request(prompt(300), greedily(100))

    def check():
        resident = llm._cache.resident_bytes - llm._cache._frames.table_bytes
        lengths = [sequence.length for sequence in live(llm)]
        share = budget * sum(lengths) * config.token_bytes
        # A page at 8 bits, one that is being filled, and a block of records (tests/test_tiers.py has them exactly).
        extra = 3 * config.page_bytes if budget < 0.4 else config.page_bytes * (sum(lengths) < 160)
        assert resident <= share + extra
        assert all(0 <= sequence.warm_mass <= 1 + 1e-5 for sequence in live(llm))

    (output,) = run(llm, check).values()
    report = output.cache_report
    assert len(output.token_ids) == 100 and all(0 <= i < llm.vocab_size for i in output.token_ids)
    assert report["moves"] >= (10 if budget < 0.7 else 1)
    assert_empty(llm)


def test_requests_under_a_budget_are_as_if_alone(directory):
    """Each has its own budget: who is computed beside it, and in which order, changes nothing. Their chunks are the
    same when all prompts fit the step's budget."""
    llm = load(directory, kv_budget=0.3, kv_cache_memory=1 << 22, max_num_batched_tokens=512)
    prompts = [prompt(n, n) for n in (5, 40, 16, 120, 64, 90)]
    alone = [llm.generate([ids], greedily(60))[0].token_ids for ids in prompts]
    added = {}
    waiting = list(enumerate(prompts))
    done = {}
    for step in itertools.count():
        if step % 7 == 0 and waiting:
            i, ids = waiting.pop(0)
            added[llm.add_request(ids, greedily(60))] = i
        done |= {output.request_id: output for output in llm.step()}
        llm._cache.check(live(llm))
        if not waiting and not llm.has_unfinished_requests():
            break
    assert {i: done[request].token_ids for request, i in added.items()} == dict(enumerate(alone))
    assert_empty(llm)


def test_kv_budget_below_the_least_is_refused(directory, plain):
    with pytest.raises(ConfigError, match=r"kv_budget 0\.05 is less than 0\.\d+"):
        load(directory, kv_budget=0.05)
    llm = load(directory, kv_budget=math.nextafter(least_budget(plain), 1))
    assert llm.generate([prompt(300)], greedily(20))[0].finish_reason == "length"
    assert_empty(llm)


# A full pool.


@pytest.mark.parametrize("pages", [2, 3, 5, 9])
def test_a_prompt_many_times_larger_than_the_pool(directory, pages):
    """No budget: the pool alone decides. Each request goes as far down as it must, also the second one after it."""
    page_bytes = 512 * PAGE
    llm = load(directory, kv_cache_memory=pages * page_bytes, max_num_batched_tokens=64)
    most = min(llm._cache.config.most_tokens, 500)
    for seed in range(2):
        llm.add_request(prompt(most - 40, seed), greedily(41))
    outputs = run(llm).values()
    assert [len(o.token_ids) for o in outputs] == [41, 41]
    assert all(o.finish_reason == "length" for o in outputs)
    assert all(o.cache_report["moves"] > 0 and o.cache_report["pages_by_bits"] for o in outputs)
    assert llm._cache.resident_bytes <= llm._cache.capacity_bytes
    assert_empty(llm)


def test_pages_go_down_again_and_again(directory):
    """One sequence that grows through a small pool: the format of its pages falls step by step, never up."""
    llm = load(directory, kv_cache_memory=6 * 512 * PAGE, max_num_batched_tokens=32)
    llm.add_request(prompt(20), greedily(440))
    before = {}

    def check():
        for sequence in live(llm):
            for page in sequence.pages:
                bits = int(llm._cache._frames.bits[page])
                assert bits <= before.get(page, 32)
                before[page] = bits

    (output,) = run(llm, check).values()
    assert len(output.token_ids) == 440
    assert output.cache_report["moves"] > len(before)  # more than one a page
    assert_empty(llm)


def test_what_cannot_fit_even_so_is_refused_with_numbers(directory):
    llm = load(directory, kv_cache_memory=2 * 512 * PAGE)
    with pytest.raises(CapacityError, match=r"needs 400 tokens .*\d+ fit in 0\.\d MB.*--kv-cache-memory"):
        llm.add_request(prompt(381), greedily(20))
    assert_empty(llm)


def test_a_request_that_fits_the_pool_to_the_last_token(directory):
    llm = load(directory, kv_cache_memory=512 * PAGE)
    assert llm.generate([prompt(10)], greedily(7))[0].finish_reason == "length"


def test_shares_give_way_in_a_full_pool(directory):
    llm = load(directory, hot_ratio=0.5, kv_cache_memory=8 * 512 * PAGE)
    assert llm.generate([prompt(380)], greedily(20))[0].finish_reason == "length"


@pytest.mark.parametrize("settings", [{}, {"kv_budget": 0.3}, {"preset": "proposal", "kv_budget": 0.5}])
def test_the_proposal_and_shared_pages(directory, settings):
    llm = load(directory, warm_placement="shared", hot_layer_size=64, kv_cache_memory=1 << 20, **settings)
    output = llm.generate([prompt(300)], greedily(30))[0]
    report = output.cache_report
    assert output.finish_reason == "length" and report["warm_tokens"] > 0
    if "preset" in settings:
        # 8: a page that was exact when `hot_layer_size` asked for one less, and is among the highest still.
        assert {2, 4, 32} <= set(report["pages_by_bits"]) <= {2, 4, 8, 32}
    assert_empty(llm)


# Aborts.


@pytest.mark.parametrize("settings", [{"kv_budget": 0.3}, {"kv_cache_memory": 6 * 512 * PAGE}], ids=str)
def test_an_abort_at_any_step(directory, settings):
    """Case 31: whatever step it comes after, what is left is right, and the others' answers are what they are alone."""
    llm = load(directory, max_num_batched_tokens=32, **settings)
    keep, gone = prompt(40, 1), prompt(120, 2)
    for steps in range(0, 24, 2):
        first = llm.add_request(gone, greedily(30))
        if settings.get("kv_budget"):
            second = llm.add_request(keep, greedily(30))
        for _ in range(steps):
            llm.step()
        llm.abort(first)
        llm._cache.check(live(llm))
        if settings.get("kv_budget"):
            output = run(llm)[second]
            assert len(output.token_ids) == 30
        assert_empty(llm)


def test_a_step_that_fails_is_taken_again(directory, monkeypatch):
    """Case 45: the device is out of memory in the middle; no page is lost, and the step is taken again."""
    llm = load(directory, kv_budget=0.3, max_num_batched_tokens=32)
    expected = llm.generate([prompt(100)], greedily(30))[0].token_ids
    original, calls, failures = llm._runner.ops.silu_mul, itertools.count(), []

    def failing(*args):
        if next(calls) % 5 == 3:
            failures.append(args)
            raise torch.OutOfMemoryError("injected")
        return original(*args)

    monkeypatch.setattr(llm._runner.ops, "silu_mul", failing)
    request = llm.add_request(prompt(100), greedily(30))
    output = run(llm)[request]
    monkeypatch.undo()
    assert len(failures) > 5 and output.finish_reason == "length"
    # Where attention was observed twice, a score may differ: the bytes may not.
    assert len(output.token_ids) == len(expected)
    assert_empty(llm)


def test_a_step_that_never_fits_fails_one_request_after_the_other(directory, monkeypatch):
    """Case 45: others are preempted first, so each is alone, and tried twice, before it is given up."""
    llm = load(directory)
    sizes = []

    def failing(x, *others):
        sizes.append(len(x))
        raise torch.OutOfMemoryError("injected")

    original = llm._runner.ops.silu_mul
    monkeypatch.setattr(llm._runner.ops, "silu_mul", failing)
    ids = [llm.add_request(prompt(10 + i, i), greedily(5)) for i in range(3)]
    done = run(llm)
    assert [done[i].finish_reason for i in ids] == ["error"] * 3 and llm.stats()["num_requests_failed"] == 3
    assert sizes == [33, 21, 10, 11, 11, 12, 12]
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        llm.score([prompt(10)])
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        list(llm.logits(prompt(10)))
    assert_empty(llm)
    monkeypatch.setattr(llm._runner.ops, "silu_mul", original)
    assert llm.generate([prompt(10)], greedily(5))[0].finish_reason == "length"


def test_many_requests_leave_nothing(directory):
    """Case 33, in the small: random lengths, aborts, a pool that is always full."""
    llm = load(directory, kv_budget=0.25, kv_cache_memory=12 * 512 * PAGE, max_num_batched_tokens=64, max_num_seqs=6)
    rng = random.Random(5)
    alive = []
    for _ in range(120):
        if rng.random() < 0.4:
            alive.append(llm.add_request(prompt(rng.randint(1, 120), rng.random()), greedily(rng.randint(1, 30))))
        if alive and rng.random() < 0.15:
            llm.abort(alive.pop(rng.randrange(len(alive))))
        llm.step()
        llm._cache.check(live(llm))
    run(llm)
    assert_empty(llm)


# Scores.


@pytest.mark.parametrize("value", [math.nan, 0.5, math.inf], ids=str)
def test_scores_that_say_nothing(directory, monkeypatch, value):
    """Case 43: NaN, all equal; the answer is that of the order of age."""
    llm = load(directory, kv_budget=0.3)
    monkeypatch.setattr("memory.replacement.score_pages", lambda *args: np.full(len(args[2]), value))
    first, again = (llm.generate([prompt(300)], greedily(30))[0] for _ in range(2))
    assert first.finish_reason == "length" and first.token_ids == again.token_ids
    assert_empty(llm)


def test_moves_are_bounded(directory):
    """Case 44: pages go down and never up, so that no page moves more often than there are formats."""
    llm = load(directory, kv_budget=0.12, max_num_batched_tokens=16)
    llm.add_request(prompt(300), greedily(100))
    (output,) = run(llm).values()
    assert output.cache_report["moves"] <= len(WARM_BITS) * 400 / PAGE


# Beside it.


def test_a_twin_has_the_weights_and_a_cache_of_its_own(directory, plain):
    twin = plain.twin(kv_budget=0.3)
    assert twin._model is plain._model and twin._cache is not plain._cache
    assert (twin.config.kv_budget, plain.config.kv_budget) == (0.3, None)
    ids = prompt(200)
    expected = plain.generate([ids], greedily())[0].token_ids
    ours = twin.generate([ids], greedily())[0].token_ids
    assert ours == load(directory, kv_budget=0.3).generate([ids], greedily())[0].token_ids
    request = twin.add_request(ids, greedily())
    twin.step()
    assert_empty(plain)
    assert plain.generate([ids], greedily())[0].token_ids == expected
    twin.abort(request)
    assert_empty(twin)
    assert plain.twin(page_size=32)._cache.config.page_size == 32


@pytest.mark.parametrize(
    "changes",
    [{"model": "x"}, {"dtype": "bfloat16"}, {"device": "cpu", "kv_budget": 0.3}, {"kv_budget": 0.01}, {"kv_budget": 2}],
    ids=str,
)
def test_what_a_twin_cannot_change(plain, changes):
    with pytest.raises(ConfigError):
        plain.twin(**changes)


def test_logits_are_those_that_score_the_prompt(plain):
    for length in (1, 2, 40, 300):
        ids = prompt(length)
        parts = list(plain.logits(ids))
        logits = torch.cat(parts)
        assert logits.shape == (length, plain.vocab_size) and logits.dtype == torch.float32
        chosen = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0] if length > 1 else []
        np.testing.assert_allclose(np.array(list(map(float, chosen))), plain.score([ids])[0], rtol=0, atol=1e-5)
    assert [len(part) for part in plain.twin(max_num_batched_tokens=128).logits(prompt(300))] == [128, 128, 44]
    generator = plain.logits(prompt(300))
    generator.close()
    assert_empty(plain)


REPORT = {
    "hot_tokens", "warm_tokens", "cold_tokens", "hot_bytes", "warm_bytes", "cold_bytes", "pages_by_bits",
    "resident_bytes", "total_bytes", "full_bytes", "peak_bytes", "moves", "warm_mass", "missed_mass", "page_size",
    "cold_hit_rate", "overlay_hit_rate", "read_bytes_per_token", "read_ms_per_token",
}  # fmt: skip
STATS = {
    "num_requests_running", "num_requests_waiting", "num_requests_failed", "num_preemptions", "num_prompt_tokens",
    "num_cached_tokens", "prefix_tree_depth", "kv_prefix_bytes", "weights_bytes", "kv_resident_bytes",
    "kv_capacity_bytes", "kv_shared_bytes", "kv_cold_bytes", "kv_moves", "kv_bytes_per_token", "kv_cache_usage",
    "max_model_len", "peak_rss_bytes", "kv_promotions", "thrash_rate",
    "host_dedup_ratio", "flash", "compute_s_per_token",
    "cold_hit_rate", "overlay_hit_rate", "read_bytes_per_token", "read_ms_per_token",
}  # fmt: skip


@pytest.mark.parametrize("budget", [None, 0.3])
def test_the_keys_of_reports(directory, budget):
    llm = load(directory, kv_budget=budget)
    assert set(llm.stats()) == STATS
    output = llm.generate([prompt(200)], greedily(41))[0]
    report = output.cache_report
    assert set(report) == REPORT
    assert report["hot_tokens"] + report["warm_tokens"] + report["cold_tokens"] == 240
    assert report["full_bytes"] == 240 * 512
    assert report["hot_bytes"] + report["warm_bytes"] + report["cold_bytes"] == report["total_bytes"]
    assert (report["moves"] > 0) == (budget is not None) == (report["warm_mass"] > 0)
    assert llm.stats()["kv_moves"] == report["moves"]
