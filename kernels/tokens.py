"""What is done to each token by itself: RMS norm, SiLU(gate) * up, and rotary embedding with the store to the cache.

A program norms one token, alone or with the residual addition before it. A program rotates up to BLOCK_H heads of one
token, as two tiles [heads, D/2]: the pairs are (i, i + D/2), so both halves are contiguous and move in vectors. The
first programs of a token take its query heads, the rest its KV heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.codes import FLOATS, block_of, check

BLOCK_F = 1024  # columns a program of silu_mul: 8 values a thread with 4 warps, one 128-bit access in 16-bit types
BLOCK_H = 16


@triton.jit
def _rms_norm_kernel(x, residual, weight, out, stride_x, stride_residual, eps, F: tl.constexpr):
    """x [T, F], any row stride; residual: the same: updated, and normed in x's place. Or None
    weight [F]; out [T, F], contiguous"""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block_of(F, 1))
    mask = column < F
    value = tl.load(x + token * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        residual_row = residual + token * stride_residual + column
        total = (tl.load(residual_row, mask=mask, other=0.0).to(tl.float32) + value).to(residual.dtype.element_ty)
        tl.store(residual_row, total, mask=mask)
        # The rounded sum: what the next layer will read, and what the unfused pair of operations would norm.
        value = total.to(tl.float32)
    mean_square = tl.sum(value * value, 0) / F
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    y = value * tl.rsqrt(mean_square + eps) * w
    tl.store(out + token * F + column, y.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x [T, F] times weight [F], computed in float32 -> [T, F] in the weight's dtype."""
    return add_rms_norm(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, then the RMS norm of the new residual (None: of x) times weight. x, residual [T, F] ->
    [T, F] in the weight's dtype; the residual is in x's dtype or float32."""
    tokens, width = x.shape
    check("x", x, x.shape, FLOATS)
    check("weight", weight, (width,), FLOATS)
    check("residual", residual, x.shape, (x.dtype, torch.float32))
    out = x.new_empty(tokens, width, dtype=weight.dtype)
    # A row stays in registers: 16 to 32 values a thread, so that every load is 128 bits wide.
    num_warps = min(max(block_of(width, 1) // 1024, 1), 16)
    _rms_norm_kernel[(tokens,)](
        x, residual, weight, out, x.stride(0), 0 if residual is None else residual.stride(0), eps,
        F=width, num_warps=num_warps, enable_fp_fusion=True)
    return out


@triton.jit
def _silu_mul_kernel(gate, up, out, stride_gate, stride_up, F: tl.constexpr, BLOCK_F: tl.constexpr):
    """gate, up [T, F], any row stride; out [T, F], contiguous"""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = column < F
    g = tl.load(gate + token * stride_gate + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + token * stride_up + column, mask=mask, other=0.0).to(tl.float32)
    y = g / (1.0 + tl.exp(-g)) * u
    tl.store(out + token * F + column, y.to(out.dtype.element_ty), mask=mask)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, computed in float32. gate, up [T, F], rows without gaps -> [T, F] in gate's dtype."""
    tokens, width = gate.shape
    check("gate", gate, (tokens, width), FLOATS)
    check("up", up, (tokens, width), (gate.dtype,))
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _silu_mul_kernel[(tokens, triton.cdiv(width, BLOCK_F))](
        gate, up, out, gate.stride(0), up.stride(0), F=width, BLOCK_F=BLOCK_F, num_warps=4, enable_fp_fusion=True)
    return out


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
        q, k, v, cos_sin, slots, k_cache, v_cache, stride_q_token, stride_q_head, stride_k_token, stride_k_head,
        stride_v_token, stride_v_head, stride_cos_sin, stride_cache_head, stride_cache_frame, NUM_HEADS: tl.constexpr,
        NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_H: tl.constexpr):
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
        q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
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
        num_warps=max(BLOCK_H * block_of(head_dim // 2, 1) // 256, 1), enable_fp_fusion=True)
