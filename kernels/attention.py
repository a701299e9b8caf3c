"""Attention over the page table: flash-style for prefill chunks (kernels.prefill), split-KV for decode (here).

Both read the cache page by page: one page is one tile, so a tile needs one scalar page id and fixed offsets. Both pack
the query heads that share a KV head into the rows of one `tl.dot`, so a page is read once per KV head:

    prefill   program (block of queries, KV head, sequence)   row = query * GROUP + head of the group
    decode    program (slice, KV head, sequence)              row = head of the group
              then program (query head, sequence) merges the slices by their log-sum-exp

A slice of decode is a share of the exact pages or of the compressed pages of one format, never of both: the two loops
hold their tiles in other shapes, and the output of compressed pages stays rotated until the merge. The first format is
in the launch of the exact pages, each further one has its own.

Whole pages that every row sees in full need no mask. Only the last tiles do, and there K and V are masked as well: the
rest of a recycled page holds stale numbers, and a NaN times a probability of 0 is NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attend import LOG2_E, attend_page, check
from kernels.codes import block_d, decode_codes, factor_of, signs_of
from kernels.ops import AttentionPlan, LayerCache, WarmPages

MIN_SLICE_TOKENS = 128  # below it, the partial results cost more to write and merge than the slice wins
MAX_SLICES = 128  # the merge holds one log-sum-exp per slice in registers
MERGE_CHUNK = 16  # slices the merge reads at a time


@triton.jit(
    do_not_specialize=[  # they change from step to step
        "exact_slices", "first_slice", "num_slices", "stride_table", "stride_logits_seq", "stride_logits_head",
        "stride_codes", "first_column",
    ]
)  # fmt: skip
def _decode_kernel(
    q,  # [num_decodes, Hq, D]
    k_cache,  # [Hkv, frames, PAGE_SIZE, D], pages without gaps
    v_cache,  # the same
    out,  # [num_decodes, Hq, slices, D]: float32 partial results; the result itself if there is one slice
    lse,  # [num_decodes, Hq, slices] float32
    logits,  # [num_decodes, Hq, columns] float32. Written if EMIT
    page_table,  # [B, max_pages] int32
    exact_lens,  # [B] int32
    scale,
    exact_slices,  # of this launch; the others are of compressed pages
    first_slice,
    num_slices,
    stride_q_token,
    stride_q_head,
    stride_k_head,
    stride_k_frame,
    stride_v_head,
    stride_v_frame,
    stride_table,
    stride_logits_seq,
    stride_logits_head,
    warm,  # units_k, units_v, signs, and codes, high, records, counts of WarmPages. Read if BITS, like the rest
    stride_units_k,
    stride_units_v,
    stride_codes,
    record_bytes,
    first_column,  # of the logits
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    EMIT: tl.constexpr,
    BITS: tl.constexpr,  # 0: no compressed pages
    BLOCK_W: tl.constexpr,
    BLOCK_H: tl.constexpr,  # rows of the loop over compressed pages
    FACTOR: tl.constexpr,
):
    part = tl.program_id(0)
    parts = exact_slices
    kv_head = tl.program_id(1).to(tl.int64)
    seq = tl.program_id(2).to(tl.int64)
    # From here to the end `row` is a head of the group; int32 is enough inside the group.
    first_head = kv_head * GROUP
    out_group = (seq * tl.num_programs(1) * GROUP + first_head) * num_slices + first_slice + part
    exact_len = tl.load(exact_lens + seq)
    num_pages = tl.cdiv(exact_len, PAGE_SIZE)
    is_exact = True
    if BITS:
        is_exact = part < exact_slices
        if not is_exact:
            num_pages = tl.load(warm[6] + seq)
            part -= exact_slices
            parts = tl.num_programs(0) - exact_slices
    # Each sequence is cut by its own length, so that in a ragged batch every slice of it has the same work.
    pages_per_slice = tl.cdiv(num_pages, parts)
    first_page = part * pages_per_slice
    last_page = tl.minimum(first_page + pages_per_slice, num_pages)

    row = tl.arange(0, BLOCK_G)
    row_mask = row < GROUP
    if first_page >= last_page:
        # Nothing else of an empty slice is read by the merge.
        tl.store(lse + out_group + row * num_slices, float("-inf"), mask=row_mask)
        return
    q_group = q + seq * stride_q_token + first_head * stride_q_head
    logit_group = None
    if EMIT:
        logit_group = logits + seq * stride_logits_seq + first_head * stride_logits_head
    lse_group = lse + out_group
    out_group = out + out_group * HEAD_DIM
    if BITS and not is_exact:
        units_k, units_v, signs, codes, high, records, _ = warm
        at = seq * stride_codes
        decode_codes(
            q_group, out_group, lse_group, None if logit_group is None else logit_group + first_column,
            units_k + kv_head * stride_units_k, units_v + kv_head * stride_units_v,
            codes + at, None if high is None else high + at, records + at, signs, first_page, last_page, scale,
            stride_q_head, num_slices * HEAD_DIM, num_slices, stride_logits_head, record_bytes,
            GROUP, HEAD_DIM, BLOCK_D, PAGE_SIZE, EMIT, BITS, BLOCK_W, BLOCK_H, FACTOR,
        )
        return
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = row_mask[:, None] & (dim < HEAD_DIM)
    q_tile = tl.load(q_group + row[:, None] * stride_q_head + dim, mask=mask, other=0.0)
    logit_rows = None
    if EMIT:
        logit_rows = logit_group + row[:, None].to(tl.int64) * stride_logits_head

    pages = page_table + seq * stride_table
    k_head = k_cache + kv_head * stride_k_head
    v_head = v_cache + kv_head * stride_v_head
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_G, PAGE_SIZE], tl.float32)
    full_end = tl.minimum(last_page, exact_len // PAGE_SIZE)
    for page in range(first_page, full_end):
        frame = tl.load(pages + page).to(tl.int64)
        acc, row_max, row_sum = attend_page(
            q_tile, k_head + frame * stride_k_frame, v_head + frame * stride_v_frame, page * PAGE_SIZE, exact_len,
            exact_len, logit_rows, row_mask[:, None], scale, acc, row_max, row_sum,
            HEAD_DIM, BLOCK_D, PAGE_SIZE, False, EMIT, True,
        )
    if full_end < last_page:
        frame = tl.load(pages + full_end).to(tl.int64)
        acc, row_max, row_sum = attend_page(
            q_tile, k_head + frame * stride_k_frame, v_head + frame * stride_v_frame, full_end * PAGE_SIZE, exact_len,
            exact_len, logit_rows, row_mask[:, None], scale, acc, row_max, row_sum,
            HEAD_DIM, BLOCK_D, PAGE_SIZE, True, EMIT, True,
        )
    total = tl.sum(row_sum, 1)
    result = (acc * (1.0 / total)[:, None]).to(out.dtype.element_ty)
    tl.store(out_group + row[:, None] * (num_slices * HEAD_DIM) + dim, result, mask=mask)
    tl.store(lse_group + row * num_slices, row_max + tl.log2(total), mask=row_mask)


@triton.jit
def _add_slices(acc, rows, lse_row, total, first, last, mask, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr):
    """acc [BLOCK_D] plus the slices [first, last), each times its share of the whole softmax."""
    for start in range(first, last, CHUNK):
        chunk = start + tl.arange(0, CHUNK)
        chunk_lse = tl.load(lse_row + chunk, mask=chunk < last, other=float("-inf"))
        written = (chunk_lse > float("-inf"))[:, None] & mask
        part = tl.load(rows + chunk[:, None] * HEAD_DIM, mask=written, other=0.0)
        acc += tl.sum(tl.exp2(chunk_lse - total)[:, None] * part, 0)
    return acc


@triton.jit(do_not_specialize=["exact_slices", "num_slices"])
def _merge_kernel(
    partial_out,  # [num_decodes, Hq, slices, D] float32; from slice exact_slices on in the rotated basis of kernels.ops
    partial_lse,  # [num_decodes, Hq, slices] float32; -inf: the slice was empty, its partial_out is not written
    out,  # [num_decodes, Hq, D], contiguous
    lse,  # [num_decodes, Hq] float32, contiguous. Written if EMIT
    signs,  # [D, D], see signs_of. Read if ROTATE
    exact_slices,
    num_slices,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SLICES: tl.constexpr,
    CHUNK: tl.constexpr,
    EMIT: tl.constexpr,
    ROTATE: tl.constexpr,
    FACTOR: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # sequence * Hq + head
    part = tl.arange(0, MAX_SLICES)
    lse_row = partial_lse + row * num_slices
    part_lse = tl.load(lse_row + part, mask=part < num_slices, other=float("-inf"))
    # Slice 0 is never empty, so the maximum is finite.
    largest = tl.max(part_lse, 0)
    total = largest + tl.log2(tl.sum(tl.exp2(part_lse - largest), 0))
    if EMIT:
        tl.store(lse + row, total)
    dim = tl.arange(0, BLOCK_D)[None, :]
    rows = partial_out + row * num_slices * HEAD_DIM + dim
    acc = tl.zeros([BLOCK_D], tl.float32)
    if ROTATE:
        acc = _add_slices(acc, rows, lse_row, total, exact_slices, num_slices, dim < HEAD_DIM, HEAD_DIM, CHUNK)
        channel = tl.arange(0, BLOCK_D)[:, None]
        mask = (channel < HEAD_DIM) & (dim < HEAD_DIM)
        matrix = tl.load(signs + channel * HEAD_DIM + dim, mask=mask, other=0.0).to(tl.float32)
        acc = tl.sum(acc[:, None] * matrix, 0) * FACTOR
    acc = _add_slices(acc, rows, lse_row, total, 0, exact_slices, dim < HEAD_DIM, HEAD_DIM, CHUNK)
    column = tl.arange(0, BLOCK_D)
    tl.store(out + row * HEAD_DIM + column, acc.to(out.dtype.element_ty), mask=column < HEAD_DIM)


def decode_attention(
    q: Tensor,
    cache: LayerCache,
    plan: AttentionPlan,
    scale: float,
    logits: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention of the sequences [0, plan.num_decodes), one query each. Tensors as in `Ops`."""
    group, page_size = check(q, cache, plan, scale)
    num_seqs, num_heads, head_dim = q.shape
    assert num_seqs == plan.num_decodes, f"q has {num_seqs} tokens, the plan {plan.num_decodes} decodes"
    if logits is not None:
        assert logits.dtype == torch.float32 and logits.stride(2) == 1, f"logits {logits.dtype} {logits.stride()}"
        columns = plan.num_columns(page_size)
        assert logits.shape == (num_seqs, num_heads, columns), f"logits {tuple(logits.shape)} for {columns} columns"
    if lse is not None:
        assert lse.dtype == torch.float32 and lse.is_contiguous(), f"lse {lse.dtype} {lse.stride()}"
        assert lse.shape == (num_seqs, num_heads), f"lse {tuple(lse.shape)}"
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_seqs == 0:
        return out
    num_kv_heads, formats = num_heads // group, [warm for warm in plan.warm if warm.codes.shape[1]]
    tokens = [plan.max_exact_len] + [warm.codes.shape[1] * page_size for warm in formats]
    exact_slices, *warm_slices = count_slices(num_seqs * num_kv_heads, tokens, page_size, _num_multiprocessors(q))
    num_slices = exact_slices + sum(warm_slices)
    if num_slices == 1:
        partial_out = out
        partial_lse = lse if lse is not None else q.new_empty(num_seqs, num_heads, dtype=torch.float32)
    else:
        partial_out = q.new_empty(num_seqs, num_heads, num_slices, head_dim, dtype=torch.float32)
        partial_lse = q.new_empty(num_seqs, num_heads, num_slices, dtype=torch.float32)
    (num_warps, num_stages), padded_d = _decode_config(q.dtype), block_d(head_dim)
    signs = signs_of(head_dim, q.dtype, q.device) if formats else None
    first_slice, column, launch_exact = 0, plan.page_table.shape[1] * page_size, exact_slices
    launches: list[tuple[WarmPages | None, int]] = list(zip(formats, warm_slices, strict=True)) or [(None, 0)]
    for warm, slices in launches:
        planes: tuple[Tensor | None, ...] = ()
        sizes, bits, width = (0, 0, 0, 0, 0), 0, 0
        if warm is not None:
            planes = (cache.units_k, cache.units_v, signs, warm.codes, warm.high, warm.records, warm.counts)
            strides = cache.units_k.stride(0), cache.units_v.stride(0), warm.codes.stride(0)
            sizes = (*strides, warm.record_bytes, column)
            bits, width = warm.bits, head_dim * (2 if warm.bits == 3 else warm.bits) // 8
            column += warm.codes.shape[1] * page_size
        _decode_kernel[(launch_exact + slices, num_kv_heads, num_seqs)](
            q, cache.k, cache.v, partial_out, partial_lse, logits, plan.page_table, plan.exact_lens, scale * LOG2_E,
            launch_exact, first_slice, num_slices,
            *q.stride()[:2], *cache.k.stride()[:2], *cache.v.stride()[:2], plan.page_table.stride(0),
            *((0, 0) if logits is None else logits.stride()[:2]), planes, *sizes,
            GROUP=group, HEAD_DIM=head_dim, BLOCK_D=padded_d, BLOCK_G=max(16, triton.next_power_of_2(group)),
            PAGE_SIZE=page_size, EMIT=logits is not None, BITS=bits, BLOCK_W=max(32, triton.next_power_of_2(width)),
            BLOCK_H=triton.next_power_of_2(group), FACTOR=factor_of(head_dim),
            num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True,
        )
        first_slice, launch_exact = first_slice + launch_exact + slices, 0
    if num_slices > 1:
        _merge_kernel[(num_seqs * num_heads,)](
            partial_out, partial_lse, out, lse, signs, exact_slices, num_slices,
            HEAD_DIM=head_dim, BLOCK_D=padded_d, MAX_SLICES=MAX_SLICES, CHUNK=MERGE_CHUNK, EMIT=lse is not None,
            ROTATE=bool(formats), FACTOR=factor_of(head_dim), num_warps=4, enable_fp_fusion=True,
        )
    return out


def count_slices(rows: int, tokens: list[int], page_size: int, num_sms: int) -> list[int]:
    """How many programs share the exact tokens, and the tokens of each compressed format, of one sequence and KV head,
    of which there are `rows`: enough to fill the device, of MIN_SLICE_TOKENS exact tokens at least.

    Four programs fit on a multiprocessor (each holds one K and one V page in shared memory) and hide each other's
    latency. An exact token takes about twice the time of a compressed one.
    """
    wanted = min(triton.cdiv(4 * num_sms, rows), MAX_SLICES + 1 - len(tokens))
    weights = [2 * tokens[0], *tokens[1:]]
    shares = (triton.cdiv(wanted * weight, sum(weights)) for weight in weights)
    most = (triton.cdiv(weight, 2 * max(MIN_SLICE_TOKENS, page_size)) for weight in weights)
    return [max(1, int(min(pair))) for pair in zip(shares, most, strict=True)]


def _num_multiprocessors(x: Tensor) -> int:
    # On a CPU only the interpreter runs this: few slices keep it fast, more than one keep the merge in use.
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count) if x.is_cuda else 2


# Chosen by compiling for sm_80 to sm_100 (tools.profile_kernels). Three stages make the page ids asynchronous copies
# too; with two, every page waits for its id. In float32 the dots run on the CUDA cores and need small tiles.


def _decode_config(dtype: torch.dtype) -> tuple[int, int]:
    """(warps, stages)."""
    return (8, 1) if dtype == torch.float32 else (2, 3)
