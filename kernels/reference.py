"""Every operation of `kernels.ops.Ops` in torch: the specification of the Triton kernels, and the CPU backend.

Never imports triton. Runs on any device. Attention reads a sequence as its pieces (runs of consecutive slots) instead
of gathering pages: on a CPU a gather costs as much again as the attention itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import CLIPS, MEAN_EXPONENT, AttentionPlan, LayerCache, hadamard, min_exponent

# Elements of K converted to float32 at a time (8 MiB): more costs memory, less costs a call per chunk.
_CHUNK_ELEMENTS = 1 << 21
_LARGEST = 2.0**14  # of an element that is compressed


def cpu_computes_bfloat16() -> bool:
    """Whether torch has oneDNN and this CPU has the instructions with which it multiplies in bfloat16."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linear(weight: Tensor) -> Tensor:
    """The weight in oneDNN's blocked layout where that is faster: bfloat16 on a CPU, half the time of a plain
    matrix-vector product, with bit-identical results. Other weights as they are."""
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and cpu_computes_bfloat16():
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        return packed
    return weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.is_mkldnn:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    if not weight.is_mkldnn:
        return F.linear(x.float(), weight.float())
    # oneDNN sums in float32 and rounds once: what the rounding took away is the product less its own rounded value.
    rounded = linear(x, weight)
    rest: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, -rounded, weight, None, "add")
    return rounded.float() + rest.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(weight.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(residual.add_(x), weight, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.float(), inplace=gate.dtype != torch.float32).mul_(up).to(gate.dtype)


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
) -> None:
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    q.copy_(_rotate(q, cos, sin))
    _tokens(k_cache).index_copy_(1, slots, _rotate(k, cos, sin).to(k_cache.dtype).transpose(0, 1))
    _tokens(v_cache).index_copy_(1, slots, v.transpose(0, 1))


def _tokens(cache: Tensor) -> Tensor:
    """[Hkv, slots, D], a view. torch refuses where frames do not lie side by side, where `flatten` would copy."""
    return cache.view(cache.shape[0], -1, cache.shape[3])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D] rotated in pairs (i, i + D/2), in float32."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([torch.addcmul(low * cos, high, sin, value=-1), torch.addcmul(high * cos, low, sin)], dim=-1)


def prefill_attention(q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float) -> Tensor:
    lengths = plan.query_start[plan.num_decodes :].diff().tolist()
    chunks = enumerate(q.split(lengths), plan.num_decodes)
    return torch.cat([_attend_chunk(chunk, cache, plan, b, scale) for b, chunk in chunks] or [q])


def _attend_chunk(q: Tensor, cache: LayerCache, plan: AttentionPlan, b: int, scale: float) -> Tensor:
    """One chunk of n queries, the newest exact tokens of sequence b, over that sequence. q [n, Hq, D]. Each piece of
    the past is attended as a whole and the parts are merged by log-sum-exp."""
    keys, values = _tokens(cache.k), _tokens(cache.v)
    # The query heads of a group stand in the batch dimension, over which K and V are expanded without a copy.
    queries = q.view(len(q), len(keys), -1, q.shape[2]).permute(2, 1, 0, 3)
    parts = []
    if plan.warm:
        rotated = rotate(queries)
        pages = (_warm_parts(cache, plan, b, is_key) for is_key in (True, False))
        for (bits, of_k), (_, of_v) in zip(*pages, strict=True):
            k, v = (x.flatten(1, 2).to(q.dtype) for x in (_join(of_k, bits, True), _join(of_v, bits, False)))
            out, lse = _flash(rotated, k, v, scale, False)
            parts.append((rotate(out), lse))
    past = sum(count for _, count in plan.pieces[b]) - len(q)
    newest = []
    for start, count in plan.pieces[b]:
        old, end = start + min(count, past), start + count
        past -= old - start
        if old > start:
            parts.append(_flash(queries, keys[:, start:old], values[:, start:old], scale, False))
        if end > old:
            newest.append(slice(old, end))
    new_keys, new_values = (torch.cat([x[:, piece] for piece in newest], 1) for x in (keys, values))
    parts.append(_flash(queries, new_keys, new_values, scale, True))
    return _merge(parts).permute(2, 1, 0, 3).reshape(q.shape)


def _warm_parts(
    cache: LayerCache, plan: AttentionPlan, b: int, is_key: bool
) -> Iterator[tuple[int, tuple[Tensor, Tensor, Tensor]]]:
    """(bits, `_parts` [Hkv, pages, ...]) of K or V of the compressed pages of sequence b, by format and a few at a
    time, in the order of their columns."""
    units, (num_heads, _, page_size, head_dim) = cache.units_k if is_key else cache.units_v, cache.k.shape
    step = max(1, _CHUNK_ELEMENTS // (num_heads * page_size * head_dim))
    for warm in plan.warm:
        count, low_bits = int(warm.counts[b]), warm.bits if warm.high is None else 2
        for first in range(0, count, step):
            pages = slice(first, min(first + step, count))
            codes = _rows(units, low_bits * units.shape[2], warm.codes[b, pages])
            if warm.high is not None:
                codes = torch.cat([codes, _rows(units, units.shape[2], warm.high[b, pages])], dim=-1)
            records = _rows(units, warm.record_bytes, warm.records[b, pages])
            yield warm.bits, _parts(codes, records, warm.bits, is_key, cache.k)


def _rows(units: Tensor, row_bytes: int, index: Tensor) -> Tensor:
    """[Hkv, len(index), row_bytes]: the plane read as rows of so many bytes."""
    return units.view(len(units), -1, row_bytes).index_select(1, index)


def _warm_scores(query: Tensor, cache: LayerCache, plan: AttentionPlan, b: int) -> list[Tensor]:
    """q.k [Hkv, G, tokens] of the compressed pages; query [Hkv, G, D] float32, rotated. Scales and means stay out of
    the elements: they are applied to the products."""
    total = query.sum(2, keepdim=True)
    scores = []
    for bits, parts in _warm_parts(cache, plan, b, True):
        values, scales, means = (part.flatten(1, 2).mT for part in parts)
        products = torch.baddbmm(total, query, values, beta=-_middle(bits)).mul_(scales)
        scores.append(products.add_(torch.bmm(query, means).repeat_interleave(cache.k.shape[2], 2)))
    return scores


def _warm_output(weights: Tensor, cache: LayerCache, plan: AttentionPlan, b: int) -> Tensor:
    """Sum of the compressed pages' V [Hkv, G, D] by weights [Hkv, G, tokens], rotated."""
    output = weights.new_zeros(*weights.shape[:2], cache.v.shape[3])
    for _, parts in _warm_parts(cache, plan, b, False):
        values, scales, zeros = (part.flatten(1, 2) for part in parts)
        tokens = values.shape[1]
        scaled, weights = weights[..., :tokens] * scales.mT, weights[..., tokens:]
        output += torch.baddbmm(torch.bmm(scaled, zeros), scaled, values)
    return output


def compress(x: Tensor, bits: int, is_key: bool) -> tuple[Tensor, Tensor]:
    steps, middle = (1 << bits) - 1, 1 << bits - 1
    rotated = rotate(x.float().nan_to_num(0.0).clamp_(-_LARGEST, _LARGEST))
    if is_key:
        mean = rotated.mean(1)
        means = _encode(mean.abs(), 3, MEAN_EXPONENT, 127) | (mean < 0).byte() << 7
        rotated -= _means(means)[:, None]
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
        inverse = 1 / _decode(scale, 4, min_exponent(bits))
        zero = torch.full_like(low, -steps / 2)
        if not is_key:
            zero = ((high + low) / 2 * inverse - steps / 2).round_().clamp_(-128 - middle, 127 - middle)
        trial = (rotated * inverse - zero).round_().clamp_(0, steps)
        error = ((trial + zero) / inverse - rotated).square_().sum(2, keepdim=True)
        better = error < least
        least, codes, scales, zeros = (
            torch.where(better, new, old)
            for new, old in ((error, least), (trial.to(torch.uint8), codes), (scale, scales), (zero, zeros))
        )
    second = means if is_key else (zeros[..., 0] + middle).to(torch.int8).view(torch.uint8)
    return _pack(codes, bits), torch.cat([scales[..., 0], second], dim=1)


def decompress(codes: Tensor, records: Tensor, bits: int, is_key: bool, like: Tensor) -> Tensor:
    return rotate(_join(_parts(codes, records, bits, is_key, like), bits, is_key)).to(like.dtype)


def _parts(codes: Tensor, records: Tensor, bits: int, is_key: bool, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What pages [..., bytes] are made of, in float32: codes [..., page_size, D], scales [..., page_size, 1], and means
    [..., 1, D] or what is to be added to the codes [..., page_size, 1]."""
    page_size, head_dim = like.shape[-2:]
    scales = _decode(records[..., :page_size, None], 4, min_exponent(bits))
    if is_key:
        second = _means(records[..., None, page_size : page_size + head_dim])
    else:
        zeros = records[..., page_size : 2 * page_size, None].view(torch.int8)
        second = zeros.float().sub_(1 << bits - 1)
    return _unpack(codes, bits, page_size), scales, second


def _join(parts: tuple[Tensor, Tensor, Tensor], bits: int, is_key: bool) -> Tensor:
    """The pages in the rotated basis [..., page_size, D], in the memory of the codes."""
    values, scales, second = parts
    if is_key:
        return values.sub_(_middle(bits)).mul_(scales).add_(second)
    return values.add_(second).mul_(scales)


def _middle(bits: int) -> float:
    """Of the codes of K."""
    return ((1 << bits) - 1) / 2


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


def _decode(codes: Tensor, mantissa: int, exponent: int) -> Tensor:
    return (codes.int() << 23 - mantissa).add_(exponent + 127 << 23).view(torch.float32)


def _means(codes: Tensor) -> Tensor:
    """float32 of codes of means."""
    size = codes & 127
    return _decode(size, 3, MEAN_EXPONENT).masked_fill_(size == 0, 0).copysign_(codes.view(torch.int8))


def _pack(codes: Tensor, bits: int) -> Tensor:
    """codes [N, page_size, D] below 2^bits -> bytes [N, page_size * D * bits / 8]."""
    if bits == 3:
        return torch.cat([_pack(codes & 3, 2), _pack(codes >> 2, 1)], dim=1)
    parts = (part << i * bits for i, part in enumerate(codes.chunk(8 // bits, dim=-1)))
    return functools.reduce(torch.bitwise_or, parts).flatten(1)


def _unpack(packed: Tensor, bits: int, page_size: int) -> Tensor:
    """The inverse of `_pack`, as float32."""
    if bits == 3:
        low, high = packed.tensor_split([packed.shape[-1] // 3 * 2], dim=-1)
        return _unpack(low, 2, page_size).add_(_unpack(high, 1, page_size), alpha=4)
    packed = packed.view(*packed.shape[:-1], page_size, -1)
    if bits == 8:
        return packed.float()
    parts = [packed >> i if i else packed for i in range(0, 8, bits)]
    return torch.cat([*(part & (1 << bits) - 1 for part in parts[:-1]), parts[-1]], dim=-1).float()


def _flash(queries: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(output [G, Hkv, n, D], log-sum-exp [G, Hkv, n]) of torch's own attention; queries [G, Hkv, n, D]."""
    groups = queries.shape[0]
    keys, values = (x.expand(groups, -1, -1, -1) for x in (keys, values))
    if queries.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, causal, scale=scale
        )
        return out, lse
    scores = (queries.float() @ keys.float().transpose(-1, -2)) * scale
    if causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1).to(values.dtype) @ values, scores.logsumexp(-1)


def _merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention over the union of the parts' keys, each part given by its output and log-sum-exp."""
    if len(parts) == 1:
        return parts[0][0]
    lses = torch.stack([lse for _, lse in parts])
    shares = (lses - lses.logsumexp(0)).exp()[..., None]
    total = sum((out * share for (out, _), share in zip(parts, shares, strict=True)), start=torch.zeros(()))
    return total.to(parts[0][0].dtype)


def decode_attention(
    q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float, logits: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    keys, values = _tokens(cache.k), _tokens(cache.v)
    step = max(1, _CHUNK_ELEMENTS // (keys.shape[0] * keys.shape[2]))
    queries = (q.float() * scale).view(len(q), len(keys), -1, q.shape[2])
    outputs = []
    for b, (query, pieces) in enumerate(zip(queries, plan.pieces, strict=False)):  # the prefill chunks come after
        # In float32: with bfloat16 operands torch rounds q.k itself to 8 bits, and is slower. In chunks, so that the
        # copies stay small however long a piece is.
        parts = [
            torch.bmm(query, keys.narrow(1, at, min(step, start + count - at)).float().mT)
            for start, count in pieces
            for at in range(start, start + count, step)
        ]
        if plan.warm:
            parts += _warm_scores(rotate(query), cache, plan, b)
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        weights = scores.softmax(-1)
        exact_weights = weights.to(values.dtype)
        seen, parts = 0, []
        for start, count in pieces:
            parts.append(torch.bmm(exact_weights.narrow(-1, seen, count), values.narrow(1, start, count)))
            seen += count
        if plan.warm:
            parts.append(rotate(_warm_output(weights[..., seen:], cache, plan, b)).to(values.dtype))
        outputs.append(sum(parts[1:], start=parts[0]).view(1, *q.shape[1:]))
        if logits is not None:
            _store_logits(logits[b], scores.flatten(0, 1) * math.log2(math.e), plan, b, cache.k.shape[2])
        if lse is not None:
            lse[b] = scores.logsumexp(-1).flatten() * math.log2(math.e)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _store_logits(logits: Tensor, scores: Tensor, plan: AttentionPlan, b: int, page_size: int) -> None:
    """Put the scores [Hq, tokens], exact tokens first, into their columns."""
    counts = [int(plan.exact_lens[b]), *(int(warm.counts[b]) * page_size for warm in plan.warm)]
    widths = [plan.page_table.shape[1], *(warm.codes.shape[1] for warm in plan.warm)]
    column = 0
    for part, width in zip(scores.split(counts, dim=1), widths, strict=True):
        logits[:, column : column + part.shape[1]] = part
        column += width * page_size
