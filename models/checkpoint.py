"""Checkpoints in the Hugging Face layout: model.safetensors, or shards listed by an index; headers only (no torch).

The safetensors header (8-byte length, JSON, then the tensors' bytes; huggingface.co/docs/safetensors) is parsed here
with bounds on everything. No code from a model directory is ever imported.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from models.errors import ModelFormatError, shown
from models.files import MAX_JSON_BYTES, opened, parse_json, pointer_hint, read_object, stamp

MAX_RANK = 4
MAX_TENSORS = 100_000
MAX_NAME = 512  # characters
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
          "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
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
    if index.exists():
        return _open_sharded(directory, index)
    single = directory / "model.safetensors"
    if single.exists():
        return read_header(single)
    raise ModelFormatError(f"{directory}: no model.safetensors and no model.safetensors.index.json{_hint(directory)}")


def _hint(directory: Path) -> str:
    """What to do with the files that are there instead."""
    pickles = sorted(p.name for pattern in ("*.bin", "*.pth", "*.pt") for p in directory.glob(pattern))
    if pickles:
        way = "in an environment with Transformers, from_pretrained(...).save_pretrained(NEW)"
        if pickles[0].startswith("consolidated."):
            way = f"python -m tools.convert {directory} OUTDIR"
        return (
            f"; {pickles[0]} is a pickle, which is never loaded: use the safetensors files of this model, or convert "
            f"it: {way}"
        )
    for file in sorted(directory.glob("*.gguf")):
        return f"; convert the GGUF file: python -m tools.convert {file} OUTDIR"
    return ""


def _open_sharded(directory: Path, index: Path) -> dict[str, TensorInfo]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or len(weight_map) > MAX_TENSORS:
        raise ModelFormatError(f"{index}: weight_map must map 1 to {MAX_TENSORS} tensor names to files")
    for shard in weight_map.values():
        if not isinstance(shard, str) or shard != os.path.basename(shard) or not shard.endswith(".safetensors"):
            raise ModelFormatError(
                f"{index}: {shown(shard)} is not the name of a safetensors file in the same directory"
            )
    shards = set(weight_map.values())
    missing = sorted(shard for shard in shards if not os.path.exists(directory / shard))
    if missing:
        raise ModelFormatError(f"{directory}: shards listed in {index.name} are missing: {some(missing)}")
    headers = {shard: read_header(directory / shard) for shard in sorted(shards)}
    absent = sorted(f"{name} ({shard})" for name, shard in weight_map.items() if name not in headers[shard])
    if absent:
        raise ModelFormatError(f"{directory}: tensors listed in {index.name} are not in their shards: {some(absent)}")
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, from its header. Raises ModelFormatError naming file and reason."""
    with opened(path) as file:
        stat = os.fstat(file.fileno())
        size = stat.st_size
        prefix = file.read(8)
        if hint := pointer_hint(prefix + file.read(32)):
            raise ModelFormatError(f"{path}: {hint}")
        file.seek(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= size - 8:
            raise ModelFormatError(f"{path}: truncated or not safetensors: {size} bytes, header said to be {length}")
        if length > MAX_JSON_BYTES:
            raise ModelFormatError(f"{path}: header of {length} bytes, over the limit of {MAX_JSON_BYTES}")
        header = parse_json(file.read(length), path)
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise ModelFormatError(f"{path}: header must be an object of at most {MAX_TENSORS} tensors")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelFormatError(f"{path}: __metadata__ must map strings to strings")
    tensors = {name: _tensor_info(path, name, entry, 8 + length, stamp(stat)) for name, entry in header.items()}
    _check_cover(path, tensors, 8 + length, size)
    return tensors


def _tensor_info(path: Path, name: str, entry: Any, data_start: int, now: tuple[int, int, int]) -> TensorInfo:
    where = f"{path}: tensor {shown(name)}"
    if not 0 < len(name) <= MAX_NAME or name in (".", "..") or any(c in name for c in "/\\\0"):
        raise ModelFormatError(f"{where}: not a tensor name")
    if not isinstance(entry, dict):
        raise ModelFormatError(f"{where}: header entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _SIZES:
        raise ModelFormatError(f"{where}: unknown dtype {shown(dtype)}")
    if not _is_sizes(shape) or len(shape) > MAX_RANK:
        raise ModelFormatError(f"{where}: shape must be at most {MAX_RANK} sizes, got {shown(shape)}")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise ModelFormatError(f"{where}: data_offsets must be two offsets, got {shown(offsets)}")
    begin, end = offsets
    nbytes = math.prod(shape) * _SIZES[dtype]
    if end - begin != nbytes:
        raise ModelFormatError(f"{where}: {dtype} {shape} takes {nbytes} bytes, data_offsets give {end - begin}")
    return TensorInfo(path, dtype, tuple(shape), data_start + begin, nbytes, now)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 1 << 62 for x in value)


def _check_cover(path: Path, tensors: dict[str, TensorInfo], start: int, size: int) -> None:
    """The tensors' bytes must fill the file without hole or overlap."""
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset != start:
            raise ModelFormatError(f"{path}: tensor {name!r} begins at byte {info.offset}, expected {start}")
        start += info.nbytes
    if start != size:
        raise ModelFormatError(f"{path}: tensors end at byte {start}, the file has {size} (truncated or not complete)")


def some(names: list[str]) -> str:
    """The names for a message; all of them up to a screenful."""
    return ", ".join(name[:120] for name in names[:40]) + (f", and {len(names) - 40} more" if len(names) > 40 else "")
