"""Checkpoints from strangers: read to the bit, or refused by a ModelFormatError that names the file, never a signal.

What the loader's rules make of the odd files: a header may begin with spaces (JSON allows it); a tensor without a name
is refused; F8_E4M3 is read as a header, but no model is filled from it.
"""

import json
import math
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from oracle.checkpoint import DEFAULTS, make_checkpoint, random_weights, write_safetensors, write_weights

from engine import LLM, SamplingParams, TokenizerError
from models.checkpoint import open_checkpoint, read_header
from models.errors import ModelFormatError
from models.files import MAX_JSON_BYTES, read_object
from models.llama.config import LlamaConfig
from models.llama.model import LlamaWeights
from models.loader import load_weights, read_tensor
from models.resolve import ALIASES, cache_directory, resolve

ROOT = Path(__file__).resolve().parents[1]
CRAFTED = ROOT.parent / "shared" / "data" / "safetensors-malformed"
needs_crafted = pytest.mark.skipif(not CRAFTED.is_dir(), reason=f"no {CRAFTED}")


def crafted(prefix):
    return [pytest.param(file, id=file.stem) for file in sorted(CRAFTED.glob(f"{prefix}_*.safetensors"))] or [
        pytest.param(None, id="absent", marks=needs_crafted)
    ]


def header(entries, data=b"", pad=0):
    """A safetensors file from its parts."""
    encoded = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    encoded += b" " * pad
    return len(encoded).to_bytes(8, "little") + encoded + data


def entry(begin, end, shape=(2, 2), dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refused(path, pattern=""):
    """The header is refused at once, by a message with the file's name; returns the message."""
    started = time.process_time()
    with pytest.raises(ModelFormatError, match=pattern or None) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert time.process_time() - started < 5  # milliseconds
    return str(caught.value)


# Files that others made.


@needs_crafted
def test_the_crafted_files_are_there():
    named = json.loads((CRAFTED / "expected.json").read_text())["files"]
    assert {file.stem for file in CRAFTED.glob("*.safetensors")} == named.keys()
    assert len(named) > 25 and all(name.startswith(("ok_", "bad_", "odd_")) for name in named)


@pytest.mark.parametrize("file", crafted("bad"))
def test_crafted_bad_files_are_refused(file):
    refused(file)


@pytest.mark.parametrize("file", crafted("ok"))
def test_crafted_good_files_are_read_as_the_library_reads_them(file):
    expected = safetensors.torch.load_file(file)
    tensors = read_header(file)
    assert tensors.keys() == expected.keys()
    for name, info in tensors.items():
        tensor = read_tensor(info)
        assert tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape
        assert torch.equal(tensor, expected[name])


@needs_crafted
def test_crafted_odd_files():
    space = CRAFTED / "odd_leading_space.safetensors"
    assert torch.equal(read_tensor(read_header(space)["a"]), safetensors.torch.load_file(space)["a"])
    refused(CRAFTED / "odd_name_empty.safetensors", "not a tensor name")
    (info,) = read_header(CRAFTED / "odd_f8_e4m3.safetensors").values()
    assert (info.dtype, info.shape, info.nbytes) == ("F8_E4M3", (4,), 4)
    with pytest.raises(ModelFormatError, match=r"odd_f8_e4m3.*'a' is F8_E4M3, supported: F32, BF16, F16"):
        load_weights({"a": torch.empty(4, device="meta")}, {"a": info}, torch.float32, torch.device("cpu"))


# Reading.


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (0, 4), (4, 0, 2), (2, 3, 4, 5), (100, 1000)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["F32", "BF16", "F16"])
def test_every_dtype_and_shape_is_read_to_the_bit(tmp_path, dtype, shape):
    file = tmp_path / "x.safetensors"
    # Bit patterns at random: NaN with payloads, infinities, denormals. An odd number of bytes before them.
    bits = torch.randint(-(1 << 15), 1 << 15, (*shape, 2), dtype=torch.int16)
    tensor = (bits if dtype == torch.float32 else bits[..., :1].contiguous()).view(dtype).reshape(shape)
    safetensors.torch.save_file({"before": torch.ones(3, dtype=torch.uint8), "x": tensor}, file)
    info = read_header(file)["x"]
    read = read_tensor(info)
    assert read.dtype == dtype and read.shape == shape
    assert torch.equal(read.contiguous().view(torch.int16) if read.dim() else read.reshape(1).view(torch.int16),
                       tensor.view(torch.int16) if tensor.dim() else tensor.reshape(1).view(torch.int16))  # fmt: skip
    file.write_bytes(b"")  # memory of its own
    assert read.numel() == math.prod(shape) and read.float().sum() is not None


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_checkpoint_is_loaded_and_converted(tmp_path, dtype, shards, wanted):
    config = make_checkpoint(tmp_path, dtype=dtype, shards=shards, tokenizer=False, attention_bias=True)
    module = LlamaWeights(LlamaConfig.from_dict(config))
    seen = []

    def progress(names):
        for name in names:
            seen.append(name)
            yield name

    load_weights(module, open_checkpoint(tmp_path), wanted, torch.device("cpu"), progress)
    expected = {k: v for f in tmp_path.glob("*.safetensors") for k, v in safetensors.torch.load_file(f).items()}
    assert sorted(seen) == sorted(expected) == sorted(module)
    for name, tensor in expected.items():
        assert torch.equal(module[name], tensor.to(wanted)), name
        assert not module[name].is_meta


# Headers.

GOOD = {"a": entry(0, 16), "b": entry(16, 32)}


def with_b(**changes):
    return {"a": entry(0, 16), "b": {**entry(16, 32), **changes}}


HEADERS = {
    "truncated-data": (header(GOOD, bytes(31)), "end at byte .* the file has .*truncated"),
    "truncated-header": (header(GOOD, bytes(32))[:60], "truncated or not safetensors: 60 bytes"),
    "seven-bytes": (b"\x02\0\0\0\0\0\0", "truncated"),
    "trailing-byte": (header(GOOD, bytes(33)), "the file has"),
    "length-one": (b"\x01\0\0\0\0\0\0\0{}", "truncated or not safetensors"),
    "length-negative": (b"\xff" * 8 + bytes(100), "truncated or not safetensors"),
    "gzip": (b"\x1f\x8b\x08\0" + bytes(100), ""),
    "zip": (b"PK\x03\x04" + bytes(100), ""),
    "html": (b"<!DOCTYPE html><html>not found</html>", "not safetensors"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n", "Git LFS pointer.*git lfs pull"),
    "bad-utf8": (header(b'{"\xff": 1}'), "not valid JSON"),
    "utf16": (header(json.dumps(GOOD).encode("utf-16"), bytes(32)), "not valid JSON"),
    "deep": (header(b"[" * 100_000 + b"]" * 100_000), "nested too deeply"),
    "deep-objects": (header(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "nested too deeply"),
    "string": (header(b'"tensors"'), "must be an object"),
    "nan-in-json": (header(b'{"a": NaN}'), "not an object"),
    "duplicate-tensor": (header(b'{"a": 1, "b": 2, "a": 3}'), "duplicate key 'a'"),
    "duplicate-equal": (
        header(b'{"a": %b, "a": %b}' % ((json.dumps(entry(0, 16)).encode(),) * 2), bytes(16)), "duplicate key 'a'",
    ),
    "duplicate-field": (
        header(b'{"a": {"dtype": "F32", "dtype": "F16", "shape": [8], "data_offsets": [0, 16]}}', bytes(16)),
        "duplicate key 'dtype'",
    ),
    "duplicate-metadata": (header(b'{"__metadata__": {"x": "1", "x": "2"}}'), "duplicate key 'x'"),
    "metadata-number": (header({"__metadata__": {"x": 1}}), "__metadata__ must map strings"),
    "metadata-list": (header({"__metadata__": []}), "__metadata__ must map strings"),
    "metadata-null": (header({"__metadata__": None}), "__metadata__ must map strings"),
    "overlap": (header({"a": entry(0, 16), "b": entry(8, 24)}, bytes(24)), "'b' begins at byte"),
    "same-range": (header({"a": entry(0, 16), "b": entry(0, 16)}, bytes(16)), "begins at byte"),
    "hole": (header({"a": entry(0, 16), "b": entry(20, 36)}, bytes(36)), "'b' begins at byte"),
    "hole-at-start": (header({"a": entry(4, 20)}, bytes(20)), "'a' begins at byte"),
    "reversed": (header(with_b(data_offsets=[32, 16]), bytes(32)), "takes 16 bytes, data_offsets give -16"),
    "shape-x-dtype": (header(with_b(shape=[2, 3]), bytes(32)), "'b'.*takes 24 bytes, data_offsets give 16"),
    "dtype-size": (header(with_b(dtype="F16"), bytes(32)), "takes 8 bytes"),
    "one-offset": (header(with_b(data_offsets=[16]), bytes(32)), "two offsets"),
    "three-offsets": (header(with_b(data_offsets=[16, 32, 48]), bytes(32)), "two offsets"),
    "offset-bool": (header(with_b(data_offsets=[True, 32]), bytes(32)), "two offsets"),
    "offset-float": (header(with_b(data_offsets=[16.0, 32]), bytes(32)), "two offsets"),
    "offset-huge": (header(with_b(data_offsets=[1 << 70, (1 << 70) + 16]), bytes(32)), "two offsets"),
    "offsets-object": (header(with_b(data_offsets={"begin": 16}), bytes(32)), "two offsets"),
    "shape-bool": (header(with_b(shape=[True, 4]), bytes(32)), "shape must be"),
    "shape-overflow": (header(with_b(shape=[1 << 40, 1 << 40]), bytes(32)), "data_offsets give 16"),
    "shape-string": (header(with_b(shape="22"), bytes(32)), "shape must be"),
    "shape-huge-but-empty": (header({"a": entry(0, 0, [0, 1 << 63])}), "shape must be"),
    "rank-5": (header(with_b(shape=[1, 1, 1, 2, 2]), bytes(32)), "at most 4 sizes"),
    "rank-100000": (header(with_b(shape=[1] * 100_000), bytes(32)), "at most 4 sizes"),
    "dtype-lower": (header(with_b(dtype="f32"), bytes(32)), "unknown dtype 'f32'"),
    "dtype-list": (header(with_b(dtype=["F32"]), bytes(32)), "unknown dtype"),
    "dtype-object": (header(with_b(dtype={"F32": 1}), bytes(32)), "unknown dtype"),
    "dtype-null": (header(with_b(dtype=None), bytes(32)), "unknown dtype None"),
    "entry-list": (header({"a": [0, 16]}, bytes(16)), "not an object"),
    "name-parent": (header({"../a": entry(0, 16)}, bytes(16)), "not a tensor name"),
    "name-backslash": (header({"..\\a": entry(0, 16)}, bytes(16)), "not a tensor name"),
    "name-dots": (header({"..": entry(0, 16)}, bytes(16)), "not a tensor name"),
    "name-long": (header({"a" * 10**6: entry(0, 16)}, bytes(16)), "not a tensor name"),
    "xet": (b"# xet version 0\nfilesize = 99\nhash = '00'\n", "Git XET pointer"),
    "name-nul": (header({"a\0b": entry(0, 16)}, bytes(16)), "not a tensor name"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_bad_headers_are_refused(tmp_path, case):
    data, pattern = HEADERS[case]
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    assert len(refused(file, pattern)) < 500


@pytest.mark.parametrize("length", [MAX_JSON_BYTES + 1, 1 << 30])
def test_a_header_over_the_limit_is_not_read(tmp_path, length):
    file = tmp_path / "model.safetensors"
    with file.open("wb") as f:
        f.write(length.to_bytes(8, "little"))
        f.truncate(length + 100)  # sparse
    refused(file, f"header of {length} bytes, over the limit of {MAX_JSON_BYTES}")


def test_headers_as_long_as_allowed_do_not_hang(tmp_path):
    many = ",".join(f'"{i:x}":0' for i in range(300_000))
    file = tmp_path / "model.safetensors"
    for text, pattern in ((many, "at most 100000 tensors"), (many + ',"x":1,"x":2', "duplicate key 'x'")):
        file.write_bytes(header(f"{{{text}}}".encode()))
        started = time.process_time()
        with pytest.raises(ModelFormatError, match=pattern):
            read_header(file)
        assert time.process_time() - started < 30  # half a second, on a fast machine


def test_a_good_header_is_read(tmp_path):
    file = tmp_path / "model.safetensors"
    entries = {"__metadata__": {"format": "pt"}, "b": entry(16, 32), "a": entry(0, 16), "none": entry(16, 16, [0, 9])}
    file.write_bytes(header(entries, bytes(range(32)), pad=5))
    tensors = read_header(file)
    start = 8 + len(json.dumps(entries)) + 5
    assert {name: (i.dtype, i.shape, i.offset, i.nbytes) for name, i in tensors.items()} == {
        "a": ("F32", (2, 2), start, 16),
        "b": ("F32", (2, 2), start + 16, 16),
        "none": ("F32", (0, 9), start + 16, 0),
    }


# Things that are not files, and names that lead elsewhere.


def make_fifo(path):
    if not hasattr(os, "mkfifo"):
        pytest.skip("no FIFOs here")
    os.mkfifo(path)


INSTEAD = {
    "directory": Path.mkdir,
    "fifo": make_fifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link-to-directory": lambda path: path.symlink_to(path.parent),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", INSTEAD)
@pytest.mark.parametrize(
    "name", ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
)
def test_what_is_not_a_regular_file_is_refused_and_not_waited_for(tmp_path, name, kind):
    make_checkpoint(tmp_path, tokenizer=False, shards=1 if name == "model.safetensors" else 2)
    (tmp_path / name).unlink()
    INSTEAD[kind](tmp_path / name)
    with pytest.raises(ModelFormatError, match=f"{name}: not a regular file"):
        open_checkpoint(tmp_path)


def hub_snapshot(root, repository="models--org--name"):
    """A checkpoint as the Hugging Face cache has it; returns (snapshot, blobs)."""
    blobs = root / repository / "blobs"
    make_checkpoint(root / "made")
    blobs.mkdir(parents=True)
    snapshot = root / repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for i, file in enumerate((root / "made").iterdir()):
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{i:040x}")
        file.rename(blobs / f"{i:040x}")
    return snapshot, blobs


def test_links_to_blobs_are_followed_as_the_hugging_face_cache_has_them(tmp_path):
    snapshot, blobs = hub_snapshot(tmp_path)
    LLM(snapshot, threads=1)
    (tmp_path / "elsewhere").symlink_to(snapshot)  # a link to the whole directory is the user's own
    LLM(tmp_path / "elsewhere", threads=1)
    for blob in blobs.iterdir():
        blob.unlink()
    with pytest.raises(ModelFormatError, match=r"no model\.safetensors"):
        open_checkpoint(snapshot)


MODEL_FILES = [
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json",
]  # fmt: skip


@pytest.mark.parametrize("name", MODEL_FILES)
@pytest.mark.parametrize("layout", ["plain", "snapshots", "hub-other-place", "hub-other-model"])
def test_a_link_that_leads_out_of_the_model_directory_is_refused(tmp_path, name, layout):
    """Also in what only looks like the Hugging Face cache, and in that cache to any place but the model's own blobs."""
    if layout == "plain":
        directory, outside = tmp_path / "model", tmp_path / "secret"
        make_checkpoint(directory)
    else:
        repository = "name" if layout == "snapshots" else "models--org--name"
        directory, blobs = hub_snapshot(tmp_path, repository)
        outside = {
            "snapshots": blobs / "x", "hub-other-place": blobs.parent / "x",
            "hub-other-model": tmp_path / "models--org--other" / "blobs" / "x",
        }[layout]  # fmt: skip
        if layout == "snapshots":  # no link of this directory may leave it: files instead
            for file in list(directory.iterdir()):
                data = file.read_bytes()
                file.unlink()
                file.write_bytes(data)
        outside.parent.mkdir(parents=True, exist_ok=True)
    outside.write_bytes((directory / name).read_bytes())
    (directory / name).unlink()
    (directory / name).symlink_to(outside)
    with pytest.raises((ModelFormatError, TokenizerError), match="leads out of the model directory") as caught:
        LLM(directory, threads=1)
    assert f"{directory / name}: " in str(caught.value) and str(outside) in str(caught.value)


def test_a_link_within_the_directory_is_fine(tmp_path):
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    (tmp_path / "model.safetensors").symlink_to("weights.safetensors")
    LLM(tmp_path, threads=1)


POINTERS = {
    "lfs": ("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n", "Git LFS pointer.*git lfs pull"),
    "xet": ("# xet version 0\nfilesize = 99\nhash = '00'\n", "Git XET pointer.*git xet checkout"),
}


@pytest.mark.parametrize("kind", POINTERS)
@pytest.mark.parametrize("name", MODEL_FILES)
def test_a_pointer_in_place_of_a_file_is_named(tmp_path, name, kind):
    make_checkpoint(tmp_path)
    text, pattern = POINTERS[kind]
    (tmp_path / name).write_text(text)
    with pytest.raises((ModelFormatError, TokenizerError), match=pattern) as caught:
        LLM(tmp_path, threads=1)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_json_file_over_16_mb_is_refused(tmp_path, name):
    make_checkpoint(tmp_path)
    with (tmp_path / name).open("ab") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises((ModelFormatError, TokenizerError), match=f"{name}: larger than 16 MB"):
        LLM(tmp_path, threads=1)


def test_an_index_over_16_mb_is_refused(tmp_path):
    make_checkpoint(tmp_path, shards=2)
    with (tmp_path / "model.safetensors.index.json").open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelFormatError, match=r"index\.json: larger than 16 MB"):
        LLM(tmp_path, threads=1)


def test_an_index_that_maps_a_tensor_twice_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}'
    )
    with pytest.raises(ModelFormatError, match=r"index\.json: not valid JSON: duplicate key 'a'"):
        open_checkpoint(tmp_path)


def test_code_of_a_model_directory_is_never_run(tmp_path):
    config = make_checkpoint(tmp_path)
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": "evil.T"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mark = f"open({str(tmp_path / 'executed')!r}, 'w')\n"
    for name in ("evil", "modeling_llama", "configuration_llama", "tokenization_llama", "__init__", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(mark)
    LLM(tmp_path, threads=1).generate("a", SamplingParams(max_tokens=1))
    done = run_python("from engine import LLM; LLM('.', threads=1)", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "executed").exists()


BAD_SHARDS = [
    "../secret.safetensors", "/etc/secret.safetensors", "sub/x.safetensors", "model.safetensors/", "..", ".", "",
    "x.bin", "x.pth", 7, None, True, ["x.safetensors"], {"x.safetensors": 1},
]  # fmt: skip


@pytest.mark.parametrize("shard", BAD_SHARDS, ids=str)
def test_an_index_can_name_only_safetensors_files_beside_it(tmp_path, shard):
    outside = tmp_path / "secret.safetensors"
    write_safetensors(outside, {"a": np.ones(4, np.float32)}, "float32")
    directory = tmp_path / "model"
    (directory / "sub").mkdir(parents=True)
    write_safetensors(directory / "sub" / "x.safetensors", {"a": np.ones(4, np.float32)}, "float32")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelFormatError, match=r"index\.json.*is not the name of a safetensors file"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    "shard", ["nul\0.safetensors", "\ud800.safetensors", "x" * 5000 + ".safetensors"], ids=["nul", "surrogate", "long"]
)
def test_names_that_no_file_can_have_are_missing_shards(tmp_path, shard):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelFormatError, match="are missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("{}", "weight_map must map"),
        ('{"weight_map": {}}', "weight_map must map"),
        ('{"weight_map": []}', "weight_map must map"),
        ('{"weight_map": "model.safetensors"}', "weight_map must map"),
        ("[]", "expected a JSON object, got list"),
        ("", "not valid JSON"),
        ('{"weight_map": {"a": "x.saf', "not valid JSON"),
        ("[" * 200_000, "nested too deeply"),
    ],
    ids=["empty-object", "no-tensors", "list-map", "string-map", "list", "empty-file", "cut", "deep"],
)
def test_a_bad_index_is_refused(tmp_path, text, pattern):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(ModelFormatError, match=pattern) as caught:
        open_checkpoint(tmp_path)
    assert str(index) in str(caught.value)


def test_the_index_counts_and_its_total_size_does_not(tmp_path):
    """A tensor is read from the shard that the index names, whatever else lies in the shards or the directory."""
    weights = {"a": np.full(4, 1, np.float32), "b": np.full(4, 2, np.float32)}
    write_safetensors(tmp_path / "1.safetensors", weights, "float32")
    write_safetensors(tmp_path / "2.safetensors", {"a": np.full(4, 3, np.float32)}, "float32")
    write_safetensors(tmp_path / "model.safetensors", {"z": np.full(4, 9, np.float32)}, "float32")
    index = {"metadata": {"total_size": -5}, "weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {k: float(read_tensor(v)[0]) for k, v in open_checkpoint(tmp_path).items()} == {"a": 3.0, "b": 2.0}


def test_all_missing_shards_are_listed(tmp_path):
    make_checkpoint(tmp_path, tokenizer=False, shards=4)
    for i in (2, 4):
        (tmp_path / f"model-0000{i}-of-00004.safetensors").unlink()
    with pytest.raises(
        ModelFormatError, match=r"missing: model-00002-of-00004\.\w+, model-00004-of-00004\.\w+$"
    ) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_all_tensors_that_are_not_in_their_shards_are_listed(tmp_path):
    make_checkpoint(tmp_path, tokenizer=False, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    last = "model-00002-of-00002.safetensors"
    content["weight_map"] |= {"model.embed_tokens.weight": last, "ghost.weight": last}
    index.write_text(json.dumps(content))
    with pytest.raises(ModelFormatError, match=rf"ghost\.weight \({last}\), model\.embed_tokens\.weight \({last}\)"):
        open_checkpoint(tmp_path)


# What the model wants, and what there is.


def load_into(directory, config):
    module = LlamaWeights(LlamaConfig.from_dict(config))
    load_weights(module, open_checkpoint(directory), torch.float32, torch.device("cpu"))
    return module


def checkpoint_with(directory, change=lambda weights: None, **overrides):
    """A checkpoint whose weights `change` has seen; returns its config."""
    config = make_checkpoint(directory, tokenizer=False, **overrides)
    weights = random_weights(config, 0)
    change(weights)
    write_weights(directory, weights)
    return config


def test_all_missing_tensors_are_listed(tmp_path):
    gone = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.o_proj.weight", "model.norm.weight"]
    config = checkpoint_with(tmp_path, lambda weights: [weights.pop(name) for name in gone])
    with pytest.raises(ModelFormatError, match="tensors are missing: " + ", ".join(gone)) as caught:
        load_into(tmp_path, config)
    assert str(tmp_path) in str(caught.value)


def test_all_surplus_tensors_are_listed(tmp_path):
    extra = ["model.layers.0.self_attn.q_norm.weight", "score.weight"]
    config = checkpoint_with(tmp_path, lambda weights: weights.update({name: np.ones(4, np.float32) for name in extra}))
    with pytest.raises(ModelFormatError, match="no place for: " + ", ".join(extra)):
        load_into(tmp_path, config)


def test_rotary_tables_of_early_conversions_are_left_out(tmp_path):
    names = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(2)]
    config = checkpoint_with(tmp_path, lambda weights: weights.update({name: np.ones(8, np.float32) for name in names}))
    assert not any("inv_freq" in name for name in load_into(tmp_path, config))


def test_a_tied_model_does_not_look_at_a_head_in_its_file(tmp_path):
    def add_head(weights):
        weights["lm_head.weight"] = np.full((1, 1), np.nan, np.float32)  # not even its shape

    config = checkpoint_with(tmp_path, add_head, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_into(tmp_path, config)


def test_an_untied_model_needs_its_head(tmp_path):
    config = checkpoint_with(tmp_path, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(ModelFormatError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load_into(tmp_path, config)


def test_a_wrong_shape_gives_both(tmp_path):
    config = checkpoint_with(tmp_path, lambda weights: weights.update({"model.norm.weight": np.ones(63, np.float32)}))
    with pytest.raises(
        ModelFormatError, match=r"model\.safetensors: tensor 'model\.norm\.weight' has shape \(63,\), .*\(64,\)"
    ):
        load_into(tmp_path, config)


@pytest.mark.parametrize("dtype", ["float64", "int8", "uint8", "int64", "bool"])
def test_dtypes_that_are_no_weights_are_refused(tmp_path, dtype):
    config = checkpoint_with(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(64).to(getattr(torch, dtype))
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    name = {"float64": "F64", "int8": "I8", "uint8": "U8", "int64": "I64", "bool": "BOOL"}[dtype]
    with pytest.raises(
        ModelFormatError, match=rf"model\.safetensors: tensor 'model\.norm\.weight' is {name}, supported: F32"
    ):
        load_into(tmp_path, config)


class Marker:
    """Creates a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path(self.path).touch, ())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_a_pickle_is_never_loaded(tmp_path, name):
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Marker(str(tmp_path / "executed"))}, tmp_path / name)
    (tmp_path / "modeling_llama.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    with pytest.raises(ModelFormatError, match=rf"{name} is a pickle, which is never loaded: use the safetensors"):
        LLM(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_an_empty_directory_says_what_was_looked_for(tmp_path):
    with pytest.raises(ModelFormatError, match=r"no model\.safetensors and no model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def test_everything_is_checked_before_a_byte_of_weights_is_read(tmp_path, monkeypatch):
    config = checkpoint_with(tmp_path, lambda weights: weights.update({"model.norm.weight": np.ones(63, np.float32)}))
    monkeypatch.setattr("models.loader.read_tensor", lambda info: pytest.fail("a tensor was read"))
    with pytest.raises(ModelFormatError, match="63"):
        load_into(tmp_path, config)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_check_tensors_names_all_that_are_not_finite(tmp_path, value, dtype):
    make_checkpoint(tmp_path)
    weights = random_weights(DEFAULTS, 0)
    bad = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    for name in bad:
        weights[name].flat[-1] = value
    write_safetensors(tmp_path / "model.safetensors", weights, "float32" if dtype == "bfloat16" else dtype)
    LLM(tmp_path, threads=1, dtype=dtype)  # nobody looks
    with pytest.raises(ModelFormatError, match="NaN or infinite values: " + ", ".join(bad) + "$") as caught:
        LLM(tmp_path, threads=1, dtype=dtype, check_tensors=True)
    assert str(tmp_path) in str(caught.value)


def test_check_tensors_sees_what_a_conversion_makes(tmp_path):
    make_checkpoint(tmp_path)
    weights = random_weights(DEFAULTS, 0)
    weights["model.norm.weight"][3] = 70000.0
    write_weights(tmp_path, weights)
    LLM(tmp_path, threads=1, dtype="float32", check_tensors=True)
    with pytest.raises(ModelFormatError, match=r"model\.norm\.weight \(finite in F32, not in float16\)"):
        LLM(tmp_path, threads=1, dtype="float16", check_tensors=True)


def test_a_lying_config_is_found_before_memory_is_asked_for(tmp_path):
    """1,024 layers would need more cache than there is: what is said is that the tensors are not there."""
    config = make_checkpoint(tmp_path)
    config |= {"num_hidden_layers": 1024, "max_position_embeddings": 1 << 27}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFormatError, match=r"tensors are missing: model\.layers\.10.* more"):
        LLM(tmp_path, threads=1)


# JSON files.


@pytest.mark.parametrize(
    ("data", "pattern"),
    [
        (b"", "not valid JSON"),
        (b'{"a": 1', "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (json.dumps({"a": 1}).encode("utf-16"), "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[1]", "expected a JSON object, got list"),
        (b"null", "expected a JSON object, got NoneType"),
        (b" " * (MAX_JSON_BYTES + 1), "larger than 16 MB"),
    ],
    ids=["empty", "cut", "latin1", "utf16", "deep-list", "deep-object", "long-number", "list", "null", "large"],
)
def test_bad_json_is_refused(tmp_path, data, pattern):
    file = tmp_path / "config.json"
    file.write_bytes(data)
    with pytest.raises(ModelFormatError, match=pattern) as caught:
        read_object(file)
    assert str(file) in str(caught.value) and len(str(caught.value)) < 500


def test_a_byte_order_mark_and_windows_newlines_are_read(tmp_path):
    (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf{"a": [1,\r\n 2]}\r\n')
    assert read_object(tmp_path / "x.json") == {"a": [1, 2]}


def test_a_missing_json_file_is_named(tmp_path):
    with pytest.raises(ModelFormatError, match=r"config\.json: no such file"):
        read_object(tmp_path / "config.json")


# Files that change.


@pytest.mark.parametrize("change", ["shorter", "longer", "rewritten", "replaced", "gone"])
def test_a_file_that_changed_since_its_header_was_read(tmp_path, change):
    file = tmp_path / "x.safetensors"
    write_safetensors(file, {"a": np.ones(1000, np.float32)}, "float32")
    (info,) = read_header(file).values()
    assert read_tensor(info).sum() == 1000
    data = file.read_bytes()
    if change in ("gone", "replaced"):
        file.unlink()
    time.sleep(0.02)  # longer than a tick of the clock that dates files
    if change == "replaced":
        (tmp_path / "other").write_bytes(data)
        (tmp_path / "other").rename(file)
    elif change != "gone":
        file.write_bytes({"shorter": data[:-1], "longer": data + b"x", "rewritten": data}[change])
    with pytest.raises(ModelFormatError, match="no such file" if change == "gone" else "changed while it was read"):
        read_tensor(info)


def run_python(code, *args, cwd=None, **variables):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_file_truncated_while_it_is_loaded_is_an_error_and_no_signal(tmp_path):
    """Cut just before the tensor in its middle is read: where a memory map would end the process by SIGBUS."""
    config = make_checkpoint(tmp_path, tokenizer=False, hidden_size=256, head_dim=16, vocab_size=4000)
    assert (tmp_path / "model.safetensors").stat().st_size > 8_000_000 and config
    result = run_python(
        """
        import os, sys
        from pathlib import Path
        import torch
        from models.errors import ModelFormatError
        from models.llama.config import LlamaConfig
        from models.llama.model import LlamaWeights
        from models.checkpoint import open_checkpoint
        from models.files import read_object
        from models.loader import load_weights

        directory = Path(sys.argv[1])
        file = directory / "model.safetensors"

        def cut_half_way(names):
            for i, name in enumerate(names):
                if i == 3:
                    os.truncate(file, file.stat().st_size // 3)
                yield name

        module = LlamaWeights(LlamaConfig.from_dict(read_object(directory / "config.json")))
        try:
            load_weights(module, open_checkpoint(directory), torch.float32, torch.device("cpu"), cut_half_way)
        except ModelFormatError as error:
            print(error)
        """,
        tmp_path,
    )
    assert result.returncode == 0, (result.returncode, result.stderr)
    assert "model.safetensors: the file changed while it was read" in result.stdout


# Memory.


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_holds_the_weights_and_one_tensor(tmp_path, dtype):
    """Measured against a process that only imports what loading needs. Slack: 8 MB for headers, buffers and malloc.

    VmHWM, because ru_maxrss of a process begins with the peak of the one that started it, here all of pytest. And
    with a fixed threshold of malloc's, which else keeps freed blocks of up to 32 MB in pieces for itself.
    """
    config = make_checkpoint(
        tmp_path, tokenizer=False, hidden_size=640, intermediate_size=1700, num_hidden_layers=6, vocab_size=4000,
        num_attention_heads=10, head_dim=64,
    )  # fmt: skip
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 100e6 and config
    code = r"""
        import re, sys
        from pathlib import Path
        import torch
        from models.llama.config import LlamaConfig
        from models.llama.model import LlamaWeights
        from models.checkpoint import open_checkpoint
        from models.files import read_object
        from models.loader import load_weights

        directory = Path(sys.argv[1])
        module = LlamaWeights(LlamaConfig.from_dict(read_object(directory / "config.json")))
        tensors = open_checkpoint(directory)
        if sys.argv[2] == "load":
            load_weights(module, tensors, getattr(torch, sys.argv[3]), torch.device("cpu"))
        print(1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]))
        """
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    results = {mode: run_python(code, tmp_path, mode, dtype, **malloc) for mode in ("nothing", "load")}
    assert all(result.returncode == 0 for result in results.values()), results
    peak = int(results["load"].stdout) - int(results["nothing"].stdout)
    held = size if dtype == "float32" else size / 2
    largest = 4 * max(w.size for w in random_weights(config, 0).values())
    assert peak <= held + largest + 8e6, (peak / 1e6, held / 1e6, largest / 1e6)
    assert peak >= 0.9 * held, "the measurement sees nothing"


# Names.


@pytest.fixture
def places(tmp_path, monkeypatch):
    """An empty home and working directory, and none of the variables set; returns tmp_path."""
    for name in ("ISOTHERM_MODELS", "ISOTHERM_CACHE", "HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def put_model(directory):
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def put_in_hub(hub, repository, revision="0123abc"):
    base = hub / f"models--{repository.replace('/', '--')}"
    snapshot = put_model(base / "snapshots" / revision)
    (base / "refs").mkdir(exist_ok=True)
    (base / "refs" / "main").write_text(revision + "\n")
    return snapshot


def test_a_path_is_a_model(places):
    model = put_model(places / "work" / "mine")
    assert resolve(str(model)) == model
    assert resolve("mine") == Path("mine")
    assert resolve("./mine") == Path("mine")
    put_model(places / "home" / "other")
    assert resolve("~/other") == places / "home" / "other"


def test_names_are_looked_up_in_order(places, monkeypatch):
    monkeypatch.setenv("ISOTHERM_MODELS", str(places / "models"))
    monkeypatch.setenv("ISOTHERM_CACHE", str(places / "cache"))
    hub = put_in_hub(places / "home/.cache/huggingface/hub", ALIASES["llama2-7b"])
    assert resolve("llama2-7b") == hub
    cached = put_model(places / "cache" / "models" / "llama2-7b")
    assert resolve("llama2-7b") == cached
    own = put_model(places / "models" / "llama2-7b")
    assert resolve("llama2-7b") == own
    put_model(places / "work" / "llama2-7b")
    assert resolve("llama2-7b") == Path("llama2-7b")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "home/.cache/isotherm"),
        ({"XDG_CACHE_HOME": "{}/xdg"}, "xdg/isotherm"),
        ({"XDG_CACHE_HOME": ""}, "home/.cache/isotherm"),
        ({"XDG_CACHE_HOME": "{}/xdg", "ISOTHERM_CACHE": "{}/own"}, "own"),
        ({"ISOTHERM_CACHE": "~/own"}, "home/own"),
    ],
    ids=["home", "xdg", "empty-xdg", "own", "tilde"],
)
def test_the_cache_directory(places, monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(places))
    assert cache_directory() == places / expected
    model = put_model(places / expected / "models" / "demo")
    assert resolve("demo") == model


@pytest.mark.parametrize("alias", sorted(ALIASES))
@pytest.mark.parametrize(
    ("variables", "hub"),
    [
        ({}, "home/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "{}/xdg"}, "xdg/huggingface/hub"),
        ({"XDG_CACHE_HOME": "{}/xdg", "HF_HOME": "{}/hf"}, "hf/hub"),
        ({"XDG_CACHE_HOME": "{}/xdg", "HF_HOME": "{}/hf", "HF_HUB_CACHE": "{}/hub"}, "hub"),
        ({"HF_HOME": "~/hf"}, "home/hf/hub"),
        ({"HF_HOME": "", "HF_HUB_CACHE": ""}, "home/.cache/huggingface/hub"),
    ],
    ids=["home", "xdg", "HF_HOME", "HF_HUB_CACHE", "tilde", "empty"],
)
def test_aliases_and_repository_names_are_found_in_the_hugging_face_cache(places, monkeypatch, variables, hub, alias):
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(places))
    put_in_hub(places / hub, ALIASES[alias], "old")
    snapshot = put_in_hub(places / hub, ALIASES[alias], "new")
    assert resolve(alias) == resolve(ALIASES[alias]) == snapshot


def test_a_snapshot_is_that_of_refs_main_only(places):
    snapshot = put_in_hub(places / "home/.cache/huggingface/hub", "org/name")
    refs = snapshot.parents[1] / "refs" / "main"
    for content in (b"another", b"../../../../../../work", b"/etc", b"\xff\xfe", b""):
        refs.write_bytes(content)
        with pytest.raises(ModelFormatError, match="org/name"):
            resolve("org/name")
    refs.unlink()
    with pytest.raises(ModelFormatError, match="org/name"):
        resolve("org/name")


def error_of(name):
    with pytest.raises(ModelFormatError) as caught:
        resolve(name)
    return str(caught.value)


def test_an_unknown_name_says_where_it_looked_and_why_not(places, monkeypatch):
    monkeypatch.setenv("ISOTHERM_MODELS", str(places / "models"))
    (places / "models" / "nope").mkdir(parents=True)
    (places / "work" / "nope").write_text("")
    message = error_of("nope")
    assert "model 'nope' was not found. Looked at:" in message
    assert "\n  nope (a file; give the directory that holds config.json)" in message
    assert f"\n  {places}/models/nope (no config.json in it)" in message
    assert f"\n  {places}/home/.cache/isotherm/models/nope (does not exist)" in message
    assert "tools.get_demo_model" in message.splitlines()[-1]


def test_near_names_are_offered(places, monkeypatch):
    monkeypatch.setenv("ISOTHERM_MODELS", str(places / "models"))
    put_model(places / "models" / "my-finetune")
    assert "Names near it: my-finetune" in error_of("my-fintune")
    assert "llama2-7b" in next(line for line in error_of("llama-2-7b").splitlines() if line.startswith("Names near"))
    assert "Names near it" not in error_of("zzzzzz")


def test_the_way_to_get_a_model(places):
    for name in ("llama2-13b-chat", "meta-llama/Llama-2-13b-chat-hf"):
        last = error_of(name).splitlines()[-1]
        assert "Get it: hf download meta-llama/Llama-2-13b-chat-hf " in last and "gated: accept its licence" in last
    assert "gated" not in error_of("org/open-model") and "download org/open-model" in error_of("org/open-model")
    assert error_of("smollm2-135m").endswith("python -m tools.get_demo_model")
    for path in ("./nope", "../nope", "/nope", "~/nope", "a/b/c", "nope/"):
        assert " download " not in error_of(path), path


STRANGE_NAMES = {
    "long": "x" * 5000,
    "long-repository": "org/" + "x" * 5000,
    "nul": "a\0b",
    "nul-repository": "org/a\0b",
    "surrogate": "\ud800",
    "unknown-user": "~nobody-here/x",
    "parent": "..",
    "star": "*",
    "format": "%s {}",
}


@pytest.mark.parametrize("name", STRANGE_NAMES.values(), ids=STRANGE_NAMES)
def test_names_that_no_file_can_have_are_not_found(places, name):
    assert "was not found" in error_of(name)


def test_llm_says_the_same(places):
    with pytest.raises(ModelFormatError, match="'nope' was not found"):
        LLM("nope")
    put_model(places / "work" / "empty")
    (places / "work" / "empty" / "config.json").write_text("{")
    with pytest.raises(ModelFormatError, match=r"config\.json: not valid JSON"):
        LLM("empty")
