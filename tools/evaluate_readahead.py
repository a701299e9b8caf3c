r"""What could be read before a query comes: of the tokens that it then recalls, how many a set made earlier holds.

    residual before layer l - 1 ----> attention ----> after it ----> MLP ----> before layer l ----> query, its recall
             \_ a layer ahead             \_ after attention        \_ what layer l reads: the truth

A *speculated* query is what layer l would ask if nothing came between: the residual of an earlier point, through the
norm and the projection of layer l, at the query's own position (InfiniGen, arXiv 2406.19707). With `drift`, plus what
comes between on average, a vector measured on other text. Its logits over the 2-bit keys choose tokens as the query's
own will. All sets have the size of the recall set, 5 % of the old tokens of each KV head:

    covered  share of the recall set (chosen by the query over the 2-bit keys, as `Ops.recall` does) in the set
    exact    the same of the tokens that the exact attention is highest at
    new      of the set, not in the last step's such set
    early    read for the set if the tokens that the last step recalled are still there, of the size of a recall set
    late     then still to be read while the query waits; without either all of it is

*Overlays* (`--overlay-size`) keep what was read last, as much as so many recall sets, and read nothing early.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine import LLM
from kernels import reference
from memory.importance import AttentionRecord, page_ages
from tools.evaluate_attention import RECENT, SINKS, WINDOW, Sample, at_floor, attention_of, causal, forward

STEPS = 64
AHEAD = {"a layer ahead": 2, "after attention": 1}  # how many sums of the residual before a layer's own
OVERLAYS = (1.5, 2, 3, 4)  # recall sets that there is room for
HALF = "half speculated, half the last step's"


def drifts(llm: LLM, window: Sequence[int]) -> dict[tuple[int, str], Tensor]:
    """What the mean residual [hidden] gains up to each layer from where a query for it is speculated."""
    means: list[Tensor] = []
    forward(llm, window, lambda layer, q, k, v: causal(q, k, v), hear=lambda residual: means.append(residual.mean(0)))
    layers = range(1, llm._model.config.num_layers)
    return {(i, name): means[2 * i] - means[2 * i - ahead] for i in layers for name, ahead in AHEAD.items()}


def query(llm: LLM, layer: int, residual: Tensor, first: int) -> Tensor:
    """What the layer asks of such residuals [n, hidden] from the position `first` on, [Hq, n, D], rotated."""
    model, config = llm._model, llm._model.config
    hidden = model.ops.rms_norm(residual, model.layers[layer].input_norm, config.rms_norm_eps)
    q = model.ops.linear(hidden, *model.layers[layer].qkv)[:, : config.num_heads * config.head_dim]
    cos, sin = model.rope[first : first + len(residual), None].chunk(2, dim=-1)
    return reference._rotate(q.view(len(q), config.num_heads, config.head_dim), cos, sin).transpose(0, 1)


def rows(
    llm: LLM, window: Sequence[int], drift: dict[tuple[int, str], Tensor], fraction: float,
    signals: dict[str, Callable[[Sample], Tensor]],
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each kind of set: means over all layers but the first, whose query no layer comes before, and STEPS
    queries. signals: sets of highest scores, too, from the queries before, all of which were observed."""
    first = len(window) - 128
    size = round(fraction * (first - RECENT - SINKS))
    heard: list[Tensor] = []  # the residual before and after each layer's attention, of the steps
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    positions, steps = torch.arange(len(window)), torch.arange(first - 1, first + STEPS)[:, None]
    young = (positions < SINKS) | (positions >= steps - RECENT)  # [1 + STEPS, T], with the step before

    def highest(scores: Tensor) -> Tensor:
        """scores [Hkv, n, T] of the last n steps -> which are in the set, bool."""
        best = scores.masked_fill(young[-scores.shape[1] :], -1.0).topk(size, 2).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(2, best, True)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer:
            floor, asked = at_floor(k, True), q[:, first - 1 : first + STEPS]
            recalled = _squares(asked, floor, first - 1)
            truth, exact = highest(recalled), highest(attention_of(asked, k, first - 1).mean(1))[:, 1:]
            before, truth = truth[:, :-1], truth[:, 1:]
            sets = {"the last step's": before}
            sets |= {f"highest {name}": highest(x) for name, x in _scores(q, k, first, layer, signals).items()}
            for name, ahead in AHEAD.items():
                for words, shift in ((name, torch.zeros(())), (f"{name}, drift", drift[layer, name])):
                    guess = _squares(query(llm, layer, heard[2 * layer - ahead] + shift, first), floor, first)
                    sets[f"speculated {words}"] = highest(guess)
            half = recalled[:, :-1].masked_fill(young[1:], -1.0).topk(size // 2, 2).indices
            sets[HALF] = highest(guess.scatter(2, half, 2.0))
            for name, chosen in sets.items():
                measured = {
                    "covered": chosen & truth,
                    "exact": chosen & exact,
                    "new": chosen[:, 1:] & ~chosen[:, :-1],
                    "early": chosen & ~before,
                    "late": truth & ~chosen & ~before,
                }
                for column, which in measured.items():
                    found[name][column].append(float(which.sum(2).double().mean()) / size)
            begun = torch.arange(1, STEPS + 1)[:, None]  # when a token was read last, 0: never
            last = (begun * truth).cummax(1).values[:, STEPS // 2 : -1]  # the first half fills them
            for kept in OVERLAYS:
                oldest = last.kthvalue(last.shape[2] - round(kept * size) + 1, 2, keepdim=True).values
                held = last >= oldest.clamp_min(1)
                covered, of_exact = (
                    float((held & wanted[:, STEPS // 2 + 1 :]).sum(2).double().mean()) / size
                    for wanted in (truth, exact)
                )
                row = {"covered": covered, "exact": of_exact, "new": 1 - covered, "early": 0.0, "late": 1 - covered}
                for column, value in row.items():
                    found[f"overlay of {kept:g} sets"][column].append(value)
        return causal(q, k, v)

    forward(llm, window, attend, hear=lambda residual: heard.append(residual[first : first + STEPS].clone()))
    return [
        {"set": name, **{column: sum(values) / len(values) for column, values in columns.items()}}
        for name, columns in found.items()
    ]


def _squares(q: Tensor, k: Tensor, first: int) -> Tensor:
    """By what the engine's recall chooses: [Hkv, n, T], the squares of the shares, mean over the heads of a group."""
    return attention_of(q, k, first).square_().mean(1)


def _scores(
    q: Tensor, k: Tensor, first: int, layer: int, signals: dict[str, Callable[[Sample], Tensor]]
) -> dict[str, Tensor]:
    """The signals of each of the STEPS queries from `first` on, [Hkv, STEPS, T]."""
    begun = first - 3 * WINDOW
    attention, found = AttentionRecord(), {name: torch.zeros(len(k), STEPS, k.shape[1]) for name in signals}
    seen = attention_of(q[:, begun : first + STEPS], k, begun).mean(1)
    for length, row in enumerate(seen.unbind(1), begun):
        if length >= first:
            ages, features = page_ages(length, 1, length), attention.features(length)
            known = torch.from_numpy(features), torch.from_numpy(ages).float()
            sample = Sample(layer, length, *known, mass=row[:, :length], squares=row[:, :length].square(), signals={})
            for name, signal in signals.items():
                found[name][:, length - first, :length] = signal(sample)
        lifts = (row[:, : length + 1] * (length + 1)).numpy()
        attention.observe(lifts, page_ages(length + 1, 1, length + 1), length + 1, WINDOW)
    return found
