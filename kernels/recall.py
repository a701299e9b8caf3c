"""Attention that reads the tokens that matter most from the copies of their pages: see `Ops.recall`.

    score    program (tile of a block's rows, KV head, slice of pages): squares of the attention that each compressed
             token got; -1 where there is no copy
    select   torch.topk, of all KV heads together, then of each: its radix select reads the scores a few times, 4 bytes
             a token where scoring read a whole K
    swap     program (block of queries, KV head, tile of its rows): takes away what the chosen tokens gave, and goes on
             from there with their copies

As in kernels.attention, row = query * GROUP + head of the group. Copies lie in the host's memory, and a program reads
the rows of its tokens over the bus: so a tile has all rows of a block, up to MOST_ROWS of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import LOG2_E, attend, check_attention
from kernels.codes import block_of, check, factor_of, offsets_of, rotate, signs_of, tile_of
from kernels.ops import SPREAD, AttentionPlan, LayerCache, Overlay

TOKENS = tl.constexpr(16)  # that are decompressed at a time
MOST_ROWS = 128
SLICE_TOKENS = 512


@triton.jit
def _load_rows(rotated, lse, blocks, block, tile, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile of a block's rows: q [BLOCK_M, BLOCK_D]; lse, their numbers among all and which there are [BLOCK_M, 1]."""
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    mask = row < tl.load(blocks + block * 4 + 2) * GROUP
    query = tl.load(blocks + block * 4 + 1).to(tl.int64) + row // GROUP
    number = (query * tl.num_programs(1) + tl.program_id(1)) * GROUP + row % GROUP
    dim = tl.arange(0, block_of(HEAD_DIM))[None, :]
    q = tl.load(rotated + number * HEAD_DIM + dim, mask=mask & (dim < HEAD_DIM), other=0.0)
    # So large that the logits of rows of no query count for nothing.
    return q, tl.load(lse + number, mask=mask, other=1e30), number, mask


@triton.jit
def _load_chosen(chosen, start, count):
    """Columns [TOKENS, 1] of the chosen tokens from `start` on, and which there are."""
    at = start + tl.arange(0, TOKENS)[:, None]
    return tl.load(chosen + at, mask=at < count, other=0).to(tl.int32), at < count


@triton.jit(do_not_specialize=["pages", "tiles"])  # they change from step to step
def _score_kernel(
        rotated, lse, mass, blocks, slots, units_k, warm, pages, tiles, scale, stride_units, GROUP: tl.constexpr,
        HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, PAGE_SIZE: tl.constexpr, FORMATS: tl.constexpr):
    """The attention that some compressed tokens get of a tile of a block's rows.

    rotated [T, Hq, D], q in the basis of compressed pages; lse [T, Hq] float32: contiguous
    mass [N, tiles, Hkv, pages * PAGE_SIZE] float32, of -1
    blocks [N, 4] int32 of Recall
    slots [B, pages] int32: the copies of the pages of all formats
    warm: of each format: codes, high, records, counts of WarmPages, stride of the tables, record_bytes, pages of a row
    FORMATS: bits of each
    """
    block = tl.program_id(0) // tiles
    q, old, _, _ = _load_rows(rotated, lse, blocks, block, tl.program_id(0) % tiles, GROUP, HEAD_DIM, BLOCK_M)
    scale *= 2  # of the logarithms of squares
    old *= 2
    seq = tl.load(blocks + block * 4).to(tl.int64)
    slots += seq * pages
    plane = units_k + tl.program_id(1).to(tl.int64) * stride_units
    mass += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * pages * PAGE_SIZE
    for f in tl.static_range(len(FORMATS)):
        for page in range(tl.program_id(2), tl.load(warm[f][3] + seq), tl.num_programs(2)):
            if tl.load(slots + page) >= 0:
                at = seq * warm[f][4] + page
                run, high, record = offsets_of(warm[f], at, warm[f][5], HEAD_DIM, PAGE_SIZE, FORMATS[f])
                run, high, record = plane + run, plane + high, plane + record
                for first in range(0, PAGE_SIZE, TOKENS):
                    token = first + tl.arange(0, TOKENS)
                    k = tile_of(run, high, record, token[:, None], HEAD_DIM, PAGE_SIZE, FORMATS[f], True)
                    logit = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
                    tl.store(mass + page * PAGE_SIZE + token, tl.sum(tl.exp2(logit * scale - old), 0))
        mass += warm[f][6] * PAGE_SIZE
        slots += warm[f][6]


@triton.jit(do_not_specialize=["pages", "most", "entries"])
def _swap_kernel(
        q, out, ends, chosen, copies, overlay, places, entries, rotated, lse, blocks, slots, units_k, units_v, signs,
        warm, pages, most, scale, stride_units, stride_slot, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
        BLOCK_M: tl.constexpr, PAGE_SIZE: tl.constexpr, FORMATS: tl.constexpr):
    """Exchange, in the output of a tile of a block's rows, the chosen tokens for their copies.

    q, out [T, Hq, D], contiguous; out is read, then written
    chosen [N, Hkv, most]: columns, the best first; ends [N, Hkv] int32: how many of them
    copies: of LayerCache; a slot has no gaps
    overlay [Hkv, entries, 2, D], places [N, Hkv, most] int32: see `_places`; or None
    signs [D, D]: see `signs_of`; the others as above
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    seq = tl.load(blocks + block * 4).to(tl.int64)
    count = tl.load(ends + block * tl.num_programs(1) + kv_head)
    first = (block * tl.num_programs(1) + kv_head) * most
    chosen += first
    q_tile, old, number, mask = _load_rows(rotated, lse, blocks, block, tl.program_id(2), GROUP, HEAD_DIM, BLOCK_M)
    units_k += kv_head * stride_units
    units_v += kv_head * stride_units
    acc = tl.zeros([BLOCK_M, block_of(HEAD_DIM)], tl.float32)
    taken = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, count, TOKENS):
        column, found = _load_chosen(chosen, start, count)
        page, token = column // PAGE_SIZE, column % PAGE_SIZE
        k, v = tl.zeros([TOKENS, 1], tl.float32), tl.zeros([TOKENS, 1], tl.float32)
        for f in tl.static_range(len(FORMATS)):
            here = (page >= 0) & (page < warm[f][6])
            at = seq * warm[f][4] + tl.where(here, page, 0)
            run, high, record = offsets_of(warm[f], at, warm[f][5], HEAD_DIM, PAGE_SIZE, FORMATS[f])
            some_k = tile_of(units_k + run, units_k + high, units_k + record, token,
                             HEAD_DIM, PAGE_SIZE, FORMATS[f], True)
            some_v = tile_of(units_v + run, units_v + high, units_v + record, token,
                             HEAD_DIM, PAGE_SIZE, FORMATS[f], False)
            k, v = tl.where(here, some_k, k), tl.where(here, some_v, v)
            page -= warm[f][6]
        logit = tl.dot(q_tile, tl.trans(k.to(q_tile.dtype)), input_precision="ieee")
        p = tl.exp2(tl.where(tl.trans(found), logit, float("-inf")) * scale - old)
        taken += tl.sum(p, 1)
        acc = tl.dot(p.to(q_tile.dtype), v.to(q_tile.dtype), acc, input_precision="ieee")
    dim = tl.arange(0, block_of(HEAD_DIM))[None, :]
    offsets, mask = number * HEAD_DIM + dim, mask & (dim < HEAD_DIM)
    acc = tl.load(out + offsets, mask=mask, other=0.0).to(tl.float32) - rotate(acc, signs, HEAD_DIM)
    q_tile = tl.load(q + offsets, mask=mask, other=0.0)
    state = (acc, tl.reshape(old, [BLOCK_M]), tl.maximum(1.0 - taken, 2.0**-20))
    INT8: tl.constexpr = copies.dtype.element_ty == tl.int8
    ROW: tl.constexpr = HEAD_DIM + (2 if INT8 else 0)
    for start in range(0, count, TOKENS):
        column, found = _load_chosen(chosen, start, count)
        slot = tl.load(slots + seq * pages + column // PAGE_SIZE, mask=found, other=0).to(tl.int64)
        row = copies + slot * stride_slot + (kv_head * PAGE_SIZE + column % PAGE_SIZE) * (2 * ROW)
        if overlay is not None:
            place = tl.load(places + first + start + tl.arange(0, TOKENS)[:, None], mask=found, other=-1)
            near = overlay + (kv_head * entries + tl.where(place < 0, -2 - place, place)) * (2 * ROW)
            row = tl.where(place >= 0, near, row)
        k = tl.load(row + dim, mask=found & (dim < HEAD_DIM), other=0)
        v = tl.load(row + ROW + dim, mask=found & (dim < HEAD_DIM), other=0)
        if overlay is not None:
            tl.store(near + dim, k, mask=(place < -1) & (dim < HEAD_DIM))
            tl.store(near + ROW + dim, v, mask=(place < -1) & (dim < HEAD_DIM))
        if INT8:
            scales = (row + HEAD_DIM).to(tl.pointer_type(tl.float16), bitcast=True)
            k = k.to(tl.float32) * tl.load(scales, mask=found, other=0.0).to(tl.float32)
            v = v.to(tl.float32) * tl.load(scales + ROW // 2, mask=found, other=0.0).to(tl.float32)
        visible = tl.sum(found.to(tl.int32))  # those that there are come first
        state = attend(q_tile, k.to(q_tile.dtype), v.to(q_tile.dtype), scale, state, 0, visible, 0, None, None)
    tl.store(out + offsets, (state[0] / state[2][:, None]).to(out.dtype.element_ty), mask=mask)


def _places(overlay: Overlay, keys: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """Where the rows of these keys [Hkv, M] are in the overlay: their entry; -2 - entry of those that are to be put
    there, in the place of what was read least lately; -1 of others. And what its keys are then. found: which are read.
    """
    count = overlay.rows.shape[1]
    known, order = overlay.keys[:, :count].sort(1)
    near = torch.searchsorted(known, keys).clamp_max_(count - 1)
    here = found & (known.gather(1, near) == keys)
    at = torch.where(here, order.gather(1, near), count)
    recency = overlay.recency.mul_(0.5).scatter_(1, at, 1.0)
    recency[:, count] = 1.0  # which is no entry
    ordered, place = torch.where(found & ~here, keys, -1).sort(1)
    # Of sequences that share pages, one puts the row there.
    first = torch.ones_like(found).scatter_(1, place[:, 1:], ordered[:, 1:] != ordered[:, :-1])
    new = found & ~here & first
    rank = new.cumsum(1) - 1
    new &= rank < (recency < 1).sum(1, keepdim=True)
    entry = torch.where(new, recency.argsort(1).gather(1, rank.clamp_(0, count)), count)
    recency.scatter_(1, entry, 1.0)
    overlay.counts.add_(torch.stack([found.sum(), here.sum()]))
    places = torch.where(here, at, torch.where(new, -2 - entry, -1)).int()
    return places, overlay.keys.scatter(1, entry, keys)


def recall(q: Tensor, out: Tensor, lse: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float) -> Tensor:
    """Attention in which the compressed tokens that matter most are exact. Tensors as in `Ops`."""
    group, page_size = check_attention(q, cache, plan, scale, lse)
    head_dim, num_kv_heads, copies = q.shape[2], cache.k.shape[0], cache.copies
    assert plan.recall is not None and copies is not None, "there are no copies"
    most = -(-plan.recall.most * cache.share // 64)
    blocks, formats = plan.recall.blocks, [warm for warm in plan.warm if warm.codes.shape[1]]
    slots = torch.cat([warm.copies for warm in formats if warm.copies is not None], 1)
    pages, width = sum(warm.codes.shape[1] for warm in formats), head_dim + 2 * (copies.dtype == torch.int8)
    check("slots", slots, (*plan.exact_lens.shape, pages), (torch.int32,))
    check("blocks", blocks, (len(blocks), 4), (torch.int32,), (4, 1))
    shape, strides = (len(copies), num_kv_heads, page_size, 2, width), (page_size * 2 * width, 2 * width, width, 1)
    check("copies", copies, shape, (q.dtype, torch.int8), strides)
    rows = group * min(plan.recall.block, max(plan.max_query_len, 1))
    block_m = min(16 if q.dtype == torch.float32 else MOST_ROWS, max(16, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(rows, block_m)
    mass = lse.new_full((len(blocks), tiles, num_kv_heads, pages * page_size), -1.0)
    signs, q = signs_of(head_dim, q.dtype, q.device), q.contiguous()
    result = out.clone(memory_format=torch.contiguous_format)
    rotated = torch.matmul(q, signs).mul_(factor_of(head_dim))
    tables = tuple(
        (w.codes, w.high, w.records, w.counts, w.codes.stride(0), w.record_bytes, w.codes.shape[1]) for w in formats)
    options = {  # more stages spill
        "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_M": block_m, "PAGE_SIZE": page_size,
        "FORMATS": tuple(warm.bits for warm in formats), "num_stages": 1, "enable_fp_fusion": True}
    _score_kernel[(len(blocks) * tiles, num_kv_heads, triton.cdiv(mass.shape[3], SLICE_TOKENS))](
        rotated, lse, mass, blocks, slots, cache.units_k, tables, pages, tiles, scale * LOG2_E,
        cache.units_k.stride(0), **options, num_warps=4)
    mass = mass[:, 0] if tiles == 1 else mass.sum(1)
    joint = mass.flatten(1)  # of all heads of a block
    wanted = blocks[:, 3:] * cache.share // 64
    order = joint.topk(min(most * num_kv_heads, joint.shape[1])).indices
    ranks = torch.arange(order.shape[1], device=q.device)
    taken = torch.zeros_like(joint, dtype=torch.bool).scatter_(1, order, ranks < wanted * num_kv_heads)
    best, chosen = joint.masked_fill_(~taken, -1.0).view_as(mass).topk(min(SPREAD * most, mass.shape[2]))
    ends = torch.minimum((best > 0).sum(2), SPREAD * wanted).int()  # the best come first
    overlay, places = cache.overlay if not plan.max_query_len else None, None
    if overlay is not None:
        keys = slots[blocks[:, :1, None].long(), chosen // page_size] * page_size + chosen.int() % page_size
        found = torch.arange(chosen.shape[2], device=q.device) < ends[..., None]
        flat = (x.transpose(0, 1).flatten(1) for x in (keys, found))
        places, after = _places(overlay, *flat)
        places = places.view(num_kv_heads, len(blocks), -1).transpose(0, 1).contiguous()
    _swap_kernel[(len(blocks), num_kv_heads, tiles)](
        q, result, ends, chosen, copies, overlay and overlay.rows, places, overlay.rows.shape[1] if overlay else 0,
        rotated, lse, blocks, slots, cache.units_k, cache.units_v, signs, tables, pages, chosen.shape[2],
        scale * LOG2_E, cache.units_k.stride(0), copies.stride(0),
        **options, num_warps=8 if block_m * head_dim > 4096 else 4)
    if overlay is not None:  # now that the rows are there
        overlay.keys.copy_(after)
    return result
