"""What the tokens of a window are attended to: recorded from the model, as the cache would see it, and what came after.

    queries     0 ........ start ................. start + horizon ... window
                [observed  ) every `every`-th       [ the truth: all  )
    features    what AttentionRecord makes of the observed ones, for each KV head of a layer
    mass        the attention that each token got from the queries after `start`
    squares     the same of its squares in each head, as which what is rounded away adds up

The newest tokens and the first four are left out: no design drops or rounds them first, and which they are needs no
score. Pages are recorded beside tokens: mean over layers and heads, as the cache does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from engine import LLM
from kernels import reference
from memory.importance import AttentionRecord, page_ages

SINKS, RECENT, WINDOW, PAGE = 4, 64, 64, 64
_ROWS = 256  # queries whose attention is held at once


@dataclass
class Sample:
    """What was known at one point of a window, and what came: of the tokens of one layer, or of pages.

    features [heads, n, NUM_FEATURES], ages [n], mass and squares [heads, n] a query; signals [heads, n] by name, to
    compare with.
    """

    layer: int | None  # None: of pages
    start: int
    features: Tensor
    ages: Tensor
    mass: Tensor
    squares: Tensor
    signals: dict[str, Tensor]


class _Listening:
    """The model's operations, with an ear for its residual: before the first layer, after every attention and MLP."""

    def __init__(self, ops: Any, hear: Callable[[Tensor], Any]) -> None:
        self._ops, self._hear = ops, hear

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def rms_norm(self, x: Tensor, *rest: Any) -> Tensor:
        self._hear(x)
        out: Tensor = self._ops.rms_norm(x, *rest)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, *rest: Any) -> Tensor:
        out: Tensor = self._ops.add_rms_norm(x, residual, *rest)
        self._hear(residual)
        return out


class Differentiable:
    """The model's operations without what autograd cannot follow: a residual that is changed after it was read."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def rms_norm(self, x: Tensor, *rest: Any) -> Any:
        return self._ops.rms_norm(x.clone(), *rest)

    def add_rms_norm(self, x: Tensor, residual: Tensor, *rest: Any) -> Any:
        return self._ops.rms_norm(residual.add_(x).clone(), *rest)


def forward(
    llm: LLM, window: Sequence[int], attend: Callable[[int, Tensor, Tensor, Tensor], Tensor], start: int | None = None,
    hear: Callable[[Tensor], Any] | None = None, gradients: bool = False,
) -> Tensor:  # fmt: skip
    """Hidden states of the window; attend(layer, q [Hq, T, D], k, v [Hkv, T, D]), rotated -> [Hq, T, D]. start: the
    window is blocks of 64 tokens that all stand there. hear: gets the residual [T, hidden] wherever it has changed.
    gradients: autograd follows."""

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor) -> Tensor:
        cos, sin = cos_sin[:, None].chunk(2, dim=-1)
        q, k = (reference._rotate(x, cos, sin).to(v.dtype).transpose(0, 1) for x in (q, k))
        return attend(layer, q, k, v.transpose(0, 1)).transpose(0, 1)

    model = copy.copy(llm._model)
    if hear is not None:
        model.ops = _Listening(model.ops, hear)
    if gradients:
        model.ops = Differentiable(model.ops)
    with torch.set_grad_enabled(gradients):  # training cannot use what inference_mode made
        positions = torch.arange(len(window))
        return model.forward(
            torch.tensor(window), positions if start is None else start + positions % 64, attention
        )  # fmt: skip


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Exact attention [Hq, T, D] of a whole window."""
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    return scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


def layers_of(llm: LLM, count: int) -> list[int]:
    """So many layers, spread over the model; 0: all."""
    depth = llm._model.config.num_layers
    return sorted({round((i + 0.5) * depth / (count or depth) - 0.5) for i in range(count or depth)})


def at_floor(x: Tensor, is_key: bool) -> Tensor:
    """K or V [Hkv, T, D] with 2 bits, as pages."""
    pages = x.unflatten(1, (-1, PAGE)).flatten(0, 1)
    back = reference.decompress(*reference.compress(pages, 2, is_key), 2, is_key, x[:, :PAGE])
    return back.view_as(x)


def attention_of(q: Tensor, k: Tensor, first: int, every: int = 1) -> Tensor:
    """Attention of the queries q [Hq, n, D], every `every`-th from `first` on (the last of so many), to the keys
    k [Hkv, T, D]: [Hkv, heads of a group, n, T] float32."""
    seen = first + every * q.shape[1]
    logits = (q.unflatten(0, (len(k), -1)).flatten(1, 2) @ k[:, :seen].mT).float().mul_(q.shape[2] ** -0.5)
    logits = logits.unflatten(1, (-1, q.shape[1]))
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1).repeat_interleave(every, 1)
    logits[..., first:].masked_fill_(later, -math.inf)
    return pad(logits.softmax(-1), (0, k.shape[1] - seen))


def record(
    llm: LLM, window: Sequence[int], layers: Sequence[int], starts: Sequence[int], horizon: int, every: int,
    keys_values: list[tuple[Tensor, Tensor]] | None = None,
) -> list[Sample]:  # fmt: skip
    """Samples of the layers, and of pages (their mean), at each of the starts, which are multiples of 64. keys_values
    receives K and V of every layer."""
    observed: list[Tensor] = []  # [Hkv, queries, T] of each layer
    samples: list[Sample] = []
    total = torch.zeros(2, len(window) // PAGE, len(window))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in layers:
            rows, came = [], []
            for at in range(0, len(window), _ROWS):
                if at + _ROWS <= min(starts):  # what these attend to is no truth
                    some = attention_of(q[:, at : at + _ROWS][:, every - 1 :: every], k, at, every)
                    rows.append(some.mean(1))
                    came.append(some.new_zeros(2, len(k), _ROWS // PAGE, len(window)))
                    continue
                seen = attention_of(q[:, at : at + _ROWS], k, at)
                both = torch.stack([seen.mean(1), seen.square_().mean(1)])
                rows.append(both[0, :, every - 1 :: every])
                came.append(both.unflatten(2, (-1, PAGE)).sum(3))  # by 64 queries
            observed.append(torch.cat(rows, 1))
            mass = torch.cat(came, 2)  # and squares
            total.add_(mass.mean(1) / len(layers))
            norms = {name: x.float().norm(dim=-1) for name, x in (("key", k), ("value", v))}
            samples.extend(_samples(layer, observed[-1], mass, norms, starts, horizon, every))
        if keys_values is not None:
            keys_values.append((k.clone(), v.clone()))
        return causal(q, k, v)

    forward(llm, window, attend)
    pages = torch.stack([x.mean(0) for x in observed]).mean(0).unflatten(1, (-1, PAGE)).sum(2) / PAGE
    total = total.unflatten(2, (-1, PAGE)).sum(3)[:, None]
    samples += _samples(None, pages[None], total, {}, starts, horizon, every)
    return samples


def _samples(
    layer: int | None, observed: Tensor, mass: Tensor, norms: dict[str, Tensor], starts: Sequence[int], horizon: int,
    every: int,
) -> list[Sample]:  # fmt: skip
    """observed [heads, queries, n]: shares of tokens, or the mean share of a page's tokens; mass: of them and of their
    squares, [2, heads, 64 queries each, n]."""
    size = 1 if layer is not None else PAGE
    attention, found = AttentionRecord(), []
    plain = torch.zeros(2, *observed.shape[::2])  # windowed attention as it is commonly taken: young tokens too
    for i, row in enumerate(observed.unbind(1)):
        length = (i + 1) * every
        count = -(-length // size)
        ages = page_ages(count, size, length)
        lifts = row[:, :count] * length
        attention.observe(lifts.numpy(), ages, length, WINDOW)
        keep = torch.exp(torch.tensor([-every / WINDOW, -every / WINDOW / 4]))[:, None, None]
        plain = keep * plain + (1 - keep) * row * length
        if length in starts:
            kept = slice(SINKS if size == 1 else 1, (length - RECENT) // size)
            features = torch.from_numpy(attention.features(count))
            signals = {
                "w64": plain[0], "w256": plain[1],
                "cumulative": (total := observed[:, : i + 1].sum(1)),
                "age-normalised": total / (length - torch.arange(observed.shape[2]) * size).clamp_min(1),
                "recency": torch.arange(observed.shape[2]).expand(len(observed), -1).float(),
            } | {f"{name} norm": -norm for name, norm in norms.items()}  # fmt: skip
            came = mass[:, :, length // 64 : (length + horizon) // 64, kept].sum(2) / horizon
            found.append(
                Sample(
                    layer, length, features[:, kept].float(), torch.from_numpy(ages[kept]).float(),
                    came[0], came[1], {name: signal[:, kept] for name, signal in signals.items()},
                )
            )  # fmt: skip
    return found


def missed(scores: Tensor, mass: Tensor, fraction: float) -> float:
    """Share of the mass [heads, n] that the `fraction` with the highest scores leaves out, mean over heads."""
    kept = scores.topk(max(1, round(fraction * scores.shape[1])), 1).indices
    return float((1 - mass.gather(1, kept).sum(1) / mass.sum(1)).mean())


def recalled(scores: Tensor, mass: Tensor, fraction: float) -> float:
    """How many of the `fraction` with the largest mass are among those with the highest scores."""
    count = max(1, round(fraction * scores.shape[1]))
    truth = torch.zeros_like(mass).scatter_(1, mass.topk(count, 1).indices, 1.0)
    return float(truth.gather(1, scores.topk(count, 1).indices).mean())
