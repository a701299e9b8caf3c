"""The oracle itself against what nobody of ours computed: a real checkpoint, the safetensors library, Transformers."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from oracle.checkpoint import DROP, make_checkpoint, random_weights, to_bfloat16
from oracle.llama64 import (
    forward,
    greedy,
    inverse_frequencies,
    lengths_when_written,
    load_config,
    load_weights,
    logprobs,
    read_safetensors,
    top_gaps,
)
from safetensors.numpy import load_file, save_file

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
STORIES = DATA / "stories260k-hf"
SHARDED = DATA / "stories260k-hf-sharded"
TABLES_SHA256 = "daa583f329d4c0e0970c0b31ea978ebecdcfa5c6669a5ad37d0210ddff271f63"
needs_stories = pytest.mark.skipif(not STORIES.is_dir() or not SHARDED.is_dir(), reason=f"no {STORIES}[-sharded]")


# A real checkpoint.


@needs_stories
def test_stories_greedy_ids():
    expected = json.loads((STORIES / "expected_greedy.json").read_text())
    config, weights = load_config(STORIES), load_weights(STORIES)
    prompt, answer = expected["prompt_ids"], expected["greedy_ids"]
    assert len(answer) == 255
    assert greedy(config, weights, prompt, 40) == answer[:40]
    # All of them in one pass: if each is the best choice after those before it, greedy decoding finds them in turn.
    best = forward(config, weights, prompt + answer[:-1]).argmax(axis=-1)
    assert best[len(prompt) - 1 :].tolist() == answer


@needs_stories
def test_stories_logits():
    expected = np.load(STORIES / "expected_logits_f64.npz")  # ids [255], logits [255, 512]
    logits = forward(load_config(STORIES), load_weights(STORIES), expected["ids"])
    assert logits.dtype == np.float64
    # Not nearer than 7.6e-7, because those were computed with cos and sin in float32: see the next test.
    assert np.abs(logits - expected["logits"]).max() <= 1e-6 * np.abs(expected["logits"]).max()


@needs_stories
def test_stories_logits_with_float32_rope():
    torch = pytest.importorskip("torch")
    expected = np.load(STORIES / "expected_logits_f64.npz")
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 8, 2, dtype=torch.float32) / 8)
    angles = torch.outer(torch.arange(255, dtype=torch.float32), frequencies)
    cos, sin = angles.cos().numpy(), angles.sin().numpy()
    # One unit in the last place of one cosine would cost the nine digits; another CPU's may round another way.
    if hashlib.sha256(cos.tobytes() + sin.tobytes()).hexdigest() != TABLES_SHA256:
        pytest.skip("this machine's float32 cos and sin are not those the logits were computed with")
    tables = cos.astype(np.float64), sin.astype(np.float64)
    logits = forward(load_config(STORIES), load_weights(STORIES), expected["ids"], tables=tables)
    assert np.abs(logits - expected["logits"]).max() <= 1e-9 * np.abs(expected["logits"]).max()


@needs_stories
def test_stories_sharded_bf16_is_the_same_model_rounded():
    config, rounded, exact = load_config(SHARDED), load_weights(SHARDED), load_weights(STORIES)
    assert not config["tie_word_embeddings"]
    assert rounded.keys() == exact.keys() | {"lm_head.weight"}
    np.testing.assert_array_equal(rounded["lm_head.weight"], rounded["model.embed_tokens.weight"])
    for name, weight in exact.items():
        bits = to_bfloat16(weight.astype(np.float32)).astype(np.uint32) << 16
        np.testing.assert_array_equal(rounded[name], bits.view(np.float32), err_msg=name)
    ids = np.load(STORIES / "expected_logits_f64.npz")["ids"][:64]
    agree = forward(config, rounded, ids).argmax(-1) == forward(load_config(STORIES), exact, ids).argmax(-1)
    assert agree.mean() > 0.9


# Files.


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_header_parser_reads_what_safetensors_writes(tmp_path, dtype):
    rng = np.random.default_rng(0)
    shapes = {"scalar": (), "empty": (0, 3), "vector": (7,), "cube": (2, 3, 5)}
    tensors = {name: np.asarray(rng.standard_normal(shape), dtype=dtype) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    read = read_safetensors(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == np.float64 and read[name].shape == tensor.shape
        np.testing.assert_array_equal(read[name], tensor.astype(np.float64))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_checkpoint_round_trip(tmp_path, dtype, shards):
    config = make_checkpoint(tmp_path, dtype=dtype, shards=shards, attention_bias=True, mlp_bias=True)
    assert load_config(tmp_path) == config
    read, written = load_weights(tmp_path), random_weights(config, seed=0)
    assert read.keys() == written.keys()
    # Half a unit in the last place of 24, 11 and 8 significant bits; float16 also has a smallest step.
    step = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    for name, weight in written.items():
        assert read[name].shape == weight.shape
        assert (np.abs(read[name] - weight) <= np.maximum(step * np.abs(weight), 2.0**-25 * (step > 0))).all(), name
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == shards
    if dtype != "bfloat16":
        assert {name for file in files for name in load_file(file)} == read.keys()


def test_bfloat16_by_hand_is_what_torch_reads(tmp_path):
    torch = pytest.importorskip("torch")
    safetensors_torch = pytest.importorskip("safetensors.torch")
    make_checkpoint(tmp_path, dtype="bfloat16", tokenizer=False)
    ours, theirs = load_weights(tmp_path), safetensors_torch.load_file(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == torch.bfloat16
        np.testing.assert_array_equal(ours[name], tensor.double().numpy())
    # Ties to even, upwards and downwards, and a carry into the exponent.
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, 2 - 2**-9, -1 - 2**-8, 0.0, -0.0], dtype=np.float32)
    theirs = torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(to_bfloat16(x), theirs)


def test_checkpoint_is_reproducible_and_overridable(tmp_path):
    config = make_checkpoint(tmp_path / "a", seed=3, num_key_value_heads=DROP, rope_scaling=DROP)
    assert "num_key_value_heads" not in config and "rope_scaling" not in config
    make_checkpoint(tmp_path / "b", seed=3, num_key_value_heads=DROP, rope_scaling=DROP)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    # No such key: as many KV heads as heads.
    assert load_weights(tmp_path / "a")["model.layers.0.self_attn.k_proj.weight"].shape == (64, 64)


def test_tokenizer_has_llama_conventions(tmp_path):
    config = make_checkpoint(tmp_path)
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert tokenizer.vocab_size() == config["vocab_size"]
    assert [tokenizer.id_to_piece(i) for i in range(4)] == ["<unk>", "<s>", "</s>", "<0x00>"]
    assert tokenizer.encode("the")[0] == tokenizer.piece_to_id("▁the") > 258
    assert tokenizer.encode("12", out_type=str) == ["▁", "1", "2"]
    assert tokenizer.encode("é", out_type=str) == ["▁", "<0xC3>", "<0xA9>"]
    for text in ("The  cat\n\n said: no ", "naïve 日本 🙂", " x", "</s>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


# The model.


@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 96, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8])
def test_grouped_heads_are_repeated_heads(tmp_path, head_dim, group):
    kv_heads, heads = 2, 2 * group
    config = make_checkpoint(
        tmp_path, tokenizer=False, head_dim=head_dim, num_attention_heads=heads, num_key_value_heads=kv_heads
    )
    weights = load_weights(tmp_path)
    full = dict(weights)
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            full[name] = weight.reshape(kv_heads, head_dim, -1).repeat(group, axis=0).reshape(heads * head_dim, -1)
    ids = np.random.default_rng(0).integers(0, config["vocab_size"], 12)
    logits = forward(config, weights, ids)
    assert logits.shape == (12, config["vocab_size"])
    repeated = forward({**config, "num_key_value_heads": heads}, full, ids)
    np.testing.assert_allclose(logits, repeated, rtol=0, atol=1e-11)
    # Causal: what follows changes nothing.
    np.testing.assert_allclose(logits[:5], forward(config, weights, ids[:5]), rtol=0, atol=1e-11)


def test_logits_are_spread_and_depend_on_order(tmp_path):
    config = make_checkpoint(tmp_path, tokenizer=False)
    weights = load_weights(tmp_path)
    ids = np.random.default_rng(0).integers(0, config["vocab_size"], 100)
    logits = forward(config, weights, ids)
    assert 3 < logits.std() < 5
    assert np.median(top_gaps(logits)) > 0.5 and top_gaps(logits).min() > 1e-3
    swapped = ids.copy()
    swapped[[10, 20]] = ids[[20, 10]]
    assert np.abs(forward(config, weights, swapped)[-1] - logits[-1]).max() > 0.1
    assert top_gaps(np.array([[1.0, 5.0, 2.0], [3.0, 3.0, -1.0]])).tolist() == [3.0, 0.0]


def test_logprobs_and_greedy_agree_with_forward(tmp_path):
    config = make_checkpoint(tmp_path, tokenizer=False, tie_word_embeddings=True)
    weights = load_weights(tmp_path)
    assert "lm_head.weight" not in weights
    ids = [1, 17, 300, 44, 5]
    logits = forward(config, weights, ids)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(logprobs(config, weights, ids), [np.log(p[i, ids[i + 1]]) for i in range(4)])
    assert greedy(config, weights, ids, 1) == [logits[-1].argmax()]
    assert greedy(config, weights, ids, 3)[1:] == greedy(config, weights, ids + greedy(config, weights, ids, 1), 2)


# RoPE. The numbers below are Transformers 4.57.6's own functions, run with their float32 replaced by float64.

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048}
YARN_ALL = {**YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# scaling, seq_len, theta, max_position_embeddings, frequencies of head_dim 16, amplitude
FROZEN = {
    "plain": (
        None, 200, 1e4, 64,
        [1.0, 0.316227766017, 0.1, 0.0316227766017, 0.01, 0.00316227766017, 0.001, 0.000316227766017], 1.0,
    ),
    "linear": (
        {"rope_type": "linear", "factor": 4.0}, 200, 1e4, 64,
        [0.25, 0.0790569415042, 0.025, 0.00790569415042, 0.0025, 0.000790569415042, 0.00025, 7.90569415042e-05], 1.0,
    ),
    "dynamic-within": (
        {"rope_type": "dynamic", "factor": 4.0}, 64, 1e4, 64,
        [1.0, 0.316227766017, 0.1, 0.0316227766017, 0.01, 0.00316227766017, 0.001, 0.000316227766017], 1.0,
    ),
    "dynamic-past": (
        {"rope_type": "dynamic", "factor": 4.0}, 200, 1e4, 64,
        [1.0, 0.229258369443, 0.0525593999595, 0.0120496823336, 0.0027624905241, 0.000633324073155, 0.00014519484434,
         3.32871332649e-05], 1.0,
    ),
    "yarn": (
        YARN, 200, 1e4, 16384,
        [1.0, 0.316227766017, 0.1, 0.0247052942201, 0.005625, 0.00108703294568, 0.000125, 3.95284707521e-05],
        1.2079441541679836,
    ),
    "yarn-all-keys": (
        YARN_ALL, 200, 1e4, 16384,
        [1.0, 0.316227766017, 0.1, 0.0257716170106, 0.0033052224022, 0.000395284707521, 0.000125, 3.95284707521e-05],
        0.9167912505456107,
    ),
    "llama3": (
        LLAMA3, 200, 5e5, 131072,
        [1.0, 0.193922744749, 0.0376060309309, 0.00729266473722, 0.000524846160993, 3.42810219595e-05,
         6.64786987118e-06, 1.28917317215e-06], 1.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("spelling", ["rope_type", "type", "rope_parameters"])
@pytest.mark.parametrize("case", FROZEN)
def test_frequencies_are_those_of_transformers(case, spelling):
    scaling, seq_len, theta, trained, frequencies, amplitude = FROZEN[case]
    config = {"head_dim": 16, "max_position_embeddings": trained}
    if spelling == "rope_parameters":
        config |= {"rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": theta}}
    elif scaling and spelling == "type":
        old = {key: value for key, value in scaling.items() if key != "rope_type"}
        config |= {"rope_theta": theta, "rope_scaling": {**old, "type": scaling["rope_type"]}}
    else:
        config |= {"rope_theta": theta, "rope_scaling": scaling}
    ours, our_amplitude = inverse_frequencies(config, seq_len)
    np.testing.assert_allclose(ours, frequencies, rtol=1e-11)
    assert our_amplitude == pytest.approx(amplitude, rel=1e-14)


def test_dynamic_base_follows_the_length_asked_for(tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    config = make_checkpoint(tmp_path, tokenizer=False, rope_scaling=scaling, max_position_embeddings=16)
    weights = load_weights(tmp_path)
    ids = np.random.default_rng(0).integers(0, config["vocab_size"], 40).tolist()
    plain = {**config, "rope_scaling": None}
    np.testing.assert_array_equal(forward(config, weights, ids[:16]), forward(plain, weights, ids[:16]))
    whole = forward(config, weights, ids)
    np.testing.assert_array_equal(whole, forward(config, weights, ids, rope_seq_len=40))
    assert np.abs(whole - forward(plain, weights, ids)).max() > 0.1

    # With a cache, what was written before the context grew is as the plain model wrote it.
    written = forward(config, weights, ids, rope_seq_len=lengths_when_written(10, 40))
    np.testing.assert_array_equal(written[:16], forward(plain, weights, ids)[:16])
    assert np.abs(written[-1] - whole[-1]).max() > 0.1
    assert lengths_when_written(3, 5) == [3, 3, 3, 4, 5]
    assert greedy(config, weights, ids[:16], 1, rope_seq_len=lengths_when_written(16, 16)) == [written[15].argmax()]


def test_sliding_window_is_mistrals_only(tmp_path):
    config = make_checkpoint(tmp_path, tokenizer=False, sliding_window=4, num_hidden_layers=1)
    weights = load_weights(tmp_path)
    ids = list(range(1, 11))
    window = forward({**config, "model_type": "mistral"}, weights, ids)
    full = forward(config, weights, ids)
    np.testing.assert_allclose(window[:4], full[:4], rtol=0, atol=1e-11)
    assert np.abs(window[4:] - full[4:]).max() > 0.1
    # One layer sees itself and three more: the first token no longer matters to the fifth.
    changed = forward({**config, "model_type": "mistral"}, weights, [99, *ids[1:]])
    np.testing.assert_allclose(changed[4:], window[4:], rtol=0, atol=1e-11)
