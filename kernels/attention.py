"""Attention over the page table: flash-style for prefill chunks, split-KV for decode.

Both read the cache page by page: one page is one tile, so a tile needs one scalar page id and fixed offsets. Both pack
the query heads that share a KV head into the rows of one `tl.dot`, so a page is read once per KV head:

    prefill   program (block of queries, KV head, sequence)   row = query * GROUP + head of the group
    decode    program (split, KV head, sequence)              row = head of the group
              then program (query head, sequence) merges the splits by their log-sum-exp

Whole pages that every row sees in full need no mask. Only the last tiles do, and there K and V are masked as well: the
rest of a recycled page holds stale numbers, and a NaN times a probability of 0 is NaN.

Softmax works in base 2 (exp2 is an instruction, exp is not): logit = log2(e) * scale * q.k, in float32 throughout.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import AttentionPlan

LOG2_E = math.log2(math.e)
MIN_SPLIT_TOKENS = 128  # below it, the partial results cost more to write and merge than the split wins
MAX_SPLITS = 128  # the merge holds one log-sum-exp per split in registers
MERGE_CHUNK = 16  # splits the merge reads at a time


@triton.jit
def _attend_page(
    q,  # [ROWS, BLOCK_D]
    k_page,  # scalar pointer to [PAGE_SIZE, HEAD_DIM]
    v_page,
    first_token,  # of the page
    visible,  # [ROWS, 1] or scalar: a row sees the tokens before this one. Read if MASKED
    num_tokens,  # tokens from here on are not loaded. Read if MASKED
    logits,  # [ROWS, 1] pointers to the rows' logits. Read if EMIT
    row_mask,  # [ROWS, 1]. Read if EMIT
    scale,
    acc,  # [ROWS, BLOCK_D] float32
    row_max,  # [ROWS] float32: the largest logit so far
    row_sum,  # float32, of exp2(logit - row_max): [ROWS], or [ROWS, PAGE_SIZE] if SUM_LATER
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    EMIT: tl.constexpr,
    SUM_LATER: tl.constexpr,  # saves the sum over the lanes and warps in every page, for registers
):
    """One step of the online softmax (arXiv 2205.14135) over one page."""
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
    logit = tl.dot(q, tl.trans(k), input_precision="ieee")
    column = first_token + tl.arange(0, PAGE_SIZE)[None, :]
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


@triton.jit(do_not_specialize=["num_decodes", "stride_table"])  # they change from step to step
def _prefill_kernel(
    q,  # [query tokens of the chunks, Hq, D]
    k_cache,  # [Hkv, frames, PAGE_SIZE, D], pages without gaps
    v_cache,  # the same
    out,  # [query tokens of the chunks, Hq, D], contiguous
    page_table,  # [B, max_pages] int32
    query_start,  # [B + 1] int32
    seq_lens,  # [B] int32
    scale,
    num_decodes,
    stride_q_token,
    stride_q_head,
    stride_k_head,
    stride_k_frame,
    stride_v_head,
    stride_v_frame,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    # The last block sees the most tokens: starting with it keeps the tail of the launch short.
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    kv_head = tl.program_id(1).to(tl.int64)
    seq = num_decodes + tl.program_id(2).to(tl.int64)
    chunk_start = tl.load(query_start + seq)
    chunk_len = tl.load(query_start + seq + 1) - chunk_start
    if first_query >= chunk_len:
        return
    prefix_len = tl.load(seq_lens + seq) - chunk_len
    pages = page_table + seq * stride_table

    row = tl.arange(0, BLOCK_M)[:, None]
    query = first_query + row // GROUP
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = (row < QUERIES * GROUP) & (query < chunk_len) & (dim < HEAD_DIM)
    # q holds the chunks only, and every sequence before them has one query. Inside the block int32 is enough.
    first_token = (chunk_start - num_decodes + first_query).to(tl.int64)
    q_block = q + first_token * stride_q_token + kv_head * GROUP * stride_q_head
    q_offsets = row // GROUP * stride_q_token + row % GROUP * stride_q_head + dim
    q_tile = tl.load(q_block + q_offsets, mask=mask, other=0.0)

    k_head = k_cache + kv_head * stride_k_head
    v_head = v_cache + kv_head * stride_v_head
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # Rows past the chunk see more than the last query would: never nothing, so that no row_max stays infinite.
    visible = prefix_len + query + 1
    num_tokens = prefix_len + tl.minimum(first_query + QUERIES, chunk_len)
    full_pages = (prefix_len + first_query + 1) // PAGE_SIZE
    for page in range(full_pages):
        frame = tl.load(pages + page).to(tl.int64)
        acc, row_max, row_sum = _attend_page(
            q_tile, k_head + frame * stride_k_frame, v_head + frame * stride_v_frame, page * PAGE_SIZE, visible,
            num_tokens, None, None, scale, acc, row_max, row_sum, HEAD_DIM, BLOCK_D, PAGE_SIZE, False, False, False,
        )
    for page in range(full_pages, tl.cdiv(num_tokens, PAGE_SIZE)):
        frame = tl.load(pages + page).to(tl.int64)
        acc, row_max, row_sum = _attend_page(
            q_tile, k_head + frame * stride_k_frame, v_head + frame * stride_v_frame, page * PAGE_SIZE, visible,
            num_tokens, None, None, scale, acc, row_max, row_sum, HEAD_DIM, BLOCK_D, PAGE_SIZE, True, False, False,
        )
    result = (acc * (1.0 / row_sum)[:, None]).to(out.dtype.element_ty)
    num_heads = tl.num_programs(1) * GROUP
    out_block = out + (first_token * num_heads + kv_head * GROUP) * HEAD_DIM
    tl.store(out_block + (row // GROUP * num_heads + row % GROUP) * HEAD_DIM + dim, result, mask=mask)


@triton.jit(do_not_specialize=["stride_table", "stride_logits_seq", "stride_logits_head"])
def _decode_kernel(
    q,  # [num_decodes, Hq, D]
    k_cache,  # [Hkv, frames, PAGE_SIZE, D], pages without gaps
    v_cache,  # the same
    out,  # [num_decodes, Hq, splits, D]: float32 partial results; the result itself if there is one split
    lse,  # [num_decodes, Hq, splits] float32
    logits,  # [num_decodes, Hq, >= max_seq_len] float32. Written if EMIT
    page_table,  # [B, max_pages] int32
    seq_lens,  # [B] int32
    scale,
    stride_q_token,
    stride_q_head,
    stride_k_head,
    stride_k_frame,
    stride_v_head,
    stride_v_frame,
    stride_table,
    stride_logits_seq,
    stride_logits_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    EMIT: tl.constexpr,
):
    split = tl.program_id(0)
    num_splits = tl.num_programs(0)
    kv_head = tl.program_id(1).to(tl.int64)
    seq = tl.program_id(2).to(tl.int64)
    # Each sequence is cut by its own length, so that in a ragged batch every split of it has the same work.
    seq_len = tl.load(seq_lens + seq)
    num_pages = tl.cdiv(seq_len, PAGE_SIZE)
    pages_per_split = tl.cdiv(num_pages, num_splits)
    first_page = split * pages_per_split
    last_page = tl.minimum(first_page + pages_per_split, num_pages)

    # From here to the end `row` is a head of the group; int32 is enough inside the group.
    row = tl.arange(0, BLOCK_G)
    row_mask = row < GROUP
    first_head = kv_head * GROUP
    out_group = (seq * tl.num_programs(1) * GROUP + first_head) * num_splits + split
    if first_page >= last_page:
        # Nothing else of an empty split is read by the merge.
        tl.store(lse + out_group + row * num_splits, float("-inf"), mask=row_mask)
        return
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = row_mask[:, None] & (dim < HEAD_DIM)
    q_group = q + seq * stride_q_token + first_head * stride_q_head
    q_tile = tl.load(q_group + row[:, None] * stride_q_head + dim, mask=mask, other=0.0)
    logit_rows = None
    if EMIT:
        logit_rows = logits + seq * stride_logits_seq + (first_head + row[:, None]) * stride_logits_head

    pages = page_table + seq * stride_table
    k_head = k_cache + kv_head * stride_k_head
    v_head = v_cache + kv_head * stride_v_head
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_G, PAGE_SIZE], tl.float32)
    full_end = tl.minimum(last_page, seq_len // PAGE_SIZE)
    for page in range(first_page, full_end):
        frame = tl.load(pages + page).to(tl.int64)
        acc, row_max, row_sum = _attend_page(
            q_tile, k_head + frame * stride_k_frame, v_head + frame * stride_v_frame, page * PAGE_SIZE, seq_len,
            seq_len, logit_rows, row_mask[:, None], scale, acc, row_max, row_sum,
            HEAD_DIM, BLOCK_D, PAGE_SIZE, False, EMIT, True,
        )
    if full_end < last_page:
        frame = tl.load(pages + full_end).to(tl.int64)
        acc, row_max, row_sum = _attend_page(
            q_tile, k_head + frame * stride_k_frame, v_head + frame * stride_v_frame, full_end * PAGE_SIZE, seq_len,
            seq_len, logit_rows, row_mask[:, None], scale, acc, row_max, row_sum,
            HEAD_DIM, BLOCK_D, PAGE_SIZE, True, EMIT, True,
        )
    # A loop over compressed pages goes here: acc, row_max and row_sum are all the state there is.
    total = tl.sum(row_sum, 1)
    result = (acc * (1.0 / total)[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_group * HEAD_DIM + row[:, None] * (num_splits * HEAD_DIM) + dim, result, mask=mask)
    tl.store(lse + out_group + row * num_splits, row_max + tl.log2(total), mask=row_mask)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    partial_out,  # [num_decodes, Hq, splits, D] float32
    partial_lse,  # [num_decodes, Hq, splits] float32; -inf: the split was empty, its partial_out is not written
    out,  # [num_decodes, Hq, D], contiguous
    lse,  # [num_decodes, Hq] float32, contiguous. Written if EMIT
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    EMIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # sequence * Hq + head
    part = tl.arange(0, MAX_SPLITS)
    lse_row = partial_lse + row * num_splits
    part_lse = tl.load(lse_row + part, mask=part < num_splits, other=float("-inf"))
    # Split 0 is never empty, so the maximum is finite.
    largest = tl.max(part_lse, 0)
    total = largest + tl.log2(tl.sum(tl.exp2(part_lse - largest), 0))
    if EMIT:
        tl.store(lse + row, total)
    dim = tl.arange(0, BLOCK_D)[None, :]
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_splits, CHUNK):
        chunk = start + tl.arange(0, CHUNK)
        chunk_lse = tl.load(lse_row + chunk, mask=chunk < num_splits, other=float("-inf"))
        written = (chunk_lse > float("-inf"))[:, None] & (dim < HEAD_DIM)
        rows = partial_out + (row * num_splits + chunk[:, None]) * HEAD_DIM + dim
        acc += tl.sum(tl.exp2(chunk_lse - total)[:, None] * tl.load(rows, mask=written, other=0.0), 0)
    column = tl.arange(0, BLOCK_D)
    tl.store(out + row * HEAD_DIM + column, acc.to(out.dtype.element_ty), mask=column < HEAD_DIM)


def prefill_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Causal attention of the sequences [plan.num_decodes, B) over the page table. Tensors as in `Ops`."""
    group, page_size = _check(q, k_cache, v_cache, plan, scale)
    _, num_heads, head_dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    num_chunks = plan.seq_lens.shape[0] - plan.num_decodes
    if num_chunks == 0:
        return out
    block_m, num_warps, num_stages = _prefill_config(q.dtype, head_dim, group, plan.max_query_len)
    blocks = triton.cdiv(plan.max_query_len, block_m // group)
    _prefill_kernel[(blocks, num_heads // group, num_chunks)](
        q, k_cache, v_cache, out, plan.page_table, plan.query_start, plan.seq_lens, scale * LOG2_E, plan.num_decodes,
        *q.stride()[:2], *k_cache.stride()[:2], *v_cache.stride()[:2], plan.page_table.stride(0),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_D=_block_d(head_dim), BLOCK_M=block_m, PAGE_SIZE=page_size,
        num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True,
    )
    return out


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    logits: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention of the sequences [0, plan.num_decodes), one query each, over the page table. Tensors as in `Ops`."""
    group, page_size = _check(q, k_cache, v_cache, plan, scale)
    num_seqs, num_heads, head_dim = q.shape
    assert num_seqs == plan.num_decodes, f"q has {num_seqs} tokens, the plan {plan.num_decodes} decodes"
    if logits is not None:
        assert logits.dtype == torch.float32 and logits.stride(2) == 1, f"logits {logits.dtype} {logits.stride()}"
        assert logits.shape[:2] == (num_seqs, num_heads) and logits.shape[2] >= plan.max_seq_len, f"{logits.shape}"
    if lse is not None:
        assert lse.dtype == torch.float32 and lse.is_contiguous(), f"lse {lse.dtype} {lse.stride()}"
        assert lse.shape == (num_seqs, num_heads), f"lse {tuple(lse.shape)}"
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_seqs == 0:
        return out
    num_kv_heads = num_heads // group
    num_splits = count_splits(num_seqs, num_kv_heads, plan.max_seq_len, page_size, _num_multiprocessors(q))
    if num_splits == 1:
        partial_out = out
        partial_lse = lse if lse is not None else q.new_empty(num_seqs, num_heads, dtype=torch.float32)
    else:
        partial_out = q.new_empty(num_seqs, num_heads, num_splits, head_dim, dtype=torch.float32)
        partial_lse = q.new_empty(num_seqs, num_heads, num_splits, dtype=torch.float32)
    (num_warps, num_stages), block_d = _decode_config(q.dtype), _block_d(head_dim)
    _decode_kernel[(num_splits, num_kv_heads, num_seqs)](
        q, k_cache, v_cache, partial_out, partial_lse, logits, plan.page_table, plan.seq_lens, scale * LOG2_E,
        *q.stride()[:2], *k_cache.stride()[:2], *v_cache.stride()[:2], plan.page_table.stride(0),
        *((0, 0) if logits is None else logits.stride()[:2]),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_G=max(16, triton.next_power_of_2(group)),
        PAGE_SIZE=page_size, EMIT=logits is not None,
        num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True,
    )
    if num_splits > 1:
        _merge_kernel[(num_seqs * num_heads,)](
            partial_out, partial_lse, out, lse, num_splits,
            HEAD_DIM=head_dim, BLOCK_D=block_d, MAX_SPLITS=MAX_SPLITS, CHUNK=MERGE_CHUNK, EMIT=lse is not None,
            num_warps=4, enable_fp_fusion=True,
        )
    return out


def count_splits(num_seqs: int, num_kv_heads: int, max_seq_len: int, page_size: int, num_sms: int) -> int:
    """How many programs share one sequence and KV head: enough to fill the device, of MIN_SPLIT_TOKENS at least."""
    # Four programs fit on a multiprocessor (each holds one K and one V page in shared memory) and hide each
    # other's latency.
    wanted = triton.cdiv(4 * num_sms, num_seqs * num_kv_heads)
    pages = triton.cdiv(max_seq_len, page_size)
    most = triton.cdiv(pages, max(MIN_SPLIT_TOKENS // page_size, 1))
    return max(1, min(int(wanted), int(most), MAX_SPLITS))


def _num_multiprocessors(x: Tensor) -> int:
    # On a CPU only the interpreter runs this: few splits keep it fast, more than one keep the merge in use.
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count) if x.is_cuda else 2


def _block_d(head_dim: int) -> int:
    """The tile's width: a power of two, and at least the inner dimension that tl.dot takes."""
    return max(16, int(triton.next_power_of_2(head_dim)))


# Chosen by compiling for sm_80 to sm_100 (tools.profile_kernels). Three stages make the page ids asynchronous copies
# too; with two, every page waits for its id. In float32 the dots run on the CUDA cores and need small tiles.


def _prefill_config(dtype: torch.dtype, head_dim: int, group: int, max_query_len: int) -> tuple[int, int, int]:
    """(rows of a block, warps, stages)."""
    if dtype == torch.float32:
        return max(16, triton.next_power_of_2(group)), 8, 1
    if max_query_len * group <= 64:  # fewer warps or more stages take fewer instructions, but spill on sm_86 and sm_89
        return 64, 4 if head_dim <= 64 else 8, 2
    return max(128, triton.next_power_of_2(group)), 8, 3


def _decode_config(dtype: torch.dtype) -> tuple[int, int]:
    """(warps, stages)."""
    return (8, 1) if dtype == torch.float32 else (2, 3)


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float) -> tuple[int, int]:
    """What both kernels assume -> (query heads per KV head, page size)."""
    _, num_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = k_cache.shape
    assert q.dtype in (torch.float32, torch.float16, torch.bfloat16), f"dtype {q.dtype}"
    assert k_cache.dtype == q.dtype and v_cache.dtype == q.dtype, f"{q.dtype}, {k_cache.dtype}, {v_cache.dtype}"
    assert q.stride(2) == 1, f"q strides {q.stride()}"
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads for {num_kv_heads} KV heads"
    assert v_cache.shape == k_cache.shape, f"v_cache {tuple(v_cache.shape)}, k_cache {tuple(k_cache.shape)}"
    for cache in (k_cache, v_cache):
        assert cache.shape[3] == head_dim and cache.stride()[2:] == (head_dim, 1), f"cache strides {cache.stride()}"
    assert page_size >= 16 and page_size & (page_size - 1) == 0, f"page_size {page_size} is no power of two from 16 up"
    for name in ("query_start", "seq_lens", "page_table"):
        index = getattr(plan, name)
        assert index.dtype == torch.int32 and index.stride(-1) == 1, f"{name}: {index.dtype}, {index.stride()}"
    assert scale > 0, f"scale {scale}: the maximum is taken before the scale"
    return num_heads // num_kv_heads, page_size
