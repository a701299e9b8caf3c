"""What each setting of the tiers does: a low and a high value of each beside the default, on the same tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine import LLM
from engine.config import EngineConfig
from tools import evaluate_quality as measure

# (low, high); all else stays as it is by default.
VALUES: dict[str, tuple[float, float]] = {
    "hot_layer_size": (256, 2048),
    "warm_layer_ratio": (0.05, 0.8),
    "evict_threshold": (0.0, 0.5),
    "hot_threshold": (0.4, 0.8),
    "warm_threshold": (0.0, 0.8),
    "recent_tokens": (0, 512),
    "attention_window": (16, 1024),
    "hot_ratio": (0.02, 0.1),
}
_DEFAULTS = EngineConfig(model="-")
_LEAST = 0.01  # of a change that is named, relative to the smaller value


def settings(kv_budget: float) -> list[dict[str, Any]]:
    return [{"kv_budget": kv_budget, name: value} for name, values in VALUES.items() for value in values]


def rows(base: LLM, windows: list[list[int]], score_from: int, changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each knob; changes: the default, then `settings`. Figures are of the low value, the default, the high
    value; bytes are those at the end of a window, means."""
    comparison = measure.compare(base, changes, windows, score_from, noise=False)
    default, others = comparison.tallies[0], comparison.tallies[1:]
    found = []
    for i, (name, (low, high)) in enumerate(VALUES.items()):
        three = {"low": others[2 * i], "default": default, "high": others[2 * i + 1]}
        found.append(
            {
                "knob": name,
                "values": {"low": low, "default": getattr(_DEFAULTS, name), "high": high},
                "moves_per_step": {key: tally.moves / tally.steps for key, tally in three.items()},
                "hot_bytes": {key: round(float(np.mean(tally.hot_bytes))) for key, tally in three.items()},
                "warm_bytes": {key: round(float(np.mean(tally.warm_bytes))) for key, tally in three.items()},
                "kl_nats": {key: measure.mean(tally.kl) for key, tally in three.items()},
                "resident_ratio": {key: tally.resident_ratio for key, tally in three.items()},
                "effect": effect(three["low"], three["high"]),
            }
        )
    return found


def effect(low: measure.Tally, high: measure.Tally) -> str:
    """What the high value changes of what the low one gives, in words. A KL counts where it differs by 2 standard
    errors, anything else by 1 %."""
    changes = [
        _change(low.moves / low.steps, high.moves / high.steps, "moves", ("fewer", "more")),
        _change(np.mean(low.hot_bytes), np.mean(high.hot_bytes), "exact bytes", ("fewer", "more")),
        _change(np.mean(low.warm_bytes), np.mean(high.warm_bytes), "compressed bytes", ("fewer", "more")),
        _change(low.resident_ratio, high.resident_ratio, "resident ratio", ("lower", "higher")),
    ]
    paired = [b - a for a, b in zip(low.kl, high.kl, strict=True)]
    difference, error = measure.mean(paired), measure.block_error(paired)
    if error is not None and abs(difference) > 2 * error:
        changes.append("higher KL" if difference > 0 else "lower KL")
    named = [change for change in changes if change]
    return f"up: {', '.join(named)}" if named else "no effect"


def _change(low: Any, high: Any, of: str, words: tuple[str, str]) -> str | None:
    if math.isclose(low, high, rel_tol=_LEAST, abs_tol=1e-12):
        return None
    return f"{words[int(high > low)]} {of}"
