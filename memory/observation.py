"""How much of the attention of a step each page got: some of the step's queries asked again, with their logits kept."""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from kernels.ops import AttentionPlan, LayerCache, Ops, WarmPages

SAMPLES = 2  # queries of a chunk that are asked, spread over it


class Observation:
    """The queries of one step that are observed: each is a decode over what it sees of its sequence."""

    def __init__(self, plan: AttentionPlan, counts: Sequence[int]) -> None:
        """counts: query tokens of each sequence of the plan."""
        self._masses: list[Tensor] = []  # of each layer
        behind = [sorted({count * i // SAMPLES for i in range(SAMPLES)}) for count in counts]  # tokens after the query
        self._num_samples = [len(samples) for samples in behind]
        self._queries: Any = slice(None)
        self._plan = plan
        if plan.num_decodes == len(counts):
            return  # all are asked
        asked = [(row, after) for row, samples in enumerate(behind) for after in samples]
        which, back = torch.tensor(asked, dtype=torch.int32, device=plan.exact_lens.device).T

        self._queries = (plan.query_start[1:][which] - 1 - back).long()
        self._plan = replace(
            plan,
            exact_lens=plan.exact_lens[which] - back,
            page_table=plan.page_table[which],
            num_decodes=len(asked),
            pieces=tuple(_without_last(plan.pieces[row], after) for row, after in asked),
            warm=tuple(_rows(warm, which) for warm in plan.warm),
        )

    def observe(self, q: Tensor, cache: LayerCache, ops: Ops, scale: float) -> None:
        """Add one layer's attention; q [T, Hq, D] are all queries of the step, rotated, their K in the cache."""
        page_size = cache.k.shape[2]
        shape = (self._plan.num_decodes, q.shape[1])
        logits = torch.full((*shape, self._plan.num_columns(page_size)), -torch.inf, device=q.device)
        lse = torch.empty(shape, device=q.device)
        ops.decode_attention(q[self._queries], cache, self._plan, scale, logits, lse)
        self._masses.append((logits - lse[..., None]).exp2_().unflatten(2, (-1, page_size)).sum((1, 3)) / shape[1])

    def shares(self) -> Tensor:
        """For each sequence, the share of the attention that each page column of the plan got, mean over its queries,
        layers and heads: [B, page columns] float32."""
        mass = reduce(torch.add, self._masses) / len(self._masses)
        return torch.stack([part.mean(0) for part in mass.split(self._num_samples)])


def _rows(warm: WarmPages, which: Tensor) -> WarmPages:
    """Pages as the sequences `which` see them: there is a row for each sequence in every tensor."""
    values = ((field.name, getattr(warm, field.name)) for field in fields(warm))
    rows: dict[str, Any] = {name: x[which] for name, x in values if isinstance(x, Tensor)}
    return replace(warm, **rows)


def _without_last(pieces: tuple[tuple[int, int], ...], count: int) -> tuple[tuple[int, int], ...]:
    """The pieces less their last `count` tokens."""
    kept = list(pieces)
    while count >= kept[-1][1]:
        count -= kept.pop()[1]
    start, length = kept.pop()
    return (*kept, (start, length - count))
