"""docs/configurations.md says what loads and what is refused in which words; here each of its lines is tried.

The page is made by `python tests/test_configurations.py`; a test compares it with what these tables give.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from oracle.checkpoint import DEFAULTS, DROP, make_checkpoint, random_weights, train_tokenizer, write_weights
from oracle.llama64 import logprobs

from engine import LLM, CapacityError, ConfigError, ModelFormatError, TokenizerError
from models.llama.config import LlamaConfig
from models.llama.model import LlamaWeights

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configurations.md"


def shape(layers, hidden, inner, heads, kv_heads, vocab, context, **others):
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers,
        "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": context, **others,
    }  # fmt: skip
    return {key: value for key, value in config.items() if value is not DROP}


LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip
# The published config.json, as far as it says anything of the shape, and the number of parameters on the model's page.
FAMILIES = {
    "Llama 1 7B": (shape(32, 4096, 11008, 32, DROP, 32000, 2048, rms_norm_eps=1e-6), 6_738_415_616),
    "Llama 2 7B": (shape(32, 4096, 11008, 32, 32, 32000, 4096, rms_norm_eps=1e-5), 6_738_415_616),
    "Llama 2 13B": (shape(40, 5120, 13824, 40, 40, 32000, 4096, rms_norm_eps=1e-5), 13_015_864_320),
    "Llama 2 70B": (shape(80, 8192, 28672, 64, 8, 32000, 4096, rms_norm_eps=1e-5), 68_976_648_192),
    "Llama 3 8B": (shape(32, 4096, 14336, 32, 8, 128256, 8192, rope_theta=500000.0), 8_030_261_248),
    "Llama 3.1 8B": (
        shape(32, 4096, 14336, 32, 8, 128256, 131072, rope_theta=500000.0, rope_scaling=LLAMA31), 8_030_261_248,
    ),
    "Llama 3.2 1B": (
        shape(16, 2048, 8192, 32, 8, 128256, 131072, head_dim=64, tie_word_embeddings=True, rope_theta=500000.0,
              rope_scaling={**LLAMA31, "factor": 32.0}), 1_235_814_400,
    ),
    "CodeLlama 7B": (shape(32, 4096, 11008, 32, 32, 32016, 16384, rope_theta=1000000), 6_738_546_688),
    "TinyLlama 1.1B": (shape(22, 2048, 5632, 32, 4, 32000, 2048), 1_100_048_384),
    "SmolLM2 135M": (
        shape(30, 576, 1536, 9, 3, 49152, 8192, rope_theta=100000, tie_word_embeddings=True), 134_515_008,
    ),
    "Yi 1.5 6B": (shape(32, 4096, 11008, 32, 4, 64000, 4096, rope_theta=5000000.0), 6_061_035_520),
    "Yi 1.5 34B": (shape(60, 7168, 20480, 56, 8, 64000, 4096, rope_theta=5000000.0), 34_388_917_248),
    "DeepSeek 7B (dense)": (shape(30, 4096, 11008, 32, 32, 102400, 4096, rms_norm_eps=1e-6), 6_910_365_696),
    "Mistral 7B v0.1": (
        shape(32, 4096, 14336, 32, 8, 32000, 32768, model_type="mistral", architectures=["MistralForCausalLM"],
              sliding_window=4096), 7_241_732_096,
    ),
    "Mistral 7B v0.3": (
        shape(32, 4096, 14336, 32, 8, 32768, 32768, model_type="mistral", architectures=["MistralForCausalLM"],
              sliding_window=None, rope_theta=1000000.0), 7_248_023_552,
    ),
}  # fmt: skip

# What is changed in the config.json of a tiny model, and what is said of it. Each of these loads.
LOADS = [
    ({"num_key_value_heads": DROP}, "as many as num_attention_heads"),
    ({"rope_theta": DROP}, "10000"),
    ({"head_dim": 32}, "need not be hidden_size / num_attention_heads"),
    ({"torch_dtype": DROP, "dtype": "bfloat16"}, "Transformers 5's spelling"),
    (
        {"rope_theta": DROP, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        "Transformers 5's place",
    ),
    ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "both, if they agree"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "old spelling"),
    ({"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}}, "both, if they agree"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "the base of max_model_len, from the first token on"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}, ""),
    ({"rope_scaling": LLAMA31}, ""),
    ({"rope_theta": DROP, "rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 2.0}}, ""),
    ({"tie_word_embeddings": True}, "without an lm_head.weight in the file, or with one, which is not read"),
    ({"attention_bias": True}, "of all four projections"),
    ({"mlp_bias": True}, ""),
    ({"eos_token_id": [2, 7, 9]}, "any of them ends an answer; those of generation_config.json too"),
    ({"bos_token_id": DROP, "eos_token_id": DROP}, "the tokenizer's"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, "the context is the window at most"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, "no window"),
    ({"sliding_window": 64}, "not a Llama's: not used"),
    ({"architectures": DROP}, "model_type says it: llama or mistral"),
    ({"hidden_act": "swish"}, "another name of silu"),
    ({"pretraining_tp": 2, "auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "not used; no code is ever imported"),
]

# Refused: by config.json. The class and the words of the message.
BAD_KEYS = [
    {"architectures": ["Qwen2ForCausalLM"]},
    {"architectures": DROP, "model_type": "gpt2"},
    {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    {"hidden_act": "gelu"},
    {"torch_dtype": "float64"},
    {"hidden_size": DROP},
    {"hidden_size": 65},
    {"num_attention_heads": 6, "num_key_value_heads": 4},
    {"num_key_value_heads": 8},
    {"num_hidden_layers": 10**12},
    {"vocab_size": 1 << 40},
    {"head_dim": 15},
    {"rms_norm_eps": 0},
    {"rope_theta": float("nan")},
    {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
    {"rope_scaling": {"factor": 2.0}},
    {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
    {"rope_scaling": {"rope_type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "yarn", "factor": 2}},
    {"partial_rotary_factor": 0.5},
    {"tie_word_embeddings": "yes"},
    {"eos_token_id": [2, -1]},
    {"intermediate_size": 96},  # the tensors say otherwise
    {"num_hidden_layers": 3},
    {"vocab_size": 340},  # fewer than the tokenizer has
]  # fmt: skip


def renamed(directory, old, new):
    (directory / old).rename(directory / new)


def without(*names, **others):
    """Writes the weights again, some of them missing or other ones."""

    def change(directory):
        weights = random_weights(DEFAULTS, 0)
        for name in names:
            del weights[name]
        write_weights(directory, weights | {name.replace("__", "."): value for name, value in others.items()})

    return change


def pointer(name, text):
    return lambda directory: (directory / name).write_text(text)


def linked_out(directory):
    (directory.parent / "secret.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to(directory.parent / "secret.safetensors")


def cut(directory):
    data = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(data[:-100])


def index(directory, shard):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))


LFS, XET = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "# xet version 0\nfilesize = 1\nhash = '0'\n"
# Refused: by the files, or by settings.
BAD_FILES = {
    "no weights": (lambda d: (d / "model.safetensors").unlink(), {}),
    "a pickle": (lambda d: renamed(d, "model.safetensors", "pytorch_model.bin"), {}),
    "Meta's pickle": (lambda d: renamed(d, "model.safetensors", "consolidated.00.pth"), {}),
    "a GGUF file": (lambda d: renamed(d, "model.safetensors", "model.gguf"), {}),
    "a Git LFS pointer": (pointer("model.safetensors", LFS), {}),
    "a Git XET pointer": (pointer("model.safetensors", XET), {}),
    "tensors missing": (without("model.norm.weight", "model.layers.1.mlp.up_proj.weight"), {}),
    "untied, without a head": (without("lm_head.weight"), {}),
    "tensors too many": (without(score__weight=np.ones(3, np.float32)), {}),
    "a wrong shape": (without(model__norm__weight=np.ones(63, np.float32)), {}),
    "cut off": (cut, {}),
    "a shard missing": (lambda d: index(d, "x.safetensors"), {}),
    "a shard elsewhere": (lambda d: index(d, "../x.safetensors"), {}),
    "a link out of the directory": (linked_out, {}),
    "no tokenizer": (lambda d: (d / "tokenizer.model").unlink(), {}),
    "Llama 3's tokenizer.model": (pointer("tokenizer.model", "IQ== 0\nIg== 1\n"), {}),
    "a tokenizer of another model": (lambda d: (d / "tokenizer.model").write_bytes(train_tokenizer(400)), {}),
    "NaN, with check_tensors": (without(model__norm__weight=np.full(64, np.nan, np.float32)), {"check_tensors": True}),
    "max_model_len over the context": (lambda d: None, {"max_model_len": 1000}),
    "max_model_len over the window": (
        lambda d: (d / "config.json").write_text(
            json.dumps({**DEFAULTS, "architectures": ["MistralForCausalLM"], "sliding_window": 64})
        ),
        {"max_model_len": 100},
    ),
    "a setting of a later version": (lambda d: None, {"profile": "long"}),
}  # fmt: skip


def outcome(directory, **settings):
    """The refusal of a model, without the paths of this machine; None for one that loads."""
    try:
        LLM(directory, threads=1, **settings)
    except (ModelFormatError, ConfigError, TokenizerError, CapacityError) as error:
        text = str(error).replace(str(directory), "DIR").replace(str(directory.parent), "OUTSIDE")
        return f"{type(error).__name__}: {text}"
    return None


def change_key(directory, change):
    config = make_checkpoint(directory)
    config = {key: value for key, value in {**config, **change}.items() if value is not DROP}
    (directory / "config.json").write_text(json.dumps(config))


def change_files(directory, name):
    make_checkpoint(directory)
    change, settings = BAD_FILES[name]
    change(directory)
    return settings


def spelled(change):
    text = ", ".join(f"{k}: {'(missing)' if v is DROP else json.dumps(v)}" for k, v in change.items())
    return f"`{text}`".replace("|", "\\|")


def escaped(text):
    return text.replace("|", "\\|").replace("\n", " ")


def count(config):
    return sum(p.numel() for p in LlamaWeights(LlamaConfig.from_dict(config)).values())


def render():
    """The page."""
    lines = [
        "# What loads, and what is refused in which words",
        "",
        "Made by `python tests/test_configurations.py`, which tries every line; a test keeps it true.",
        "",
        "## Families",
        "",
        "Checked by the number of parameters, and by a small model of the same kind against a float64 reference.",
        "",
        "| model | layers | hidden | heads / KV | vocabulary | context | parameters |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (raw, _) in FAMILIES.items():
        config = LlamaConfig.from_dict(raw)
        lines.append(
            f"| {name} | {config.num_layers} | {config.hidden_size} | {config.num_heads} / {config.num_kv_heads} | "
            f"{config.vocab_size} | {config.context_length} | {count(raw):,} |"
        )
    lines += ["", "## config.json: loads", "", "| keys | meaning |", "|---|---|"]
    lines += [f"| {spelled(change)} | {meaning} |" for change, meaning in LOADS]
    lines += ["", "## config.json: refused", "", "| keys | message |", "|---|---|"]
    with tempfile.TemporaryDirectory() as root:
        for i, change in enumerate(BAD_KEYS):
            directory = Path(root, f"key{i}", "m")
            change_key(directory, change)
            lines.append(f"| {spelled(change)} | {escaped(outcome(directory))} |")
        lines += ["", "## Files and settings: refused", "", "| case | message |", "|---|---|"]
        for i, name in enumerate(BAD_FILES):
            directory = Path(root, f"file{i}", "m")
            settings = change_files(directory, name)
            lines.append(f"| {name} | {escaped(outcome(directory, **settings))} |")
    return "\n".join(lines) + "\n"


def test_the_page_is_what_happens():
    assert render() == PAGE.read_text(), "run: python tests/test_configurations.py"
    assert "None" not in re.findall(r"\| (None)", PAGE.read_text()), "something that should be refused loads"


@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_the_parameters_that_they_have(name):
    config, parameters = FAMILIES[name]
    assert count(config) == parameters


@pytest.mark.parametrize("name", FAMILIES)
def test_a_small_model_of_each_family(tmp_path, name):
    """Its keys, heads in their proportion, and everything that is a size small, against float64."""
    raw, _ = FAMILIES[name]
    kv_heads = raw.get("num_key_value_heads", raw["num_attention_heads"])
    group = raw["num_attention_heads"] // kv_heads
    kv_heads = min(kv_heads, 2)
    small = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 352, "head_dim": 16,
             "num_attention_heads": group * kv_heads}  # fmt: skip
    if "num_key_value_heads" in raw:
        small["num_key_value_heads"] = kv_heads
    missing = {key: DROP for key in DEFAULTS if key not in raw}
    config = make_checkpoint(tmp_path, seed=4, **(missing | raw | small))
    ids = np.random.default_rng(1).integers(0, 352, 48).tolist()
    llm = LLM(tmp_path, threads=1, dtype="float32", max_model_len=64)
    (ours,) = llm.score([ids])
    np.testing.assert_allclose(ours, logprobs(config, random_weights(config, 4), ids), atol=2e-4)


@pytest.mark.parametrize(("change", "meaning"), LOADS, ids=[spelled(change)[1:-1] for change, _ in LOADS])
def test_what_loads(tmp_path, change, meaning):
    config = make_checkpoint(tmp_path, **{key: value for key, value in change.items() if key != "dtype"})
    if "dtype" in change:  # else it would be that of the weights
        config["dtype"] = change["dtype"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(tmp_path, threads=1, dtype="float32")
    expected = LlamaConfig.from_dict(config)
    assert llm.max_model_len == expected.context_length
    ids = np.random.default_rng(1).integers(0, 352, 40).tolist()
    (ours,) = llm.score([ids])
    length = llm.max_model_len if "dynamic" in str(change) else None
    config["hidden_act"] = "silu"
    reference = logprobs(config, random_weights(config, 0), ids, rope_seq_len=length)
    np.testing.assert_allclose(ours, reference, atol=2e-4)


def test_the_window_limits_the_context(tmp_path):
    make_checkpoint(tmp_path, architectures=["MistralForCausalLM"], sliding_window=64)
    assert LLM(tmp_path, threads=1).max_model_len == 64
    assert LLM(tmp_path, threads=1, max_model_len=64).max_model_len == 64
    with pytest.raises(ConfigError, match=r"max_model_len 65 .* sliding_window of 64 tokens"):
        LLM(tmp_path, threads=1, max_model_len=65)


def test_mistral_has_other_defaults_where_keys_are_missing():
    """Those of Transformers' MistralConfig."""
    raw = {**FAMILIES["Mistral 7B v0.1"][0]}
    del raw["sliding_window"], raw["num_key_value_heads"]
    config = LlamaConfig.from_dict(raw)
    assert (config.sliding_window, config.num_kv_heads) == (4096, 8)
    assert LlamaConfig.from_dict(raw | {"sliding_window": None}).sliding_window is None


@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
def test_a_base_within_the_scaling_counts(where):
    """As Transformers 5 reads it from either; not to see it would be another model, without a word."""
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    raw = {key: value for key, value in DEFAULTS.items() if key not in ("rope_theta", "rope_scaling")}
    assert LlamaConfig.from_dict(raw | {where: scaling}).rope_theta == 5e5
    with pytest.raises(ConfigError, match=f"rope_theta is 10000.0 at the top level and 500000.0 in {where}"):
        LlamaConfig.from_dict(raw | {"rope_theta": 10000.0, where: scaling})


def test_messages_stay_short():
    for value in ("x" * 10**6, [1] * 10**6, {"a" * 10**6: 1}, 10**4000):
        for key in ("architectures", "hidden_size", "rope_scaling", "torch_dtype", "eos_token_id", "rope_theta"):
            with pytest.raises(ConfigError) as caught:
                LlamaConfig.from_dict({**DEFAULTS, key: value})
            assert len(str(caught.value)) < 400, key


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(render())
