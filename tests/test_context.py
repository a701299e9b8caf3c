"""Contexts beyond the trained length: `--rope-scaling auto`, and tools.evaluate context."""

import json
import logging

import numpy as np
import pytest
from oracle.checkpoint import make_checkpoint

from engine import LLM, ConfigError
from tools import evaluate, evaluate_context

IDS = [3 + i % 300 for i in range(1000)]
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip


def load(path, **settings):
    return LLM(path, dtype="float32", threads=1, skip_tokenizer_init=True, **settings)


@pytest.mark.parametrize(
    ("own", "length", "wanted"),
    [
        (None, 1000, {"rope_type": "yarn", "factor": 1000 / 512}),
        (LINEAR, 1500, {"rope_type": "linear", "factor": 1500 / 512}),  # its own kind goes on
        (LLAMA3, 1024, {**LLAMA3, "factor": 16.0}),
    ],
    ids=["none", "linear", "llama3"],
)
def test_auto_is_the_scaling_that_the_length_takes(tmp_path, caplog, own, length, wanted):
    make_checkpoint(tmp_path / "own", rope_scaling=own)
    # What the checkpoint would say if it had been made for that length.
    context = 1024 if wanted["rope_type"] == "llama3" else 512
    make_checkpoint(tmp_path / "wanted", rope_scaling=wanted, max_position_embeddings=context)
    with caplog.at_level(logging.WARNING, logger="isotherm"):
        llm = load(tmp_path / "own", max_model_len=length, rope_scaling="auto")
    assert f"{wanted['rope_type']}, factor {wanted['factor']:.4g}" in caplog.text
    assert llm.max_model_len == length
    np.testing.assert_array_equal(llm.score([IDS])[0], load(tmp_path / "wanted").score([IDS])[0])


@pytest.mark.parametrize("own", [None, LINEAR], ids=["none", "linear"])
@pytest.mark.parametrize("length", [None, 100, 512])
def test_auto_leaves_the_context_of_the_model_alone(tmp_path, caplog, own, length):
    make_checkpoint(tmp_path, rope_scaling=own)
    llm = load(tmp_path, max_model_len=length, rope_scaling="auto")
    assert llm._model.config == load(tmp_path)._model.config and "auto" not in caplog.text
    assert llm.max_model_len == (length or (1024 if own else 512))


def test_every_length_gets_a_factor_that_reaches_it(tmp_path):
    make_checkpoint(tmp_path, max_position_embeddings=7)
    for length in range(8, 120):
        assert load(tmp_path, max_model_len=length, rope_scaling="auto").max_model_len == length


def test_a_longer_context_without_a_scaling_names_the_flag(tmp_path):
    make_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"max_model_len 513 .* context of 512 .*--rope-scaling auto"):
        load(tmp_path, max_model_len=513)
    with pytest.raises(ConfigError, match=r"rope_scaling must be auto, or .*, got 'automatic'"):
        load(tmp_path, max_model_len=513, rope_scaling="automatic")


def test_evaluate_context_compares_the_same_tokens(tmp_path, capsys):
    """A model that is read in the trained windows only: the losses inside are those of `score`, window by window."""
    make_checkpoint(tmp_path, max_position_embeddings=64)
    command = ["context", "--model", str(tmp_path), "--text", "own", "--context", "160", "--dtype", "float32", "--json"]
    assert evaluate.main([*command, "--rope-scaling", "auto", json.dumps({**LINEAR, "factor": 2.5})]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["rope_scaling"] for row in report["rows"]] == ["yarn 2.5", "linear 2.5"]
    base = LLM(tmp_path, dtype="float32", threads=1)
    ids = evaluate_context.token_ids(base, "own", 160)
    assert len(ids) == 160
    # The last quarter, tokens 120 to 159: in windows that begin half of the trained length, 32 tokens, before.
    losses = [-base.score([ids[88:152]])[0][31:], -base.score([ids[120:160]])[0][31:]]
    inside = np.concatenate(losses).astype(np.float64).mean()
    for row in report["rows"]:
        assert row["scored_tokens"] == 40 == sum(map(len, losses))
        assert row["ppl_inside"] == pytest.approx(np.exp(inside), rel=1e-5)
        assert row["ratio"] == pytest.approx(row["ppl"] / row["ppl_inside"], rel=1e-9)
    llm = LLM(tmp_path, dtype="float32", threads=1, max_model_len=160, rope_scaling={**LINEAR, "factor": 2.5})
    expected = float(np.exp(-llm.score([ids])[0][119:].astype(np.float64).mean()))
    assert report["rows"][1]["ppl"] == pytest.approx(expected, rel=1e-5)


def test_evaluate_context_refuses_what_is_not_beyond(tmp_path):
    make_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"--context 512 is not beyond the model's own of 512"):
        evaluate.main(["context", "--model", str(tmp_path), "--text", "own", "--context", "512"])
