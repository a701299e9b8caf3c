"""The engine's settings: frozen, checked where they are born, and the source of the command line's flags (no torch)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import shown
from engine.settings import Accepts, check, integer, number, one_of, parse_size
from memory.config import TierConfig
from models.errors import ConfigError

_TIERS = TierConfig()  # the defaults

# Settings that this version does not have, and what they belong to: refused by name, never ignored.
NOT_YET = {
    "quantization": "quantised weights",
    **dict.fromkeys(("profile", "scorer"), "trained scorers of importance"),
    **dict.fromkeys(
        ("recall", "cold_format", "host_cache_size", "flash_cache_dir", "flash_cache_size"), "exact copies below"
    ),
}


def usable_cpus() -> int:
    """Hardware threads that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that is decided before a model is loaded; flags.json says what most of it means. Raises ConfigError
    naming the field, got and wanted."""

    model: str  # or a path, which becomes one
    tokenizer: str | os.PathLike[str] | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    device: str = "auto"
    backend: str = "auto"
    max_model_len: int | None = None
    rope_scaling: Mapping[str, Any] | None = None
    kv_cache_memory: int | None = None  # a str is parsed
    page_size: int = 64
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    threads: int | None = None
    check_tensors: bool = False
    seed: int = 0  # where a request has none of its own
    enable_prefix_caching: bool = True
    eviction_policy: str = "importance"
    max_prefix_children: int | None = 8  # of a node of the tree of prefixes (memory/radix.py)
    max_prefix_depth: int | None = None
    kv_budget: float | None = None
    preset: str | None = None
    importance: str = "score"
    recent_tokens: int = _TIERS.recent_tokens
    attention_window: int = _TIERS.attention_window
    hot_layer_size: int | None = None
    hot_ratio: float | None = None
    warm_layer_ratio: float = _TIERS.warm_layer_ratio
    hot_threshold: float = _TIERS.hot_threshold
    warm_threshold: float = _TIERS.warm_threshold
    evict_threshold: float = _TIERS.evict_threshold
    warm_placement: str = "device"
    quantization: None = None
    recall: None = None
    cold_format: str = "auto"
    host_cache_size: None = None
    flash_cache_dir: None = None
    flash_cache_size: None = None
    profile: str = "default"
    scorer: None = None

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if isinstance(self.kv_cache_memory, str):
            object.__setattr__(self, "kv_cache_memory", parse_size(self.kv_cache_memory))
        check(self, _CHECKS, ConfigError)
        for name, part in NOT_YET.items():
            value, default = getattr(self, name), self.__dataclass_fields__[name].default
            if value != default:
                raise ConfigError(
                    f"{name} {shown(value)} is not available in this version: leave it {default!r} ({part} come later)"
                )


def _path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and bool(os.fspath(value))


# What each field accepts, beside None where that is its default: (in words, test).
_CHECKS: dict[str, Accepts] = {
    "model": ("a name or a path", _path),
    "tokenizer": ("a path", _path),
    "skip_tokenizer_init": one_of(True, False),
    "enable_prefix_caching": one_of(True, False),
    "check_tensors": one_of(True, False),
    "eviction_policy": one_of("importance", "lru"),
    "max_prefix_children": (
        "an integer from 2 on, or None",
        lambda value: value is None or (type(value) is int and value > 1),
    ),
    "max_prefix_depth": integer(1, 1 << 16),
    "dtype": one_of("auto", "float32", "bfloat16", "float16"),
    "device": ("auto, cpu, cuda or cuda:N", lambda value: bool(re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(value)))),
    "backend": one_of("auto", "torch", "triton"),
    "rope_scaling": ("an object as in config.json", lambda value: isinstance(value, Mapping)),
    "max_model_len": integer(1, 1 << 27),
    "kv_cache_memory": integer(1, 1 << 50),
    "page_size": one_of(16, 32, 64),
    "kv_budget": number(math.ulp(0.0), 1, "above 0 up to 1"),
    "preset": one_of("proposal"),
    "importance": one_of("score", "random", "none"),
    "recent_tokens": integer(0, 1 << 27),
    "attention_window": integer(1, 1 << 20),
    "hot_layer_size": integer(0, 1 << 40),
    **dict.fromkeys(
        ("hot_ratio", "warm_layer_ratio", "hot_threshold", "warm_threshold", "evict_threshold"), number(0, 1)
    ),
    "warm_placement": one_of("device", "shared"),
    "max_num_batched_tokens": integer(1, 1 << 20),
    "max_num_seqs": integer(1, 1 << 16),
    "threads": integer(1, 4096),
    "seed": integer(0, (1 << 63) - 1),
}
