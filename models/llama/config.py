"""config.json of a Llama checkpoint, checked before anything is allocated."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from models.errors import require_config as _require
from models.errors import shown

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}  # by model_type
DTYPES = ("float32", "bfloat16", "float16")

# What each kind of RoPE scaling reads beside its type, key -> (least, greatest); and what none can do without.
_FACTOR, _POSITIVE = (1.0, 4096.0), (1e-6, 1e6)
_ROPE_KEYS: dict[str, dict[str, tuple[float, float]]] = {
    "linear": {"factor": _FACTOR},
    "dynamic": {"factor": _FACTOR},
    "yarn": {"factor": _FACTOR, "beta_slow": _POSITIVE, "beta_fast": _POSITIVE, "attention_factor": (1e-3, 1e3),
             "mscale": (0.0, 1e3), "mscale_all_dim": (0.0, 1e3)},
    "llama3": {"factor": _FACTOR, "low_freq_factor": _POSITIVE, "high_freq_factor": _POSITIVE}}  # fmt: skip
_NEEDED = ("factor", "low_freq_factor", "high_freq_factor")
_NO_SCALING = {"rope_theta", "partial_rotary_factor"}  # what else may lie beside them
GROUPS = (32, 64, 128)  # of int4: inputs that share a scale and a zero
DEFAULT_GROUP = 32
METHOD = "isotherm"  # the quant_method of checkpoints that tools.quantize writes
BETA_SLOW, BETA_FAST = 1.0, 32.0  # yarn's, where none are given

# What a value must be, by the type of its limits.
_WANTED = {bool: "true or false", int: "an integer from {} to {}", float: "a number from {:g} to {:g}"}


class RopeScaling(NamedTuple):
    """How rotary frequencies are stretched for contexts longer than the trained one.

    `original_context` is the length (tokens) that the unscaled frequencies were trained for; `values` holds the numbers
    that the kind needs, all checked.
    """

    kind: str  # linear | dynamic | yarn | llama3
    original_context: int
    values: Mapping[str, float]
    truncate: bool = True  # yarn: round the borders of the ramp to whole dimensions


class Quantization(NamedTuple):
    """How weights are kept: in 8 bits with a scale for each output; or in 4, but the embedding and the head, with a
    scale and a zero for each `group` consecutive inputs of an output."""

    bits: int  # 8 or 4
    group: int = 0

    def __str__(self) -> str:
        return f"int{self.bits}" + (f" in groups of {self.group}" if self.group else "")


def _key(name: str, least: float, greatest: float, default: float | None = None) -> Any:
    """A field that is read from config.json by `_value`."""
    return field(metadata={"key": (name, least, greatest, default)})


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Shape and constants of one checkpoint."""

    vocab_size: int = _key("vocab_size", 1, 1 << 24)
    hidden_size: int = _key("hidden_size", 1, 1 << 20)
    intermediate_size: int = _key("intermediate_size", 1, 1 << 22)
    num_layers: int = _key("num_hidden_layers", 1, 1024)
    num_heads: int = _key("num_attention_heads", 1, 1024)
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = _key("max_position_embeddings", 1, 1 << 27, 2048)
    rms_norm_eps: float = _key("rms_norm_eps", 1e-12, 1.0, 1e-6)
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool = _key("tie_word_embeddings", False, True, False)
    attention_bias: bool = _key("attention_bias", False, True, False)
    mlp_bias: bool = _key("mlp_bias", False, True, False)
    sliding_window: int | None
    dtype: str  # of the checkpoint: float32 | bfloat16 | float16
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None  # of the checkpoint, or as which it is loaded

    @property
    def context_length(self) -> int:
        """Tokens that the model can attend over with its own RoPE scaling."""
        scaling = self.rope_scaling
        length = self.max_position_embeddings
        if scaling is not None and scaling.kind != "llama3":  # llama3 configs state the stretched length
            length = round(scaling.original_context * scaling.values["factor"])
        return min(length, self.sliding_window or length)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes that one token takes in an uncompressed cache whose elements have `itemsize` bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], rope_scaling: Mapping[str, Any] | None = None) -> "LlamaConfig":
        """Read config.json's keys, in the spellings of Transformers 4 and 5.

        `rope_scaling` replaces the checkpoint's own. Raises ConfigError naming the key, got and wanted.
        """
        mistral = _architecture(raw) == "MistralForCausalLM"
        # Transformers' defaults where a key is missing; null says something else. Others' attention has no window,
        # whatever the key says.
        raw = {"num_key_value_heads": 8, "sliding_window": 4096, **raw} if mistral else {**raw, "sliding_window": None}
        values = {field.name: _value(raw, *field.metadata["key"]) for field in fields(cls) if field.metadata}
        hidden, heads, context = values["hidden_size"], values["num_heads"], values["max_position_embeddings"]
        values["num_kv_heads"] = kv = _value(raw, "num_key_value_heads", 1, heads, heads)
        _require(heads % kv == 0, f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv}")
        known = hidden % heads == 0 or raw.get("head_dim") is not None
        _require(known, f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and head_dim is missing")
        values["head_dim"] = head_dim = _value(raw, "head_dim", 4, 1024, hidden // heads)
        _require(head_dim % 2 == 0, "head_dim must be even to be rotated in pairs, got", head_dim)
        act = raw.get("hidden_act", "silu")
        _require(act in ("silu", "swish"), "hidden_act must be silu, got", act)
        values["dtype"] = dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
        _require(dtype in DTYPES, f"torch_dtype must be one of {', '.join(DTYPES)}, got", dtype)
        values["rope_theta"], values["rope_scaling"] = _rope(raw, context, rope_scaling)
        values["quantization"] = _quantization(raw.get("quantization_config"))
        for key, least, greatest in (("sliding_window", 1, 1 << 27), ("bos_token_id", 0, 1 << 24)):
            values[key] = None if raw.get(key) is None else _value(raw, key, least, greatest)
        return cls(**values, eos_token_ids=token_ids(raw.get("eos_token_id"), "eos_token_id"))


def token_ids(value: Any, key: str) -> tuple[int, ...]:
    """A token id, a list of them, or null, as a tuple. Raises ConfigError."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    accepted = len(ids) <= 256 and all(type(i) is int and 0 <= i < 1 << 24 for i in ids)
    _require(accepted, f"{key} must be a token id or a list of token ids, got", value)
    return tuple(ids)


def _value(raw: Mapping[str, Any], key: str, least: Any, greatest: Any, default: Any = None) -> Any:
    """What stands under the key, or the default; of the limits' type, and not beyond them."""
    value = default if raw.get(key) is None else raw[key]
    kind = type(least)
    # Not "refuse what is beyond": NaN is neither beyond nor within.
    fits = isinstance(value, (int, kind)) and isinstance(value, bool) is (kind is bool) and least <= value <= greatest
    _require(fits, f"{key} must be {_WANTED[kind].format(least, greatest)}, got", value)
    return kind(value)


def _architecture(raw: Mapping[str, Any]) -> str:
    """The architecture, one of those that are supported."""
    said, model_type = raw.get("architectures"), raw.get("model_type")
    names = [ARCHITECTURES.get(str(model_type))] if said is None else said  # early conversions have only a model_type
    known = isinstance(names, list) and names != [] and names[0] in list(ARCHITECTURES.values())
    supported = ", ".join(ARCHITECTURES.values())
    _require(known, f"architecture {shown(said or model_type)} is not supported; supported: {supported}")
    return str(names[0])


def _quantization(raw: Any) -> Quantization | None:
    if raw is None:
        return None
    method = raw.get("quant_method", raw) if isinstance(raw, dict) else raw
    way = "use a float16 or bfloat16 checkpoint, and --quantization int8 or int4"
    _require(method == METHOD, f"quantization_config {shown(method)} is not supported; {way}")
    bits, group = raw.get("bits"), raw.get("group_size", 0)
    _require(type(bits) is int and bits in (8, 4), "quantization_config: bits must be 8 or 4, got", bits)
    wanted = [str(size) for size in (GROUPS if bits == 4 else (0,))]
    _require(repr(group) in wanted, f"quantization_config: group_size must be {' or '.join(wanted)}, got", group)
    return Quantization(bits, group)


def _rope(raw: Mapping[str, Any], context: int, instead: Mapping[str, Any] | None) -> tuple[float, RopeScaling | None]:
    """(rope_theta, scaling). Transformers 4 keeps the base at the top level and the scaling in `rope_scaling`, 5 keeps
    both in `rope_parameters`, which it also reads from `rope_scaling`; what is said twice must agree."""
    own = {}
    for name in ("rope_scaling", "rope_parameters"):
        _require(isinstance(raw.get(name), Mapping | None), f"{name} must be an object, got", raw.get(name))
        own[f"in {name}"] = raw.get(name) or {}
    places = {"at the top level": raw, **own, "in the rope_scaling that replaces it": instead or {}}
    for place in places.values():
        rotated = place.get("partial_rotary_factor")
        _require(rotated in (None, 1), "partial_rotary_factor must be 1, got", rotated)
    said = [where for where, place in places.items() if place.get("rope_theta") is not None]
    thetas = [_value(places[where], "rope_theta", 2.0, 1e12) for where in said]
    _require(len(set(thetas)) < 2, "rope_theta is " + " and ".join(map("{} {}".format, thetas, said)))
    scaled = [place for place in (own.values() if instead is None else [instead]) if place.keys() - _NO_SCALING]
    scalings = [_rope_scaling(place, context) for place in scaled] or [None]
    _require(scalings[0] == scalings[-1], "rope_scaling and rope_parameters do not agree:", *scaled)
    return thetas[0] if thetas else 10000.0, scalings[0]


def _rope_scaling(raw: Mapping[str, Any], context: int) -> RopeScaling | None:
    kind = raw.get("rope_type", raw.get("type"))
    old = raw.get("type", kind)
    _require(old == kind, f"rope_scaling has type {shown(old)} and rope_type", kind)
    if kind == "default":
        return None
    _require(kind in tuple(_ROPE_KEYS), f"rope_scaling's rope_type must be one of {', '.join(_ROPE_KEYS)}, got", kind)
    numbers = _ROPE_KEYS[kind].items()
    values = {key: _value(raw, key, *limits) for key, limits in numbers if key in _NEEDED or raw.get(key) is not None}
    low, high = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
    least, most = values.get(low, BETA_SLOW), values.get(high, BETA_FAST)
    _require(least < most, f"rope_scaling needs {low} < {high}, got {least:g} and {most:g}")
    own = raw if kind in ("yarn", "llama3") else {}  # linear and dynamic scaling know no length but the config's
    original = _value(own, "original_max_position_embeddings", 1, 1 << 27, None if kind == "llama3" else context)
    return RopeScaling(kind, original, values, truncate=_value(raw, "truncate", False, True, True))
