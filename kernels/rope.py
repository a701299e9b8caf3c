"""Rotary position embedding of q and k, fused with the store of k and v to the cache.

A program rotates up to BLOCK_H heads of one token, as two tiles [heads, D/2]: the pairs are (i, i + D/2), so both
halves are contiguous and move in vectors. The first programs of a token take its query heads, the rest its KV heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_H = 16


@triton.jit
def _rotate(x, low_to, cos, sin, mask, HALF: tl.constexpr):
    """Read a tile's two halves at x; write them, rotated, at low_to."""
    low = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(low_to, (low * cos - high * sin).to(low_to.dtype.element_ty), mask=mask)
    tl.store(low_to + HALF, (high * cos + low * sin).to(low_to.dtype.element_ty), mask=mask)


@triton.jit
def _rope_store_kernel(
    q,  # [T, Hq, D], rotated in place
    k,  # [T, Hkv, D]
    v,  # [T, Hkv, D]
    cos_sin,  # [T, D] float32: cos of the D/2 angles, then sin
    slots,  # [T] int64
    k_cache,  # [Hkv, frames, PAGE_SIZE, D], pages without gaps
    v_cache,  # the same
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_cos_sin,
    stride_k_cache_head,
    stride_k_cache_frame,
    stride_v_cache_head,
    stride_v_cache_frame,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,  # the power of two from D/2 up
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    QUERY_TILES: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    angles = cos_sin + token * stride_cos_sin + pair
    cos = tl.load(angles, mask=pair < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=pair < HALF, other=0.0)
    if tile < QUERY_TILES:
        head = (tile * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]).to(tl.int64)
        mask = (head < NUM_HEADS) & (pair < HALF)
        x = q + token * stride_q_token + head * stride_q_head + pair
        _rotate(x, x, cos, sin, mask, HALF)
    else:
        head = ((tile - QUERY_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]).to(tl.int64)
        mask = (head < NUM_KV_HEADS) & (pair < HALF)
        slot = tl.load(slots + token)
        frame = slot // PAGE_SIZE
        in_page = (slot % PAGE_SIZE) * HEAD_DIM
        k_from = k + token * stride_k_token + head * stride_k_head + pair
        k_to = k_cache + head * stride_k_cache_head + frame * stride_k_cache_frame + in_page + pair
        _rotate(k_from, k_to, cos, sin, mask, HALF)
        v_from = v + token * stride_v_token + head * stride_v_head + pair
        v_to = v_cache + head * stride_v_cache_head + frame * stride_v_cache_frame + in_page + pair
        v_low = tl.load(v_from, mask=mask, other=0.0)
        v_high = tl.load(v_from + HALF, mask=mask, other=0.0)
        tl.store(v_to, v_low.to(v_cache.dtype.element_ty), mask=mask)
        tl.store(v_to + HALF, v_high.to(v_cache.dtype.element_ty), mask=mask)


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
) -> None:
    """Rotate q [T, Hq, D] in place; write rotated k and v [T, Hkv, D] to their slots [T] int64 of the cache.

    cos_sin [T, D] float32; k_cache, v_cache [Hkv, frames, page_size, D]. No two tokens may have the same slot.
    """
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = k_cache.shape
    assert k.shape == (tokens, num_kv_heads, head_dim), f"k {tuple(k.shape)} for q {tuple(q.shape)}"
    assert v.shape == k.shape, f"v {tuple(v.shape)}, k {tuple(k.shape)}"
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1, f"strides: {q.stride()}, {k.stride()}, {v.stride()}"
    assert head_dim % 2 == 0, f"head_dim {head_dim}"
    assert cos_sin.shape == (tokens, head_dim) and cos_sin.dtype == torch.float32, f"{tuple(cos_sin.shape)}"
    assert cos_sin.stride(1) == 1, f"cos_sin strides {cos_sin.stride()}"
    assert slots.shape == (tokens,) and slots.dtype == torch.int64, f"slots {tuple(slots.shape)} {slots.dtype}"
    assert slots.stride(0) == 1, f"slots stride {slots.stride()}"
    assert v_cache.shape == k_cache.shape, f"v_cache {tuple(v_cache.shape)}, k_cache {tuple(k_cache.shape)}"
    for cache in (k_cache, v_cache):
        assert cache.shape[3] == head_dim and cache.stride()[2:] == (head_dim, 1), f"cache strides {cache.stride()}"
    if tokens == 0:
        return
    tiles = triton.cdiv(num_heads, BLOCK_H) + triton.cdiv(num_kv_heads, BLOCK_H)
    block_half = triton.next_power_of_2(head_dim // 2)
    _rope_store_kernel[(tokens, tiles)](
        q, k, v, cos_sin, slots, k_cache, v_cache,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), cos_sin.stride(0),
        k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_HALF=block_half, PAGE_SIZE=page_size, BLOCK_H=BLOCK_H,
        # 8 pairs a thread: 128-bit accesses in 16-bit types
        num_warps=max(BLOCK_H * block_half // 256, 1), enable_fp_fusion=True,
    )
