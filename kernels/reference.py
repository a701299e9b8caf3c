"""Every operation of `kernels.ops.Ops` in torch: the specification of the Triton kernels, and the CPU backend.

Never imports triton. Runs on any device. Attention reads a sequence as its pieces (runs of consecutive slots) instead
of gathering pages: on a CPU a gather costs as much again as the attention itself.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import NUM_FEATURES, SCORE_HIDDEN, SPREAD, AttentionPlan, LayerCache, min_exponent
from kernels.reference_compress import compress as compress
from kernels.reference_compress import decode, decode_means, rotate
from kernels.reference_linear import cpu_computes_bfloat16 as cpu_computes_bfloat16
from kernels.reference_linear import linear as linear
from kernels.reference_linear import linear_float32 as linear_float32
from kernels.reference_linear import pack_linear as pack_linear

# Elements of K converted to float32 at a time (8 MiB): more costs memory, less costs a call per chunk.
_CHUNK_ELEMENTS = 1 << 21


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(weight.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(residual.add_(x), weight, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.float(), inplace=gate.dtype != torch.float32).mul_(up).to(gate.dtype)


def score(features: Tensor, ages: Tensor, weights: Tensor) -> Tensor:
    known, away = features.nan_to_num(0.0).clamp(0, 1e6), -ages * weights[3]
    decay, width = away.exp(), NUM_FEATURES + 2
    inputs = torch.cat([known.log1p(), decay[:, None], (away / 8).exp()[:, None]], 1)
    first, bias, second, last = weights[4:].split([SCORE_HIDDEN * width, SCORE_HIDDEN, SCORE_HIDDEN, 1])
    relevance = torch.sigmoid(F.silu(F.linear(inputs, first.view(-1, width), bias)) @ second + last)
    return torch.stack([known[:, 1], decay, relevance], 1) @ weights[:3]


def rope_store(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, slots: Tensor, k_cache: Tensor,
               v_cache: Tensor) -> None:
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


def prefill_attention(q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float,
                      lse: Tensor | None = None) -> Tensor:
    lengths = plan.query_start[plan.num_decodes :].diff().tolist()
    chunks = enumerate(q.split(lengths), plan.num_decodes)
    parts = [_attend_chunk(chunk, cache, plan, b, scale) for b, chunk in chunks]
    if lse is not None and parts:
        torch.cat([sums for _, sums in parts], out=lse)
    return torch.cat([out for out, _ in parts] or [q])


def _attend_chunk(q: Tensor, cache: LayerCache, plan: AttentionPlan, b: int, scale: float) -> tuple[Tensor, Tensor]:
    """One chunk of n queries, the newest exact tokens of sequence b, over that sequence, and its base-2 log-sum-exp
    [n, Hq]. q [n, Hq, D]. Each piece of the past is attended as a whole and the parts are merged by log-sum-exp."""
    keys, values = _tokens(cache.k), _tokens(cache.v)
    # The query heads of a group stand in the batch dimension, over which K and V are expanded without a copy.
    queries = q.view(len(q), len(keys), -1, q.shape[2]).permute(2, 1, 0, 3)
    parts = []
    if plan.warm:
        # What `recall` takes away again is to be what was added.
        dtype = q.dtype if plan.recall is None else torch.float32
        rotated = rotate(queries.to(dtype))
        pages = (_warm_parts(cache, plan, b, is_key) for is_key in (True, False))
        for (bits, of_k), (_, of_v) in zip(*pages, strict=True):
            k, v = (x.flatten(1, 2).to(dtype) for x in (_join(of_k, bits, True), _join(of_v, bits, False)))
            out, lse = _flash(rotated, k, v, scale, False)
            parts.append((rotate(out), lse))
    past = sum(count for _, count in plan.pieces[b]) - len(q)
    for start, count in plan.pieces[b]:
        count = min(count, past)
        past -= count
        if count:
            parts.append(_flash(queries, keys.narrow(1, start, count), values.narrow(1, start, count), scale, False))
    newest = plan.slots.narrow(0, int(plan.query_start[b]), len(q))
    parts.append(_flash(queries, keys.index_select(1, newest), values.index_select(1, newest), scale, True))
    out, lse = _merge(parts)
    return out.permute(2, 1, 0, 3).reshape(q.shape), (lse * math.log2(math.e)).permute(2, 1, 0).reshape(q.shape[:2])


def _warm_parts(cache: LayerCache, plan: AttentionPlan, b: int,
                is_key: bool) -> Iterator[tuple[int, tuple[Tensor, Tensor, Tensor]]]:
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
        products = torch.baddbmm(total, query, values, beta=-((1 << bits) - 1) / 2).mul_(scales)
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


def recall(q: Tensor, out: Tensor, lse: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float) -> Tensor:
    assert plan.recall is not None
    starts, result = plan.query_start.tolist(), out.to(q.dtype, copy=True)
    for b, (start, end, count) in enumerate(zip(starts, starts[1:], plan.recall.counts, strict=False)):
        slots = torch.cat([warm.copies[b, : int(warm.counts[b])] for warm in plan.warm if warm.copies is not None])
        count = min(count * cache.share // 64, int((slots >= 0).sum()) * cache.k.shape[2])
        if count:
            rows = slice(start, end)
            result[rows] = _recall_chunk(q[rows], out[rows], lse[rows], cache, plan, b, scale, slots, count)
    return result


def _recall_chunk(q: Tensor, out: Tensor, lse: Tensor, cache: LayerCache, plan: AttentionPlan, b: int, scale: float,
                  slots: Tensor, count: int) -> Tensor:
    """`recall` of `count` tokens for the n queries of sequence b. slots: of the copies of its compressed pages."""
    assert plan.recall is not None and cache.copies is not None
    (num_heads, page_size), block = cache.copies.shape[1:3], min(plan.recall.block, len(q))

    def blocks(x: Tensor, rest: float = 0.0) -> Tensor:
        """[n, Hq, W] -> [Hkv * blocks, G * block, W] float32; rest: in the place of queries that there are not."""
        x = F.pad(x.float(), (0, 0, 0, 0, 0, -len(x) % block), value=rest)
        x = x.view(-1, block, num_heads, x.shape[1] // num_heads, x.shape[2]).permute(2, 0, 3, 1, 4)
        return x.reshape(-1, x.shape[2] * block, x.shape[4])

    queries, minus_lse = blocks(q.float() * (scale * math.log2(math.e))), blocks(-lse[..., None], -math.inf)
    rotated = rotate(queries)
    # What is chosen may be off by a few percent of itself; what is exchanged may not.
    kind = torch.bfloat16 if q.dtype == torch.bfloat16 and block > 1 and cpu_computes_bfloat16() else torch.float32
    by_head = [x.to(kind).view(num_heads, -1, x.shape[2]) for x in (minus_lse, rotated)]
    ones, parts = queries.new_ones(len(queries), 1, queries.shape[1], dtype=kind), []
    for bits, of_k in _warm_parts(cache, plan, b, True):
        keys = _join(of_k, bits, True).flatten(1, 2).to(kind)
        shares = torch.baddbmm(by_head[0], by_head[1], keys.mT).exp2_().square_()
        parts.append(ones @ shares.view(len(queries), -1, keys.shape[1]))
    mass = torch.cat(parts, -1).view(num_heads, -1, page_size * len(slots))
    mass.masked_fill_((slots < 0).repeat_interleave(page_size), -1.0)
    joint = mass.transpose(0, 1).flatten(1)  # of all heads of a block
    taken = torch.zeros_like(joint, dtype=torch.bool).scatter_(1, joint.topk(count * num_heads).indices, True)
    mass.masked_fill_(~taken.view(-1, num_heads, mass.shape[2]).transpose(0, 1), -1.0)
    best, tokens = mass.topk(min(SPREAD * count, mass.shape[2]))
    count = max(int((best > 0).sum(2).max()), 1)  # the best come first
    tokens, taken = tokens[..., :count].reshape(num_heads, -1), best[..., :count].reshape(len(queries), 1, count) > 0

    head = torch.arange(num_heads, device=q.device)[:, None]
    places = (slots.long()[tokens // page_size], head, tokens % page_size)
    exact = cache.copies[tuple(x.to(cache.copies.device) for x in places)].to(q.device)
    if exact.dtype == torch.int8:
        exact = exact[..., :-2].float() * exact[..., -2:].contiguous().view(torch.float16)
    exact = exact.float().masked_fill_(~taken.view(num_heads, -1, 1, 1), 0.0)  # of others there may be none
    rows = (*exact.unbind(2), *_warm_tokens(cache, plan, b, tokens))
    new_k, new_v, old_k, old_v = (x.reshape(len(queries), count, -1) for x in rows)
    new = torch.baddbmm(minus_lse, queries, new_k.mT).exp2_().mul_(taken)
    old = torch.baddbmm(minus_lse, rotated, old_k.mT).exp2_().mul_(taken)
    total = (1 - old.sum(2, keepdim=True)).clamp_min_(2.0**-20) + new.sum(2, keepdim=True)
    result = torch.baddbmm(blocks(out), new, new_v).sub_(rotate(old @ old_v)).div_(total)
    result = result.view(num_heads, -1, q.shape[1] // num_heads, block, q.shape[2]).permute(1, 3, 0, 2, 4)
    return result.reshape(-1, *q.shape[1:])[: len(q)]


def _warm_tokens(cache: LayerCache, plan: AttentionPlan, b: int, tokens: Tensor) -> Tensor:
    """K and V [2, Hkv, n, D] float32, rotated, of single tokens [Hkv, n] of sequence b's compressed pages, by their
    numbers in the order of columns. Each is read as a page of one token."""
    page_size, head_dim = cache.k.shape[2:]
    found = tokens.new_empty(2, *tokens.shape, head_dim, dtype=torch.float32)
    for warm in plan.warm:
        head, at = ((tokens >= 0) & (tokens < int(warm.counts[b]) * page_size)).nonzero(as_tuple=True)
        page, token = tokens[head, at] // page_size, tokens[head, at] % page_size
        planes = [(warm.codes, warm.bits)] if warm.high is None else [(warm.codes, 2), (warm.high, 1)]
        record = warm.records[b][page].long()
        for i, units in enumerate((cache.units_k, cache.units_v)):
            codes = [units.view(len(units), -1, bits * head_dim // 8)[head, table[b][page].long() * page_size + token]
                     for table, bits in planes]
            records = units.view(len(units), -1, warm.record_bytes)[head, record]
            scales, zeros = (records.gather(1, (token + first)[:, None]) for first in (0, page_size))
            second = zeros if i else records[:, page_size : page_size + head_dim]
            parts = _parts(torch.cat(codes, -1), torch.cat([scales, second], -1), warm.bits, not i, found[0, :1, :1])
            found[i, head, at] = _join(parts, warm.bits, not i)[:, 0]
        tokens = tokens - int(warm.counts[b]) * page_size
    return found


def decompress(codes: Tensor, records: Tensor, bits: int, is_key: bool, like: Tensor) -> Tensor:
    return rotate(_join(_parts(codes, records, bits, is_key, like), bits, is_key)).to(like.dtype)


def _parts(codes: Tensor, records: Tensor, bits: int, is_key: bool, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What pages [..., bytes] are made of, in float32: codes [..., page_size, D], scales [..., page_size, 1], and means
    [..., 1, D] or what is to be added to the codes [..., page_size, 1]."""
    page_size, head_dim = like.shape[-2:]
    scales = decode(records[..., :page_size, None], 4, min_exponent(bits))
    if is_key:
        second = decode_means(records[..., None, page_size : page_size + head_dim])
    else:
        second = records[..., page_size : 2 * page_size, None].view(torch.int8).float().sub_(1 << bits - 1)
    return _unpack(codes, bits, page_size), scales, second


def _join(parts: tuple[Tensor, Tensor, Tensor], bits: int, is_key: bool) -> Tensor:
    """The pages in the rotated basis [..., page_size, D], in the memory of the codes."""
    values, scales, second = parts
    if is_key:
        return values.sub_(((1 << bits) - 1) / 2).mul_(scales).add_(second)
    return values.add_(second).mul_(scales)


def _unpack(packed: Tensor, bits: int, page_size: int) -> Tensor:
    """The inverse of `_pack`, as float32."""
    if bits == 3:
        low, high = packed.tensor_split([packed.shape[-1] // 3 * 2], dim=-1)
        return _unpack(low, 2, page_size).add_(_unpack(high, 1, page_size), alpha=4)
    packed = packed.unflatten(-1, (page_size, packed.shape[-1] // page_size))
    if bits == 8:
        return packed.float()
    parts = [packed >> i if i else packed for i in range(0, 8, bits)]
    return torch.cat([*(part & (1 << bits) - 1 for part in parts[:-1]), parts[-1]], dim=-1).float()


def _flash(queries: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(output [G, Hkv, n, D], log-sum-exp [G, Hkv, n]) of torch's own attention; queries [G, Hkv, n, D]."""
    keys, values = (x.expand(len(queries), -1, -1, -1) for x in (keys, values))
    if queries.device.type == "cpu":
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return attention(queries, keys, values, 0.0, causal, scale=scale)
    scores = (queries.float() @ keys.float().transpose(-1, -2)) * scale
    if causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1).to(values.dtype) @ values, scores.logsumexp(-1)


def _merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over the union of the parts' keys, each part given by its output and log-sum-exp."""
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])
    lse = lses.logsumexp(0)
    shares = (lses - lse).exp()[..., None]
    total = sum((out * share for (out, _), share in zip(parts, shares, strict=True)), start=torch.zeros(()))
    return total.to(parts[0][0].dtype), lse


def decode_attention(q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float, logits: Tensor | None = None,
                     lse: Tensor | None = None) -> Tensor:
    keys, values = _tokens(cache.k), _tokens(cache.v)
    step = max(1, _CHUNK_ELEMENTS // (keys.shape[0] * keys.shape[2]))
    queries = (q.float() * scale).view(len(q), len(keys), -1, q.shape[2])
    outputs = []
    for b, (query, pieces) in enumerate(zip(queries, plan.pieces, strict=False)):  # the prefill chunks come after
        # In float32: with bfloat16 operands torch rounds q.k itself to 8 bits, and is slower. In chunks, so that the
        # copies stay small however long a piece is.
        parts = [torch.bmm(query, keys.narrow(1, at, min(step, start + count - at)).float().mT)
                 for start, count in pieces for at in range(start, start + count, step)]
        if plan.warm:
            parts += _warm_scores(rotate(query), cache, plan, b)
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        weights, counts = scores.softmax(-1), [count for _, count in pieces]
        shares = weights[..., : sum(counts)].to(values.dtype).split(counts, dim=-1)
        parts = [torch.bmm(share, values.narrow(1, *piece)) for share, piece in zip(shares, pieces, strict=True)]
        if plan.warm:
            parts.append(rotate(_warm_output(weights[..., sum(counts) :], cache, plan, b)).to(values.dtype))
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
