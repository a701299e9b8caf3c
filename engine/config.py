"""The engine's settings: frozen, checked where they are born, and the source of the command line's flags (no torch)."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import shown
from memory.config import TierConfig
from models.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


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


def parse_size(text: str | int) -> int:
    """Bytes of "64MiB", "8GB", "1.5g" or a plain number. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]i?|)b?\s*", str(text).lower())
    if match is None:
        raise ConfigError(f"a size is a number with a unit, as 64MiB or 8GB; got {shown(text)}")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_json_object(text: str) -> dict[str, Any]:
    """A JSON object given on the command line. Raises ConfigError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f'a JSON object is wanted, as {{"rope_type": "linear", "factor": 2}}; got {shown(text)}')
    return value


def flag(default: Any, help: str, *names: str, parse: Callable[[str], Any] = str, metavar: str | None = None) -> Any:
    """A dataclass field that is also a command-line flag; `names` are its spellings beside --the-field-name. One whose
    `parse` is bool takes no value."""
    return field(default=default, metadata={"help": help, "names": names, "parse": parse, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that is decided before a model is loaded. Raises ConfigError naming the field, got and wanted."""

    model: str  # or a path, which becomes one
    tokenizer: str | os.PathLike[str] | None = flag(
        None, "tokenizer file or directory (default: the model's)", metavar="PATH"
    )
    skip_tokenizer_init: bool = False
    dtype: str = flag("auto", "auto, float32, bfloat16 or float16: of weights and KV cache (default: %(default)s)")
    device: str = flag("auto", "auto, cpu or cuda (default: %(default)s)")
    backend: str = flag("auto", "auto, torch or triton: who computes; auto is triton on a GPU, torch on a CPU")
    max_model_len: int | None = flag(
        None, "tokens of prompt and answer together (default: the model's context)", "-c", "--ctx-size", parse=int,
        metavar="N",
    )  # fmt: skip
    rope_scaling: Mapping[str, Any] | None = flag(
        None, "replace the model's RoPE scaling, as JSON in config.json's form", parse=parse_json_object, metavar="JSON"
    )
    kv_cache_memory: int | None = flag(  # a str is parsed
        None,
        "bytes of the KV cache, as 64MiB or 8GB (default: the model's context once, at most half the free memory)",
        parse=parse_size,
        metavar="SIZE",
    )
    page_size: int = flag(64, "tokens a cache page: 16, 32 or 64 (default: %(default)s)", parse=int, metavar="N")
    max_num_batched_tokens: int = flag(
        512, "tokens computed in one step, prompts in chunks (default: %(default)s)", parse=int, metavar="N"
    )
    max_num_seqs: int = flag(64, "requests computed together at most (default: %(default)s)", parse=int, metavar="N")
    threads: int | None = flag(
        None, "CPU threads (default: half of the CPUs there are, since two often share a core)", parse=int, metavar="N"
    )
    check_tensors: bool = flag(False, "refuse weights that are NaN or infinite, by name", parse=bool)
    seed: int = 0  # where a request has none of its own
    enable_prefix_caching: bool = True
    kv_budget: float | None = flag(
        None, "compress the KV cache to this fraction of its exact bytes, as 0.31 (default: exact)", parse=float,
        metavar="FRACTION",
    )  # fmt: skip
    preset: str | None = flag(None, "proposal: the tiers of the original proposal, to compare with", metavar="NAME")
    importance: str = flag("score", "what pages are compressed last by: score, random or none (default: %(default)s)")
    recent_tokens: int = flag(
        _TIERS.recent_tokens, "newest tokens that are compressed last (default: %(default)s)", parse=int,
        metavar="N",
    )  # fmt: skip
    attention_window: int = flag(
        _TIERS.attention_window, "tokens over which a page's attention is averaged (default: %(default)s)",
        parse=int, metavar="N",
    )  # fmt: skip
    hot_layer_size: int | None = flag(
        None, "exact tokens of all requests together, at most (default: four contexts)", parse=int, metavar="N"
    )
    hot_ratio: float | None = flag(
        None, "share of the pages that stays exact, whatever the budget (default: as the budget allows)", parse=float
    )
    warm_layer_ratio: float = flag(
        _TIERS.warm_layer_ratio, "share of a short budget that exact pages leave to compressed ones (default: "
        "%(default)s)", parse=float,
    )  # fmt: skip
    hot_threshold: float = flag(
        _TIERS.hot_threshold, "pages of this score stay a format above the others (default: %(default)s)",
        parse=float,
    )  # fmt: skip
    warm_threshold: float = flag(
        _TIERS.warm_threshold, "exact pages below this score are compressed ahead (default: %(default)s)",
        parse=float,
    )  # fmt: skip
    evict_threshold: float = flag(
        _TIERS.evict_threshold, "compressed pages below it are compressed further ahead (default: %(default)s)",
        parse=float,
    )  # fmt: skip
    warm_placement: str = flag("device", "device, or shared: compressed pages in shared host memory")
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
        for name, (wanted, accepts) in _CHECKS.items():
            value = getattr(self, name)
            default = self.__dataclass_fields__[name].default
            if not accepts(value) and not (value is None and default is None):
                raise ConfigError(f"{name} must be {wanted}, got {shown(value)}")
        for name, part in NOT_YET.items():
            value, default = getattr(self, name), self.__dataclass_fields__[name].default
            if value != default:
                raise ConfigError(
                    f"{name} {shown(value)} is not available in this version: leave it {default!r} ({part} come later)"
                )


def _path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and bool(os.fspath(value))


def _one_of(*choices: Any) -> tuple[str, Callable[[Any], bool]]:
    text = " or ".join(filter(None, (", ".join(map(str, choices[:-1])), str(choices[-1]))))
    return text, lambda value: any(value == choice and type(value) is type(choice) for choice in choices)


def _integer(least: int, greatest: int) -> tuple[str, Callable[[Any], bool]]:
    return f"an integer from {least} to {greatest}", lambda value: type(value) is int and least <= value <= greatest


def _fraction(least: float) -> tuple[str, Callable[[Any], bool]]:
    text = "a number above 0 up to 1" if least else "a number from 0 to 1"
    return text, lambda value: type(value) in (int, float) and least <= value <= 1


# What each field accepts, beside None where that is its default: (in words, test).
_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model": ("a name or a path", _path),
    "tokenizer": ("a path", _path),
    "skip_tokenizer_init": _one_of(True, False),
    "enable_prefix_caching": _one_of(True, False),
    "check_tensors": _one_of(True, False),
    "dtype": _one_of("auto", "float32", "bfloat16", "float16"),
    "device": ("auto, cpu, cuda or cuda:N", lambda value: bool(re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(value)))),
    "backend": _one_of("auto", "torch", "triton"),
    "rope_scaling": ("an object as in config.json", lambda value: isinstance(value, Mapping)),
    "max_model_len": _integer(1, 1 << 27),
    "kv_cache_memory": _integer(1, 1 << 50),
    "page_size": _one_of(16, 32, 64),
    "kv_budget": _fraction(math.ulp(0.0)),
    "preset": _one_of("proposal"),
    "importance": _one_of("score", "random", "none"),
    "recent_tokens": _integer(0, 1 << 27),
    "attention_window": _integer(1, 1 << 20),
    "hot_layer_size": _integer(0, 1 << 40),
    **dict.fromkeys(
        ("hot_ratio", "warm_layer_ratio", "hot_threshold", "warm_threshold", "evict_threshold"), _fraction(0)
    ),
    "warm_placement": _one_of("device", "shared"),
    "max_num_batched_tokens": _integer(1, 1 << 20),
    "max_num_seqs": _integer(1, 1 << 16),
    "threads": _integer(1, 4096),
    "seed": _integer(0, (1 << 63) - 1),
}
