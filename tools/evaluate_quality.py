"""What compressing the cache does to the model's predictions, measured against the full cache on the same tokens.

    full cache   | chunk | chunk | chunk | ...     all read the same window at the same time, chunk by chunk, so that
    budget 0.22  | chunk | chunk | chunk | ...     the logits of a chunk are compared and forgotten: no more than a
    budget 0.31  | chunk | chunk | chunk | ...     chunk of each is ever held
    noise        | ch|unk| ch|unk| ch|unk| ...

Every LLM computes the tokens through the engine's own path, over the same weights. The last one has the full cache and
chunks of half the size: the same mathematics, summed and rounded in another order. Its KL is the noise floor, below
which a difference says nothing (0.0003 to 0.0004 in bfloat16, about 0 in float32).

Standard errors are of paired differences, in blocks of 64 consecutive tokens, whose errors go together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine import LLM
from engine.progress import Progress

BLOCK = 64  # tokens


@dataclass
class Tally:
    """What one LLM did, beside the full cache, and what its cache held. Arrays [scored tokens] for each window."""

    loss: list[np.ndarray] = field(default_factory=list)  # -log p of the next token, less the full cache's
    kl: list[np.ndarray] = field(default_factory=list)  # KL(full || this), nats
    agrees: list[np.ndarray] = field(default_factory=list)  # whether the most probable token is the same
    # The largest of the steps in scored chunks: allocated bytes over the exact bytes of the same tokens.
    resident_ratio: float = 0.0
    total_ratio: float = 0.0
    cold_bytes: int = 0
    # At the end of each window, before its last step: bytes of the sequence's exact pages, and of its compressed ones.
    hot_bytes: list[int] = field(default_factory=list)
    warm_bytes: list[int] = field(default_factory=list)
    moves: int = 0
    steps: int = 0
    reads: dict[str, Any] = field(default_factory=dict)  # of copies: cold_hit_rate, read_bytes_per_token and so on


class Reader:
    """One LLM that reads window after window; gives its logits in pieces of any length."""

    def __init__(self, llm: LLM, name: str, score_from: int) -> None:
        self.llm = llm
        self.name = name
        self.tally = Tally()
        self._score_from = score_from
        self._steps: Iterator[Tensor] = iter(())
        self._rest: list[Tensor] = []

    def begin(self, window: list[int]) -> None:
        self._steps, self._rest = self.llm.logits(window), []
        self.tally.hot_bytes.append(0)
        self.tally.warm_bytes.append(0)

    def take(self, count: int) -> Tensor:
        """The logits [count, vocab_size] of the next tokens."""
        missing = count - sum(map(len, self._rest))
        while missing > 0:
            self._rest.append(next(self._steps))
            missing -= len(self._rest[-1])
            self._observe()
        rows = self._rest[0] if len(self._rest) == 1 else torch.cat(self._rest)
        self._rest = [rows[count:]] if count < len(rows) else []
        return rows[:count]

    def _observe(self) -> None:
        """Note what the cache holds, the step's moves done. After a window's last step it holds nothing."""
        tally, cache = self.tally, self.llm._cache
        tally.moves = cache.stats()["kv_moves"]
        tally.reads = cache.reads.report(cache.reads.counts)
        tally.steps += 1
        for request in self.llm._scheduler.running:
            report = cache.report(request.sequence)
            tally.hot_bytes[-1], tally.warm_bytes[-1] = report["hot_bytes"], report["warm_bytes"]
            if request.sequence.length > self._score_from:
                # The cache's own figure has the tables and the unused parts of blocks as well.
                exact, cold = report["full_bytes"], report["cold_bytes"]
                tally.resident_ratio = max(tally.resident_ratio, cache.resident_bytes / exact)
                tally.total_ratio = max(tally.total_ratio, (cache.resident_bytes + cold) / exact)
                tally.cold_bytes = max(tally.cold_bytes, cold)


@dataclass
class Comparison:
    """full: -log p of every scored token with the full cache, [scored tokens] for each window. tallies: of the settings
    in turn; noise: of the full cache rounded otherwise, if asked for."""

    full: list[np.ndarray]
    tallies: list[Tally]
    noise: Tally | None


def compare(
    base: LLM, settings: list[dict[str, Any]], windows: list[list[int]], score_from: int, noise: bool = True
) -> Comparison:
    """Read the windows with the full cache of `base` and a twin for each of the settings.

    Raises ConfigError for a setting, CapacityError, and FloatingPointError for logits that are not numbers.
    """
    readers = [Reader(base.twin(**changes), describe(changes), score_from) for changes in settings]
    if noise:
        readers.append(Reader(rounded_otherwise(base), "the full cache in other chunks", score_from))
    full = read(base, readers, windows, score_from)
    tallies = [reader.tally for reader in readers]
    return Comparison(full, tallies[: len(settings)], tallies[-1] if noise else None)


def read(base: LLM, readers: list[Reader], windows: list[list[int]], score_from: int) -> list[np.ndarray]:
    """Read the windows with `base` and with the others, whose tallies are filled. -> `Comparison.full`"""
    full: list[np.ndarray] = []
    with Progress(total=sum(map(len, windows)), desc="Reading", unit="token", shown=True) as bar:
        for window in windows:
            losses = []
            for reader in readers:
                reader.begin(window)
            position = 0
            for logits in base.logits(window):
                count = len(logits)
                rows = slice(min(max(score_from - position, 0), count), min(count, len(window) - 1 - position))
                targets = torch.tensor(window[position + 1 :][rows], device=logits.device)
                reference = _log_probabilities(logits[rows], position, "the full cache")
                probabilities = reference.exp()
                losses.append(_losses(reference, targets))
                for reader in readers:
                    taken = _log_probabilities(reader.take(count)[rows], position, reader.name)
                    reader.tally.loss.append(_losses(taken, targets) - losses[-1])
                    reader.tally.kl.append(_array((probabilities * (reference - taken)).sum(-1)))
                    reader.tally.agrees.append(_array(reference.argmax(-1) == taken.argmax(-1)))
                position += count
                bar.update(count)
            full.append(np.concatenate(losses))
            for reader in readers:
                _join(reader.tally, len(full) - 1)
    return full


def rounded_otherwise(base: LLM) -> LLM:
    """The same mathematics in another order: what differs from `base` is noise."""
    chunk = base.config.max_num_batched_tokens
    return base.twin(max_num_batched_tokens=chunk // 2 if chunk > 1 else 2)


def describe(changes: dict[str, Any]) -> str:
    """Settings as a person writes them: "kv_budget 0.31"."""
    return ", ".join(f"{name} {value}" for name, value in changes.items()) or "exact"


def _log_probabilities(logits: Tensor, position: int, name: str) -> Tensor:
    if not torch.isfinite(logits).all():
        raise FloatingPointError(f"{name}: logits that are not finite numbers, from token {position} of a window on")
    return logits.log_softmax(-1)


def _losses(log_p: Tensor, targets: Tensor) -> np.ndarray:
    return _array(-log_p.gather(1, targets[:, None])[:, 0])


def _array(values: Tensor) -> np.ndarray:
    array: np.ndarray = values.double().cpu().numpy()
    return array


def _join(tally: Tally, window: int) -> None:
    """Make the chunks that were added since the windows before one array."""
    for parts in (tally.loss, tally.kl, tally.agrees):
        parts[window:] = [np.concatenate(parts[window:])]


def mean(values: list[np.ndarray]) -> float:
    """Over the tokens of all windows."""
    return float(np.concatenate(values).mean())


def block_error(values: list[np.ndarray]) -> float | None:
    """Standard error of the mean of [tokens] for each window, whose neighbours go together: of the means of whole
    blocks. None for fewer than two blocks."""
    blocks = [window[: len(window) // BLOCK * BLOCK].reshape(-1, BLOCK).mean(1) for window in values]
    means = np.concatenate(blocks)
    return float(means.std(ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else None


def row(comparison: Comparison, index: int, changes: dict[str, Any]) -> dict[str, Any]:
    """What is reported of one setting."""
    tally = comparison.tallies[index]
    loss_full, difference, error = mean(comparison.full), mean(tally.loss), block_error(tally.loss)
    factor = math.exp(difference)
    return {
        "setting": describe(changes),
        "kv_budget": changes.get("kv_budget"),
        "scored_tokens": sum(map(len, comparison.full)),
        "ppl_full": math.exp(loss_full),
        "ppl": math.exp(loss_full + difference),
        "dppl_percent": 100 * (factor - 1),
        "dppl_se_percent": None if error is None else 100 * factor * error,
        "kl_nats": mean(tally.kl),
        "kl_se": block_error(tally.kl),
        "noise_kl_nats": None if comparison.noise is None else mean(comparison.noise.kl),
        "top1_agreement": mean(tally.agrees),
        "resident_ratio": tally.resident_ratio,
        "total_ratio": tally.total_ratio,
        "cold_bytes": tally.cold_bytes,
        **tally.reads,
        "moves": tally.moves,
    }


def plot(rows: list[dict[str, Any]], title: str, path: str) -> None:
    """KL over resident bytes as a PNG, with the noise floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5), layout="constrained")
    ratios, values = [row["resident_ratio"] for row in rows], [row["kl_nats"] for row in rows]
    budgets = sorted((ratio, kl) for ratio, kl, row in zip(ratios, values, rows, strict=True) if row["kv_budget"])
    if budgets:
        axes.plot(*zip(*budgets, strict=True), color="tab:blue")
    axes.errorbar(ratios, values, yerr=[row["kl_se"] or 0 for row in rows], fmt="o", color="tab:blue", capsize=3)
    for ratio, kl, row in zip(ratios, values, rows, strict=True):
        axes.annotate(row["setting"], (ratio, kl), textcoords="offset points", xytext=(6, 6), fontsize=8)
    if rows[0]["noise_kl_nats"]:
        axes.axhline(rows[0]["noise_kl_nats"], color="gray", linestyle="--", label="noise floor (rounding)")
        axes.legend()
    if any(kl > 0 for kl in values):
        axes.set_yscale("log")
    axes.margins(x=0.2)  # room for what is written beside the points
    axes.set(xlabel="resident bytes / exact bytes of the same tokens", ylabel="KL(full || tiered), nats", title=title)
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)
