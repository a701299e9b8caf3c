"""An engine of a shape, without a checkpoint: random weights of its size, made where they are to be.

True memory and true speed of shapes whose weights are not at hand; what it says has no meaning.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

import kernels
from engine import LLM
from engine.config import EngineConfig
from engine.loading import Engine, _quantization, second_cache
from kernels.ops import QuantizedWeight
from memory.cache import KVCache
from models.errors import require_config
from models.llama.config import LlamaConfig
from models.llama.model import Llama, LlamaWeights
from tools.memory_plan import shape

_STD = 0.02  # of the weights, as Llama is initialised


def random_llm(name: str, *, seed: int = 0, **settings: Any) -> LLM:
    """An `LLM` of the shape of that name (or of a checkpoint's config.json). settings: the fields of `EngineConfig`;
    dtype has to be named. Contexts beyond the shape's own are given to it: neither memory nor time depends on them.

    Raises ConfigError, and CapacityError where the cache does not fit.
    """
    config = EngineConfig(model=name, skip_tokenizer_init=True, **settings)
    require_config(config.dtype != "auto", "random weights need a dtype: float32, bfloat16 or float16")
    model = shape(name)
    length = config.max_model_len or model.context_length
    if length > model.context_length:
        model = replace(model, max_position_embeddings=length, rope_scaling=None, sliding_window=None)
    gpu = torch.cuda.is_available()
    device = torch.device(("cuda" if gpu else "cpu") if config.device == "auto" else config.device)
    if device.type == "cpu" and config.threads:
        torch.set_num_threads(config.threads)
    backend = ("triton" if device.type == "cuda" else "torch") if config.backend == "auto" else config.backend
    model = replace(model, quantization=_quantization(config, None))
    weights = random_weights(model, getattr(torch, config.dtype), device, seed)
    llama = Llama(model, weights, kernels.load(backend), length)
    no_cache = cast(KVCache, None)  # the twin has its own
    engine = Engine(llama, no_cache, None, frozenset(), length, {})
    llm = object.__new__(LLM)
    llm.config = config
    llm._start(second_cache(engine, config), False)
    return llm


def random_weights(model: LlamaConfig, dtype: torch.dtype, device: torch.device, seed: int) -> LlamaWeights:
    """Norms are 1, biases 0, all else is normal; or of uniform codes of the same deviation, with one scale for all."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = LlamaWeights(model)
    for name, on_meta in weights.items():
        if isinstance(on_meta, QuantizedWeight):
            kind = torch.iinfo(on_meta.codes.dtype)
            codes = torch.empty_like(on_meta.codes, device=device).random_(kind.min, kind.max + 1, generator=generator)
            scales = torch.full_like(on_meta.scales, _STD * 12**0.5 / 2**on_meta.bits, device=device)
            zeros = None if on_meta.zeros is None else torch.zeros_like(scales)
            weights[name] = QuantizedWeight(codes, scales, zeros, on_meta.group)
        elif on_meta.dim() > 1:
            tensor = torch.empty(on_meta.shape, dtype=dtype, device=device)
            weights[name] = tensor.normal_(0.0, _STD, generator=generator)
        else:
            weights[name] = torch.full(on_meta.shape, float(not name.endswith(".bias")), dtype=dtype, device=device)
    return weights
