"""config.json: what real ones say, what is refused by name, and that nothing but a ConfigError can come of nonsense."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.checkpoint import DEFAULTS, DROP

from models.errors import ConfigError
from models.llama.config import LlamaConfig, RopeScaling

CONFIGS = Path(__file__).resolve().parents[2] / "shared" / "data" / "model-configs"
needs_configs = pytest.mark.skipif(not CONFIGS.is_dir(), reason=f"no {CONFIGS}")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0}


def parse(**overrides):
    raw = {key: value for key, value in {**DEFAULTS, **overrides}.items() if value is not DROP}
    return LlamaConfig.from_dict(raw)


# Real ones.

# file -> (layers, heads, KV heads, head_dim, context, rope_theta, vocabulary, dtype)
REAL = {
    "llama2-7b-chat/config.json": (32, 32, 32, 128, 2048, 1e4, 32000, "float32"),
    "transcribed/llama-2-7b-hf.config.json": (32, 32, 32, 128, 4096, 1e4, 32000, "float16"),
    "transcribed/llama-2-13b-hf.config.json": (40, 40, 40, 128, 4096, 1e4, 32000, "float16"),
    "transcribed/llama-2-13b-chat-hf.config.json": (40, 40, 40, 128, 4096, 1e4, 32000, "float16"),
    "transcribed/llama-2-13b-hf.early-2048.config.json": (40, 40, 40, 128, 2048, 1e4, 32000, "float16"),
    "transcribed/llama-2-70b-hf.config.json": (80, 64, 8, 128, 4096, 1e4, 32000, "float16"),
    "transcribed/meta-llama-3-8b.config.json": (32, 32, 8, 128, 8192, 5e5, 128256, "bfloat16"),
    "transcribed/llama-3.1-8b.config.json": (32, 32, 8, 128, 131072, 5e5, 128256, "bfloat16"),
    "transcribed/llama-3.1-8b-instruct.eos-list.config.json": (32, 32, 8, 128, 131072, 5e5, 128256, "bfloat16"),
    "transcribed/yi-1.5-6b.config.json": (32, 32, 4, 128, 4096, 5e6, 64000, "bfloat16"),
    "transcribed/yi-1.5-34b.config.json": (60, 56, 8, 128, 4096, 5e6, 64000, "bfloat16"),
    "transcribed/deepseek-llm-7b-base.config.json": (30, 32, 32, 128, 4096, 1e4, 102400, "bfloat16"),
    # Mistral 0.1 attends over a window; what we do not compute beyond it is not offered.
    "transcribed/mistral-7b-v0.1.config.json": (32, 32, 8, 128, 4096, 1e4, 32000, "float32"),
}


@needs_configs
@pytest.mark.parametrize("file", REAL)
def test_real_configs_are_read(file):
    raw = json.loads((CONFIGS / file).read_text())
    if "mistral" in file:
        raw["vocab_size"] = 32000  # the transcribed excerpt ends before this key
    config = LlamaConfig.from_dict(raw)
    assert (
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.context_length,
        config.rope_theta,
        config.vocab_size,
        config.dtype,
    ) == REAL[file]
    assert config.kv_bytes_per_token(2) == 4 * config.num_layers * config.num_kv_heads * config.head_dim


@needs_configs
def test_every_real_config_has_a_row_above_or_is_refused():
    found = {str(file.relative_to(CONFIGS)) for file in CONFIGS.glob("*/*config.json")}
    others = {
        name for name in found - REAL.keys() if not name.endswith(("tokenizer_config.json", "generation_config.json"))
    }
    assert others == {"llama2-13b-4bit-bnb/config.json"}


@needs_configs
def test_a_bitsandbytes_checkpoint_is_refused_by_name():
    raw = json.loads((CONFIGS / "llama2-13b-4bit-bnb" / "config.json").read_text())
    with pytest.raises(ConfigError, match="quantization_config 'bitsandbytes'"):
        LlamaConfig.from_dict(raw)


@needs_configs
def test_llama_3_1_carries_its_scaling_and_a_list_of_ends():
    file = CONFIGS / "transcribed" / "llama-3.1-8b-instruct.eos-list.config.json"
    config = LlamaConfig.from_dict(json.loads(file.read_text()))
    assert config.rope_scaling == RopeScaling(
        "llama3", 8192, {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    )
    assert (config.bos_token_id, config.eos_token_ids) == (128000, (128001, 128008, 128009))


# Keys that may be missing.

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def test_the_least_config_gets_transformers_defaults():
    config = LlamaConfig.from_dict({"model_type": "llama", **{key: DEFAULTS[key] for key in REQUIRED}})
    assert config == LlamaConfig(
        vocab_size=352,
        hidden_size=64,
        intermediate_size=112,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        sliding_window=None,
        dtype="float32",
        bos_token_id=None,
        eos_token_ids=(),
    )


@pytest.mark.parametrize("key", sorted(DEFAULTS.keys() - set(REQUIRED) - {"architectures", "hidden_act"}))
def test_null_is_as_good_as_missing(key):
    assert parse(**{key: None}) == parse(**{key: DROP})


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", [DROP, None], ids=["missing", "null"])
def test_what_has_no_default_is_named(key, value):
    with pytest.raises(ConfigError, match=f"{key} must be an integer .*got None"):
        parse(**{key: value})


@pytest.mark.parametrize(
    ("overrides", "field", "value"),
    [
        ({"head_dim": 128}, "head_dim", 128),
        ({"head_dim": DROP, "hidden_size": 96}, "head_dim", 24),
        ({"num_key_value_heads": DROP}, "num_kv_heads", 4),
        ({"hidden_act": "swish"}, "hidden_act", None),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps", 1e-6),
        ({"rope_theta": 500000}, "rope_theta", 5e5),
        ({"dtype": "bfloat16"}, "dtype", "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "dtype", "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "dtype", "bfloat16"),
        ({"eos_token_id": [2, 7]}, "eos_token_ids", (2, 7)),
        ({"eos_token_id": None}, "eos_token_ids", ()),
        ({"attention_bias": True}, "attention_bias", True),
        ({"mlp_bias": True}, "mlp_bias", True),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", True),
        ({"sliding_window": 16}, "sliding_window", None),  # only Mistral's attention has one
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 16}, "sliding_window", 16),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, "sliding_window", None),
        ({"architectures": DROP, "model_type": "mistral"}, "num_layers", 2),
        ({"unknown": [1, {"x": None}], "pretraining_tp": 2, "auto_map": {"AutoModel": "evil.py"}}, "num_layers", 2),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_keys_are_read(overrides, field, value):
    config = parse(**overrides)
    if value is not None or field == "sliding_window":
        assert getattr(config, field) == value


# Bad values: (overrides, the key that the message must name).

NAN, INF = math.nan, math.inf
INTEGERS = {  # key -> values out of range
    "vocab_size": (0, -1, 1 << 40),
    "hidden_size": (0, -64, 1 << 40),
    "intermediate_size": (0, -1, 1 << 40),
    "num_hidden_layers": (0, -2, 10**12),
    "num_attention_heads": (0, -4, 10**6),
    "num_key_value_heads": (0, -1, 8),  # more than heads
    "head_dim": (0, -16, 2, 1 << 20),
    "max_position_embeddings": (0, -1, 1 << 40),
    "bos_token_id": (-1, 1 << 40),
    "eos_token_id": (-1, 1 << 40, [2, -1], [2, "x"], [[2]]),
}
NUMBERS = {"rms_norm_eps": (0, 0.0, -1e-5, 2.0), "rope_theta": (0, -1e4, 0.5, 1e13)}
WRONG_TYPES = (True, "64", "", [64], {"a": 1}, NAN, INF)
BAD = [
    *((key, value) for key, values in INTEGERS.items() for value in (*values, *WRONG_TYPES, 64.0)),
    *((key, value) for key, values in NUMBERS.items() for value in (*values, *WRONG_TYPES, -INF)),
    *(
        (key, value)
        for key in ("tie_word_embeddings", "attention_bias", "mlp_bias")
        for value in ("true", "", 1, 0, 1.0, NAN, [], {})
    ),
    *(("hidden_act", value) for value in ("gelu", "", None, 1, ["silu"], {})),
    *(("torch_dtype", value) for value in ("float64", "int8", "float8_e4m3fn", 16, ["float32"])),
    *(("rope_scaling", value) for value in ("linear", 2, 2.0, True, False, 0, "", [], ["linear"])),
    *(("rope_parameters", value) for value in ("linear", 2, True, False, 0, "", [])),
    *(("quantization_config", value) for value in ({"quant_method": "gptq"}, {}, {"bits": 4}, "awq", [])),
]
BAD = [(key, value) for key, value in BAD if not (key == "eos_token_id" and value == [64])]


@pytest.mark.parametrize(("key", "value"), BAD, ids=[f"{key}={value!r}" for key, value in BAD])
def test_bad_values_are_refused_by_the_key(key, value):
    with pytest.raises(ConfigError, match=key):
        parse(**{key: value})


@pytest.mark.parametrize(
    ("overrides", "pattern"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "6 is not a multiple of num_key_value_heads 4"),
        ({"hidden_size": 65}, "hidden_size 65 .* num_attention_heads 4"),
        ({"head_dim": 15}, "head_dim must be even.* 15"),
        ({"hidden_size": 8}, "head_dim must be .* from 4"),  # 8 / 4 heads
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        ({"architectures": ["GemmaForCausalLM"]}, "architecture .*Gemma.*supported: Llama"),
        ({"architectures": ["Qwen2ForCausalLM", "LlamaForCausalLM"]}, "architecture .*Qwen2"),
        ({"architectures": []}, "architecture"),
        ({"architectures": "LlamaForCausalLM"}, "architecture"),
        ({"architectures": [None]}, "architecture"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architecture"),
        ({"architectures": {"0": "LlamaForCausalLM"}}, "architecture"),
        ({"architectures": DROP, "model_type": "gpt2"}, "architecture 'gpt2'"),
        ({"architectures": DROP, "model_type": DROP}, "architecture None"),
        ({"architectures": DROP, "model_type": ["llama"]}, "architecture"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config 'gptq'"),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_values_that_do_not_fit_together(overrides, pattern):
    with pytest.raises(ConfigError, match=pattern):
        parse(**overrides)


# RoPE scaling, which must be understood or refused, never ignored.


@pytest.mark.parametrize("spelling", ["rope_type", "type", "both", "rope_parameters", "argument"])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_scaling_is_read_in_every_spelling(kind, spelling):
    numbers = {key: value for key, value in (LLAMA3 if kind == "llama3" else YARN).items() if key != "rope_type"}
    if spelling == "rope_parameters":
        config = parse(rope_theta=DROP, rope_parameters={"rope_type": kind, "rope_theta": 77777.0, **numbers})
        assert config.rope_theta == 77777.0
    elif spelling == "argument":
        config = parse(rope_scaling={"rope_type": kind, **numbers})
        replaced = {"type": "linear", "factor": 2.0}
        raw = {**DEFAULTS, "rope_scaling": replaced}
        assert LlamaConfig.from_dict(raw, {"rope_type": kind, **numbers}) == config
    else:
        names = {"both": ("type", "rope_type")}.get(spelling, (spelling,))
        config = LlamaConfig.from_dict({**DEFAULTS, "rope_scaling": {**dict.fromkeys(names, kind), **numbers}})
    values = {key: value for key, value in numbers.items() if key != "original_max_position_embeddings"}
    assert config.rope_scaling == RopeScaling(kind, 8192 if kind == "llama3" else 512, values)
    assert config.context_length == (512 if kind == "llama3" else 2048)


@pytest.mark.parametrize(
    "scaling", [None, {}, {"rope_type": "default"}, {"type": "default"}], ids=["null", "empty", "rope_type", "type"]
)  # fmt: skip
def test_no_scaling(scaling):
    assert LlamaConfig.from_dict({**DEFAULTS, "rope_scaling": scaling}).rope_scaling is None
    parameters = None if scaling is None else {**scaling, "rope_theta": 10000.0}
    assert LlamaConfig.from_dict({**DEFAULTS, "rope_parameters": parameters}).rope_scaling is None


def test_yarn_takes_its_optional_numbers_and_the_original_context():
    options = {"attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0}
    scaling = parse(
        rope_scaling={**YARN, **options, "original_max_position_embeddings": 128, "truncate": False}
    ).rope_scaling
    assert scaling == RopeScaling("yarn", 128, {"factor": 4.0, **options}, truncate=False)


SCALING_BAD = [
    ({"factor": 2.0}, "rope_type"),  # no type at all: Transformers 5 would quietly scale nothing
    ({"rope_type": "longrope", "factor": 2.0}, "rope_type.*'longrope'"),
    ({"rope_type": "", "factor": 2.0}, "rope_type"),
    ({"rope_type": None, "factor": 2.0}, "rope_type"),
    ({"rope_type": ["linear"], "factor": 2.0}, "rope_type"),
    ({"rope_type": {"linear": 1}, "factor": 2.0}, "rope_type"),
    ({"type": 3, "factor": 2.0}, "rope_type"),
    ({"type": "linear", "rope_type": "dynamic", "factor": 2.0}, "type 'linear' and rope_type 'dynamic'"),
    *(({"rope_type": kind}, "factor") for kind in ("linear", "dynamic", "yarn")),
    *(
        ({"rope_type": kind, "factor": factor}, "factor")
        for kind in ("linear", "dynamic", "yarn")
        for factor in (NAN, INF, 0, 0.5, -2.0, 1e9, True, "2", [2.0], {})
    ),
    *(({**LLAMA3, key: value}, key) for key in LLAMA3 if key != "rope_type" for value in (None, NAN, 0, -1, "1", True)),
    ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor < high_freq_factor"),
    ({**LLAMA3, "original_max_position_embeddings": 8192.0}, "original_max_position_embeddings"),
    *(
        ({**YARN, key: value}, key)
        for key in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        for value in (NAN, -1.0, 1e9, "1", True, [])
    ),
    *(({**YARN, "original_max_position_embeddings": value}, "original_max_position") for value in (0, NAN, "8", 1e3)),
    *(({**YARN, "truncate": value}, "truncate") for value in ("no", 0, [])),
    ({**YARN, "beta_fast": 1.0, "beta_slow": 1.0}, "beta_slow < beta_fast"),
    ({**YARN, "beta_slow": 40.0}, "beta_slow < beta_fast"),
]  # fmt: skip


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters", "argument"])
@pytest.mark.parametrize(("scaling", "pattern"), SCALING_BAD, ids=[str(scaling) for scaling, _ in SCALING_BAD])
def test_bad_scaling_is_refused(scaling, pattern, where):
    with pytest.raises(ConfigError, match=pattern):
        if where == "argument":
            LlamaConfig.from_dict(DEFAULTS, scaling)
        else:
            LlamaConfig.from_dict({**DEFAULTS, where: scaling})


def test_rope_theta_in_two_places_must_agree():
    assert parse(rope_theta=5e5, rope_parameters={"rope_theta": 5e5}).rope_theta == 5e5
    with pytest.raises(ConfigError, match=r"rope_theta is 10000\.0 at the top level and 500000\.0 in rope_parameters"):
        parse(rope_theta=10000.0, rope_parameters={"rope_theta": 5e5})
    with pytest.raises(ConfigError, match="rope_theta"):
        parse(rope_theta=DROP, rope_parameters={"rope_theta": NAN})


def test_what_replaces_the_scaling_may_not_bring_another_base():
    """The base of the checkpoint stays: another one would be passed over without a word."""
    scaling = {"rope_type": "linear", "factor": 2.0}
    raw = {**DEFAULTS, "rope_theta": 10000.0}
    assert LlamaConfig.from_dict(raw, {**scaling, "rope_theta": 10000.0}) == LlamaConfig.from_dict(raw, scaling)
    with pytest.raises(ConfigError, match=r"rope_theta is 10000\.0 at the top level and 500000\.0 in the rope_scaling"):
        LlamaConfig.from_dict(raw, {**scaling, "rope_theta": 5e5})
    with pytest.raises(ConfigError, match=r"partial_rotary_factor must be 1, got 0\.5"):
        LlamaConfig.from_dict(raw, {**scaling, "partial_rotary_factor": 0.5})


def test_a_config_can_not_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse().vocab_size = 1


# Nonsense.

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([1 << 31, 1 << 63, 10**30]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["linear", "dynamic", "yarn", "llama3", "default", "float32", "silu", "LlamaForCausalLM"]),
)
JSON = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x, max_size=3), max_leaves=6
)
ROPE_NAMES = [
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
    "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim", "truncate",
]  # fmt: skip
# Half of the numbers are good ones, so that what follows the first check is reached too.
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["linear", "dynamic", "yarn", "llama3"]) | JSON},
    optional={name: st.floats(1, 8) | st.integers(1, 512) | JSON for name in ROPE_NAMES[1:]},
)
KEYS = [
    *DEFAULTS, "head_dim", "dtype", "torch_dtype", "rope_parameters", "quantization_config", "sliding_window",
    "text_config",
]  # fmt: skip
CHANGES = st.dictionaries(st.sampled_from(KEYS), JSON | st.just(DROP), max_size=4)


@settings(max_examples=600, deadline=None)
@given(changes=CHANGES, ropes=st.dictionaries(st.sampled_from(["rope_scaling", "rope_parameters"]), ROPE))
def test_any_json_is_a_valid_config_or_a_config_error(changes, ropes):
    raw = {key: value for key, value in {**DEFAULTS, **ropes, **changes}.items() if value is not DROP}
    try:
        config = LlamaConfig.from_dict(raw)
    except ConfigError as error:
        assert str(error)
        return
    assert config.num_heads % config.num_kv_heads == 0 and config.head_dim % 2 == 0
    assert min(config.vocab_size, config.hidden_size, config.num_layers, config.context_length) >= 1
    assert 0 < config.rms_norm_eps <= 1 and math.isfinite(config.rope_theta)
    assert all(map(math.isfinite, config.rope_scaling.values.values() if config.rope_scaling else []))
    assert type(config.tie_word_embeddings) is type(config.attention_bias) is type(config.mlp_bias) is bool


@settings(max_examples=300, deadline=None)
@given(rope=ROPE, head_dim=st.sampled_from([4, 16, 128]), context=st.integers(1, 1 << 20), theta=st.floats(2, 1e12))
def test_a_valid_scaling_gives_finite_tables(rope, head_dim, context, theta):
    import torch

    from models.llama.rope import rope_table

    raw = {**DEFAULTS, "head_dim": head_dim, "max_position_embeddings": context, "rope_theta": theta}
    try:
        config = LlamaConfig.from_dict(raw, rope)
    except ConfigError:
        return
    table = rope_table(config, 5)
    assert table.shape == (5, head_dim) and table.dtype == torch.float32
    assert torch.isfinite(table).all()
    # The first position is not turned: cosines are the amplitude, sines zero.
    assert (table[0, : head_dim // 2] > 0).all() and (table[0, head_dim // 2 :] == 0).all()


@settings(max_examples=200, deadline=None)
@given(value=JSON)
def test_token_ids_are_ids_or_refused(value):
    try:
        ids = parse(eos_token_id=value).eos_token_ids
    except ConfigError as error:
        assert "eos_token_id" in str(error)
    else:
        assert all(type(i) is int and i >= 0 for i in ids)
