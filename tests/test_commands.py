"""The commands beside generate (models, doctor, completion), and what is said to people who come from other engines."""

import argparse
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from oracle.checkpoint import make_checkpoint, random_weights, write_weights

from engine import LLM, ModelFormatError, SamplingParams, cli
from engine.cli import COMMANDS, parser
from engine.config import EngineConfig
from tools import doctor
from tools.doctor import CORE, EXTRAS, examine

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 120
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A machine with nothing on it."""
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ISOTHERM_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("ISOTHERM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "home").mkdir()
    (tmp_path / "models").mkdir()
    return tmp_path


def run(*args, module="engine", env=None, **options):
    options = {"capture_output": True, "stdin": subprocess.DEVNULL, **options}
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, args)], cwd=ROOT, env={**os.environ, **(env or {})}, text=True,
        timeout=LIMIT, **options,
    )  # fmt: skip


# models


def in_the_hub(home, name="org/some--name"):
    base = home / "home/.cache/huggingface/hub" / f"models--{name.replace('/', '--')}"
    make_checkpoint(base / "snapshots" / "abc", dtype="bfloat16", shards=2)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text("abc")
    return name


def test_models_lists_what_model_finds(home):
    make_checkpoint(home / "models" / "tiny")
    make_checkpoint(home / "cache" / "models" / "tiny")  # behind the other
    make_checkpoint(home / "cache" / "models" / "tied", tie_word_embeddings=True, dtype="float16")
    hub = in_the_hub(home)
    (home / "models" / "no-model").mkdir()
    (home / "models" / "a-file").write_text("")
    done = run("models", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["tiny", "tied", hub]
    assert str(home / "models") in report["looked_at"] and len(report["looked_at"]) == 3
    row = rows["tiny"]
    parameters = sum(
        w.size for w in random_weights({**json.loads((home / "models/tiny/config.json").read_text())}, 0).values()
    )
    assert row == {
        "name": "tiny", "path": str(home / "models" / "tiny"), "error": None, "context": 512, "kv_bytes_per_token": 256,
        "size_bytes": 4 * parameters, "dtype": "F32", "parameters": parameters,
    }  # fmt: skip
    assert (rows["tied"]["dtype"], rows[hub]["dtype"]) == ("F16", "BF16")
    for name in rows:
        LLM(name, threads=1)


def test_models_says_what_cannot_be_loaded(home):
    make_checkpoint(home / "models" / "good")
    config = make_checkpoint(home / "models" / "other")
    (home / "models" / "other" / "config.json").write_text(json.dumps(config | {"architectures": ["GemmaForCausalLM"]}))
    make_checkpoint(home / "models" / "cut", shards=2)
    (home / "models" / "cut" / "model-00002-of-00002.safetensors").unlink()
    done = run("models")
    assert (done.returncode, done.stderr) == (0, "")
    good, other, cut = (
        "\n".join(re.findall(rf"^{name}:\n((?:  .*\n)+)", done.stdout, re.M)) for name in ("good", "other", "cut")
    )
    assert f"  path: {home / 'models' / 'good'}\n" in good and "  error: -\n" in good
    assert all(f"\n  {key}: " in good for key in ("size", "dtype", "parameters", "context"))
    assert "  error: architecture ['GemmaForCausalLM'] is not supported" in other
    assert re.search(r"  error: .*missing: model-00002-of-00002", cut)


def test_no_models(home):
    done = run("models")
    assert done.returncode == 0 and "no models found" in done.stdout
    assert str(home / "models") in done.stdout and "tools.get_demo_model" in done.stdout
    assert json.loads(run("models", "--json").stdout)["rows"] == []


@pytest.mark.parametrize("command", ["models", "completion"])
def test_light_commands_import_no_torch(home, command):
    make_checkpoint(home / "models" / "tiny")
    code = (
        "import sys; from engine.__main__ import dispatch; dispatch(sys.argv[1:]);"
        "print(sorted({'torch', 'numpy', 'tqdm'} & set(sys.modules)), file=sys.stderr)"
    )
    args = [command, *(["bash"] if command == "completion" else [])]
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.stderr == "[]\n"


# doctor


def test_doctor_of_a_good_machine_and_model(home):
    make_checkpoint(home / "models" / "tiny")
    done = run("--model", "tiny", "--json", module="engine.doctor")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    report = json.loads(done.stdout)
    assert set(report) == {
        "versions", "packages", "cpu", "memory", "gpu", "code_paths", "directories", "features", "model", "problems",
    }  # fmt: skip
    assert report["problems"] == []
    import torch

    assert report["versions"]["torch"] == torch.__version__
    assert report["packages"]["kernels"] == str(ROOT / "kernels" / "__init__.py")
    llm = LLM("tiny")
    assert report["code_paths"]["cpu_dtype"] == str(llm._model.dtype).removeprefix("torch.")
    assert report["code_paths"]["packed_bfloat16_linear"] == llm._model.head.is_mkldnn
    assert report["cpu"]["default_threads"] == torch.get_num_threads()
    assert report["memory"]["free_bytes"] > 1e8 and report["directories"]["cache"] == str(home / "cache")
    assert report["model"]["tokenizer"] == {"kind": "SentencePieceTokenizer", "vocab_size": 352, "bos_id": 1}
    features = {"models with a tokenizer.json", "chat templates that come with a model", "--flash-cache-encrypt"}
    assert set(report["features"]) == features


def test_doctor_for_people(home):
    make_checkpoint(home / "models" / "tiny")
    done = run("doctor", "-m", "tiny")
    assert done.returncode == 0 and done.stdout.endswith("\nnothing is wrong\n"), done.stdout
    for part in ("torch: ", "cpu_dtype: ", "packed_bfloat16_linear: ", "triton: ", "usable_cpus: ", "size: 0.00 GB"):
        assert part in done.stdout


def broken_models(home):
    make_checkpoint(home / "models" / "shape", hidden_size=64)
    config = json.loads((home / "models/shape/config.json").read_text())
    (home / "models/shape/config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    make_checkpoint(home / "models" / "tokenizer", vocab_size=400)
    make_checkpoint(home / "models" / "small", vocab_size=352)
    shutil.copy(home / "models/tokenizer/tokenizer.model", home / "models/small/tokenizer.model")
    (home / "models" / "tokenizer" / "tokenizer.model").write_bytes(b"nothing")
    return {
        "nowhere": "'nowhere' was not found", "shape": "has shape (112, 64), config.json says (96, 64)",
        "tokenizer": "not a sentencepiece model", "small": "400 tokens",
    }  # fmt: skip


def test_doctor_says_what_is_wrong_with_a_model(home):
    for name, part in broken_models(home).items():
        done = run("--model", name, module="engine.doctor")
        assert done.returncode == 1 and "Traceback" not in done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("WRONG: ")]
        report = json.loads(run("--model", name, "--json", module="engine.doctor").stdout)
        assert part in line and part in report["problems"][0] and part in report["model"]["error"]


def test_doctor_says_what_is_wrong_with_the_machine(home, tmp_path):
    for name in ("kernels", "models"):
        (tmp_path / "other" / name).mkdir(parents=True)
        (tmp_path / "other" / name / "__init__.py").write_text("")
    code = f"""
import sys, importlib.metadata
from tools import doctor
sys.path.insert(0, {str(tmp_path / "other")!r})
for name in ("kernels", "models"):
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        del sys.modules[module]
doctor.CORE["nothing-like-this"] = "1.0"
doctor.CORE["numpy"] = "999"
print(*doctor.examine()["problems"], sep="\\n")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert "the package kernels is imported from " in done.stdout, done.stderr
    assert "the package nothing-like-this is missing: pip install 'nothing-like-this>=1.0'" in done.stdout
    assert re.search(r"numpy [\d.]+ is too old", done.stdout)


def test_doctor_knows_what_pyproject_wants():
    text = (ROOT / "pyproject.toml").read_text()
    wanted = dict(
        re.findall(r'^    "([a-z0-9]+)>=([\d.]+)"', text.split("[project.optional-dependencies]")[0], re.MULTILINE)
    )
    assert wanted == CORE
    for package, (_, extra) in EXTRAS.items():
        assert f'{extra} = ["{package}>=' in text
    assert examine()["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_doctor_advises_on_a_run(tmp_path, capsys):
    """A run whose prefixes branch seven times on one path, and what bounding the depth does to it."""
    make_checkpoint(tmp_path / "tiny", tokenizer=False)
    deep = LLM(tmp_path / "tiny", threads=1, skip_tokenizer_init=True)
    bounded = deep.twin(max_prefix_depth=6)
    for llm in (deep, bounded):
        for length in range(20, 180, 20):  # each leaves the one before after its first `length` tokens
            prompt = [(length + i) % 300 + 3 if i >= length else i % 300 + 3 for i in range(length + 20)]
            llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    found = {llm: llm.stats()["prefix_tree_depth"] for llm in (deep, bounded)}
    assert found[deep] > 6 == found[bounded]
    file = tmp_path / "stats.json"
    for llm in (deep, bounded):
        file.write_text(json.dumps({"text": "", "cache": llm.stats()}))
        doctor.main(["--stats", str(file), "--json"])
        advice = json.loads(capsys.readouterr().out)["advice"]
        if llm is deep:
            assert f"branch {found[deep]} times" in advice[0] and "--max-prefix-depth 6" in advice[0]
        else:
            assert advice == []
    for content in ("", "[]", "{", "{}", '{"cold_hit_rate": "much"}'):
        file.write_text(content)
        with pytest.raises(ModelFormatError, match=r"stats\.json|no statistics of a run"):
            doctor.main(["--stats", str(file)])


@pytest.mark.parametrize(
    ("stats", "words"),
    [
        ({"cache": {"cold_hit_rate": 0.16}}, ["16% of the tokens that were exact .* a lower --recall"]),
        ({"cache": {"cold_hit_rate": 0.15, "thrash_rate": 0.25, "prefix_tree_depth": 6}}, []),
        ({"thrash_rate": 0.4}, ["40% of the moves down were undone, more than 25%: .* --kv-cache-memory"]),
        ({"dead_gradients": 2, "gradients": {}}, ["2 groups of the scorer's parameters got no gradient"]),
        ({"dead_gradients": 0}, []),
    ],
)
def test_each_rule_of_the_advice(tmp_path, capsys, stats, words):
    (tmp_path / "stats.json").write_text(json.dumps(stats))
    doctor.main(["--stats", str(tmp_path / "stats.json"), "--json"])
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert len(advice) == len(words) and all(re.search(a, b) for a, b in zip(words, advice, strict=True))


# completion


def complete(script, *words):
    """What bash offers behind these words."""
    code = f"source {script}\nCOMP_WORDS=({' '.join(repr(w) for w in words)})\nCOMP_CWORD={len(words) - 1}\n"
    done = subprocess.run(
        ["bash", "-c", code + '_shtab_isotherm; printf "%s\\n" "${COMPREPLY[@]}"'], capture_output=True, text=True,
        timeout=LIMIT,
    )  # fmt: skip
    assert done.stderr == "", done.stderr
    return done.stdout.split()


def flags_of(command):
    return {flag for action in parser(command)._actions for flag in action.option_strings}


@needs_bash
@pytest.mark.parametrize("command", COMMANDS)
def test_completion_of_bash_knows_all_flags(command):
    """Else python -m tools.make_completion was forgotten."""
    script = ROOT / "tools" / "completion.bash"
    assert set(complete(script, "isotherm", command, "-")) == flags_of(command)


@needs_bash
def test_completion_of_bash(home):
    done = run("completion", "bash")
    assert (done.returncode, done.stderr) == (0, "")
    script = home / "isotherm.bash"
    script.write_text(done.stdout)
    assert complete(script, "isotherm", "") == list(COMMANDS)
    assert complete(script, "isotherm", "gen") == ["generate"]
    assert complete(script, "isotherm", "generate", "--kv-c") == ["--kv-cache-memory"]
    assert complete(script, "isotherm", "generate", "--dtype", "b") == ["bfloat16"]
    assert complete(script, "isotherm", "generate", "--page-size", "") == ["16", "32", "64"]
    assert complete(script, "isotherm", "completion", "z") == ["zsh"]
    assert complete(script, "isotherm", "generate", "--seed", "") == []
    (home / "models" / "my-model").mkdir()
    assert complete(script, "isotherm", "generate", "--model", "my-") == ["my-model"]


def test_completion_of_zsh(home):
    done = run("completion", "zsh")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("#compdef isotherm\n")
    for command in COMMANDS:
        options = done.stdout.partition(f"_shtab_isotherm_{command}_options=(")[2].partition("\n)\n")[0]
        assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*(?=[,}\[\"])", options)) >= flags_of(command)
    if shutil.which("zsh"):
        (home / "_isotherm").write_text(done.stdout)
        assert subprocess.run(["zsh", "-n", str(home / "_isotherm")], timeout=LIMIT).returncode == 0


def test_completion_scripts_are_those_that_the_tool_makes():
    """By the same release of shtab; whatever release it is, the flags are all there."""
    shtab = pytest.importorskip("shtab", reason="the extra dev has it")
    from tools.make_completion import script

    for shell in ("bash", "zsh"):
        made = (ROOT / "tools" / f"completion.{shell}").read_text()
        if made.endswith(f"\n# by shtab {shtab.__version__}\n"):
            assert made == script(shell)


def test_completion_of_an_unknown_shell():
    done = run("completion", "fish")
    assert done.returncode == 2 and "bash" in done.stderr and done.stdout == ""


# What people type who come from elsewhere.


def test_the_reasons(capsys):
    for flag, part in (
        ("--cache-ram", "unrecognized argument --cache-ram: use --host-cache-size"),
        ("--kv-cache-dtype", "unrecognized argument --kv-cache-dtype: use --kv-budget"),
    ):
        with pytest.raises(SystemExit):
            parser("generate").parse_args([flag, "0.5"])  # before it is said that --model is missing
        assert part in capsys.readouterr().err


def test_every_setting_is_a_flag_or_refused_by_name():
    flags = parser("generate")._option_string_actions
    for name in EngineConfig.__dataclass_fields__:
        flag = f"--{name.replace('_', '-')}"
        library_only = {"skip_tokenizer_init", "enable_prefix_caching", "max_prefix_children", "recall_block"}
        assert flag in flags or name in library_only, name


@pytest.mark.parametrize(
    ("flag", "part"),
    [
        ("--n-predict", "use --max-tokens"), ("--predict", "use --max-tokens"), ("--model-path", "use --model"),
        ("--model_dir", "use --model"), ("--max_tokens", "use --max-tokens"), ("-ngl", "use --device"),
        ("--gpu-memory-utilization", "use --kv-cache-memory"), ("--context-length", "use --max-model-len"),
        ("--max_req_total_len", "use --max-model-len"), ("--tensor-parallel-size", "one device"),
        ("--trust-remote-code", "never run"), ("-t", "use --threads"), ("--block-size", "use --page-size"),
        ("--temperture", "did you mean --temperature?"), ("--max-token", "did you mean --max-tokens?"),
        ("--kv-cache-mem", "did you mean --kv-cache-memory?"), ("--kv-cache-mem=3GB", "mean --kv-cache-memory?"),
    ],
)  # fmt: skip
def test_flags_of_other_engines(capsys, flag, part):
    with pytest.raises(SystemExit) as caught:
        parser("generate").parse_args([flag, "8"])
    stderr = capsys.readouterr().err
    assert caught.value.code == 2 and flag.partition("=")[0] in stderr and part in stderr


def test_every_answer_names_a_flag_that_there_is():
    flags = parser("generate")._option_string_actions
    for flag, answer in cli.FOREIGN["flags"].items():
        assert flag not in flags
        assert not answer.startswith("-") or answer in flags, (flag, answer)


@pytest.mark.parametrize(
    "args",
    [
        ["-p", "--n-predict is a flag"], ["-p", "-5"], ["-n5", "-p", "x"], ["-qn5", "-p", "x"], ["--seed=5"],
        ["--prompt=--n-predict"], ["--stop", "- a"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_values_and_joined_flags_are_no_unknown_flags(args):
    assert isinstance(parser("generate").parse_args(["-m", "x", *args]), argparse.Namespace)


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("genrate", "did you mean generate?"), ("run", "did you mean generate?"), ("ls", "did you mean models?"),
        ("collect-env", "did you mean doctor?"), ("convert", "tools.convert"), ("--model", "isotherm generate --model"),
        ("zzz", "unknown command 'zzz'"),
    ],
)  # fmt: skip
def test_unknown_commands(command, part):
    done = run(command)
    assert (done.returncode, done.stdout) == (2, "") and part in done.stderr.splitlines()[-1]


def test_check_tensors_on_the_command_line(home):
    config = make_checkpoint(home / "models" / "broken")
    weights = random_weights(config, 0)
    weights["model.norm.weight"][5] = np.nan
    write_weights(home / "models" / "broken", weights)
    done = run("-m", "broken", "-p", "a", "-n", 1, "--check-tensors", "--threads", 1, module="engine.generate")
    assert done.returncode == 3 and "NaN or infinite values: model.norm.weight" in done.stderr


def test_failed_requests_are_counted(home):
    config = make_checkpoint(home / "models" / "broken")
    weights = random_weights(config, 0)
    weights["model.norm.weight"][:] = np.nan
    write_weights(home / "models" / "broken", weights)
    llm = LLM("broken", threads=1)
    assert llm.stats()["num_requests_failed"] == 0
    assert {output.finish_reason for output in llm.generate(["a", "b"])} == {"error"}
    llm.add_request("c")
    llm.step()
    assert llm.stats()["num_requests_failed"] == 3
    make_checkpoint(home / "models" / "good")
    llm = LLM("good", threads=1)
    llm.generate("a", SamplingParams(max_tokens=2))
    assert llm.stats()["num_requests_failed"] == 0


# The bar while a long prompt is read.


def on_a_terminal(args, **variables):
    """What stderr shows of a command that has a terminal there."""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", **variables}
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.generate", *map(str, args)], cwd=ROOT, env=environment, stderr=child,
        stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(child)
    seen, end = b"", time.monotonic() + LIMIT
    while time.monotonic() < end and select.select([parent], [], [], LIMIT)[0]:
        try:
            more = os.read(parent, 65536)
        except OSError:  # Linux's way of saying that the other side is closed
            break
        if not more:
            break
        seen += more
    os.close(parent)
    assert process.wait(LIMIT) == 0, seen
    return seen.decode(errors="replace")


@pytest.fixture
def slow(home):
    """A prompt that takes some seconds to read."""
    make_checkpoint(
        home / "models" / "slow", hidden_size=256, intermediate_size=1024, num_hidden_layers=6, head_dim=64,
        max_position_embeddings=1 << 15,
    )  # fmt: skip
    (home / "prompt").write_text("The cat sat near the stove. " * 400)
    return ["-m", "slow", "-f", home / "prompt", "-n", 1, "--threads", 1, "--dtype", "float32", "--temp", 0]


def test_a_bar_while_a_long_prompt_is_read(slow):
    seen = on_a_terminal(slow)
    assert "Reading:" in seen and "\r" in seen
    assert not re.search("\x1b\\[[0-9;]*m", seen)  # no colours, with NO_COLOR or without
    assert seen.replace("\r\n", "\n").splitlines()[-1].lstrip().split("\r")[-1].startswith("Prompt: ")  # it is gone


def test_no_bar_for_a_short_prompt_on_a_dumb_terminal_or_when_quiet(slow):
    short = ["-p", "The cat", *slow[:2], *slow[4:]]
    assert "Reading:" not in on_a_terminal(short)
    assert "Reading:" not in on_a_terminal([*slow, "-q"])
    seen = on_a_terminal(slow, TERM="dumb")
    assert "\r" not in seen.replace("\r\n", "") and "Reading" not in seen and "Prompt: " in seen


@pytest.mark.parametrize("command", [["engine.doctor"], ["engine", "models"]])
def test_another_package_in_the_way_of_the_tools(tmp_path, command):
    (tmp_path / "tools.py").write_text("raise SystemExit('imported')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: the package tools is imported from ") and "another directory" in done.stderr
