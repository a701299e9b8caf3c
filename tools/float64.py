"""What the kernels must compute, in float64, one sequence and one head at a time; and caches to try them on.

Written apart from `kernels.reference`, for `tools.gpu_check` and the kernels' tests. A cache is a view of a larger
arena: frames of a sequence are scattered, there are gaps between heads and frames, and everything that no sequence owns
is NaN: free frames, gaps, the rest of each last page.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.ops import AttentionPlan

# Half a unit in the last place of a result near 1, times a few: the inputs of both sides are the same rounded numbers,
# and the arithmetic between is float32. In attention p is rounded to the 16-bit type too, which averages out over the
# tokens but not for two or three of them.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    error = (got.double().cpu() - want.double().cpu()).abs()
    limit = TOLERANCE[dtype] * scale * want.double().cpu().abs().clamp_min(1.0)
    assert bool((error <= limit).all()), f"worst error {error.nan_to_num(math.inf).max():.3g} in {dtype}"


@dataclass(frozen=True)
class Batch:
    """Keys and values of some sequences, both dense and in a paged cache."""

    q: Tensor  # [T, Hq, D], possibly a view
    keys: list[Tensor]  # per sequence [Hkv, seq_len, D]
    values: list[Tensor]
    k_cache: Tensor  # [Hkv, frames, page_size, D], a view
    v_cache: Tensor
    arenas: tuple[Tensor, Tensor]
    plan: AttentionPlan

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)


def make_batch(
    query_lens: list[int],
    seq_lens: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    page_size: int = 64,
    num_decodes: int = 0,
    device: str = "cpu",
) -> Batch:
    """A batch of random numbers; sequence b asks query_lens[b] queries of the seq_lens[b] tokens in its cache."""
    num_pages = [-(-n // page_size) for n in seq_lens]
    frames = sum(num_pages) + 3
    order = torch.randperm(frames).tolist()
    k_arena, k_cache = _make_cache(num_kv_heads, frames, page_size, head_dim, dtype, device)
    v_arena, v_cache = _make_cache(num_kv_heads, frames, page_size, head_dim, dtype, device)
    page_table = torch.zeros(len(seq_lens), max(num_pages) + 1, dtype=torch.int32)
    keys, values, slots, pieces = [], [], [], []
    query_start = [0]
    for b, (num_queries, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        ids = [order.pop() for _ in range(num_pages[b])]
        page_table[b, : len(ids)] = torch.tensor(ids)
        places = [ids[t // page_size] * page_size + t % page_size for t in range(length)]
        keys.append(torch.randn(num_kv_heads, length, head_dim).to(dtype).to(device))
        values.append(torch.randn(num_kv_heads, length, head_dim).to(dtype).to(device))
        for cache, rows in ((k_cache, keys[b]), (v_cache, values[b])):
            for page, frame in enumerate(ids):
                part = rows[:, page * page_size : (page + 1) * page_size]
                cache[:, frame, : part.shape[1]] = part
        slots += places[length - num_queries :]
        pieces.append(tuple((place, 1) for place in places))
        query_start.append(query_start[-1] + num_queries)
    tokens = query_start[-1]
    # A view with gaps between tokens and between heads: no stride is the product of the sizes inside.
    fused = torch.randn(tokens, num_heads + 2 * num_kv_heads, head_dim + 8).to(dtype).to(device)[..., :head_dim]
    plan = AttentionPlan(
        query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        page_table=page_table.to(device),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        num_decodes=num_decodes,
        max_query_len=max(query_lens[num_decodes:], default=0),
        max_seq_len=max(seq_lens),
        pieces=tuple(pieces),
    )
    return Batch(fused[:, :num_heads], keys, values, k_cache, v_cache, (k_arena, v_arena), plan)


def _make_cache(
    heads: int, frames: int, page_size: int, head_dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    # Frame-major, unlike the engine's arena: the kernels take any stride of heads and frames.
    arena = torch.full((frames, heads + 1, page_size, head_dim), math.nan, dtype=dtype, device=device)
    return arena, arena[:, :heads].transpose(0, 1)


def attention(batch: Batch, sequences: range) -> tuple[Tensor, list[Tensor]]:
    """-> output [query tokens, Hq, D], per sequence the base-2 logits [queries, Hq, seq_len] with -inf where unseen."""
    starts = batch.plan.query_start.tolist()
    outputs, all_logits = [], []
    for b in sequences:
        q = batch.q[starts[b] : starts[b + 1]].double().cpu()
        k, v = batch.keys[b].double().cpu(), batch.values[b].double().cpu()
        group = q.shape[1] // k.shape[0]
        unseen = torch.ones(q.shape[0], k.shape[1]).triu(k.shape[1] - q.shape[0] + 1).bool()
        heads, logits = [], []
        for h in range(q.shape[1]):
            score = (q[:, h] @ k[h // group].T * batch.scale).masked_fill(unseen, -math.inf)
            heads.append(score.softmax(-1) @ v[h // group])
            logits.append(score / math.log(2))
        outputs.append(torch.stack(heads, 1))
        all_logits.append(torch.stack(logits, 1))
    return torch.cat(outputs), all_logits


def with_plan(batch: Batch, **changes: Any) -> Batch:
    return replace(batch, plan=replace(batch.plan, **changes))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [T, H, D], angles [T, D/2]: pair (i, i + D/2) as a complex number times exp(i angle)."""
    half = x.shape[-1] // 2
    x = x.double()
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], -1)
