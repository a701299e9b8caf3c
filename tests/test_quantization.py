"""Quantised weights through the engine: on load, from a checkpoint that tools.quantize wrote, and what is refused."""

import gc
import json
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle.checkpoint import TEXT as WORDS
from oracle.checkpoint import make_checkpoint
from oracle.llama64 import load_weights, logprobs
from safetensors.torch import load_file, save_file

import models.loader
from engine import LLM, ConfigError, ModelFormatError, SamplingParams
from engine.config import EngineConfig
from kernels.reference_linear import dequantize, quantize
from tools import memory_plan
from tools import quantize as tool
from tools.convert_writer import TargetTakenError

STORIES = Path(__file__).parents[1] / "../shared/data/stories260k-hf"
TEXT = list(range(3, 120))
KINDS = [("int8", None), ("int4", 32), ("int4", 128)]


def load(path, **settings):
    return LLM(path, **{"threads": 1, "dtype": "float32", "skip_tokenizer_init": True, **settings})


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Of shapes that torch's packed operators have, but for the keys and values of a group."""
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(
        path, hidden_size=128, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        attention_bias=True, dtype="bfloat16", shards=2,
    )  # fmt: skip
    return path


@pytest.fixture(scope="module", params=KINDS, ids=str)
def written(directory, tmp_path_factory, request):
    name, group = request.param
    out = tmp_path_factory.mktemp("written") / "out"
    tool.quantize(str(directory), str(out), name, group, shard_bytes=60_000)
    return name, group, out


def as_read(name, weight, bits, group):
    """A weight of the checkpoint as the model has it, for the oracle."""
    matrix = weight.ndim == 2
    bits = 8 if "embed_tokens" in name or "lm_head" in name else bits
    return dequantize(quantize(torch.tensor(weight), bits, group or 0)).double().numpy() if matrix else weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "group"), KINDS)
def test_the_engine_computes_what_the_quantised_weights_say(directory, name, group, dtype):
    config = json.loads((directory / "config.json").read_text())
    weights = {key: as_read(key, value, int(name[3:]), group) for key, value in load_weights(directory).items()}
    exact = logprobs(config, weights, TEXT)
    llm = load(directory, quantization=name, quantization_group=group, dtype=dtype)
    error = np.abs(llm.score([TEXT])[0] - exact)
    assert error.max() < 1e-4 if dtype == "float32" else error.mean() < 0.05
    # Few rows at a time: the packed operators.
    answers = llm.generate([TEXT[:5], TEXT[:9]], SamplingParams(max_tokens=4, temperature=0, logprobs=1), False)
    for answer in answers:
        tokens = answer.prompt_token_ids + answer.token_ids
        found = [step[token] for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        wanted = logprobs(config, weights, tokens)[-len(found) :]
        assert np.abs(found - wanted).max() < (1e-4 if dtype == "float32" else 0.2)


def test_a_written_checkpoint_gives_the_same_bits(directory, written):
    name, group, out = written
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config == {"quant_method": "isotherm", "bits": int(name[3:])} | ({"group_size": group} if group else {})
    assert len(list(out.glob("*.safetensors"))) > 1
    assert (
        not {file.name for file in directory.iterdir()}
        - {file.name for file in out.iterdir()}
        - {file.name for file in directory.glob("model*.safetensors")}
    )
    for dtype in ("float32", "bfloat16"):
        ours = load(out, dtype=dtype)
        on_load = load(directory, dtype=dtype, quantization=name, quantization_group=group)
        assert np.array_equal(ours.score([TEXT])[0], on_load.score([TEXT])[0])
        assert ours.stats()["weights_bytes"] == on_load.stats()["weights_bytes"]
    assert np.array_equal(load(out, quantization=name, dtype=dtype).score([TEXT])[0], ours.score([TEXT])[0])
    twin = ours.twin(max_num_batched_tokens=16)
    assert np.abs(twin.score([TEXT])[0] - ours.score([TEXT])[0]).mean() < 0.05
    with pytest.raises(ConfigError, match="a twin has the same quantization"):
        ours.twin(quantization="int8")


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("model", ["tiny", "stories260K", "smollm2-135m"])
def test_planned_bytes_are_those_that_are_held(directory, model, name):
    path = {"tiny": directory, "stories260K": STORIES}.get(model, model)
    try:
        shape = memory_plan.shape(str(path))
    except (ConfigError, ModelFormatError) as error:
        pytest.skip(f"{model} is not here: {error}")
    llm = load(path, quantization=name, dtype="bfloat16", max_model_len=64)
    planned = memory_plan.weights_bytes(shape, 2, name)
    assert planned == llm._model.nbytes == llm.stats()["weights_bytes"] == held(llm._model)
    settings = EngineConfig(model=str(path), dtype="bfloat16", max_model_len=64)
    assert memory_plan.plan(shape, settings, name)["weights_bytes"] == planned


def held(model):
    """Bytes of all tensors of the model but the table of rotations, each storage once."""
    found = {}

    def walk(value):
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, tuple | list):
            any(map(walk, value))
        elif type(value).__name__ == "_Layer":
            walk(list(vars(value).values()))

    walk([model.layers, model.embedding, model.norm, model.head])
    return sum(found.values())


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_no_more_than_one_tensor_is_held_as_it_is_read(directory, name, monkeypatch):
    real, alive, most = models.loader.read_tensor, [], []

    def read(info):
        gc.collect()
        most.append(sum(made() is not None for made in alive))
        tensor = real(info)
        if len(info.shape) == 2:
            alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(models.loader, "read_tensor", read)
    load(directory, quantization=name)
    assert len(alive) == 16 and max(most) == 0


# Codes that are fitted to a text.


def divergence(path, base, ids):
    """Mean KL(base || path) of the predictions, nats."""
    exact, other = (torch.cat(list(load(one).logits(ids))).double().log_softmax(-1) for one in (base, path))
    return float((exact.exp() * (exact - other)).sum(-1).mean())


def fit_to(source, out, text, group, tokens=512, steps=0):
    file = out.parent / "text.txt"
    file.write_text(text)
    return tool.quantize(str(source), str(out), "int4", group, texts=[str(file)], tokens=tokens, steps=steps)


@pytest.mark.parametrize("group", [32, 128])
def test_a_fitted_text_loses_less_and_the_same_each_time(directory, tmp_path, group):
    half = len(WORDS) // 2
    plain = tool.quantize(str(directory), str(tmp_path / "plain"), "int4", group)
    fitted = fit_to(directory, tmp_path / "fitted", WORDS[:half], group)
    unseen = LLM(directory, threads=1).tokenizer.encode(WORDS[half:])[:200]
    assert divergence(fitted, directory, unseen) < 0.7 * divergence(plain, directory, unseen)
    again = fit_to(directory, tmp_path / "again", WORDS[:half], group)
    assert [file.read_bytes() for file in sorted(again.iterdir())] == [
        file.read_bytes() for file in sorted(fitted.iterdir())
    ]


def test_a_trained_model_loses_less_on_its_own_kind_of_text(tmp_path):
    if not STORIES.is_dir():
        pytest.skip("stories260K is not here")
    told = json.loads((STORIES / "expected_greedy.json").read_text())
    llm = LLM(STORIES, threads=1, dtype="float32", seed=0)
    stories = llm.generate([[1]] * 12, SamplingParams(max_tokens=128), use_tqdm=False)
    text = "\n".join(story.text for story in stories)
    fitted = fit_to(STORIES, tmp_path / "fitted", text, 64, 2048)
    tuned = fit_to(STORIES, tmp_path / "tuned", text, 64, 2048, steps=16)
    plain = tool.quantize(str(STORIES), str(tmp_path / "plain"), "int4", 64)
    unseen = told["prompt_ids"] + told["greedy_ids"]
    assert divergence(fitted, STORIES, unseen) < 0.8 * divergence(plain, STORIES, unseen)
    assert divergence(tuned, STORIES, unseen) < 0.98 * divergence(fitted, STORIES, unseen)


def test_tuning_changes_scales_zeros_and_norms_alone_and_the_same_each_time(directory, tmp_path):
    words = [("fitted", 0), ("tuned", 16), ("again", 16)]
    fitted, tuned, again = (fit_to(directory, tmp_path / name, WORDS, 32, steps=steps) for name, steps in words)
    before, after, twice = (load_file(out / "model.safetensors") for out in (fitted, tuned, again))
    assert all(torch.equal(twice[name], tensor) for name, tensor in after.items())
    changed = {name for name, tensor in after.items() if not torch.equal(before[name], tensor)}
    assert all("layers" in name or "norm" in name for name in changed)
    assert {name.split("_")[-1].split(".")[-1] for name in changed} == {"scale", "zero", "weight"}
    assert all("norm" in name for name in changed if name.endswith(".weight"))
    ids = LLM(directory, threads=1).tokenizer.encode(WORDS)[:256]
    assert divergence(tuned, directory, ids) < divergence(fitted, directory, ids)


def test_a_group_that_is_constant_and_inputs_that_are_never_used_are_fitted(tmp_path):
    make_checkpoint(tmp_path / "model")
    tensors = load_file(tmp_path / "model/model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][:4] = 0.0
    tensors["model.layers.0.input_layernorm.weight"][:8] = 0.0
    tensors["model.layers.1.mlp.gate_proj.weight"][:] = 0.0  # so that its down_proj gets zeros alone
    save_file(tensors, tmp_path / "model/model.safetensors")
    out = fit_to(tmp_path / "model", tmp_path / "out", WORDS, 32)
    assert np.isfinite(load(out, check_tensors=True).score([TEXT])[0]).all()


# What is refused.


@pytest.mark.parametrize(
    ("name", "text", "settings", "words"),
    [
        ("int8", WORDS, {}, "--text is for int4, and --quantization is int8"),
        ("int4", WORDS, {"tokens": 100}, "--tokens must be 128 or more to fit to, got 100"),
        ("int4", "", {}, "text.txt is empty, and cannot be fitted to"),
        ("int4", "a", {}, "--text has [0-9]+ tokens, 128 at least"),
        ("int4", WORDS, {"steps": -1}, "--steps must be 0 or more, and above 0 needs --text, got -1"),
        ("int4", None, {"steps": 5}, "--steps must be 0 or more, and above 0 needs --text, got 5"),
    ],
)
def test_texts_that_are_refused(directory, tmp_path, name, text, settings, words):
    (tmp_path / "text.txt").write_text(text or "")
    texts = [] if text is None else [str(tmp_path / "text.txt")]
    with pytest.raises(ConfigError, match=words):
        tool.quantize(str(directory), str(tmp_path / "out"), name, texts=texts, **settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization": "int3"}, "quantization must be int8 or int4, got 'int3'"),
        ({"quantization": "int4", "quantization_group": 48}, "quantization_group must be 32, 64 or 128, got 48"),
        ({"quantization_group": 64}, "quantization_group 64 is of int4, and quantization is None"),
        ({"quantization": "int8", "quantization_group": 64}, "is of int4, and quantization is int8"),
    ],
)
def test_settings_that_are_refused(directory, settings, words):
    with pytest.raises(ConfigError, match=words):
        load(directory, **settings)


def test_another_quantization_than_the_checkpoints_is_refused(written):
    name, group, out = written
    other = "int4" if name == "int8" else "int8"
    with pytest.raises(ConfigError, match=rf"weights are {name}.* already, not {other}.*leave the settings out"):
        load(out, quantization=other)
    if name == "int4":
        with pytest.raises(ConfigError, match=f"in groups of {group} already, not int4 in groups of 64"):
            load(out, quantization_group=64)
    with pytest.raises(ConfigError, match="already; quantise what they were made from"):
        tool.quantize(str(out), str(out) + "-again", name)


def test_an_odd_number_of_inputs_is_refused_in_four_bits(tmp_path):
    make_checkpoint(tmp_path, intermediate_size=113, tokenizer=False)
    with pytest.raises(ConfigError, match=r"int4 needs an even number of inputs; use int8: .*down_proj.weight has 113"):
        load(tmp_path, quantization="int4")
    load(tmp_path, quantization="int8").score([TEXT])


def test_a_taken_folder_is_refused_and_a_failure_leaves_none(directory, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "a").write_text("")
    with pytest.raises(TargetTakenError, match="not an empty folder"):
        tool.quantize(str(directory), str(taken), "int8")
    broken = tmp_path / "broken"
    make_checkpoint(broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ModelFormatError, match=r"layers.1.mlp.up_proj.weight has values that are NaN"):
        tool.quantize(str(broken), str(tmp_path / "out"), "int8")
    assert {path.name for path in tmp_path.iterdir()} == {"taken", "broken"}


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda c, t: t.pop(f"{UP}_scale"), ModelFormatError, rf"tensors are missing: {UP}_scale"),
        (lambda c, t: t.pop(f"{UP}_zero"), ModelFormatError, rf"tensors are missing: {UP}_zero"),
        (lambda c, t: t.update({UP: t[UP][:, :-1].clone()}), ModelFormatError, rf"'{UP}' has shape \(112, 31\), .*32"),
        (lambda c, t: t.update({UP: t[UP].view(torch.int8)}), ModelFormatError, rf"'{UP}' is I8, supported: U8"),
        (lambda c, t: t.update({UP: t[UP].float()}), ModelFormatError, rf"'{UP}' is F32, supported: U8"),
        (
            lambda c, t: t.update({f"{UP}_scale": t[f"{UP}_scale"].float()}), ModelFormatError,
            f"'{UP}_scale' is F32, supported: BF16",
        ),
        (lambda c, t: c.update(bits=3), ConfigError, "bits must be 8 or 4, got 3"),
        (lambda c, t: c.update(bits=True), ConfigError, "bits must be 8 or 4, got True"),
        (lambda c, t: c.pop("bits"), ConfigError, "bits must be 8 or 4, got None"),
        (lambda c, t: c.update(group_size=48), ConfigError, "group_size must be 32 or 64 or 128, got 48"),
        (lambda c, t: c.pop("group_size"), ConfigError, "group_size must be 32 or 64 or 128, got 0"),
        (lambda c, t: c.update(group_size=128), ModelFormatError, r"_scale' has shape \(\d+, 2\), config.json says"),
        (lambda c, t: c.update(bits=8), ConfigError, "group_size must be 0, got 32"),
        (lambda c, t: c.update(quant_method="gptq"), ConfigError, "quantization_config 'gptq' is not supported"),
        (lambda c, t: t.update({f"{UP}_scale": t[f"{UP}_scale"] * float("nan")}), ModelFormatError, f"{UP}_scale"),
    ],
)  # fmt: skip
def test_a_malformed_checkpoint_is_refused_by_name(tmp_path, change, error, words):
    make_checkpoint(tmp_path / "model")
    out = tool.quantize(str(tmp_path / "model"), str(tmp_path / "out"), "int4", 32)
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    change(config["quantization_config"], tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    with pytest.raises(error, match=words):
        load(out, check_tensors=True)


def test_what_is_kept_on_flash_is_of_one_quantization(directory, tmp_path):
    """The same prompt is found again by the same quantisation, and by no other."""
    settings = {"flash_cache_dir": tmp_path, "flash_cache_persist": True, "page_size": 16}
    prompt, cached = TEXT[:100], []
    for changes in (
        {}, {"quantization": "int8"}, {"quantization": "int8"}, {"quantization": "int4"},
        {"quantization": "int4", "quantization_group": 64},
    ):  # fmt: skip
        llm = load(directory, **settings, **changes)
        answer = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)[0]
        cached.append(answer.num_cached_tokens)
        llm._cache.flash.close()  # as at the end of the process
    assert cached[0] == cached[1] == cached[3] == cached[4] == 0
    assert cached[2] > 64
