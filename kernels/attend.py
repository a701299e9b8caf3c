"""What prefill and decode attention share: a step of the online softmax, and what the wrappers check.

Softmax works in base 2 (exp2 is an instruction, exp is not): logit = log2(e) * scale * q.k, in float32 throughout.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import FLOATS, check
from kernels.codes import block_of
from kernels.ops import AttentionPlan, LayerCache

LOG2_E = math.log2(math.e)


@triton.jit
def attend(
    q,  # [ROWS, BLOCK_D]
    k, v,  # [TOKENS, BLOCK_D]
    scale,
    state,  # of what was attended to so far: the output times row_sum [ROWS, BLOCK_D] float32; row_max [ROWS], the
    # largest logit; row_sum, of exp2(logit - row_max): [ROWS] or, which saves the sum over the lanes and warps in every
    # step, for registers, [ROWS, TOKENS]
    first_token,
    visible,  # [ROWS, 1] or scalar: a row sees the tokens before this one. None: it sees all
    num_tokens,  # tokens from here on have no logit. Read if visible is given
    logits,  # [ROWS, 1] pointers to the rows' logits, which are stored unless it is None
    row_mask,  # of the rows that have them
):
    """One step of the online softmax (arXiv 2205.14135) -> the new state."""
    acc, row_max, row_sum = state
    logit = tl.dot(q, tl.trans(k), input_precision="ieee")
    column = first_token + tl.arange(0, k.shape[0])[None, :]
    if logits is not None:
        mask = row_mask if visible is None else row_mask & (column < num_tokens)
        tl.store(logits + column, logit * scale, mask=mask)
    if visible is not None:
        logit = tl.where(column < visible, logit, float("-inf"))
    # The scale is positive, so it can wait until after the maximum: then it costs one fused multiply-add per logit.
    new_max = tl.maximum(row_max, tl.max(logit, 1) * scale)
    p = tl.exp2(logit * scale - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    row_sum = row_sum * decay[:, None] + p if len(row_sum.shape) == 2 else row_sum * decay + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def attend_page(
    q, scale, state,  # see `attend`
    cache,  # scalar pointers to K and V [frames, PAGE_SIZE, HEAD_DIM] of a head, pages without gaps; strides of frames
    frames,  # pointer to the frames of the sequence's pages
    page,
    visible,  # see `attend`
    num_tokens,  # tokens from here on are not loaded either
    logits, row_mask,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
):
    """`attend` to one exact page."""
    k_head, v_head, stride_k_frame, stride_v_frame = cache
    frame = tl.load(frames + page).to(tl.int64)
    dim = tl.arange(0, block_of(HEAD_DIM))[None, :]
    token = tl.arange(0, PAGE_SIZE)[:, None]
    offsets = token * HEAD_DIM + dim
    mask = dim < HEAD_DIM
    if visible is not None:
        mask = (page * PAGE_SIZE + token < num_tokens) & (dim < HEAD_DIM)
    k = tl.load(k_head + frame * stride_k_frame + offsets, mask=mask, other=0.0)
    v = tl.load(v_head + frame * stride_v_frame + offsets, mask=mask, other=0.0)
    return attend(q, k, v, scale, state, page * PAGE_SIZE, visible, num_tokens, logits, row_mask)


def check_attention(q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float) -> tuple[int, int]:
    """What both kernels assume -> (query heads per KV head, page size)."""
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, frames, page_size, _ = cache.k.shape
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads for {num_kv_heads} KV heads"
    assert page_size >= 16 and page_size & (page_size - 1) == 0, f"page_size {page_size} is no power of two from 16 up"
    assert scale > 0, f"scale {scale}: the maximum is taken before the scale"
    check("q", q, (tokens, num_heads, head_dim), FLOATS)
    for name, x in (("k", cache.k), ("v", cache.v)):
        check(name, x, (num_kv_heads, frames, page_size, head_dim), (q.dtype,), (head_dim, 1))
    (sequences,), int32 = plan.exact_lens.shape, (torch.int32,)
    check("exact_lens", plan.exact_lens, (sequences,), int32)
    check("query_start", plan.query_start, tuple(plan.query_start.shape), int32)
    check("page_table", plan.page_table, (sequences, plan.page_table.shape[1]), int32)
    for i, warm in enumerate(plan.warm):
        tables = {"codes": warm.codes, "records": warm.records} | ({} if warm.high is None else {"high": warm.high})
        assert warm.bits in (8, 4, 3, 2) and (warm.bits == 3) == ("high" in tables), f"{warm.bits} bits, {[*tables]}"
        assert warm.record_bytes % 4 == head_dim % 8 == 0, f"{warm.record_bytes} bytes, head_dim {head_dim}"
        for name, table in tables.items():
            check(f"warm[{i}].{name}", table, (sequences, warm.codes.shape[1]), int32, (warm.codes.stride(0), 1))
        check(f"warm[{i}].counts", warm.counts, (sequences,), int32)
    for name, units in (("units_k", cache.units_k), ("units_v", cache.units_v)) if plan.warm else ():
        shape = (num_kv_heads, units.shape[1], page_size * head_dim // 8)
        check(name, units, shape, (torch.uint8,), (shape[2], 1))
        assert units.data_ptr() % 4 == units.stride(0) % 4 == 0, f"{name} at {units.data_ptr()}, {units.stride()}"
    return num_heads // num_kv_heads, page_size
