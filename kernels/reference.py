"""Every operation of `kernels.ops.Ops` in torch: the specification of the Triton kernels, and the CPU backend.

Never imports triton. Runs on any device. Attention reads a sequence as its pieces (runs of consecutive slots) instead
of gathering pages: on a CPU a gather costs as much again as the attention itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import CLIPS, MEAN_EXPONENT, AttentionPlan, LayerCache, WarmPages, min_exponent

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
    out = torch.empty_like(q)
    starts = plan.query_start[plan.num_decodes :].tolist()
    for b, (begin, end) in enumerate(pairwise(starts), plan.num_decodes):
        rows = slice(begin - starts[0], end - starts[0])
        out[rows] = _attend_chunk(q[rows], cache, plan, b, scale)
    return out


def _attend_chunk(q: Tensor, cache: LayerCache, plan: AttentionPlan, b: int, scale: float) -> Tensor:
    """One chunk of n queries, the newest exact tokens of sequence b, over that sequence. q [n, Hq, D]. Each piece of
    the past is attended as a whole and the parts are merged by log-sum-exp."""
    n, num_heads, head_dim = q.shape
    keys, values = _tokens(cache.k), _tokens(cache.v)
    num_kv_heads, pieces = keys.shape[0], plan.pieces[b]
    # The query heads of a group stand in the batch dimension, over which K and V are expanded without a copy.
    queries = q.view(n, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(2, 1, 0, 3)
    parts = []
    if plan.warm:
        rotated = rotate(queries)
        parts = [_flash(rotated, k.to(q.dtype), v.to(q.dtype), scale, False) for k, v in _warm_chunks(cache, plan, b)]
        parts = [(rotate(out), lse) for out, lse in parts]
    past = sum(count for _, count in pieces) - n
    for start, count in pieces:
        old = min(count, past)
        past -= old
        if old:
            parts.append(_flash(queries, keys[:, start : start + old], values[:, start : start + old], scale, False))
    new_keys, new_values = (torch.cat(_newest(x, pieces, n), dim=1) for x in (keys, values))
    parts.append(_flash(queries, new_keys, new_values, scale, True))
    return _merge(parts).permute(2, 1, 0, 3).reshape(n, num_heads, head_dim)


def _warm_chunks(cache: LayerCache, plan: AttentionPlan, b: int) -> Iterator[tuple[Tensor, Tensor]]:
    """K and V [Hkv, tokens, D] float32 of the compressed pages of sequence b, rotated, a few pages at a time, in the
    order of their columns."""
    num_heads, head_dim = cache.k.shape[0], cache.k.shape[3]
    for warm, pages in _page_chunks(cache, plan, b):
        k = _decompress_rotated(*_gather(cache.units_k, warm, b, pages), warm.bits, True, cache.k)
        v = _decompress_rotated(*_gather(cache.units_v, warm, b, pages), warm.bits, False, cache.v)
        yield k.view(num_heads, -1, head_dim), v.view(num_heads, -1, head_dim)


def _page_chunks(cache: LayerCache, plan: AttentionPlan, b: int) -> Iterator[tuple[WarmPages, slice]]:
    """The compressed pages of sequence b, by format and a few at a time."""
    num_heads, _, page_size, head_dim = cache.k.shape
    step = max(1, _CHUNK_ELEMENTS // (num_heads * page_size * head_dim))
    for warm in plan.warm:
        count = int(warm.counts[b])
        for first in range(0, count, step):
            yield warm, slice(first, min(first + step, count))


def _warm_scores(query: Tensor, cache: LayerCache, plan: AttentionPlan, b: int) -> list[Tensor]:
    """q.k [Hkv, G, tokens] of the compressed pages; query [Hkv, G, D] float32, rotated. Scales and means stay out of
    the elements: they are applied to the products."""
    num_heads, _, page_size, head_dim = cache.k.shape
    total = query.sum(2, keepdim=True)
    scores = []
    for warm, pages in _page_chunks(cache, plan, b):
        codes, records = _gather(cache.units_k, warm, b, pages)
        values = _values(codes, warm.bits, page_size).view(num_heads, -1, head_dim)
        scales = _scales(records[:, :page_size], warm.bits).view(num_heads, 1, -1)
        means = _means(records[:, page_size : page_size + head_dim]).view(num_heads, -1, head_dim)
        products = torch.baddbmm(total, query, values.mT, beta=-((1 << warm.bits) - 1) / 2).mul_(scales)
        scores.append(products.add_(torch.bmm(query, means.mT).repeat_interleave(page_size, 2)))
    return scores


def _warm_output(weights: Tensor, cache: LayerCache, plan: AttentionPlan, b: int) -> Tensor:
    """Sum of the compressed pages' V [Hkv, G, D] by weights [Hkv, G, tokens], rotated."""
    num_heads, _, page_size, head_dim = cache.v.shape
    output = weights.new_zeros(*weights.shape[:2], head_dim)
    seen = 0
    for warm, pages in _page_chunks(cache, plan, b):
        codes, records = _gather(cache.units_v, warm, b, pages)
        values = _values(codes, warm.bits, page_size).view(num_heads, -1, head_dim)
        scaled = weights[..., seen : seen + values.shape[1]] * _scales(records[:, :page_size], warm.bits).view(
            num_heads, 1, -1
        )
        zeros = records[:, page_size : 2 * page_size].view(torch.int8).float().view(num_heads, -1, 1)
        offset = torch.bmm(scaled, zeros.sub_(1 << warm.bits - 1))
        output += torch.baddbmm(offset, scaled, values)
        seen += values.shape[1]
    return output


def _gather(units: Tensor, warm: WarmPages, b: int, pages: slice) -> tuple[Tensor, Tensor]:
    """(codes, records) [Hkv * pages, bytes] of some of the compressed pages of sequence b; units of one plane."""
    low_bits = 2 if warm.high is not None else warm.bits
    codes = _rows(units, low_bits * units.shape[2], warm.codes[b, pages])
    if warm.high is not None:
        codes = torch.cat([codes, _rows(units, units.shape[2], warm.high[b, pages])], dim=-1)
    records = _rows(units, warm.record_bytes, warm.records[b, pages])
    return codes.flatten(0, 1), records.flatten(0, 1)


def _rows(units: Tensor, row_bytes: int, index: Tensor) -> Tensor:
    """[Hkv, len(index), row_bytes]: the plane read as rows of so many bytes."""
    return units.view(len(units), -1, row_bytes).index_select(1, index)


def compress(x: Tensor, bits: int, is_key: bool) -> tuple[Tensor, Tensor]:
    steps = (1 << bits) - 1
    rotated = rotate(x.float().nan_to_num(0.0).clamp_(-_LARGEST, _LARGEST))
    if is_key:
        means = _mean_codes(rotated.mean(1))
        rotated -= _means(means)[:, None]
        high = rotated.abs().amax(2)
        low = -high
    else:
        low, high = rotated.amin(2), rotated.amax(2)
    best = torch.full_like(low, math.inf)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales, zeros = torch.empty_like(codes[..., 0]), torch.empty_like(low)
    for clip in CLIPS if bits < 4 else CLIPS[:1]:
        half = (high - low) * (clip / 2)
        wanted = torch.maximum(half * (2 / steps), (high + low).abs() / 240)  # so that zeros stay within an int8
        # To the nearest scale; at 8 bits to the next one up, where cutting the ends costs more than a wider step.
        scale_codes = (wanted.view(torch.int32) + (0x7FFFF if bits == 8 else 0x3FFFF) >> 19) - (
            min_exponent(bits) + 127
        ) * 16
        scale_codes = scale_codes.clamp_(0, 255).to(torch.uint8)
        inverse = 1 / _scales(scale_codes, bits)
        offset = torch.full_like(low, -steps / 2)
        if not is_key:
            least = -128 - (1 << bits - 1)  # zeros are int8
            offset = ((high + low) / 2 * inverse - steps / 2).round_().clamp_(least, least + 255)
        trial = (rotated * inverse[..., None] - offset[..., None]).round_().clamp_(0, steps)
        error = ((trial + offset[..., None]) / inverse[..., None] - rotated).square_().sum(2)
        better = error < best
        best = torch.where(better, error, best)
        codes = torch.where(better[..., None], trial.to(torch.uint8), codes)
        scales = torch.where(better, scale_codes, scales)
        zeros = torch.where(better, offset, zeros)
    second = means if is_key else (zeros + (1 << bits - 1)).to(torch.int8).view(torch.uint8)
    planes = [_pack(codes & 3, 2), _pack(codes >> 2, 1)] if bits == 3 else [_pack(codes, bits)]
    return torch.cat(planes, dim=1), torch.cat([scales, second], dim=1)


def decompress(codes: Tensor, records: Tensor, bits: int, is_key: bool, like: Tensor) -> Tensor:
    return rotate(_decompress_rotated(codes, records, bits, is_key, like)).to(like.dtype)


def _decompress_rotated(codes: Tensor, records: Tensor, bits: int, is_key: bool, like: Tensor) -> Tensor:
    """The pages in the rotated basis, [N, page_size, D] float32."""
    page_size, head_dim = like.shape[-2:]
    values = _values(codes, bits, page_size)
    scales = _scales(records[:, :page_size], bits)[..., None]
    second = records[:, page_size : page_size + (head_dim if is_key else page_size)]
    if is_key:
        return values.sub_(((1 << bits) - 1) / 2).mul_(scales).add_(_means(second)[:, None])
    zeros = second.view(torch.int8).float() - (1 << bits - 1)
    return values.add_(zeros[..., None]).mul_(scales)


def _values(codes: Tensor, bits: int, page_size: int) -> Tensor:
    """Code runs as numbers, [N, page_size, D] float32."""
    if bits == 3:
        low, high = codes.split([codes.shape[1] * 2 // 3, codes.shape[1] // 3], dim=1)
        return _unpack(low, 2, page_size).add_(_unpack(high, 1, page_size), alpha=4)
    return _unpack(codes, bits, page_size)


def rotate(x: Tensor) -> Tensor:
    """x [..., D] times the Hadamard matrix of the module `ops`, in x's dtype; its own inverse."""
    head_dim = x.shape[-1]
    size = head_dim & -head_dim
    matrix = _hadamard(size, x.dtype, x.device)
    return (x.unflatten(-1, (-1, size)) @ matrix).flatten(-2) if size < head_dim else x @ matrix


@functools.lru_cache
def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / math.sqrt(size)).to(dtype).to(device)


def _scales(codes: Tensor, bits: int) -> Tensor:
    """float32 of scale codes."""
    return (codes.int() << 19).add_(min_exponent(bits) + 127 << 23).view(torch.float32)


def _mean_codes(means: Tensor) -> Tensor:
    """float32 means -> their codes, rounded to the nearest."""
    size = (means.abs().view(torch.int32) + 0x7FFFF >> 20) - (MEAN_EXPONENT + 127) * 8
    return (size.clamp_(0, 127) | (means < 0).int() << 7).to(torch.uint8)


def _means(codes: Tensor) -> Tensor:
    """float32 of codes of means."""
    size = codes & 127
    values = (size.int() << 20).add_(MEAN_EXPONENT + 127 << 23).view(torch.float32)
    return torch.where(codes > 127, -values, values).masked_fill_(size == 0, 0)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """codes [N, page_size, D] below 2^bits -> bytes [N, page_size * D * bits / 8]."""
    first, *others = codes.chunk(8 // bits, dim=-1)
    packed = first.clone()
    for i, part in enumerate(others, 1):
        packed |= part << i * bits
    return packed.flatten(1)


def _unpack(packed: Tensor, bits: int, page_size: int) -> Tensor:
    """The inverse of `_pack`, as float32."""
    packed = packed.view(len(packed), page_size, -1)
    if bits == 8:
        return packed.float()
    shifted = [packed >> i if i else packed for i in range(0, 8, bits)]
    return torch.cat(
        [part & (1 << bits) - 1 if i < len(shifted) - 1 else part for i, part in enumerate(shifted)], -1
    ).float()


def _newest(x: Tensor, pieces: tuple[tuple[int, int], ...], n: int) -> list[Tensor]:
    """Views of the newest n tokens of a sequence; x [Hkv, slots, D]."""
    views: list[Tensor] = []
    for start, count in reversed(pieces):
        take = min(count, n)
        n -= take
        views.insert(0, x[:, start + count - take : start + count])
        if not n:
            break
    return views


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
    total = torch.stack([lse for _, lse in parts]).logsumexp(0)
    return sum((out.float() * (lse - total).exp()[..., None] for out, lse in parts), start=torch.zeros(())).to(
        parts[0][0].dtype
    )


def decode_attention(
    q: Tensor,
    cache: LayerCache,
    plan: AttentionPlan,
    scale: float,
    logits: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    keys, values = _tokens(cache.k), _tokens(cache.v)
    page_size = cache.k.shape[2]
    queries = (q.float() * scale).view(plan.num_decodes, keys.shape[0], -1, q.shape[-1])
    outputs = []
    for b, (query, pieces) in enumerate(zip(queries, plan.pieces, strict=False)):  # the prefill chunks come after
        parts = [torch.bmm(query, chunk.mT) for piece in pieces for chunk in _float_chunks(keys, piece)]
        if plan.warm:
            parts += _warm_scores(rotate(query), cache, plan, b)
        scores = _cat(parts)
        weights = scores.softmax(-1)
        exact_weights = weights.to(values.dtype)
        parts = []
        seen = 0
        for start, count in pieces:
            parts.append(torch.bmm(exact_weights.narrow(-1, seen, count), values.narrow(1, start, count)))
            seen += count
        if plan.warm:
            parts.append(rotate(_warm_output(weights[..., seen:], cache, plan, b)).to(values.dtype))
        outputs.append(sum(parts[1:], start=parts[0]).view(1, *q.shape[1:]))
        if logits is not None:
            _store_logits(logits[b], scores.flatten(0, 1) * math.log2(math.e), plan, b, page_size)
        if lse is not None:
            lse[b] = scores.logsumexp(-1).flatten() * math.log2(math.e)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _store_logits(logits: Tensor, scores: Tensor, plan: AttentionPlan, b: int, page_size: int) -> None:
    """Put the scores [Hq, tokens], exact tokens first, into their columns."""
    counts = [int(plan.exact_lens[b])] + [int(warm.counts[b]) * page_size for warm in plan.warm]
    widths = [plan.page_table.shape[1]] + [warm.codes.shape[1] for warm in plan.warm]
    column = 0
    for part, width in zip(scores.split(counts, dim=1), widths, strict=True):
        logits[:, column : column + part.shape[1]] = part
        column += width * page_size


def _float_chunks(keys: Tensor, piece: tuple[int, int]) -> list[Tensor]:
    """The piece's keys in float32: with bfloat16 operands torch rounds q.k itself to 8 bits, and is slower. In chunks,
    so that the copies stay small however long the piece is."""
    keys = keys.narrow(1, *piece)
    if keys.dtype == torch.float32:
        return [keys]
    return [chunk.float() for chunk in keys.split(max(1, _CHUNK_ELEMENTS // (keys.shape[0] * keys.shape[2])), dim=1)]


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
