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
from io import BufferedReader
from pathlib import Path
from typing import Any

from models.errors import ModelFormatError, require, shown

MAX_JSON_BYTES = 16 << 20
# How the pointers begin that Git leaves in place of large files.
_POINTERS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file itself: run `git lfs pull`",
    b"# xet version ": "a Git XET pointer, not the file itself: run `git xet checkout`, or download the model again",
}


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """The file, open for reading; any failure to open or read it is a ModelFormatError."""
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            raise ModelFormatError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
        _check_inside(path)
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror}") from None


def _check_inside(path: Path) -> None:
    directory, target = path.parent.resolve(), path.resolve()
    repository = directory.parent.parent
    cached = directory.parent.name == "snapshots" and repository.name.startswith("models--")
    require(
        directory in target.parents or (cached and target.parent == repository / "blobs"),
        f"{path}: a link that leads out of the model directory, to {target}; only the Hugging Face cache may have "
        "such links: put the file itself there, or make a link of the whole directory",
    )


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes. Raises ModelFormatError, also for a pointer to the file."""
    with opened(path) as file:
        data = file.read(limit + 1)
    require(len(data) <= limit, f"{path}: larger than {limit >> 20} MB")
    refuse_pointer(path, data)
    return data


def refuse_pointer(path: Path, data: bytes) -> None:
    """Raises ModelFormatError for a file that begins as a pointer to another one."""
    for start, what in _POINTERS.items():
        require(not data.startswith(start), f"{path}: {what}")


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises ModelFormatError if it is missing, over 16 MB, or not JSON."""
    return parse_json(read_bytes(path, MAX_JSON_BYTES), path)


def read_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file that must hold an object. Raises ModelFormatError."""
    value: dict[str, Any] = read_json(path)
    require(isinstance(value, dict), f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def parse_json(data: bytes, path: Path) -> Any:
    """JSON in UTF-8, with a byte order mark or without. Raises ModelFormatError; of two equal keys none is right."""
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique)
    except KeyError as error:  # of `_unique`
        raise ModelFormatError(f"{path}: duplicate key {shown(error.args[0])}") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ModelFormatError(f"{path}: not valid JSON: {reason}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise KeyError(twice)
    return result


def stamp(file: BufferedReader) -> tuple[int, int, int]:
    """What changes when a file does: its size, time of change, and number (when another one was put in its place)."""
    stat = os.fstat(file.fileno())
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
