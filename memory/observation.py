"""How much of the attention of a step each page got: some of the step's queries asked again, with their logits kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernels.ops import AttentionPlan, LayerCache, Ops

SAMPLES = 2  # queries of a chunk that are asked, spread over it


class Observation:
    """The queries of one step that are observed: each is a decode over what it sees of its sequence."""

    def __init__(self, plan: AttentionPlan, counts: list[int]) -> None:
        """counts: query tokens of each sequence of the plan."""
        behind = [sorted({count * i // SAMPLES for i in range(SAMPLES)}) for count in counts]  # tokens after the query
        self.num_samples = [len(samples) for samples in behind]
        rows = [row for row, samples in enumerate(behind) for _ in samples]
        back = [n for samples in behind for n in samples]
        device = plan.exact_lens.device
        which, after = torch.tensor(rows, device=device), torch.tensor(back, dtype=torch.int32, device=device)

        self._queries = (plan.query_start[1:][which] - 1 - after).long()
        self._plan = replace(
            plan,
            exact_lens=plan.exact_lens[which] - after,
            page_table=plan.page_table[which],
            num_decodes=len(rows),
            pieces=tuple(_without_last(plan.pieces[row], n) for row, n in zip(rows, back, strict=True)),
            warm=tuple(
                replace(
                    warm,
                    codes=warm.codes[which],
                    high=None if warm.high is None else warm.high[which],
                    records=warm.records[which],
                    counts=warm.counts[which],
                )
                for warm in plan.warm
            ),
        )
        self._mass: Tensor | None = None
        self._layers = 0

    def observe(self, q: Tensor, cache: LayerCache, ops: Ops, scale: float) -> None:
        """Add one layer's attention; q [T, Hq, D] are all queries of the step, rotated, their K in the cache."""
        page_size = cache.k.shape[2]
        shape = (self._plan.num_decodes, q.shape[1])
        logits = torch.full((*shape, self._plan.num_columns(page_size)), -torch.inf, device=q.device)
        lse = torch.empty(shape, device=q.device)
        ops.decode_attention(q[self._queries], cache, self._plan, scale, logits, lse)
        mass = (logits - lse[..., None]).exp2_().unflatten(2, (-1, page_size)).sum((1, 3)) / shape[1]
        self._mass = mass if self._mass is None else self._mass.add_(mass)
        self._layers += 1

    def shares(self) -> list[np.ndarray]:
        """For each sequence, the share of the attention that each page column of the plan got, mean over its queries,
        layers and heads: [page columns] float32."""
        assert self._mass is not None, "no layer was observed"
        mass = (self._mass / self._layers).cpu()
        return [part.mean(0).numpy() for part in mass.split(self.num_samples)]


def _without_last(pieces: tuple[tuple[int, int], ...], count: int) -> tuple[tuple[int, int], ...]:
    """The pieces less their last `count` tokens."""
    kept = list(pieces)
    while count:
        start, length = kept.pop()
        if length > count:
            kept.append((start, length - count))
        count -= min(count, length)
    return tuple(kept)
