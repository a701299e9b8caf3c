"""The settings of the engine and of requests: frozen, checked where they are born, and the source of the command line's
flags; and what requests come back as (no torch)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import RequestError
from engine.settings import check, parse_size
from memory.config import TierConfig
from models.errors import ConfigError

_TIERS = TierConfig()  # the defaults
_SIZES = "kv_cache_memory", "host_cache_size", "overlay_size", "flash_cache_size"  # also given as "8GiB"


def usable_cpus() -> int:
    """Hardware threads that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that is decided before a model is loaded; flags.json says what it means and what it may be. Raises
    ConfigError naming the field, got and wanted."""

    model: str  # paths become texts, and texts sizes
    tokenizer: str | os.PathLike[str] | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    device: str = "auto"
    backend: str = "auto"
    cuda_graphs: str = "auto"
    max_model_len: int | None = None
    rope_scaling: Mapping[str, Any] | str | None = None
    kv_cache_memory: int | None = None
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
    recall: float | None = None
    recall_block: int = 16  # queries of a prompt that share what they recall
    cold_format: str = "auto"
    cold_policy: str = "inclusive"
    host_cache_size: int | None = None
    overlay_size: int | None = None  # on the device
    flash_cache_dir: str | os.PathLike[str] | None = None
    flash_cache_size: int | None = None
    flash_cache_persist: bool = False
    flash_cache_encrypt: bool = False
    quantization: str | None = None
    quantization_group: int | None = None
    profile: str = "default"
    scorer: str | os.PathLike[str] | None = None
    adapt: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
            elif isinstance(value, str) and name in _SIZES:
                object.__setattr__(self, name, parse_size(value))
        check(self, ConfigError)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an answer is chosen. temperature 0 is greedy; the filters apply in the order of the fields.

    logprobs: for every token of the answer, the log-probabilities (natural, of the unfiltered distribution) of this
    many most likely tokens and of the chosen one. n: answers per prompt, each with its own randomness.
    Raises RequestError naming the parameter, got and wanted.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    cache_salt: str = ""  # cached prefixes serve requests of the same salt only
    exact_prefix: bool = False  # use cached prefixes only as far as they were computed by an exact cache

    def __post_init__(self) -> None:
        stop: Any = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        right = isinstance(stop, list | tuple) and len(stop) <= 16
        if not right or not all(isinstance(text, str) and 0 < len(text) <= 256 for text in stop):
            raise RequestError("stop must be at most 16 texts of 1 to 256 characters")
        object.__setattr__(self, "stop", tuple(stop))
        check(self, RequestError)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """An answer so far. finish_reason is None while it grows, then stop, length, abort or error."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[dict[int, float]] | None
    num_cached_tokens: int  # of the prompt, that were found in the cache and not computed
    cache_report: dict[str, Any] = field(default_factory=dict)
    request_id: int = 0
