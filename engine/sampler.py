"""The next token of each request from its logits."""

import torch

from engine.config import SamplingParams


def sample(logits: torch.Tensor, params: SamplingParams, history: list[int], generator: torch.Generator | None) -> int:
    """One token id. logits [vocab_size] float32 on the CPU; history: the ids that repetition_penalty counts as seen.

    Penalty, temperature, top_k, top_p, min_p, in this order. The same generator state gives the same token.
    """
    penalty = params.repetition_penalty
    if penalty != 1.0:  # logits of seen tokens are divided by it, or multiplied where negative (CTRL, arXiv 1909.05858)
        seen = torch.tensor(history, dtype=torch.int64).unique()
        old = logits[seen]
        logits = logits.index_copy(0, seen, torch.where(old > 0, old / penalty, old * penalty))
    if params.temperature == 0.0:
        return int(logits.argmax())
    # The greatest logit becomes 0, so that no accepted temperature makes an infinity or 0 / 0 of it.
    logits = (logits - logits.max()) / max(params.temperature, 1e-30)
    if params.top_k and params.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], -torch.inf)
    probabilities = logits.softmax(-1)
    if params.top_p < 1.0:
        # The smallest set of most likely tokens that holds top_p (arXiv 1904.09751) stays; it is never empty.
        ordered, order = probabilities.sort(descending=True, stable=True)
        drop = ordered.cumsum(-1) - ordered >= params.top_p
        drop[0] = False  # a top_p that is 0 in float32
        probabilities = probabilities.index_fill(0, order[drop], 0.0)
    if params.min_p > 0.0:
        probabilities = probabilities.masked_fill(probabilities < params.min_p * probabilities.max(), 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def top_logprobs(logits: torch.Tensor, token: int, count: int) -> dict[int, float]:
    """Log-probabilities of the `count` most likely tokens and of the chosen one. logits [vocab_size] float32."""
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(count, logits.numel()))
    return {token: float(logprobs[token]), **dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))}
