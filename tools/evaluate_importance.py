"""What signals of importance are worth: `python -m tools.evaluate importance`.

Each text gives some windows. At several points of each every signal chooses, in each layer and KV head, the 5 % of the
old tokens that it holds to be important; from then on

    recall       how many of the 10 % that the next 512 queries attend to most are in a choice of 10 %
    missed_mass  the attention of these queries to old tokens that goes to what is not chosen
    avoidable    of it, what the oracle, which knows that attention, does not miss: the rest no choice can have
    missed_squares  the same of the squares of the shares in each head, which is what errors of tokens add up by
    kl           of the predictions of the next 64 tokens, where all old tokens but the chosen have 2 bits (the round
                 trip of `kernels.reference`), to those of the exact cache: the same tokens for every signal

The first four tokens, the newest 64 and the 64 themselves are exact for all. The choice stays as it is for the 64.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine import LLM
from engine.progress import Progress
from kernels import reference
from memory.importance import PROFILES, Scorer
from tools import evaluate_readahead
from tools.evaluate_attention import (
    RECENT,
    SINKS,
    Sample,
    at_floor,
    forward,
    layers_of,
    missed,
    recalled,
    record,
)

Shares = dict[int, float] | dict[int, Tensor]  # of the old tokens of each layer, or of each of its KV heads
KEPT, TRUTH, HORIZON, STEPS, EVERY = 0.05, 0.1, 512, 64, 16
SINGLE = ("w64", "w256", "age-normalised", "cumulative", "recency", "key norm", "relevance", "attention")
COMPARED = (*SINGLE, "random", "hand-weighted sum", "trained", "oracle", "oracle of squares")


def choose(scorer: Scorer) -> dict[str, Callable[[Sample], Tensor]]:
    """The signals by name: from a sample to scores [heads, n]."""

    def scored(by: Scorer, factors: tuple[float, ...] = (1, 1, 1)) -> Callable[[Sample], Tensor]:
        weights = by.packed(factors).detach()
        return lambda x: reference.score(
            x.features.flatten(0, 1), x.ages.repeat(len(x.features)), weights
        ).view_as(x.mass)  # fmt: skip

    random = torch.Generator().manual_seed(0)
    plain = {name: (lambda x, name=name: x.signals[name]) for name in SINGLE[:6]}
    return plain | {
        "relevance": lambda x: x.features[..., 0],
        "attention": lambda x: x.features[..., 1],
        "random": lambda x: torch.rand(x.mass.shape, generator=random),
        "hand-weighted sum": scored(Scorer()),
        "trained": scored(scorer),
        **{f"trained, {name}": scored(scorer, factors) for name, factors in PROFILES.items() if name != "default"},
        "oracle": lambda x: x.mass,
        "oracle of squares": lambda x: x.squares,
    }


def rows(
    llm: LLM, scorer: Scorer, texts: dict[str, list[list[int]]], calibration: list[list[int]], blocks: int, count: int,
    predicted: Sequence[str] = COMPARED,
) -> dict[str, Any]:  # fmt: skip
    """A row for each signal and text; texts, calibration: windows of tokens. Without calibration neither KL
    nor read-ahead, which is measured in the first window. predicted: the signals with KL, beside the trained one."""
    signals = choose(scorer)
    layers = layers_of(llm, count)
    split = _split(llm, signals["trained"], calibration, layers, blocks) if calibration else {}
    drift = evaluate_readahead.drifts(llm, calibration[0]) if calibration else {}
    kept: dict[str, Shares] = {name: dict.fromkeys(layers, KEPT) for name in dict.fromkeys((*predicted, "trained"))}
    kept |= {"nothing": dict.fromkeys(layers, 0.0), "trained, split": split}
    found, ahead, kinds = [], [], []
    unknown = dict.fromkeys(("recall", "missed_mass", "avoidable", "missed_squares"))
    for text, windows in Progress(texts.items(), desc="Reading", unit="text", shown=True):
        tokens: list[Sample] = []
        kl: dict[str, list[float]] = defaultdict(list)
        for window in windows:
            starts, new, keys_values = _recorded(llm, window, layers, blocks)
            tokens += new
            if calibration:
                for name, values in divergences(llm, window, starts, new, signals, kept, keys_values).items():
                    kl[name] += values
        least = _mean(missed(x.mass, x.mass, KEPT) for x in tokens)
        measured = {
            name: {
                "recall": _mean(recalled(signal(x), x.mass, TRUTH) for x in tokens),
                "missed_mass": (mass := _mean(missed(signal(x), x.mass, KEPT) for x in tokens)),
                "avoidable": mass - least,
                "missed_squares": _mean(missed(signal(x), x.squares, KEPT) for x in tokens),
            }
            for name, signal in signals.items()
        }
        kinds += [
            {"profile": name, "text": text, **measured["trained" if name == "default" else f"trained, {name}"]}
            for name in PROFILES
        ]
        if not calibration:
            found += [{"signal": name, "text": text, **values} for name, values in measured.items()]
            continue
        for name in kept:
            blocked, best = np.array(kl[name]), np.array(kl["trained"])
            found.append({
                "signal": name, "text": text, **measured.get(name, unknown),
                 "kl": blocked.mean(), "se": standard_error(blocked),
                "kl_above_trained": (blocked - best).mean(), "its_se": standard_error(blocked - best),
            })  # fmt: skip
        two = {"attention term": signals["attention"], "score": signals["trained"]}
        ahead += [{"text": text, **row} for row in evaluate_readahead.rows(llm, windows[0], drift, KEPT, two)]
    return {
        "rows": found,
        "profiles": kinds,
        "read_ahead": ahead,
        "split": {str(layer): part.tolist() for layer, part in split.items()},
    }


def _recorded(
    llm: LLM, window: list[int], layers: Sequence[int], blocks: int
) -> tuple[list[int], list[Sample], list[tuple[Tensor, Tensor]]]:
    """Where the blocks of a window start, the samples of its tokens there, and K and V of every layer."""
    starts = [len(window) - HORIZON - STEPS * (blocks - i) for i in range(blocks)]
    keys_values: list[tuple[Tensor, Tensor]] = []
    samples = record(llm, window, layers, starts, HORIZON, EVERY, keys_values)
    return starts, [x for x in samples if x.layer is not None], keys_values


def _split(
    llm: LLM, signal: Callable[[Sample], Tensor], windows: list[list[int]], layers: Sequence[int], blocks: int
) -> dict[int, Tensor]:
    """What to keep in each layer, [Hkv], at the bytes of an even split. Of layers by the KL that each costs alone with
    its even share, which falls about as the cube root of what is kept, so the power 1 / (1 + 1/3) of it makes the sum
    least; of a layer's heads by the root of the squares that an even share misses there."""
    kl: dict[str, list[float]] = defaultdict(list)
    lost: dict[int, list[Tensor]] = defaultdict(list)
    alone: dict[str, Shares] = {str(i): {layer: KEPT if layer == i else 1.0 for layer in layers} for i in layers}
    for window in windows:
        starts, tokens, keys_values = _recorded(llm, window, layers, blocks)
        for x in tokens:
            assert x.layer is not None
            lost[x.layer].append(x.squares.masked_fill(_highest(signal(x), KEPT), 0.0).sum(1))
        costs = divergences(llm, window, starts, tokens, dict.fromkeys(alone, signal), alone, keys_values)
        for name, values in costs.items():
            kl[name] += values
    roots = {layer: torch.stack(lost[layer]).mean(0).sqrt() for layer in layers}
    parts = torch.stack(
        [max(_mean(kl[str(layer)]), 0.0) ** 0.75 * roots[layer] / roots[layer].mean() for layer in layers]
    )
    parts = parts.clamp_min(0.2 * float(parts.mean()))  # some everywhere
    return dict(zip(layers, KEPT * parts / parts.mean(), strict=True))


def _highest(scores: Tensor, fractions: float | Tensor) -> Tensor:
    """Which of the scores [Hkv, n] are among so many of the highest of their head, bool; fractions: one, or [Hkv]."""
    counts = torch.as_tensor(fractions).mul(scores.shape[1]).round().expand(len(scores))
    return scores.argsort(1, descending=True).argsort(1) < counts[:, None]


def divergences(
    llm: LLM, window: list[int], starts: list[int], samples: list[Sample],
    signals: dict[str, Callable[[Sample], Tensor]], kept: dict[str, Shares],
    exact: list[tuple[Tensor, Tensor]],
) -> dict[str, list[float]]:  # fmt: skip
    """KL in nats a token, of each block behind the starts, by name in `kept`: the fraction kept in each layer."""
    layers = {x.layer for x in samples}
    floor = [tuple(at_floor(x, is_key) for x, is_key in zip(pair, (True, False), strict=True)) for pair in exact]
    known = {(x.layer, x.start): x for x in samples}
    kl = defaultdict(list)
    for start in Progress(starts, desc="Predicting", unit="block", shown=True):
        ids, old = window[start : start + STEPS], slice(SINKS, start - RECENT)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, start: int = start, old: slice = old) -> Tensor:
            if layer not in layers:  # its past is exact for all
                past = [x[:, :start] for x in exact[layer]]
                all_k, all_v = (
                    torch.cat(pair, 1)[None].repeat_interleave(len(q) // len(k), 1)
                    for pair in zip(past, (k, v), strict=True)
                )
                same = torch.block_diag(*[torch.ones(STEPS, STEPS, dtype=torch.bool).tril()] * (1 + len(kept)))
                visible = torch.cat([torch.ones(len(same), start, dtype=torch.bool), same], 1)
                return scaled_dot_product_attention(q[None], all_k, all_v, visible)[0]
            sample = known[layer, start]
            masks = torch.ones(1 + len(kept), len(k), start, 1, dtype=torch.bool)  # first: all exact
            for mask, (name, fractions) in zip(masks[1:], kept.items(), strict=True):
                signal = signals.get(name.partition(", split")[0])  # none chooses nothing
                mask[:, old, 0] = _highest(signal(sample) if signal else sample.mass, fractions[layer])
            new = [x.unflatten(1, (len(masks), STEPS)).transpose(0, 1) for x in (q, k, v)]
            old_k, old_v = (
                torch.where(masks, x[:, :start], y[:, :start]) for x, y in zip(exact[layer], floor[layer], strict=True)
            )
            groups = len(q) // len(k)
            all_k, all_v = (
                torch.cat([x, y], 2).repeat_interleave(groups, 1) for x, y in ((old_k, new[1]), (old_v, new[2]))
            )
            visible = torch.ones(STEPS, start + STEPS, dtype=torch.bool).tril(start)
            out = scaled_dot_product_attention(new[0], all_k, all_v, visible)
            return out.transpose(0, 1).flatten(1, 2)

        hidden = forward(llm, ids * (1 + len(kept)), attend, start)
        with torch.no_grad():
            log_p = llm._model.exact_logits(hidden).log_softmax(-1).unflatten(0, (-1, STEPS))
            for name, other in zip(kept, log_p[1:], strict=True):
                kl[name].append(float((log_p[0].exp() * (log_p[0] - other)).sum(-1).mean()))
    return kl


def _mean(values: Any) -> float:
    taken = list(values)
    return float(sum(taken)) / len(taken)


def standard_error(blocks: np.ndarray) -> float:
    return float(blocks.std(ddof=1)) / math.sqrt(len(blocks))
