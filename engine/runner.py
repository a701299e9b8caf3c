"""Turns a schedule into tensors, runs the model over the cache, and returns the logits that are wanted."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from engine.scheduler import Request, Schedule
from kernels.ops import Ops
from memory.cache import KVCache
from models.llama.model import Llama

# Rows of hidden states whose logits are held at once when a whole prompt is scored.
_SCORE_ROWS = 128


class Runner:
    """Model and cache together; everything on the device happens here."""

    def __init__(self, model: Llama, cache: KVCache, ops: Ops) -> None:
        self.model = model
        self.cache = cache
        self.ops = ops
        self.scale = model.config.head_dim**-0.5

    @torch.inference_mode()
    def forward(self, schedule: Schedule) -> Tensor:
        """Compute the scheduled tokens and keep their K and V.

        Returns logits [rows, vocab_size] float32 on the CPU: a row for each request that has no token left to compute,
        in the schedule's order. Requests that are scored get their log-probabilities.
        """
        requests, counts = schedule.requests, schedule.counts
        hidden = self._hidden(schedule)
        for request, count, rows in zip(requests, counts, hidden.split(counts), strict=True):
            if request.scores is not None:
                self._score(request, count, rows)
            self.cache.commit(request.sequence, count)
        ends = [end - 1 for end, request in zip(accumulate(counts), requests, strict=True) if not request.num_pending]
        return self.model.logits(hidden[ends]).cpu()

    def _hidden(self, schedule: Schedule) -> Tensor:
        """Hidden states of the scheduled tokens, [sum of counts, hidden_size]."""
        requests, counts = schedule.requests, schedule.counts
        starts = [request.sequence.length for request in requests]
        spans = list(zip(requests, starts, counts, strict=True))
        ids = [token for request, start, count in spans for token in request.tokens[start : start + count]]
        positions = [torch.arange(start, start + count) for _, start, count in spans]
        plan = self.cache.plan([request.sequence for request in requests], counts, schedule.num_decodes)
        decodes = schedule.num_decodes

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor) -> Tensor:
            k_cache, v_cache = self.cache.layers[layer]
            self.ops.rope_store(q, k, v, cos_sin, plan.slots, k_cache, v_cache)
            parts = []
            if decodes:
                parts.append(self.ops.decode_attention(q[:decodes], k_cache, v_cache, plan, self.scale))
            if decodes < len(requests):
                parts.append(self.ops.prefill_attention(q[decodes:], k_cache, v_cache, plan, self.scale))
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        device = self.model.device
        return self.model.forward(torch.tensor(ids).to(device), torch.cat(positions).to(device), attention)

    def _score(self, request: Request, count: int, hidden: Tensor) -> None:
        """Append the log-probability of each following token; hidden [count, hidden_size]."""
        assert request.scores is not None
        start = request.sequence.length
        following = torch.tensor(request.tokens[start + 1 : start + count + 1], device=hidden.device)
        for rows, targets in zip(
            hidden[: len(following)].split(_SCORE_ROWS), following.split(_SCORE_ROWS), strict=True
        ):
            logits = self.model.logits(rows)
            chosen = logits.gather(1, targets[:, None])[:, 0]
            request.scores.append((chosen - logits.logsumexp(-1)).cpu())
