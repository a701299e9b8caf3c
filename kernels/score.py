"""How important pages are, by the formula in `Ops.score`. One program a BLOCK of pages; the network in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.codes import check
from kernels.ops import NUM_FEATURES, SCORE_HIDDEN

BLOCK = tl.constexpr(128)


@triton.jit(do_not_specialize=["count"])  # it changes from step to step
def _importance_kernel(features, ages, weights, out, count, F: tl.constexpr, HIDDEN: tl.constexpr):
    """features [count, F], ages [count], weights, out [count]: float32, contiguous; F a power of 2"""
    page = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column, there = tl.arange(0, F)[None, :], page < count
    x = tl.load(features + page[:, None] * F + column, mask=there[:, None], other=0.0)
    x = tl.where(x > 0.0, tl.minimum(x, 1e6), 0.0)  # also of NaN, which is not above 0
    away = -tl.load(ages + page, mask=there, other=0.0) * tl.load(weights + 3)
    attention, decay, slower = tl.sum(tl.where(column == 1, x, 0.0), 1), tl.exp(away), tl.exp(away / 8.0)
    logs, first, bias = tl.log(1.0 + x), weights + 4, weights + 4 + HIDDEN * (F + 2)
    total = tl.zeros([BLOCK], tl.float32) + tl.load(bias + 2 * HIDDEN)
    for i in tl.static_range(HIDDEN):
        row = first + i * (F + 2)
        h = tl.sum(logs * tl.load(row + column), 1) + decay * tl.load(row + F) + slower * tl.load(row + F + 1)
        h += tl.load(bias + i)
        total += h / (1.0 + tl.exp(-h)) * tl.load(bias + HIDDEN + i)
    score = tl.load(weights) * attention + tl.load(weights + 1) * decay
    tl.store(out + page, score + tl.load(weights + 2) / (1.0 + tl.exp(-total)), mask=there)


def score(features: Tensor, ages: Tensor, weights: Tensor) -> Tensor:
    """Scores [N] float32 of features [N, NUM_FEATURES] and ages [N]; weights: see `Ops.score`."""
    count = len(ages)
    check("features", features, (count, NUM_FEATURES), (torch.float32,), (NUM_FEATURES, 1))
    check("ages", ages, (count,), (torch.float32,))
    check("weights", weights, (4 + SCORE_HIDDEN * (NUM_FEATURES + 4) + 1,), (torch.float32,))
    out = torch.empty_like(ages)
    _importance_kernel[(triton.cdiv(count, BLOCK.value),)](
        features, ages, weights, out, count, F=NUM_FEATURES, HIDDEN=SCORE_HIDDEN, num_warps=4, enable_fp_fusion=True
    )
    return out
