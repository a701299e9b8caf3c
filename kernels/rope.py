"""Rotary position embedding of q and k, fused with the store of k and v to the cache.

A program rotates up to BLOCK_H heads of one token, as two tiles [heads, D/2]: the pairs are (i, i + D/2), so both
halves are contiguous and move in vectors. The first programs of a token take its query heads, the rest its KV heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import FLOATS, check
from kernels.codes import block_of

BLOCK_H = 16


@triton.jit
def _move(x, to, cos, sin, mask, HALF: tl.constexpr):
    """A tile's two halves from x to `to`, rotated unless cos is None."""
    low = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x + HALF, mask=mask, other=0.0).to(tl.float32)
    if cos is not None:
        low, high = low * cos - high * sin, high * cos + low * sin
    tl.store(to, low.to(to.dtype.element_ty), mask=mask)
    tl.store(to + HALF, high.to(to.dtype.element_ty), mask=mask)


@triton.jit
def _rope_store_kernel(
    q, k, v, cos_sin, slots, k_cache, v_cache,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_cos_sin,
    stride_cache_head, stride_cache_frame,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_H: tl.constexpr,
):
    """q [T, Hq, D], rotated in place; k, v [T, Hkv, D]; cos_sin [T, D] float32: cos of the D/2 angles, then sin
    slots [T] int64; k_cache, v_cache [Hkv, frames, PAGE_SIZE, D], pages without gaps, of the same strides"""
    HALF: tl.constexpr = HEAD_DIM // 2
    QUERY_TILES: tl.constexpr = tl.cdiv(NUM_HEADS, BLOCK_H)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    pair = tl.arange(0, block_of(HALF, 1))[None, :]
    angles = cos_sin + token * stride_cos_sin + pair
    cos = tl.load(angles, mask=pair < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=pair < HALF, other=0.0)
    if tile < QUERY_TILES:
        head = (tile * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]).to(tl.int64)
        x = q + token * stride_q_token + head * stride_q_head + pair
        _move(x, x, cos, sin, (head < NUM_HEADS) & (pair < HALF), HALF)
    else:
        head = ((tile - QUERY_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]).to(tl.int64)
        mask = (head < NUM_KV_HEADS) & (pair < HALF)
        slot = tl.load(slots + token)
        to = head * stride_cache_head + slot // PAGE_SIZE * stride_cache_frame + slot % PAGE_SIZE * HEAD_DIM + pair
        _move(k + token * stride_k_token + head * stride_k_head + pair, k_cache + to, cos, sin, mask, HALF)
        _move(v + token * stride_v_token + head * stride_v_head + pair, v_cache + to, None, None, mask, HALF)


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
) -> None:
    """Rotate q [T, Hq, D] in place; write rotated k and v [T, Hkv, D] to their slots [T] int64 of the cache.

    cos_sin [T, D] float32; k_cache, v_cache [Hkv, frames, page_size, D]. No two tokens may have the same slot.
    """
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, frames, page_size, _ = k_cache.shape
    assert head_dim % 2 == 0, f"head_dim {head_dim}"
    check("q", q, q.shape, FLOATS)
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        strides = (*k_cache.stride()[:2], head_dim, 1)
        check(name, x, (tokens, num_kv_heads, head_dim), FLOATS)
        check(f"{name}_cache", cache, (num_kv_heads, frames, page_size, head_dim), FLOATS, strides)
    check("cos_sin", cos_sin, (tokens, head_dim), (torch.float32,))
    check("slots", slots, (tokens,), (torch.int64,))
    _rope_store_kernel[(tokens, triton.cdiv(num_heads, BLOCK_H) + triton.cdiv(num_kv_heads, BLOCK_H))](
        q, k, v, cos_sin, slots, k_cache, v_cache,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos_sin.stride(0), *k_cache.stride()[:2],
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PAGE_SIZE=page_size, BLOCK_H=BLOCK_H,
        # 8 pairs a thread: 128-bit accesses in 16-bit types
        num_warps=max(BLOCK_H * block_of(head_dim // 2, 1) // 256, 1), enable_fp_fusion=True,
    )
