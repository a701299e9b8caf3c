"""tools.report on a tiny model: the file stands alone and cannot be broken, and what it says is what the engine says.

tests/test_evaluate.py has what `tools.evaluate` does; `wellformed`, which is of the same kind as the report, is here.
"""

import contextlib
import gzip
import html.parser
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from oracle.checkpoint import TEXT, make_checkpoint

from engine import LLM, ConfigError, ModelFormatError, RequestError, SamplingParams
from tools import evaluate, evaluate_wellformed, report, report_classes
from tools.report_record import record

ROOT = Path(__file__).parent.parent
STORIES = ROOT.parent / "shared" / "data" / "stories260k-hf"
HUMANEVAL = ROOT.parent / "shared" / "data" / "code-humaneval"
HOSTILE = (
    "</p></script><script>document.title = 1</script><img src=x onerror=alert(1)>\r\n"
    "& &amp; &#60; \"double\" 'single' <!-- -- > ]]> \u202e right to left \u202c \u2028 \x0c\x1b[31m \x85 \t\n"
    "\U0001f600 e\u0301 \u05e9\u05dc\u05d5\u05dd \u0000 \uffff ${7*7} {{7*7}} `" + "\\u003c \\"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report") / "model"
    make_checkpoint(directory, seed=1, max_position_embeddings=1024)
    return str(directory)


class Page(html.parser.HTMLParser):
    """A report as a browser reads it: tags with their attributes, and the text of the tokens."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.tokens, self.open = [], [], []
        self.feed(Path(path).read_bytes().decode())
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "path", "rect"):
            self.open.append(tag)
        if tag == "i" and "title" in dict(attrs):
            self.tokens.append("")
            self.in_token = True

    def handle_endtag(self, tag):
        if tag not in ("path", "rect"):
            assert self.open.pop() == tag
        self.in_token = False

    def handle_data(self, data):
        if self.open and self.open[-1] == "i" and self.in_token:
            self.tokens[-1] += data


def shown(text):
    """What HTML can have of a text: no NUL."""
    return text.replace("\0", "\ufffd")


def make(model, prompt, tmp_path, *args, name="prompt.txt"):
    """The page and the JSON object of one run."""
    (tmp_path / name).write_bytes(prompt.encode())
    out = tmp_path / "report.html"
    command = ["--model", model, "--prompt-file", tmp_path / name, "--out", out, "--dtype", "float32", "--json", *args]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert report.main([*map(str, command)]) == 0
    return Page(out), json.loads(printed.getvalue())


@pytest.fixture(scope="module")
def hostile(model, tmp_path_factory):
    """A prompt that would break out if it could, with copies below the cache."""
    prompt = HOSTILE + TEXT[:700] + HOSTILE
    path = tmp_path_factory.mktemp("hostile")
    page, data = make(model, prompt, path, "--max-tokens", 20, "--recall", 0.05, "--chunk", 64)
    return prompt, page, data, path / "report.html"


# the file


def test_the_file_needs_nothing_else(hostile):
    _, page, _, file = hostile
    around = re.sub(r"<i class[^>]*>.*?</i>", "", file.read_text(), flags=re.DOTALL)  # without the prompt's own words
    for word in ("http://", "https://", "//", "@import", "url(", "src=", "href=", "<link", "<iframe", "<img"):
        found = around.replace("\n// The layer selector", "")
        assert word not in found, word
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    assert not any("style" in attrs or any(name.startswith("on") for name in attrs) for _, attrs in page.tags)


def test_a_hostile_prompt_stays_text(hostile):
    prompt, page, _, _ = hostile
    assert page.open == []  # every element is closed where it should be
    assert [attrs.get("type") for tag, attrs in page.tags if tag == "script"] == ["application/json", None]
    assert not {tag for tag, _ in page.tags} & {"img", "iframe", "object", "a", "form", "base"}
    assert "".join(page.tokens).startswith(shown(prompt))


def test_tokens_are_the_text_of_prompt_and_answer(model, hostile):
    prompt, page, data, _ = hostile
    assert page.tokens == [shown(text) for text in data["tokens"]["text"]]
    llm = LLM(model, dtype="float32", threads=1)
    assert data["tokens"]["ids"][: data["prompt_tokens"]] == llm.tokenizer.encode(prompt)
    assert "".join(data["tokens"]["text"]) == llm.tokenizer.decode(data["tokens"]["ids"])


def test_every_layer_has_a_shade_for_each_token(hostile):
    _, page, data, file = hostile
    levels = json.loads(re.search(r'id="levels">(.*?)</script>', file.read_text())[1])
    options = [attrs for tag, attrs in page.tags if tag == "option"]
    assert len(levels) == len(options) == 2 + len(data["lift_by_layer"])  # the mean, and the score
    lifts = np.array(data["lift_by_layer"])
    for digits, values in zip([levels[0], *levels[2:]], [lifts.mean(0), *lifts], strict=True):
        assert len(digits) == len(page.tokens)
        expected = np.minimum(9 * values / (1 + values), 8)  # JSON's lifts are rounded, so shades may be one off
        assert np.abs(np.array(list(map(int, digits))) + 0.5 - expected).max() < 0.52 + 0.02
    marks = [attrs["class"].split()[0] for tag, attrs in page.tags if tag == "i" and "title" in attrs]
    assert "".join(mark[1] for mark in marks) == levels[0]


# what it says


KEYS = {"settings", "prompt_tokens", "completion_tokens", "finish_reason", "cache", "pages", "mean_score", "steps",
        "tokens", "lift_by_layer", "classes", "code"}  # fmt: skip


def engine_report(model, prompt, max_tokens, **settings):
    """What the engine itself says of the same run, when the last token is there and the next is not."""
    llm = LLM(model, dtype="float32", threads=1, **settings)
    outputs = llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens + 1, ignore_eos=True))
    last = [output for output, _ in zip(outputs, range(max_tokens), strict=False)][-1]
    return last.token_ids, json.loads(json.dumps(last.cache_report))


def test_tiers_are_the_engines(model, hostile):
    prompt, page, data, _ = hostile
    assert data.keys() == KEYS
    settings = {"kv_budget": 0.31, "recall": 0.05, "max_num_batched_tokens": 64}
    ids, cache = engine_report(model, prompt, 20, **settings)
    assert data["tokens"]["ids"][data["prompt_tokens"] :] == ids[:-1] and data["completion_tokens"] == 20
    assert data["cache"] == cache  # the recorder changes nothing
    bits = [kept["bits"] for kept in data["pages"]]
    assert {str(kind): bits.count(kind) for kind in set(bits)} == cache["pages_by_bits"] == data["steps"][-1]["pages"]
    tokens = np.array(data["tokens"]["bits"])
    assert (tokens == 32).sum() == cache["hot_tokens"] and (tokens < 32).sum() == cache["warm_tokens"] > 0
    sections = [attrs["class"] for tag, attrs in page.tags if tag == "section" and "class" in attrs]
    assert sections == [f"page b{min(kind, 16)}" for kind in bits]
    # All but the first, and the newest, which no query has seen from a page away.
    assert sum(row["tokens"] for row in data["classes"]) == len(tokens) - 1 - 64
    assert [lift is None for lift in data["tokens"]["far_lift"]] == [False] * (len(tokens) - 64) + [True] * 64
    rates = [step["cold_hit_rate"] for step in data["steps"] if step["cold_hit_rate"] is not None]
    assert sum(step["moves"] for step in data["steps"]) == cache["moves"] and 0 < max(rates) < 1
    assert data["steps"][-1]["resident_bytes"] == cache["resident_bytes"]
    assert sum(data["tokens"]["recalled"]) > 0


def test_lifts_are_the_attention_of_a_dense_model(model):
    """Exact pages: lifts of an answer's queries from all K and Q at once, without pages or plans."""
    llm = LLM(model, dtype="float32", threads=1, max_num_batched_tokens=1)
    asked = []  # (layer, q) of every step
    stored = llm._runner.ops.rope_store

    class Ops:
        def __getattr__(self, name):
            return getattr(ops, name)

        def rope_store(self, q, k, v, *rest):
            stored(q, k, v, *rest)
            asked.append(q.clone())

    ops, llm._runner.ops = llm._runner.ops, Ops()
    ids = llm.tokenizer.encode(TEXT[:150])
    keys = {}
    cache, free = llm._cache, llm._cache.free

    def keep_keys(sequence):
        frames = cache._frames.exact_frames(np.array(sequence.pages)) if len(sequence.pages) else []
        for i, layer in enumerate(cache.layers):
            keys[i] = layer.k[:, frames].flatten(1, 2)[:, : len(ids) + 4].clone()
        free(sequence)

    cache.free = keep_keys
    found = record(llm, ids, 5, frozenset())
    layers, length = len(cache.layers), len(found.ids)
    assert length == len(ids) + 4 and len(asked) == layers * length
    far = np.zeros(length)
    for layer in range(layers):
        lifts, k = np.zeros(length), keys[layer].double()
        for position in range(length):
            q = asked[position * layers + layer][0].double().view(len(k), -1, k.shape[2])
            weights = (q @ k[:, : position + 1].mT * k.shape[2] ** -0.5).softmax(-1)
            mine = weights.mean((0, 1)).numpy() * (position + 1)
            lifts[: position + 1] += mine
            far[: max(position - 63, 0)] += mine[: max(position - 63, 0)] / layers
        np.testing.assert_allclose(found.lifts[layer], lifts / np.arange(length, 0, -1), rtol=1e-4)
    np.testing.assert_allclose(found.far_lifts[:-64], far[:-64] / np.arange(length - 64, 0, -1), rtol=1e-4)
    assert np.isnan(found.far_lifts[-64:]).all()


@pytest.mark.skipif(not STORIES.is_dir(), reason="no ../shared/data/stories260k-hf")
def test_a_real_model(tmp_path):
    prompt = "Once upon a time, there was a little girl named Lily. She loved to play with her red ball.\n" * 6
    page, data = make(str(STORIES), prompt, tmp_path, "--max-tokens", 8, "--kv-budget", 0.25)
    assert "".join(page.tokens).startswith(prompt.removesuffix("\n"))
    _, cache = engine_report(str(STORIES), prompt.removesuffix("\n"), 8, kv_budget=0.25, max_num_batched_tokens=128)
    assert data["cache"] == cache
    kinds = {row["class"]: row["tokens"] for row in data["classes"]}
    assert kinds["newlines"] >= 4 and kinds["punctuation"] >= 12


# kinds of tokens


def test_kinds_of_prose():
    pieces = ["", "The", " Wind", "ow", " was", " 12", ".", "\n\n", "  ", " \u20ac", "\u00e9t\u00e9"]
    assert report_classes.classes(pieces) == [
        "control and partial characters", "function words", "capitalised words", "parts of words", "function words",
        "digits", "punctuation", "newlines", "spaces", "symbols", "other words",
    ]  # fmt: skip


def test_kinds_of_code():
    pieces = ["def", " f", "(x", "):", "\n", "   ", " return", " x", " +", ' "a', ' b"', "  ", "# no", "te", "\n"]
    assert report_classes.code_classes(pieces) == [
        "keywords", "identifiers", "brackets", "brackets", "newlines", "indentation", "keywords", "identifiers",
        "operators", "literals", "literals", "spaces", "comments", "comments", "newlines",
    ]  # fmt: skip
    for broken in ("x = (\n", "'''", "if x:\n        y\n   z\n", "\0", "$ ?", "\x0c", ""):
        assert len(report_classes.code_classes([*broken])) == len(broken)


def test_structure_beside_names(model, tmp_path):
    source = "def add(a, b):\n    if a:\n        return [a + b, 12]\n    return None\n\n\n" * 4
    page, data = make(model, source, tmp_path, "--max-tokens", 4, name="add.py")
    rows = {row["class"]: row for row in data["code"]["rows"]}
    lifts, bits = data["tokens"]["far_lift"], np.array(data["tokens"]["bits"])
    kinds = report_classes.code_classes(data["tokens"]["text"])
    structure = ("brackets", "indentation", "keywords", "operators")
    mine = [i for i, kind in enumerate(kinds) if kind in structure and i and lifts[i] is not None]
    assert rows["structure"]["tokens"] == len(mine)
    assert rows["structure"]["mean_lift"] == pytest.approx(np.mean([lifts[i] for i in mine]), abs=1e-3)
    assert rows["structure"]["share_exact"] == pytest.approx((bits[mine] == 32).mean())
    assert "structure gets" in data["code"]["words"] and "h2" in [tag for tag, _ in page.tags]


# the command


@pytest.fixture
def prompt_file(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT[:400])
    return file


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed(monkeypatch, *args, to=io.StringIO):
    """What the command prints to such a stream."""
    monkeypatch.setattr(sys, "stdout", stream := to())
    assert report.main([*map(str, args)]) == 0
    return stream.getvalue()


def test_ansi_without_colours_is_the_text(model, prompt_file, monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    args = ["--model", model, "--prompt-file", prompt_file, "--max-tokens", 3, "--dtype", "float32", "--ansi"]
    plain = printed(monkeypatch, *args)
    assert plain.startswith(TEXT[:400]) and "\x1b" not in plain
    assert "even share" not in capsys.readouterr().err
    for when, stream in ((["always"], io.StringIO), ([], Terminal)):
        painted = printed(monkeypatch, *args, *when, to=stream)
        assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == plain != painted
        legend = capsys.readouterr().err
        assert "an even share" in legend and "4 bits" in legend
    assert printed(monkeypatch, *args, "never", to=Terminal) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(monkeypatch, *args, to=Terminal) == plain


def test_a_terminal_obeys_no_prompt(model, tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text("red \x1b[31m and \x07 bell \x9b2J" + TEXT[:200])
    painted = printed(monkeypatch, "-m", model, "-f", tmp_path / "p.txt", "--ansi", "always", "-n", 2)
    left = re.sub(r"\x1b\[[0-9;]*m", "", painted)
    assert not set(left) & set("\x1b\x07\x9b") and "\u241b[31m" in left


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"--prompt-file": "missing.txt"}, RequestError, "missing.txt: cannot be read"),
        ({"--prompt-file": "empty.txt"}, RequestError, "the prompt is empty"),
        ({"--prompt-file": "bytes.txt"}, RequestError, "not UTF-8 text: byte 1"),
        ({"--prompt-file": "long.txt"}, RequestError, "the model's context has 1024"),
        ({"--prompt-file": "broken.json"}, RequestError, "not JSON"),
        ({"--out": "."}, RequestError, "is a directory"),
        ({"--out": "none/report.html"}, RequestError, "there is no directory"),
        ({"--max-tokens": "0"}, RequestError, "--max-tokens must be 1 at least, got 0"),
        ({"--kv-budget": "0"}, ConfigError, "kv_budget"),
        ({"--model": "no-such-model"}, ModelFormatError, "no-such-model"),
    ],
)
def test_what_is_wrong_is_said(model, tmp_path, monkeypatch, change, error, words):
    for name, text in (("ok.txt", b"a"), ("empty.txt", b"\n"), ("bytes.txt", b"a\xff"), ("broken.json", b"[")):
        (tmp_path / name).write_bytes(text)
    (tmp_path / "long.txt").write_text(TEXT * 5)
    monkeypatch.chdir(tmp_path)
    options = {"--model": model, "--prompt-file": "ok.txt", "--out": "report.html"} | change
    with pytest.raises(error, match=re.escape(words)):
        report.main([word for pair in options.items() for word in pair])
    assert not (tmp_path / "report.html").exists() and not list(tmp_path.glob(".report*"))


def test_a_report_replaces_the_one_before_or_leaves_it(model, prompt_file, tmp_path, monkeypatch):
    out = tmp_path / "report.html"
    out.write_text("before")

    def full(self, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", full)
        with pytest.raises(RequestError, match="cannot be written: No space left"):
            report._write(out, "after")
    assert out.read_text() == "before" and [path.name for path in tmp_path.glob(".*")] == []
    report._write(out, "after")
    assert out.read_text() == "after"


def test_a_known_error_is_one_line(model, tmp_path):
    command = [sys.executable, "-m", "tools.report", "-m", model, "-f", tmp_path / "none.txt", "-o", "report.html"]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_nothing_to_do_is_a_usage_error(model, prompt_file, capsys):
    for args in (
        [],
        ["--model", model],
        ["-m", model, "-f", prompt_file],
        ["-m", model, "-f", prompt_file, "--ansi", "--json"],
    ):
        with pytest.raises(SystemExit, match="2"):
            report.main([*map(str, args)])
        assert "usage:" in (said := capsys.readouterr().err) and "give" in said


def test_a_conversation(tmp_path):
    make_checkpoint(tmp_path / "model", seed=1)
    config = json.loads((tmp_path / "model/tokenizer_config.json").read_text())
    config["chat_template"] = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(config))
    messages = [{"role": "user", "content": "Who was warm? <b>"}]
    page, data = make(str(tmp_path / "model"), json.dumps(messages), tmp_path, "--max-tokens", 2, name="talk.json")
    assert "".join(page.tokens).startswith("user: Who was warm? <b>\n") and data["tokens"]["text"][0] == ""


# code that is well-formed


@pytest.mark.parametrize(
    "completion, cut, good",
    [
        ("    return x\n", False, True),
        ("    return (x\n", False, False),
        ("  return x\n y\n", False, False),
        ("", False, False),
        ("    return x +", True, True),  # its whole lines are a function that lacks a body yet
        ("    y = x\n    return (y,\n        x", True, True),  # the bracket may still be closed
        ("    y = x)\n    return y", True, False),
        ("    if x:\n        ret", True, True),
        ("    y == = x\n    retu", True, False),
        ("    '''text\n    that goes on\n  and on", True, True),
        ("    return '\0'\n", False, False),
    ],
)
def test_wellformed(completion, cut, good):
    assert evaluate_wellformed.is_wellformed("def f(x):\n", completion, cut) is good


def test_wellformed_as_a_command(model, tmp_path, capsys):
    tasks = [
        {"task_id": f"T/{i}", "prompt": f"def add{i}(a, b):\n", "canonical_solution": "    return a + b\n"}
        for i in range(30)
    ]
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(task) + "\n" for task in tasks)
    args = ["wellformed", "--model", model, "--data", tmp_path, "--samples", 3, "--header", 500, "--max-tokens", 8]
    assert evaluate.main([*map(str, args), "--dtype", "float32", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    names = [row["setting"] for row in rows]
    assert names[0] == "full cache" and names[1].startswith("dropped") and len(names) == 5
    for row in rows:
        assert row["completions"] == len(row["texts"]) == 3 and row["failures"] == len(row["failed"])
        assert row["empty"] == sum(not text.strip() for text in row["texts"])
        assert row["rate"] == row["failures"] / 3 and 0 <= row["cut"] <= 3
        for task, text in zip(tasks, row["texts"], strict=False):
            asked = task["prompt"].rstrip("\n")
            judged = {evaluate_wellformed.is_wellformed(asked, text, cut) for cut in (True, False)}
            assert (task["task_id"] not in row["failed"]) in judged
    assert rows[0]["resident_ratio"] >= 1 > 0.7 > rows[2]["resident_ratio"] and rows[1]["resident_ratio"] < 0.4


def test_wellformed_says_what_is_wrong(model, tmp_path):
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(RequestError, match="not HumanEval's tasks"):
        evaluate_wellformed.read_tasks(str(tmp_path), 1)
    with pytest.raises(RequestError, match="not HumanEval's tasks"):
        evaluate_wellformed.read_tasks(str(tmp_path / "none"), 1)
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.write('{"prompt": "", "canonical_solution": ""}\n')
    with pytest.raises(RequestError, match=r"--samples 1: .* has 1 tasks"):
        evaluate_wellformed.read_tasks(str(tmp_path), 1)


@pytest.mark.skipif(not HUMANEVAL.is_dir(), reason="no ../shared/data/code-humaneval")
def test_solutions_are_wellformed():
    for task in evaluate_wellformed.read_tasks(str(HUMANEVAL), 20):
        solution = task["canonical_solution"]
        assert evaluate_wellformed.is_wellformed(task["prompt"], solution, False)
        for end in range(0, len(solution), 7):
            assert evaluate_wellformed.is_wellformed(task["prompt"], solution[:end], True), solution[:end]
