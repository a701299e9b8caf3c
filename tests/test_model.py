"""The model through the engine against the float64 oracle; and the central law, that the way there changes nothing.

Tolerances. Logits of these checkpoints have a spread of 4 and reach 17. In float32 the engine differs from float64 by
rounding in the products and by RoPE tables rounded to float32 (6e-8 of a cosine): measured 5e-5 at most, accepted 2e-4
(another CPU sums in another order), where the smallest mistake changes more than 0.1. In bfloat16 (8 bits) and float16
(11) the activations are rounded some twenty times on the way. Against the oracle of the *rounded weights* the error,
in parts of the spread, was 0.9 % in the mean and 9 % at most, and 0.11 % and 1.0 %: accepted three times as much. A
greedy id may differ only where the oracle's two best logits are nearer than twice the tolerance.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle.checkpoint import DEFAULTS, make_checkpoint
from oracle.llama64 import forward, greedy, load_config, load_weights, logprobs, rope_tables, top_gaps

from engine import LLM, ConfigError, ModelFormatError, SamplingParams
from engine.scheduler import Schedule
from memory.prefix import CachedSequence
from models.llama.config import LlamaConfig
from models.llama.rope import rope_table

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
STORIES, SHARDED = DATA / "stories260k-hf", DATA / "stories260k-hf-sharded"
needs_stories = pytest.mark.skipif(not STORIES.is_dir() or not SHARDED.is_dir(), reason=f"no {STORIES}[-sharded]")

LENGTH = 192  # max_model_len of the tiny models
TOLERANCE = 2e-4


def engine(path, **settings):
    defaults = {"dtype": "float32", "device": "cpu", "threads": 1, "max_model_len": LENGTH, "skip_tokenizer_init": True}
    return LLM(path, **{**defaults, **settings})


def random_ids(n, vocab_size=352, seed=0):
    return np.random.default_rng(seed).integers(3, vocab_size, n).tolist()


def greedy_params(n):
    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)


@torch.inference_mode()
def all_logits(llm, ids, chunk):
    """Logits after every token, [n, vocab_size], through the real cache, `chunk` tokens at a time."""
    request = llm._request(list(ids), SamplingParams(), scored=True)
    rows = []
    for start in range(0, len(ids), chunk):
        count = min(chunk, len(ids) - start)
        llm._cache.reserve(request.sequence, start + count)
        hidden = llm._runner._hidden(Schedule([request], [count], int(count == 1)))
        rows.append(llm._model.logits(hidden))
        llm._cache.commit(request.sequence, count)
    llm._cache.check([request.sequence])
    llm._cache.free(request.sequence)
    return torch.cat(rows).numpy()


def assert_greedy(ids, prompt, config, weights, tolerance, **rope):
    """The ids are the oracle's choices after those before them, or its two best are too near to tell."""
    logits = forward(config, weights, [*prompt, *ids[:-1]], **rope)[len(prompt) - 1 :]
    chosen = logits[np.arange(len(ids)), ids]
    assert (logits.max(axis=-1) - chosen <= 2 * tolerance).all(), (logits.argmax(axis=-1).tolist(), ids)


# Against float64.

# Every head_dim, every group, tied and not, with biases and without; not their product.
SHAPES = {
    "dim8-group1-tied": {
        "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True,
    },
    "dim8-group8": {"head_dim": 8, "num_attention_heads": 8, "num_key_value_heads": 1},
    "dim16-group4-bias": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True},
    "dim16-no-head_dim-key": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "dim64-group1-mlp_bias": {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "mlp_bias": True},
    "dim64-group3-tied": {
        "head_dim": 64, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
    "dim80-group5": {"head_dim": 80, "num_attention_heads": 5, "num_key_value_heads": 1},
    "dim96-group3-biases": {
        "head_dim": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True,
    },
    "dim128-group4": {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 1},
    "dim128-group8-tied-biases": {
        "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "one-layer-eps-theta": {"num_hidden_layers": 1, "rms_norm_eps": 0.1, "rope_theta": 500.0},
}  # fmt: skip

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, 64),
    "linear-type": ({"type": "linear", "factor": 3.0}, 64),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, 64),
    "dynamic-within": ({"rope_type": "dynamic", "factor": 4.0}, 512),
    "yarn": (YARN, 256),
    "yarn-all-keys": (
        {**YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}, 256,
    ),
    "yarn-attention_factor": ({**YARN, "attention_factor": 1.3}, 256),
    "llama3": (LLAMA3, 384),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_scores_and_greedy_ids_are_the_oracles(tmp_path, shape):
    config = make_checkpoint(tmp_path, tokenizer=False, **SHAPES[shape])
    weights, ids = load_weights(tmp_path), random_ids(100)
    expected = forward(config, weights, ids)
    assert top_gaps(expected).min() > 0 and expected.std() > 1
    llm = engine(tmp_path)
    for chunk in (100, 33):
        np.testing.assert_allclose(all_logits(llm, ids, chunk), expected, rtol=0, atol=TOLERANCE)
    (scores,) = llm.score([ids])
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, logprobs(config, weights, ids), rtol=0, atol=TOLERANCE)
    (output,) = llm.generate([ids[:20]], greedy_params(10))
    assert output.token_ids == greedy(config, weights, ids[:20], 10)


@pytest.mark.parametrize("given", ["config", "argument"])
@pytest.mark.parametrize("case", SCALINGS)
def test_scaled_rope_is_the_oracles(tmp_path, case, given):
    scaling, trained = SCALINGS[case]
    config = make_checkpoint(tmp_path, tokenizer=False, rope_scaling=scaling, max_position_embeddings=trained)
    if given == "argument":
        make_checkpoint(tmp_path, tokenizer=False, max_position_embeddings=trained)
    weights, ids = load_weights(tmp_path), random_ids(LENGTH)
    # Dynamic scaling: the base is that of max_model_len from the first token on.
    expected = forward(config, weights, ids, rope_seq_len=LENGTH)
    llm = engine(tmp_path, rope_scaling=scaling if given == "argument" else None)
    assert llm.max_model_len == LENGTH
    np.testing.assert_allclose(all_logits(llm, ids, 64), expected, rtol=0, atol=TOLERANCE)
    (output,) = llm.generate([ids[:90]], greedy_params(6))
    assert output.token_ids == greedy(config, weights, ids[:90], 6, rope_seq_len=LENGTH)
    if case != "dynamic-within":
        plain = forward({**config, "rope_scaling": None}, weights, ids)
        assert np.abs(plain - expected).max() > 1000 * TOLERANCE, "the case can not fail"


REAL_LLAMA3 = {**LLAMA3, "original_max_position_embeddings": 8192}
REAL_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
# scaling, head_dim, rope_theta, max_position_embeddings, length asked for
REAL_ROPE = {
    "llama-2": (None, 128, 1e4, 4096, 4096),
    "llama-3": (None, 128, 5e5, 8192, 8192),
    "llama-3.1": (REAL_LLAMA3, 128, 5e5, 131072, 20000),
    "linear": ({"rope_type": "linear", "factor": 8.0}, 128, 1e4, 4096, 20000),
    "dynamic": ({"rope_type": "dynamic", "factor": 8.0}, 128, 1e4, 4096, 20000),
    "yarn-64k": (REAL_YARN, 128, 1e4, 32768, 20000),
    "yarn-no-original": ({"rope_type": "yarn", "factor": 4.0}, 64, 1e4, 2048, 8192),
    "yarn-not-truncated": ({**REAL_YARN, "truncate": False}, 96, 1e4, 32768, 300),
    "yarn-betas": ({**REAL_YARN, "beta_fast": 20, "beta_slow": 3}, 80, 1e4, 32768, 300),
    "yarn-mscale": ({**REAL_YARN, "mscale": 0.7, "mscale_all_dim": 1.2}, 128, 1e4, 32768, 300),
    "yarn-one-mscale": ({**REAL_YARN, "mscale": 0.7}, 128, 1e4, 32768, 300),
    "yarn-attention_factor": (
        {**REAL_YARN, "attention_factor": 0.9, "mscale": 2, "mscale_all_dim": 1}, 64, 1e4, 32768, 300,
    ),
    "yarn-small-base": (REAL_YARN, 16, 30.0, 32768, 300),
    "yarn-tiny-context": ({**REAL_YARN, "original_max_position_embeddings": 1}, 16, 1e4, 8, 8),
}  # fmt: skip


@pytest.mark.parametrize("case", REAL_ROPE)
def test_rope_tables_are_the_oracles_at_real_sizes(case):
    scaling, head_dim, theta, trained, length = REAL_ROPE[case]
    config = {**DEFAULTS, "head_dim": head_dim, "rope_theta": theta, "max_position_embeddings": trained}
    config["rope_scaling"] = scaling
    table = rope_table(LlamaConfig.from_dict(config), length)
    assert table.shape == (length, head_dim) and table.dtype == torch.float32
    # Both in float64: only the rounding of the result to float32 is between them.
    np.testing.assert_allclose(table.numpy(), np.hstack(rope_tables(config, length)), rtol=0, atol=2e-7)


def test_a_context_beyond_the_trained_one_needs_scaling(tmp_path):
    make_checkpoint(tmp_path, tokenizer=False, max_position_embeddings=64)
    assert engine(tmp_path, max_model_len=None).max_model_len == 64
    with pytest.raises(ConfigError, match=r"max_model_len 65 .* 64 tokens"):
        engine(tmp_path, max_model_len=65)
    stretched = engine(tmp_path, max_model_len=None, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert stretched.max_model_len == 128


def test_mistral_is_llama_within_its_window(tmp_path):
    overrides = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    config = make_checkpoint(tmp_path, tokenizer=False, **overrides)
    llm = engine(tmp_path, max_model_len=None)
    assert llm.max_model_len == 64
    ids = random_ids(64)
    np.testing.assert_allclose(
        all_logits(llm, ids, 30), forward(config, load_weights(tmp_path), ids), rtol=0, atol=TOLERANCE
    )


# Mean and greatest error in parts of the logits' spread, see above.
ROUNDED = {"bfloat16": (0.027, 0.27), "float16": (0.0033, 0.03)}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("stored", ["same", "float32"])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_half_precision_stays_near(tmp_path, dtype, stored, tied):
    overrides = {"tie_word_embeddings": tied, "attention_bias": True, "num_attention_heads": 6, "head_dim": 64}
    overrides |= {"num_key_value_heads": 2, "tokenizer": False}
    config = make_checkpoint(tmp_path / "rounded", dtype=dtype, **overrides)
    if stored == "float32":
        make_checkpoint(tmp_path / "float32", **overrides)
    llm = engine(tmp_path / ("rounded" if stored == "same" else stored), dtype=dtype, max_num_batched_tokens=7)
    weights, ids = load_weights(tmp_path / "rounded"), random_ids(100)
    expected = forward(config, weights, ids)
    mean, greatest = (share * expected.std() for share in ROUNDED[dtype])
    for chunk in (1, 33):
        error = np.abs(all_logits(llm, ids, chunk) - expected)
        assert error.mean() <= mean and error.max() <= greatest, (error.mean(), error.max(), expected.std())
    (scores,) = llm.score([ids])
    assert np.abs(scores - logprobs(config, weights, ids)).mean() <= mean
    (output,) = llm.generate([ids[:20]], greedy_params(10))
    assert_greedy(output.token_ids, ids[:20], config, weights, greatest)


def test_auto_is_bfloat16_where_the_cpu_has_it(tmp_path):
    make_checkpoint(tmp_path, tokenizer=False)
    has_it = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert engine(tmp_path, dtype="auto")._model.dtype == (torch.bfloat16 if has_it else torch.float32)


# The central law.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    config = make_checkpoint(path, tokenizer=False)
    return path, config, load_weights(path)


PROMPTS = [random_ids(n, seed=n) for n in (1, 2, 7, 15, 16, 17, 63, 64, 65, 100, 150)]


@pytest.fixture(scope="module")
def alone(checkpoint):
    """(greedy ids, their log-probabilities, scores) of each prompt, computed by itself in one chunk."""
    llm = engine(checkpoint[0])
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
    outputs = [llm.generate([prompt], params)[0] for prompt in PROMPTS]
    scores = [llm.score([prompt])[0] for prompt in PROMPTS]
    return [output.token_ids for output in outputs], [chosen_logprobs(output) for output in outputs], scores


def chosen_logprobs(output):
    return [row[token] for row, token in zip(output.logprobs, output.token_ids, strict=True)]


def assert_as_alone(llm, alone):
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for output, ids, values in zip(outputs, *alone[:2], strict=True):
        assert output.token_ids == ids
        np.testing.assert_allclose(chosen_logprobs(output), values, rtol=0, atol=TOLERANCE)
    for score, expected in zip(llm.score(PROMPTS), alone[2], strict=True):
        np.testing.assert_allclose(score, expected, rtol=0, atol=TOLERANCE)
    llm._cache.check([])
    assert llm.stats()["kv_cache_usage"] == 0


def test_alone_is_what_the_oracle_says(checkpoint, alone):
    _, config, weights = checkpoint
    for prompt, ids, scores in zip(PROMPTS, alone[0], alone[2], strict=True):
        assert len(ids) == 20 and len(scores) == len(prompt) - 1
        assert_greedy(ids, prompt, config, weights, TOLERANCE)
        np.testing.assert_allclose(scores, logprobs(config, weights, prompt), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("budget", [1, 7, 64, 512])
def test_chunking_pages_and_company_change_nothing(checkpoint, alone, budget, page_size):
    llm = engine(
        checkpoint[0],
        max_num_batched_tokens=budget,
        page_size=page_size,
        kv_cache_memory=len(PROMPTS) * LENGTH * 1024,  # all prompts at once: a token has 512 bytes
    )
    assert llm.stats()["kv_bytes_per_token"] == 512
    assert_as_alone(llm, alone)


@pytest.mark.parametrize(("memory", "max_num_seqs"), [(LENGTH * 512, 64), (3 * LENGTH * 512, 64), (LENGTH * 8192, 2)])
def test_waiting_for_room_changes_nothing(checkpoint, alone, memory, max_num_seqs):
    llm = engine(checkpoint[0], kv_cache_memory=memory, max_num_seqs=max_num_seqs, page_size=16)
    assert_as_alone(llm, alone)


@pytest.mark.parametrize("budget", [7, 512])
def test_a_fragmented_pool_changes_nothing(checkpoint, alone, budget):
    llm = engine(checkpoint[0], max_num_batched_tokens=budget, page_size=16, kv_cache_memory=4 * LENGTH * 1024)
    cache = llm._cache
    # Every other frame of the pool belongs to somebody else: no two pages can lie side by side.
    held = []
    for _ in range(cache.config.num_pages):
        held.append(CachedSequence())
        cache.reserve(held[-1], 1)
    held.sort(key=lambda sequence: cache._frames._start[sequence.pages[0]])
    for sequence in held[::2]:
        cache.free(sequence)
    held = held[1::2]
    request = llm._request(list(PROMPTS[-1]), greedy_params(1))
    cache.reserve(request.sequence, len(PROMPTS[-1]))
    assert len(cache.plan([request.sequence], [len(PROMPTS[-1])], 0).pieces[0]) == 10
    cache.free(request.sequence)

    # As assert_as_alone, one request at a time: admission counts on pages that are not there.
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
    for prompt, ids, values, scores in zip(PROMPTS, *alone, strict=True):
        (output,) = llm.generate([prompt], params)
        assert output.token_ids == ids
        np.testing.assert_allclose(chosen_logprobs(output), values, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(llm.score([prompt])[0], scores, rtol=0, atol=TOLERANCE)
        cache.check(held)


def test_what_the_cache_held_before_changes_nothing(checkpoint, alone):
    llm = engine(checkpoint[0], kv_cache_memory=4 * LENGTH * 512, page_size=16)
    for layer in llm._cache.layers:
        layer.k.fill_(torch.nan)
        layer.v.fill_(torch.nan)
    assert_as_alone(llm, alone)


def test_an_abort_at_any_step_leaves_the_others_alone(checkpoint, alone):
    llm = engine(checkpoint[0], max_num_batched_tokens=16, kv_cache_memory=4 * LENGTH * 1024, page_size=16)
    for steps in (0, 1, 3, 6, 12, 18):
        keep = llm.add_request(PROMPTS[8], greedy_params(20))
        victims = [llm.add_request(PROMPTS[i], greedy_params(20)) for i in (9, 4)]
        outputs = {}
        for step in range(200):
            if step == steps:
                for victim in victims:
                    llm.abort(victim)
            for output in llm.step():
                outputs[output.request_id] = output
            if outputs.get(keep) and outputs[keep].finish_reason:
                break
        assert outputs[keep].token_ids == alone[0][8]
        assert llm.step() == []
        llm._cache.check([])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_chunking_changes_half_precision_by_its_rounding_only(checkpoint, dtype, budget):
    path, config, weights = checkpoint
    mean, greatest = (share * 4 for share in ROUNDED[dtype])  # the spread of the logits
    ids = PROMPTS[-1]
    whole, chunked = (engine(path, dtype=dtype, max_num_batched_tokens=b) for b in (512, budget))
    difference = np.abs(whole.score([ids])[0] - chunked.score([ids])[0])
    assert difference.mean() <= mean and difference.max() <= 2 * greatest
    for llm in (whole, chunked):
        for output, prompt in zip(llm.generate(PROMPTS, greedy_params(4)), PROMPTS, strict=True):
            assert_greedy(output.token_ids, prompt, config, weights, greatest)


def test_scores_of_one_and_two_tokens(checkpoint):
    llm = engine(checkpoint[0])
    one, two = llm.score([[5], [5, 9]])
    assert one.shape == (0,) and two.shape == (1,) and one.dtype == two.dtype == np.float32


def test_the_longest_prompt_fills_the_context(checkpoint):
    path, config, weights = checkpoint
    llm = engine(path)
    ids = random_ids(LENGTH)
    np.testing.assert_allclose(llm.score([ids])[0], logprobs(config, weights, ids), rtol=0, atol=TOLERANCE)
    (output,) = llm.generate([ids[:-1]], greedy_params(50))
    assert output.finish_reason == "length"
    assert output.token_ids == greedy(config, weights, ids[:-1], 1)


# A real checkpoint.


@needs_stories
@pytest.mark.parametrize("budget", [1, 512])
def test_stories_greedy_ids(budget):
    expected = json.loads((STORIES / "expected_greedy.json").read_text())
    llm = engine(STORIES, max_model_len=None, max_num_batched_tokens=budget, skip_tokenizer_init=False)
    (output,) = llm.generate([expected["prompt_ids"]], greedy_params(255))
    assert len(output.token_ids) == 255
    assert output.token_ids == expected["greedy_ids"]
    assert output.text.startswith("Once upon a time")


@needs_stories
@pytest.mark.parametrize("chunk", [1, 50, 255])
def test_stories_logits(chunk):
    expected = np.load(STORIES / "expected_logits_f64.npz")
    logits = all_logits(engine(STORIES, max_model_len=None), expected["ids"].tolist(), chunk)
    assert np.abs(logits - expected["logits"]).max() <= 1e-4


@needs_stories
def test_stories_sharded_bf16():
    ids = np.load(STORIES / "expected_logits_f64.npz")["ids"].tolist()
    config, weights = load_config(SHARDED), load_weights(SHARDED)
    expected = logprobs(config, weights, ids)
    # Computed in float32, the rounded weights are the only difference, and the oracle has it too.
    (exact,) = engine(SHARDED, max_model_len=None).score([ids])
    np.testing.assert_allclose(exact, expected, rtol=0, atol=1e-4)
    (scores,) = engine(SHARDED, max_model_len=None, dtype="bfloat16").score([ids])
    assert np.abs(scores - expected).mean() < 0.03
    # The text is as likely as it was to the exact model, in nats per token.
    exact_model = logprobs(load_config(STORIES), load_weights(STORIES), ids)
    assert abs(scores.mean() - exact_model.mean()) < 0.03


# Models that do not fit their config.


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"num_hidden_layers": 3}, r"missing: model\.layers\.2\..*q_proj"),
        ({"num_hidden_layers": 1}, r"no place for: model\.layers\.1\."),
        ({"intermediate_size": 96}, r"\(112, 64\).*\(96, 64\)"),
        ({"num_key_value_heads": 4}, r"k_proj.*\(32, 64\).*\(64, 64\)"),
        ({"vocab_size": 353}, r"\(352, 64\).*\(353, 64\)"),
        ({"attention_bias": True}, r"missing: .*q_proj\.bias"),
        ({"tie_word_embeddings": True}, None),  # its own head is not looked at
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_config_that_disagrees_with_the_tensors(tmp_path, change, pattern):
    config = make_checkpoint(tmp_path, tokenizer=False)
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    if pattern is not None:
        with pytest.raises(ModelFormatError, match=pattern):
            engine(tmp_path)
        return
    ids = random_ids(30)
    expected = forward({**config, **change}, load_weights(tmp_path), ids)
    np.testing.assert_allclose(all_logits(engine(tmp_path), ids, 30), expected, rtol=0, atol=TOLERANCE)
