"""The linear maps of `kernels.ops.Ops` in torch, and what quantises their weights.

torch's operators on packed codes are for few rows of bfloat16: with more, or another dtype, the weight is converted
back, some outputs at a time, and multiplied as any other.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import QuantizedWeight, Weight

_FEW_ROWS = 16  # up to which the packed operators are faster than converting the weight
_ELEMENTS = 1 << 22  # of a weight that are in float32 at a time
_ROUNDS = 8  # of fitting a scale and a zero to the codes that they give


class PackedInt4(NamedTuple):
    """A weight of 4 bits as torch's operator reads it: its groups of equal size, and the shorter last one."""

    parts: tuple[tuple[Tensor, Tensor, int], ...]  # codes [out, inputs / 2], scales and zeros [groups, out, 2], group
    half: int  # a byte holds one weight of each of the outputs n and n + half


def cpu_computes_bfloat16() -> bool:
    """Whether torch has oneDNN and this CPU has the instructions with which it multiplies in bfloat16."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linear(weight: Weight) -> Any:
    """bfloat16 on a CPU: in oneDNN's blocked layout, where a matrix-vector product takes half the time, with
    bit-identical results. 4 bits: in that of torch's operator, which has some shapes only. Others as they are."""
    if isinstance(weight, QuantizedWeight):
        return weight if weight.zeros is None else _pack_int4(weight)
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and cpu_computes_bfloat16():
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return weight


def _pack_int4(weight: QuantizedWeight) -> QuantizedWeight | PackedInt4:
    (outputs, inputs), zeros = weight.shape, weight.zeros
    assert zeros is not None
    last = inputs % weight.group
    half = _outputs_apart() if weight.codes.device.type == "cpu" else 0
    if not half or outputs % (2 * half) or last not in (0, 32, 64):
        return weight
    parts = []
    for first, end, group in ((0, inputs - last, weight.group), (inputs - last, inputs, last)):
        if first < end:
            rows = weight.codes[:, first // 2 : end // 2].split(max(_ELEMENTS // inputs // 64, 1) * 64)
            pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
            codes = torch.cat([pack(_unpack_int4(some, group).int(), 1) for some in rows])
            groups = slice(first // weight.group, -(-end // weight.group))
            pairs = torch.stack([weight.scales[:, groups].T, zeros[:, groups].T], -1).contiguous()
            parts.append((codes, pairs, group))
    return PackedInt4(tuple(parts), half)


def _outputs_apart() -> int:
    """`PackedInt4.half` on this CPU, by what a byte is packed of; 0 for a layout that is not known."""
    codes = (torch.arange(64, dtype=torch.int32) // 4)[:, None].expand(64, 2).contiguous()
    return int(torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1).flatten()[0]) // 16 * 4


def linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    out: Tensor
    if isinstance(weight, Tensor):
        if weight.is_mkldnn:
            out = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
            return out
        return F.linear(x, weight, bias)
    few = x.device.type == "cpu" and x.dtype == torch.bfloat16 and len(x) <= _FEW_ROWS
    if few and isinstance(weight, PackedInt4):
        (codes, pairs, group), *last = weight.parts
        whole = 2 * codes.shape[1]
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(x[:, :whole].contiguous(), codes, group, pairs)
        for codes, pairs, group in last:
            out += torch.ops.aten._weight_int4pack_mm_for_cpu(x[:, whole:].contiguous(), codes, group, pairs)
    # torch's operator reads past the end of other shapes.
    elif few and weight.zeros is None and weight.shape[0] % 4 == 0 and weight.shape[1] % 32 == 0:
        out = torch.ops.aten._weight_int8pack_mm(x.contiguous(), weight.codes, weight.scales.flatten())
    else:
        out = _converted(x, weight, x.dtype)
    return out if bias is None else out.add_(bias)


def linear_float32(x: Tensor, weight: Any) -> Tensor:
    if not isinstance(weight, Tensor):
        return _converted(x, weight, torch.float32)
    if not weight.is_mkldnn:
        return F.linear(x.float(), weight.float())
    # oneDNN sums in float32 and rounds once: what the rounding took away is the product less its own rounded value.
    rounded = linear(x, weight)
    rest: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, -rounded, weight, None, "add")
    return rounded.float() + rest.float()


def _converted(x: Tensor, weight: QuantizedWeight | PackedInt4, dtype: torch.dtype) -> Tensor:
    """x @ weight in `dtype`, as many outputs at a time as make `_ELEMENTS`. On a CPU in float32, unless it multiplies
    in bfloat16: what it does not compute in takes it several times as long."""
    native = x.device.type != "cpu" or (dtype == torch.bfloat16 and cpu_computes_bfloat16())
    kind = dtype if native else torch.float32
    rows = x.to(kind)
    step = max(_ELEMENTS // x.shape[1] // 64, 1) * 64
    if isinstance(weight, PackedInt4):
        outputs = weight.parts[0][0].shape[0]
        tiles = (_rows_of(weight, first, min(first + step, outputs)) for first in range(0, outputs, step))
    else:
        parts = zip(*(part.split(step) for part in weight[:3] if part is not None), strict=True)
        tiles = (dequantize(weight_of(list(part), weight.group)) for part in parts)
    return torch.cat([F.linear(rows, tile.to(kind)) for tile in tiles], 1).to(dtype)


def _rows_of(weight: PackedInt4, first: int, end: int) -> Tensor:
    """The weights [end - first, in] float32 of some outputs, whole blocks of them."""
    parts = []
    for codes, pairs, group in weight.parts:
        blocks = codes.view(-1, 2 * codes.shape[1], weight.half)[first // (2 * weight.half) : end // (2 * weight.half)]
        values = torch.cat([blocks & 15, blocks >> 4], -1).transpose(0, 1).reshape(-1, group, end - first).float()
        scales, zeros = pairs[:, None, first:end].float().unbind(-1)
        parts.append(torch.addcmul(zeros, values.sub_(8), scales).flatten(0, 1))
    return torch.cat(parts).T


def dequantize(weight: QuantizedWeight) -> Tensor:
    """[out, in] float32."""
    if weight.zeros is None:
        return weight.codes.float().mul_(weight.scales)
    codes = _unpack_int4(weight.codes, weight.group).float().sub_(8)
    scales, zeros = (by_input(part, weight.group, codes) for part in (weight.scales, weight.zeros))
    return torch.addcmul(zeros, codes, scales)


def _unpack_int4(codes: Tensor, group: int) -> Tensor:
    """[out, in / 2] uint8 -> the codes [out, in] uint8."""
    parts = [torch.cat([part & 15, part >> 4], -1).flatten(1) for part in _groups(codes, group // 2)]
    return torch.cat(parts, 1)


def quantize(weight: Tensor, bits: int, group: int) -> QuantizedWeight:
    """A weight [out, in] of finite floats, on its device. group: of 4 bits; the inputs are then even in number."""
    slices = weight.split(max(_ELEMENTS // weight.shape[1], 1))
    parts = zip(*(_quantize(rows.float(), bits, group) for rows in slices), strict=True)
    return weight_of([torch.cat(part) for part in parts], weight.shape[1] if bits == 8 else group)


def weight_of(parts: list[Tensor], group: int) -> QuantizedWeight:
    """Of codes, scales and, of 4 bits, zeros."""
    codes, scales, *zeros = parts
    return QuantizedWeight(codes, scales, zeros[0] if zeros else None, group)


def _quantize(weight: Tensor, bits: int, group: int) -> list[Tensor]:
    """Codes, scales, and of 4 bits zeros, of rows in float32."""
    if bits == 8:
        scales = (weight.abs().amax(1, keepdim=True) / 127).clamp_(2.0**-100)
        scales = (scales.view(torch.int32) + 0xFFFF >> 16 << 16).view(torch.float32)  # to bfloat16, never down
        return [weight.div(scales).round_().to(torch.int8), scales.bfloat16()]
    scales, zeros = fit(weight, group)
    codes = (weight - by_input(zeros, group, weight)).div_(by_input(scales, group, weight))
    return [pack_int4(codes.round_().clamp_(-8, 7), group), scales, zeros]


def pack_int4(codes: Tensor, group: int) -> Tensor:
    """Codes from -8 to 7, floats [out, in] -> [out, in / 2] uint8, as a QuantizedWeight has them."""
    halves = [part.add(8).to(torch.uint8).chunk(2, -1) for part in _groups(codes, group)]
    return torch.cat([(low | high << 4).flatten(1) for low, high in halves], 1)


def by_input(values: Tensor, group: int, like: Tensor) -> Tensor:
    """Scales or zeros [out, groups] -> [out, in] float32, the shape of `like`."""
    return values.float().repeat_interleave(group, 1)[:, : like.shape[1]]


def _groups(x: Tensor, group: int) -> list[Tensor]:
    """[out, in] -> the whole groups [out, groups, group], and what is left of the inputs [out, 1, n]."""
    whole = x.shape[1] - x.shape[1] % group
    return [part for part in (x[:, :whole].unflatten(1, (-1, group)), x[:, None, whole:]) if part.numel()]


def fit(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Scales and zeros [out, groups] bfloat16 of little squared error: those of the range, then in turns the codes
    that are nearest, and the line through what has these codes."""
    found = []
    for part in _groups(weight, group):
        low, high = part.aminmax(dim=-1, keepdim=True)
        scale = ((high - low) / 15).clamp_(2.0**-100)
        zero, mean = low + 8 * scale, part.mean(-1, keepdim=True)
        for _ in range(_ROUNDS):
            codes = ((part - zero) / scale).round_().clamp_(-8, 7)
            middle = codes.mean(-1, keepdim=True)
            codes -= middle
            spread, shared = (codes * codes).sum(-1, keepdim=True), (codes * part).sum(-1, keepdim=True)
            scale = torch.where(spread > 0, shared / spread, scale).clamp_(2.0**-100)
            zero = mean - scale * middle
        found.append((scale.squeeze(-1).bfloat16(), zero.squeeze(-1).bfloat16()))
    scales, zeros = zip(*found, strict=True)
    return torch.cat(scales, 1), torch.cat(zeros, 1)
