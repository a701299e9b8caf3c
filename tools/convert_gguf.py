"""Reads a Llama out of a GGUF file: its config, its tokenizer, and where its tensors are.

What is not understood is refused by name, not dropped: a key that changes the arithmetic, a tensor without a place, a
pre-tokenizer that cannot be written exactly. Weights of 4 and 8 bits become the values they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from models.errors import ModelFormatError
from tools.convert_tokenizer import (
    BYTE,
    CONTROL,
    PRE_TOKENIZERS,
    UNKNOWN,
    USER_DEFINED,
    VocabularyError,
    byte_level_bpe,
    sentencepiece_model,
)
from tools.convert_writer import Plan, Weight
from tools.gguf import GGUF

if TYPE_CHECKING:
    from tools.convert_writer import Piece

T = TypeVar("T")

CHUNK_ELEMENTS = 1 << 20  # dequantised at once
_ROPE_FREQS = "rope_freqs.weight"
# Keys that change the arithmetic in a way that config.json of a Llama cannot say, and the values that do not.
_FOREIGN: dict[str, tuple[Any, ...]] = {
    "llama.expert_count": (0,),
    "llama.attention.sliding_window": (0,),
    "llama.attention.scale": (0.0,),
    "llama.attention.causal": (True,),
    "llama.attention.clamp_kqv": (0.0,),
    "llama.attention.temperature_scale": (0.0,),
    "llama.logit_scale": (0.0, 1.0),
    "llama.residual_scale": (0.0, 1.0),
    "llama.embedding_scale": (0.0, 1.0),
    "llama.use_parallel_residual": (False,),
    "llama.rope.scaling.attn_factor": (1.0,),
    "llama.rope.scaling.yarn_attn_factor": (1.0,),
    "llama.rope.scaling.yarn_ext_factor": (1.0,),
    "llama.rope.scaling.yarn_log_multiplier": (0.0,),
    "split.count": (0, 1),
}
_HINTS = {
    "llama.expert_count": "a mixture of experts is not supported",
    "split.count": "a file of several: join them first, with llama-gguf-split --merge",
}


def plan_gguf(gguf: GGUF, context_length: int | None = None) -> Plan:
    """What to write for a GGUF file. context_length replaces the file's own.

    Raises ModelFormatError if it is not a Llama with a known tokenizer whose tensors fit its metadata.
    """
    config = _config(gguf)
    if context_length is not None:
        config["max_position_embeddings"] = context_length
    files = _tokenizer(gguf, config)
    names = _layout(gguf, config)
    scaling = _rope_scaling(gguf, config)
    ids: dict[str, Any] = {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config
    }
    turn_end = _optional(gguf, "tokenizer.ggml.eot_token_id", int, None)
    if turn_end is not None and "eos_token_id" in ids and turn_end != ids["eos_token_id"]:
        ids["eos_token_id"] = [ids["eos_token_id"], turn_end]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = [
        Weight(theirs, shape, partial(_pieces, gguf, ours, config["head_dim"]), heads.get(ours.split(".")[-2], 0))
        for ours, (theirs, shape) in names.items()
    ]
    files["generation_config.json"] = ids
    return Plan(gguf.path, {**config, "rope_scaling": scaling}, files, weights)


def _pieces(gguf: GGUF, name: str, head_dim: int) -> Iterator[Piece]:
    import torch

    shape = gguf.tensors[name].shape
    step = shape[0]
    if len(shape) > 1:
        step = max(1, CHUNK_ELEMENTS // (math.prod(shape[1:]) * head_dim)) * head_dim  # whole heads
    for begin in range(0, shape[0], step):
        yield 0, begin, torch.from_numpy(gguf.read(name, begin, min(begin + step, shape[0])))


def _fail(gguf: GGUF, reason: object) -> NoReturn:
    raise ModelFormatError(f"{gguf.path}: {reason}")


def _get(gguf: GGUF, key: str, kind: type[T]) -> T:
    value = gguf.metadata.get(key)
    if type(value) is not kind:
        _fail(gguf, f"{key} must be of type {kind.__name__}, got {type(value).__name__}")
    return value


def _optional(gguf: GGUF, key: str, kind: type[T], default: Any) -> Any:
    return _get(gguf, key, kind) if key in gguf.metadata else default


def _shortest(value: float) -> float:
    """1e-05 rather than 9.999999747378752e-06: the shortest number that is the same float32."""
    import numpy as np

    return float(str(np.float32(value)))


def _config(gguf: GGUF) -> dict[str, Any]:
    """config.json: every number from the metadata."""
    if _get(gguf, "general.architecture", str) != "llama":
        _fail(gguf, f"architecture {gguf.metadata['general.architecture']!r} is not llama")
    for key, neutral in _FOREIGN.items():
        if key in gguf.metadata and gguf.metadata[key] not in neutral:
            _fail(gguf, f"{key} is {gguf.metadata[key]!r:.40}: {_HINTS.get(key, 'not supported')}")
    hidden, heads = _get(gguf, "llama.embedding_length", int), _get(gguf, "llama.attention.head_count", int)
    kv_heads = _optional(gguf, "llama.attention.head_count_kv", int, heads)
    if min(hidden, heads, kv_heads) < 1 or heads % kv_heads:
        _fail(gguf, f"{heads} heads and {kv_heads} KV heads do not fit {hidden} hidden units")
    head_dim = _optional(gguf, "llama.attention.key_length", int, hidden // heads)
    if head_dim < 2 or head_dim % 2 or ("llama.attention.key_length" not in gguf.metadata and hidden % heads):
        _fail(gguf, f"{heads} heads and {kv_heads} KV heads do not fit {hidden} hidden units")
    if _optional(gguf, "llama.attention.value_length", int, head_dim) != head_dim:
        _fail(gguf, "llama.attention.value_length differs from the keys' length, which is not supported")
    if _optional(gguf, "llama.rope.dimension_count", int, head_dim) != head_dim:
        _fail(gguf, "RoPE over a part of a head is not supported")
    tokens = _get(gguf, "tokenizer.ggml.tokens", list)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _get(gguf, "llama.feed_forward_length", int),
        "num_hidden_layers": _get(gguf, "llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": _optional(gguf, "llama.vocab_size", int, len(tokens)),
        "max_position_embeddings": _get(gguf, "llama.context_length", int),
        "rms_norm_eps": _shortest(_get(gguf, "llama.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(_optional(gguf, "llama.rope.freq_base", float, 10000.0)),
        "rope_scaling": None,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in gguf.tensors,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }
    # llama.cpp's own defaults for a sentencepiece vocabulary.
    defaults = {"bos": 1, "eos": 2} if gguf.metadata.get("tokenizer.ggml.model") == "llama" else {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token_id = _optional(gguf, f"tokenizer.ggml.{key}_token_id", int, defaults.get(role))
        if token_id is not None:
            config[f"{role}_token_id"] = token_id
    return config


def _layout(gguf: GGUF, config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF name -> (Hugging Face name, shape), of every tensor; all are there, and none else."""
    # What the layout of 10^18 layers would need is not built: a block has nine tensors.
    if config["num_hidden_layers"] > len(gguf.tensors):
        _fail(gguf, f"{config['num_hidden_layers']} layers, but {len(gguf.tensors)} tensors")
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    out, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    names: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocab, hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        names["output.weight"] = ("lm_head.weight", (vocab, hidden))
    block = {
        "attn_norm": ("input_layernorm", (hidden,), False),
        "attn_q": ("self_attn.q_proj", (out, hidden), config["attention_bias"]),
        "attn_k": ("self_attn.k_proj", (kv, hidden), config["attention_bias"]),
        "attn_v": ("self_attn.v_proj", (kv, hidden), config["attention_bias"]),
        "attn_output": ("self_attn.o_proj", (hidden, out), config["attention_bias"]),
        "ffn_norm": ("post_attention_layernorm", (hidden,), False),
        "ffn_gate": ("mlp.gate_proj", (inner, hidden), config["mlp_bias"]),
        "ffn_up": ("mlp.up_proj", (inner, hidden), config["mlp_bias"]),
        "ffn_down": ("mlp.down_proj", (hidden, inner), config["mlp_bias"]),
    }
    for layer in range(config["num_hidden_layers"]):
        for ours, (theirs, shape, bias) in block.items():
            names[f"blk.{layer}.{ours}.weight"] = (f"model.layers.{layer}.{theirs}.weight", shape)
            if bias:
                names[f"blk.{layer}.{ours}.bias"] = (f"model.layers.{layer}.{theirs}.bias", shape[:1])
    if missing := sorted(names.keys() - gguf.tensors.keys()):
        _fail(gguf, f"tensors are missing: {', '.join(missing)}")
    if extra := sorted(gguf.tensors.keys() - names.keys() - {_ROPE_FREQS}):
        _fail(gguf, f"unknown tensors: {', '.join(extra)}")
    for name, (_, shape) in names.items():
        if gguf.tensors[name].shape != shape:
            _fail(gguf, f"{name} has shape {gguf.tensors[name].shape}, expected {shape}")
    return names


def _rope_scaling(gguf: GGUF, config: dict[str, Any]) -> dict[str, Any] | None:
    """config.json's rope_scaling, from llama.rope.scaling.* or from Llama 3's tensor of factors."""
    prefix = "llama.rope.scaling."
    factor = _optional(gguf, prefix + "factor", float, _optional(gguf, "llama.rope.scale_linear", float, 0.0))
    kind = _optional(gguf, prefix + "type", str, "linear")  # as llama.cpp has it
    if kind == "none" or factor in (0.0, 1.0):
        kind = "none"
    if _ROPE_FREQS in gguf.tensors:
        if kind != "none":
            _fail(gguf, f"{prefix}type is {kind!r}, and there is {_ROPE_FREQS} as well")
        return _llama3_scaling(gguf, config["rope_theta"], config["head_dim"])
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        _fail(gguf, f"{prefix}type {kind!r} is not supported (linear and yarn are)")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _shortest(factor)}
    if kind == "yarn":
        original = _optional(gguf, prefix + "original_context_length", int, config["max_position_embeddings"])
        scaling["original_max_position_embeddings"] = original
        for key in ("beta_fast", "beta_slow"):
            if f"{prefix}yarn_{key}" in gguf.metadata:
                scaling[key] = _shortest(_get(gguf, f"{prefix}yarn_{key}", float))
    return scaling


def _llama3_scaling(gguf: GGUF, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Llama 3.1's scaling. The file has its result only, a divisor for each pair of dimensions; the numbers behind it
    are always low 1, high 4, of 8,192 tokens, and the largest divisor. They are taken if they give those divisors."""
    import numpy as np

    divisors = gguf.read(_ROPE_FREQS).astype(np.float64)
    if divisors.shape == (head_dim // 2,) and (divisors == 1).all():
        return None
    factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
    with np.errstate(all="ignore"):  # of a theta that is refused later
        turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
        keep = np.clip((turns - low) / (high - low), 0, 1)
        wanted = 1 / ((1 - keep) / factor + keep)
    # llama.cpp computed them in float32, where a divisor errs by some 1e-5 of itself.
    if divisors.shape != wanted.shape or not factor > 1 or not np.allclose(divisors, wanted, rtol=1e-4, atol=0):
        _fail(gguf, f"{_ROPE_FREQS} is not Llama 3's scaling (low 1, high 4, of 8192 tokens): not supported")
    return {
        "rope_type": "llama3",
        "factor": _shortest(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _tokenizer(gguf: GGUF, config: dict[str, Any]) -> dict[str, bytes | dict[str, Any]]:
    """The tokenizer's files by name."""
    model = _get(gguf, "tokenizer.ggml.model", str)
    if model not in ("gpt2", "llama"):
        _fail(gguf, f"tokenizer {model!r} is not supported (gpt2 and llama are)")
    tokens, types = _get(gguf, "tokenizer.ggml.tokens", list), _get(gguf, "tokenizer.ggml.token_type", list)
    distinct = {token for token in tokens if isinstance(token, str) and token}
    if not len(distinct) == len(tokens) == len(types) == config["vocab_size"]:
        _fail(gguf, f"{len(distinct)} different tokens and {len(types)} types: not one vocabulary")
    if not all(type(kind) is int and 0 < kind <= BYTE for kind in types):
        _fail(gguf, "tokenizer.ggml.token_type has a type that is unknown")
    unk = _optional(gguf, "tokenizer.ggml.unknown_token_id", int, types.index(UNKNOWN) if UNKNOWN in types else None)
    roles = {role: config[f"{role}_token_id"] for role in ("bos", "eos", "pad") if f"{role}_token_id" in config}
    roles |= {} if unk is None else {"unk": unk}
    for role, i in roles.items():
        if not 0 <= i < len(tokens):
            _fail(gguf, f"{role}_token_id {i} is not one of {len(tokens)} tokens")
    pre = None
    if model == "gpt2":
        named = gguf.metadata.get("tokenizer.ggml.pre")
        pre = PRE_TOKENIZERS.get(named) if isinstance(named, str) else None
        if pre is None:
            _fail(gguf, f"pre-tokenizer {named!r} (tokenizer.ggml.pre) is not one of {', '.join(PRE_TOKENIZERS)}")
    add_bos = _optional(gguf, "tokenizer.ggml.add_bos_token", bool, pre in (None, "llama-bpe")) and "bos" in roles
    settings = {
        "tokenizer_class": {"llama-bpe": "PreTrainedTokenizerFast", None: "LlamaTokenizer"}.get(pre, "GPT2Tokenizer"),
        **{f"{role}_token": tokens[roles[role]] for role in ("bos", "eos", "unk", "pad") if role in roles},
        "add_bos_token": add_bos,
        "add_prefix_space": _optional(gguf, "tokenizer.ggml.add_space_prefix", bool, True) if pre is None else False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    if _optional(gguf, "tokenizer.ggml.add_eos_token", bool, False):
        settings["add_eos_token"] = True
    if (template := _optional(gguf, "tokenizer.chat_template", str, None)) is not None:
        settings["chat_template"] = template
    try:
        if pre is None:
            settings["legacy"] = False
            return {"tokenizer.model": _sentencepiece(gguf, tokens, types, roles), "tokenizer_config.json": settings}
        vocab = {token: i for i, token in enumerate(tokens)}
        added = {i: kind == CONTROL for i, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED)}
        added |= {roles[role]: True for role in ("bos", "eos") if role in roles}
        merges = _get(gguf, "tokenizer.ggml.merges", list)
        if not all(isinstance(merge, str) for merge in merges):
            _fail(gguf, "tokenizer.ggml.merges must be texts")
        bos = tokens[roles["bos"]] if add_bos else None
        content = byte_level_bpe(vocab, merges, added, pre, bos)
    except VocabularyError as error:
        _fail(gguf, error)
    return {"tokenizer.json": content, "tokenizer_config.json": settings}


def _sentencepiece(gguf: GGUF, tokens: list[str], types: list[int], roles: dict[str, int]) -> bytes:
    scores = _get(gguf, "tokenizer.ggml.scores", list)
    if len(scores) != len(tokens) or not all(type(x) is float and math.isfinite(x) for x in scores):
        _fail(gguf, f"tokenizer.ggml.scores must be {len(tokens)} finite numbers")
    if _optional(gguf, "tokenizer.ggml.precompiled_charsmap", list, []):
        _fail(gguf, "tokenizer.ggml.precompiled_charsmap: a tokenizer that changes its text is not supported")
    if _optional(gguf, "tokenizer.ggml.remove_extra_whitespaces", bool, False):
        _fail(gguf, "tokenizer.ggml.remove_extra_whitespaces is true: not supported")
    return sentencepiece_model(
        tokens, scores, types, roles, _optional(gguf, "tokenizer.ggml.add_space_prefix", bool, True)
    )
