"""What all kernels share: what their wrappers check, and how they read compressed pages (`kernels.ops` has the layout).
And decode attention over these.

Decode has no dequantised tile. With s the scale of a token, z the zero of V with its constant, m the means of K, in the
rotated basis:

    logit  = s * (q . code - (2^b - 1) / 2 * sum of q) + q . m
    out   += (p * s) @ code + sum over tokens of p * s * z

The codes go into the products as they lie in memory: the bits of a code below 2^10, read as a float16, are the
subnormal code * 2^-24, exactly, and tensor cores multiply subnormals at full speed. So a mask makes two operands of a
32-bit word, one in each half; a code that lies k bits up in its half is 2^k times as large, for which its q is 2^-k
times as large. The two halves must be neighbours in the inner dimension of the product:

    K    bytes 0 and 2 of a word (then, shifted by 8, bytes 1 and 3): channels 2c and 2c + 1 of a *part*
    V    the same 16 bits of two tokens, put together as a word

So part i has the channels 2c + i % 2 + i // 2 * WIDTH, where WIDTH is the bytes of a token's codes (of 3 bits: of their
low plane); there are twice as many parts as codes in a byte. q and the output are kept in the same parts.

q and p * s are rounded to float16 also where the cache is bfloat16: it has the three bits more. The scales of V start
at 2^-8 there, whatever the format, which keeps p * s in float16's range. With a float32 cache everything is float32.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import MEAN_EXPONENT, hadamard, min_exponent

lowest = triton.constexpr_function(min_exponent)
BIAS = tl.constexpr((MEAN_EXPONENT + 127) << 23)  # of the codes of means
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check(name: str, x: Tensor | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...],
          strides: tuple[int, ...] = (1,)) -> None:
    """That x, if there is any, has the shape, one of the dtypes, and these as its last strides."""
    assert x is None or (x.shape == shape and x.dtype in dtypes and x.stride()[-len(strides) :] == strides), (
        f"{name}: {x.dtype}, {tuple(x.shape)}, strides {x.stride()}; "
        f"wanted: {dtypes}, {tuple(shape)}, last strides {strides}")


@triton.constexpr_function
def block_of(size, least=16):
    """A tile's width for so many elements: a power of two, and at least the inner dimension that tl.dot takes."""
    return max(least, triton.next_power_of_2(size))


@triton.constexpr_function
def low_bits(bits):
    """Of a code: 2 of 3 bits, of which the third is in a run of its own."""
    return 2 if bits == 3 else bits


@triton.constexpr_function
def width_of(bits, head_dim):
    """Bytes of a token's codes; of 3 bits: of their low plane."""
    return head_dim * low_bits(bits) // 8


@triton.constexpr_function
def factor_of(head_dim):
    """What the elements of `signs_of` lack to rotate."""
    return float((head_dim & -head_dim) ** -0.5)


@triton.jit
def scale_of(code, EXPONENT: tl.constexpr):
    """The scale of an integer code, where that of code 0 is 2^EXPONENT."""
    return ((code.to(tl.int32) << 19) + ((127 + EXPONENT) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def mean_of(code):
    """The mean of a code, of which only the low 8 bits count."""
    size = (code.to(tl.int32) & 127) << 20
    bits = tl.where(size == 0, 0, size + BIAS) | ((code.to(tl.int32) & 128) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_signs(signs, HEAD_DIM: tl.constexpr):
    """The matrix at `signs` (see `signs_of`), with zeros around it."""
    dim = tl.arange(0, block_of(HEAD_DIM))
    mask = (dim[:, None] < HEAD_DIM) & (dim[None, :] < HEAD_DIM)
    return tl.load(signs + dim[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)


@triton.jit
def rotate(x, signs, HEAD_DIM: tl.constexpr):
    """x [M, BLOCK_D] float32, rotated to twice the precision of a 16-bit type, in two products."""
    matrix = load_signs(signs, HEAD_DIM)
    high = x.to(matrix.dtype)
    out = tl.dot(high, matrix, input_precision="ieee")
    if matrix.dtype != tl.float32:
        out = tl.dot((x - high.to(tl.float32)).to(matrix.dtype), matrix, out)
    return out * factor_of(HEAD_DIM)


@triton.jit
def load_words(base, row, column, ROW: tl.constexpr, WIDTH: tl.constexpr, WORD: tl.constexpr):
    """int32: words of WORD bytes, 4 or 2 a column, of the rows of ROW bytes from the pointer `base` on; 0 past WIDTH.

    row is 0, or [rows, 1] for a column [1, columns]. WIDTH, the bytes to read, is ROW, or twice as many: then each row
    is read twice, shifted by a bit the second time.
    """
    if ROW % WORD == 0:
        words = base.to(tl.pointer_type(tl.int32 if WORD == 4 else tl.uint16), bitcast=True) + row * (ROW // WORD)
        mask = column < WIDTH // WORD
        if ROW < WIDTH:
            x = tl.load(words + column % (ROW // WORD), mask=mask, other=0).to(tl.int32) >> (column // (ROW // WORD))
        else:
            x = tl.load(words + column, mask=mask, other=0).to(tl.int32)
    else:  # narrow heads
        x = 0
        for i in tl.static_range(WORD):
            byte = column * WORD + i
            at = base + row * ROW + byte % ROW
            x |= (tl.load(at, mask=byte < WIDTH, other=0).to(tl.int32) >> (byte // ROW)) << (8 * i)
    return x


@triton.jit
def byte_pairs(words, i: tl.constexpr):
    """[N] int32 -> [2N]: in the low 8 bits of each, the bytes i and i + 2 of the words."""
    return tl.reshape(tl.join(words >> (8 * i), words >> (8 * i + 16)), [2 * words.shape[0]])


@triton.jit
def all_bytes(words):
    """[N] int32 -> [4N]: in the low 8 bits of each, the bytes of the words."""
    return tl.reshape(tl.join(byte_pairs(words, 0), byte_pairs(words, 1)), [4 * words.shape[0]])


@triton.jit
def neighbours(words):
    """[M, N] of 16 bits each -> [N, M / 2]: those of two rows as one word."""
    first, second = tl.split(tl.reshape(tl.trans(words), [words.shape[1], words.shape[0] // 2, 2]))
    return first | (second << 16)


@triton.jit
def unpack(low, high, i: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr):
    """[M, N] int32 -> [M, 2N]: code * 2^(LOW * (i // 2) - 24) of part i, from both halves of the words."""
    LOW: tl.constexpr = low_bits(BITS)
    x = (low >> i % 2 * 8) & (((1 << LOW) - 1) * 0x10001 << i // 2 * LOW)
    if BITS == 3:
        x |= ((high >> i % 2 * 8) << 2) & (4 * 0x10001 << i // 2 * LOW)
    first = x.to(tl.int16).to(tl.float16, bitcast=True)
    second = (x >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(first, second), [x.shape[0], 2 * x.shape[1]]).to(FLOAT)


@triton.jit
def offsets_of(tables, at, record_bytes, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BITS: tl.constexpr):
    """int64: where a page's codes, their high plane (only of 3 bits) and its record start in a head's plane. The page
    has the entry `at` of the tables codes, high and records of WarmPages."""
    RUN: tl.constexpr = PAGE_SIZE * width_of(BITS, HEAD_DIM)
    run = tl.load(tables[0] + at).to(tl.int64) * RUN
    high = run
    if BITS == 3:
        high = tl.load(tables[1] + at).to(tl.int64) * (RUN // 2)
    return run, high, tl.load(tables[2] + at).to(tl.int64) * record_bytes


@triton.jit
def tile_of(run, high, record, token, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BITS: tl.constexpr,
            IS_KEY: tl.constexpr):
    """[TOKENS, BLOCK_D] float32, in the rotated basis; columns from HEAD_DIM on are 0.

    run, high, record: pointers to where the page's codes, their high plane (only of 3 bits) and its record start;
    scalar or, where the tokens are of several pages, [TOKENS, 1] like token, their numbers in the page
    """
    LOW: tl.constexpr = low_bits(BITS)
    WIDTH: tl.constexpr = width_of(BITS, HEAD_DIM)
    dim = tl.arange(0, block_of(HEAD_DIM))[None, :]
    code = tl.load(run + token * WIDTH + dim % WIDTH, mask=dim < HEAD_DIM, other=0).to(tl.int32)
    code = code >> (dim // WIDTH * LOW) & ((1 << LOW) - 1)
    if BITS == 3:
        bits = tl.load(high + token * (WIDTH // 2) + dim % (WIDTH // 2), mask=dim < HEAD_DIM, other=0).to(tl.int32)
        code |= (bits >> (dim // (WIDTH // 2)) & 1) << 2
    # 2^23 + code, by its bits: converting an integer is four times slower
    value = (code | 0x4B000000).to(tl.float32, bitcast=True) - 2.0**23
    scale = scale_of(tl.load(record + token), lowest(BITS))
    if IS_KEY:
        mean = mean_of(tl.load(record + PAGE_SIZE + dim, mask=dim < HEAD_DIM, other=0))
        value = (value - ((1 << BITS) - 1) * 0.5) * scale + mean
    else:
        zero = tl.load(record + PAGE_SIZE + token).to(tl.int8, bitcast=True).to(tl.float32)
        value = (value + (zero - (1 << BITS - 1))) * scale
    return tl.where(dim < HEAD_DIM, value, 0.0)


@triton.jit
def weigh(logit, scale, row_max, row_sum):
    """Softmax of more tokens, online (arXiv 2205.14135): (exp2(logit * scale - new maximum), what the older ones are to
    be multiplied by [ROWS, 1], new maximum [ROWS], new sum: [ROWS] or, still to be summed, [ROWS, TOKENS])."""
    # The scale is positive, so it can wait until after the maximum: then it costs one fused multiply-add per logit.
    new_max = tl.maximum(row_max, tl.max(logit, 1) * scale)
    p = tl.exp2(logit * scale - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    row_sum = row_sum * decay[:, None] + p if len(row_sum.shape) == 2 else row_sum * decay + tl.sum(p, 1)
    return p, decay[:, None], new_max, row_sum


@triton.jit
def decode_codes(q, out, lse, logits, k_plane, v_plane, tables, signs, first_page, last_page, scale, num_slices,
                 stride_q_head, stride_logits_head, record_bytes, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                 PAGE_SIZE: tl.constexpr, BITS: tl.constexpr):
    """A slice of decode attention of one sequence and KV head: the pages [first_page, last_page) of one format.

    q [GROUP, D]; out [GROUP, num_slices, D] float32, in the rotated basis; lse [GROUP, num_slices]: of this slice
    logits [GROUP, PAGE_SIZE * pages], or None
    k_plane, v_plane: the head's units; tables: codes, high, records of WarmPages, of the sequence
    signs [D, D], of q's type: see `signs_of`
    """
    LOW: tl.constexpr = low_bits(BITS)
    WIDTH: tl.constexpr = width_of(BITS, HEAD_DIM)
    BLOCK_W: tl.constexpr = block_of(WIDTH, 32)
    BLOCK_H: tl.constexpr = block_of(GROUP, 1)
    FLOAT: tl.constexpr = tl.float32 if q.dtype.element_ty == tl.float32 else tl.float16
    row = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, block_of(HEAD_DIM))[None, :]
    pair = tl.arange(0, BLOCK_W // 2)
    q_tile = tl.load(q + row * stride_q_head + dim, mask=(row < GROUP) & (dim < HEAD_DIM), other=0.0)
    exact_parts, parts, acc = (), (), ()
    middle = tl.zeros([BLOCK_H], tl.float32)
    for i in tl.static_range(16 // LOW):
        rows = signs + (2 * pair[:, None] + i % 2 + i // 2 * WIDTH) * HEAD_DIM + dim  # the matrix is symmetric
        some = tl.load(rows, mask=(pair[:, None] < WIDTH // 2) & (dim < HEAD_DIM), other=0.0)
        rotated = tl.dot(q_tile, tl.trans(some), input_precision="ieee") * factor_of(HEAD_DIM)
        part = (rotated * 2.0 ** -(i // 2 * LOW)).to(FLOAT)
        middle += tl.sum(part.to(tl.float32), 1) * (2.0 ** (i // 2 * LOW) * ((1 << BITS) - 1) * 0.5)
        exact_parts += (rotated,)
        parts += (part,)
        acc += (tl.zeros([BLOCK_H, BLOCK_W // 2], tl.float32),)
    row_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_H, PAGE_SIZE], tl.float32)
    shift = tl.zeros([BLOCK_H, PAGE_SIZE], tl.float32)  # what the zeros of V add to every channel
    token = tl.arange(0, PAGE_SIZE)
    word = tl.arange(0, BLOCK_W // 4)
    quarter = tl.arange(0, PAGE_SIZE // 4)
    for page in range(first_page, last_page):
        run, high, record = offsets_of(tables, page, record_bytes, HEAD_DIM, PAGE_SIZE, BITS)
        k = load_words(k_plane + run, token[:, None], word[None, :], WIDTH, WIDTH, 4)
        v = neighbours(load_words(v_plane + run, token[:, None], pair[None, :], WIDTH, WIDTH, 2))
        k_high, v_high = k, v
        if BITS == 3:
            k_high = load_words(k_plane + high, token[:, None], word[None, :], WIDTH // 2, WIDTH, 4)
            v_high = neighbours(load_words(v_plane + high, token[:, None], pair[None, :], WIDTH // 2, WIDTH, 2))

        logit = tl.zeros_like(row_sum)
        of_means = tl.zeros([BLOCK_H, BLOCK_W // 2], tl.float32)
        for i in tl.static_range(16 // LOW):
            if i % 2 == 0:
                means = load_words(k_plane + record + PAGE_SIZE + i // 2 * WIDTH, 0, word, WIDTH, WIDTH, 4)
            of_means += exact_parts[i] * mean_of(byte_pairs(means, i % 2))[None, :]
            logit = tl.dot(parts[i], tl.trans(unpack(k, k_high, i, BITS, FLOAT)), logit, input_precision="ieee")
        scales = all_bytes(load_words(k_plane + record, 0, quarter, PAGE_SIZE, PAGE_SIZE, 4)) & 255
        scales = scale_of(scales, lowest(BITS))[None, :]
        logit = (logit * 2.0**24 - middle[:, None]) * scales + tl.sum(of_means, 1)[:, None]
        if logits is not None:
            to = logits + row.to(tl.int64) * stride_logits_head + page * PAGE_SIZE + token[None, :]
            tl.store(to, logit * scale, mask=row < GROUP)
        p, decay, row_max, row_sum = weigh(logit, scale, row_max, row_sum)

        both = load_words(v_plane + record, tl.arange(0, 2)[None, :], quarter[:, None], PAGE_SIZE, PAGE_SIZE, 4)
        scales, zeros = tl.split(both)  # of one load, which is prefetched for the scales
        zeros = all_bytes(zeros).to(tl.int8).to(tl.float32) - (1 << BITS - 1)
        scaled = (p * scale_of(all_bytes(scales) & 255, -8)[None, :]).to(FLOAT)
        shift = shift * decay + scaled.to(tl.float32) * zeros[None, :]
        new_acc = ()
        for i in tl.static_range(16 // LOW):
            operand = tl.trans(unpack(v, v_high, i, BITS, FLOAT))
            new_acc += (tl.dot(scaled, operand, acc[i] * decay, input_precision="ieee"),)
        acc = new_acc
    total = tl.sum(row_sum, 1)
    unit = 2.0 ** (8 + lowest(BITS)) / total
    mask = (row < GROUP) & (pair[None, :] < WIDTH // 2)
    for i in tl.static_range(16 // LOW):
        share = (acc[i] * 2.0 ** (24 - i // 2 * LOW) + tl.sum(shift, 1)[:, None]) * unit[:, None]
        tl.store(out + row * (num_slices * HEAD_DIM) + 2 * pair[None, :] + i % 2 + i // 2 * WIDTH, share, mask=mask)
    row = tl.arange(0, BLOCK_H)
    tl.store(lse + row * num_slices, row_max + tl.log2(total), mask=row < GROUP)


@functools.lru_cache
def signs_of(head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[D, D]: the matrix of `kernels.ops` that rotates, times 1 / `factor_of`: of 1, -1 and 0."""
    return hadamard(head_dim).to(device, dtype)
