"""Compression as `kernels.reference` does it, and the arithmetic of scales and means: `kernels.ops` has the layout."""

import functools
import math

import torch
from torch import Tensor

from kernels.ops import CLIPS, MEAN_EXPONENT, hadamard, min_exponent

_LARGEST = 2.0**14  # of an element that is compressed


def compress(x: Tensor, bits: int, is_key: bool) -> tuple[Tensor, Tensor]:
    steps, middle = (1 << bits) - 1, 1 << bits - 1
    rotated = rotate(x.float().nan_to_num(0.0).clamp_(-_LARGEST, _LARGEST))
    if is_key:
        mean = rotated.mean(1)
        means = _encode(mean.abs(), 3, MEAN_EXPONENT, 127) | (mean < 0).byte() << 7
        rotated -= decode_means(means)[:, None]
        high = rotated.abs().amax(2, keepdim=True)
        low = -high
    else:
        low, high = rotated.amin(2, keepdim=True), rotated.amax(2, keepdim=True)
    least = torch.full_like(low, math.inf)
    codes, scales = (torch.empty_like(like, dtype=torch.uint8) for like in (rotated, low))
    zeros = torch.empty_like(low)
    for clip in CLIPS if bits < 4 else CLIPS[:1]:
        half = (high - low) * (clip / 2)
        wanted = torch.maximum(half * (2 / steps), (high + low).abs() / 240)  # so that zeros stay within an int8
        # To the nearest scale; at 8 bits to the next one up, where cutting the ends costs more than a wider step.
        scale = _encode(wanted, 4, min_exponent(bits), 255, up=bits == 8)
        inverse = 1 / decode(scale, 4, min_exponent(bits))
        zero = torch.full_like(low, -steps / 2)
        if not is_key:
            zero = ((high + low) / 2 * inverse - steps / 2).round_().clamp_(-128 - middle, 127 - middle)
        trial = (rotated * inverse - zero).round_().clamp_(0, steps)
        error = ((trial + zero) / inverse - rotated).square_().sum(2, keepdim=True)
        better = error < least
        pairs = (error, least), (trial.to(torch.uint8), codes), (scale, scales), (zero, zeros)
        least, codes, scales, zeros = (torch.where(better, new, old) for new, old in pairs)
    second = means if is_key else (zeros[..., 0] + middle).to(torch.int8).view(torch.uint8)
    return _pack(codes, bits), torch.cat([scales[..., 0], second], dim=1)


def rotate(x: Tensor) -> Tensor:
    """x [..., D] times the Hadamard matrix of the module `ops`, in x's dtype; its own inverse."""
    head_dim = x.shape[-1]
    size = head_dim & -head_dim
    matrix = _rotation(size, x.dtype, x.device)
    return (x.unflatten(-1, (-1, size)) @ matrix).flatten(-2) if size < head_dim else x @ matrix


@functools.lru_cache
def _rotation(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (hadamard(size) / math.sqrt(size)).to(dtype).to(device)


def _encode(x: Tensor, mantissa: int, exponent: int, largest: int, up: bool = False) -> Tensor:
    """The nearest codes (or the next ones up), uint8, of float32 from 0 up; code 0 is 2^exponent."""
    cut = 23 - mantissa
    rounding = (1 << (cut if up else cut - 1)) - 1
    codes = (x.view(torch.int32) + rounding >> cut) - (exponent + 127 << mantissa)
    return codes.clamp_(0, largest).to(torch.uint8)


def decode(codes: Tensor, mantissa: int, exponent: int) -> Tensor:
    return (codes.int() << 23 - mantissa).add_(exponent + 127 << 23).view(torch.float32)


def decode_means(codes: Tensor) -> Tensor:
    """float32 of codes of means."""
    size = codes & 127
    return decode(size, 3, MEAN_EXPONENT).masked_fill_(size == 0, 0).copysign_(codes.view(torch.int8))


def _pack(codes: Tensor, bits: int) -> Tensor:
    """codes [N, page_size, D] below 2^bits -> bytes [N, page_size * D * bits / 8]."""
    if bits == 3:
        return torch.cat([_pack(codes & 3, 2), _pack(codes >> 2, 1)], dim=1)
    parts = (part << i * bits for i, part in enumerate(codes.chunk(8 // bits, dim=-1)))
    return functools.reduce(torch.bitwise_or, parts).flatten(1)
