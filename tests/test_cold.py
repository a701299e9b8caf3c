"""The cold tier in the host's memory: what is compressed is recalled, and made exact again, from copies below.

With every token recalled the engine is the exact one; that is the law here.
"""

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.checkpoint import DEFAULTS, make_checkpoint
from test_tiers import Tokens, append, assert_holds, make_cache
from test_tiers_engine import PAGE, assert_empty, greedily, live, load, prompt, run

from engine import ConfigError, loading
from engine.config import EngineConfig
from memory import cold
from memory.config import ColdConfig
from models.llama.config import LlamaConfig
from tools.doctor import advice

BELOW = {"recall": 1.0}
MODEL = LlamaConfig.from_dict(DEFAULTS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def plain(directory):
    return load(directory)


def texts(outputs):
    return [output.token_ids for output in outputs]


# The law.


@pytest.mark.parametrize("budget", [0.15, 0.2, 0.3, 0.55])
@pytest.mark.parametrize("chunk", [32, 80, 512])
def test_with_everything_recalled_answers_are_exact(directory, plain, budget, chunk):
    prompts = [prompt(n, n) for n in (1, 40, 130, 300)]
    llm = load(directory, kv_budget=budget, max_num_batched_tokens=chunk, **BELOW)
    outputs = llm.generate(prompts, greedily(20))
    assert texts(outputs) == texts(plain.generate(prompts, greedily(20)))
    report = outputs[3].cache_report
    assert report["warm_tokens"] == report["cold_tokens"] > 0
    assert report["cold_bytes"] == report["cold_tokens"] * llm._cache.config.token_bytes
    assert report["total_bytes"] == report["resident_bytes"] + report["cold_bytes"]
    assert_empty(llm)
    assert llm.stats()["kv_cold_bytes"] == 0


@pytest.mark.parametrize("block", [1, 5, 16, 64])
def test_logits_are_exact_in_blocks_of_any_size(directory, plain, block):
    tokens = prompt(330, 7)
    llm = load(directory, kv_budget=0.16, max_num_batched_tokens=48, recall_block=block, **BELOW)
    exact, recalled = (torch.cat(list(x.logits(tokens))) for x in (plain, llm))
    torch.testing.assert_close(recalled, exact, rtol=0, atol=2e-3)
    assert llm.stats()["cold_hit_rate"] > 0.5


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 30)), min_size=1, max_size=4), st.integers(16, 100))
def test_requests_that_come_and_go(shared, requests, chunk):
    directory, plain = shared
    llm = load(directory, kv_budget=0.2, max_num_batched_tokens=chunk, enable_prefix_caching=True, **BELOW)
    wanted, ids = {}, []
    for length, seed in requests:
        tokens = prompt(100)[:length] + prompt(length, seed)
        ids.append(llm.add_request(tokens, greedily(6)))
        wanted[ids[-1]] = plain.generate([tokens], greedily(6))[0].token_ids
        llm.step()
    outputs = run(llm)
    assert {i: outputs[i].token_ids for i in ids} == wanted
    llm._cache.forget()
    assert_empty(llm)


@pytest.fixture(scope="module")
def shared(directory, plain):
    return directory, plain


def test_recalling_more_loses_less(directory, plain):
    tokens = prompt(400, 3)
    exact = torch.cat(list(plain.logits(tokens))).log_softmax(-1)
    losses = []
    for fraction in (0.0, 0.05, 0.3, 1.0):
        llm = load(directory, kv_budget=0.16, max_num_batched_tokens=32, recall=fraction, cold_format="exact")
        found = torch.cat(list(llm.logits(tokens))).log_softmax(-1)
        losses.append(float((exact.exp() * (exact - found)).sum(-1).mean()))
    assert losses == sorted(losses, reverse=True)
    assert losses[1] < 0.8 * losses[0] and losses[3] < 1e-4 * losses[0]


def test_int8_copies_are_half_as_large(directory, plain):
    tokens = [prompt(300, 5)]
    exact = load(directory, kv_budget=0.2, max_num_batched_tokens=64, **BELOW)
    small = load(directory, kv_budget=0.2, max_num_batched_tokens=64, cold_format="int8", **BELOW)
    reports = [llm.generate(tokens, greedily(4))[0].cache_report for llm in (exact, small)]
    dim, itemsize = exact._cache.config.head_dim, 4
    assert reports[1]["cold_bytes"] * dim * itemsize == reports[0]["cold_bytes"] * (dim + 2)
    logits = [torch.cat(list(llm.logits(tokens[0]))) for llm in (plain, small)]
    errors = (logits[0] - logits[1]).abs()
    assert errors.mean() < 0.04 and errors.max() < 0.5  # of logits of size 2.4


# What is reported.


def test_what_is_read_is_counted(directory):
    llm = load(directory, kv_budget=0.2, max_num_batched_tokens=64, recall=0.1)
    output = llm.generate([prompt(250, 1)], greedily(10))[0]
    report, stats = output.cache_report, llm.stats()
    for key in ("cold_hit_rate", "read_bytes_per_token", "read_ms_per_token"):
        assert report[key] == stats[key]
    # A step of decoding reads a tenth of 1,024 tokens, as the text is shorter; a chunk's blocks of 16 queries share it.
    row = llm._cache.config.token_bytes
    assert 103 / 16 * row < report["read_bytes_per_token"] < 103 * row
    assert 0.15 < report["cold_hit_rate"] < 1
    assert report["read_ms_per_token"]["pcie5"] == pytest.approx(report["read_bytes_per_token"] / 50e9 * 1e3)
    assert set(report["read_ms_per_token"]) == {"pcie4", "pcie5", "unified", "nvme"}
    assert any("--recall" in line for line in advice(stats))


def test_without_copies_nothing_is_read(directory):
    llm = load(directory, kv_budget=0.2)
    report = llm.generate([prompt(250, 1)], greedily(10))[0].cache_report
    assert llm._cache.config.cold is None
    assert report["cold_bytes"] == report["cold_hit_rate"] == report["read_bytes_per_token"] == 0
    assert report["total_bytes"] == report["resident_bytes"]
    exact = load(directory, kv_budget=1.0, **BELOW).generate([prompt(250, 1)], greedily(10))[0].cache_report
    assert exact["cold_bytes"] == exact["read_bytes_per_token"] == 0  # nothing is compressed


@pytest.mark.parametrize(("link", "own", "wanted"), [(25e9, 1.5e12, 0.0125), (400e9, 4e12, 0.05), (5e9, 200e9, 0.025)])
def test_a_gpu_recalls_what_its_link_brings_while_it_would_read_everything(monkeypatch, caplog, link, own, wanted):
    """As seconds: a fraction of the tokens over the link, all of them from the device's own memory."""
    monkeypatch.setattr(loading, "_rates", lambda device: (link, own))
    config = EngineConfig(model="any", kv_budget=0.25)
    recall = loading._cold(config, MODEL, 0, torch.device("cuda")).recall
    assert recall == pytest.approx(wanted)
    assert recall / link <= 1 / own * (1 + 1e-9)
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"--recall {wanted:.4f}" in said
    assert f"{link / 1e9:.1f} GB/s" in said


@pytest.mark.parametrize(("settings", "said"), [({"recall": 0.1}, 1), ({"overlay_size": 1 << 20}, 1),
                                                ({"recall": 0.1, "kv_budget": 0.3}, 0)])  # fmt: skip
def test_recall_of_what_is_never_compressed_is_said(directory, caplog, settings, said):
    load(directory, **settings)
    assert len([record for record in caplog.records if "nothing will be" in record.getMessage()]) == said


@pytest.mark.parametrize("asked", [0.0, 0.2])
def test_a_fraction_that_is_asked_for_is_taken_unmeasured(monkeypatch, asked):
    monkeypatch.setattr(loading, "_rates", lambda device: pytest.fail("measured"))
    assert loading._cold(EngineConfig(model="any", recall=asked), MODEL, 0, torch.device("cuda")).recall == asked
    # A CPU reads copies as fast as all else.
    beside_a_cpu = EngineConfig(model="any", host_cache_size=1 << 20)
    assert loading._cold(beside_a_cpu, MODEL, 0, torch.device("cpu")).recall == 0.05


def test_recall_0_keeps_copies_that_nobody_reads(directory):
    llm = load(directory, kv_budget=0.2, cold_format="exact", recall=0.0, max_num_batched_tokens=64)
    report = llm.generate([prompt(250, 1)], greedily(10))[0].cache_report
    assert report["cold_bytes"] > 0 == report["read_bytes_per_token"] == report["cold_hit_rate"]


@pytest.mark.parametrize("changes", [{"recall": 0.1, "cold_format": "none"}, {"recall": 1.5}, {"recall": float("nan")},
                                     {"cold_format": "fp8"}, {"cold_policy": "both"}, {"host_cache_size": 0},
                                     {"recall_block": 0}, {"overlay_size": 1 << 20},
                                     {"overlay_size": "1MiB", "cold_format": "int8"}, {"overlay_size": 0},
                                     {"overlay_size": 100, "backend": "triton", "recall": 0.1},
                                     {"overlay_size": 1 << 20, "backend": "triton", "recall": 0.0,
                                      "cold_format": "exact"}])  # fmt: skip
def test_what_cannot_be_is_refused(directory, changes, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # all is checked before any kernel is loaded
    with pytest.raises(ConfigError, match=next(iter(changes))):
        load(directory, kv_budget=0.3, **changes)


# Bounds.


def test_the_host_cache_is_bounded_and_says_so_once(directory, plain, caplog):
    cold._warn_full.cache_clear()
    page = plain._cache.config.page_bytes
    llm = load(directory, kv_budget=0.2, max_num_batched_tokens=64, host_cache_size=5 * page + 7, **BELOW)
    seen = []
    ids = [llm.add_request(prompt(200, seed), greedily(8)) for seed in range(3)]
    with caplog.at_level(logging.WARNING, "isotherm"):
        outputs = run(llm, lambda: seen.append(llm.stats()["kv_cold_bytes"]))
    assert max(seen) == 5 * page and all(outputs[i].finish_reason == "length" for i in ids)
    assert [record.getMessage() for record in caplog.records if "--host-cache-size" in record.getMessage()][1:] == []
    assert any("--host-cache-size" in record.getMessage() for record in caplog.records)
    assert_empty(llm)


def test_a_host_cache_for_no_page(directory):
    with pytest.raises(ConfigError, match=r"host_cache_size 100 is less than .* 8192 "):
        load(directory, kv_budget=0.2, host_cache_size=100)


def test_equal_prefixes_are_copied_once(directory):
    llm = load(directory, kv_budget=0.2, max_num_batched_tokens=64, enable_prefix_caching=True, **BELOW)
    for seed in range(3):
        llm.add_request(prompt(160) + prompt(20, seed), greedily(6))
    most = []
    run(llm, lambda: most.append((llm.stats()["host_dedup_ratio"], llm.stats()["kv_cold_bytes"])))
    assert max(ratio for ratio, _ in most) > 2
    assert max(size for _, size in most) <= (160 // PAGE + 3 * 3) * llm._cache.config.page_bytes


def test_an_abort_at_any_step_gives_copies_back(directory):
    for steps in range(1, 9):
        llm = load(directory, kv_budget=0.2, max_num_batched_tokens=32, **BELOW)
        first, second = (llm.add_request(prompt(120, seed), greedily(8)) for seed in range(2))
        for _ in range(steps):
            llm.step()
        llm.abort(first)
        llm._cache.check(live(llm))
        assert run(llm)[second].token_ids == llm.generate([prompt(120, 1)], greedily(8))[0].token_ids
        assert_empty(llm)
        assert llm.stats()["kv_cold_bytes"] == 0


def test_a_copy_that_fails_is_made_again(directory, plain, monkeypatch):
    """As where memory is short: nothing counts as copied that is not."""
    llm = load(directory, kv_budget=0.2, max_num_batched_tokens=64, **BELOW)
    copies, fails = llm._cache._frames.copies, iter([True])
    encode = copies._encode

    def failing(x):
        if next(fails, False):
            raise torch.OutOfMemoryError("injected")
        return encode(x)

    monkeypatch.setattr(copies, "_encode", failing)
    request = llm.add_request(prompt(250, 1), greedily(10))
    try:
        outputs = run(llm)
    except torch.OutOfMemoryError:
        outputs = run(llm)
    if outputs[request].finish_reason == "length":
        assert outputs[request].token_ids == plain.generate([prompt(250, 1)], greedily(10))[0].token_ids
    assert next(fails, None) is None
    assert_empty(llm)


# Promotion.


def crowded(policy=False, format="exact", **others):
    """A pool that was full: (cache, one sequence that was compressed for others, which are gone)."""
    config = ColdConfig(format, 1 << 30, exclusive=policy)
    cache = make_cache(12, cold=config, **others)
    held = [Tokens(cache.config) for _ in range(3)]
    for h in held:
        for _ in range(6):
            cache.make_room(1, [x.sequence for x in held])
            append(cache, h, 16)
    assert (cache._frames.bits[np.array(held[0].sequence.pages)] < cache.config.exact_bits).any()
    for h in held[1:]:
        cache.free(h.sequence)
    return cache, held[0]


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_promotion_makes_a_page_exact_again_to_the_bit(exclusive, itemsize):
    cache, held = crowded(exclusive, itemsize=itemsize)
    copies = cache.report(held.sequence)["cold_tokens"]
    cache.settle([held.sequence])
    report = cache.report(held.sequence)
    assert report["warm_tokens"] == 0 and cache.stats()["kv_promotions"] == copies // PAGE
    assert report["cold_tokens"] == (0 if exclusive else copies)
    cache.check([held.sequence])
    cache.reserve(held.sequence, held.sequence.length + 1)
    assert_holds(cache, cache.plan([held.sequence], [1], 1), 0, held)
    assert not cache._frames.lossy[held.sequence.pages].any()
    before = cache.stats()["kv_promotions"]
    cache.settle([held.sequence])
    assert cache.stats()["kv_promotions"] == before
    cache.free(held.sequence)
    assert cache.stats()["kv_cold_bytes"] == 0


def test_the_doctor_tells_of_pages_that_go_down_and_up():
    cache, held = crowded()
    assert cache.stats()["thrash_rate"] == 0 and not advice(cache.stats())
    cache.settle([held.sequence])
    stats = cache.stats()
    assert stats["thrash_rate"] == stats["kv_promotions"] / stats["kv_moves"] > 0.25
    (said,) = advice(stats)
    assert f"{stats['thrash_rate']:.0%} of the moves down were undone" in said and "--kv-cache-memory" in said


def test_nothing_is_promoted_from_8_bits_or_into_a_full_pool():
    cache, held = crowded(format="int8")
    cache.settle([held.sequence])
    assert cache.stats()["kv_promotions"] == 0
    cache = make_cache(12, cold=ColdConfig("exact", 1 << 30))
    held = [Tokens(cache.config) for _ in range(3)]
    for _ in range(6):
        for h in held:
            cache.make_room(1, [x.sequence for x in held])
            append(cache, h, 16)
            cache.settle([x.sequence for x in held])
    assert cache.stats()["kv_promotions"] == 0


def test_the_tail_of_a_prefix_comes_from_its_copy(directory, plain):
    """A match that ends in a compressed page is copied, token by token, from what the page was."""
    first, second = prompt(150) + prompt(50, 1), prompt(150) + prompt(50, 2)
    cached = []
    for below in (BELOW, {}):
        llm = load(directory, kv_budget=0.2, max_num_batched_tokens=64, enable_prefix_caching=True, **below)
        llm.generate([first], greedily(4))
        output = llm.generate([second], greedily(20))[0]
        cached.append(output.num_cached_tokens)
        if below:
            assert output.token_ids == plain.generate([second], greedily(20))[0].token_ids
    assert cached == [150, 144]
