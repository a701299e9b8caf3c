"""From settings to a model in memory: what to load, how large it may be, and where it goes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kernels
from engine.config import EngineConfig, usable_cpus
from engine.metrics import free_memory_bytes
from engine.progress import Progress
from engine.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from kernels.ops import Ops
from kernels.reference import cpu_computes_bfloat16
from memory import CapacityError
from memory.cache import KVCache
from memory.config import WARM_BITS, CacheConfig, TierConfig
from models.checkpoint import TensorInfo, open_checkpoint
from models.errors import ConfigError
from models.files import read_object
from models.llama.config import LlamaConfig, token_ids
from models.llama.model import Llama, LlamaWeights
from models.loader import check_fit, load_weights
from models.resolve import resolve

log = logging.getLogger("isotherm")


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything that `LLM` drives, loaded and fitting together."""

    model: Llama
    cache: KVCache
    ops: Ops
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    max_model_len: int
    generation_config: dict[str, Any]  # the checkpoint's generation_config.json, {} without one


def load(config: EngineConfig, progress: bool) -> Engine:
    """Load what `config` names; progress: a bar on stderr.

    Raises ConfigError, ModelFormatError, TokenizerError, or CapacityError with both numbers where it does not fit:
    everything is checked before the weights are read.
    """
    path = resolve(config.model)
    model_config = LlamaConfig.from_dict(read_object(path / "config.json"), config.rope_scaling)
    device = _device(config.device)
    dtype = _dtype(config.dtype, model_config, device)
    if device.type == "cpu":
        torch.set_num_threads(config.threads or max(1, usable_cpus() // 2))
    max_model_len = _max_model_len(config, model_config)
    generation_file = path / "generation_config.json"
    generation = read_object(generation_file) if generation_file.is_file() else {}
    tokenizer = None if config.skip_tokenizer_init else _tokenizer(config, path, model_config)
    eos_ids = model_config.eos_token_ids + token_ids(generation.get("eos_token_id"), "eos_token_id")
    tensors = open_checkpoint(path)
    weights = LlamaWeights(model_config)
    check_fit(weights, tensors)
    cache_config = _cache_config(
        config, model_config, _weight_bytes(tensors, model_config, device, dtype), device, dtype
    )

    def bar(names: Iterable[str]) -> Iterable[str]:
        yield from Progress(names, desc="Loading", unit="tensor", shown=progress)

    ops = kernels.load(_backend(config.backend, device))
    load_weights(weights, tensors, dtype, device, bar, config.check_tensors)
    return Engine(
        model=Llama(model_config, weights, ops, max_model_len),
        cache=_cache(cache_config, model_config, dtype, device, ops),
        ops=ops,
        tokenizer=tokenizer,
        eos_ids=frozenset(eos_ids + (tokenizer.eos_ids if tokenizer else ())),
        max_model_len=max_model_len,
        generation_config=generation,
    )


def second_cache(engine: Engine, config: EngineConfig) -> Engine:
    """The same model with an empty cache of its own, as `config` asks. Raises ConfigError, CapacityError."""
    model = engine.model
    max_model_len = _max_model_len(config, model.config)
    if max_model_len > engine.max_model_len:
        raise ConfigError(
            f"max_model_len {max_model_len} is more than the {engine.max_model_len} the model was loaded for"
        )
    cache_config = _cache_config(config, model.config, 0, model.device, model.dtype)
    cache = _cache(cache_config, model.config, model.dtype, model.device, engine.ops)
    return replace(engine, cache=cache, max_model_len=max_model_len)


def _cache(config: CacheConfig, model: LlamaConfig, dtype: torch.dtype, device: torch.device, ops: Ops) -> KVCache:
    """An empty cache; whatever makes keys and values differ is part of what its prefixes are kept under."""
    fingerprint = repr((model, dtype, config.page_size)).encode()
    return KVCache(config, dtype, device, ops, fingerprint=fingerprint)


def _tokenizer(config: EngineConfig, path: Path, model: LlamaConfig) -> Tokenizer:
    source = Path(config.tokenizer) if config.tokenizer else path
    tokenizer = load_tokenizer(source)
    check_vocabulary(tokenizer, model.vocab_size, source)
    return tokenizer


def _tiers(config: EngineConfig, model: LlamaConfig, max_model_len: int) -> TierConfig | None:
    """What the settings ask of the cache; None where nothing can make it compress, or its pages cannot be."""
    limits = (config.kv_budget, config.kv_cache_memory, config.preset, config.hot_layer_size, config.hot_ratio)
    if all(limit is None for limit in limits):
        return None
    if model.head_dim % 8:
        if config.kv_budget is None and config.preset is None:
            return None
        raise ConfigError(
            f"kv_budget and preset need a head_dim that is a multiple of 8, this model's is {model.head_dim}"
        )
    proposal = config.preset == "proposal"
    return TierConfig(
        budget=config.kv_budget,
        recent_tokens=4 if proposal else config.recent_tokens,
        attention_window=config.attention_window,
        evict_threshold=config.evict_threshold,
        warm_threshold=config.warm_threshold,
        hot_threshold=config.hot_threshold,
        hot_layer_size=4 * max_model_len if config.hot_layer_size is None else config.hot_layer_size,
        warm_layer_ratio=config.warm_layer_ratio,
        hot_ratio=0.1 if proposal else config.hot_ratio or 0.0,
        cold_ratio=0.2 if proposal else 0.0,
        importance=config.importance,
        shared=proposal or config.warm_placement == "shared",
    )


def _weight_bytes(tensors: dict[str, TensorInfo], model: LlamaConfig, device: torch.device, dtype: torch.dtype) -> int:
    count = sum(int(np.prod(info.shape, dtype=np.int64)) for info in tensors.values())
    if model.tie_word_embeddings and device.type == "cpu" and dtype == torch.bfloat16:
        count += model.vocab_size * model.hidden_size  # the head, in a layout of its own
    return count * dtype.itemsize


def _cache_config(
    config: EngineConfig, model: LlamaConfig, weights: int, device: torch.device, dtype: torch.dtype
) -> CacheConfig:
    """The cache that the settings ask for, beside `weights` bytes still to be loaded. Raises CapacityError."""
    max_model_len = _max_model_len(config, model)
    try:
        cache = CacheConfig(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            itemsize=dtype.itemsize,
            capacity_bytes=_cache_bytes(config, model, weights, max_model_len, device, dtype),
            page_size=config.page_size,
            tiers=_tiers(config, model, max_model_len),
            poison=bool(os.environ.get("ISOTHERM_DEBUG_POISON")),
            prefix_caching=config.enable_prefix_caching,
            eviction_policy=config.eviction_policy,
            max_prefix_children=config.max_prefix_children,
            max_prefix_depth=config.max_prefix_depth,
        )
    except ValueError as error:
        raise CapacityError(f"the KV cache is too small: {error}; use a larger --kv-cache-memory") from None
    least = cache.page_cost(WARM_BITS[-1]) / cache.page_cost(cache.exact_bits)
    if config.kv_budget is not None and config.kv_budget < least:
        raise ConfigError(
            f"kv_budget {config.kv_budget} is less than {least:.3f}, which is what pages of {WARM_BITS[-1]} bits and "
            "their scales take: no token is dropped, so nothing smaller holds them"
        )
    return cache


def _cache_bytes(
    config: EngineConfig,
    model: LlamaConfig,
    weights: int,
    max_model_len: int,
    device: torch.device,
    dtype: torch.dtype,
) -> int:
    """Bytes for the KV cache, once weights and cache are known to fit. Raises CapacityError with the numbers."""
    token_bytes = model.kv_bytes_per_token(dtype.itemsize)
    context = -(-max_model_len // config.page_size) * config.page_size * token_bytes
    free = free_memory_bytes(device)
    capacity = config.kv_cache_memory
    if capacity is None:
        if config.kv_budget is not None:  # and the chunk in flight, which is extra
            chunk = min(config.max_num_batched_tokens, max_model_len) + 2 * config.page_size
            context = min(context, int(config.kv_budget * context) + chunk * token_bytes)
        capacity = context if free is None else min(context, max(free - weights, 0) // 2)
        if capacity < context:
            log.warning(
                "the KV cache gets %.2f GB, half of the memory that the weights leave: %d tokens of %d fit at once",
                capacity / 1e9, capacity // token_bytes, max_model_len,
            )  # fmt: skip
    if free is not None and weights + capacity > free:
        raise CapacityError(
            f"{config.model} needs {weights / 1e9:.2f} GB for weights in {str(dtype).removeprefix('torch.')} and "
            f"{capacity / 1e9:.2f} GB for the KV cache, {free / 1e9:.2f} GB are free on {device}; use a smaller "
            "--kv-cache-memory or --max-model-len, --dtype bfloat16, or a smaller model"
        )
    return capacity


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {name} was asked for, and torch finds no GPU here: use --device cpu")
    return torch.device(name)


def _dtype(name: str, model: LlamaConfig, device: torch.device) -> torch.dtype:
    """auto: the checkpoint's own on a GPU; on a CPU bfloat16 where it computes in it, else float32."""
    if name == "auto" and device.type == "cpu":
        name = "bfloat16" if cpu_computes_bfloat16() else "float32"
    dtype: torch.dtype = getattr(torch, model.dtype if name == "auto" else name)
    return dtype


def _backend(name: str, device: torch.device) -> str:
    if name == "triton" and device.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        raise ConfigError(
            "backend triton needs a GPU: use --backend torch, or set TRITON_INTERPRET=1 to run its kernels, very "
            "slowly, in Triton's interpreter"
        )
    return name if name != "auto" else "triton" if device.type == "cuda" else "torch"


def _max_model_len(config: EngineConfig, model: LlamaConfig) -> int:
    wanted = config.max_model_len or model.context_length
    if model.sliding_window and wanted > model.sliding_window:
        raise ConfigError(
            f"max_model_len {wanted} is more than the model's sliding_window of {model.sliding_window} tokens; its "
            "attention over longer texts is not computed in this version"
        )
    if wanted > model.context_length:
        raise ConfigError(
            f"max_model_len {wanted} is more than the model's context of {model.context_length} tokens; a longer one "
            'needs --rope-scaling, as {"rope_type": "dynamic", "factor": 2}'
        )
    return wanted
