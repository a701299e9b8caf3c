"""Training a scorer, using it, and what its evaluation measures: on a tiny model."""

import json
import logging
import math

import pytest
import torch
from oracle.checkpoint import TEXT, make_checkpoint

from engine import LLM, ConfigError, RequestError, SamplingParams
from memory.importance import DEFAULT, PROFILES, AttentionRecord, Scorer, load_scorer
from tools import evaluate, train_scorer
from tools.evaluate_attention import causal, forward, missed, recalled, record
from tools.evaluate_readahead import drifts, query


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("scorer")
    make_checkpoint(path / "model", seed=1, max_position_embeddings=1024)
    (path / "text").write_text(TEXT * 3)
    return path


def arguments(directory, out, *more):
    text = directory / "text"
    words = ["--model", directory / "model", "--text", text, "--held-out", text, "--out", out, "--context", 512,
             "--horizon", 64, "--windows", 1, "--layers", 2, *more]  # fmt: skip
    return [str(word) for word in words]


@pytest.fixture(scope="module")
def trained(directory):
    out = directory / "trained.safetensors"
    assert train_scorer.main(arguments(directory, out, "--steps", 50)) == 0
    return out


# Training.


def test_training_misses_less_and_says_what_it_made(directory, trained, capsys):
    scorer, about = load_scorer(trained)
    assert about["model"] == "2 layers, 4/2 heads of 16, vocabulary 352" and "--steps 50" in about["command"]
    assert sorted(path.name for path in directory.glob("trained*")) == ["trained.safetensors"]
    again = directory / "again.safetensors"
    assert train_scorer.main(arguments(directory, again, "--steps", 50, "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert torch.equal(load_scorer(again)[0].packed(), scorer.packed()), "the same seed, another scorer"
    before, after = (result["missed"][when]["train"][0] for when in ("before", "after"))
    assert after < before and result["dead"] == [] and result["out"] == str(again)


def test_an_interrupted_training_goes_on_and_ends_as_if_it_had_not_been(directory, trained, monkeypatch):
    out, judge, calls = directory / "resumed.safetensors", train_scorer.judge, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 4:  # two before the first step, one each 25 steps
            raise KeyboardInterrupt
        return judge(*args)

    monkeypatch.setattr(train_scorer, "judge", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_scorer.main(arguments(directory, out, "--steps", 50))
    assert not out.exists()
    monkeypatch.setattr(train_scorer, "judge", judge)
    monkeypatch.setattr("tools.evaluate_attention.record", None)  # what was recorded is kept too
    with pytest.raises(ConfigError, match=r"was trained with .* leave out --resume"):
        train_scorer.main(arguments(directory, out, "--steps", 50, "--resume", "--errors"))
    assert train_scorer.main(arguments(directory, out, "--steps", 50, "--resume")) == 0
    assert torch.equal(load_scorer(out)[0].packed(), load_scorer(trained)[0].packed())


def test_errors_are_squares_of_the_shares_and_are_learned(directory, capsys):
    out = directory / "errors.safetensors"
    assert train_scorer.main(arguments(directory, out, "--steps", 50, "--errors", "--json")) == 0
    missed = json.loads(capsys.readouterr().out)["missed"]
    assert missed["after"]["train"][0] < missed["before"]["train"][0]
    assert train_scorer.main(arguments(directory, out, "--steps", 25, "--json")) == 0
    assert missed["before"]["train"][0] != json.loads(capsys.readouterr().out)["missed"]["before"]["train"][0]


def test_gradients_are_printed_and_one_that_does_not_flow_fails(directory, tmp_path, monkeypatch, capsys):
    out = tmp_path / "a"
    assert train_scorer.main(arguments(directory, out, "--check-gradients", "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["gradients"]) == ["alpha", "beta", "gamma", "tau", "MLP"] and not out.exists()
    assert all(norm > 0 for norm in result["gradients"].values()) and result["dead"] == []

    def without_gamma(scorer, samples):
        with torch.no_grad():
            scorer.gamma.zero_()

    monkeypatch.setattr(train_scorer, "_standardise", without_gamma)
    assert train_scorer.main(arguments(directory, out, "--check-gradients")) == 1
    printed = capsys.readouterr()
    assert "no gradient flows to gamma, MLP" in printed.err and "MLP          0" in printed.out


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (["--horizon", "96"], ConfigError, "--horizon in whole 64 tokens"),
        (["--context", "2048"], ConfigError, "the model's 1024, got 2048"),
        (["--out", "/nowhere/a"], ConfigError, "no such directory"),
        (["--text", "/nowhere/a"], RequestError, "cannot be read"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(directory, tmp_path, monkeypatch, wrong, error, words):
    monkeypatch.setattr("engine.LLM", None)
    with pytest.raises(error, match=words):
        train_scorer.main([*arguments(directory, tmp_path / "a"), *wrong])


def test_the_soft_choice_keeps_so_many_and_becomes_the_hard_one():
    torch.manual_seed(0)
    scores, mass = torch.rand(3, 200), torch.rand(3, 200)
    hard = missed(scores, mass, 0.1)
    assert float(train_scorer.soft_missed(scores, mass, 0.1, 1e-3)) == pytest.approx(hard, abs=0.01)
    even = torch.ones(3, 200)
    for temperature in (0.01, 0.3, 3.0):
        assert float(train_scorer.soft_missed(scores, even, 0.1, temperature)) == pytest.approx(0.9, abs=1e-3)
    # A head with ten times the attention counts ten times.
    heavy = mass * torch.tensor([[10.0], [1], [1]])
    lost = [1 - missed(scores[i : i + 1], mass[i : i + 1], 0.1) for i in range(3)]
    weights = heavy.sum(1) / heavy.sum()
    expected = 1 - sum(float(weight) * kept for weight, kept in zip(weights, lost, strict=True))
    assert float(train_scorer.soft_missed(scores, heavy, 0.1, 1e-3)) == pytest.approx(expected, abs=0.01)
    # All scores higher changes nothing, so no gradient asks for it.
    shifted = scores.clone().requires_grad_()
    train_scorer.soft_missed(shifted, mass, 0.1, 0.3).backward()
    assert float(shifted.grad.sum(1).abs().max()) < 1e-5 < float(shifted.grad.abs().max())


# What is recorded.


def test_samples_are_what_the_model_attends_to(directory):
    """Against attention computed here: from the logits of every query and key, one layer."""
    llm = LLM(directory / "model", dtype="float32", threads=1, max_model_len=512)
    window = llm.tokenizer.encode(TEXT * 3)[:512]
    seen = {}
    samples = record(llm, window, [1], [256], 64, 16, pairs := [])

    def attend(layer, q, k, v):
        seen[layer] = q, k
        return causal(q, k, v)

    forward(llm, window, attend)
    q, k = seen[1]
    assert torch.equal(pairs[1][0], k)
    attention = torch.stack([
        torch.stack([
            torch.softmax(torch.cat([k[h // 2, : i + 1] @ q[h, i] / 4, torch.full((511 - i,), -math.inf)]), 0)
            for i in range(512)
        ])
        for h in range(4)
    ]).view(2, 2, 512, 512)  # fmt: skip
    tokens, pages = samples
    squares, attention = attention.square().mean(1), attention.mean(1)
    kept = slice(4, 256 - 64)
    torch.testing.assert_close(tokens.mass, attention[:, 256:320, kept].sum(1) / 64, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(tokens.squares, squares[:, 256:320, kept].sum(1) / 64, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(tokens.signals["cumulative"], attention[:, 15:256:16, kept].sum(1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(tokens.features[..., 0], attention[:, 255, kept] * 256, rtol=1e-3, atol=1e-4)
    assert tokens.ages.tolist() == list(range(251, 63, -1)) and pages.ages.tolist() == [128, 64]
    expected = attention[:, 255].mean(0)[64:192].view(2, 64).mean(1) * 256
    torch.testing.assert_close(pages.features[0, :, 0], expected, rtol=1e-3, atol=1e-4)


def test_missed_and_recalled_by_hand():
    scores, mass = torch.tensor([[4.0, 3, 2, 1]]), torch.tensor([[1.0, 0, 5, 4]])
    assert missed(scores, mass, 0.5) == pytest.approx(0.9) and missed(mass, mass, 0.5) == pytest.approx(0.1)
    assert recalled(scores, mass, 0.5) == 0 and recalled(-scores, mass, 0.5) == 1


def test_a_query_speculated_from_the_layers_own_residual_is_its_query(directory):
    """And one from a layer before is another; the drift is what comes between, on average."""
    llm = LLM(directory / "model", dtype="float32", threads=1, max_model_len=512)
    window, heard, asked = llm.tokenizer.encode(TEXT * 3)[:256], [], {}

    def attend(layer, q, k, v):
        asked[layer] = q[:, 100:].clone()
        return causal(q, k, v)

    forward(llm, window, attend, hear=lambda residual: heard.append(residual.clone()))
    assert len(heard) == 5, "before the first layer, after each attention and MLP"
    torch.testing.assert_close(query(llm, 1, heard[2][100:], 100), asked[1])
    assert not torch.allclose(query(llm, 1, heard[1][100:], 100), asked[1], atol=1e-2)
    expected = {"after attention": (heard[2] - heard[1]).mean(0), "a layer ahead": (heard[2] - heard[0]).mean(0)}
    drift = drifts(llm, window)
    assert set(drift) == {(1, name) for name in expected}
    for name, wanted in expected.items():
        torch.testing.assert_close(drift[1, name], wanted, rtol=1e-4, atol=1e-5)


# In the engine.


def test_a_scorer_decides_what_is_compressed(directory, trained):
    """With the one that is given, not the one that ships; a twin may have another."""
    load = {"threads": 1, "dtype": "float32", "page_size": 16, "kv_budget": 0.5}
    llm = LLM(directory / "model", scorer=trained, **load)
    assert torch.equal(llm._cache._replacement._scorer, load_scorer(trained)[0].packed().detach())
    twin = llm.twin(scorer=None, profile="chat")
    wanted = load_scorer(DEFAULT)[0].packed(PROFILES["chat"]).detach()
    assert torch.equal(twin._cache._replacement._scorer, wanted)
    for one in (llm, twin, llm.twin(adapt=True)):
        (output,) = one.generate([TEXT[:900]], SamplingParams(max_tokens=40, temperature=0), use_tqdm=False)
        assert output.cache_report["moves"] > 0


def test_adapting_changes_a_sequences_own_weights_the_same_way_every_time(directory):
    llm = LLM(directory / "model", threads=1, dtype="float32", page_size=16, kv_budget=0.5, adapt=True)
    found = []
    for _ in range(2):
        llm.add_request(TEXT[:900], SamplingParams(max_tokens=40, temperature=0, cache_salt=str(len(found))))
        while llm.has_unfinished_requests():
            for request in llm._scheduler.running:
                factors = request.sequence.attention.factors
            llm.step()
        found.append(factors.tolist())
    assert found[0] == found[1] and found[0] != [1, 1, 1]
    assert AttentionRecord().factors.tolist() == [1, 1, 1]


def test_a_scorer_of_another_model_serves_with_one_warning(directory, caplog):
    with caplog.at_level(logging.WARNING, "isotherm"):
        LLM(directory / "model", scorer=DEFAULT, threads=1, kv_budget=0.5)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "30 layers" in message and "2 layers" in message
    caplog.clear()
    with caplog.at_level(logging.WARNING, "isotherm"):
        LLM(directory / "model", threads=1, kv_budget=0.5)
    assert not caplog.records


def test_a_file_that_is_no_scorer_is_refused_before_the_weights_are_read(directory, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.loading.load_weights", None)
    (tmp_path / "x").write_bytes(b"{}")
    for name in ("x", "y"):
        with pytest.raises(ConfigError, match=f"{tmp_path / name}: no scorer"):
            LLM(directory / "model", scorer=tmp_path / name)
    with pytest.raises(ConfigError, match="profile must be default, chat, document or code, got 'long'"):
        LLM(directory / "model", profile="long")


# Its evaluation.


def test_evaluation(directory, trained, capsys):
    text = str(directory / "text")
    words = ["importance", "--model", str(directory / "model"), "--text", text, "--calibrate", text, "--scorer",
             str(trained), "--context", "1024", "--blocks", "2", "--layers", "0", "--dtype", "float32",
             "--json"]  # fmt: skip
    assert evaluate.main(words) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["signal"]: row for row in result["rows"]}
    assert {"w64", "w256", "age-normalised", "cumulative", "recency", "key norm", "relevance", "attention", "random",
            "hand-weighted sum", "trained", "trained, split", "oracle", "oracle of squares",
            "nothing"} == set(rows)  # fmt: skip
    for name, row in rows.items():
        assert row["kl"] >= 0 and row["se"] >= 0 and row["text"] == text
        if row["recall"] is not None:
            assert rows["oracle"]["missed_mass"] <= row["missed_mass"] <= 1 and 0 <= row["recall"] <= 1, name
    assert rows["oracle"]["recall"] == 1 and rows["oracle"]["avoidable"] == 0
    assert rows["trained"]["kl_above_trained"] == 0 < rows["nothing"]["kl"]
    assert [row["profile"] for row in result["profiles"]] == list(PROFILES)
    ahead = {row["set"]: row for row in result["read_ahead"]}
    for name, row in ahead.items():
        assert all(0 <= row[column] <= 1 for column in ("covered", "exact", "new", "early", "late")), name
        assert row["text"] == text and row["late"] <= 1 - row["covered"] + 1e-9
    last = ahead["the last step's"]
    assert last["early"] == 0 and last["covered"] + last["late"] == pytest.approx(1)
    assert ahead["speculated after attention"]["covered"] > ahead["highest score"]["covered"] > 0
    assert rows["oracle of squares"]["missed_squares"] <= rows["oracle"]["missed_squares"]
    parts = torch.tensor(list(result["split"].values()))
    assert parts.shape == (2, 2) and float(parts.mean()) == pytest.approx(0.05) and parts.min() > 0
    assert evaluate.main([*words, "--no-kl"]) == 0
    quick = {row["signal"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert quick["trained"]["missed_mass"] == rows["trained"]["missed_mass"] and "kl" not in quick["trained"]


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (["--windows", "9"], RequestError, "9 windows were asked for, it has [1-8]$"),
        (["--signals", "luck"], ConfigError, "--signals: no luck; there are w64, "),
    ],
)
def test_evaluation_says_what_there_is_not(directory, wrong, error, words):
    text = str(directory / "text")
    with pytest.raises(error, match=words):
        evaluate.main(["importance", "--model", str(directory / "model"), "--text", text, "--calibrate", text,
                       "--context", "1024", "--blocks", "2", "--dtype", "float32", *wrong])  # fmt: skip


def test_windows_add_blocks_and_signals_leave_out(directory, trained, capsys):
    text = str(directory / "text")
    words = ["importance", "--model", str(directory / "model"), "--text", text, "--calibrate", text, "--scorer",
             str(trained), "--context", "1024", "--blocks", "2", "--layers", "0", "--dtype", "float32", "--json",
             "--signals", "attention"]  # fmt: skip
    found = []
    for count in ("1", "2"):
        assert evaluate.main([*words, "--windows", count]) == 0
        found.append({row["signal"]: row for row in json.loads(capsys.readouterr().out)["rows"]})
    assert set(found[0]) == set(found[1]) == {"attention", "trained", "trained, split", "nothing"}
    assert found[0]["nothing"]["kl"] != found[1]["nothing"]["kl"]


def test_hand_weights_are_those_of_a_new_scorer():
    assert Scorer().packed()[:3].tolist() == pytest.approx([0.6, 0.3, 0.1])
