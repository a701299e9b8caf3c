"""`tools.bench memory`: planned beside measured on tiny shapes, and the engine of random weights that it measures."""

import json

import pytest
import torch
from oracle.checkpoint import make_checkpoint

from engine import CapacityError, ConfigError, SamplingParams
from tools import bench, bench_memory
from tools.bench_memory import LiveBytes
from tools.random_model import random_llm

SHAPE = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("shape")
    make_checkpoint(path, tokenizer=False, num_hidden_layers=4, max_position_embeddings=512, **SHAPE)
    return path


def measured(capsys, directory, *options):
    command = ["memory", "--model", directory, "--context", "600", "--dtype", "float32", "--json", *options]
    assert bench.main([str(word) for word in command]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("options", [
    [], ["--chunk", "64"], ["--direct-state", "--chunk", "100"], ["--kv-budget", "0.4"],
    ["--kv-budget", "0.3", "--chunk", "64", "--direct-state"],
])  # fmt: skip
def test_measured_is_as_planned(capsys, directory, options):
    found = measured(capsys, directory, *options)
    # Of compressed pages more is planned than so short a text has of each format; at real size that is nothing.
    assert (0.9 if "--kv-budget" in options else 0.95) < found["measured_of_planned"] < 1.05
    held = found["held_bytes"]
    assert held["weights_bytes"] == found["weights_bytes"]
    assert sum(held.values()) == found["measured_peak_bytes"]
    assert found["rss_peak_bytes"] is not None  # what was freed before is used again: no figure here
    tokens = found["cache_report"]["hot_tokens"] + found["cache_report"]["warm_tokens"]
    assert tokens == 599  # the last one is never computed
    budget = 0.4 if "0.4" in options else 0.3 if "0.3" in options else 1
    assert found["cache_report"]["resident_bytes"] <= budget * found["kv_full_bytes"] + found["kv_full_bytes"] // 9
    assert any("filled, not computed" in note for note in found["notes"]) == ("--direct-state" in options)


def test_the_group_of_int4_is_planned_as_it_is_measured(capsys, directory):
    """A scale and a zero of 16 bits for each group: 32 bits to its weights."""
    held = {}
    for group in (32, 64):
        found = measured(capsys, directory, "--quantization", "int4", "--quantization-group", group)
        assert found["quantization_group"] == group
        held[group] = found["weights_bytes"]
        assert held[group] == found["held_bytes"]["weights_bytes"]
    assert held == {64: held[64], 32: held[64] + 4 * int4_weights(directory) // 64}
    assert measured(capsys, directory, "--quantization", "int4")["weights_bytes"] == held[32]


def int4_weights(directory):
    """How many there are: all of the layers' matrices."""
    config = json.loads((directory / "config.json").read_text())
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    return layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--decode", "600"], "decode must be from 1 to 599"),
        (["--decode", "0"], "decode must be from 1 to 599"),
        (["--kv-budget", "0.05"], "kv_budget 0.05 is less than"),
        (["--dtype", "auto"], "random weights need a dtype"),
        (["--quantization", "int8", "--quantization-group", "64"], "quantization_group 64 is of int4"),
        (["--model", "llama9"], "llama2-7b, llama2-13b"),
    ],
)
def test_what_is_refused(directory, options, words):
    with pytest.raises(ConfigError, match=words):
        bench.main(["memory", "--model", str(directory), "--context", "600", *options])


def test_what_does_not_fit_says_what_does(directory, monkeypatch):
    monkeypatch.setattr(bench_memory, "free_memory_bytes", lambda device: 15_000_000)
    with pytest.raises(CapacityError, match=r"planned to take 0.02 GB, 0.01 GB are free: [1-9]\d* tokens fit"):
        bench.main(["memory", "--model", str(directory), "--context", "5000", "--dtype", "float32"])


def test_an_engine_of_random_weights(directory):
    """Greedy ids repeat with the seed, and are others with another; contexts beyond the shape's own are given."""
    params = SamplingParams(max_tokens=6, temperature=0)

    def ids(seed):
        llm = random_llm(str(directory), seed=seed, dtype="float32", max_model_len=1000, threads=1)
        assert llm.max_model_len == 1000 and llm.vocab_size == 352
        return llm.generate([list(range(3, 60))], params, use_tqdm=False)[0].token_ids

    assert ids(1) == ids(1)
    assert len({tuple(ids(seed)) for seed in (1, 2, 3)}) > 1


def test_live_bytes():
    """What is alive at most: views, and what was there before, count nothing."""
    before = torch.zeros(1000)
    with LiveBytes() as live:
        view = before[10:].view(-1)
        first = view + 1
        second = torch.cat([first, first])
        assert live.now == 4 * 990 * 3
        del first
        assert live.now == 4 * 990 * 2
        second.add_(1)
        del second
        assert live.now == 0
    assert live.peak == 4 * 990 * 3
