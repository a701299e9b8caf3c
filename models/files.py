"""Files of a model directory, read without trust (no torch).

A file must be a regular one that lies in its directory. A symbolic link may lead out of it in one layout only, that of
the Hugging Face cache, where `models--org--name/snapshots/<revision>/file` leads to `models--org--name/blobs/<hash>`:
else a directory from a stranger could name any file of this machine. The directory itself may be a link.
"""

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
    """The file, open for reading; any failure to open or read it is a ModelFormatError, also a pointer in its place."""
    try:
        # Opening a pipe would wait for its writer.
        require(path.is_file(), f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
        directory, target = path.parent.resolve(), path.resolve()
        repository = directory.parent.parent
        cached = directory.parent.name == "snapshots" and repository.name.startswith("models--")
        inside = directory in target.parents or (cached and target.parent == repository / "blobs")
        way = "put the file itself there, or make a link of the whole directory"
        require(inside, f"{path}: a link that leads out of the model directory, to {target}: {way}")
        with path.open("rb") as file:
            for start, what in _POINTERS.items():
                require(not file.peek().startswith(start), f"{path}: {what}")
            yield file
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror}") from None


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes. Raises ModelFormatError."""
    with opened(path) as file:
        data = file.read(limit + 1)
    require(len(data) <= limit, f"{path}: larger than {limit >> 20} MB")
    return data


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelFormatError if it is missing, over 16 MB, not JSON, or no object."""
    value: dict[str, Any] = parse_json(read_bytes(path, MAX_JSON_BYTES), path)
    require(isinstance(value, dict), f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def optional_object(path: Path) -> dict[str, Any]:
    """Of a JSON file that need not be there."""
    return read_object(path) if path.is_file() else {}


def parse_json(data: bytes, path: Path) -> Any:
    """JSON in UTF-8, with a byte order mark or without. Raises ModelFormatError; of two equal keys none is right."""
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ModelFormatError(f"{path}: not valid JSON: {reason}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {shown(twice)}")
    return result


def stamp(file: BufferedReader) -> tuple[int, int, int]:
    """What changes when a file does: its size, time of change, and number (when another one was put in its place)."""
    stat = os.fstat(file.fileno())
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
