"""Attention of prefill chunks: see kernels.attention. Compressed pages come first: then what they gave, which is in the
rotated basis of kernels.ops, is rotated back once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import LOG2_E, attend, attend_page, check_attention
from kernels.codes import block_of, factor_of, offsets_of, rotate, signs_of, tile_of
from kernels.ops import AttentionPlan, LayerCache


@triton.jit
def _attend_compressed(q, scale, state, k_plane, v_plane, warm, seq, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
                       BITS: tl.constexpr):
    """`attend` to all pages of one format of a sequence; q and the state are rotated.

    They are decompressed: among a hundred rows the work of it is little, unlike among the few of decode.

    k_plane, v_plane: the head's units; warm: of the format, see below
    """
    TOKENS: tl.constexpr = 16  # at a time: more spill
    STEPS: tl.constexpr = PAGE_SIZE // TOKENS
    for step in range(tl.load(warm[3] + seq) * STEPS):
        run, high, record = offsets_of(warm, seq * warm[4] + step // STEPS, warm[5], HEAD_DIM, PAGE_SIZE, BITS)
        token = step % STEPS * TOKENS + tl.arange(0, TOKENS)[:, None]
        k = tile_of(k_plane + run, k_plane + high, k_plane + record, token, HEAD_DIM, PAGE_SIZE, BITS, True)
        v = tile_of(v_plane + run, v_plane + high, v_plane + record, token, HEAD_DIM, PAGE_SIZE, BITS, False)
        state = attend(q, k.to(q.dtype), v.to(q.dtype), scale, state, 0, None, 0, None, None)
    return state


@triton.jit(do_not_specialize=["num_decodes", "stride_table"])  # they change from step to step
def _prefill_kernel(q, k_cache, v_cache, out, lse, page_table, query_start, exact_lens, scale, num_decodes,
                    stride_q_token, stride_q_head, stride_k_head, stride_k_frame, stride_v_head, stride_v_frame,
                    stride_table, planes, warm, stride_units_k, stride_units_v, GROUP: tl.constexpr,
                    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, PAGE_SIZE: tl.constexpr, FORMATS: tl.constexpr):
    """A block of queries of a sequence and KV head.

    q, out [query tokens of the chunks, Hq, D]; lse [query tokens of the chunks, Hq] float32, or None: out and lse
    contiguous
    k_cache, v_cache [Hkv, frames, PAGE_SIZE, D], pages without gaps
    page_table [B, max_pages], query_start [B + 1], exact_lens [B] int32
    planes: units_k, units_v, q rotated [query tokens of the chunks, Hq, D], the signs that rotate [D, D]
    warm: of each compressed format: codes, high, records, counts of WarmPages, stride of the tables, record_bytes
    FORMATS: bits of each
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    # The last block sees the most tokens: starting with it keeps the tail of the launch short.
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    kv_head = tl.program_id(1).to(tl.int64)
    seq = num_decodes + tl.program_id(2).to(tl.int64)
    chunk_start = tl.load(query_start + seq)
    chunk_len = tl.load(query_start + seq + 1) - chunk_start
    if first_query >= chunk_len:
        return
    prefix_len = tl.load(exact_lens + seq) - chunk_len

    row = tl.arange(0, BLOCK_M)[:, None]
    query = first_query + row // GROUP
    dim = tl.arange(0, block_of(HEAD_DIM))[None, :]
    mask = (row < QUERIES * GROUP) & (query < chunk_len) & (dim < HEAD_DIM)
    # q holds the chunks only, and every sequence before them has one query. Inside the block int32 is enough.
    first_token = (chunk_start - num_decodes + first_query).to(tl.int64)
    q_block = q + first_token * stride_q_token + kv_head * GROUP * stride_q_head
    q_offsets = row // GROUP * stride_q_token + row % GROUP * stride_q_head + dim
    num_heads = tl.num_programs(1) * GROUP

    acc = tl.zeros([BLOCK_M, block_of(HEAD_DIM)], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if len(FORMATS) > 0:
        units_k, units_v, rotated_q, signs = planes
        rotated = rotated_q + (first_token * num_heads + kv_head * GROUP) * HEAD_DIM
        rotated = tl.load(rotated + (row // GROUP * num_heads + row % GROUP) * HEAD_DIM + dim, mask=mask, other=0.0)
        for f in tl.static_range(len(FORMATS)):
            acc, row_max, row_sum = _attend_compressed(
                rotated, scale, (acc, row_max, row_sum), units_k + kv_head * stride_units_k,
                units_v + kv_head * stride_units_v, warm[f], seq, HEAD_DIM, PAGE_SIZE, FORMATS[f])
        # Of size 1 while it is rotated, for float16. A sequence may have no compressed pages.
        size = tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        acc = rotate(acc / size, signs, HEAD_DIM) * size
    q_tile = tl.load(q_block + q_offsets, mask=mask, other=0.0)
    # Rows past the chunk see more than the last query would: never nothing, so that no row_max stays infinite.
    visible = prefix_len + query + 1
    length = prefix_len + tl.minimum(first_query + QUERIES, chunk_len)
    state = (acc, row_max, row_sum)
    k_head, v_head = k_cache + kv_head * stride_k_head, v_cache + kv_head * stride_v_head
    pages = (k_head, v_head, stride_k_frame, stride_v_frame, page_table + seq * stride_table)
    full_pages = (prefix_len + first_query + 1) // PAGE_SIZE
    for page in range(full_pages):
        state = attend_page(q_tile, scale, state, pages, page, None, length, None, None, HEAD_DIM, PAGE_SIZE)
    for page in range(full_pages, tl.cdiv(length, PAGE_SIZE)):
        state = attend_page(q_tile, scale, state, pages, page, visible, length, None, None, HEAD_DIM, PAGE_SIZE)
    acc, row_max, row_sum = state
    result = (acc * (1.0 / row_sum)[:, None]).to(out.dtype.element_ty)
    out_block = out + (first_token * num_heads + kv_head * GROUP) * HEAD_DIM
    tl.store(out_block + (row // GROUP * num_heads + row % GROUP) * HEAD_DIM + dim, result, mask=mask)
    if lse is not None:
        at = lse + first_token * num_heads + kv_head * GROUP + row // GROUP * num_heads + row % GROUP
        row_mask = (row < QUERIES * GROUP) & (query < chunk_len)
        tl.store(at, (row_max + tl.log2(row_sum))[:, None], mask=row_mask)


def prefill_attention(q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float,
                      lse: Tensor | None = None) -> Tensor:
    """Attention of the prefill chunks, the sequences [plan.num_decodes, B). Tensors as in `Ops`."""
    group, page_size = check_attention(q, cache, plan, scale, lse)
    num_heads, head_dim = q.shape[1:]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    num_chunks = plan.exact_lens.shape[0] - plan.num_decodes
    if num_chunks == 0:
        return out
    block_m, num_warps, num_stages = _prefill_config(q.dtype, head_dim, group, plan.max_query_len)
    blocks = triton.cdiv(plan.max_query_len, block_m // group)
    planes = None
    if plan.warm:
        signs = signs_of(head_dim, q.dtype, q.device)
        rotated = torch.matmul(q, signs, out=torch.empty_like(out)).mul_(factor_of(head_dim))
        planes = (cache.units_k, cache.units_v, rotated, signs)
    tables = ((w.codes, w.high, w.records, w.counts, w.codes.stride(0), w.record_bytes) for w in plan.warm)
    _prefill_kernel[(blocks, num_heads // group, num_chunks)](
        q, cache.k, cache.v, out, lse, plan.page_table, plan.query_start, plan.exact_lens, scale * LOG2_E,
        plan.num_decodes, *q.stride()[:2], *cache.k.stride()[:2], *cache.v.stride()[:2], plan.page_table.stride(0),
        planes, tuple(tables), cache.units_k.stride(0), cache.units_v.stride(0), GROUP=group, HEAD_DIM=head_dim,
        BLOCK_M=block_m, PAGE_SIZE=page_size, FORMATS=tuple(warm.bits for warm in plan.warm),
        num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True)
    return out


def _prefill_config(dtype: torch.dtype, head_dim: int, group: int, max_query_len: int) -> tuple[int, int, int]:
    """(rows of a block, warps, stages)."""
    if dtype == torch.float32:
        return max(16, triton.next_power_of_2(group)), 8, 1
    if max_query_len * group <= 64:  # fewer warps or more stages take fewer instructions, but spill on sm_86 and sm_89
        return 64, 4 if head_dim <= 64 else 8, 2
    return max(128, triton.next_power_of_2(group)), 8, 3
