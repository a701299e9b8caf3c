"""Checkpoints in the Hugging Face layout: config.json beside model.safetensors, or shards listed by an index.

The safetensors header (8-byte length, JSON, then the tensors' bytes; huggingface.co/docs/safetensors) is parsed here
with bounds on everything, and the bytes are read with plain file reads: a memory map of a file that shrinks kills the
process, and one that is overwritten changes weights in use. No code from a model directory is ever imported.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import torch
from torch import Tensor, nn

from models.errors import ModelFormatError

MAX_JSON_BYTES = 16 << 20
MAX_RANK = 4
MAX_TENSORS = 100_000
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
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
    stamp: tuple[int, int, int]  # of the file when its header was read, see `_stamp`


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises ModelFormatError if it is missing, over 16 MB, or not JSON."""
    with _opened(path) as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise ModelFormatError(f"{path}: larger than {MAX_JSON_BYTES >> 20} MB")
    return _parse_json(data, path)


def read_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file that must hold an object. Raises ModelFormatError."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _parse_json(data: bytes, path: Path, **options: Any) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"), **options)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ModelFormatError(f"{path}: not valid JSON: {reason}") from None


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
    pickles = sorted(p.name for pattern in ("*.bin", "*.pth", "*.pt") for p in directory.glob(pattern))
    if pickles:
        return f"; {pickles[0]} is a pickle, which is never loaded: use the safetensors files of this model"
    return ""


def _open_sharded(directory: Path, index: Path) -> dict[str, TensorInfo]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or len(weight_map) > MAX_TENSORS:
        raise ModelFormatError(f"{index}: weight_map must map 1 to {MAX_TENSORS} tensor names to files")
    for shard in weight_map.values():
        if not isinstance(shard, str) or shard != os.path.basename(shard) or not shard.endswith(".safetensors"):
            raise ModelFormatError(f"{index}: {shard!r} is not the name of a safetensors file in the same directory")
    shards = set(weight_map.values())
    missing = sorted(shard for shard in shards if not os.path.exists(directory / shard))
    if missing:
        raise ModelFormatError(f"{directory}: shards listed in {index.name} are missing: {', '.join(missing)}")
    headers = {shard: read_header(directory / shard) for shard in sorted(shards)}
    absent = sorted(f"{name} ({shard})" for name, shard in weight_map.items() if name not in headers[shard])
    if absent:
        raise ModelFormatError(f"{directory}: tensors listed in {index.name} are not in their shards: {_some(absent)}")
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, from its header. Raises ModelFormatError naming file and reason."""
    with _opened(path) as file:
        stat = os.fstat(file.fileno())
        size = stat.st_size
        prefix = file.read(8)
        if prefix.startswith(b"version "):
            raise ModelFormatError(f"{path}: a Git LFS pointer, not the file itself: run `git lfs pull`")
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= size - 8:
            raise ModelFormatError(f"{path}: truncated or not safetensors: {size} bytes, header said to be {length}")
        if length > MAX_JSON_BYTES:
            raise ModelFormatError(f"{path}: header of {length} bytes, over the limit of {MAX_JSON_BYTES}")
        header = _parse_json(file.read(length), path, object_pairs_hook=_unique_keys(path))
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise ModelFormatError(f"{path}: header must be an object of at most {MAX_TENSORS} tensors")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelFormatError(f"{path}: __metadata__ must map strings to strings")
    tensors = {name: _tensor_info(path, name, entry, 8 + length, _stamp(stat)) for name, entry in header.items()}
    _check_cover(path, tensors, 8 + length, size)
    return tensors


def _unique_keys(path: Path) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise ModelFormatError(f"{path}: duplicate key {twice!r} in the header")
        return result

    return build


def _tensor_info(path: Path, name: str, entry: Any, data_start: int, stamp: tuple[int, int, int]) -> TensorInfo:
    where = f"{path}: tensor {name!r}"
    if not name or "/" in name or "\\" in name or "\0" in name:
        raise ModelFormatError(f"{where}: not a tensor name")
    if not isinstance(entry, dict):
        raise ModelFormatError(f"{where}: header entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _SIZES:
        raise ModelFormatError(f"{where}: unknown dtype {dtype!r:.80}")
    if not _is_sizes(shape) or len(shape) > MAX_RANK:
        raise ModelFormatError(f"{where}: shape must be at most {MAX_RANK} sizes, got {shape!r:.80}")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise ModelFormatError(f"{where}: data_offsets must be two offsets, got {offsets!r:.80}")
    begin, end = offsets
    nbytes = math.prod(shape) * _SIZES[dtype]
    if end - begin != nbytes:
        raise ModelFormatError(f"{where}: {dtype} {shape} takes {nbytes} bytes, data_offsets give {end - begin}")
    return TensorInfo(path, dtype, tuple(shape), data_start + begin, nbytes, stamp)


def _stamp(stat: os.stat_result) -> tuple[int, int, int]:
    """What changes when a file does: its size, time of change, and number (when another one was put in its place)."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


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


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file, open for reading; any failure to open or read it is a ModelFormatError."""
    try:
        if not path.is_file():
            raise ModelFormatError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
        with path.open("rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror}") from None


def load_weights(
    module: nn.Module,
    tensors: dict[str, TensorInfo],
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> None:
    """Fill a module built on the meta device; at no time more than the weights and one tensor are held.

    Tensors that the module has no place for are ignored where checkpoints are known to carry them (rotary tables, a
    copy of a tied head). Raises ModelFormatError for missing or surplus tensors (all listed), wrong shapes and dtypes.
    """
    wanted = {name: tuple(parameter.shape) for name, parameter in module.state_dict().items()}
    missing = sorted(wanted.keys() - tensors.keys())
    if missing:
        hint = (
            "; an untied model needs its own head: is tie_word_embeddings wrong?" if "lm_head.weight" in missing else ""
        )
        raise ModelFormatError(f"{_place(tensors)}: tensors are missing: {_some(missing)}{hint}")
    surplus = sorted(name for name in tensors.keys() - wanted.keys() if not _known_surplus(name))
    if surplus:
        raise ModelFormatError(f"{_place(tensors)}: tensors that this model has no place for: {_some(surplus)}")
    for name, shape in wanted.items():
        info = tensors[name]
        if info.shape != shape:
            raise ModelFormatError(f"{info.file}: tensor {name!r} has shape {info.shape}, config.json says {shape}")
        if info.dtype not in DTYPES:
            raise ModelFormatError(f"{info.file}: tensor {name!r} is {info.dtype}, supported: {', '.join(DTYPES)}")
    order = sorted(wanted, key=lambda name: (str(tensors[name].file), tensors[name].offset))
    state = {name: read_tensor(tensors[name]).to(device=device, dtype=dtype) for name in progress(order)}
    module.load_state_dict(state, strict=True, assign=True)


def read_tensor(info: TensorInfo) -> Tensor:
    """One tensor, in memory of its own. Raises ModelFormatError if the file changed since its header was read."""
    data = torch.empty(info.nbytes, dtype=torch.uint8)
    with _opened(info.file) as file:
        before = _stamp(os.fstat(file.fileno()))
        file.seek(info.offset)
        view = memoryview(data.numpy().data)
        done = 0
        while done < info.nbytes and (count := file.readinto(view[done:])):  # type: ignore[attr-defined]
            done += count
        after = _stamp(os.fstat(file.fileno()))
    if done < info.nbytes or not info.stamp == before == after:
        raise ModelFormatError(f"{info.file}: the file changed while it was read")
    return data.view(DTYPES[info.dtype]).view(info.shape)


def _known_surplus(name: str) -> bool:
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def _place(tensors: dict[str, TensorInfo]) -> Path:
    return next((info.file.parent for info in tensors.values()), Path("checkpoint"))


def _some(names: list[str]) -> str:
    """The names for a message; all of them up to a screenful."""
    return ", ".join(names[:40]) + (f", and {len(names) - 40} more" if len(names) > 40 else "")
