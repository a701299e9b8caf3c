"""The library inside other programs: the documented example, what it leaves alone, Transformers beside it."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from oracle.checkpoint import make_checkpoint

from engine import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "embedding.md").read_text()
PEER = os.environ.get("ISOTHERM_PEER_PYTHON", "")
needs_peer = pytest.mark.skipif(
    not Path(PEER).is_file(), reason="ISOTHERM_PEER_PYTHON names no Python that has Transformers"
)


def test_the_example_runs(tmp_path, capsys):
    make_checkpoint(tmp_path, max_position_embeddings=1024)
    variables = {"MODEL": str(tmp_path)}
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 3
    for code in examples:
        exec(compile(code, "docs/embedding.md", "exec"), variables)  # our own page
    printed = capsys.readouterr().out
    assert set(variables["answers"]) == {"ada", "ben", "eve"}
    assert printed.count("refused: ") == 3 and "does not fit: " in printed
    assert "2 requests are in the engine" in printed and len(variables["texts"]) == 2 and all(variables["texts"])
    assert re.search(r"^ada: .* \((length|stop)\)$", printed, re.MULTILINE) and "eve: " not in printed


def test_what_a_library_must_leave_alone(tmp_path):
    """Threads, signals, the root logger, the working directory and the environment."""
    make_checkpoint(tmp_path)

    def state():
        return (
            threading.enumerate(), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM),
            logging.root.handlers[:], logging.root.level, os.getcwd(), dict(os.environ),
        )  # fmt: skip

    before = state()
    llms = [LLM(tmp_path, threads=1, progress=True) for _ in range(3)]
    outputs = [llm.generate("The cat", SamplingParams(max_tokens=4, temperature=0)) for llm in llms]
    assert len({output.text for (output,) in outputs}) == 1
    assert state() == before


def run_python(python, code, *path):
    return subprocess.run(
        [python, "-c", code], cwd="/", capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


# Transformers makes a tiny Llama and runs it; `kernels` is ours, first on the path.
BESIDE = """
import importlib.util
found = importlib.util.find_spec("kernels")
print("spec", found and found.origin)
import torch, transformers
from transformers.utils.import_utils import is_kernels_available
from transformers.integrations import hub_kernels
print("available", bool(is_kernels_available()), bool(getattr(hub_kernels, "_kernels_available", False)))
config = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4, vocab_size=352)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(config).eval()
print("tokens", model.generate(torch.arange(5)[None], max_new_tokens=5, do_sample=False).tolist())
"""


@needs_peer
def test_transformers_does_not_take_our_kernels_for_the_hubs():
    without = run_python(PEER, BESIDE)
    beside = run_python(PEER, BESIDE, ROOT)
    assert beside.returncode == 0, beside.stderr
    assert f"spec {ROOT}/kernels/__init__.py" in beside.stdout
    assert "available False False" in beside.stdout
    tokens = [line for line in beside.stdout.splitlines() if line.startswith("tokens")]
    assert tokens and tokens == [line for line in without.stdout.splitlines() if line.startswith("tokens")]


@needs_peer
def test_transformers_and_the_engine_in_one_process(tmp_path):
    """In either order; both give what they give alone."""
    make_checkpoint(tmp_path, tokenizer=False)
    ours = f"""
from engine import LLM, SamplingParams
llm = LLM({str(tmp_path)!r}, threads=1, dtype="float32", skip_tokenizer_init=True)
params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
ours = llm.generate([[1, 5, 9]], params)[0].token_ids
"""
    theirs = f"""
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, dtype=torch.float32)
theirs = model.generate(torch.tensor([[1, 5, 9]]), max_new_tokens=5, min_new_tokens=5, do_sample=False)[0, 3:].tolist()
"""
    for first, second in ((ours, theirs), (theirs, ours)):
        done = run_python(PEER, first + second + "print(ours == theirs, len(ours))", ROOT)
        assert done.stdout == "True 5\n", done.stderr


def test_the_hubs_kernels_in_our_place_is_named(tmp_path):
    """Another package called `kernels`, first on the path: said at once, not an error from the middle of an import."""
    make_checkpoint(tmp_path / "model")
    (tmp_path / "other" / "kernels").mkdir(parents=True)
    (tmp_path / "other" / "kernels" / "__init__.py").write_text("class Device: pass\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path / "other")!r})
from engine import LLM
LLM({str(tmp_path / "model")!r})
"""
    done = run_python(sys.executable, code, ROOT)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert (
        last.startswith("ModuleNotFoundError: ") and str(tmp_path / "other" / "kernels") in last and "Isotherm" in last
    ), last
