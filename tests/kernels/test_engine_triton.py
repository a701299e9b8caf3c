"""The whole engine on the Triton kernels, prompts and answers of several lengths at once, against the torch path."""

from pathlib import Path

import numpy as np
import pytest
from oracle.checkpoint import make_checkpoint
from oracle.llama64 import load_weights, logprobs
from safetensors.torch import save_file

from engine import LLM, SamplingParams
from memory.importance import FEATURE_VERSION, Scorer


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


def test_an_overlay_changes_no_answer(tmp_path: Path, device: str) -> None:
    """Of requests after one another, whose copies lie where those of the ones before did; and it spares reads. Layers
    that recall more have more of it."""
    about = {"feature_version": FEATURE_VERSION, "recall_model": "2 layers, 2/1 heads of 16, vocabulary 352"}
    save_file(Scorer().state_dict(), tmp_path / "scorer", about | {"recall_odds": "[3, 0.5]"})
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    make_checkpoint(tmp_path, seed=1, eos_token_id=None, **shape)
    prompts = [[list(range(3, 73))], [list(range(72, 2, -1))]]
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=2)
    answers, reports = [], []
    for size in (None, 1 << 15):
        llm = LLM(
            tmp_path, dtype="float32", backend="triton", device=device, threads=1, page_size=16, kv_budget=0.25,
            recall=0.02, cold_format="exact", recent_tokens=16, enable_prefix_caching=False, overlay_size=size,
            scorer=str(tmp_path / "scorer"),
        )  # fmt: skip
        found = [output for some in prompts for output in llm.generate(some, params, use_tqdm=False)]
        answers.append([(output.token_ids, output.logprobs) for output in found])
        reports.append((found[0].cache_report, llm.stats()))
    assert answers[0] == answers[1]
    shares = [layer.share for layer in llm._cache.layers]
    sizes = [layer.overlay.rows.shape[1] for layer in llm._cache.layers if layer.overlay]
    assert sizes == [128 * share // 64 for share in shares] and shares[0] > 2 * shares[1]
    (old, before), (new, after) = reports
    assert after["overlay_hit_rate"] > 0.2 and before["overlay_hit_rate"] == 0
    assert after["cold_hit_rate"] < before["cold_hit_rate"] and new["cold_hit_rate"] < old["cold_hit_rate"]
    assert after["read_bytes_per_token"] < before["read_bytes_per_token"]
    assert after["kv_capacity_bytes"] - before["kv_capacity_bytes"] == pytest.approx(1 << 15, rel=0.1)
