"""Every operation of `ops.Ops`, in Triton. Importing this module is the only thing in the project that needs Triton."""

from torch import Tensor
from torch.nn.functional import linear

from kernels.activation import silu_mul
from kernels.attention import decode_attention, prefill_attention
from kernels.norm import add_rms_norm, rms_norm
from kernels.rope import rope_store

__all__ = [
    "add_rms_norm",
    "decode_attention",
    "linear",
    "pack_linear",
    "prefill_attention",
    "rms_norm",
    "rope_store",
    "silu_mul",
]


def pack_linear(weight: Tensor) -> Tensor:
    """The weight [out, in] as it is: the vendor's matrix library behind `linear` reads rows."""
    return weight
