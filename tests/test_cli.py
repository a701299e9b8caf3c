"""`python -m engine.generate` as a user runs it: streams, exit codes, signals. Each run is a process of its own."""

import json
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from oracle.checkpoint import make_checkpoint, random_weights, write_json, write_weights

from engine import LLM, ConfigError, SamplingParams
from engine.settings import parse_size

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "The cat sat near the stove"
GREEDY = ("--temperature", "0", "--threads", "1", "--dtype", "float32")
LIMIT = 120  # seconds after which a run hangs


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """$ISOTHERM_MODELS: `tiny`, `broken` (its answers are NaN), and `long`, slow enough to be interrupted."""
    root = tmp_path_factory.mktemp("models")
    make_checkpoint(root / "tiny")
    config = make_checkpoint(root / "broken")
    weights = random_weights(config, 0)
    weights["model.norm.weight"][:] = np.nan
    write_weights(root / "broken", weights)
    make_checkpoint(root / "long", num_hidden_layers=4, max_position_embeddings=1 << 17)
    write_json(root / "long" / "generation_config.json", {"temperature": 0.5, "top_k": 50, "eos_token_id": 2})
    return root


@pytest.fixture(scope="module")
def expected(models):
    llm = LLM(models / "tiny", threads=1, dtype="float32")
    return llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))[0]


def environment(models, **changes):
    """Without the user's own models, caches and settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ISOTHERM", "HF_", "XDG", "PYTHON", "COVERAGE"))}
    return {
        **kept,
        "ISOTHERM_MODELS": str(models),
        "ISOTHERM_CACHE": str(models / "none"),
        "HF_HOME": "/none",
        **changes,
    }


def command(*args, module="engine.generate"):
    return [sys.executable, "-m", module, *map(str, args)]


def run(models, *args, stdin=b"", module="engine.generate", env=None, **options):
    """The finished process, its streams as bytes."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "input": stdin, **options}
    return subprocess.run(
        command(*args, module=module), cwd=ROOT, env=environment(models, **(env or {})), timeout=LIMIT, **options
    )


def assert_error(done, code, *parts):
    """One message and no text: "error: ..." for what we say, argparse's own form for a malformed flag."""
    stderr = done.stderr.decode()
    assert done.returncode == code, stderr
    assert done.stdout == b""
    assert "Traceback" not in stderr
    assert "error: " in stderr
    for part in parts:
        assert part in stderr, stderr


def assert_one_line(done):
    assert done.stderr.decode().startswith("error: ") and done.stderr.count(b"\n") == 1, done.stderr


# What a run prints.


@pytest.fixture(scope="module")
def plain(models):
    return run(models, "-m", "tiny", "-p", PROMPT, "-n", 12, *GREEDY)


def test_the_text_and_only_the_text_is_on_stdout(plain, expected):
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.decode() == expected.text + "\n"


def test_the_last_line_of_stderr(plain):
    last = plain.stderr.decode().splitlines()[-1]
    assert re.search(r"Prompt: \d+ tokens, [\d.]+ tok/s", last), last
    assert re.search(r"Generation: 12 tokens, [\d.]+ tok/s", last), last
    assert re.search(r"TTFT \d+ ms", last), last
    assert re.search(r"Peak memory [\d.]+ GB", last), last
    assert last.endswith("finish: length"), last


def test_the_last_line_has_the_figures_of_tiers_and_flash(models, tmp_path):
    budget = ("--page-size", 16, "--kv-budget", 0.3, "--recall", 0.1)
    flash = ("--page-size", 16, "--flash-cache-dir", tmp_path / "flash", "--flash-cache-persist")
    tiers, written, read = (
        run(models, "-m", "tiny", "-p", PROMPT * 20, "-n", 4, *GREEDY, *more).stderr.decode().splitlines()[-1]
        for more in (budget, flash, flash)
    )
    assert re.search(r"KV cache [\d.]+ MB = 0\.\d\d of [\d.]+ MB exact, .* in the host [\d.]+ MB", tiers), tiers
    assert re.search(r"\d+ tokens exact, \d+ compressed, \d+ moves, .* ones \d+%, missed 0%", tiers), tiers
    assert re.search(r"[\d.]+ MB of copies read a token, cold hits \d+%", tiers), tiers
    assert re.search(r"flash: 0 pages read, [1-9]\d* written \| Peak", written), written
    assert re.search(r"flash: [1-9]\d* pages read, .* [\d.]+ ms to read a page that takes [\d.]+ ms", read), read


def test_no_progress_bar_without_a_terminal(plain):
    for mark in (b"\r", b"\x1b", b"it/s", b"%|", "█".encode()):
        assert mark not in plain.stderr
    assert plain.stderr.count(b"\n") == 1  # the summary alone: this model brings no sampling defaults


def test_json_has_exactly_the_keys_that_are_promised(models, expected):
    done = run(models, "-m", "tiny", "-p", PROMPT, "-n", 12, *GREEDY, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\n") == 1 and done.stdout.endswith(b"}\n")
    report = json.loads(done.stdout)
    assert set(report) == {
        "text", "token_ids", "prompt_tokens", "completion_tokens", "finish_reason", "timings", "memory", "cache",
    }  # fmt: skip
    assert set(report["timings"]) == {"load_s", "ttft_s", "prefill_tok_s", "decode_tok_s"}
    assert set(report["memory"]) == {
        "weights_bytes", "kv_resident_bytes", "kv_full_bytes", "kv_cold_bytes", "kv_shared_bytes", "kv_total_bytes",
        "kv_peak_bytes", "peak_rss_bytes",
    }  # fmt: skip
    assert report["text"] == expected.text and report["token_ids"] == expected.token_ids
    assert report["prompt_tokens"] == len(expected.prompt_token_ids)
    assert (report["completion_tokens"], report["finish_reason"]) == (12, "length")
    assert all(value > 0 for value in report["timings"].values())
    assert report["memory"]["kv_full_bytes"] == (report["prompt_tokens"] + 11) * 512
    assert report["memory"]["peak_rss_bytes"] > report["memory"]["weights_bytes"] > 0


def test_quiet(models, expected):
    done = run(models, "-m", "tiny", "-p", PROMPT, "-n", 12, *GREEDY, "-q")
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, expected.text + "\n", b"")


def test_sampling_defaults_are_printed_and_flags_win(models):
    done = run(models, "-m", "long", "-p", "The", "-n", 1, "-s", 1, "--threads", 1, "-c", 512, "--temp", 0)
    assert done.returncode == 0 and b"generation_config.json: top_k 50\n" in done.stderr, done.stderr


def test_stop_and_a_seed(models, expected):
    stop = expected.text[6:8]
    args = ("-m", "tiny", "-p", PROMPT, "-n", 12, *GREEDY, "-q", "--stop", stop, "--stop", "never~")
    done = run(models, *args, "-s", 3)
    assert done.stdout.decode() == expected.text[: expected.text.find(stop)] + "\n"


# Where the prompt comes from.


@pytest.mark.parametrize("form", ["file", "file-dash", "prompt-dash", "stdin"])
def test_prompt_from_a_file_and_from_stdin(models, tmp_path, expected, form):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    source = {"file": ("--file", tmp_path / "prompt.txt"), "file-dash": ("-f", "-"), "prompt-dash": ("-p", "-")}
    stdin = b"" if form == "file" else PROMPT.encode()
    done = run(models, "-m", "tiny", *source.get(form, ()), "-n", 12, *GREEDY, "-q", stdin=stdin)
    assert (done.returncode, done.stdout.decode()) == (0, expected.text + "\n"), done.stderr


@pytest.mark.parametrize(
    ("form", "parts"),
    [
        ("stdin", ("stdin", "UTF-8", "byte 2", "0xff")),
        ("file", ("bad.txt", "UTF-8", "byte 2", "0xff")),
        ("argument", ("prompt", "UTF-8")),
    ],
)
def test_a_prompt_that_is_not_utf8(models, tmp_path, form, parts):
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    args = {"stdin": (), "file": ("-f", tmp_path / "bad.txt"), "argument": ("-p", os.fsdecode(b"ab\xff"))}[form]
    done = run(models, "-m", "tiny", *args, stdin=b"ab\xff")
    assert_error(done, 2, *parts)
    assert_one_line(done)


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_a_file_that_cannot_be_read(models, tmp_path, name):
    done = run(models, "-m", "tiny", "-f", tmp_path / name)
    assert_error(done, 2, "cannot be read", str(tmp_path))
    assert_one_line(done)


def test_no_prompt_on_a_terminal(models):
    parent, child = pty.openpty()
    try:
        done = subprocess.run(
            command("-m", "tiny"), cwd=ROOT, env=environment(models), stdin=child, capture_output=True, timeout=LIMIT
        )
    finally:
        os.close(parent)
        os.close(child)
    assert_error(done, 2, "--prompt", "--file")


def test_prompt_and_file_together(models):
    assert_error(run(models, "-m", "tiny", "-p", "a", "-f", "-"), 2, "not allowed with")


# Errors and their codes, each from a real case.


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ((), ("--model",)),
        (("-m", "tiny", "-p", "a", "--no-such-flag"), ("--no-such-flag",)),
        (("-m", "tiny", "-p", "a", "-n", "0"), ("max_tokens", "got 0")),
        (("-m", "tiny", "-p", "a", "-n", "many"), ("--max-tokens", "many")),
        (("-m", "tiny", "-p", "a", "--temp", "nan"), ("temperature", "nan")),
        (("-m", "tiny", "-p", "a", "--top-p", "1.5"), ("top_p", "1.5")),
        (("-m", "tiny", "-p", "a", "--top-k", "-1"), ("top_k", "-1")),
        (("-m", "tiny", "-p", "a", "--min-p", "2"), ("min_p", "2")),
        (("-m", "tiny", "-p", "a", "--repeat-penalty", "0"), ("repetition_penalty", "0")),
        (("-m", "tiny", "-p", "a", "--seed", "-1"), ("seed", "-1")),
        (("-m", "tiny", "-p", "a", "--stop", ""), ("stop",)),
        (("-m", "tiny", "-p", "a", "--kv-cache-memory", "12x"), ("--kv-cache-memory", "64MiB", "12x")),
        (("-m", "tiny", "-p", "a", "--rope-scaling", "[1]"), ("--rope-scaling", "JSON object")),
        (("-m", "tiny", "-p", "cat " * 600, "--threads", "1"), ("tokens", "512")),
    ],
    ids=lambda value: " ".join(value)[-24:] if isinstance(value, tuple) else None,
)
def test_exit_2_for_usage(models, args, parts):
    assert_error(run(models, *args), 2, *parts)


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("-m", "tiny", "-c", "100000"), ("max_model_len 100000", "512", "--rope-scaling")),
        (("-m", "tiny", "--dtype", "int8"), ("dtype", "float32", "int8")),
        (("-m", "tiny", "--device", "tpu"), ("device", "tpu")),
        (("-m", "tiny", "--page-size", "7"), ("page_size", "7")),
        (("-m", "tiny", "--tokenizer", "nowhere"), ("nowhere", "tokenizer.model")),
    ],
    ids=lambda value: " ".join(value)[-24:] if isinstance(value, tuple) else None,
)
def test_exit_3_for_model_and_configuration(models, args, parts):
    done = run(models, *args, "-p", "a", "--threads", "1")
    assert_error(done, 3, *parts)
    assert_one_line(done)


def test_exit_3_for_a_truncated_file(models, tmp_path):
    make_checkpoint(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = run(models, "-m", tmp_path, "-p", "a")
    assert_error(done, 3, "model.safetensors")
    assert_one_line(done)


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("--kv-cache-memory", "1KiB"), ("1024",)),
        (("--kv-cache-memory", "32KiB", "-n", "400"), ("tokens", "--kv-cache-memory", "--max-tokens")),
        (("--kv-cache-memory", "800TB"), ("GB", "--kv-cache-memory", "--max-model-len")),
    ],
    ids=["less-than-a-page", "request", "machine"],
)
def test_exit_4_for_capacity(models, args, parts):
    done = run(models, "-m", "tiny", "-p", "a", *GREEDY, *args)
    assert_error(done, 4, *parts)
    assert_one_line(done)


def test_exit_1_for_an_answer_that_failed(models):
    done = run(models, "-m", "broken", "-p", "a", *GREEDY, "-n", 4, "--json")
    assert done.returncode == 1 and b"Traceback" not in done.stderr and b"error" in done.stderr
    report = json.loads(done.stdout)
    assert (report["finish_reason"], report["text"], report["completion_tokens"]) == ("error", "", 0)


def test_exit_1_for_a_package_that_is_not_there(models, tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    done = run(models, "-m", "tiny", "-p", "a", env={"PYTHONPATH": str(tmp_path)})
    assert_error(done, 1, "torch")
    assert_one_line(done)


def test_settings_that_cannot_be_are_refused_by_name(models):
    for flag, value in (("--scorer", "/nowhere/x"), ("--profile", "long")):
        done = run(models, "-m", "tiny", "-p", "a", flag, value)
        assert done.returncode in (2, 3) and done.stdout == b"" and b"Traceback" not in done.stderr
        assert re.search(rf"error: .*({flag}|{flag[2:].replace('-', '_')})", done.stderr.decode()), done.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 64 << 20), ("8GB", 8 * 10**9), ("1.5g", 1_500_000_000), ("1kib", 1024), ("2 TiB", 2 << 40),
        ("12345", 12345), ("7b", 7), ("0.5KB", 500),
    ],
)  # fmt: skip
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "-1", "1e3", "nan", "inf", "1 2", "1.2.3", "64MiBs", "0x10", "9" * 500],
    ids=lambda text: text[:8],
)
def test_bad_sizes(text):
    with pytest.raises(ConfigError, match="size"):
        parse_size(text)


def test_a_size_with_its_unit_reaches_the_cache(models):
    """16 tokens of 512 bytes are 8 KiB a page of 16: one of two stays exact, the other's 32 units hold eight pages."""
    done = run(
        models, "-m", "tiny", "-p", "a", *GREEDY, "--page-size", 16, "--kv-cache-memory", "16KiB", "-n", 400, "-q"
    )
    assert_error(done, 4, "143 fit")


def test_a_missing_model(models):
    done = run(models, "-m", "tiny-chat", "-p", "a")
    assert_error(done, 3, "not found", str(models / "tiny-chat"), "Names near it: ", "tiny", "tools.get_demo_model")


def test_a_missing_llama_says_how_to_get_it(models):
    done = run(models, "-m", "llama2-13b", "-p", "a")
    assert_error(
        done,
        3,
        "/none/hub/models--meta-llama--Llama-2-13b-hf",
        "download meta-llama/Llama-2-13b-hf",
        "gated",
        "licence",
    )
    near = re.search(r"Names near it: (.*)", done.stderr.decode())
    assert near is None or "llama2-13b" not in near[1].split(", "), "the name itself is near it"


# Commands.


def test_engine_dispatches(models, expected):
    done = run(models, "generate", "-m", "tiny", "-p", PROMPT, "-n", 12, *GREEDY, "-q", module="engine")
    assert (done.returncode, done.stdout.decode()) == (0, expected.text + "\n"), done.stderr


@pytest.mark.parametrize("args", [(), ("nothing",), ("--model", "tiny")], ids=["none", "unknown", "flag"])
def test_unknown_command(models, args):
    done = run(models, *args, module="engine")
    assert (done.returncode, done.stdout) == (2, b"") and b"generate" in done.stderr


def test_help_of_the_commands(models):
    done = run(models, "--help", module="engine")
    assert (done.returncode, done.stderr) == (0, b"") and b"generate" in done.stdout


# Those of interfaces.md that this version has.
FLAGS = [
    "-m", "--model", "-p", "--prompt", "-f", "--file", "-n", "--max-tokens", "--temperature", "--temp", "--top-p",
    "--top-k", "--min-p", "--repetition-penalty", "-s", "--seed", "--stop", "--ignore-eos", "-c", "--max-model-len",
    "--ctx-size", "--dtype", "--device", "--rope-scaling", "--kv-cache-memory", "--threads", "--json", "-q",
]  # fmt: skip


def test_help_names_every_flag(models):
    done = run(models, "--help")
    assert (done.returncode, done.stderr) == (0, b"")
    for flag in FLAGS:
        assert re.search(rf"(^|[\s,]){flag}\b", done.stdout.decode()), flag


def test_help_is_quick(models):
    """CPU seconds of the child, the least of several: a busy machine must not fail this."""
    least = 1e9
    for _ in range(7):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(models, "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        least = min(least, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert least < 0.150


@pytest.mark.parametrize("code", ["import engine", "import engine.cli, engine.generate; engine.cli.parser('generate')"])
def test_torch_is_not_imported(models, code):
    check = f"import sys; {code}; print(sorted({{'torch', 'numpy', 'tqdm'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout == "[]\n", done.stderr


def test_wrong_parameters_are_refused_before_torch_is_imported(models, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    for args in (("-n", 0), ("--dtype", "int8"), ("--kv-cache-memory", 0)):
        done = run(models, "-m", "tiny", "-p", "a", *args, env={"PYTHONPATH": str(tmp_path)})
        assert done.returncode in (2, 3) and b"torch" not in done.stderr, done.stderr


# Signals. The prompt of `long` takes seconds to compute, and its answer longer.


def start(models, *args, env=None, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
    return subprocess.Popen(command(*args), cwd=ROOT, env=environment(models, **(env or {})), **options)


def wait_for(stream, mark, limit=LIMIT):
    """Read until the mark (or anything, for b"") has come; returns what was read."""
    seen, end = b"", time.monotonic() + limit
    while mark not in seen or not seen:
        assert select.select([stream], [], [], max(0, end - time.monotonic()))[0], f"no {mark!r} in {seen!r}"
        more = os.read(stream.fileno(), 4096)
        assert more, f"ended before {mark!r}: {seen!r}"
        seen += more
    return seen


def finish(process):
    try:
        return process.communicate(timeout=LIMIT)
    finally:
        process.kill()


LONG = ("-m", "long", "--threads", "1", "-s", "1", "--ignore-eos", "-n", "100000")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_signal_while_it_computes(models, tmp_path, sent, code, phase):
    (tmp_path / "prompt").write_text("The cat sat near the stove. " * (4000 if phase == "prefill" else 2))
    process = start(models, *LONG, "-f", tmp_path / "prompt")
    if phase == "prefill":
        wait_for(process.stderr, b"temperature")  # said when the model is loaded
        time.sleep(0.2)
    else:
        wait_for(process.stdout, b"")
    process.send_signal(sent)
    stdout, stderr = finish(process)
    assert process.returncode == code, stderr
    assert b"Traceback" not in stderr and b"Error" not in stderr
    assert phase == "decode" or stdout == b"", "the prompt was done before the signal: it proves nothing"


# All three were seen in real imports of torch.
SLOW_IMPORTS = {
    "plain": "pause()",
    # dataclasses do it; CPython then ends itself by the signal.
    "exec": "exec('pause()')",
    # Before Python 3.12 whatever is raised here becomes a RuntimeError.
    "set_name": "type('C', (), {'d': type('D', (), {'__set_name__': lambda *_: pause()})()})",
}


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("how", SLOW_IMPORTS)
def test_signal_while_torch_is_imported(models, tmp_path, sent, code, how):
    """In place of torch a module that waits where the real one spends time: there Ctrl-C must not become an error."""
    (tmp_path / "torch.py").write_text(
        "import os, time\ndef pause():\n    os.write(2, b'importing\\n')\n    time.sleep(60)\n" + SLOW_IMPORTS[how]
    )
    process = start(models, "-m", "tiny", "-p", "a", env={"PYTHONPATH": str(tmp_path)})
    wait_for(process.stderr, b"importing")
    time.sleep(0.05)
    process.send_signal(sent)
    stdout, stderr = finish(process)
    assert (process.returncode, stdout, stderr) == (code, b"", b"")


@pytest.mark.parametrize("module", ["argparse", "sentencepiece", "tqdm"])
def test_interrupt_while_something_else_is_imported(models, tmp_path, module):
    """argparse: the very beginning, before any of our own code can have run far; a shell calls both endings 130."""
    (tmp_path / f"{module}.py").write_text("import os, time\nos.write(2, b'importing\\n')\ntime.sleep(60)\n")
    process = start(models, "-m", "tiny", "-p", "a", env={"PYTHONPATH": str(tmp_path)})
    wait_for(process.stderr, b"importing")
    process.send_signal(signal.SIGINT)
    _, stderr = finish(process)
    assert process.returncode in ((130, -signal.SIGINT) if module == "argparse" else (130,)), stderr
    assert stderr == b""


@pytest.mark.parametrize("delay", [0.15, 0.3, 0.6, 0.9], ids=str)
def test_interrupt_at_any_time(models, delay):
    """Within the real import of torch or the load, wherever that is on this machine."""
    process = start(models, *LONG, "-p", "a")
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, stderr = finish(process)
    assert process.returncode in (130, -signal.SIGINT), stderr
    assert b"Traceback" not in stderr


# What stdout can be.


def test_a_closed_pipe_is_quiet(models):
    process = start(models, *LONG, "-p", "a")
    wait_for(process.stdout, b"")
    process.stdout.close()
    _, stderr = process.communicate(timeout=LIMIT)
    assert b"Traceback" not in stderr and b"Broken" not in stderr and b"error" not in stderr
    assert process.returncode != 0


def test_head(models):
    line = " ".join(command(*LONG, "-p", "a"))
    done = subprocess.run(
        ["sh", "-c", f"{line} | head -c 1"], cwd=ROOT, env=environment(models), capture_output=True, timeout=LIMIT
    )
    assert (done.returncode, len(done.stdout)) == (0, 1)
    assert b"Traceback" not in done.stderr and b"Exception" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk(models):
    with open("/dev/full", "wb") as full:
        done = run(models, "-m", "tiny", "-p", "a", *GREEDY, "-n", 4, stdout=full)
    stderr = done.stderr.decode()
    assert done.returncode == 1 and "Traceback" not in stderr and "Exception" not in stderr, stderr
    assert re.search(r"^error: .*No space left", stderr, re.MULTILINE)


def test_stdout_that_knows_few_characters(models, expected):
    """A terminal or file in another encoding: what it cannot show is replaced, nothing breaks."""
    assert not expected.text.isascii()
    done = run(models, "-m", "tiny", "-p", PROMPT, "-n", 12, *GREEDY, "-q", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    assert done.stdout.endswith(b"\n") and len(done.stdout) > len(expected.text) / 2


@pytest.mark.parametrize("redirect", ["0<&-", "2>&-"])
@pytest.mark.parametrize("model, code", [("tiny", 0), ("nonexistent", 3)])
def test_stdin_or_stderr_that_is_closed(models, redirect, model, code):
    done = subprocess.run(
        ["sh", "-c", " ".join(command("-m", model, "-p", "a", "-n", "2", *GREEDY)) + f" {redirect}"],
        cwd=ROOT, env=environment(models), stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == code and b"Traceback" not in done.stderr, done.stderr
    assert bool(done.stdout) == (code == 0), "an error went to stdout, or the answer did not"


def test_stdout_that_is_closed(models):
    done = subprocess.run(
        ["sh", "-c", " ".join(command("-m", "tiny", "-p", "a", "-n", "2", *GREEDY)) + " >&-"],
        cwd=ROOT, env=environment(models), capture_output=True, timeout=LIMIT,
    )  # fmt: skip
    assert b"Traceback" not in done.stderr, done.stderr
