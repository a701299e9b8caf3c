"""Every operation of `ops.Ops`, in Triton. Importing this module is the only thing in the project that needs Triton."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels.activation import silu_mul
from kernels.attention import decode_attention
from kernels.compress import compress, decompress
from kernels.norm import add_rms_norm, rms_norm
from kernels.prefill import prefill_attention
from kernels.recall import recall
from kernels.rope import rope_store
from kernels.score import score

__all__ = [
    "add_rms_norm", "compress", "decode_attention", "decompress", "linear", "linear_float32", "pack_linear",
    "prefill_attention", "recall", "rms_norm", "rope_store", "score", "silu_mul",
]


def pack_linear(weight: Tensor) -> Tensor:
    """The weight [out, in] as it is: the vendor's matrix library behind `linear` reads rows."""
    return weight


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] @ weight [out, in] -> [T, out] float32."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return linear(x.float(), weight.float())
