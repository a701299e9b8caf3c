"""From settings to a model in memory: what to load, how large it may be, and where it goes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
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
from memory.config import CacheConfig
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
    capacity = _cache_bytes(config, model_config, tensors, max_model_len, device, dtype)
    try:
        cache_config = CacheConfig(
            num_layers=model_config.num_layers,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            itemsize=dtype.itemsize,
            capacity_bytes=capacity,
            page_size=config.page_size,
        )
    except ValueError as error:
        raise CapacityError(f"the KV cache is too small: {error}; use a larger --kv-cache-memory") from None

    def bar(names: Iterable[str]) -> Iterable[str]:
        yield from Progress(names, desc="Loading", unit="tensor", shown=progress)

    ops = kernels.load(_backend(config.backend, device))
    load_weights(weights, tensors, dtype, device, bar, config.check_tensors)
    return Engine(
        model=Llama(model_config, weights, ops, max_model_len),
        cache=KVCache(cache_config, dtype, device),
        ops=ops,
        tokenizer=tokenizer,
        eos_ids=frozenset(eos_ids + (tokenizer.eos_ids if tokenizer else ())),
        max_model_len=max_model_len,
        generation_config=generation,
    )


def _tokenizer(config: EngineConfig, path: Path, model: LlamaConfig) -> Tokenizer:
    source = Path(config.tokenizer) if config.tokenizer else path
    tokenizer = load_tokenizer(source)
    check_vocabulary(tokenizer, model.vocab_size, source)
    return tokenizer


def _cache_bytes(
    config: EngineConfig,
    model: LlamaConfig,
    tensors: dict[str, TensorInfo],
    max_model_len: int,
    device: torch.device,
    dtype: torch.dtype,
) -> int:
    """Bytes for the KV cache, once weights and cache are known to fit. Raises CapacityError with the numbers."""
    weights = sum(int(np.prod(info.shape, dtype=np.int64)) for info in tensors.values()) * dtype.itemsize
    if model.tie_word_embeddings and device.type == "cpu" and dtype == torch.bfloat16:
        weights += model.vocab_size * model.hidden_size * dtype.itemsize  # the head, in a layout of its own
    token_bytes = model.kv_bytes_per_token(dtype.itemsize)
    context = -(-max_model_len // config.page_size) * config.page_size * token_bytes
    free = free_memory_bytes(device)
    capacity = config.kv_cache_memory
    if capacity is None:
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
