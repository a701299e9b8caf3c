"""Tiny random Llama checkpoints in the Hugging Face layout, with a real sentencepiece tokenizer, in milliseconds.

    make_checkpoint(tmp_path)
    make_checkpoint(tmp_path, dtype="bfloat16", shards=3, tie_word_embeddings=True)
    make_checkpoint(tmp_path, head_dim=80, num_attention_heads=5, num_key_value_heads=1)
    make_checkpoint(tmp_path, rope_scaling={"rope_type": "linear", "factor": 4.0}, rope_theta=DROP)

Without overrides: float32 in one file, 2 layers of hidden size 64, 4 heads over 2 KV heads of 16, 352 tokens.
"""

import functools
import io
import json
from pathlib import Path

import numpy as np
import sentencepiece
from safetensors.numpy import save_file

# As an override: leave this key out of config.json, where None would write null.
DROP = object()

# Few distinct characters (57), so that a small vocabulary holds merges as well; all others fall back to bytes.
TEXT = """
Once upon a time there was a small stove in a cold house. The stove was warm, and the cat sat near the stove.
When the winter came, the wind went around the house and looked for a way in. It found the window, it found the door,
and it found the hole under the stairs where the mouse lived with her three children.
Good morning, said the wind to the mouse. Is there any room for me? The mouse looked at the wind and thought.
There is room, she said, but there is no place that is warm, because the cat is always there before us.
So the wind and the mouse went to see the cat, who was asleep, and they asked her to move a little to the left.
The cat opened one eye. She counted 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and closed it again. No, said the cat.
The temperature of a gas that expands slowly while it is kept in contact with a large bath does not change; a line
that joins the states of equal temperature is called an isotherm. What is hot stays at hand, what is warm is kept
nearby, what is cold is put away and brought back when somebody asks for it, and what nobody asks for is forgotten.
The model reads the words one after another and keeps a key and a value for each of them in every layer.
After 4096 words the keys need more memory than the weights, and after 32768 words nothing else would fit.
def add(a, b): return a + b
for i in range(100): print(i, add(i, i * 2))
Questions and answers: Who was warm? The cat was warm. Who was cold? The wind was cold. Where did the mouse live?
Under the stairs. How many children had she? Three. What did the cat say? The cat said no, and then she slept again.
In the evening the people of the house came home, they lit the lamp, and they put bread and milk on the table.
The mouse waited until the light was out. Then she took the bread to her children and left the milk to the cat.
And when the spring came the wind left the house through the window, and the stove grew cold, and the cat went out.
"""

DEFAULTS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 352,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": True,
}


def make_checkpoint(
    directory, *, seed: int = 0, dtype: str = "float32", shards: int = 1, tokenizer: bool = True, **config_overrides
) -> dict:
    """Write a checkpoint of dtype float32 | float16 | bfloat16 into `directory` and return its config.json.

    Any key of config.json can be overridden, or left out with DROP. The tokenizer has exactly vocab_size pieces; the
    text above is good for 315 .. 1,162 (use tokenizer=False outside). The weights of a seed do not depend on dtype,
    shards or RoPE.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    merged = {**DEFAULTS, "torch_dtype": dtype, **config_overrides}
    config = {key: value for key, value in merged.items() if value is not DROP}
    write_json(directory / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    write_json(directory / "generation_config.json", {"_from_model_config": True, **ids})

    write_weights(directory, random_weights(config, seed), dtype, shards)

    if tokenizer:
        (directory / "tokenizer.model").write_bytes(train_tokenizer(config["vocab_size"]))
        settings = {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "legacy": False,
            "model_max_length": config.get("max_position_embeddings", 2048),
        }
        write_json(directory / "tokenizer_config.json", settings)
    return config


def random_weights(config: dict, seed: int) -> dict[str, np.ndarray]:
    """float32 weights by Hugging Face name, scaled so that every part of the model shows in the logits.

    An input of RMS 1 gives queries and keys of RMS 1.4 (scores with a spread of 2: attention picks, but does not
    saturate), branches of about RMS 1 on a residual stream that starts at RMS 0.5, and logits with a spread of 4:
    the two best are then about 1 apart, and seldom nearer than 0.01, where float32 errs by 1e-5.
    """
    rng = np.random.default_rng(seed)
    hidden, intermediate, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    weights = {}

    def normal(name: str, *shape: int, scale: float, mean: float = 0.0) -> None:
        weights[name] = (mean + scale * rng.standard_normal(shape)).astype(np.float32)

    def linear(name: str, out: int, into: int, gain: float, bias: bool) -> None:
        normal(name + ".weight", out, into, scale=gain / into**0.5)
        if bias:
            normal(name + ".bias", out, scale=0.3)

    normal("model.embed_tokens.weight", vocab, hidden, scale=4 / hidden**0.5)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
        linear(layer + "self_attn.q_proj", heads * head_dim, hidden, 1.4, attention_bias)
        linear(layer + "self_attn.k_proj", kv_heads * head_dim, hidden, 1.4, attention_bias)
        linear(layer + "self_attn.v_proj", kv_heads * head_dim, hidden, 1.4, attention_bias)
        linear(layer + "self_attn.o_proj", hidden, heads * head_dim, 1.4, attention_bias)
        linear(layer + "mlp.gate_proj", intermediate, hidden, 1.4, mlp_bias)
        linear(layer + "mlp.up_proj", intermediate, hidden, 1.4, mlp_bias)
        linear(layer + "mlp.down_proj", hidden, intermediate, 1.0, mlp_bias)
        # Away from 1, so that a norm that forgets its weight is seen.
        normal(layer + "input_layernorm.weight", hidden, mean=1.0, scale=0.2)
        normal(layer + "post_attention_layernorm.weight", hidden, mean=1.0, scale=0.2)
    normal("model.norm.weight", hidden, mean=1.0, scale=0.2)
    if not config.get("tie_word_embeddings", False):
        normal("lm_head.weight", vocab, hidden, scale=4 / hidden**0.5)
    return weights


def write_weights(directory, weights: dict[str, np.ndarray], dtype: str = "float32", shards: int = 1) -> None:
    """model.safetensors, or `shards` files with their index; float32 arrays are rounded to dtype."""
    directory = Path(directory)
    if shards == 1:
        write_safetensors(directory / "model.safetensors", weights, dtype)
        return
    weight_map = {}
    for i, names in enumerate(np.array_split(list(weights), shards)):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        write_safetensors(directory / file, {str(name): weights[name] for name in names}, dtype)
        weight_map.update({str(name): file for name in names})
    total = sum(w.size for w in weights.values()) * (4 if dtype == "float32" else 2)
    write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def write_safetensors(path, weights: dict[str, np.ndarray], dtype: str) -> None:
    metadata = {"format": "pt"}  # Transformers refuses a file without it
    if dtype != "bfloat16":
        save_file({name: w.astype(dtype) for name, w in weights.items()}, path, metadata)
        return
    # numpy has no bfloat16, so these files are written by hand.
    header, chunks, offset = {"__metadata__": metadata}, [], 0
    for name, weight in weights.items():
        chunk = to_bfloat16(weight).tobytes()
        header[name] = {"dtype": "BF16", "shape": weight.shape, "data_offsets": [offset, offset + len(chunk)]}
        chunks.append(chunk)
        offset += len(chunk)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data begins aligned
    Path(path).write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(chunks))


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """The bits (uint16) of finite float32 x rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


@functools.cache
def train_tokenizer(vocab_size: int) -> bytes:
    """A tokenizer.model with Llama's settings: BPE with byte fallback, nothing normalised, one leading space."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.strip().splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        character_coverage=1.0,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
