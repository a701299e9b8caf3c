"""Every operation of `ops.Ops`, in Triton. Importing this module is the only thing in the project that needs Triton."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import decode_attention
from kernels.compress import compress, decompress
from kernels.linear import quantized_linear
from kernels.ops import Weight
from kernels.prefill import prefill_attention
from kernels.recall import recall
from kernels.score import score
from kernels.tokens import add_rms_norm, rms_norm, rope_store, silu_mul

__all__ = [
    "add_rms_norm", "compress", "decode_attention", "decompress", "linear", "linear_float32", "pack_linear",
    "prefill_attention", "recall", "rms_norm", "rope_store", "score", "silu_mul",
]


def pack_linear(weight: Weight) -> Weight:
    """The weight [out, in] as it is: the vendor's matrix library behind `linear` reads rows."""
    return weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [T, in] @ weight [out, in] + bias [out] -> [T, out]."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    return quantized_linear(x, weight, bias, x.dtype)


def linear_float32(x: Tensor, weight: Weight) -> Tensor:
    """x [T, in] @ weight [out, in] -> [T, out] float32."""
    if not isinstance(weight, Tensor):
        return quantized_linear(x, weight, None, torch.float32)
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())
