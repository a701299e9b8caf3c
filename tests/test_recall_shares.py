"""How recall is shared over layers: measured by the tool, kept beside a scorer, taken by the engine."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from oracle.checkpoint import TEXT, make_checkpoint
from safetensors.torch import save_file
from test_tiers_engine import greedily, load, prompt

from engine import LLM, ConfigError, RequestError
from memory.importance import DEFAULT, FEATURE_VERSION, Scorer, load_scorer, recall_shares
from tools import evaluate
from tools import recall_shares as tool
from tools.evaluate_attention import at_floor, causal, forward

SHAPE = "2 layers, 4/2 heads of 16, vocabulary 352"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("shares")
    make_checkpoint(path / "model", seed=1, max_position_embeddings=1024)
    (path / "text").write_text(TEXT * 3)
    return path


def written(path, odds, model=SHAPE):
    about = {"feature_version": FEATURE_VERSION, "recall_model": model, "recall_odds": odds}
    save_file(Scorer().state_dict(), path, about)
    return path


# The choice.


@pytest.mark.parametrize("recall", [0.05, 0.249])
@pytest.mark.parametrize("seed", range(20))
def test_costs_that_fall_in_steps_are_never_more_than_of_even_shares(seed, recall):
    rng = np.random.default_rng(seed)
    costs = 10 ** rng.uniform(-4, 0, (6, len(tool.FACTORS)))
    found, even = tool.share(costs, recall), np.full(6, recall)
    assert found.mean() == pytest.approx(recall) and (found < 1).all()
    assert (found > 0.999 * recall * tool.FACTORS[0]).all() and (found < 1.001 * recall * tool.FACTORS[-1]).all()
    assert tool.costs_at(costs, recall, found).sum() <= tool.costs_at(costs, recall, even).sum()


@pytest.mark.parametrize("seed", range(5))
def test_shares_cost_as_little_as_the_best_of_all_that_there_are(seed):
    """On grids of three layers; costs fall ever more slowly, as costs of errors do."""
    rng, recall = np.random.default_rng(seed), 0.05
    factors = np.array(tool.FACTORS)
    costs = rng.uniform(0.1, 10, (3, 1)) * factors ** -rng.uniform(0.2, 3, (3, 1))
    found = tool.share(costs, recall)
    assert found.mean() == pytest.approx(recall)
    assert (found >= 0.99 * recall * factors[0]).all() and (found <= 1.01 * recall * factors[-1]).all()
    grid = recall * np.geomspace(factors[0], factors[-1], 60)
    table = [tool.costs_at(costs, recall, np.full(3, x)) for x in grid]
    best = min(
        table[a][0] + table[b][1] + table[c][2]
        for a, b, c in itertools.product(range(60), repeat=3)
        if grid[a] + grid[b] + grid[c] <= 3 * recall
    )
    assert tool.costs_at(costs, recall, found).sum() < 1.02 * best


def test_layers_that_are_alike_get_alike_and_those_that_gain_nothing_the_least():
    falling = [4.0, 2.0, 1.0, 0.5, 0.25]
    assert tool.share(np.array([falling] * 4), 0.05) == pytest.approx(np.full(4, 0.05), rel=0.02)
    some = tool.share(np.array([falling, falling, [1.0] * 5, [1e-9, 1e-8, 1e-9, 1e-9, 1e-9]]), 0.05)
    assert some[2:] == pytest.approx(np.full(2, 0.0125), rel=0.02) and some[:2] == pytest.approx(0.0875, rel=0.02)


def test_errors_are_those_of_attention_with_the_most_attended_exact():
    torch.manual_seed(0)
    heads, group, length, size, fraction = 2, 2, 256, 16, 0.1
    q, k, v = (3 * torch.randn(n, length, size) for n in (heads * group, heads, heads))
    chosen = torch.tensor([130, 200, 255])
    (got,) = tool._errors(q, k, v, chosen, [fraction])
    floor_k, floor_v = (at_floor(x, i == 0).double() for i, x in enumerate((k, v)))
    for i, at in enumerate(chosen.tolist()):
        old = (at // 64 - 1) * 64
        keys, values = k[:, : at + 1].double(), v[:, : at + 1].double()
        near = [torch.cat([floor_k[h, :old], keys[h, old:]]) for h in range(heads)]
        logits = [q[h * group : (h + 1) * group, at].double() @ near[h].T / math.sqrt(size) for h in range(heads)]
        mass = torch.stack([x.softmax(-1).square().sum(0)[:old] for x in logits])
        taken = mass.flatten().topk(int(fraction * heads * at)).indices
        exact = torch.zeros(heads * old, dtype=torch.bool)
        exact[taken] = True
        for h in range(heads):
            mine = exact.view(heads, old)[h][:, None]
            some_k = torch.cat([torch.where(mine, keys[h, :old], floor_k[h, :old]), keys[h, old:]])
            some_v = torch.cat([torch.where(mine, values[h, :old], floor_v[h, :old]), values[h, old:]])
            rows = q[h * group : (h + 1) * group, at].double() / math.sqrt(size)
            want = (rows @ some_k.T).softmax(-1) @ some_v - (rows @ keys[h].T).softmax(-1) @ values[h]
            torch.testing.assert_close(got[h * group : (h + 1) * group, i].double(), want, rtol=0, atol=1e-4)


# The tool.


def arguments(directory, out, *more):
    words = ["--model", directory / "model", "--text", directory / "text", "--out", out, "--context", 512]
    return [str(word) for word in (*words, "--windows", 1, *more)]


def test_the_tool_writes_shares_that_the_engine_takes(directory, capsys):
    out = directory / "shares.safetensors"
    assert tool.main(arguments(directory, out, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert np.mean(report["fractions"]) == pytest.approx(0.05, rel=1e-2)
    assert 0 < report["kl_shared"] <= report["kl_even"] * 1.001
    scorer, about = load_scorer(out)
    assert torch.equal(scorer.packed(), load_scorer(DEFAULT)[0].packed()), "the scorer is the package's"
    assert about["recall_model"] == SHAPE and "tools.recall_shares" in about["recall_command"]
    assert about["model"] == load_scorer(DEFAULT)[1]["model"], "which is of what the scorer was trained on"
    llm = load(directory / "model", kv_budget=0.2, recall=0.05, scorer=out)
    shares = [layer.share for layer in llm._cache.layers]
    assert shares == pytest.approx([64 * x / 0.05 for x in report["fractions"]], abs=1)


@pytest.mark.parametrize("layer", [0, 1])
def test_an_error_in_a_layer_costs_what_it_does_to_the_predictions(directory, layer):
    """A hundredth of the error, so that it is small: its KL is a ten-thousandth."""
    llm = LLM(directory / "model", dtype="float32", threads=1, max_model_len=512)
    window = llm.tokenizer.encode((directory / "text").read_text())[:512]
    generator, small = torch.Generator().manual_seed(0), 0.01
    costs = np.mean([tool.costs_of(llm, window, 0.05, generator) for _ in range(40)], axis=0)
    chosen = torch.arange(256 + 7, 512, 8)

    def predictions(size):
        def attend(number, q, k, v):
            out = causal(q, k, v)
            if number == layer:
                out[:, chosen] += size * tool._errors(q, k, v, chosen, [0.05])[0]
            return out

        return llm._model.exact_logits(forward(llm, window, attend)).double().log_softmax(-1)

    exact, found = predictions(0.0), predictions(small)
    kl = float((exact.exp() * (exact - found)).sum() / len(chosen))
    assert costs[layer][tool.FACTORS.index(1)] * small**2 == pytest.approx(kl, rel=0.3)


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        (["--windows", 0], ConfigError, "need --windows from 1"),
        (["--seed", 2**63], ConfigError, "--seed from 0 to 2"),
        (["--out", "/tmp"], ConfigError, "a directory, or not to be written"),
        (["--out", "/proc/x.safetensors"], ConfigError, "--out /proc/x.safetensors"),
        (["--context", 300], ConfigError, "need --context in whole 256"),
        (["--out", "/nowhere/x"], ConfigError, "no such directory"),
        (["--scorer", "/nowhere/x"], ConfigError, "no scorer"),
        (["--windows", 99], RequestError, "99 windows were asked for"),
        (["--text", "/nowhere/x"], RequestError, "cannot be read"),
    ],
)
def test_what_cannot_be_is_said(directory, tmp_path, wrong, kind, words):
    with pytest.raises(kind, match=words):
        tool.main(arguments(directory, tmp_path / "x", *map(str, wrong)))
    assert not (tmp_path / "x").exists()


# The engine.


@pytest.mark.parametrize("recall", [1e-3, 0.0125, 0.05, 0.3, 0.9, 1.0])
def test_shares_are_the_fraction_in_the_mean_whatever_it_is(recall):
    odds = [8.0, 4.0, 1.0, 0.5, 0.25, 0.1]
    shares = np.array(recall_shares({"recall_odds": json.dumps(odds)}, recall, 6))
    assert shares.mean() == pytest.approx(64, abs=0.5)
    assert list(shares) == sorted(shares, reverse=True)
    assert (shares * recall <= 64 * 1.3).all()
    if recall in (1e-3, 1):
        assert shares == pytest.approx(64, rel=0.06)


def test_a_scorer_without_shares_has_none():
    assert recall_shares({}, 0.05, 2) == ()


ODDS = ["", "1", "[1]", "[1, 0]", "[1, 1e300]", "[1, NaN]", '{"a": 1}', "[1, 2, 3]", '["a", "b"]', "[[1], [2]]"]
ODDS += ["[" * 100_000, "[1" + "0" * 400 + ", 1]"]


@pytest.mark.parametrize("odds", ODDS)
def test_shares_that_are_none_are_refused(directory, tmp_path, odds):
    path = written(tmp_path / "s.safetensors", odds)
    with pytest.raises(ConfigError, match=r"s.safetensors: wanted recall_odds of 2 layers"):
        load(directory / "model", kv_budget=0.2, recall=0.05, scorer=path)
    load(directory / "model", kv_budget=0.2, scorer=path)  # nothing is recalled


def test_shares_of_another_model_are_not_taken(directory, tmp_path):
    path = written(tmp_path / "s.safetensors", "[9, 1]", "9 layers")
    assert {x.share for x in load(directory / "model", kv_budget=0.2, recall=0.05, scorer=path)._cache.layers} == {64}


def test_layers_read_their_shares_and_all_is_still_exact(directory, tmp_path):
    path = written(tmp_path / "s.safetensors", "[9, 0.2]")
    settings = {"kv_budget": 0.2, "max_num_batched_tokens": 64}
    plain = load(directory / "model")
    tokens, of_all = prompt(300, 5), load(directory / "model", recall=1.0, scorer=path, **settings)
    answers = [llm.generate([tokens], greedily(12))[0].token_ids for llm in (plain, of_all)]
    assert answers[0] == answers[1]
    reads = {}
    for name, scorer in (("even", None), ("shared", path)):
        llm = load(directory / "model", recall=0.05, scorer=scorer, recall_block=1, **settings)
        llm.generate([tokens], greedily(12))
        reads[name] = llm.stats()["read_bytes_per_token"]
    assert 0.8 * reads["even"] < reads["shared"] <= reads["even"], "a layer wants more than the young text has"
    llms = [load(directory / "model", recall=0.05, scorer=x, **settings) for x in (None, path)]
    assert not torch.equal(*(torch.cat(list(llm.logits(tokens))) for llm in llms))


def test_scorers_are_compared_in_one_run(directory, tmp_path, capsys):
    names = [written(tmp_path / name, odds) for name, odds in (("even", "[1, 1]"), ("odd", "[9, 0.2]"))]
    words = ["quality", "--model", directory / "model", "--text", directory / "text", "--context", 512, "--score-from",
             128, "--tokens", 300, "--dtype", "float32", "--kv-budget", 0.2, "--recall", 0.05, "--json", "--scorer",
             ",".join(map(str, names))]  # fmt: skip
    assert evaluate.main([str(word) for word in words]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["setting"].split("scorer ")[1] for row in rows] == [str(name) for name in names]
    assert rows[0]["kl_nats"] != rows[1]["kl_nats"] > 0
    assert rows[0]["resident_ratio"] == rows[1]["resident_ratio"]


def test_the_demo_models_shares_ship():
    about = load_scorer(DEFAULT)[1]
    shares = recall_shares(about, 0.05, 30)
    assert "tools.recall_shares" in about["recall_command"] and max(shares) > 2 * min(shares)
    assert np.mean(shares) == pytest.approx(64, abs=1)
