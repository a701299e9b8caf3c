"""Files of a model directory, read without trust (no torch).

A file must be a regular one that lies in its directory. A symbolic link may lead out of it in one layout only, that of
the Hugging Face cache, where `models--org--name/snapshots/<revision>/file` leads to `models--org--name/blobs/<hash>`:
else a directory from a stranger could name any file of this machine. The directory itself may be a link.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from models.errors import ModelFormatError, shown

MAX_JSON_BYTES = 16 << 20


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file, open for reading without a buffer; any failure to open or read it is a ModelFormatError."""
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            raise ModelFormatError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
        _check_inside(path)
        with path.open("rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror}") from None


def _check_inside(path: Path) -> None:
    directory, target = path.parent.resolve(), path.resolve()
    repository = directory.parent.parent
    cached = directory.parent.name == "snapshots" and repository.name.startswith("models--")
    if directory not in target.parents and not (cached and target.parent == repository / "blobs"):
        raise ModelFormatError(
            f"{path}: a link that leads out of the model directory, to {target}; only the Hugging Face cache may have "
            "such links: put the file itself there, or make a link of the whole directory"
        )


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes. Raises ModelFormatError, also for a pointer to the file."""
    data = bytearray()
    with opened(path) as file:
        while len(data) <= limit and (chunk := file.read(limit + 1 - len(data))):
            data += chunk
    if len(data) > limit:
        raise ModelFormatError(f"{path}: larger than {limit >> 20} MB")
    if hint := pointer_hint(data):
        raise ModelFormatError(f"{path}: {hint}")
    return bytes(data)


def pointer_hint(data: bytes | bytearray) -> str | None:
    """What to say of bytes that are a pointer which Git left in place of a large file; None for others."""
    if data.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself: run `git lfs pull`"
    if data.startswith(b"# xet version "):
        return "a Git XET pointer, not the file itself: run `git xet checkout`, or download the model again"
    return None


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises ModelFormatError if it is missing, over 16 MB, or not JSON."""
    return parse_json(read_bytes(path, MAX_JSON_BYTES), path)


def read_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file that must hold an object. Raises ModelFormatError."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def parse_json(data: bytes, path: Path) -> Any:
    """JSON in UTF-8, with a byte order mark or without. Raises ModelFormatError; of two equal keys none is right."""
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique)
    except _Duplicate as error:
        raise ModelFormatError(f"{path}: duplicate key {shown(error.args[0])}") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ModelFormatError(f"{path}: not valid JSON: {reason}") from None


class _Duplicate(Exception):
    """Carries the key."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise _Duplicate(twice)
    return result


def stamp(stat: os.stat_result) -> tuple[int, int, int]:
    """What changes when a file does: its size, time of change, and number (when another one was put in its place)."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
