"""tools.evaluate: its arithmetic against small independent computations, and every subcommand on a tiny model."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle.checkpoint import TEXT, make_checkpoint

from engine import LLM, ConfigError, RequestError
from tools import evaluate, evaluate_knobs, evaluate_needle, evaluate_quality, evaluate_texts

ROOT = Path(__file__).parent.parent
STORIES = ROOT.parent / "shared" / "data" / "stories260k-hf"
QUALITY_KEYS = {
    "setting", "kv_budget", "scored_tokens", "ppl_full", "ppl", "dppl_percent", "dppl_se_percent", "kl_nats", "kl_se",
    "noise_kl_nats", "top1_agreement", "resident_ratio", "total_ratio", "cold_bytes", "read_bytes_per_token",
    "cold_hit_rate", "overlay_hit_rate", "read_ms_per_token", "moves", "chunk",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("evaluate") / "model"
    make_checkpoint(directory, seed=1, max_position_embeddings=1024)
    return str(directory)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "stove.txt"
    file.write_text(TEXT * 3)
    return str(file)


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, dtype="float32", threads=1, max_num_batched_tokens=64)


def report(capsys, *args):
    """The JSON object that a subcommand prints."""
    assert evaluate.main([*map(str, args), "--dtype", "float32", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def small(model, text, context=256, score_from=64, tokens=190):
    return ["--model", model, "--text", text, "--context", context, "--score-from", score_from, "--tokens", tokens,
            "--chunk", 64]  # fmt: skip


# windows


class Bytes:
    """A tokenizer: an id a byte, BOS first where there is one."""

    def __init__(self, bos_id=None):
        self.bos_id = bos_id

    def encode(self, text):
        return ([] if self.bos_id is None else [self.bos_id]) + list(text.encode())


def test_windows_are_taken_in_turn_and_have_the_next_token(tmp_path):
    for name, letters in (("a", "abcdefghijklm"), ("b", "ABCDE")):
        (tmp_path / name).write_text(letters)
    names = [str(tmp_path / name) for name in "ab"]
    taken = evaluate_texts.windows(names, Bytes(), context=4, longest=5, score_from=1, tokens=100)
    assert [bytes(window).decode() for window in taken] == ["abcde", "ABCDE", "efghi", "ijklm"]
    assert evaluate_texts.scored(taken, 1) == 4 * 3
    assert len(evaluate_texts.windows(names, Bytes(), 4, 5, 1, tokens=4)) == 2  # whole windows
    assert len(evaluate_texts.windows(names, Bytes(), 4, 5, 1, tokens=3)) == 1
    # Where the model's context ends, the last token of a window has no target.
    short = evaluate_texts.windows(names, Bytes(), context=4, longest=4, score_from=1, tokens=100)
    assert [bytes(window).decode() for window in short] == ["abcd", "ABCD", "efgh", "ijkl"]


def test_every_window_begins_with_the_bos(tmp_path):
    (tmp_path / "a").write_text("abcdefgh")
    taken = evaluate_texts.windows([str(tmp_path / "a")], Bytes(bos_id=1), context=4, longest=5, score_from=0, tokens=9)
    assert taken == [[1, *b"abcd"], [1, *b"defg"]]


@pytest.mark.parametrize("score_from", [-1, 3, 9])
def test_score_from_leaves_something_to_score(score_from):
    with pytest.raises(RequestError, match=r"--score-from .* got"):
        evaluate_texts.windows([], Bytes(), 4, 5, score_from, 10)


def test_stdlib_is_python_and_long_enough_for_windows():
    source = evaluate_texts.read_text("stdlib")
    assert "class ArgumentParser" in source and "class TarFile" in source and len(source) > 400_000


# the arithmetic


def test_standard_error_of_blocks():
    rng = np.random.default_rng(0)
    windows = [rng.normal(size=200), rng.normal(size=130)]
    # The naive twin, in plain Python: 3 + 2 whole blocks.
    means = [sum(w[i : i + 64]) / 64 for w in windows for i in range(0, len(w) - 63, 64)]
    centre = sum(means) / 5
    expected = math.sqrt(sum((mean - centre) ** 2 for mean in means) / 4 / 5)
    assert evaluate_quality.block_error(windows) == pytest.approx(expected, rel=1e-12)
    assert evaluate_quality.mean(windows) == pytest.approx((windows[0].sum() + windows[1].sum()) / 330)
    assert evaluate_quality.block_error([np.zeros(100)]) is None  # one block has no spread


def test_quality_is_what_the_logits_say(llm, text):
    """KL, perplexity and agreement from whole windows of logits, without lockstep."""
    ids = llm.tokenizer.encode(Path(text).read_text())
    windows, score_from = [ids[:200], ids[200:330]], 50
    changes = {"kv_budget": 0.3}
    comparison = evaluate_quality.compare(llm, [changes], windows, score_from)
    row = evaluate_quality.row(comparison, 0, changes)
    full, tiered, divergence, same = [], [], [], []
    twin = llm.twin(**changes)
    for window in windows:
        a, b = (np.concatenate([x.double().numpy() for x in one.logits(window)]) for one in (llm, twin))
        a, b = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (a, b))
        for i in range(score_from, len(window) - 1):
            full.append(-a[i, window[i + 1]])
            tiered.append(-b[i, window[i + 1]])
            divergence.append((np.exp(a[i]) * (a[i] - b[i])).sum())
            same.append(a[i].argmax() == b[i].argmax())
    assert row["scored_tokens"] == len(full) == 149 + 79
    assert row["ppl_full"] == pytest.approx(math.exp(np.mean(full)), rel=1e-4)
    assert row["ppl"] == pytest.approx(math.exp(np.mean(tiered)), rel=1e-4)
    assert row["dppl_percent"] == pytest.approx(100 * (row["ppl"] / row["ppl_full"] - 1), rel=1e-6)
    assert row["kl_nats"] == pytest.approx(np.mean(divergence), rel=1e-3) and row["kl_nats"] > 1e-4
    assert row["top1_agreement"] == np.mean(same)
    assert row["moves"] == twin._cache.stats()["kv_moves"] > 0
    assert 0.1 < row["resident_ratio"] <= 1 and row["total_ratio"] == row["resident_ratio"]


def test_an_exact_cache_costs_nothing(llm, text):
    """One that may compress and need not: the difference is 0, and that of rounding next to it in float32."""
    ids = llm.tokenizer.encode(Path(text).read_text())
    changes = {"hot_layer_size": 1 << 20}
    comparison = evaluate_quality.compare(llm, [changes], [ids[:300]], 64)
    row = evaluate_quality.row(comparison, 0, changes)
    assert row["kl_nats"] == row["dppl_percent"] == row["moves"] == 0 and row["top1_agreement"] == 1
    assert abs(row["noise_kl_nats"]) < 1e-6
    assert 1 <= row["resident_ratio"] < 2  # whole pages
    assert row["read_bytes_per_token"] == row["cold_hit_rate"] == row["cold_bytes"] == 0


def test_copies_below_are_counted_apart(llm, text):
    """With everything recalled nothing is lost; the copies are in the total, and what is read of them is counted."""
    ids = llm.tokenizer.encode(Path(text).read_text())
    changes = {"kv_budget": 0.2, "recall": 1.0}
    row = evaluate_quality.row(evaluate_quality.compare(llm, [changes], [ids[:300]], 64), 0, changes)
    assert row["moves"] > 0 and abs(row["kl_nats"]) < 1e-5 and row["top1_agreement"] == 1
    assert row["total_ratio"] > row["resident_ratio"] + 0.5 and row["cold_bytes"] > 0
    assert row["read_bytes_per_token"] > 0 and 0.5 < row["cold_hit_rate"] < 1


def test_chunks_of_one_token(llm, text):
    ids = llm.tokenizer.encode(Path(text).read_text())
    one = llm.twin(max_num_batched_tokens=1)
    comparison = evaluate_quality.compare(one, [{"kv_budget": 0.5}], [ids[:100]], 64)
    assert len(comparison.full[0]) == len(comparison.noise.kl[0]) == 35


def test_logits_that_are_not_numbers(tmp_path, llm, text, capsys):
    with pytest.raises(FloatingPointError, match="from token 64 of a window"):
        evaluate_quality._log_probabilities(next(llm.logits([1, 2])) * math.nan, 64, "kv_budget 0.5")
    make_checkpoint(tmp_path, seed=1, dtype="float16", rms_norm_eps=1e-5)
    _poison(tmp_path / "model.safetensors")
    assert evaluate.main(["quality", *map(str, small(tmp_path, text)), "--kv-budget", "0.5"]) == 1
    assert "error: the full cache: logits that are not finite numbers" in capsys.readouterr().err


def _poison(file):
    from safetensors.numpy import load_file, save_file

    weights = load_file(file)
    weights["model.norm.weight"][0] = np.nan
    save_file(weights, file, {"format": "pt"})


# the subcommands


def test_quality_of_one_budget_is_flat(capsys, model, text):
    result = report(capsys, "quality", *small(model, text), "--kv-budget", 0.4)
    assert result.keys() >= QUALITY_KEYS and "rows" not in result
    assert result["kv_budget"] == 0.4 and result["chunk"] == 64 and result["scored_tokens"] == 192
    assert result["commit"] and result["machine"] and result["command"].startswith("python -m tools.evaluate quality")


def test_quality_of_several_budgets_and_a_plot(capsys, model, text, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    plot = tmp_path / "curve.png"
    args = [*small(model, text), "--kv-budget", "0.3,0.6", "--preset", "proposal", "--plot", plot]
    rows = report(capsys, "quality", *args)["rows"]
    assert [row["setting"] for row in rows] == ["kv_budget 0.3", "kv_budget 0.6", "preset proposal"]
    assert all(row.keys() == QUALITY_KEYS for row in rows)
    assert rows[0]["kl_nats"] > rows[1]["kl_nats"] > 0 and rows[0]["resident_ratio"] < rows[1]["resident_ratio"] <= 0.6
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")


def test_quality_as_a_table(capsys, model, text):
    assert evaluate.main(["quality", *map(str, small(model, text)), "--kv-budget", "0.3,0.6"]) == 0
    out = capsys.readouterr().out
    assert "| setting | resident_ratio | kl_nats |" in out and "| kv_budget 0.6 |" in out


def test_quality_of_a_real_model(capsys, text):
    if not STORIES.is_dir():
        pytest.skip("needs shared/data/stories260k-hf")
    # Its context is 512: a window ends there, and the last token has no target.
    args = small(STORIES, text, context=512, score_from=128, tokens=300)
    result = report(capsys, "quality", *args, "--kv-budget", 0.5)
    assert result["scored_tokens"] == 383 and 1 < result["ppl_full"] < 1000 and 0 < result["kl_nats"] < 1


@pytest.mark.parametrize(
    "wrong, error, words",
    [
        (["--recall", "1.05"], ConfigError, "recall must be a number from 0 to 1, got 1.05"),
        (["--cold-format", "int4"], ConfigError, "cold_format must be auto, exact, int8 or none, got 'int4'"),
        (["--preset", "best"], ConfigError, "preset must be proposal, got 'best'"),
        (["--importance", "luck"], ConfigError, "importance must be score, random or none, got 'luck'"),
        (["--context", "2000"], ConfigError, "--context 2000 is more than the model's context of 1024"),
        (["--score-from", "256"], RequestError, "got 256 of 256"),
        (["--plot", "/nowhere/x.png"], ConfigError, "no such directory"),
        (["--model", "/nowhere"], Exception, "nowhere"),
        (["--text", "/nowhere/a"], RequestError, "/nowhere/a: cannot be read: No such file"),
    ],
)
def test_what_is_wrong_is_said_before_the_measurement(model, text, wrong, error, words):
    if "--plot" in wrong:
        pytest.importorskip("matplotlib", reason="needs the extra plot")
    args = [*map(str, small(model, text)), "--kv-budget", "0.5", *wrong]
    with pytest.raises(error, match=words.replace("(", r"\(")):
        evaluate.main(["quality", *args])


def test_a_text_without_a_window_or_that_is_none(model, tmp_path):
    (tmp_path / "short").write_text("The cat sat.")
    with pytest.raises(RequestError, match=r"short: one window takes 255 tokens, the text has \d+;"):
        evaluate.main(["quality", *map(str, small(model, tmp_path / "short")), "--kv-budget", "0.5"])
    (tmp_path / "bad").write_bytes(b"abc\xff")
    with pytest.raises(RequestError, match="not UTF-8 text: byte 3 is 0xff"):
        evaluate.main(["quality", *map(str, small(model, tmp_path / "bad")), "--kv-budget", "0.5"])


@pytest.mark.parametrize("args, extra", [(["quality", "--text", "-", "--plot", "x.png"], "plot"), (["rouge"], "eval")])
def test_an_extra_that_is_missing_is_named(monkeypatch, args, extra):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pip install 'isotherm\[{extra}\]'"):
        evaluate.main([*args, "--model", "/nowhere", "--kv-budget", "0.5"])


def test_nothing_to_measure(model, text):
    with pytest.raises(ConfigError, match="give --kv-budget"):
        evaluate.main(["quality", *map(str, small(model, text))])


def test_fewer_tokens_than_asked_for_is_said(capsys, model, text):
    assert evaluate.main(["quality", *map(str, small(model, text, tokens=10**6)), "--kv-budget", "0.5"]) == 0
    assert "tokens to score, 1000000 were asked for" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["sentence", "lines", "both"])
def test_needle(capsys, model, text, kind):
    args = ["--model", model, "--text", text, "--context", "900,1000", "--depth", "0.2,0.8", "--kv-budget", "0.3,0.6"]
    rows = report(capsys, "needle", *args, "--kind", kind, "--chunk", 64)["rows"]
    kinds = ["sentence", "lines"] if kind == "both" else [kind]
    expected = [(k, context, budget) for k in kinds for context in (900, 1000) for budget in (0.3, 0.6)]
    assert [(row["kind"], row["context"], row["kv_budget"]) for row in rows] == expected
    for row in rows:
        assert row["questions"] == len(row["answers"]) == (2 if row["kind"] == "sentence" else 20)
        assert all(0 <= row[key] <= 1 for key in ("full_accuracy", "tiered_accuracy", "agreement"))


def test_needle_finds_what_is_there(llm, monkeypatch):
    """Lines put at their depths and asked again: a model that copies answers all of them."""
    prompts = []

    class Copies:
        tokenizer = llm.tokenizer

        def twin(self, **changes):
            return self

        def logits(self, prompt):
            prompts.append(prompt)
            ones = np.eye(llm.vocab_size, dtype=np.float32)[[*prompt[1:], 0]]
            yield torch.from_numpy(ones)

    (row,) = evaluate_needle.rows(Copies(), [{"kv_budget": 0.5}], TEXT * 3, [1000], [0.25, 0.75], "lines", 0)
    assert row["full_accuracy"] == row["tiered_accuracy"] == row["agreement"] == 1 and row["questions"] == 20
    assert len(prompts[0]) == 1000 and prompts[0] == prompts[1]
    words = llm.tokenizer.decode(prompts[0])
    first = {0.25: [], 0.75: []}
    for answer in row["answers"]:
        places = [i for i in range(len(words)) if words.startswith(answer["wanted"], i)]
        assert len(places) == 2, "a line is there, and asked again"
        first[answer["depth"]].append(places[0])
    assert max(first[0.25]) < min(first[0.75])


def test_needle_needs_room_and_text(model, text, tmp_path):
    args = ["needle", "--model", model, "--dtype", "float32", "--depth", "0.5"]
    with pytest.raises(RequestError, match=r"--context 20: \d+ tokens of facts"):
        evaluate.main([*args, "--text", text, "--context", "20"])
    (tmp_path / "short").write_text("The cat sat.")
    with pytest.raises(RequestError, match="which has"):
        evaluate.main([*args, "--text", str(tmp_path / "short"), "--context", "500"])


@pytest.fixture
def chat_model(tmp_path):
    make_checkpoint(tmp_path / "chat", seed=1, max_position_embeddings=1024)
    settings = tmp_path / "chat" / "tokenizer_config.json"
    template = "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
    return tmp_path / "chat"


def documents(directory, count):
    lines = [
        {"id": f"d{i}", "transcript": TEXT * 2, "queries": [{"query": "Who was warm?", "answer": "The cat was warm."}]}
        for i in range(count)
    ]
    (directory / "documents.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return directory


def test_rouge(capsys, chat_model, tmp_path):
    """The texts are in the JSON, and not in the table."""
    pytest.importorskip("rouge_score", reason="needs the extra eval")
    pytest.importorskip("jinja2", reason="needs the extra chat")
    args = ["--model", chat_model, "--data", documents(tmp_path, 3), "--documents", 2, "--max-tokens", 8]
    result = report(capsys, "rouge", *args, "--context", 500, "--kv-budget", 0.5, "--chunk", 64)
    assert len(result["rows"]) == 2 and result["settings"] == {"kv_budget": 0.5}
    recalled = report(capsys, "rouge", *args, "--context", 500, "--kv-budget", 0.5, "--chunk", 64, "--recall", 0.1)
    assert all(row["cold_reads"] > 0 for row in recalled["rows"])
    for row in result["rows"]:
        assert 400 < row["prompt_tokens"] <= 492 and 0 < row["document_kept"] < 1
        assert row["rouge_full_full"] == 1  # in float32
        assert row["cold_reads"] == 0 and 0 < row["resident_ratio"] <= 0.65  # a page may come on top of a short text
        assert all(0 <= row[key] <= 1 for key in row if key.startswith("rouge_"))
        assert 0 <= row["same_tokens"] <= row["tokens"] <= 8 and row["full_text"]
    assert (
        evaluate.main(["rouge", *map(str, args), "--context", "500", "--kv-budget", "0.5", "--dtype", "float32"]) == 0
    )
    out = capsys.readouterr().out
    assert "| document | prompt_tokens |" in out and "full_text" not in out


@pytest.mark.parametrize(
    "content, words", [(None, "cannot be read"), ("{}", r"d\.jsonl:1: wanted"), ("", "no documents"), ("[", "wanted")]
)
def test_documents_that_are_none(tmp_path, content, words):
    from tools.evaluate_rouge import read_documents

    file = tmp_path / "d.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(RequestError, match=words):
        read_documents(str(file), 5)


def test_knobs(capsys, model, text):
    rows = report(capsys, "knobs", *small(model, text, context=384), "--kv-budget", 0.5)["rows"]
    assert [row["knob"] for row in rows] == list(evaluate_knobs.VALUES)
    for row in rows:
        for key in ("moves_per_step", "hot_bytes", "warm_bytes", "kl_nats", "resident_ratio"):
            assert row[key].keys() == {"low", "default", "high"}
        assert row["effect"] == "no effect" or row["effect"].startswith("up: ")


def test_effect_in_words():
    def tally(moves, hot, kl):
        return evaluate_quality.Tally(moves=moves, steps=10, hot_bytes=[hot], warm_bytes=[100], kl=[np.array(kl)])

    low = tally(5, 1000, [0.1] * 128)
    assert evaluate_knobs.effect(low, tally(5, 1001, [0.1] * 128)) == "no effect"
    words = evaluate_knobs.effect(low, tally(8, 500, [0.2] * 64 + [0.3] * 64))
    assert words == "up: more moves, fewer exact bytes, higher KL"


def test_importance_of_the_engines_pages(capsys, model, text):
    result = report(capsys, "importance", *small(model, text), "--kv-budget", 0.3)
    rows = {row["setting"].partition(", ")[2]: row for row in result["rows"]}
    assert list(rows) == [
        *(f"importance {by}" for by in ("score", "random", "none")), "adapt True",
        *(f"profile {name}" for name in ("chat", "document", "code")),
    ]  # fmt: skip
    first = rows["importance score"]
    for row in rows.values():
        assert row["kl_above_score"] == pytest.approx(row["kl_nats"] - first["kl_nats"], abs=1e-9)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (["--context", 256], ConfigError, "need --context in whole 256 tokens, 1280 at least"),
        (["--kv-budget", 0.3, "--scorer", "/nowhere", "--context", 256, "--score-from", 64], ConfigError, "no scorer"),
    ],
)
def test_what_importance_refuses(model, text, wrong, error, words):
    with pytest.raises(error, match=words):
        evaluate.main(["importance", "--model", model, "--text", text, "--dtype", "float32", *map(str, wrong)])


def test_the_command_ends_errors_with_its_exit_codes(model, text):
    def run(*args):
        command = [sys.executable, "-m", "tools.evaluate", *map(str, args)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    done = run("quality", *small(model, text), "--kv-budget", 0.5, "--recall", 1.1)
    assert done.returncode == 3 and done.stderr.startswith("error: recall must be a number from 0 to 1"), done.stderr
    done = run("quality", *small(model, text), "--kv-budget", 1.5)
    assert done.returncode == 2 and "need fractions above 0, up to 1, got 1.5" in done.stderr
    done = run("--help")
    assert done.returncode == 0 and all(name in done.stdout for name in ("quality", "needle", "rouge", "knobs"))
