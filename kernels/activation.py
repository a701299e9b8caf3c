"""SiLU(gate) * up, the activation of Llama's feed-forward block."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import FLOATS, check

BLOCK = 1024  # columns a program: 8 values a thread with 4 warps, one 128-bit access in 16-bit types


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
    _silu_mul_kernel[(tokens, triton.cdiv(width, BLOCK))](
        gate, up, out, gate.stride(0), up.stride(0), F=width, BLOCK_F=BLOCK, num_warps=4, enable_fp_fusion=True
    )
    return out
