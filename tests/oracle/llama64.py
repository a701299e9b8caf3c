"""A Llama in float64 numpy, written from the papers and Hugging Face's conventions; shares no code with the engine.

It is the slow truth: dense causal attention over the whole sequence, no cache, no batching, one file to read.
Everything a checkpoint's config.json may say about RoPE is read as Transformers 4.57.6 reads it, but the tables are
computed in float64, where Transformers uses float32 (see `inverse_frequencies`).

    config  = load_config(directory)            # or any dict with the keys of config.json
    weights = load_weights(directory)           # {"model.embed_tokens.weight": float64 [vocab, hidden], ...}
    forward(config, weights, ids)               # logits [n, vocab]
    greedy(config, weights, prompt_ids, 20)     # 20 ids
    logprobs(config, weights, ids)              # [n - 1], what LLM.score returns
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# Which length a dynamic-NTK base is computed from: None = the length of the ids given, an int = that length for
# every token, a sequence = one length per token. Ignored by all other RoPE types.
RopeLengths = int | Sequence[int] | None


def forward(
    config: dict, weights: dict, ids: Sequence[int], *, rope_seq_len: RopeLengths = None, tables=None
) -> np.ndarray:
    """Logits [n, vocab] in float64; row i is the prediction after ids[: i + 1].

    tables: (cos, sin), each [n, head_dim / 2], in place of the config's; say float32 ones, to tell the error of a
    model from the error of its RoPE.
    """
    assert config.get("hidden_act", "silu") == "silu", config["hidden_act"]
    eps = config.get("rms_norm_eps", 1e-6)
    embedding = weights["model.embed_tokens.weight"]
    ids = np.asarray(ids, dtype=np.int64)
    assert ids.ndim == 1 and ids.size and ids.min() >= 0 and ids.max() < len(embedding), ids

    cos, sin = tables or rope_tables(config, len(ids), rope_seq_len)
    x = embedding[ids]  # [n, hidden]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        x = x + attention(config, weights, name, rms_norm(x, weights[name + "input_layernorm.weight"], eps), cos, sin)
        x = x + mlp(config, weights, name, rms_norm(x, weights[name + "post_attention_layernorm.weight"], eps))
    x = rms_norm(x, weights["model.norm.weight"], eps)
    # When tied, an lm_head.weight that may stand in the file is not looked at.
    head = embedding if config.get("tie_word_embeddings", False) else weights["lm_head.weight"]
    return x @ head.T


def greedy(config: dict, weights: dict, prompt_ids: Sequence[int], n: int, *, rope_seq_len: RopeLengths = None) -> list:
    """The n ids that follow the prompt, each the argmax (lowest id on a tie); does not stop at the end-of-text id.

    Each step recomputes the whole prefix. With dynamic NTK the base therefore follows the prefix's length for all
    its tokens (Transformers with use_cache=False); pass `lengths_when_written` for what a cache makes of it.
    """
    ids = list(prompt_ids)
    for _ in range(n):
        lengths = rope_seq_len if rope_seq_len is None or isinstance(rope_seq_len, int) else rope_seq_len[: len(ids)]
        ids.append(int(forward(config, weights, ids, rope_seq_len=lengths)[-1].argmax()))
    return ids[len(prompt_ids) :]


def logprobs(config: dict, weights: dict, ids: Sequence[int], *, rope_seq_len: RopeLengths = None) -> np.ndarray:
    """log p(ids[i + 1] | ids[: i + 1]), float64 [n - 1]. A dynamic-NTK base is that of all n ids, as in Transformers.

    There the last id, which is only a target, counts in n; an engine that leaves it out must pass rope_seq_len.
    """
    logits = forward(config, weights, ids, rope_seq_len=rope_seq_len)[:-1]
    top = logits.max(axis=-1, keepdims=True)
    log_norm = top[:, 0] + np.log(np.exp(logits - top).sum(axis=-1))
    return logits[np.arange(len(logits)), np.asarray(ids)[1:]] - log_norm


def top_gaps(logits: np.ndarray) -> np.ndarray:
    """Distance [n] from the best to the second logit: how much error a greedy choice tolerates."""
    second, first = np.partition(logits, -2, axis=-1)[..., -2:].T
    return first - second


# The layers.


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def linear(weights: dict, name: str, x: np.ndarray, bias: bool) -> np.ndarray:
    y = x @ weights[name + ".weight"].T  # stored [out, in]
    # The config decides, not the file: a bias that is announced and missing is a KeyError here.
    return y + weights[name + ".bias"] if bias else y


def mlp(config: dict, weights: dict, layer: str, x: np.ndarray) -> np.ndarray:
    bias = config.get("mlp_bias", False)
    gate = linear(weights, layer + "mlp.gate_proj", x, bias)
    up = linear(weights, layer + "mlp.up_proj", x, bias)
    silu = gate * 0.5 * (1 + np.tanh(gate / 2))  # gate * sigmoid(gate), in a form that cannot overflow
    return linear(weights, layer + "mlp.down_proj", silu * up, bias)


def attention(config: dict, weights: dict, layer: str, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    n, head_dim = len(x), head_dim_of(config)
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    bias = config.get("attention_bias", False)  # of all four projections, the output's too
    # Each [heads or kv_heads, n, head_dim].
    q, k, v = (
        linear(weights, f"{layer}self_attn.{part}_proj", x, bias).reshape(n, -1, head_dim).transpose(1, 0, 2)
        for part in "qkv"
    )
    assert len(q) == heads and len(k) == len(v) == kv_heads, (q.shape, k.shape, v.shape)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)

    distance = np.arange(n)[:, None] - np.arange(n)[None, :]  # query position - key position
    visible = distance >= 0
    # Transformers' Llama ignores this key (though its cache, given it, wrongly drops keys); Mistral's obeys it.
    if config.get("model_type") == "mistral" and config.get("sliding_window"):
        visible &= distance < config["sliding_window"]

    out = np.empty((n, heads, head_dim))
    for head in range(heads):
        kv = head // (heads // kv_heads)  # neighbours share a KV head
        scores = np.where(visible, q[head] @ k[kv].T / math.sqrt(head_dim), -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = p @ v[kv] / p.sum(axis=-1, keepdims=True)
    return linear(weights, layer + "self_attn.o_proj", out.reshape(n, -1), bias)


# Rotary embeddings.


def head_dim_of(config: dict) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [heads, n, head_dim] by cos, sin [n, head_dim / 2]: dimension i pairs with i + head_dim / 2 (half-split)."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rope_tables(config: dict, n: int, rope_seq_len: RopeLengths = None) -> tuple[np.ndarray, np.ndarray]:
    """cos, sin [n, head_dim / 2] for positions 0 .. n - 1, times the amplitude that yarn wants."""
    lengths = np.broadcast_to(n if rope_seq_len is None else np.asarray(rope_seq_len), (n,))
    angles = np.empty((n, head_dim_of(config) // 2))
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        frequencies, amplitude = inverse_frequencies(config, int(length))
        angles[rows] = rows[:, None] * frequencies
    return np.cos(angles) * amplitude, np.sin(angles) * amplitude


def lengths_when_written(prompt_len: int, n: int) -> list[int]:
    """rope_seq_len of n tokens as Transformers' generate() makes them with a cache: a prompt in one piece, then one
    token at a time, where keys keep the rotation they were written with."""
    return [max(prompt_len, i + 1) for i in range(n)]


def rope_settings(config: dict) -> tuple[str, float, dict]:
    """(type, theta, the scaling's numbers) from any of the spellings.

    Old: rope_theta beside rope_scaling {"type" or "rope_type": ...}; when both keys stand there, "type" wins (4.57.6).
    New: all inside rope_parameters (Transformers 5; 4.57.6 ignores it); rope_scaling wins when both are given, and a
    rope_theta inside the dict that counts wins over the one at top level.
    """
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    scaling = old or new
    theta = scaling.get("rope_theta") or new.get("rope_theta") or config.get("rope_theta") or 10000.0
    return scaling.get("type") or scaling.get("rope_type") or "default", float(theta), scaling


def inverse_frequencies(config: dict, seq_len: int) -> tuple[np.ndarray, float]:
    """(radians per position [head_dim / 2], factor on cos and sin).

    Transformers keeps these, and position * frequency, in float32: about 6e-8 relative, so that its angles are off
    by 6e-8 * position radians in the fastest dimension. Compare with a tolerance that grows with the position.
    """
    kind, theta, scaling = rope_settings(config)
    dim = head_dim_of(config)
    exponents = np.arange(0, dim, 2) / dim
    trained = config.get("max_position_embeddings", 2048)
    plain = theta**-exponents

    if kind == "default":
        return plain, 1.0

    factor = scaling["factor"]
    if kind == "linear":
        return plain / factor, 1.0

    if kind == "dynamic":
        # Nothing changes up to max_position_embeddings (an original_max_position_embeddings is not looked at);
        # beyond, the base grows so that the slowest dimension is stretched as linear scaling would.
        length = max(seq_len, trained)
        stretch = factor * length / trained - (factor - 1)
        return (theta * stretch ** (dim / (dim - 2))) ** -exponents, 1.0

    if kind == "yarn":
        original = scaling.get("original_max_position_embeddings") or trained

        def dimension(rotations: float) -> float:
            """The pair (as a real number) that makes this many full turns within the original context."""
            return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low = dimension(scaling.get("beta_fast") or 32)
        high = dimension(scaling.get("beta_slow") or 1)
        if scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        # The upper bound is dim - 1 although there are dim / 2 pairs: so it stands in the paper's code.
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        # 0: turns often enough to know absolute angles, kept; 1: never completes a turn, interpolated.
        ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
        return plain * (1 - ramp) + plain / factor * ramp, yarn_amplitude(scaling)

    if kind == "llama3":
        original = scaling["original_max_position_embeddings"]
        slow, fast = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = original * plain / (2 * math.pi)  # full turns within the original context
        keep = np.clip((turns - slow) / (fast - slow), 0, 1)
        return plain * keep + plain / factor * (1 - keep), 1.0

    raise ValueError(f"unknown rope type {kind!r}")


def yarn_amplitude(scaling: dict) -> float:
    """Attention temperature, folded into cos and sin of queries and keys alike (so scores get its square)."""
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]

    def mscale(weight: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * weight * math.log(scaling["factor"]) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


# Files.


def load_config(directory) -> dict:
    return json.loads((Path(directory) / "config.json").read_text())


def load_weights(directory) -> dict[str, np.ndarray]:
    """Every tensor of model.safetensors, or of the shards that model.safetensors.index.json names, in float64."""
    directory = Path(directory)
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return read_safetensors(directory / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    shards = {file: read_safetensors(directory / file) for file in sorted(set(weight_map.values()))}
    return {name: shards[file][name] for name, file in weight_map.items()}


def read_safetensors(path) -> dict[str, np.ndarray]:
    """u64 header length, JSON {name: {dtype, shape, data_offsets}}, then the data; all little-endian."""
    raw = Path(path).read_bytes()
    header_len = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + header_len])
    data = memoryview(raw)[8 + header_len :]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        flat = to_float64(data[begin:end], entry["dtype"])
        assert flat.size == math.prod(entry["shape"]), (path, name, entry)
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


def to_float64(data, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        # The upper half of a float32.
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float64)
