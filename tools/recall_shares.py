"""How recall is shared over layers: `python -m tools.recall_shares --model M --text FILE... --out scorer.safetensors`.

    window --> the model --> q, K, V and attention of every layer; g: how the log-probability of tokens drawn from the
               predictions changes with that attention
    old K and V at 2 bits, but those that a query attends to most --> the error e of its attention
    (e . g)^2 / 2 --> what recalling so many in that layer leaves of the KL to the exact predictions
    one price of a token in all layers --> each layer's fraction --> its odds, beside a scorer's tensors

A layer's error is taken alone: errors of several layers add up, as far as they are small and go their own ways. The
gradient holds what the output projection and the layers behind make of an error, so that all layers are in one unit.
Odds say how much likelier a token is recalled in a layer than in the mean: see `memory.importance.recall_shares`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.cli import run
from models.errors import ConfigError
from tools import evaluate_texts
from tools.bench import provenance
from tools.train_scorer import check_out, save

if TYPE_CHECKING:
    from torch import Tensor

    from engine import LLM

FACTORS = (0.25, 0.5, 1, 2, 4)  # of the mean, that a layer is tried with: it gets no less and no more
_EVERY = 8  # queries of which one is measured


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.recall_shares", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="name or directory (default: %(default)s)")
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help="to measure on; `stdlib`, module:NAME")
    parser.add_argument("--out", required=True, metavar="FILE", help="the scorer with the shares, safetensors")
    parser.add_argument("--scorer", metavar="FILE", help="the scorer that gets them (default: the package's)")
    parser.add_argument("--context", type=int, default=2048, metavar="N", help="of a window (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=2, metavar="N", help="of each text (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the tokens that are drawn")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    if args.windows < 1 or not 0 <= args.seed < 2**63:
        raise ConfigError(f"need --windows from 1 and --seed from 0 to 2^63, got {args.windows}, {args.seed}")
    if args.context % 256 or args.context < 512:
        raise ConfigError(f"need --context in whole 256 tokens, 512 at least, got {args.context}")
    check_out(args.out)
    import torch

    from engine import LLM
    from engine.loading import read_scorer, shape_of
    from engine.progress import Progress
    from memory.importance import SHARED

    scorer, about = read_scorer(args.scorer)
    llm = LLM(args.model, dtype="float32", threads=1, max_model_len=args.context, progress=True)
    generator = torch.Generator().manual_seed(args.seed)
    assert llm.tokenizer is not None
    found = []
    for name in args.text:
        found += evaluate_texts.first_windows(name, llm.tokenizer, args.context, args.windows)
    bar = Progress(found, desc="Measuring", unit="window", shown=True)
    costs = np.mean([costs_of(llm, window, SHARED, generator) for window in bar], axis=0)
    fractions = share(costs, SHARED)
    before, after = (costs_at(costs, SHARED, x).sum() for x in (np.full(len(costs), SHARED), fractions))
    odds = fractions / (1 - fractions) * (1 - SHARED) / SHARED
    words = " ".join(["python -m tools.recall_shares", *(sys.argv[1:] if argv is None else argv)])
    told = {"recall_model": shape_of(llm._model.config), "recall_odds": json.dumps(odds.round(3).tolist())}
    save(scorer, Path(args.out), {**about, **told, "recall_command": words})
    report = {"out": args.out, "fractions": fractions.round(4).tolist(), "kl_even": before, "kl_shared": after}
    lines = [f"layer {i:3}  recalls {x:.4f}" for i, x in enumerate(fractions)]
    lines += [f"KL {before:.2e} where all are alike, {after:.2e} so, on these texts, as far as errors are small"]
    print(json.dumps({**provenance(), **report}) if args.json else "\n".join([*lines, args.out]))
    return 0


def costs_of(llm: LLM, window: Sequence[int], recall: float, generator: Any) -> np.ndarray:
    """KL [layers, FACTORS] float64 of the second half of a window's predictions to the exact ones, in nats a token, for
    an error in one layer's attention, with factor * recall of the tokens exact in it."""
    import torch

    from tools.evaluate_attention import causal, forward

    inputs: list[tuple[Tensor, Tensor, Tensor]] = []
    outputs: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inputs.append((q.detach(), k.detach(), v.detach()))
        outputs.append(causal(q, k, v).requires_grad_())
        return outputs[-1]

    hidden = forward(llm, window, attend, gradients=True)
    with torch.enable_grad():
        log_p = llm._model.logits(hidden[len(window) // 2 :]).log_softmax(-1)
        said = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
        gradients = torch.autograd.grad(log_p.gather(1, said).sum(), outputs)
    chosen = torch.arange(len(window) // 2 + _EVERY - 1, len(window), _EVERY)
    rows = []
    for (q, k, v), gradient in zip(inputs, gradients, strict=True):
        errors = _errors(q, k, v, chosen, [factor * recall for factor in FACTORS])
        rows.append([float((e * gradient[:, chosen]).sum((0, 2)).square().mean()) / 2 for e in errors])
    return np.array(rows)


def _errors(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, fractions: Sequence[float]) -> list[Tensor]:
    """What the attention [Hq, n, D] of the chosen queries of q [Hq, T, D] errs by, for each fraction of the tokens that
    is exact: those of all KV heads together whose squares are largest, and the newest."""
    import torch

    from tools.evaluate_attention import PAGE, at_floor

    grouped = q[:, chosen].unflatten(0, (len(k), -1)) * q.shape[2] ** -0.5  # [Hkv, group, n, D]
    at = torch.arange(k.shape[1])
    old = at < (chosen[:, None] // PAGE - 1) * PAGE
    future = at > chosen[:, None]

    def attention(exact: Tensor) -> Tensor:
        """Shares [Hkv, group, n, T], where those [Hkv or 1, n, T] are exact."""
        logits = torch.where(exact[:, None], of_exact, of_floor)
        return logits.masked_fill_(future, -math.inf).softmax(-1)

    of_exact, of_floor = (grouped @ x.mT[:, None] for x in (k, at_floor(k, True)))
    values = v - at_floor(v, False)
    right = attention(~future[None]) @ v[:, None]
    squares = attention(~old[None]).square_().sum(1).masked_fill_(~old, -1).transpose(0, 1)  # [n, Hkv, T]
    order = squares.flatten(1).argsort(1, descending=True)
    ranks = torch.arange(order.shape[1])
    errors = []
    for fraction in fractions:
        counts = (fraction * len(k) * chosen).long()[:, None]
        taken = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order, ranks < counts)
        exact = taken.view_as(squares).transpose(0, 1) | ~old
        shares = attention(exact)
        errors.append((shares @ v[:, None] - (shares * ~exact[:, None]) @ values[:, None] - right).flatten(0, 1))
    return errors


def costs_at(costs: np.ndarray, recall: float, fractions: np.ndarray) -> np.ndarray:
    """Of each layer [layers], by its costs [layers, FACTORS]: the logarithm of costs is taken as linear in that of
    fractions between them, and costs never grow with fractions."""
    falling = np.log(np.maximum(np.minimum.accumulate(costs, axis=1), 1e-12))
    tried = np.log(recall * np.array(FACTORS))
    return np.exp([np.interp(np.log(x), tried, row) for x, row in zip(fractions, falling, strict=True)])


def share(costs: np.ndarray, recall: float) -> np.ndarray:
    """Fractions [layers], `recall` in the mean, of the least costs in all: the steps that spare most for what they take
    come first, of each layer's costs as far as they are convex. Never worse than the same fraction for all."""
    grid = recall * np.geomspace(FACTORS[0], FACTORS[-1], 129)
    layers, spared, taken = [], [], []
    for layer, row in enumerate(np.array([costs_at(costs, recall, np.full(len(costs), x)) for x in grid]).T):
        for begin, end in itertools.pairwise(_lower_hull(grid, row)):
            layers.append(layer)
            taken.append(grid[end] - grid[begin])
            spared.append((row[begin] - row[end]) / taken[-1])
    order = np.argsort(-np.array(spared), kind="stable")
    widths = np.array(taken)[order]
    left = len(costs) * (recall - grid[0]) - (widths.cumsum() - widths)
    found = np.full(len(costs), grid[0])
    np.add.at(found, np.array(layers)[order], np.clip(left, 0, widths))
    return min(found, np.full(len(costs), recall), key=lambda x: costs_at(costs, recall, x).sum())


def _lower_hull(x: np.ndarray, y: np.ndarray) -> list[int]:
    """Which of the points, in order, are corners of their lower convex hull (Andrew's monotone chain)."""
    found: list[int] = []
    for i in range(len(x)):
        while len(found) > 1:
            a, b = found[-2:]
            if (y[b] - y[a]) * (x[i] - x[b]) < (y[i] - y[b]) * (x[b] - x[a]):
                break
            found.pop()
        found.append(i)
    return found


if __name__ == "__main__":
    run(main)
