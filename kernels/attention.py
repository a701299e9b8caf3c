"""Attention over the page table: flash-style for prefill chunks (kernels.prefill), split-KV for decode (here, with what
both share).

Softmax works in base 2 (exp2 is an instruction, exp is not): logit = log2(e) * scale * q.k, in float32 throughout.

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

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.codes import FLOATS, block_of, check, decode_codes, factor_of, load_signs, signs_of, weigh
from kernels.ops import AttentionPlan, LayerCache

LOG2_E = math.log2(math.e)
MIN_SLICE_TOKENS = 128  # below it, the partial results cost more to write and merge than the slice wins
MAX_SLICES = 128  # the merge holds one log-sum-exp per slice in registers
MERGE_CHUNK = 16  # slices the merge reads at a time


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
def attend_page(q, scale, state, pages, page, visible, num_tokens, logits, row_mask, HEAD_DIM: tl.constexpr,
                PAGE_SIZE: tl.constexpr):
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


def check_attention(q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float,
                    lse: Tensor | None = None) -> tuple[int, int]:
    """What the kernels of attention assume -> (query heads per KV head, page size)."""
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, frames, page_size, _ = cache.k.shape
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads for {num_kv_heads} KV heads"
    assert page_size >= 16 and page_size & (page_size - 1) == 0, f"page_size {page_size} is no power of two from 16 up"
    assert scale > 0, f"scale {scale}: the maximum is taken before the scale"
    check("q", q, q.shape, FLOATS)
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
            check(f"warm[{i}].{name}", table, (sequences, warm.codes.shape[1]), int32, (warm.codes.stride(0), 1))
        check(f"warm[{i}].counts", warm.counts, (sequences,), int32)
    for name, units in (("units_k", cache.units_k), ("units_v", cache.units_v)) if plan.warm else ():
        shape = (num_kv_heads, units.shape[1], page_size * head_dim // 8)
        check(name, units, shape, (torch.uint8,), (shape[2], 1))
        assert units.data_ptr() % 4 == units.stride(0) % 4 == 0, f"{name} at {units.data_ptr()}, {units.stride()}"
    return num_heads // num_kv_heads, page_size


@triton.jit(do_not_specialize=[  # they change from step to step
    "exact_slices", "first_slice", "num_slices", "stride_table", "stride_logits_seq", "stride_logits_head",
    "stride_codes", "first_column"])
def _decode_kernel(
        q, k_cache, v_cache, out, lse, logits, page_table, exact_lens, scale, exact_slices, first_slice, num_slices,
        stride_q_token, stride_q_head, stride_k_head, stride_k_frame, stride_v_head, stride_v_frame, stride_table,
        stride_logits_seq, stride_logits_head, first_column, warm, stride_codes,
        GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BITS: tl.constexpr):
    """A slice of a sequence and KV head.

    q [num_decodes, Hq, D]; k_cache, v_cache [Hkv, frames, PAGE_SIZE, D], pages without gaps
    out [num_decodes, Hq, slices, D]: float32 partial results; the result itself if there is one slice
    lse [num_decodes, Hq, slices] float32; logits [num_decodes, Hq, columns] float32, or None
    page_table [B, max_pages], exact_lens [B] int32
    exact_slices: of this launch; the others are of compressed pages
    first_column: of the logits of compressed pages
    warm: counts, codes, high, records of WarmPages, signs, units_k, units_v, their strides, record_bytes. Read if BITS
    BITS: 0 without compressed pages
    """
    part = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    seq = tl.program_id(2).to(tl.int64)
    # From here to the end `row` is a head of the group; int32 is enough inside the group.
    first_head = kv_head * GROUP
    out_group = (seq * tl.num_programs(1) * GROUP + first_head) * num_slices + first_slice + part
    length = tl.load(exact_lens + seq)
    num_pages = tl.cdiv(length, PAGE_SIZE)
    parts = exact_slices
    is_exact = part < exact_slices
    if BITS and not is_exact:
        num_pages = tl.load(warm[0] + seq)
        part -= exact_slices
        parts = tl.num_programs(0) - exact_slices
    # Each sequence is cut by its own length, so that in a ragged batch every slice of it has the same work.
    pages_per_slice = tl.cdiv(num_pages, parts)
    first_page = part * pages_per_slice
    last_page = tl.minimum(first_page + pages_per_slice, num_pages)

    BLOCK_G: tl.constexpr = block_of(GROUP)
    row = tl.arange(0, BLOCK_G)[:, None]
    row_mask = row < GROUP
    if first_page >= last_page:
        # Nothing else of an empty slice is read by the merge.
        tl.store(lse + out_group + row * num_slices, float("-inf"), mask=row_mask)
        return
    q += seq * stride_q_token + first_head * stride_q_head
    lse += out_group
    out += out_group * HEAD_DIM
    if logits is not None:
        logits += seq * stride_logits_seq + first_head * stride_logits_head
    if BITS and not is_exact:
        _, codes, high, records, signs, units_k, units_v, stride_units_k, stride_units_v, record_bytes = warm
        at = seq * stride_codes
        tables = (codes + at, None if high is None else high + at, records + at)
        decode_codes(
            q, out, lse, None if logits is None else logits + first_column,
            units_k + kv_head * stride_units_k, units_v + kv_head * stride_units_v, tables, signs,
            first_page, last_page, scale, num_slices, stride_q_head, stride_logits_head, record_bytes,
            GROUP, HEAD_DIM, PAGE_SIZE, BITS)
        return
    dim = tl.arange(0, block_of(HEAD_DIM))[None, :]
    mask = row_mask & (dim < HEAD_DIM)
    q_tile = tl.load(q + row * stride_q_head + dim, mask=mask, other=0.0)
    acc = tl.zeros([BLOCK_G, block_of(HEAD_DIM)], tl.float32)
    row_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_G, PAGE_SIZE], tl.float32)
    state = (acc, row_max, row_sum)
    k_head, v_head = k_cache + kv_head * stride_k_head, v_cache + kv_head * stride_v_head
    pages = (k_head, v_head, stride_k_frame, stride_v_frame, page_table + seq * stride_table)
    if logits is not None:
        logits += row.to(tl.int64) * stride_logits_head
    full = tl.minimum(last_page, length // PAGE_SIZE)
    for page in range(first_page, full):
        state = attend_page(q_tile, scale, state, pages, page, None, length, logits, row_mask, HEAD_DIM, PAGE_SIZE)
    if full < last_page:
        state = attend_page(q_tile, scale, state, pages, full, length, length, logits, row_mask, HEAD_DIM, PAGE_SIZE)
    acc, row_max, row_sum = state
    total = tl.sum(row_sum, 1)
    result = (acc * (1.0 / total)[:, None]).to(out.dtype.element_ty)
    tl.store(out + row * (num_slices * HEAD_DIM) + dim, result, mask=mask)
    tl.store(lse + row * num_slices, (row_max + tl.log2(total))[:, None], mask=row_mask)


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
def _merge_kernel(partial_out, partial_lse, out, lse, signs, exact_slices, num_slices, HEAD_DIM: tl.constexpr,
                  MAX_SLICES: tl.constexpr, CHUNK: tl.constexpr):
    """The slices of a sequence and query head as one.

    partial_out [num_decodes, Hq, slices, D] float32; from slice exact_slices on in the rotated basis of kernels.ops
    partial_lse [num_decodes, Hq, slices] float32; -inf: the slice was empty, its partial_out is not written
    out [num_decodes, Hq, D], lse [num_decodes, Hq] float32 or None: contiguous
    signs [D, D], see signs_of. None if nothing is rotated
    """
    row = tl.program_id(0).to(tl.int64)  # sequence * Hq + head
    part = tl.arange(0, MAX_SLICES)
    lse_row = partial_lse + row * num_slices
    part_lse = tl.load(lse_row + part, mask=part < num_slices, other=float("-inf"))
    # Slice 0 is never empty, so the maximum is finite.
    largest = tl.max(part_lse, 0)
    total = largest + tl.log2(tl.sum(tl.exp2(part_lse - largest), 0))
    if lse is not None:
        tl.store(lse + row, total)
    dim = tl.arange(0, block_of(HEAD_DIM))
    mask = dim < HEAD_DIM
    rows = partial_out + row * num_slices * HEAD_DIM + dim[None, :]
    acc = tl.zeros([block_of(HEAD_DIM)], tl.float32)
    if signs is not None:
        acc = _add_slices(acc, rows, lse_row, total, exact_slices, num_slices, mask[None, :], HEAD_DIM, CHUNK)
        acc = tl.sum(acc[:, None] * load_signs(signs, HEAD_DIM).to(tl.float32), 0) * factor_of(HEAD_DIM)
    acc = _add_slices(acc, rows, lse_row, total, 0, exact_slices, mask[None, :], HEAD_DIM, CHUNK)
    tl.store(out + row * HEAD_DIM + dim, acc.to(out.dtype.element_ty), mask=mask)


def decode_attention(q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float, logits: Tensor | None = None,
                     lse: Tensor | None = None) -> Tensor:
    """Attention of the sequences [0, plan.num_decodes), one query each. Tensors as in `Ops`."""
    group, page_size = check_attention(q, cache, plan, scale, lse)
    num_seqs, num_heads, head_dim = q.shape
    assert num_seqs == plan.num_decodes, f"q has {num_seqs} tokens, the plan {plan.num_decodes} decodes"
    if logits is not None:
        check("logits", logits, (num_seqs, num_heads, plan.num_columns(page_size)), (torch.float32,))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_seqs == 0:
        return out
    num_kv_heads, formats = num_heads // group, [warm for warm in plan.warm if warm.codes.shape[1]]
    # Of the widths of the tables, so that launches depend on shapes alone.
    tokens = [table.shape[1] * page_size for table in (plan.page_table, *(warm.codes for warm in formats))]
    exact_slices, *warm_slices = count_slices(num_seqs * num_kv_heads, tokens, page_size, _num_multiprocessors(q))
    num_slices = exact_slices + sum(warm_slices)
    partial, shape = num_slices > 1, (num_seqs, num_heads, num_slices)
    partial_out = q.new_empty(*shape, head_dim, dtype=torch.float32) if partial else out
    partial_lse = q.new_empty(shape, dtype=torch.float32) if partial or lse is None else lse
    # Chosen by compiling for sm_80 to sm_100 (tools.profile_kernels). Three stages make the page ids asynchronous
    # copies too; with two, every page waits for its id. In float32 the dots run on the CUDA cores and need small tiles.
    num_warps, num_stages = (8, 1) if q.dtype == torch.float32 else (2, 3)
    signs = signs_of(head_dim, q.dtype, q.device) if formats else None
    first_slice, first_column, launch_exact = 0, plan.page_table.shape[1] * page_size, exact_slices
    for warm, slices, columns in zip(formats or (None,), warm_slices or [0], tokens[1:] or [0], strict=True):
        units = (cache.units_k, cache.units_v, cache.units_k.stride(0), cache.units_v.stride(0))
        pages = warm and (warm.counts, warm.codes, warm.high, warm.records, signs, *units, warm.record_bytes)
        stride_codes, bits = (warm.codes.stride(0), warm.bits) if warm else (0, 0)
        _decode_kernel[(launch_exact + slices, num_kv_heads, num_seqs)](
            q, cache.k, cache.v, partial_out, partial_lse, logits, plan.page_table, plan.exact_lens, scale * LOG2_E,
            launch_exact, first_slice, num_slices, *q.stride()[:2], *cache.k.stride()[:2], *cache.v.stride()[:2],
            plan.page_table.stride(0), *((0, 0) if logits is None else logits.stride()[:2]), first_column, pages,
            stride_codes, GROUP=group, HEAD_DIM=head_dim, PAGE_SIZE=page_size, BITS=bits,
            num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True)
        first_slice, first_column, launch_exact = first_slice + launch_exact + slices, first_column + columns, 0
    if partial:
        _merge_kernel[(num_seqs * num_heads,)](
            partial_out, partial_lse, out, lse, signs, exact_slices, num_slices,
            HEAD_DIM=head_dim, MAX_SLICES=MAX_SLICES, CHUNK=MERGE_CHUNK, num_warps=4, enable_fp_fusion=True)
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
