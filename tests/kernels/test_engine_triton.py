"""The whole engine on the Triton kernels, prompts and answers of several lengths at once, against the torch path."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from oracle.checkpoint import make_checkpoint

from engine import LLM, SamplingParams

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("dtype, limit", [("float32", 2e-4), ("bfloat16", 0.1)])
def test_the_triton_path_equals_the_torch_path(tmp_path: Path, device: str, dtype: str, limit: float) -> None:
    """limit: in log-probability. bfloat16 rounds in other places on the two paths, at every layer."""
    make_checkpoint(tmp_path, seed=1, eos_token_id=None)
    prompts = [list(range(3, 75)), [5, 6, 7], [9, 4]]
    ids, scores = {}, {}
    for backend in ("torch", "triton"):
        llm = LLM(tmp_path, dtype=dtype, backend=backend, device=device, threads=1)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)
        ids[backend] = [output.token_ids for output in outputs]
        scores[backend] = np.concatenate(llm.score(prompts))
    assert np.abs(scores["triton"] - scores["torch"]).max() < limit
    if dtype == "float32":
        assert ids["triton"] == ids["torch"]


def test_gpu_check_agrees() -> None:
    command = [sys.executable, "-m", "tools.gpu_check", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"], [row for row in report["rows"] if not row["ok"]]
    assert {row["kernel"] for row in report["rows"]} >= {"rms_norm", "rope_store", "prefill_attention"}
    assert report["end_to_end"]["equal"]
