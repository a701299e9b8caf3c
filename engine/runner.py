"""Turns a schedule into tensors, runs the model over the cache, and returns what is wanted of the logits."""

import time
from itertools import accumulate

import torch
from torch import Tensor

from engine.graphs import Graphs, Outputs
from engine.scheduler import Request, Schedule
from kernels.ops import AttentionPlan
from memory.cache import KVCache
from memory.observation import Observation
from models.llama.model import Llama

# Rows of hidden states whose logits are held at once when a whole prompt is scored.
_SCORE_ROWS = 128
_OBSERVE_EVERY = 16  # tokens that are generated: once, decode attention is computed twice


class Runner:
    """Model and cache together; everything on the device happens here."""

    def __init__(self, model: Llama, cache: KVCache, graphs: Graphs | None = None) -> None:
        self.model = model
        self.graphs = graphs  # of steps that only decode
        self.cache = cache
        self.ops = model.ops
        self.scale = model.config.head_dim**-0.5

    @torch.inference_mode()
    def forward(self, schedule: Schedule) -> tuple[Tensor, list[Tensor | None]]:
        """Compute the scheduled tokens; their K and V are written behind the sequences' ends, which do not move: the
        caller commits them. So a step that fails anywhere can be taken again.

        Returns logits [rows, vocab_size] float32 on the CPU, a row for each request whose last token is computed, in
        the schedule's order; and for each request that is scored what is wanted (`_score`).
        """
        requests, counts = schedule.requests, schedule.counts
        begun = time.perf_counter()
        hidden = self._hidden(schedule)
        spans = zip(requests, counts, hidden.split(counts), strict=True)
        scores = [None if who.scores is None else self._score(who, count, rows) for who, count, rows in spans]
        ends = zip(accumulate(counts), counts, requests, strict=True)
        ready = [end - 1 for end, count, request in ends if count == request.num_pending]
        logits = self.model.logits(hidden[ready]).cpu()
        if len(requests) > schedule.num_decodes:
            self.cache.seconds_per_token = (time.perf_counter() - begun) / len(hidden)
        return logits, scores

    def _hidden(self, schedule: Schedule) -> Tensor:
        """Hidden states of the scheduled tokens, [sum of counts, hidden_size]."""
        requests, counts, decodes = schedule
        sequences = [request.sequence for request in requests]
        spans = [(request, request.sequence.length, count) for request, count in zip(requests, counts, strict=True)]
        ids = [token for request, start, count in spans for token in request.tokens[start : start + count]]
        positions = [position for _, start, count in spans for position in range(start, start + count)]
        plan = self.cache.plan(sequences, counts, decodes)
        observed = self._observes(requests, counts)
        step = (torch.tensor([ids, positions]).to(self.model.device), plan, tuple(counts), observed)
        if self.graphs is not None and decodes == len(counts):
            hidden, *shares = self.graphs(self._compute, *step)
        else:
            hidden, *shares = self._compute(*step)
        if observed:
            self.cache.observe(sequences, counts, plan, shares[0].cpu().numpy())
        return hidden

    def _compute(self, tokens: Tensor, plan: AttentionPlan, counts: tuple[int, ...], observed: bool) -> Outputs:
        """Hidden states and, of steps that are observed, `Observation.shares`; tokens [2, T] int64: ids and positions.
        Nothing in it waits for the device, or reads from the plan what `Graphs` takes for the same in many steps."""
        observation = Observation(plan, counts) if observed else None
        decodes = plan.num_decodes

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor) -> Tensor:
            cache = self.cache.layers[layer]
            self.ops.rope_store(q, k, v, cos_sin, plan.slots, cache.k, cache.v)
            if observation is not None:
                observation.observe(q, cache, self.ops, self.scale)
            lse = None if plan.recall is None else torch.empty(q.shape[:2], device=q.device)
            of = [None, None] if lse is None else [lse[:decodes], lse[decodes:]]
            parts = []
            if decodes:
                parts.append(self.ops.decode_attention(q[:decodes], cache, plan, self.scale, lse=of[0]))
            if decodes < len(counts):
                parts.append(self.ops.prefill_attention(q[decodes:], cache, plan, self.scale, lse=of[1]))
            out = parts[0] if len(parts) == 1 else torch.cat(parts)
            return out if lse is None else self.ops.recall(q, out, lse, cache, plan, self.scale)

        hidden = self.model.forward(tokens[0], tokens[1], attention)
        return (hidden,) if observation is None else (hidden, observation.shares())

    def _observes(self, requests: list[Request], counts: list[int]) -> bool:
        """Whether attention is measured in this step: where pages may have to go, of chunks and some of the decodes."""
        spans = zip(requests, counts, strict=True)
        due = any(count > 1 or request.sequence.length % _OBSERVE_EVERY == 0 for request, count in spans)
        return due and self.cache.config.may_compress([request.most_tokens for request in requests])

    def _score(self, request: Request, count: int, hidden: Tensor) -> Tensor:
        """Log-probabilities of the tokens that follow the `count` scheduled ones, or all of their logits; hidden
        [count, hidden_size]. What was scored before a preemption is left out."""
        start = max(request.sequence.length, request.num_scored)
        hidden = hidden[start - request.sequence.length :]
        if request.every_logit:
            return self.model.exact_logits(hidden)
        following = torch.tensor(request.tokens[start + 1 : start + len(hidden) + 1], device=hidden.device)
        parts = [torch.empty(0)]
        pieces = hidden[: len(following)].split(_SCORE_ROWS), following.split(_SCORE_ROWS)
        for rows, targets in zip(*pieces, strict=True):
            logits = self.model.exact_logits(rows)
            parts.append((logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)).cpu())
        return torch.cat(parts)
