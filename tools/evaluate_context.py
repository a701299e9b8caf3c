"""Contexts beyond the trained one: what a RoPE scaling does to the perplexity of the last quarter of a long text.

    the text    | .......... | .......... | .......... | xxxxxxxxxx |   read in one piece, with the scaling
    inside                                      | ....xx ....xx ... |   the same tokens, each in a window of the trained
                                                                        length, behind at least half of it, without one

So both columns are of the same tokens, and their ratio says what is lost by reading on beyond the trained length.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine import LLM, SamplingParams
from engine.errors import RequestError
from tools.evaluate_texts import read_text


def token_ids(llm: LLM, text: str, context: int) -> list[int]:
    """The first `context` tokens of a text; of "own", of what the model itself tells, one answer behind the other.
    Raises RequestError if there are fewer."""
    if text != "own":
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(read_text(text))
    else:
        ids, seed = [], 0
        bos = llm._model.config.bos_token_id or 0
        while len(ids) < context:
            params = SamplingParams(max_tokens=min(llm.max_model_len - 1, context), temperature=1.0, seed=seed)
            ids += [bos, *llm.generate([[bos]], params, use_tqdm=False)[0].token_ids]
            seed += 1
    if len(ids) < context:
        raise RequestError(f"{text}: --context {context} tokens are wanted, the text has {len(ids)}")
    return ids[:context]


def inside(llm: LLM, ids: list[int], trained: int, first: int) -> float:
    """Mean loss, nats, of the tokens from `first` on, each behind at least half of the trained length."""
    half, losses = trained // 2, []
    for start in range(first, len(ids), half):
        window = ids[start - half : start + half]
        losses.append(-llm.score([window])[0][half - 1 :])
    return float(np.concatenate(losses).mean())


def rows(model: str, text: str, context: int, scalings: list[Any], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each scaling: None, "auto" or an object as in config.json."""
    base = LLM(model, **settings)
    trained = base.max_model_len
    if context <= trained:
        raise RequestError(f"--context {context} is not beyond the model's own of {trained} tokens")
    ids, first = token_ids(base, text, context), context * 3 // 4
    least = inside(base, ids, trained, first)
    found = []
    for scaling in scalings:
        llm = LLM(model, max_model_len=context, rope_scaling=scaling, **settings)
        losses = -llm.score([ids])[0]
        chosen = llm._model.config.rope_scaling
        found.append({
            "rope_scaling": "none" if chosen is None else f"{chosen.kind} {chosen.values['factor']:.4g}",
            "text": text, "context": context, "trained": trained, "scored_tokens": len(ids) - first,
            "ppl_quarters": [round(math.exp(part.mean()), 3) for part in np.array_split(losses, 4)],
            "ppl_inside": math.exp(least),
            "ppl": math.exp(losses[first - 1 :].mean()),
            "ratio": math.exp(losses[first - 1 :].mean() - least),
        })  # fmt: skip
    return found
