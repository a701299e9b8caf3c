"""Linear maps by quantised weights: x @ weight.T, the weights converted in registers as they are multiplied.

    out.T [BLOCK_N outputs, BLOCK_M tokens] += codes [BLOCK_N, inputs] @ x.T [inputs, BLOCK_M]

A block of inputs is a group (of 8 bits: 128). Its two halves are two products: of 4 bits they lie in the same bytes.
Scale and zero come after them: the sum of code * scale * x + zero * x is scale * (codes @ x) + zero * (sum of x). The
weights are the left operand, whose rows are the outputs: one token, then, is a product 16 wide and not 64 high. Few
tokens have too few programs to fill a GPU: the inputs are split among several, whose sums are added by another kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import attention
from kernels.codes import FLOATS, check
from kernels.ops import QuantizedWeight

BYTE_GROUP = 128  # inputs of a block of 8 bits
WARPS = 12  # of a multiprocessor, that the inputs are split for


@triton.jit
def _value(code, MIDDLE: tl.constexpr, FLOAT: tl.constexpr):
    """code - MIDDLE, of a code below 2 * MIDDLE. Converting an integer is four times slower than putting its bits into
    those of a power of two whose steps are 1; bfloat16 has no room there for more than 7."""
    if FLOAT.primitive_bitwidth == 16 and (FLOAT.is_fp16() or MIDDLE <= 64):
        POWER: tl.constexpr = 1024 if FLOAT.is_fp16() else 128
        bits = code.to(tl.int16) | (0x6400 if FLOAT.is_fp16() else 0x4300)
        return bits.to(FLOAT, bitcast=True) - (POWER + MIDDLE)
    bits = code.to(tl.int32) | 0x4B000000
    return (bits.to(tl.float32, bitcast=True) - (2.0**23 + MIDDLE)).to(FLOAT)


@triton.jit(do_not_specialize=["tokens"])  # it changes from step to step
def _linear_kernel(
        x, codes, scales, zeros, bias, out, stride_x, tokens, IN: tl.constexpr, OUT: tl.constexpr, GROUP: tl.constexpr,
        SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr):
    """x [tokens, IN], any row stride; bias [OUT], or None
    codes uint8: [OUT, IN / 2], of 4 bits, with scales and zeros [OUT, groups]; or [OUT, IN] and scales [OUT], no zeros
    out [SPLITS, tokens, OUT], contiguous: of each split of the inputs its sum
    """
    HALF: tl.constexpr = GROUP // 2
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP
    FLOAT: tl.constexpr = x.dtype.element_ty
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    split = tl.program_id(2)
    j = tl.arange(0, HALF)
    mask_n, mask_m = n < OUT, m < tokens
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for group in tl.range(split * GROUPS // SPLITS, (split + 1) * GROUPS // SPLITS, num_stages=STAGES):
        start = group * GROUP
        size = GROUP if IN % GROUP == 0 else tl.minimum(IN - start, GROUP)
        second = HALF if zeros is None else size // 2  # where the other half of the inputs begins
        x_rows = x + m * stride_x + start + j[:, None]
        x_low = tl.load(x_rows, mask=mask_m & (j < tl.minimum(second, size))[:, None], other=0.0)
        x_high = tl.load(x_rows + second, mask=mask_m & (j < size - second)[:, None], other=0.0)
        if zeros is None:
            row = codes + n * IN + start + j[None, :]
            low = tl.load(row, mask=mask_n & (j < size)[None, :], other=0)
            high = tl.load(row + HALF, mask=mask_n & (j < size - HALF)[None, :], other=0)
            acc = tl.dot(_value(low ^ 128, 128, FLOAT), x_low, acc, input_precision="ieee")
            acc = tl.dot(_value(high ^ 128, 128, FLOAT), x_high, acc, input_precision="ieee")
        else:
            row = codes + n * (IN // 2) + start // 2 + j[None, :]
            byte = tl.load(row, mask=mask_n & (j < second)[None, :], other=0)
            scale = tl.load(scales + n * GROUPS + group, mask=mask_n, other=0.0).to(tl.float32)
            zero = tl.load(zeros + n * GROUPS + group, mask=mask_n, other=0.0).to(tl.float32)
            part = tl.dot(_value(byte & 15, 8, FLOAT), x_low, input_precision="ieee")
            part = tl.dot(_value(byte >> 4, 8, FLOAT), x_high, part, input_precision="ieee")
            total = tl.sum(x_low.to(tl.float32) + x_high.to(tl.float32), 0)
            acc += part * scale + total[None, :] * zero
    if zeros is None:
        acc *= tl.load(scales + n, mask=mask_n, other=0.0).to(tl.float32)
    if bias is not None:
        acc += tl.load(bias + n, mask=n < tl.where(split == 0, OUT, 0), other=0.0).to(tl.float32)
    to = out + (split.to(tl.int64) * tokens + m) * OUT + n
    tl.store(to, acc.to(out.dtype.element_ty), mask=mask_n & mask_m)


@triton.jit
def _sum_kernel(parts, out, count, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """parts [SPLITS, count] float32 -> their sum, out [count]"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * count + at, mask=at < count, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)


def _config(tokens: int, dtype: torch.dtype, bits: int) -> tuple[int, int, int, int]:
    """(tokens of a block, outputs of a block, warps, stages)."""
    if dtype == torch.float32:
        return 16, 64, 4, 2
    if tokens <= 16:
        return 16, 64, 2, 4
    if tokens <= 64:
        return (32, 128, 4, 3) if tokens <= 32 else (64, 128, 8, 3)
    # A weight is converted for twice as many tokens. With another number of stages either spills on some target.
    return 128, 128, 8, 2 if bits == 8 else 3


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [T, in], rows without gaps, @ weight [out, in] + bias [out] -> [T, out] in `dtype`."""
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    group = BYTE_GROUP if weight.zeros is None else weight.group
    check("x", x, (tokens, weight.shape[1]), FLOATS)
    block_m, block_n, num_warps, stages = _config(tokens, x.dtype, weight.bits)
    blocks = triton.cdiv(outputs, block_n), triton.cdiv(tokens, block_m)
    wanted = WARPS * attention._num_multiprocessors(x) // max(num_warps * blocks[0] * blocks[1], 1)
    splits = max(1, min(wanted, triton.cdiv(inputs, group) // 4))  # of four groups at least
    out = x.new_empty(tokens, outputs, dtype=dtype)
    if tokens == 0:
        return out
    parts = out if splits == 1 else x.new_empty(splits, tokens, outputs, dtype=torch.float32)
    grid = (*blocks, splits)
    _linear_kernel[grid](
        x, weight.codes.view(torch.uint8), weight.scales, weight.zeros, bias, parts, x.stride(0), tokens,
        IN=inputs, OUT=outputs, GROUP=group, SPLITS=splits, BLOCK_M=block_m, BLOCK_N=block_n, STAGES=stages,
        num_warps=num_warps, enable_fp_fusion=True)
    if splits > 1:
        _sum_kernel[(triton.cdiv(out.numel(), 512),)](
            parts, out, out.numel(), SPLITS=splits, BLOCK=512, num_warps=4, enable_fp_fusion=True
        )
    return out
