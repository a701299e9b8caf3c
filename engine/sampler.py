"""The next token of each request from its logits."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.request import SamplingParams


def sample(logits: Tensor, params: SamplingParams, history: list[int], generator: torch.Generator | None) -> int:
    """One token id. logits [vocab_size] float32 on the CPU; history: the ids that repetition_penalty counts as seen.

    Penalty, temperature, top_k, top_p, min_p, in this order. The same generator state gives the same token.
    """
    if params.repetition_penalty != 1.0:
        logits = _penalise(logits, history, params.repetition_penalty)
    if params.temperature == 0.0:
        return int(logits.argmax())
    # The greatest logit becomes 0, so that no accepted temperature makes an infinity or 0 / 0 of it.
    logits = (logits - logits.max()) / max(params.temperature, 1e-30)
    if params.top_k and params.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], -torch.inf)
    probabilities = logits.softmax(-1)
    if params.top_p < 1.0:
        probabilities = _nucleus(probabilities, params.top_p)
    if params.min_p > 0.0:
        probabilities = probabilities.masked_fill(probabilities < params.min_p * probabilities.max(), 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _penalise(logits: Tensor, history: list[int], penalty: float) -> Tensor:
    """Logits of seen tokens divided by the penalty, or multiplied where negative (CTRL, arXiv 1909.05858)."""
    seen = torch.tensor(history, dtype=torch.int64).unique()
    old = logits[seen]
    return logits.index_copy(0, seen, torch.where(old > 0, old / penalty, old * penalty))


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero but for the smallest set of most likely tokens that holds top_p (arXiv 1904.09751); never empty."""
    ordered, order = probabilities.sort(descending=True, stable=True)
    drop = ordered.cumsum(-1) - ordered >= top_p
    drop[0] = False  # a top_p that is 0 in float32
    return probabilities.index_fill(0, order[drop], 0.0)


def top_logprobs(logits: Tensor, token: int, count: int) -> dict[int, float]:
    """Log-probabilities of the `count` most likely tokens and of the chosen one. logits [vocab_size] float32."""
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(count, logits.numel()))
    return {token: float(logprobs[token]), **dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))}
