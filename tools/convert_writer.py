"""Writes a Hugging Face folder from a plan: tensor by tensor, so that one of them is in memory, and complete or not.

    plan (names, shapes, where the values are) -> config.json, tokenizer files, model.safetensors or shards + index

A safetensors header needs only names, shapes and the dtype, so it is written first and the tensors follow as they are
made. Everything happens in a directory beside the target, which is renamed to it at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.errors import ConfigError, ModelFormatError
from models.llama.config import LlamaConfig

if TYPE_CHECKING:  # importing it takes seconds on a small machine, and --help does not need it
    from torch import Tensor

    Piece = tuple[int, int, Tensor]  # values [start, start + their size) of a tensor along a dimension

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # in Hugging Face's and in safetensors' spelling
SHARD_BYTES = 5_000_000_000
STALE_SECONDS = 24 * 3600


class ConvertError(RuntimeError):
    """Nothing is wrong with the model, but it cannot be written; the message says what to do."""


class TargetTakenError(ConvertError):
    """The target folder exists and holds something."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the result. `pieces` reads it from its source, in parts that fill it without overlap.

    heads: not 0 for projections to queries and keys. RoPE turns pairs of rows of a head; llama.cpp and Meta keep a pair
    side by side (2i, 2i + 1), Hugging Face half a head apart (i, i + head_dim / 2). Pieces are then of whole heads.
    """

    name: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Piece]]
    heads: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a source is converted to; made without reading weights.

    files: bytes, or objects written as JSON. notes: what had to be assumed, for the user to read.
    """

    source: Path
    config: dict[str, Any]
    files: dict[str, bytes | dict[str, Any]]
    weights: list[Weight]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ModelFormatError if the engine would not take the config: a number out of its range, say."""
        try:
            LlamaConfig.from_dict(self.config)
        except ConfigError as error:
            raise ModelFormatError(f"{self.source}: {error}") from None

    def nbytes(self, dtype: str) -> int:
        return sum(_nbytes(weight, dtype) for weight in self.weights)


def write_folder(
    plan: Plan, outdir: Path, dtype: str = "bfloat16", shard_bytes: int = SHARD_BYTES, progress: bool = False
) -> None:
    """Write the model into `outdir`, which exists. progress: a bar on stderr, if that is a terminal.

    Raises ModelFormatError if a source turns out damaged or a value is not finite in `dtype`; OSError.
    """
    from engine.progress import Progress

    write_json(outdir / "config.json", {**plan.config, "torch_dtype": dtype})
    for name, content in plan.files.items():
        if isinstance(content, bytes):
            (outdir / name).write_bytes(content)
        else:
            write_json(outdir / name, content)
    shards = _shards(plan.weights, dtype, shard_bytes)
    weight_map: dict[str, str] = {}
    with Progress(total=len(plan.weights), desc="Converting", unit="tensor", shown=progress) as bar:
        for number, shard in enumerate(shards, 1):
            file = file_name(number, len(shards))
            shapes = {weight.name: (DTYPES[dtype], weight.shape, _nbytes(weight, dtype)) for weight in shard}
            write_safetensors(outdir / file, shapes, _tensors(shard, dtype, plan.source, bar.update))
            weight_map |= {weight.name: file for weight in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": plan.nbytes(dtype)}, "weight_map": weight_map}
        write_json(outdir / "model.safetensors.index.json", index)


def _nbytes(weight: Weight, dtype: str) -> int:
    return prod(weight.shape) * (4 if dtype == "float32" else 2)


def _shards(weights: list[Weight], dtype: str, shard_bytes: int) -> list[list[Weight]]:
    """The weights in their order, parted so that no file exceeds `shard_bytes`, unless a single tensor does."""
    shards: list[list[Weight]] = [[]]
    size = 0
    for weight in weights:
        nbytes = _nbytes(weight, dtype)
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(weight)
        size += nbytes
    return shards


def file_name(number: int, count: int) -> str:
    """Of the safetensors file of that number, from 1 on, among so many."""
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def write_safetensors(
    path: Path, shapes: dict[str, tuple[str, tuple[int, ...], int]], tensors: Iterable[Tensor]
) -> None:
    """u64 length of the header, the header (JSON, padded to 8 bytes), the tensors one after another, as they come.

    shapes: by name, in the order of the tensors, the dtype in safetensors' spelling, the shape, and the bytes.
    """
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # Transformers refuses a file without it
    offset = 0
    for name, (dtype, shape, nbytes) in shapes.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one is made


def _tensors(weights: list[Weight], dtype: str, source: Path, done: Callable[[], object]) -> Iterator[Tensor]:
    import torch

    for weight in weights:
        tensor = _filled(weight, getattr(torch, dtype))
        if not finite(tensor):
            range_hint = ", or values beyond the range of float16: try bfloat16" if dtype == "float16" else ""
            raise ModelFormatError(f"{source}: {weight.name} has values that are NaN or infinite{range_hint}")
        yield tensor
        del tensor  # before the next one is made
        done()


def finite(tensor: Tensor) -> bool:
    """Whether every value is. Slice by slice: a test of all at once takes half as much memory again."""
    return all(bool(part.isfinite().all()) for part in tensor.reshape(-1).split(1 << 20))


def _filled(weight: Weight, dtype: Any) -> Tensor:
    """The tensor of a weight, in Hugging Face's order of rows."""
    import torch

    out = torch.empty(weight.shape, dtype=dtype)
    count = 0
    for dim, start, values in weight.pieces():
        if weight.heads:
            pairs = weight.shape[0] // weight.heads // 2
            # [heads, pairs, 2, hidden]: the order of the source, over the memory of the result
            view = out.view(weight.heads, 2, pairs, -1).transpose(1, 2)
            part = values.reshape(-1, pairs, 2, view.shape[-1])
            view.narrow(0, start // (2 * pairs), len(part)).copy_(part)
        else:
            out.narrow(dim, start, values.shape[dim]).copy_(values)
        count += values.numel()
    assert count == out.numel(), (weight.name, count, out.shape)
    return out


def check_target(target: Path) -> None:
    """Raises TargetTakenError unless `target` is absent or an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise TargetTakenError(f"{target} exists and is not an empty folder: remove it, or name another folder")


@contextmanager
def new_folder(target: Path, needed_bytes: int) -> Iterator[Path]:
    """A folder to fill, which becomes `target` if no exception comes, and vanishes otherwise.

    Its parent is a work directory of this run beside the target, removed at the end. A run that is killed outright
    leaves that behind, for the next one that is at least a day later.
    Raises ConvertError without the space, TargetTakenError if another process was faster, OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for stale in target.parent.glob(f".{target.name}-*.tmp"):
        if time.time() - stale.stat().st_mtime > STALE_SECONDS:  # no living run takes that long
            shutil.rmtree(stale, ignore_errors=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed_bytes:
        raise ConvertError(f"need {needed_bytes >> 20} MiB of disk in {target.parent}, {free >> 20} MiB are free")
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=".tmp", dir=target.parent))
    try:
        result = work / target.name  # a folder inside, because mkdtemp makes its own readable by nobody else
        result.mkdir()
        yield result
        try:
            os.rename(result, target)
        except OSError:
            check_target(target)
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def say(progress: bool, text: str) -> None:
    """To stderr: stdout is for results alone."""
    if progress:
        print(text, file=sys.stderr, flush=True)


def command(make: Callable[[], Path], outdir: str, about: dict[str, Any], as_json: bool) -> int:
    """Run what makes a folder to its exit code; prints the folder, or as JSON what it holds beside `about`."""
    begin = time.perf_counter()
    # Both leave as exceptions, so that the work directory goes as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        target = make()
    except ConvertError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or outdir}: {error.strerror or error}", file=sys.stderr)
        return 1
    if not as_json:
        print(target)
        return 0
    files = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
    report = {"path": str(target), **about, "bytes": sum(files.values()), "files": files}
    print(json.dumps(report | {"seconds": round(time.perf_counter() - begin, 3)}))
    return 0
