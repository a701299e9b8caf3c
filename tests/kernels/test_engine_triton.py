"""The whole engine on the Triton kernels, prompts and answers of several lengths at once, against the torch path."""

from pathlib import Path

import numpy as np
import pytest
from oracle.checkpoint import make_checkpoint
from oracle.llama64 import load_weights, logprobs

from engine import LLM, SamplingParams


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_triton_path_equals_the_torch_path(tmp_path: Path, device: str, dtype: str) -> None:
    """In float32 in every id; in bfloat16, where the two round in other places at every layer, both are as far from
    float64 on average."""
    config = make_checkpoint(tmp_path, seed=1, eos_token_id=None)
    prompts = [list(range(3, 75)), [5, 6, 7], [9, 4]]
    weights = load_weights(tmp_path)
    exact = np.concatenate([logprobs(config, weights, prompt) for prompt in prompts])
    ids, errors = {}, {}
    for backend in ("torch", "triton"):
        llm = LLM(tmp_path, dtype=dtype, backend=backend, device=device, threads=1)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)
        ids[backend] = [output.token_ids for output in outputs]
        errors[backend] = np.abs(np.concatenate(llm.score(prompts)) - exact)
    if dtype == "float32":
        assert ids["triton"] == ids["torch"]
        assert errors["triton"].max() < 1e-4
    assert errors["triton"].mean() < 1.5 * errors["torch"].mean()
