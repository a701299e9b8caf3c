"""Conversion of GGUF files and of Meta's folders: the same model comes out, or a named error and nothing else."""

import base64
import itertools
import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import gguf_writer as w
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle.checkpoint import DEFAULTS, TEXT, random_weights, train_tokenizer
from oracle.llama64 import load_weights, logprobs, to_float64

from engine import LLM
from engine.tokenizer import load_tokenizer
from models.checkpoint import open_checkpoint
from models.errors import ConfigError, ModelFormatError
from tools import convert_gguf, convert_pth, convert_writer
from tools.convert import ConvertError, TargetTakenError, convert, main
from tools.convert_tokenizer import VocabularyError, byte_alphabet, from_tiktoken, sentencepiece_model
from tools.gguf import GGUF

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"
LLAMA2 = DATA / "llama2-tokenizer" / "tokenizer.model"
VECTORS = DATA / "tokenizer-vectors" / "ggml-vocab-llama-spm.gguf.inp"
TOLERANCE = 2e-4
# Blocks are of 32 columns, so every width is a multiple of 32; 352 tokens, of which the tokenizer knows all.
TINY = {**DEFAULTS, "intermediate_size": 96}
IDS = np.random.default_rng(1).integers(3, 352, 40).tolist()


def read_pieces(data):
    """(pieces, scores, types) of a tokenizer.model, by sentencepiece itself."""
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_proto=data)
    kinds = {"is_unknown": 2, "is_control": 3, "is_unused": 5, "is_byte": 6}
    ids = range(model.get_piece_size())
    types = [next((kind for name, kind in kinds.items() if getattr(model, name)(i)), 1) for i in ids]
    return [model.id_to_piece(i) for i in ids], [model.get_score(i) for i in ids], types


def sentencepiece_metadata(data):
    pieces, scores, types = read_pieces(data)
    return {
        "tokenizer.ggml.model": (w.STRING, "llama"),
        "tokenizer.ggml.tokens": (w.ARRAY, (w.STRING, pieces)),
        "tokenizer.ggml.scores": (w.ARRAY, (w.F32, scores)),
        "tokenizer.ggml.token_type": (w.ARRAY, (5, types)),
        "tokenizer.ggml.bos_token_id": (w.U32, 1),
        "tokenizer.ggml.eos_token_id": (w.U32, 2),
    }


def metadata(config, **more):
    """What llama.cpp's converter writes for a config.json; `more` replaces keys, or drops them with None."""
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "vocab_size": config["vocab_size"],
    }
    result = {
        "general.architecture": (w.STRING, "llama"),
        **{f"llama.{name}": (w.U32, number) for name, number in numbers.items()},
        "llama.rope.freq_base": (w.F32, config["rope_theta"]),
        "llama.attention.layer_norm_rms_epsilon": (w.F32, config["rms_norm_eps"]),
        **sentencepiece_metadata(train_tokenizer(352)),
        **more,
    }
    return {key: value for key, value in result.items() if value is not None}


def write_gguf(path, kind="F32", more=None, extra=None, **overrides):
    """A GGUF file of random weights in a type, and (config.json, float64 weights) that it stands for."""
    config = {**TINY, **overrides}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    tensors, values = w.llama_tensors(
        random_weights(config, seed=3), kind, config["num_attention_heads"], config["num_key_value_heads"], head_dim
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(w.gguf(metadata(config, **(more or {})), {**tensors, **(extra or {})}))
    return config, {name: np.array(value) for name, value in values.items()}


def score(folder, ids):
    llm = LLM(str(folder), device="cpu", dtype="float32", threads=1, kv_cache_memory=1 << 22)
    return llm.score([ids])[0]


def assert_is(folder, config, weights, ids=IDS):
    """The folder holds this model: its log-probabilities are those of the float64 oracle."""
    np.testing.assert_allclose(score(folder, ids), logprobs(config, weights, ids), rtol=0, atol=TOLERANCE)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


# GGUF.


@pytest.mark.parametrize("kind", list(w.TYPES))
def test_a_gguf_of_each_type_is_the_model_that_its_blocks_stand_for(tmp_path, kind):
    config, weights = write_gguf(tmp_path / "x.gguf", kind)
    folder = convert(tmp_path / "x.gguf", tmp_path / "out", dtype="float32")
    got = load_weights(folder)
    assert got.keys() == weights.keys()
    for name, value in weights.items():
        assert np.array_equal(got[name], value.astype(np.float32)), name  # at most the rounding of Q4_1's sum
    assert_is(folder, config, weights)


SHAPES = {
    "tied": {"tie_word_embeddings": True},
    "as many KV heads": {"num_key_value_heads": 4},
    "one KV head": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "other theta and eps": {"rope_theta": 500000.0, "rms_norm_eps": 1e-6},
    "wide heads": {"head_dim": 32, "rope_theta": 1e6},
}


@pytest.mark.parametrize("overrides", SHAPES.values(), ids=SHAPES.keys())
def test_shapes_of_a_gguf(tmp_path, overrides):
    more = {}
    if "head_dim" in overrides:
        more = {f"llama.attention.{part}_length": (w.U32, overrides["head_dim"]) for part in ("key", "value")}
    config, weights = write_gguf(tmp_path / "x.gguf", "F16", more, **overrides)
    assert_is(convert(tmp_path / "x.gguf", tmp_path / "out", dtype="float32"), config, weights)


def llama3_divisors(factor, theta, head_dim):
    """rope_freqs.weight as llama.cpp's converter makes it: by wavelengths, in float32."""
    result = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * float(np.float32(theta) ** np.float32(i / head_dim))
        if wavelength < 8192 / 4:
            result.append(1.0)
        elif wavelength > 8192:
            result.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            result.append(1 / ((1 - smooth) / factor + smooth))
    return struct_floats(result)


def struct_floats(values):
    return ("F32", (len(values),), w.encode("F32", values))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SCALINGS = {
    "linear": ({"type": (w.STRING, "linear"), "factor": (w.F32, 4.0)}, {"rope_type": "linear", "factor": 4.0}),
    "no type is linear": ({"factor": (w.F32, 2.5)}, {"rope_type": "linear", "factor": 2.5}),
    "yarn": (
        {"type": (w.STRING, "yarn"), "factor": (w.F32, 4.0), "original_context_length": (w.U32, 128)}, YARN,
    ),
    "yarn with its borders": (
        {"type": (w.STRING, "yarn"), "factor": (w.F32, 4.0), "original_context_length": (w.U32, 128),
         "yarn_beta_fast": (w.F32, 16.0), "yarn_beta_slow": (w.F32, 2.0), "attn_factor": (w.F32, 1.0)},
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    ),
    "none": ({"type": (w.STRING, "none"), "factor": (w.F32, 4.0)}, None),
    "factor 1": ({"type": (w.STRING, "linear"), "factor": (w.F32, 1.0)}, None),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "wanted"), SCALINGS.values(), ids=SCALINGS.keys())
def test_rope_scaling_keys(tmp_path, keys, wanted):
    more = {f"llama.rope.scaling.{key}": value for key, value in keys.items()}
    config, weights = write_gguf(tmp_path / "x.gguf", "F32", more)
    folder = convert(tmp_path / "x.gguf", tmp_path / "out", dtype="float32")
    assert config_of(folder)["rope_scaling"] == wanted
    assert_is(folder, {**config, "rope_scaling": wanted}, weights)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_again_from_its_divisors(tmp_path, factor):
    for head_dim in (16, 64, 128):  # 16: no divisor lies between
        freqs = {"rope_freqs.weight": llama3_divisors(factor, 500000.0, head_dim)}
        more = {f"llama.attention.{part}_length": (w.U32, head_dim) for part in ("key", "value")}
        path = tmp_path / f"{head_dim}.gguf"
        config, weights = write_gguf(
            path, "F32", more, freqs, rope_theta=500000.0, head_dim=head_dim, num_hidden_layers=1
        )
        folder = convert(path, tmp_path / f"{head_dim}", dtype="float32")
        wanted = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        assert config_of(folder)["rope_scaling"] == wanted
        assert_is(folder, {**config, "rope_scaling": wanted}, weights)
    ones = {"rope_freqs.weight": struct_floats([1.0] * 8)}
    write_gguf(tmp_path / "ones.gguf", extra=ones)
    assert config_of(convert(tmp_path / "ones.gguf", tmp_path / "ones"))["rope_scaling"] is None


@pytest.mark.parametrize("values", [
    pytest.param([1.0] * 7 + [8.0], id="another scaling"),
    pytest.param([1.0] * 7, id="too few"),
    pytest.param([0.5] * 8, id="smaller"),
    pytest.param([math.nan] * 8, id="nan"),
    pytest.param([math.inf] * 8, id="inf"),
])  # fmt: skip
def test_divisors_of_another_scaling_are_refused(tmp_path, values):
    write_gguf(tmp_path / "x.gguf", extra={"rope_freqs.weight": struct_floats(values)})
    with pytest.raises(ModelFormatError, match=r"rope_freqs\.weight is not Llama 3's scaling"):
        convert(tmp_path / "x.gguf", tmp_path / "out")


REFUSED = {
    "other architecture": ({"general.architecture": (w.STRING, "gemma")}, "'gemma' is not llama"),
    "experts": ({"llama.expert_count": (w.U32, 8)}, "expert_count is 8: a mixture of experts is not supported"),
    "split file": ({"split.count": (2, 3)}, "join them first"),
    "window": ({"llama.attention.sliding_window": (w.U32, 4096)}, "sliding_window is 4096"),
    "scaled logits": ({"llama.logit_scale": (w.F32, 0.5)}, "logit_scale is 0.5"),
    "not causal": ({"llama.attention.causal": (w.BOOL, 0)}, "attention.causal is False"),
    "longrope": (
        {"llama.rope.scaling.type": (w.STRING, "longrope"), "llama.rope.scaling.factor": (w.F32, 2.0)}, "'longrope' is",
    ),
    "scaling of queries": ({"llama.rope.scaling.attn_factor": (w.F32, 1.5)}, "attn_factor is 1.5"),
    "huge factor": ({"llama.rope.scaling.factor": (w.F32, 1e9)}, "factor must be a number from 1 to 4096"),
    "theta": ({"llama.rope.freq_base": (w.F32, math.nan)}, "rope_theta must be a number"),
    "eps": ({"llama.attention.layer_norm_rms_epsilon": (w.F32, 0.0)}, "rms_norm_eps must be a number"),
    "context": ({"llama.context_length": (w.U32, 0)}, "max_position_embeddings must be an integer"),
    "no heads": ({"llama.attention.head_count": (w.U32, 0)}, "0 heads"),
    "heads": ({"llama.attention.head_count_kv": (w.U32, 3)}, "3 KV heads"),
    "odd heads": ({"llama.attention.key_length": (w.U32, 15)}, "4 heads"),
    "key and value": ({"llama.attention.value_length": (w.U32, 32)}, "value_length differs"),
    "part of a head": ({"llama.rope.dimension_count": (w.U32, 8)}, "part of a head"),
    "layers": ({"llama.block_count": (w.U32, 2**32 - 1)}, "4294967295 layers"),
    "missing layer": ({"llama.block_count": (w.U32, 3)}, r"missing: blk\.2\.attn_k"),
    "surplus layer": ({"llama.block_count": (w.U32, 1)}, r"unknown tensors: blk\.1\.attn_k"),
    "width": ({"llama.feed_forward_length": (w.U32, 128)}, r"ffn_gate\.weight has shape \(96, 64\), expected \(128"),
    "vocabulary": ({"llama.vocab_size": (w.U32, 5)}, "not one vocabulary"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "tokens must be of type list, got NoneType"),
    "numbers as tokens": ({"tokenizer.ggml.tokens": (w.ARRAY, (w.U32, list(range(352))))}, "not one vocabulary"),
    "token type 7": ({"tokenizer.ggml.token_type": (w.ARRAY, (5, [7] * 352))}, "type that is unknown"),
    "no unknown token": ({"tokenizer.ggml.token_type": (w.ARRAY, (5, [1] * 352))}, "sentencepiece does not take"),
    "scores": ({"tokenizer.ggml.scores": (w.ARRAY, (w.F32, [math.nan] * 352))}, "352 finite numbers"),
    "few scores": ({"tokenizer.ggml.scores": (w.ARRAY, (w.F32, [0.0]))}, "352 finite numbers"),
    "normaliser": ({"tokenizer.ggml.precompiled_charsmap": (w.ARRAY, (0, [1]))}, "precompiled_charsmap"),
    "bert": ({"tokenizer.ggml.model": (w.STRING, "bert")}, "tokenizer 'bert' is not supported"),
    "eos": ({"tokenizer.ggml.eos_token_id": (w.U32, 352)}, "eos_token_id 352 is not one of 352"),
    "bos is text": ({"tokenizer.ggml.bos_token_id": (w.STRING, "<s>")}, "must be of type int, got str"),
    "pre-tokenizer": ({"tokenizer.ggml.model": (w.STRING, "gpt2")}, "pre-tokenizer None"),
    "template": ({"tokenizer.chat_template": (w.U32, 1)}, "chat_template must be of type str"),
}  # fmt: skip


@pytest.mark.parametrize(("more", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_gguf_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path, more, reason):
    write_gguf(tmp_path / "in" / "x.gguf", more=more)
    with pytest.raises(ModelFormatError, match=reason) as caught:
        convert(tmp_path / "in" / "x.gguf", tmp_path / "out")
    assert "x.gguf" in str(caught.value)
    assert os.listdir(tmp_path) == ["in"]


KEYS = [*metadata(TINY), *convert_gguf._FOREIGN, "llama.attention.key_length", "llama.attention.value_length"]
KEYS += [f"llama.rope.{key}" for key in ("dimension_count", "scale_linear", "scaling.type", "scaling.factor")]
KEYS += ["llama.rope.scaling.original_context_length", "llama.rope.scaling.yarn_beta_fast", "tokenizer.ggml.pre"]
KEYS += [f"tokenizer.ggml.{key}" for key in ("merges", "eot_token_id", "unknown_token_id", "add_bos_token")]
NUMBERS = [0, 1, 2, 3, 4, 16, 64, 96, 352, 2**31 - 1, 2**32 - 1]
FLOATS = [0.0, 1.0, -1.0, 0.5, 1e-45, 1e38, math.nan, math.inf, -math.inf, 10000.0]
VALUES = st.one_of(
    st.tuples(st.just(w.U32), st.sampled_from(NUMBERS)),
    st.tuples(st.just(11), st.sampled_from([-1, -(2**63), 2**63 - 1, *NUMBERS])),
    st.tuples(st.just(w.F32), st.sampled_from(FLOATS)),
    st.tuples(st.just(w.BOOL), st.sampled_from([0, 1])),
    st.tuples(st.just(w.STRING), st.sampled_from(["", "llama", "gpt2", "smollm", "yarn", "linear", "none", "x", "ä"])),
    st.builds(lambda items: (w.ARRAY, (w.STRING, items)), st.lists(st.sampled_from(["a", "b", "a b", ""]), max_size=3)),
    st.builds(lambda items: (w.ARRAY, (5, items)), st.lists(st.integers(-1, 7), max_size=3)),
    st.none(),
)


@pytest.fixture(scope="module")
def tiny_tensors():
    return w.llama_tensors(random_weights(TINY, seed=3), "F32", 4, 2, 16)[0]


@settings(max_examples=150, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(more=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_any_metadata_give_a_model_or_a_format_error(tmp_path, tiny_tensors, more):
    (tmp_path / "x.gguf").write_bytes(w.gguf(metadata(TINY, **more), tiny_tensors))
    try:
        plan = convert_gguf.plan_gguf(GGUF(tmp_path / "x.gguf"))
    except ModelFormatError as error:
        assert "x.gguf" in str(error)
        return
    json.dumps([plan.config, [x for x in plan.files.values() if isinstance(x, dict)]], allow_nan=False)
    assert len(plan.weights) == len(tiny_tensors)


def test_nan_weights_are_refused_by_name(tmp_path):
    write_gguf(tmp_path / "in" / "x.gguf", extra={"output_norm.weight": struct_floats([math.nan] * 64)})
    with pytest.raises(ModelFormatError, match=r"model\.norm\.weight has values that are NaN or infinite"):
        convert(tmp_path / "in" / "x.gguf", tmp_path / "out")
    write_gguf(tmp_path / "in" / "x.gguf", extra={"output_norm.weight": struct_floats([1e5] * 64)})
    with pytest.raises(ModelFormatError, match="beyond the range of float16"):
        convert(tmp_path / "in" / "x.gguf", tmp_path / "out", dtype="float16")
    assert os.listdir(tmp_path) == ["in"]


def test_a_gguf_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "in" / "x.gguf"
    write_gguf(path)
    real, calls = GGUF.read, []

    def read(gguf, *arguments):
        calls.append(arguments)
        if len(calls) == 5:
            os.utime(path, (1, 1))
        return real(gguf, *arguments)

    monkeypatch.setattr(GGUF, "read", read)
    with pytest.raises(ModelFormatError, match="changed while"):
        convert(path, tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


def test_rows_of_a_tensor(tmp_path):
    rng = random.Random(0)
    tensors = {kind: (kind, (6, 64), w.random_blocks(rng, kind, 6 * 64)) for kind in w.TYPES}
    (tmp_path / "x.gguf").write_bytes(w.gguf({}, {**tensors, "v": struct_floats([1.0, 2.0])}))
    gguf = GGUF(tmp_path / "x.gguf")
    for kind in w.TYPES:
        assert np.array_equal(gguf.read(kind, 2, 5), gguf.read(kind)[2:5])
    with pytest.raises(ValueError, match="is a vector"):
        gguf.read("v", 1)


# Tokenizers.


@pytest.mark.skipif(not (LLAMA2.is_file() and VECTORS.is_file()), reason=f"no {LLAMA2} or {VECTORS}")
def test_llama2s_tokenizer_survives_the_way_through_a_gguf(tmp_path):
    size = 32000
    write_gguf(
        tmp_path / "x.gguf", "Q4_0", sentencepiece_metadata(LLAMA2.read_bytes()), {}, vocab_size=32000,
        num_hidden_layers=1, hidden_size=32, intermediate_size=32, tie_word_embeddings=True, num_attention_heads=1,
        num_key_value_heads=1,
    )  # fmt: skip
    folder = convert(tmp_path / "x.gguf", tmp_path / "out")
    ours, original = load_tokenizer(folder), load_tokenizer(LLAMA2)
    texts = VECTORS.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = VECTORS.with_suffix(".out").read_text().split("\n")
    assert len(texts) == 47
    for text, line in zip(texts, lines, strict=True):
        assert ours.encode(text) == [1, *map(int, line.split())]
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (size, 1, (2,))
    assert read_pieces((folder / "tokenizer.model").read_bytes()) == read_pieces(LLAMA2.read_bytes())

    @settings(max_examples=200, deadline=None)
    @given(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\tab日本😀\u2581"), max_size=40))
    def same(text):
        assert ours.encode(text) == original.encode(text)
        assert ours.decode(ours.encode(text)) == original.decode(original.encode(text))

    same()


def test_settings_of_a_sentencepiece_tokenizer(tmp_path):
    more = {
        "tokenizer.ggml.add_space_prefix": (w.BOOL, 0),
        "tokenizer.ggml.add_bos_token": (w.BOOL, 0),
        "tokenizer.ggml.eot_token_id": (w.U32, 5),
        "tokenizer.chat_template": (w.STRING, "{{ messages }}"),
    }
    write_gguf(tmp_path / "x.gguf", more=more)
    folder = convert(tmp_path / "x.gguf", tmp_path / "out")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.bos_id is None
    plain = sentencepiece_model(*read_pieces(train_tokenizer(352)), {"unk": 0, "bos": 1, "eos": 2})
    (tmp_path / "tokenizer.model").write_bytes(plain)
    assert tokenizer.encode(" the cat") == load_tokenizer(tmp_path / "tokenizer.model").encode("the cat")[1:]
    written = json.loads((folder / "tokenizer_config.json").read_text())
    assert (written["bos_token"], written["eos_token"], written["unk_token"]) == ("<s>", "</s>", "<unk>")
    assert written["chat_template"] == "{{ messages }}"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 5]


def test_a_user_defined_piece_keeps_its_spaces_and_an_end_token_of_any_type_ends():
    pieces, scores, types = read_pieces(train_tokenizer(352))
    pieces[-2:], types[-2:] = ["a  b", "<|im_end|>"], [4, 4]
    from sentencepiece import SentencePieceProcessor

    data = sentencepiece_model(pieces, scores, types, {"unk": 0, "bos": 1, "eos": 351})
    model = SentencePieceProcessor(model_proto=data)
    assert model.eos_id() == 351
    assert model.id_to_piece(350) == "a\u2581\u2581b"
    assert 350 in model.encode("the a  b cat")
    assert 351 not in model.encode("the <|im_end|> cat")


@pytest.mark.parametrize("break_it", [
    pytest.param(lambda pieces, types: types.__setitem__(3, 1), id="a byte piece is missing"),
    pytest.param(lambda pieces, types: types.__setitem__(300, 2), id="two unknown pieces"),
    pytest.param(lambda pieces, types: pieces.__setitem__(300, pieces[301]), id="a piece twice"),
    pytest.param(lambda pieces, types: pieces.__setitem__(300, ""), id="an empty piece"),
])  # fmt: skip
def test_a_vocabulary_that_sentencepiece_does_not_take(break_it):
    pieces, scores, types = read_pieces(train_tokenizer(352))
    break_it(pieces, types)
    with pytest.raises(VocabularyError, match="sentencepiece does not take"):
        sentencepiece_model(pieces, scores, types, {"unk": 0, "bos": 1, "eos": 2})


CONTROL = ["<|begin_of_text|>", "<|end_of_text|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2", "12 3", "1 23", "2 3", "Ċ Ċ", "hel lo", "he l", "l o"]
BPE_TOKENS = [*CONTROL, *byte_alphabet(), *dict.fromkeys(merge.replace(" ", "") for merge in MERGES)]
BPE_TOKENS += ["lo"] if "lo" not in BPE_TOKENS else []
# What each pre-tokenizer makes of "hello'S 1234 wo\n\n x", and the parts of words that are tokens.
SPLITS = {
    "llama-bpe": ["hello", "'S", "Ġ", "123", "4", "Ġwo", "ĊĊ", "Ġx"],
    "gpt-2": ["hello", "'", "S", "Ġ1234", "Ġwo", "ĊĊ", "Ġx"],
    "smollm": ["hello", "'", "S", "Ġ", "1", "2", "3", "4", "Ġwo", "ĊĊ", "Ġx"],
}


def bpe_metadata(pre, **more):
    types = [3] * len(CONTROL) + [1] * (len(BPE_TOKENS) - len(CONTROL))
    return {
        "tokenizer.ggml.model": (w.STRING, "gpt2"),
        "tokenizer.ggml.pre": (w.STRING, pre),
        "tokenizer.ggml.tokens": (w.ARRAY, (w.STRING, BPE_TOKENS)),
        "tokenizer.ggml.scores": None,
        "tokenizer.ggml.token_type": (w.ARRAY, (5, types)),
        "tokenizer.ggml.merges": (w.ARRAY, (w.STRING, MERGES)),
        "tokenizer.ggml.bos_token_id": (w.U32, 0),
        "tokenizer.ggml.eos_token_id": (w.U32, 1),
        "llama.vocab_size": None,
        **more,
    }


@pytest.mark.parametrize("pre", SPLITS)
def test_byte_level_tokenizers(tmp_path, pre):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `hf`")
    write_gguf(tmp_path / "x.gguf", more=bpe_metadata(pre), vocab_size=len(BPE_TOKENS))
    folder = convert(tmp_path / "x.gguf", tmp_path / "out")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "hello'S 1234 wo\n\n x"
    parts = [part for part, _ in library.pre_tokenizer.pre_tokenize_str(text)]
    assert parts == SPLITS[pre]
    tokenizer = load_tokenizer(folder)
    assert tokenizer.bos_id == (0 if pre == "llama-bpe" else None)
    assert library.encode("hello").tokens == ([CONTROL[0]] if pre == "llama-bpe" else []) + ["hello"]
    assert tokenizer.eos_ids == (1,)
    for other in (text, "häß 日本 🙂", "<|end_of_text|>", ""):
        assert tokenizer.decode(tokenizer.encode(other)) == other
        assert 1 not in tokenizer.encode(other)
    assert config_of(folder)["vocab_size"] == len(BPE_TOKENS)


def test_llama3_takes_a_whole_word_before_merging(tmp_path):
    pytest.importorskip("tokenizers", reason="needs the extra `hf`")
    tokens, merges = [*BPE_TOKENS, "wow"], MERGES  # no merge leads to it
    more = bpe_metadata("llama-bpe") | {
        "tokenizer.ggml.tokens": (w.ARRAY, (w.STRING, tokens)),
        "tokenizer.ggml.token_type": (w.ARRAY, (5, [3, 3] + [1] * (len(tokens) - 2))),
        "tokenizer.ggml.merges": (w.ARRAY, (w.STRING, merges)),
    }
    write_gguf(tmp_path / "x.gguf", more=more, vocab_size=len(tokens))
    tokenizer = load_tokenizer(convert(tmp_path / "x.gguf", tmp_path / "out"))
    assert tokenizer.encode("wow") == [0, len(tokens) - 1]


@pytest.mark.parametrize("pre", ["qwen2", "default", "smaug-bpe"])
def test_other_pre_tokenizers_are_refused(tmp_path, pre):
    write_gguf(tmp_path / "x.gguf", more=bpe_metadata(pre), vocab_size=len(BPE_TOKENS))
    with pytest.raises(ModelFormatError, match=f"pre-tokenizer '{pre}' .* is not one of smollm, gpt-2, llama-bpe"):
        convert(tmp_path / "x.gguf", tmp_path / "out")


def test_merges_of_no_tokens_are_refused(tmp_path):
    for merge in ("h", "h zz", "x y"):
        more = bpe_metadata("gpt-2", **{"tokenizer.ggml.merges": (w.ARRAY, (w.STRING, [merge]))})
        write_gguf(tmp_path / "x.gguf", more=more, vocab_size=len(BPE_TOKENS))
        with pytest.raises(ModelFormatError, match=f"merge '{merge}' is not of tokens"):
            convert(tmp_path / "x.gguf", tmp_path / "out")


def tiktoken_file(rng, joins):
    """A tiktoken file of the 256 bytes and `joins` random joins of earlier tokens."""
    tokens = [bytes([byte]) for byte in range(256)]
    letters = [bytes([byte]) for byte in b"abc d"]
    while len(tokens) < 256 + joins:
        both = rng.choice(letters) + rng.choice(letters)
        if both not in tokens and both.find(b" ", 1) < 0:  # as a word has it: a space at the front alone
            tokens.append(both)
            letters.append(both)
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)), tokens


def tiktoken_encode(tokens, word):
    """As tiktoken does it: join the first pair of neighbours whose join has the lowest rank, while there is one."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not found:
            return [ranks[part] for part in parts]
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_tiktoken_files_encode_as_tiktoken_does(tmp_path):
    pytest.importorskip("tokenizers", reason="needs the extra `hf`")
    rng = random.Random(0)
    for seed in range(5):
        data, tokens = tiktoken_file(random.Random(seed), 60)
        content, size = from_tiktoken(data, convert_pth.llama3_specials("3"))
        assert size == len(tokens) + 256
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|begin_of_text|>"}))
        tokenizer = load_tokenizer(tmp_path)
        for _ in range(200):
            words = ["".join(rng.choices("abcd", k=rng.randint(1, 12))) for _ in range(rng.randint(1, 4))]
            pieces = [words[0], *(" " + word for word in words[1:])]  # as Llama 3's pattern parts them
            wanted = [i for piece in pieces for i in tiktoken_encode(tokens, piece.encode())]
            assert tokenizer.encode(" ".join(words)) == [len(tokens), *wanted]


def test_merges_are_in_the_order_of_the_parts_ranks():
    tokens = [*(bytes([byte]) for byte in range(256)), b"bc", b"abc", b"ab", b"cd", b"abcd"]
    data = b"\n".join(base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens))
    content, _ = from_tiktoken(data, ["<|begin_of_text|>"])
    assert content["model"]["merges"] == ["b c", "a bc", "ab c", "a b", "c d", "abc d", "ab cd"]


def test_the_control_tokens_of_llama3():
    old, new = convert_pth.llama3_specials("3"), convert_pth.llama3_specials("3.1")
    assert len(old) == len(set(old)) == len(new) == len(set(new)) == 256
    assert (old[9], old[10], old[255]) == (
        "<|eot_id|>",
        "<|reserved_special_token_5|>",
        "<|reserved_special_token_250|>",
    )
    assert (new[4], new[8], new[10]) == ("<|finetune_right_pad_id|>", "<|eom_id|>", "<|python_tag|>")
    assert (new[5], new[11], new[255]) == tuple(f"<|reserved_special_token_{i}|>" for i in (2, 3, 247))


@pytest.mark.parametrize(("lines", "reason"), [
    ([b"YQ== 1"], "line 1 has rank 1"),
    ([b"YQ== 0", b"YQ== 1"], "line 2 has rank 1, or a token that came before"),
    ([b"YQ== x"], "line 1 is not"),
    ([b"Y 0"], "line 1 is not"),
    ([b"YQ== 0"], "byte 0 is not a token"),
])  # fmt: skip
def test_tiktoken_files_that_are_wrong(lines, reason):
    with pytest.raises(VocabularyError, match=reason):
        from_tiktoken(b"\n".join(lines), ["<|begin_of_text|>"])


# Meta's folders.

META = {
    "self_attn.q_proj": ("attention.wq", 0),
    "self_attn.k_proj": ("attention.wk", 0),
    "self_attn.v_proj": ("attention.wv", 0),
    "self_attn.o_proj": ("attention.wo", 1),
    "mlp.gate_proj": ("feed_forward.w1", 0),
    "mlp.down_proj": ("feed_forward.w2", 1),
    "mlp.up_proj": ("feed_forward.w3", 0),
    "input_layernorm": ("attention_norm", None),
    "post_attention_layernorm": ("ffn_norm", None),
}


def meta_shards(config, weights, count, embedding_dim=1):
    """The state dicts of `count` files, from numpy weights in Hugging Face's layout."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    cuts = {}
    for name, weight in weights.items():
        if name.startswith("model.layers."):
            _, _, layer, *part, end = name.split(".")
            ours, dim = META[".".join(part)]
            if ours in ("attention.wq", "attention.wk"):
                weight = weight[w.pair_order(len(weight) // head_dim, head_dim)]
            cuts[f"layers.{layer}.{ours}.{end}"] = (weight, dim)
        else:
            ours, dim = {
                "model.embed_tokens.weight": ("tok_embeddings.weight", embedding_dim),
                "model.norm.weight": ("norm.weight", None),
                "lm_head.weight": ("output.weight", 0),
            }[name]
            cuts[ours] = (weight, dim)
    shards = [{"rope.freqs": torch.ones(head_dim // 2)} for _ in range(count)]
    for name, (weight, dim) in cuts.items():
        parts = [weight] * count if dim is None else np.split(weight, count, axis=dim)
        for shard, part in zip(shards, parts, strict=True):
            shard[name] = torch.from_numpy(part.copy())
    return shards


def meta_params(config, **more):
    return {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "multiple_of": 32,
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": -1,
    } | more


META_CONFIG = {
    **DEFAULTS,
    "hidden_size": 64,
    "intermediate_size": 192,  # 8 / 3 of 64 is 170, up to a multiple of 32
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def write_meta(folder, count=1, params=None, change=None, embedding_dim=1, tokenizer=True, **overrides):
    """Meta's folder, and (config.json, weights) that it stands for. change: edits the state dicts."""
    config = {**META_CONFIG, **overrides}
    weights = random_weights(config, seed=5)
    shards = meta_shards(config, weights, count, embedding_dim)
    if change:
        change(shards)
    folder.mkdir(parents=True, exist_ok=True)
    for i, shard in enumerate(shards):
        torch.save(shard, folder / f"consolidated.{i:02d}.pth")
    (folder / "params.json").write_text(json.dumps(meta_params(config) | (params or {})))
    if tokenizer:
        (folder / "tokenizer.model").write_bytes(train_tokenizer(352))
    return config, {name: weight.astype(np.float64) for name, weight in weights.items()}


@pytest.mark.parametrize("embedding_dim", [1, 0], ids=["embeddings by columns", "embeddings by rows"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_metas_shards_are_merged_to_the_model(tmp_path, count, embedding_dim):
    config, weights = write_meta(tmp_path / "in", count, embedding_dim=embedding_dim)
    folder = convert(tmp_path / "in", tmp_path / "out", dtype="float32")
    got = load_weights(folder)
    assert got.keys() == weights.keys()
    for name, value in weights.items():
        assert np.array_equal(got[name], value), name
    assert_is(folder, config, weights)
    assert (folder / "tokenizer.model").read_bytes() == train_tokenizer(352)
    assert load_tokenizer(folder).bos_id == 1


VARIANTS = {
    "no GQA, one kv": ({"num_key_value_heads": 8}, {"n_kv_heads": None}),
    "one KV head": ({"num_key_value_heads": 1}, {}),
    "theta": ({"rope_theta": 1e6}, {"rope_theta": 1000000}),
    "multiplier": ({"intermediate_size": 224}, {"ffn_dim_multiplier": 1.3}),
    "vocabulary": ({}, {"vocab_size": 352}),
    "llama3 scaling": (
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
        {"rope_theta": 500000.0, "use_scaled_rope": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "params"), VARIANTS.values(), ids=VARIANTS.keys())
def test_what_params_json_says(tmp_path, overrides, params):
    config, weights = write_meta(tmp_path / "in", params=params, **overrides)
    folder = convert(tmp_path / "in", tmp_path / "out", dtype="float32", context_length=512)
    assert config_of(folder)["rope_scaling"] == config.get("rope_scaling")
    assert_is(folder, config, weights)


@pytest.mark.parametrize("count", [1, 2])
def test_a_tied_model_of_meta(tmp_path, count):
    def repeat(shards):
        for shard in shards:
            shard["output.weight"] = torch.nn.Parameter(shard["tok_embeddings.weight"].clone())

    for name, change in (("absent", None), ("the same", repeat)):
        config, weights = write_meta(tmp_path / name, count, change=change, embedding_dim=0, tie_word_embeddings=True)
        folder = convert(tmp_path / name, tmp_path / f"{name} out", dtype="float32")
        assert config_of(folder)["tie_word_embeddings"] is True
        assert "lm_head.weight" not in open_checkpoint(folder)
        assert_is(folder, config, weights)


def test_the_context_is_guessed_aloud_or_given(tmp_path, capsys):
    def llama1(shards):
        shards[0]["layers.0.attention.inner_attention.rope.freqs"] = shards[0].pop("rope.freqs")

    cases = [
        ({}, llama1, 2048, "Llama 1"),
        ({}, None, 4096, "Llama 2"),
        ({"rope_theta": 1e6}, None, 16384, "Code Llama"),
        ({"rope_theta": 5e5}, None, 8192, "Llama 3"),
        ({"rope_theta": 5e5, "use_scaled_rope": True}, None, 131072, "Llama 3.1"),
    ]
    for i, (params, change, length, name) in enumerate(cases):
        write_meta(tmp_path / f"{i}", params=params, change=change)
        folder = convert(tmp_path / f"{i}", tmp_path / f"{i} out", progress=True)
        assert config_of(folder)["max_position_embeddings"] == length
        assert f"{length} tokens were taken, those of {name}" in capsys.readouterr().err
    folder = convert(tmp_path / "0", tmp_path / "given", context_length=777, progress=True)
    assert config_of(folder)["max_position_embeddings"] == 777
    assert capsys.readouterr().err == ""


def test_llama3s_folder_with_its_tiktoken_file_one_level_up(tmp_path):
    pytest.importorskip("tokenizers", reason="needs the extra `hf`")
    data, tokens = tiktoken_file(random.Random(0), 40)
    config, weights = write_meta(
        tmp_path / "original" / "8B", 2, {"rope_theta": 500000.0}, None, 0, False, rope_theta=500000.0,
        vocab_size=len(tokens) + 256,
    )  # fmt: skip
    (tmp_path / "original" / "tokenizer.model").write_bytes(data)
    folder = convert(tmp_path / "original" / "8B", tmp_path / "out", dtype="float32")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("abc")[0] == tokenizer.bos_id == len(tokens)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [
        len(tokens) + 1,
        len(tokens) + 9,
    ]
    assert_is(folder, config, weights)


def edit(name, function):
    def change(shards):
        for i, shard in enumerate(shards):
            shard[name] = function(i, shard[name])

    return change


def cut_again(split):
    """Part the queries' projection another way."""

    def change(shards):
        for shard, part in zip(shards, split(torch.cat([shard[WQ] for shard in shards])), strict=True):
            shard[WQ] = part.contiguous()

    return change


def drop(name):
    return lambda shards: [shard.pop(name) for shard in shards]


WQ, NORM = "layers.0.attention.wq.weight", "norm.weight"
META_REFUSED = {
    "a tensor is missing": (2, {}, drop("layers.1.ffn_norm.weight"), r"missing: layers\.1\.ffn_norm\.weight"),
    "no embeddings": (1, {}, drop("tok_embeddings.weight"), r"missing: tok_embeddings\.weight"),
    "no feed-forward": (1, {}, drop("layers.0.feed_forward.w1.weight"), "w1.weight is missing, or no matrix"),
    "a tensor too many": (1, {}, lambda s: s[0].update(x=torch.ones(2)), "unknown tensors: x"),
    "another file's tensors": (2, {}, lambda s: s[1].pop(NORM), "file 1 has not the tensors of file 0: norm"),
    "norms that differ": (2, {}, edit(NORM, lambda i, t: t + i), "norm.weight should be the same in every file"),
    "a norm that is short": (1, {}, edit(NORM, lambda i, t: t[:-1].clone()), r"norm\.weight has shapes \(63,\)"),
    "a row is missing": (2, {}, edit(WQ, lambda i, t: t[: 32 - i].clone()), r"wq\.weight has shapes \(32, 64\), \(31"),
    "cut inside a head": (
        2, {}, cut_again(lambda whole: torch.split(whole, [33, 31])), "wq.weight is cut inside a head",
    ),
    "heads cut by columns": (
        2, {}, cut_again(lambda whole: whole.split(32, dim=1)), r"wq\.weight has shapes \(64, 32\), \(64, 32\): not",
    ),
    "integers": (1, {}, edit(NORM, lambda i, t: t.to(torch.int8)), "'norm.weight' is torch.int8"),
    "float64": (1, {}, edit(NORM, lambda i, t: t.double()), "'norm.weight' is torch.float64"),
    "sparse": (1, {}, edit(WQ, lambda i, t: t.to_sparse()), "float32, float16 and bfloat16 are supported"),
    "a huge view of little": (
        1, {}, edit(WQ, lambda i, t: torch.zeros(1).expand(1 << 20, 1 << 20)), "not stored as it is",
    ),
    "no tensor": (1, {}, edit(NORM, lambda i, t: [1.0]), "'norm.weight' is list, not a tensor"),
    "NaN": (1, {}, edit(WQ, lambda i, t: t * math.nan), r"q_proj\.weight has values that are NaN"),
    "no dim": (1, {"dim": None}, None, "dim must be a positive int, got None"),
    "dim is text": (1, {"dim": "64"}, None, "dim must be a positive int, got '64'"),
    "dim is true": (1, {"dim": True}, None, "dim must be a positive int, got True"),
    "layers": (1, {"n_layers": 10**11}, None, "100000000000 layers, but"),
    "eps is NaN": (1, {"norm_eps": math.nan}, None, "norm_eps must be a positive float, got nan"),
    "eps is beyond floats": (1, {"norm_eps": 10**400}, None, "norm_eps must be a positive float, got 1000"),
    "heads": (1, {"n_kv_heads": 3}, None, "8 heads and 3 KV heads do not fit 64"),
    "other heads": (1, {"n_heads": 4}, None, r"wk\.weight has shapes \(32, 64\): not slices of \(64, 64\)"),
    "vocabulary": (1, {"vocab_size": 353}, None, "vocab_size is 353, the tensors have 352"),
    "width": (1, {"multiple_of": 256}, None, "comes to 256, the tensors have 192"),
    "experts": (1, {"moe": {"num_experts": 8}}, None, "moe is not supported"),
    "quantised": (1, {"quantization_args": {"group_size": 32}}, None, "quantization_args is not supported"),
}  # fmt: skip


@pytest.mark.parametrize(("count", "params", "change", "reason"), META_REFUSED.values(), ids=META_REFUSED.keys())
def test_a_folder_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path, count, params, change, reason):
    write_meta(tmp_path / "in", count, params, change)
    with pytest.raises(ModelFormatError, match=reason) as caught:
        convert(tmp_path / "in", tmp_path / "out")
    assert str(tmp_path / "in") in str(caught.value)
    assert os.listdir(tmp_path) == ["in"]


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def evil_files(folder, marker):
    path = folder / "consolidated.00.pth"
    yield lambda: torch.save({"norm.weight": torch.ones(2), "x": Evil(marker)}, path)
    yield lambda: torch.save({"x": Evil(marker)}, path, _use_new_zipfile_serialization=False)
    yield lambda: path.write_bytes(pickle.dumps(Evil(marker)))


def test_a_malicious_pickle_is_an_error_and_does_not_run(tmp_path):
    folder, marker = tmp_path / "in", tmp_path / "marker"
    write_meta(folder)
    pickle.loads(pickle.dumps(Evil(str(marker))))
    assert marker.exists(), "the case can not fail"
    marker.rmdir()
    for write in evil_files(folder, str(marker)):
        write()
        with pytest.raises(ModelFormatError, match=r"consolidated\.00\.pth: refused, not a plain dictionary") as caught:
            convert(folder, tmp_path / "out")
        assert "\n" not in str(caught.value)
        assert not marker.exists()
        with pytest.raises(ModelFormatError, match=r"a pickle; give the folder that holds consolidated"):
            convert(folder / "consolidated.00.pth", tmp_path / "out")
        assert not marker.exists()
    assert os.listdir(tmp_path) == ["in"]


def test_pickles_cut_short_changed_or_of_something_else(tmp_path):
    folder = tmp_path / "in"
    path = folder / "consolidated.00.pth"
    write_meta(folder)
    whole = path.read_bytes()
    rng = random.Random(0)
    for _ in range(60):
        data = bytearray(whole[: rng.choice([len(whole), rng.randrange(len(whole))])])
        for _ in range(rng.randint(1, 4) if data else 0):
            data[rng.randrange(min(len(data), 20000))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            convert(folder, tmp_path / "out")
        except ModelFormatError as error:
            assert "\n" not in str(error)
            assert os.listdir(tmp_path) == ["in"]
        else:
            convert_writer.shutil.rmtree(tmp_path / "out")
    for content in ([1, 2], {}, torch.ones(3), {1: torch.ones(2)}):
        torch.save(content, path)
        with pytest.raises(ModelFormatError, match=r"consolidated\.00\.pth: "):
            convert(folder, tmp_path / "out")
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelFormatError, match="Git LFS pointer"):
        convert(folder, tmp_path / "out")


def test_an_old_torch_is_refused(tmp_path, monkeypatch):
    write_meta(tmp_path / "in")
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu121")
    with pytest.raises(ConvertError, match=r"torch 2\.5\.1\+cu121 does not read pickles safely"):
        convert(tmp_path / "in", tmp_path / "out")


def test_files_that_are_missing_beside_others(tmp_path):
    write_meta(tmp_path / "in", 4)
    (tmp_path / "in" / "consolidated.01.pth").unlink()
    with pytest.raises(ModelFormatError, match=r"consolidated\.01\.pth missing beside"):
        convert(tmp_path / "in", tmp_path / "out")
    write_meta(tmp_path / "plain", tokenizer=False)
    with pytest.raises(ModelFormatError, match=r"no tokenizer\.model in it or beside it"):
        convert(tmp_path / "plain", tmp_path / "out")
    for data, reason in ((b"\0" * 100, "neither a sentencepiece"), (b"", "without pieces|neither"),
                         (train_tokenizer(400), "400 tokens, the model has 352")):  # fmt: skip
        (tmp_path / "plain" / "tokenizer.model").write_bytes(data)
        with pytest.raises(ModelFormatError, match=reason):
            convert(tmp_path / "plain", tmp_path / "out")
    (tmp_path / "plain" / "params.json").unlink()
    with pytest.raises(ModelFormatError, match=r"params\.json: no such file"):
        convert(tmp_path / "plain", tmp_path / "out")


# The folder that is written.


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_and_shards(tmp_path, dtype):
    config, weights = write_gguf(tmp_path / "x.gguf", "F32")
    whole = convert(tmp_path / "x.gguf", tmp_path / "whole", dtype=dtype)
    shards = convert(tmp_path / "x.gguf", tmp_path / "shards", dtype=dtype, shard_size=50_000)
    files = sorted(path.name for path in shards.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    embeddings = 352 * 64 * (4 if dtype == "float32" else 2)
    assert all((shards / name).stat().st_size < max(50_000, embeddings) + 4096 for name in files)
    assert config_of(whole)["torch_dtype"] == dtype
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in open_checkpoint(whole).values())
    one, many = load_weights(whole), load_weights(shards)
    for name, value in weights.items():
        rounded = torch.tensor(value, dtype=torch.float32).to(getattr(torch, dtype)).double().numpy()
        assert np.array_equal(one[name], rounded), name
        assert np.array_equal(many[name], rounded), name
    assert_is(shards, config, one)
    from safetensors import safe_open

    with safe_open(whole / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(weights)
        assert file.metadata() == {"format": "pt"}


def test_one_tensor_is_held_at_a_time(tmp_path, monkeypatch):
    write_gguf(tmp_path / "x.gguf")
    monkeypatch.setattr("tools.convert_gguf.CHUNK_ELEMENTS", 64 * 40)  # 2.5 heads: two at a time
    real, alive = convert_writer._filled, []

    def filled(weight, dtype):
        assert not any(reference() is not None for reference in alive)
        tensor = real(weight, dtype)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(convert_writer, "_filled", filled)
    folder = convert(tmp_path / "x.gguf", tmp_path / "out", dtype="float32")
    assert len(alive) == 21
    monkeypatch.undo()
    other = convert(tmp_path / "x.gguf", tmp_path / "other", dtype="float32")
    assert (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def test_targets(tmp_path, monkeypatch):
    write_gguf(tmp_path / "x.gguf")
    source = tmp_path / "x.gguf"
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    assert convert(source, tmp_path / "link") == tmp_path / "empty"
    assert (tmp_path / "empty" / "model.safetensors").is_file()
    (tmp_path / "file").touch()
    for name in ("empty", "link", "file"):
        with pytest.raises(TargetTakenError, match="remove it, or name another folder"):
            convert(source, tmp_path / name)
    with pytest.raises(ConfigError, match="dtype must be one of"):
        convert(source, tmp_path / "out", dtype="int8")
    with pytest.raises(ConfigError, match="shard_size must be"):
        convert(source, tmp_path / "out", shard_size=0)
    monkeypatch.setattr(convert_writer.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    with pytest.raises(ConvertError, match=r"64 MiB of disk in .*, 1 MiB are free"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_when_another_process_was_faster_its_folder_stays(tmp_path, monkeypatch):
    write_gguf(tmp_path / "in" / "x.gguf")

    def write(plan, outdir, *rest):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()

    monkeypatch.setattr("tools.convert.write_folder", write)
    with pytest.raises(TargetTakenError):
        convert(tmp_path / "in" / "x.gguf", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["theirs"]
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_what_a_killed_run_left_goes_after_a_day(tmp_path):
    write_gguf(tmp_path / "in" / "x.gguf")
    script = (
        "import sys, time; from tools import convert, convert_writer\n"
        "def slow(*_): print('started', flush=True); time.sleep(60)\n"
        "convert_writer._filled = slow\n"
        "convert.run(convert.main)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "in" / "x.gguf"), str(tmp_path / "out")]
    for how, code, left in ((signal.SIGTERM, 143, 0), (signal.SIGINT, 130, 0), (signal.SIGKILL, -9, 1)):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "started\n"
            process.send_signal(how)
            assert process.wait(20) == code
            assert "Traceback" not in process.stderr.read()
        works = [name for name in os.listdir(tmp_path) if name != "in"]
        assert len(works) == left, works
    (work,) = tmp_path.glob(".out-*.tmp")
    convert(tmp_path / "in" / "x.gguf", tmp_path / "out")
    assert work.exists(), "it may belong to a run that is still going on"
    convert_writer.shutil.rmtree(tmp_path / "out")
    os.utime(work, (time.time() - 25 * 3600,) * 2)
    convert(tmp_path / "in" / "x.gguf", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


# The command.


def run_command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "tools.convert", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        **options,
    )


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    write_gguf(tmp_path / "x.gguf")
    done = run_command(tmp_path / "x.gguf", tmp_path / "out")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path / 'out'}\n", "")
    taken = run_command(tmp_path / "x.gguf", tmp_path / "out")
    assert (taken.returncode, taken.stdout, taken.stderr.count("\n")) == (1, "", 1)
    assert taken.stderr.startswith("error: ")
    absent = run_command(tmp_path / "absent.gguf", tmp_path / "new")
    assert (absent.returncode, absent.stdout) == (3, "")
    assert absent.stderr == f"error: {tmp_path / 'absent.gguf'}: no such file or folder\n"
    assert main([str(tmp_path / "x.gguf"), str(tmp_path / "json"), "--json", "--shard-size", "50kB"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["path"] == str(tmp_path / "json")
    assert report["bytes"] == sum(report["files"].values())
    assert sum(name.endswith(".safetensors") for name in report["files"]) > 1
    for wrong in (["--dtype", "int8"], ["--shard-size", "0"], ["--shard-size", "big"], []):
        with pytest.raises(SystemExit) as caught:
            main([*wrong, str(tmp_path / "x.gguf")])
        assert caught.value.code == 2
    (tmp_path / "file").touch()
    assert main([str(tmp_path / "x.gguf"), str(tmp_path / "file" / "below")]) == 1
    assert capsys.readouterr().err.endswith(f"error: {tmp_path / 'file'}: File exists\n")


@pytest.mark.parametrize(("files", "reason"), [
    (["x.gguf"], "give the GGUF file itself, .*x.gguf"),
    (["model.safetensors"], "safetensors need no conversion"),
    (["pytorch_model.bin"], "Hugging Face's pickles are not supported"),
    ([], r"no consolidated\.\*\.pth in it"),
])  # fmt: skip
def test_folders_of_something_else(tmp_path, files, reason):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ModelFormatError, match=reason):
        convert(tmp_path, tmp_path / "out")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFormatError, match="neither a file nor a folder"):
        convert(tmp_path / "pipe", tmp_path / "out")


def test_help_does_not_import_torch():
    code = "import sys, tools.convert; assert not {'torch', 'sentencepiece', 'tqdm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_real_text_through_all_of_it(tmp_path):
    """The text a GGUF model continues is that of the model it was made from."""
    config, weights = write_gguf(tmp_path / "x.gguf", "Q8_0")
    folder = convert(tmp_path / "x.gguf", tmp_path / "out")
    text = TEXT.split(".")[0]
    ids = load_tokenizer(folder).encode(text)
    rounded = {
        name: to_float64(torch.tensor(value).bfloat16().view(torch.int16).numpy().tobytes(), "BF16").reshape(
            value.shape
        )
        for name, value in weights.items()
    }
    assert_is(folder, config, rounded, ids[:60])
