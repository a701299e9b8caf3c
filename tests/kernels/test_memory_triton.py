"""What a GPU would hold, from what the wrappers of the Triton kernels allocate in the interpreter."""

from pathlib import Path

import pytest
import torch
from oracle.checkpoint import make_checkpoint

from tools.bench_memory import measure

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tools.bench memory measures it where there is a GPU")


@pytest.mark.parametrize("overlay", [None, 1 << 20])
def test_the_plan_of_a_gpu_is_what_its_kernels_hold(tmp_path: Path, overlay: int | None) -> None:
    """With a budget and copies, most of it filled: chunks, observation, moves and recall."""
    make_checkpoint(
        tmp_path, tokenizer=False, num_hidden_layers=4, hidden_size=192, intermediate_size=512, num_attention_heads=6,
        num_key_value_heads=2,
    )  # fmt: skip
    found = measure(
        str(tmp_path), 330, decode=2, direct_state=True, seed=0, dtype="float16", backend="triton", kv_budget=0.3,
        recall=0.05, cold_format="exact", max_num_batched_tokens=64, overlay_size=overlay,
    )  # fmt: skip
    assert found["cache_report"]["warm_tokens"] > 0 and found["cache_report"]["cold_bytes"] > 0
    assert 0.95 < found["measured_of_planned"] < 1.05
