"""rope_store against float64: rotation in place, and what reaches the cache and what must not."""

import math

import pytest
import torch

from kernels.tokens import rope_store
from tools import float64

TOKENS, PAGE = 3, 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_dim", [(1, 1, 8), (4, 4, 16), (9, 3, 64), (5, 1, 80), (8, 2, 96), (40, 8, 128)]
)
def test_rope_store(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    fused = torch.randn(TOKENS, num_heads + 2 * num_kv_heads, head_dim + 8).to(dtype).to(device)[..., :head_dim]
    q, k, v = fused.split([num_heads, num_kv_heads, num_kv_heads], 1)
    angles = torch.rand(TOKENS, head_dim // 2, dtype=torch.float64) * 1e3
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1).float().to(device)
    slots = torch.tensor([2 * PAGE + 5, 0, 4 * PAGE - 1], device=device)
    arena = torch.full((4, 2, num_kv_heads + 1, PAGE, head_dim), math.nan, dtype=dtype, device=device)
    k_cache, v_cache = (arena[:, side, :num_kv_heads].transpose(0, 1) for side in (0, 1))
    want_q, want_k = float64.rotate(q.cpu(), angles), float64.rotate(k.cpu(), angles)
    before = fused.clone()

    rope_store(q, k, v, cos_sin, slots, k_cache, v_cache)

    float64.assert_close(q, want_q, dtype, scale=2)  # an entry is a sum of two rounded products
    stored = [(slot // PAGE, slot % PAGE) for slot in slots.tolist()]
    for token, (frame, offset) in enumerate(stored):
        float64.assert_close(k_cache[:, frame, offset], want_k[token], dtype, scale=2)
        assert torch.equal(v_cache[:, frame, offset], v[token])
        arena[frame, :, :num_kv_heads, offset] = math.nan
    assert arena.isnan().all(), "something else was written"
    assert torch.equal(fused[:, num_heads:], before[:, num_heads:]), "k or v were changed"


def test_no_tokens(device: str) -> None:
    q = torch.empty(0, 2, 16, device=device)
    cache = torch.zeros(2, 1, PAGE, 16, device=device)
    cos_sin, slots = torch.empty(0, 16, device=device), torch.empty(0, dtype=torch.int64, device=device)
    rope_store(q, q, q, cos_sin, slots, cache, cache)


def test_wrong_arguments_are_named(device: str) -> None:
    q, cache = torch.zeros(1, 2, 16, device=device), torch.zeros(2, 1, PAGE, 16, device=device)
    cos_sin, slots = torch.zeros(1, 16, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(AssertionError, match="int32"):
        rope_store(q, q, q, cos_sin, slots.int(), cache, cache)
    with pytest.raises(AssertionError, match=r"v_cache: .*strides"):
        rope_store(q, q, q, cos_sin, slots, cache, torch.zeros(2, 1, PAGE, 32, device=device)[..., ::2])
