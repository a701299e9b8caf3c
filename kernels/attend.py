"""What prefill and decode attention share: a step of the online softmax, and what the wrappers check.

Softmax works in base 2 (exp2 is an instruction, exp is not): logit = log2(e) * scale * q.k, in float32 throughout.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import AttentionPlan, LayerCache

LOG2_E = math.log2(math.e)


@triton.jit
def attend(
    q,  # [ROWS, BLOCK_D]
    k,  # [TOKENS, BLOCK_D]
    v,
    first_token,
    visible,  # [ROWS, 1] or scalar: a row sees the tokens before this one. Read if MASKED
    num_tokens,  # tokens from here on have no logit. Read if MASKED
    logits,  # [ROWS, 1] pointers to the rows' logits. Read if EMIT
    row_mask,  # [ROWS, 1]. Read if EMIT
    scale,
    acc,  # [ROWS, BLOCK_D] float32
    row_max,  # [ROWS] float32: the largest logit so far
    row_sum,  # float32, of exp2(logit - row_max): [ROWS], or [ROWS, TOKENS] if SUM_LATER
    TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
    EMIT: tl.constexpr,
    SUM_LATER: tl.constexpr,  # saves the sum over the lanes and warps in every page, for registers
):
    """One step of the online softmax (arXiv 2205.14135)."""
    logit = tl.dot(q, tl.trans(k), input_precision="ieee")
    column = first_token + tl.arange(0, TOKENS)[None, :]
    if EMIT:
        logit_mask = row_mask
        if MASKED:
            logit_mask = row_mask & (column < num_tokens)
        tl.store(logits + column, logit * scale, mask=logit_mask)
    if MASKED:
        logit = tl.where(column < visible, logit, float("-inf"))
    # The scale is positive, so it can wait until after the maximum: then it costs one fused multiply-add per logit.
    new_max = tl.maximum(row_max, tl.max(logit, 1) * scale)
    p = tl.exp2(logit * scale - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    row_sum = row_sum * decay[:, None] + p if SUM_LATER else row_sum * decay + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def attend_page(
    q,
    k_page,  # scalar pointer to [PAGE_SIZE, HEAD_DIM]
    v_page,
    first_token,  # of the page
    visible,
    num_tokens,  # tokens from here on are not loaded either
    logits,
    row_mask,
    scale,
    acc,
    row_max,
    row_sum,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    EMIT: tl.constexpr,
    SUM_LATER: tl.constexpr,
):
    """`attend` to one exact page."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    token = tl.arange(0, PAGE_SIZE)[:, None]
    offsets = token * HEAD_DIM + dim
    if MASKED:
        load_mask = (first_token + token < num_tokens) & (dim < HEAD_DIM)
        k = tl.load(k_page + offsets, mask=load_mask, other=0.0)
        v = tl.load(v_page + offsets, mask=load_mask, other=0.0)
    elif HEAD_DIM < BLOCK_D:
        k = tl.load(k_page + offsets, mask=dim < HEAD_DIM, other=0.0)
        v = tl.load(v_page + offsets, mask=dim < HEAD_DIM, other=0.0)
    else:
        k = tl.load(k_page + offsets)
        v = tl.load(v_page + offsets)
    return attend(
        q, k, v, first_token, visible, num_tokens, logits, row_mask, scale, acc, row_max, row_sum,
        PAGE_SIZE, MASKED, EMIT, SUM_LATER,
    )


def check(q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float) -> tuple[int, int]:
    """What both kernels assume -> (query heads per KV head, page size)."""
    _, num_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = cache.k.shape
    assert q.dtype in (torch.float32, torch.float16, torch.bfloat16), f"dtype {q.dtype}"
    assert cache.k.dtype == q.dtype and cache.v.dtype == q.dtype, f"{q.dtype}, {cache.k.dtype}, {cache.v.dtype}"
    assert q.stride(2) == 1, f"q strides {q.stride()}"
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads for {num_kv_heads} KV heads"
    assert cache.v.shape == cache.k.shape, f"v {tuple(cache.v.shape)}, k {tuple(cache.k.shape)}"
    for x in (cache.k, cache.v):
        assert x.shape[3] == head_dim and x.stride()[2:] == (head_dim, 1), f"cache strides {x.stride()}"
    assert page_size >= 16 and page_size & (page_size - 1) == 0, f"page_size {page_size} is no power of two from 16 up"
    tables = {name: getattr(plan, name) for name in ("query_start", "exact_lens", "page_table")}
    for i, warm in enumerate(plan.warm):
        high = {} if warm.high is None else {"high": warm.high}
        names = {"codes": warm.codes, "records": warm.records, "counts": warm.counts, **high}
        tables |= {f"warm[{i}].{name}": table for name, table in names.items()}
        assert warm.bits in (8, 4, 3, 2) and (warm.bits == 3) == bool(high), f"{warm.bits} bits, {list(high)}"
        assert {table.stride() for name, table in names.items() if name != "counts"} == {warm.codes.stride()}
        assert warm.record_bytes % 4 == head_dim % 8 == 0, f"{warm.record_bytes} bytes, head_dim {head_dim}"
        for units in (cache.units_k, cache.units_v):
            shape, dense = (num_kv_heads, page_size * head_dim // 8), units.stride()[1:] == (units.shape[2], 1)
            assert units.shape[::2] == shape and dense, f"units {tuple(units.shape)} {units.stride()}"
            assert units.data_ptr() % 4 == units.stride(0) % 4 == 0, f"units at {units.data_ptr()}, {units.stride()}"
    for name, table in tables.items():
        assert table.dtype == torch.int32 and table.stride(-1) == 1, f"{name}: {table.dtype}, {table.stride()}"
    assert scale > 0, f"scale {scale}: the maximum is taken before the scale"
    return num_heads // num_kv_heads, page_size
