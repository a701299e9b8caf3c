"""Compression of exact pages, and back: what `kernels.reference` does. `kernels.ops` has the layout.

A program compresses one page. The rotation itself puts the channels where packing needs them: as PARTS groups of
BLOCK_P columns, group i with the channels from i * D / PARTS on. Then the codes of a byte are one of each group. 3 bits
take 8 groups: as many as there are codes in a byte of the high plane.

Against the reference, only sums are in another order: of a rotation, a mean, a squared error. So a code can differ by
one where its value lies half-way between two, and so can a scale or a mean.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.codes import BIAS, FLOATS, block_of, check, factor_of, lowest, mean_of, rotate, scale_of, signs_of, tile_of
from kernels.ops import CLIPS

LARGEST = tl.constexpr(2.0**14)  # of an element that is compressed
TOKENS = 16  # that a program decompresses


@triton.jit
def _round(x):
    """To the nearest integer, half to even, where |x| < 2^22; to something as large elsewhere."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _compress_kernel(x, codes, records, signs, stride_page, stride_token, HEAD_DIM: tl.constexpr,
                     PAGE_SIZE: tl.constexpr, BITS: tl.constexpr, IS_KEY: tl.constexpr, CLIPS: tl.constexpr):
    """x [N, PAGE_SIZE, D]; codes [N, BITS * PAGE_SIZE * D / 8] uint8
    records [N, PAGE_SIZE + D (K) or 2 * PAGE_SIZE (V)] uint8; signs [D, D], see signs_of"""
    PARTS: tl.constexpr = 8 if BITS == 3 else 8 // BITS
    WIDTH: tl.constexpr = HEAD_DIM // PARTS
    BLOCK_P: tl.constexpr = block_of(WIDTH, 1)
    BLOCK_D: tl.constexpr = block_of(HEAD_DIM)
    STEPS: tl.constexpr = (1 << BITS) - 1
    page = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, PAGE_SIZE)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    column = tl.arange(0, PARTS * BLOCK_P)[None, :]
    used = column % BLOCK_P < WIDTH
    channel = column // BLOCK_P * WIDTH + column % BLOCK_P
    tile = tl.load(x + page * stride_page + token.to(tl.int64) * stride_token + dim, mask=dim < HEAD_DIM, other=0.0)
    tile = tl.where(tile.to(tl.float32) == tile.to(tl.float32), tile.to(tl.float32), 0.0)
    tile = tl.minimum(tl.maximum(tile, -LARGEST), LARGEST).to(x.dtype.element_ty)
    row = tl.arange(0, BLOCK_D)[:, None]
    matrix = tl.load(signs + row * HEAD_DIM + channel, mask=(row < HEAD_DIM) & used, other=0.0)
    rotated = tl.dot(tile, matrix, input_precision="ieee") * factor_of(HEAD_DIM)
    record = records + page * (PAGE_SIZE + (HEAD_DIM if IS_KEY else PAGE_SIZE))
    if IS_KEY:
        mean = tl.sum(rotated, 0)[None, :] * (1.0 / PAGE_SIZE)
        size = ((tl.abs(mean).to(tl.int32, bitcast=True) + 0x7FFFF) >> 20) - (BIAS >> 20)
        code = tl.minimum(tl.maximum(size, 0), 127) | tl.where(mean < 0, 128, 0)
        tl.store(record + PAGE_SIZE + channel, code.to(tl.uint8), mask=used)
        rotated -= mean_of(code)
        high = tl.max(tl.where(used, tl.abs(rotated), 0.0), 1)[:, None]
        low = -high
    else:
        low = tl.min(tl.where(used, rotated, float("inf")), 1)[:, None]
        high = tl.max(tl.where(used, rotated, float("-inf")), 1)[:, None]
    best = tl.full([PAGE_SIZE, 1], float("inf"), tl.float32)
    scale_code = tl.zeros([PAGE_SIZE, 1], tl.int32)
    offset = tl.zeros([PAGE_SIZE, 1], tl.float32)
    for i in tl.static_range(len(CLIPS)):
        half = (high - low) * (CLIPS[i] / 2)
        wanted = tl.maximum(half * (2 / STEPS), tl.div_rn(tl.abs(high + low), 240.0))
        rounding = 0x7FFFF if BITS == 8 else 0x3FFFF
        some_code = ((wanted.to(tl.int32, bitcast=True) + rounding) >> 19) - (lowest(BITS) + 127) * 16
        some_code = tl.minimum(tl.maximum(some_code, 0), 255)
        scale = scale_of(some_code, lowest(BITS))
        inverse = tl.div_rn(1.0, scale)
        some_offset = low * 0 - STEPS * 0.5
        if not IS_KEY:
            some_offset = _round((high + low) * 0.5 * inverse - STEPS * 0.5)
            some_offset = tl.minimum(tl.maximum(some_offset, -128 - (1 << BITS - 1)), 127 - (1 << BITS - 1))
        trial = tl.minimum(tl.maximum(_round(rotated * inverse - some_offset), 0.0), STEPS)
        error = (trial + some_offset) * scale - rotated
        error = tl.sum(tl.where(used, error * error, 0.0), 1)[:, None]
        better = error < best
        best = tl.where(better, error, best)
        scale_code = tl.where(better, some_code, scale_code)
        offset = tl.where(better, some_offset, offset)
    inverse = tl.div_rn(1.0, scale_of(scale_code, lowest(BITS)))
    code = tl.minimum(tl.maximum(_round(rotated * inverse - offset), 0.0), STEPS).to(tl.int32)
    tl.store(record + token, scale_code.to(tl.uint8))
    if not IS_KEY:
        tl.store(record + PAGE_SIZE + token, (offset + (1 << BITS - 1)).to(tl.int32).to(tl.uint8))

    run = codes + page * (BITS * PAGE_SIZE * HEAD_DIM // 8)
    code = tl.reshape(code, [PAGE_SIZE, PARTS, BLOCK_P])
    part = tl.arange(0, PARTS)[None, :, None]
    at = token * WIDTH + tl.arange(0, BLOCK_P)[None, :]
    mask = tl.arange(0, BLOCK_P)[None, :] < WIDTH
    if BITS == 3:
        # The bytes of a low plane's row: first those with the codes of the even groups, then of the odd ones.
        for odd in tl.static_range(2):
            low_bytes = tl.sum(tl.where(part % 2 == odd, (code & 3) << (part - odd), 0), 1).to(tl.uint8)
            tl.store(run + (token + odd) * WIDTH + at, low_bytes, mask=mask)
        high_bytes = tl.sum((code >> 2) << part, 1).to(tl.uint8)
        tl.store(run + PAGE_SIZE * HEAD_DIM // 4 + at, high_bytes, mask=mask)
    else:
        tl.store(run + at, tl.sum(code << part * BITS, 1).to(tl.uint8), mask=mask)


@triton.jit
def _decompress_kernel(codes, records, signs, out, stride_codes, stride_records, HEAD_DIM: tl.constexpr,
                       PAGE_SIZE: tl.constexpr, BITS: tl.constexpr, IS_KEY: tl.constexpr, TOKENS: tl.constexpr):
    """As above; records may be wider; out [N, PAGE_SIZE, D]."""
    page = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    run, record = codes + page * stride_codes, records + page * stride_records
    high = run + PAGE_SIZE * HEAD_DIM // 4
    tile = rotate(tile_of(run, high, record, token, HEAD_DIM, PAGE_SIZE, BITS, IS_KEY), signs, HEAD_DIM)
    dim = tl.arange(0, block_of(HEAD_DIM))[None, :]
    at = out + (page * PAGE_SIZE + token) * HEAD_DIM + dim
    tl.store(at, tile.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def compress(x: Tensor, bits: int, is_key: bool) -> tuple[Tensor, Tensor]:
    """Codes and records of pages x [N, page_size, D], of which the last dimension is contiguous: see `Ops`."""
    n, page_size, head_dim = x.shape
    assert bits in (8, 4, 3, 2) and head_dim % 8 == 0, f"{bits} bits, head_dim {head_dim}"
    check("x", x, (n, page_size, head_dim), FLOATS)
    codes = torch.empty(n, bits * page_size * head_dim // 8, dtype=torch.uint8, device=x.device)
    records = torch.empty(n, page_size + (head_dim if is_key else page_size), dtype=torch.uint8, device=x.device)
    _compress_kernel[(n,)](
        x, codes, records, signs_of(head_dim, x.dtype, x.device), *x.stride()[:2],
        HEAD_DIM=head_dim, PAGE_SIZE=page_size, BITS=bits, IS_KEY=is_key, CLIPS=CLIPS if bits < 4 else CLIPS[:1],
        num_warps=8, enable_fp_fusion=False)  # a product is rounded before it is rounded to an integer
    return codes, records


def decompress(codes: Tensor, records: Tensor, bits: int, is_key: bool, like: Tensor) -> Tensor:
    """What `compress` kept, [N, page_size, D] in the dtype of `like` [..., page_size, D]: see `Ops`."""
    n, (page_size, head_dim) = codes.shape[0], like.shape[-2:]
    least = page_size + (head_dim if is_key else page_size)
    check("codes", codes, (n, bits * page_size * head_dim // 8), (torch.uint8,))
    check("records", records, (n, max(least, records.shape[1])), (torch.uint8,))
    out = torch.empty(n, page_size, head_dim, dtype=like.dtype, device=codes.device)
    _decompress_kernel[(n, page_size // TOKENS)](
        codes, records, signs_of(head_dim, like.dtype, codes.device), out, codes.stride(0), records.stride(0),
        HEAD_DIM=head_dim, PAGE_SIZE=page_size, BITS=bits, IS_KEY=is_key, TOKENS=TOKENS,
        num_warps=4, enable_fp_fusion=True)
    return out
