"""Reads GGUF files (llama.cpp's format, versions 2 and 3): metadata, and tensors dequantised to float32.

The file is not trusted: every count, length, offset and size is compared with the size of the file before anything is
allocated for it. It is read by plain reads, not mapped, because a mapped file that shrinks kills the process.
Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.

    magic "GGUF" | version u32 | tensors u64 | keys u64 | key, type u32, value ... | name, rank u32, dims u64 x rank,
    type u32, offset u64 ... | padding to `general.alignment` | data: each tensor at its offset
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from models.errors import ModelFormatError

MAX_HEADER_BYTES = 256 << 20  # metadata and tensor list; the largest vocabularies need some 20 MB
MAX_ITEMS = 1 << 22  # array elements in all metadata together: bounds the memory and time that Python objects take
MAX_KEYS = 10_000
MAX_TENSORS = 100_000
MAX_RANK = 4

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 30: "BF16"}  # ggml's numbers
# One block of each type, and its number of elements. The layouts are those of ggml-common.h.
_BLOCKS: dict[str, tuple[np.dtype[Any], int]] = {
    "F32": (np.dtype("<f4"), 1),
    "F16": (np.dtype("<f2"), 1),
    "BF16": (np.dtype("<u2"), 1),
    "Q4_0": (np.dtype([("scale", "<f2"), ("codes", "u1", 16)]), 32),
    "Q4_1": (np.dtype([("scale", "<f2"), ("low", "<f2"), ("codes", "u1", 16)]), 32),
    "Q8_0": (np.dtype([("scale", "<f2"), ("codes", "i1", 32)]), 32),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor is: [offset, offset + nbytes) of the file. `shape` is in C order, as numpy has it."""

    name: str
    dtype: str  # F32, F16, BF16, Q8_0, Q4_0 or Q4_1
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GGUF:
    """A GGUF file: `metadata` and `tensors` by name. Opening it reads the header only."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises ModelFormatError, naming the file and the reason, if it is not a GGUF file that can be read here."""
        self.path = Path(path)
        try:
            if self.path.exists() and not self.path.is_file():  # opening a pipe would wait for its writer
                raise ModelFormatError(f"{self.path}: not a regular file")
            with self.path.open("rb") as file:
                self.metadata, self.tensors = _Header(file, self.path).parse()
                self._stamp = _stamp(file)
        except OSError as error:
            raise ModelFormatError(f"{self.path}: cannot be read: {error.strerror}") from None

    def read(self, name: str, begin: int = 0, end: int | None = None) -> NDArray[np.float32]:
        """Tensor `name` as float32 of its shape, or rows [begin, end) of a matrix.

        KeyError if there is none, ModelFormatError if the file is not what it was when it was opened.
        """
        tensor = self.tensors[name]
        rows, *rest = tensor.shape
        end = rows if end is None else end
        if not rest and (begin, end) != (0, rows):
            raise ValueError(f"{name} is a vector, which is read as a whole; got [{begin}, {end})")
        row_bytes = tensor.nbytes // rows if rest else 0  # blocks do not cross rows
        length = (end - begin) * row_bytes if rest else tensor.nbytes
        with self.path.open("rb") as file:
            file.seek(tensor.offset + begin * row_bytes)
            data = file.read(length)
            changed = _stamp(file) != self._stamp
        if len(data) != length:
            raise ModelFormatError(f"{self.path}: ends inside tensor {name}: it was changed while being read")
        if changed:
            raise ModelFormatError(f"{self.path}: the file changed while tensor {name} was read")
        return dequantize(data, tensor.dtype).reshape(end - begin, *rest)


def _stamp(file: BinaryIO) -> tuple[int, int, int]:
    """What changes when a file does: its size, time of change, and number (when another one was put in its place)."""
    stat = os.fstat(file.fileno())
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def dequantize(data: bytes, dtype: str) -> NDArray[np.float32]:
    """Whole blocks of type `dtype` -> their values, flat float32.

    Codes of 4 bits: the low half of byte j is element j of the block, the high half element j + 16.
    """
    layout, _ = _BLOCKS[dtype]
    blocks = np.frombuffer(data, dtype=layout)
    if dtype == "BF16":
        return (blocks.astype(np.uint32) << 16).view(np.float32)
    if layout.names is None:
        return blocks.astype(np.float32)
    codes = blocks["codes"]
    if dtype != "Q8_0":
        codes = np.concatenate((codes & 15, codes >> 4), axis=1)  # [blocks, 32]
    values = codes.astype(np.float32)
    if dtype == "Q4_0":
        values -= 8
    values *= blocks["scale"].astype(np.float32)[:, None]
    if dtype == "Q4_1":
        values += blocks["low"].astype(np.float32)[:, None]
    return values.reshape(-1)


class _Header:
    """Parses the header; `left` is what may still be read, so that no length in the file is believed beyond it."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self.left = min(self.size, MAX_HEADER_BYTES)
        self.items_left = MAX_ITEMS

    def fail(self, reason: str) -> NoReturn:
        raise ModelFormatError(f"{self.path}: {reason}")

    def take(self, count: int, what: str) -> bytes:
        data = self.file.read(count) if count <= self.left else b""
        if len(data) != count:
            limit = "the file" if self.size <= MAX_HEADER_BYTES else f"the first {MAX_HEADER_BYTES >> 20} MB"
            self.fail(f"{what} of {count} bytes reaches past the end of {limit} ({self.left} bytes are left)")
        self.left -= count
        return data

    def number(self, layout: str, what: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))[0]

    def count(self, what: str, smallest: int, limit: int) -> int:
        """A u64 that announces items of at least `smallest` bytes each."""
        count: int = self.number("<Q", f"number of {what}")
        if count > limit or count * smallest > self.left:
            self.fail(f"{count} {what} announced: more than the limit of {limit} or than {self.left} bytes can hold")
        return count

    def string(self, what: str) -> str:
        data = self.take(self.number("<Q", f"length of {what}"), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error.reason}")

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(f"value of {key}")
        if kind == _BOOL:
            return self.bools(1, key)[0]
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], f"value of {key}")
        if kind != _ARRAY:
            self.fail(f"{key} has the unknown value type {kind}")
        return self.array(key)

    def array(self, key: str) -> list[Any]:
        kind = self.number("<I", f"element type of {key}")
        if kind == _ARRAY:
            self.fail(f"{key} is an array of arrays, which is not supported")
        if kind not in _SCALARS and kind not in (_BOOL, _STRING):
            self.fail(f"{key} is an array of the unknown type {kind}")
        width = 8 if kind == _STRING else struct.calcsize(_SCALARS.get(kind, "<B"))
        count = self.count(f"elements of {key}", width, self.items_left)
        self.items_left -= count
        if kind == _STRING:
            return [self.string(f"element {i} of {key}") for i in range(count)]
        if kind == _BOOL:
            return self.bools(count, key)
        values: list[Any] = np.frombuffer(self.take(count * width, f"value of {key}"), dtype=_SCALARS[kind]).tolist()
        return values

    def bools(self, count: int, key: str) -> list[bool]:
        data = self.take(count, f"value of {key}")
        if data.strip(b"\0\1"):
            self.fail(f"{key} has a truth value that is neither 0 nor 1")
        return [byte == 1 for byte in data]

    def parse(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if (magic := self.take(4, "magic")) != b"GGUF":
            if magic == b"vers":
                self.fail("not a GGUF file: it may be a Git LFS pointer, run `git lfs pull`")
            self.fail("not a GGUF file: it does not start with the letters GGUF")
        version = self.number("<I", "version")
        if version not in (2, 3):
            self.fail(f"GGUF version {version} is not supported (2 and 3 are, little-endian)")
        num_tensors = self.count("tensors", 32, MAX_TENSORS)
        metadata: dict[str, Any] = {}
        for i in range(self.count("keys", 13, MAX_KEYS)):
            key = self.string(f"name of key {i}")
            if key in metadata:
                self.fail(f"key {key!r} appears twice")
            metadata[key] = self.value(self.number("<I", f"type of {key}"), key)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment not in [1 << i for i in range(3, 17)]:
            self.fail(f"general.alignment must be a power of two from 8 to 65536, got {alignment!r}")
        found = [self.tensor(i, alignment) for i in range(num_tensors)]
        start = -(-self.file.tell() // alignment) * alignment
        tensors = {}
        for tensor in found:
            if tensor.name in tensors:
                self.fail(f"tensor {tensor.name!r} appears twice")
            tensors[tensor.name] = replace(tensor, offset=start + tensor.offset)
        end = 0
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                self.fail(f"tensor {tensor.name!r} overlaps another one")
            end = tensor.offset + tensor.nbytes
            if end > self.size:
                self.fail(f"tensor {tensor.name!r} ends at byte {end}, past the end of the file ({self.size} bytes)")
        return metadata, tensors

    def tensor(self, index: int, alignment: int) -> GGUFTensor:
        """One entry of the tensor list, with its offset into the data."""
        name = self.string(f"name of tensor {index}")
        rank = self.number("<I", f"rank of {name}")
        if not 1 <= rank <= MAX_RANK:
            self.fail(f"tensor {name!r} has {rank} dimensions (1 to {MAX_RANK} are supported)")
        dims = struct.unpack(f"<{rank}Q", self.take(8 * rank, f"shape of {name}"))
        kind, offset = struct.unpack("<IQ", self.take(12, f"type and offset of {name}"))
        if kind not in _TYPES:
            self.fail(f"tensor {name!r} has ggml type {kind}, which is not supported ({', '.join(_BLOCKS)} are)")
        layout, length = _BLOCKS[_TYPES[kind]]
        if 0 in dims or dims[0] % length:
            self.fail(f"tensor {name!r} of shape {dims} does not consist of whole blocks of {length}")
        if offset % alignment:
            self.fail(f"tensor {name!r} has offset {offset}, not a multiple of {alignment}")
        return GGUFTensor(name, _TYPES[kind], dims[::-1], offset, math.prod(dims) // length * layout.itemsize)
