"""What prefill and decode attention share: a step of the online softmax, and what the wrappers check.

Softmax works in base 2 (exp2 is an instruction, exp is not): logit = log2(e) * scale * q.k, in float32 throughout.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import FLOATS, check
from kernels.codes import block_of, weigh
from kernels.ops import AttentionPlan, LayerCache

LOG2_E = math.log2(math.e)


@triton.jit
def attend(q, k, v, scale, state, first_token, visible, num_tokens, logits, row_mask):
    """One step of the online softmax -> the new state. q [ROWS, BLOCK_D]; k, v [TOKENS, BLOCK_D].

    state: of what was attended to so far: the output times row_sum [ROWS, BLOCK_D] float32; row_max [ROWS], the largest
    logit; row_sum, of exp2(logit - row_max): [ROWS] or, which saves the sum over the lanes and warps in every step, for
    registers, [ROWS, TOKENS]
    visible: [ROWS, 1] or scalar: a row sees the tokens before this one. None: it sees all
    num_tokens: tokens from here on have no logit. Read if visible is given
    logits: [ROWS, 1] pointers to the rows' logits, which are stored unless it is None
    row_mask: of the rows that have them
    """
    acc, row_max, row_sum = state
    logit = tl.dot(q, tl.trans(k), input_precision="ieee")
    column = first_token + tl.arange(0, k.shape[0])[None, :]
    if logits is not None:
        mask = row_mask if visible is None else row_mask & (column < num_tokens)
        tl.store(logits + column, logit * scale, mask=mask)
    if visible is not None:
        logit = tl.where(column < visible, logit, float("-inf"))
    p, decay, row_max, row_sum = weigh(logit, scale, row_max, row_sum)
    return tl.dot(p.to(v.dtype), v, acc * decay, input_precision="ieee"), row_max, row_sum


@triton.jit
def attend_page(
    q, scale, state, pages, page, visible, num_tokens, logits, row_mask, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr
):
    """`attend` to one exact page; tokens from num_tokens on are not loaded either.

    pages: scalar pointers to K and V [frames, PAGE_SIZE, HEAD_DIM] of a head, pages without gaps; strides of frames;
    pointer to the frames of the sequence's pages
    """
    k_head, v_head, stride_k_frame, stride_v_frame, frames = pages
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


def check_attention(
    q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float, lse: Tensor | None = None
) -> tuple[int, int]:
    """What the kernels of attention assume -> (query heads per KV head, page size)."""
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, frames, page_size, _ = cache.k.shape
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads for {num_kv_heads} KV heads"
    assert page_size >= 16 and page_size & (page_size - 1) == 0, f"page_size {page_size} is no power of two from 16 up"
    assert scale > 0, f"scale {scale}: the maximum is taken before the scale"
    check("q", q, q.shape, FLOATS)
    if lse is not None:
        check("lse", lse, (tokens, num_heads), (torch.float32,), (num_heads, 1))
    (sequences,), int32 = plan.exact_lens.shape, (torch.int32,)
    for name, x in (("k", cache.k), ("v", cache.v)):
        check(name, x, (num_kv_heads, frames, page_size, head_dim), (q.dtype,), (head_dim, 1))
    check("exact_lens", plan.exact_lens, (sequences,), int32)
    check("query_start", plan.query_start, plan.query_start.shape, int32)
    check("page_table", plan.page_table, (sequences, plan.page_table.shape[1]), int32)
    for i, warm in enumerate(plan.warm):
        assert warm.bits in (8, 4, 3, 2) and (warm.bits == 3) == (warm.high is not None), f"{warm.bits} bits"
        assert warm.record_bytes % 4 == head_dim % 8 == 0, f"{warm.record_bytes} bytes, head_dim {head_dim}"
        for name, table in (("codes", warm.codes), ("high", warm.high), ("records", warm.records)):
            if table is not None:
                check(f"warm[{i}].{name}", table, (sequences, warm.codes.shape[1]), int32, (warm.codes.stride(0), 1))
        check(f"warm[{i}].counts", warm.counts, (sequences,), int32)
    for name, units in (("units_k", cache.units_k), ("units_v", cache.units_v)) if plan.warm else ():
        shape = (num_kv_heads, units.shape[1], page_size * head_dim // 8)
        check(name, units, shape, (torch.uint8,), (shape[2], 1))
        assert units.data_ptr() % 4 == units.stride(0) % 4 == 0, f"{name} at {units.data_ptr()}, {units.stride()}"
    return num_heads // num_kv_heads, page_size
