"""Root-mean-square norm, alone and fused with the residual addition before it. One program per token."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _normalize(x, weight, column, mask, eps, F: tl.constexpr):
    mean_square = tl.sum(x * x, 0) / F
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    return x * tl.rsqrt(mean_square + eps) * w


@triton.jit
def _rms_norm_kernel(
    x,  # [T, F], any row stride
    weight,  # [F]
    out,  # [T, F], contiguous
    stride_x,
    eps,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,  # the power of two from F up
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_F)
    mask = column < F
    value = tl.load(x + token * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    y = _normalize(value, weight, column, mask, eps, F)
    tl.store(out + token * F + column, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_rms_norm_kernel(
    x,  # [T, F], any row stride
    residual,  # [T, F], any row stride; updated
    weight,  # [F]
    out,  # [T, F], contiguous
    stride_x,
    stride_residual,
    eps,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_F)
    mask = column < F
    value = tl.load(x + token * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    residual_row = residual + token * stride_residual + column
    total = (tl.load(residual_row, mask=mask, other=0.0).to(tl.float32) + value).to(residual.dtype.element_ty)
    tl.store(residual_row, total, mask=mask)
    # Of the rounded sum: what the next layer will read, and what the unfused pair of operations would norm.
    y = _normalize(total.to(tl.float32), weight, column, mask, eps, F)
    tl.store(out + token * F + column, y.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x [T, F] times weight [F], computed in float32 -> [T, F] in the weight's dtype."""
    _check_rows(x, weight)
    tokens, width = x.shape
    out = x.new_empty(tokens, width, dtype=weight.dtype)
    if tokens:
        block, warps = _block_and_warps(width)
        _rms_norm_kernel[(tokens,)](
            x, weight, out, x.stride(0), eps, F=width, BLOCK_F=block, num_warps=warps, enable_fp_fusion=True
        )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, then the RMS norm of the new residual times weight. x, residual [T, F] -> [T, F] in the
    weight's dtype; the residual is in x's dtype or float32."""
    _check_rows(x, weight)
    _check_rows(residual, weight)
    assert x.shape == residual.shape, f"x {tuple(x.shape)} and residual {tuple(residual.shape)} differ"
    assert residual.dtype in (x.dtype, torch.float32), f"x is {x.dtype}, residual {residual.dtype}"
    tokens, width = x.shape
    out = x.new_empty(tokens, width, dtype=weight.dtype)
    if tokens:
        block, warps = _block_and_warps(width)
        _add_rms_norm_kernel[(tokens,)](
            x, residual, weight, out, x.stride(0), residual.stride(0), eps,
            F=width, BLOCK_F=block, num_warps=warps, enable_fp_fusion=True,
        )
    return out


def _block_and_warps(width: int) -> tuple[int, int]:
    """A row stays in registers: 16 to 32 values a thread, so that every load is 128 bits wide."""
    block = triton.next_power_of_2(width)
    return block, min(max(block // 1024, 1), 16)


def _check_rows(x: Tensor, weight: Tensor) -> None:
    assert x.dim() == 2 and x.stride(1) == 1, f"need rows without gaps, got {tuple(x.shape)} strides {x.stride()}"
    assert x.dtype in (torch.float32, torch.float16, torch.bfloat16), f"dtype {x.dtype}"
    assert weight.shape == (x.shape[1],) and weight.stride(0) == 1, f"weight {tuple(weight.shape)} for {tuple(x.shape)}"
