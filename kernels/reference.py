"""Every operation of `kernels.ops.Ops` in torch: the specification of the Triton kernels, and the CPU backend.

Never imports triton. Runs on any device. Attention reads a sequence as its pieces (runs of consecutive slots) instead
of gathering pages: on a CPU a gather costs as much again as the attention itself.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import AttentionPlan

# Elements of K converted to float32 at a time (8 MiB): more costs memory, less costs a call per chunk.
_CHUNK_ELEMENTS = 1 << 21


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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


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


def prefill_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    out = torch.empty_like(q)
    starts = plan.query_start[plan.num_decodes :].tolist()
    for pieces, (begin, end) in zip(plan.pieces[plan.num_decodes :], pairwise(starts), strict=True):
        rows = slice(begin - starts[0], end - starts[0])
        out[rows] = _attend_chunk(q[rows], _tokens(k_cache), _tokens(v_cache), pieces, scale)
    return out


def _attend_chunk(q: Tensor, keys: Tensor, values: Tensor, pieces: tuple[tuple[int, int], ...], scale: float) -> Tensor:
    """One chunk of n queries over its sequence, whose newest n tokens are the chunk itself. q [n, Hq, D]; keys, values
    [Hkv, slots, D]. Each piece of the past is attended as a whole and the parts are merged by log-sum-exp."""
    n, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[0]
    # The query heads of a group stand in the batch dimension, over which K and V are expanded without a copy.
    queries = q.view(n, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(2, 1, 0, 3)
    past = sum(count for _, count in pieces) - n
    parts = []
    for start, count in pieces:
        old = min(count, past)
        past -= old
        if old:
            parts.append(_flash(queries, keys[:, start : start + old], values[:, start : start + old], scale, False))
    new_keys, new_values = (torch.cat(_newest(x, pieces, n), dim=1) for x in (keys, values))
    parts.append(_flash(queries, new_keys, new_values, scale, True))
    return _merge(parts).permute(2, 1, 0, 3).reshape(n, num_heads, head_dim)


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
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    logits: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    keys, values = _tokens(k_cache), _tokens(v_cache)
    queries = (q.float() * scale).view(plan.num_decodes, keys.shape[0], -1, q.shape[-1])
    outputs = []
    for b, (query, pieces) in enumerate(zip(queries, plan.pieces, strict=False)):  # the prefill chunks come after
        scores = _cat([torch.bmm(query, chunk.mT) for piece in pieces for chunk in _float_chunks(keys, piece)])
        weights = scores.softmax(-1).to(values.dtype)
        parts = []
        seen = 0
        for start, count in pieces:
            parts.append(torch.bmm(weights.narrow(-1, seen, count), values.narrow(1, start, count)))
            seen += count
        outputs.append(sum(parts[1:], start=parts[0]).view(1, *q.shape[1:]))
        if logits is not None:
            logits[b, :, :seen] = scores.flatten(0, 1) * math.log2(math.e)
        if lse is not None:
            lse[b] = scores.logsumexp(-1).flatten() * math.log2(math.e)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _float_chunks(keys: Tensor, piece: tuple[int, int]) -> list[Tensor]:
    """The piece's keys in float32: with bfloat16 operands torch rounds q.k itself to 8 bits, and is slower. In chunks,
    so that the copies stay small however long the piece is."""
    keys = keys.narrow(1, *piece)
    if keys.dtype == torch.float32:
        return [keys]
    return [chunk.float() for chunk in keys.split(max(1, _CHUNK_ELEMENTS // (keys.shape[0] * keys.shape[2])), dim=1)]


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
