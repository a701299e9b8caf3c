"""Checkpoints in the Hugging Face layout: model.safetensors, or shards listed by an index; headers only (no torch).

The safetensors header (8-byte length, JSON, then the tensors' bytes; huggingface.co/docs/safetensors) is parsed here
with bounds on everything. No code from a model directory is ever imported.
"""

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from models.errors import require, shown
from models.files import MAX_JSON_BYTES, opened, parse_json, read_object, stamp

MAX_RANK = 4
MAX_TENSORS = 100_000
MAX_NAME = 512  # characters
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
          "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}  # fmt: skip


class TensorInfo(NamedTuple):
    """Where one tensor's bytes are: [offset, offset + nbytes) of its file."""

    file: Path
    dtype: str  # as the file spells it: F32, BF16, ...
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    stamp: tuple[int, int, int]  # of the file when its header was read, see `models.files.stamp`


def open_checkpoint(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint by name; reads headers only.

    With model.safetensors.index.json only what the index maps counts, each tensor from the shard it names. Raises
    ModelFormatError naming the file and the reason; missing shards and tensors are all listed.
    """
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        single, neither = directory / "model.safetensors", "no model.safetensors and no model.safetensors.index.json"
        require(single.exists(), f"{directory}: {neither}{_hint(directory)}")
        return read_header(single)
    weight_map: dict[str, str] = read_object(index).get("weight_map", {})
    some_files = isinstance(weight_map, dict) and 0 < len(weight_map) <= MAX_TENSORS
    require(some_files, f"{index}: weight_map must map 1 to {MAX_TENSORS} tensor names to files")
    for shard in weight_map.values():
        beside = isinstance(shard, str) and shard == os.path.basename(shard) and shard.endswith(".safetensors")
        require(beside, f"{index}: {shown(shard)} is not the name of a safetensors file in the same directory")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not os.path.exists(directory / shard)]
    require(not missing, f"{directory}: shards listed in {index.name} are missing: {some(missing)}")
    headers = {shard: read_header(directory / shard) for shard in shards}
    absent = sorted(f"{name} ({shard})" for name, shard in weight_map.items() if name not in headers[shard])
    require(not absent, f"{directory}: tensors listed in {index.name} are not in their shards: {some(absent)}")
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _hint(directory: Path) -> str:
    """What to do with the files that are there instead."""
    for name in sorted(file.name for pattern in ("*.bin", "*.pth", "*.pt") for file in directory.glob(pattern)):
        meta, way = name.startswith("consolidated."), "with Transformers, from_pretrained(...).save_pretrained(NEW)"
        way = f"python -m tools.convert {directory} OUTDIR" if meta else way
        return f"; {name} is a pickle, which is never loaded: use the safetensors files of it, or convert it: {way}"
    found = sorted(directory.glob("*.gguf"))
    return f"; convert the GGUF file: python -m tools.convert {found[0]} OUTDIR" if found else ""


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, from its header. Raises ModelFormatError naming file and reason."""
    with opened(path) as file:
        now = stamp(file)
        size, length = now[0], int.from_bytes(file.read(8), "little")
        require(2 <= length <= size - 8, f"{path}: truncated or not safetensors: {size} bytes, a header of {length}")
        require(length <= MAX_JSON_BYTES, f"{path}: header of {length} bytes, over the limit of {MAX_JSON_BYTES}")
        header = parse_json(file.read(length), path)
    sound = isinstance(header, dict) and len(header) <= MAX_TENSORS
    require(sound, f"{path}: header must be an object of at most {MAX_TENSORS} tensors")
    metadata = header.pop("__metadata__", {})
    strings = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    require(strings, f"{path}: __metadata__ must map strings to strings")
    end = 8 + length
    tensors = {name: _tensor_info(path, name, entry, end, now) for name, entry in header.items()}
    # Their bytes fill the rest of the file without hole or overlap.
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        require(info.offset == end, f"{path}: tensor {name!r} begins at byte {info.offset}, expected {end}")
        end += info.nbytes
    require(end == size, f"{path}: tensors end at byte {end}, the file has {size} (truncated or not complete)")
    return tensors


def _tensor_info(path: Path, name: str, entry: Any, data_start: int, now: tuple[int, int, int]) -> TensorInfo:
    where = f"{path}: tensor {shown(name)}"
    named = 0 < len(name) <= MAX_NAME and name not in (".", "..") and not {"/", "\\", "\0"}.intersection(name)
    require(named, f"{where}: not a tensor name")
    require(isinstance(entry, dict), f"{where}: header entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    require(isinstance(dtype, str) and dtype in _SIZES, f"{where}: unknown dtype", dtype)
    require(_are_sizes(shape, 0, MAX_RANK), f"{where}: shape must be at most {MAX_RANK} sizes, got", shape)
    require(_are_sizes(offsets, 2, 2), f"{where}: data_offsets must be two offsets, got", offsets)
    begin, end = offsets
    nbytes = math.prod(shape) * _SIZES[dtype]
    require(end - begin == nbytes, f"{where}: {dtype} {shape} takes {nbytes} bytes, data_offsets give {end - begin}")
    return TensorInfo(path, dtype, tuple(shape), data_start + begin, nbytes, now)


def _are_sizes(value: Any, least: int, most: int) -> bool:
    """Whether it is a list of that many sizes."""
    counted = isinstance(value, list) and least <= len(value) <= most
    return counted and all(type(x) is int and 0 <= x < 1 << 62 for x in value)


def some(names: list[str]) -> str:
    """The names for a message; all of them up to a screenful."""
    return ", ".join(name[:120] for name in names[:40]) + (f", and {len(names) - 40} more" if len(names) > 40 else "")
