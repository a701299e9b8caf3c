"""From settings to a model in memory: what to load, how large it may be, and where it goes."""

import functools
import hashlib
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import kernels
from engine.config import EngineConfig, usable_cpus
from engine.graphs import GRAPH_BYTES
from engine.metrics import free_memory_bytes
from engine.progress import Progress
from engine.tokenizer import Tokenizer, load_tokenizer
from kernels.reference import cpu_computes_bfloat16
from memory.cache import KVCache
from memory.config import WARM_BITS, CacheConfig, ColdConfig, TierConfig
from memory.errors import CapacityError
from memory.flash import FlashStore, StoreRefused
from memory.importance import DEFAULT, PROFILES, Scorer, load_scorer, recall_shares
from models.checkpoint import TensorInfo, open_checkpoint
from models.errors import ConfigError, require_config
from models.files import optional_object, read_object
from models.llama.config import DEFAULT_GROUP, LlamaConfig, Quantization, RopeScaling, token_ids
from models.llama.model import Llama, LlamaWeights
from models.loader import check_fit, load_weights
from models.resolve import resolve

log = logging.getLogger("isotherm")

_SAMPLE = 4096  # bytes of each tensor that say which weights they are
_FLASH_BYTES = 4 << 30  # of a flash cache, where no size is given
_RECALL = 0.05  # of all tokens, at most, where there are copies and no other fraction is asked for
# Settings of the same name and meaning in EngineConfig and what the cache is made of.
_OF_CACHE = ("page_size", "eviction_policy", "max_prefix_children", "max_prefix_depth")
_OF_TIERS = ("attention_window", "evict_threshold", "hot_threshold", "importance", "warm_layer_ratio", "warm_threshold")


class Engine(NamedTuple):
    """Everything that `LLM` drives, loaded and fitting together."""

    model: Llama
    cache: KVCache
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
    checkpoint = _stretched(config, read_object(path / "config.json"))
    stored = checkpoint.quantization is not None
    llama = replace(checkpoint, quantization=_quantization(config, checkpoint.quantization))
    device, dtype, backend = _placement(config, llama)
    if device.type == "cpu":
        torch.set_num_threads(config.threads or max(1, usable_cpus() // 2))
    max_model_len = _max_model_len(config, llama)
    generation = optional_object(path / "generation_config.json")
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(Path(config.tokenizer or path), llama.vocab_size)
    eos_ids = llama.eos_token_ids + token_ids(generation.get("eos_token_id"), "eos_token_id")
    eos_ids += tokenizer.eos_ids if tokenizer else ()
    tensors = open_checkpoint(path)
    weights = LlamaWeights(llama)
    check_fit(weights, tensors, stored)
    nbytes = weights.nbytes(dtype.itemsize) + 4 * max_model_len * llama.head_dim  # the table of rotations
    if llama.tie_word_embeddings and not llama.quantization and (device.type, dtype) == ("cpu", torch.bfloat16):
        nbytes += llama.vocab_size * llama.hidden_size * 2  # the head, in a layout of its own
    cache_config = _cache_config(config, llama, nbytes, device, dtype)
    bar = functools.partial(Progress, desc="Loading", unit="tensor", shown=progress)
    ops = kernels.load(backend)
    fingerprint = _fingerprint(cache_config, llama, dtype, tensors if config.flash_cache_dir else {})
    if llama.rope_scaling and llama.rope_scaling.kind == "dynamic":  # its angles depend on the length
        fingerprint += b"%d" % max_model_len
    flash = _flash(config, cache_config, fingerprint)
    scorer = _scorer(config, cache_config, llama)
    load_weights(weights, tensors, dtype, device, bar, config.check_tensors, stored)
    model = Llama(llama, weights, ops, max_model_len)
    cache = KVCache(cache_config, dtype, device, ops, scorer, fingerprint, flash)
    return Engine(model, cache, tokenizer, frozenset(eos_ids), max_model_len, generation)


def _quantization(config: EngineConfig, stored: Quantization | None) -> Quantization | None:
    """What the weights are kept as: `stored`, what the checkpoint has, unless that is nothing. Raises ConfigError."""
    kind, group = config.quantization or (stored and f"int{stored.bits}"), config.quantization_group
    for_int4 = group is None or kind == "int4"
    require_config(for_int4, f"quantization_group {group} is of int4, and quantization is {kind}")
    inputs = (group or (stored and stored.group) or DEFAULT_GROUP) if kind == "int4" else 0
    wanted = Quantization(int(kind.removeprefix("int")), inputs) if kind else None
    way = "leave the settings out, or load the checkpoint that it was made from"
    require_config(stored in (None, wanted), f"the checkpoint's weights are {stored} already, not {wanted}: {way}")
    return wanted


def shape_of(model: LlamaConfig) -> str:
    """Which model a scorer was trained on, as far as it matters to it."""
    heads = f"{model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}"
    return f"{model.num_layers} layers, {heads}, vocabulary {model.vocab_size}"


def read_scorer(path: str | os.PathLike[str] | None) -> tuple[Scorer, dict[str, str]]:
    """What `load_scorer` gives of a file, or of the one that ships. Raises ConfigError."""
    try:
        return load_scorer(Path(path or DEFAULT).expanduser())
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _scorer(config: EngineConfig, cache: CacheConfig, model: LlamaConfig) -> torch.Tensor | None:
    """By what pages are scored, where any may be compressed."""
    if config.scorer is None and cache.tiers is None:
        return None
    scorer, about = read_scorer(config.scorer)
    if config.scorer and about.get("model") != shape_of(model):
        words = "scorer %s was trained on a model of %s, and this one has %s"
        log.warning(words, config.scorer, about.get("model"), shape_of(model))
    return scorer.packed(PROFILES[config.profile])


def second_cache(engine: Engine, config: EngineConfig) -> Engine:
    """The same model with an empty cache of its own, as `config` asks. Raises ConfigError, CapacityError."""
    model = engine.model
    max_model_len = _max_model_len(config, model.config)
    loaded = f"max_model_len {max_model_len} is more than the {engine.max_model_len} the model was loaded for"
    require_config(max_model_len <= engine.max_model_len, loaded)
    sizes = _cache_config(config, model.config, 0, model.device, model.dtype)
    fingerprint = _fingerprint(sizes, model.config, model.dtype, {})
    cache = KVCache(sizes, model.dtype, model.device, model.ops, _scorer(config, sizes, model.config), fingerprint)
    return engine._replace(cache=cache, max_model_len=max_model_len)


def _fingerprint(config: CacheConfig, model: LlamaConfig, dtype: torch.dtype, tensors: dict[str, TensorInfo]) -> bytes:
    """Of what keys and values depend on, under which prefixes are kept; in one process the weights are known to be the
    same. Of these: where they lie in which file of which age, and what the bytes at each tensor's beginning are, for
    reading all takes seconds."""
    parts = [repr((model, dtype, config.page_size)).encode()]
    for name, info in sorted(tensors.items()):
        with info.file.open("rb") as file:
            file.seek(info.offset)
            parts.append(repr((name, info.stamp, info.offset)).encode() + file.read(min(info.nbytes, _SAMPLE)))
    return hashlib.sha256(b"".join(parts)).digest()


def _flash(config: EngineConfig, cache: CacheConfig, fingerprint: bytes) -> FlashStore | None:
    if config.flash_cache_dir is None:
        unsaid = not (config.flash_cache_size or config.flash_cache_persist or config.flash_cache_encrypt)
        require_config(unsaid, "flash_cache_size, _persist and _encrypt need a flash_cache_dir")
        return None
    require_config(cache.prefix_caching, "flash_cache_dir keeps prefixes, and enable_prefix_caching is off")
    try:
        path, size = Path(config.flash_cache_dir).expanduser(), config.flash_cache_size or _FLASH_BYTES
        persist, encrypt = config.flash_cache_persist, config.flash_cache_encrypt
        both = "flash_cache_encrypt has a key that goes with the process, and flash_cache_persist keeps what it wrote"
        require_config(not (persist and encrypt), both)
        return FlashStore(path, fingerprint, cache.page_bytes, cache.page_size * 4, size, persist, encrypt)
    except StoreRefused as error:
        raise ConfigError(str(error)) from None


def _tiers(config: EngineConfig, model: LlamaConfig, max_model_len: int) -> TierConfig | None:
    """What the settings ask of the cache; None where nothing can make it compress, or its pages cannot be."""
    limits = (config.kv_budget, config.kv_cache_memory, config.preset, config.hot_layer_size, config.hot_ratio)
    if all(limit is None for limit in limits):
        return None
    if model.head_dim % 8:
        optional = config.kv_budget is None and config.preset is None
        require_config(optional, "kv_budget and preset need a head_dim that is a multiple of 8, got", model.head_dim)
        return None
    proposal = config.preset == "proposal"
    return TierConfig(
        budget=config.kv_budget, recent_tokens=4 if proposal else config.recent_tokens,
        hot_layer_size=4 * max_model_len if config.hot_layer_size is None else config.hot_layer_size,
        hot_ratio=0.1 if proposal else config.hot_ratio or 0.0, cold_ratio=0.2 if proposal else 0.0, adapt=config.adapt,
        shared=proposal or config.warm_placement == "shared", **{name: getattr(config, name) for name in _OF_TIERS},
    )  # fmt: skip


def _cold(config: EngineConfig, model: LlamaConfig, weights: int, device: torch.device) -> ColdConfig | None:
    """Copies of what is compressed, in the host's memory: beside a GPU, and wherever some are asked for."""
    wanted = config.recall or config.host_cache_size is not None or device.type == "cuda"
    kind = config.cold_format if config.cold_format != "auto" else "exact" if wanted else "none"
    overlay, got = config.overlay_size or 0, f"cold_format {kind}, device {device} and backend {config.backend}"
    triton = config.backend == "triton" or (config.backend, device.type) == ("auto", "cuda")
    able = not overlay or (kind == "exact" and triton)
    require_config(able, f"overlay_size is of exact copies, and of Triton's kernels, to which they are far; got {got}")
    if kind == "none":
        require_config(not config.recall, "cold_format is none: there are no copies for recall", config.recall)
        return None
    free = free_memory_bytes(torch.device("cpu"))
    size = config.host_cache_size or (1 << 62 if free is None else max(free - weights, 0) // 2)
    recall = config.recall if config.recall is not None else _affordable(device) if device.type == "cuda" else _RECALL
    require_config(not overlay or recall > 0, "overlay_size keeps what is recalled, and recall is", recall)
    exclusive, shares = config.cold_policy == "exclusive", layer_shares(config, model, recall)
    return ColdConfig(kind, size, recall, config.recall_block, exclusive, overlay, shares)


def layer_shares(config: EngineConfig, model: LlamaConfig, recall: float) -> tuple[int, ...]:
    """`ColdConfig.shares`, if the scorer has any for such a model. Raises ConfigError."""
    about = read_scorer(config.scorer)[1] if recall else {}
    if about.get("recall_model") != shape_of(model):
        return ()
    try:
        return recall_shares(about, recall, model.num_layers)
    except ValueError as error:
        raise ConfigError(f"scorer {config.scorer or DEFAULT}: {error}") from None


def _affordable(device: torch.device) -> float:
    """The fraction of all tokens whose copies cross the link while the device reads all tokens from its own memory, so
    that a step need not be slower than with a full cache. Measured, and said; halved until it fits, so that noise in
    the measurement changes no answers."""
    link, own = _rates(device)
    recall = math.ldexp(_RECALL, -max(0, math.ceil(math.log2(_RECALL * own / link))))
    log.warning("--recall %.4f: copies come at %.1f GB/s, device memory at %.0f", recall, link / 1e9, own / 1e9)
    return recall


@functools.cache
def _rates(device: torch.device) -> tuple[float, float]:
    """Bytes a second that a GPU reads from pinned memory of the host, and from its own."""
    from torch.utils.benchmark import Timer  # which waits for the device

    host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    near = host.to(device)
    far, own = (Timer("near.copy_(x)", globals={"near": near, "x": x}).timeit(10).mean for x in (host, near.clone()))
    return host.nbytes / far, 2 * host.nbytes / own  # a copy within it reads and writes


def _cache_config(
    config: EngineConfig, model: LlamaConfig, weights: int, device: torch.device, dtype: torch.dtype
) -> CacheConfig:
    """The cache that the settings ask for, beside `weights` bytes still to be loaded. Raises CapacityError."""
    tiers = _tiers(config, model, _max_model_len(config, model))
    cold = _cold(config, model, weights, device) if tiers else None
    tiers = replace(tiers, recalled=True) if tiers and cold and cold.recall else tiers
    if (config.recall or config.overlay_size) and not tiers:
        way = "with --kv-budget or --kv-cache-memory pages are"
        log.warning("--recall and --overlay-size are of what is compressed, and nothing will be: %s", way)
    capacity = _capacity(config, model, weights, cold.overlay_bytes if cold else 0, device, dtype)
    try:
        cache = CacheConfig(
            itemsize=dtype.itemsize, capacity_bytes=capacity, tiers=tiers, cold=cold,
            **{name: getattr(model, name) for name in ("num_layers", "num_kv_heads", "head_dim")},
            **{name: getattr(config, name) for name in _OF_CACHE}, prefix_caching=config.enable_prefix_caching,
        )  # fmt: skip
    except ValueError as error:
        raise CapacityError(f"the KV cache is too small: {error}; use a larger --kv-cache-memory") from None
    if cold and cold.capacity_bytes < cache.copy_bytes:
        raise ConfigError(f"host_cache_size {cold.capacity_bytes} is less than the {cache.copy_bytes} of a page's copy")
    some = not (cold and cold.overlay_bytes) or cache.overlay_rows > 0
    require_config(
        some, f"overlay_size must be {cache.token_bytes} at least, which a token's rows take, got", config.overlay_size
    )
    least = cache.page_cost(WARM_BITS[-1]) / cache.page_cost(cache.exact_bits)
    smallest = f"{least:.3f}, which is what pages of {WARM_BITS[-1]} bits and their scales take"
    require_config((config.kv_budget or 1.0) >= least, f"kv_budget {config.kv_budget} is less than {smallest}")
    return cache


def _capacity(
    config: EngineConfig, model: LlamaConfig, weights: int, overlay: int, device: torch.device, dtype: torch.dtype
) -> int:
    """Bytes for the KV cache, once weights, it and overlay are known to fit. Raises CapacityError with the numbers."""
    max_model_len = _max_model_len(config, model)
    token_bytes = model.kv_bytes_per_token(dtype.itemsize)
    context = -(-max_model_len // config.page_size) * config.page_size * token_bytes
    free = free_memory_bytes(device)
    if uses_graphs(config, device) and free is not None:
        free = max(free - GRAPH_BYTES, 0)
    capacity = config.kv_cache_memory
    if capacity is None:
        if config.kv_budget is not None:  # and the chunk in flight, which is extra
            chunk = min(config.max_num_batched_tokens, max_model_len) + 2 * config.page_size
            context = min(context, int(config.kv_budget * context) + chunk * token_bytes)
        capacity = context if free is None else min(context, max(free - weights - overlay, 0) // 2)
        if capacity < context:
            words = "the KV cache gets %.2f GB, half of the memory that the weights leave: %d tokens of %d fit at once"
            log.warning(words, capacity / 1e9, capacity // token_bytes, max_model_len)
    if free is not None and weights + overlay + capacity > free:
        kind = str(dtype).removeprefix("torch.")
        needs = f"{weights / 1e9:.2f} GB for weights in {kind} and {capacity / 1e9:.2f} GB for the KV cache"
        needs += f", {overlay / 1e9:.2f} GB for --overlay-size" if overlay else ""
        way = "use a smaller --kv-cache-memory, --max-model-len or model, --dtype bfloat16, or --quantization int4"
        raise CapacityError(f"{config.model} needs {needs}, {free / 1e9:.2f} GB are free on {device}; {way}")
    return capacity


def uses_graphs(config: EngineConfig, device: torch.device) -> bool:
    """Whether decoding steps are recorded. Raises ConfigError."""
    able = device.type == "cuda" and config.backend != "torch"
    got = f"device is {device} and backend {config.backend}"
    require_config(able or config.cuda_graphs != "on", f"cuda_graphs on needs a GPU and backend triton; {got}")
    return able and config.cuda_graphs != "off"


def _placement(config: EngineConfig, model: LlamaConfig) -> tuple[torch.device, torch.dtype, str]:
    """Device, dtype and backend. dtype auto: the checkpoint's own on a GPU; on a CPU bfloat16 where it computes in it,
    else float32."""
    gpu = torch.cuda.is_available()
    if config.device.startswith("cuda") and not gpu:
        raise ConfigError(f"device {config.device} was asked for, and torch finds no GPU here: use --device cpu")
    device = torch.device(config.device if config.device != "auto" else "cuda" if gpu else "cpu")
    on_cpu, dtype = device.type == "cpu", config.dtype
    if config.backend == "triton" and on_cpu and not os.environ.get("TRITON_INTERPRET"):
        raise ConfigError("backend triton needs a GPU, or TRITON_INTERPRET=1, which is very slow: use --backend torch")
    backend = config.backend if config.backend != "auto" else "torch" if on_cpu else "triton"
    if dtype == "auto" and on_cpu:
        # torch's operators on quantised weights are for bfloat16, whatever the CPU computes in.
        dtype = "bfloat16" if cpu_computes_bfloat16() or model.quantization else "float32"
    return device, getattr(torch, model.dtype if dtype == "auto" else dtype), backend


def _stretched(config: EngineConfig, raw: dict[str, Any]) -> LlamaConfig:
    """The model with the RoPE scaling that is asked for. "auto": none as far as the model's context goes; beyond it its
    own kind, or else yarn, with the factor that max_model_len takes (docs/context.md says why)."""
    if isinstance(config.rope_scaling, Mapping | None):
        return LlamaConfig.from_dict(raw, config.rope_scaling)
    own = LlamaConfig.from_dict(raw)
    wanted = config.max_model_len or 0
    if wanted <= own.context_length:
        return own
    scaling = own.rope_scaling or RopeScaling("yarn", own.context_length, {"factor": 1.0})
    values = {**scaling.values, "factor": scaling.values["factor"] * wanted / own.context_length}
    log.warning("--rope-scaling auto: %s, factor %.4g", scaling.kind, values["factor"])
    return replace(own, max_position_embeddings=wanted, rope_scaling=scaling._replace(values=values))


def _max_model_len(config: EngineConfig, model: LlamaConfig) -> int:
    wanted = config.max_model_len or model.context_length
    window, context = model.sliding_window or wanted, model.context_length
    more = f"max_model_len {wanted} is more than the model's"
    why = "its attention over longer texts is not computed in this version"
    require_config(wanted <= window, f"{more} sliding_window of {window} tokens; {why}")
    way = "a longer one needs --rope-scaling auto, or a scaling of your own as JSON"
    require_config(wanted <= context, f"{more} context of {context} tokens; {way}")
    return wanted
