"""config.json of a Llama checkpoint, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.errors import ConfigError, shown

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
DTYPES = ("float32", "bfloat16", "float16")

# What each kind of RoPE scaling needs beside its type: key -> (least, greatest).
_FACTOR, _POSITIVE = (1.0, 4096.0), (1e-6, 1e6)
_ROPE_KEYS: dict[str, dict[str, tuple[float, float]]] = {
    "linear": {"factor": _FACTOR},
    "dynamic": {"factor": _FACTOR},
    "yarn": {"factor": _FACTOR},
    "llama3": {"factor": _FACTOR, "low_freq_factor": _POSITIVE, "high_freq_factor": _POSITIVE},
}
_YARN_OPTIONAL = {"attention_factor": (1e-3, 1e3), "beta_fast": _POSITIVE, "beta_slow": _POSITIVE,
                  "mscale": (0.0, 1e3), "mscale_all_dim": (0.0, 1e3)}  # fmt: skip
BETA_SLOW, BETA_FAST = 1.0, 32.0  # yarn's, where none are given


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than the trained one.

    `original_context` is the length (tokens) that the unscaled frequencies were trained for; `values` holds the numbers
    that the kind needs, all checked.
    """

    kind: str  # linear | dynamic | yarn | llama3
    original_context: int
    values: Mapping[str, float]
    truncate: bool = True  # yarn: round the borders of the ramp to whole dimensions


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shape and constants of one checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    dtype: str  # of the checkpoint: float32 | bfloat16 | float16
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def context_length(self) -> int:
        """Tokens that the model can attend over with its own RoPE scaling."""
        scaling = self.rope_scaling
        if scaling is None or scaling.kind == "llama3":  # llama3 configs state the stretched length
            length = self.max_position_embeddings
        else:
            length = int(scaling.original_context * scaling.values["factor"])
        return min(length, self.sliding_window or length)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes that one token takes in an uncompressed cache whose elements have `itemsize` bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], rope_scaling: Mapping[str, Any] | None = None) -> LlamaConfig:
        """Read config.json's keys, in the spellings of Transformers 4 and 5.

        `rope_scaling` replaces the checkpoint's own. Raises ConfigError naming the key, got and wanted.
        """
        mistral = _architecture(raw) == "MistralForCausalLM"
        heads = _integer(raw, "num_attention_heads", 1, 1024)
        hidden = _integer(raw, "hidden_size", 1, 1 << 20)
        if mistral:  # Transformers' defaults where a key is missing; null says something else
            raw = {"num_key_value_heads": 8, "sliding_window": 4096, **raw}
        kv_heads = _integer(raw, "num_key_value_heads", 1, heads, default=heads)
        if heads % kv_heads:
            raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if raw.get("head_dim") is None and hidden % heads:
            raise ConfigError(
                f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and head_dim is missing"
            )
        head_dim = _integer(raw, "head_dim", 4, 1024, default=hidden // heads)
        if head_dim % 2:
            raise ConfigError(f"head_dim must be even to be rotated in pairs, got {head_dim}")
        context = _integer(raw, "max_position_embeddings", 1, 1 << 27, default=2048)
        theta, own_scaling = _rope(raw)
        act = raw.get("hidden_act", "silu")
        if act not in ("silu", "swish"):
            raise ConfigError(f"hidden_act must be silu, got {shown(act)}")
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in DTYPES:
            raise ConfigError(f"torch_dtype must be one of {', '.join(DTYPES)}, got {shown(dtype)}")
        # Llama checkpoints may carry the key; only Mistral's attention has a window.
        window = raw.get("sliding_window") if mistral else None
        return cls(
            vocab_size=_integer(raw, "vocab_size", 1, 1 << 24),
            hidden_size=hidden,
            intermediate_size=_integer(raw, "intermediate_size", 1, 1 << 22),
            num_layers=_integer(raw, "num_hidden_layers", 1, 1024),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=context,
            rms_norm_eps=_number(raw, "rms_norm_eps", 1e-12, 1.0, default=1e-6),
            rope_theta=theta,
            rope_scaling=_rope_scaling(own_scaling if rope_scaling is None else rope_scaling, context),
            tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
            attention_bias=_flag(raw, "attention_bias"),
            mlp_bias=_flag(raw, "mlp_bias"),
            sliding_window=None if window is None else _integer(raw, "sliding_window", 1, 1 << 27),
            dtype=dtype,
            bos_token_id=None if raw.get("bos_token_id") is None else _integer(raw, "bos_token_id", 0, 1 << 24),
            eos_token_ids=token_ids(raw.get("eos_token_id"), "eos_token_id"),
        )


def token_ids(value: Any, key: str) -> tuple[int, ...]:
    """A token id, a list of them, or null, as a tuple. Raises ConfigError."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if len(ids) > 256 or not all(type(i) is int and 0 <= i < 1 << 24 for i in ids):
        raise ConfigError(f"{key} must be a token id or a list of token ids, got {shown(value)}")
    return tuple(ids)


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if names is None:  # early conversions have only a model_type
        names = [{"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}.get(str(raw.get("model_type")))]
    if not (isinstance(names, list) and names and names[0] in ARCHITECTURES):
        got = raw.get("architectures") or raw.get("model_type")
        raise ConfigError(f"architecture {shown(got)} is not supported; supported: {', '.join(ARCHITECTURES)}")
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"]
        method = method.get("quant_method", method) if isinstance(method, dict) else method
        raise ConfigError(
            f"quantization_config {shown(method)} is not supported; use the model's float16 or bfloat16 checkpoint"
        )
    return str(names[0])


def _integer(raw: Mapping[str, Any], key: str, least: int, greatest: int, default: int | None = None) -> int:
    value = default if raw.get(key) is None else raw[key]
    if type(value) is not int or not least <= value <= greatest:
        raise ConfigError(f"{key} must be an integer from {least} to {greatest}, got {shown(value)}")
    return value


def _number(raw: Mapping[str, Any], key: str, least: float, greatest: float, default: float | None = None) -> float:
    value = default if raw.get(key) is None else raw[key]
    # Written as "accept only if", so that NaN is refused.
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= greatest:
        raise ConfigError(f"{key} must be a number from {least:g} to {greatest:g}, got {shown(value)}")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = default if raw.get(key) is None else raw[key]
    if type(value) is not bool:
        raise ConfigError(f"{key} must be true or false, got {shown(value)}")
    return value


def _rope(raw: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """(rope_theta, raw scaling). Transformers 4 keeps the base at the top level and the scaling in `rope_scaling`, 5
    keeps both in `rope_parameters`, which it also reads from `rope_scaling`; what is said twice must agree."""
    places = {"the top level": raw}
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(name), Mapping | None):
            raise ConfigError(f"{name} must be an object, got {shown(raw[name])}")
        places[name] = raw.get(name) or {}
    said: list[tuple[str, Any]] = []
    for name, place in places.items():
        if (value := place.get("rope_theta")) is not None:
            _number(place, "rope_theta", 2.0, 1e12)
            said.append((name, value))
            if value != said[0][1]:
                raise ConfigError(f"rope_theta is {shown(said[0][1])} at {said[0][0]} and {shown(value)} in {name}")
        if place.get("partial_rotary_factor") not in (None, 1):
            raise ConfigError(f"partial_rotary_factor must be 1, got {shown(place['partial_rotary_factor'])}")
    own, newer = (
        {key: value for key, value in places[name].items() if key not in ("rope_theta", "partial_rotary_factor")}
        for name in ("rope_scaling", "rope_parameters")
    )
    if own and newer and _rope_scaling(own, 1) != _rope_scaling(newer, 1):
        raise ConfigError(f"rope_scaling {shown(own)} and rope_parameters {shown(newer)} do not agree")
    return float(said[0][1]) if said else 10000.0, own or newer


def _rope_scaling(raw: Mapping[str, Any] | None, context: int) -> RopeScaling | None:
    if raw is None or raw == {}:
        return None
    if not isinstance(raw, Mapping):
        raise ConfigError(f"rope_scaling must be an object, got {shown(raw)}")
    kind = raw.get("rope_type", raw.get("type"))
    if "rope_type" in raw and "type" in raw and raw["rope_type"] != raw["type"]:
        raise ConfigError(f"rope_scaling has type {shown(raw['type'])} and rope_type {shown(raw['rope_type'])}")
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise ConfigError(f"rope_scaling's rope_type must be one of {', '.join(_ROPE_KEYS)}, got {shown(kind)}")
    values = {key: _number(raw, key, low, high) for key, (low, high) in _ROPE_KEYS[kind].items()}
    if kind == "yarn":
        given = {key: limits for key, limits in _YARN_OPTIONAL.items() if raw.get(key) is not None}
        values |= {key: _number(raw, key, low, high) for key, (low, high) in given.items()}
    original = context  # dynamic and linear scaling know no other
    if kind in ("yarn", "llama3"):
        default = context if kind == "yarn" else None
        original = _integer(raw, "original_max_position_embeddings", 1, 1 << 27, default=default)
    ordered = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
    if kind in ordered:
        low, high = ordered[kind]
        least, most = values.get(low, BETA_SLOW), values.get(high, BETA_FAST)
        if not least < most:
            raise ConfigError(f"rope_scaling needs {low} < {high}, got {least:g} and {most:g}")
    return RopeScaling(kind, original, values, truncate=_flag(raw, "truncate", default=True))
