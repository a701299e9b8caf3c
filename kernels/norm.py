"""Root-mean-square norm, alone and fused with the residual addition before it. One program per token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import FLOATS, check


@triton.jit
def _rms_norm_kernel(
    x,  # [T, F], any row stride
    residual,  # the same: updated, and normed in x's place. Or None
    weight,  # [F]
    out,  # [T, F], contiguous
    stride_x, stride_residual,
    eps,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,  # the power of two from F up
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_F)
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
    return _norm(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, then the RMS norm of the new residual times weight. x, residual [T, F] -> [T, F] in the
    weight's dtype; the residual is in x's dtype or float32."""
    check("residual", residual, x.shape, (x.dtype, torch.float32))
    return _norm(x, residual, weight, eps)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    tokens, width = x.shape
    check("x", x, (tokens, width), FLOATS)
    check("weight", weight, (width,), FLOATS)
    out = x.new_empty(tokens, width, dtype=weight.dtype)
    if tokens:
        # A row stays in registers: 16 to 32 values a thread, so that every load is 128 bits wide.
        block = triton.next_power_of_2(width)
        _rms_norm_kernel[(tokens,)](
            x, residual, weight, out, x.stride(0), 0 if residual is None else residual.stride(0), eps,
            F=width, BLOCK_F=block, num_warps=min(max(block // 1024, 1), 16), enable_fp_fusion=True,
        )
    return out
