"""Root-mean-square norm, alone and fused with the residual addition before it. One program per token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import FLOATS, check
from kernels.codes import block_of


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
    if residual is not None:
        check("residual", residual, x.shape, (x.dtype, torch.float32))
    out = x.new_empty(tokens, width, dtype=weight.dtype)
    # A row stays in registers: 16 to 32 values a thread, so that every load is 128 bits wide.
    num_warps = min(max(block_of(width, 1) // 1024, 1), 16)
    _rms_norm_kernel[(tokens,)](
        x, residual, weight, out, x.stride(0), 0 if residual is None else residual.stride(0), eps,
        F=width, num_warps=num_warps, enable_fp_fusion=True,
    )
    return out
