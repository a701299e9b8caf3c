"""The GGUF reader: values against scalar dequantisers in float64, and files that lie."""

import math
import os
import random
import struct
import time

import gguf_writer as w
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.errors import ModelFormatError
from tools.gguf import GGUF

METADATA = {
    "general.architecture": (w.STRING, "llama"),
    "a.u8": (0, 255),
    "a.i8": (1, -128),
    "a.u16": (2, 65535),
    "a.i16": (3, -32768),
    "a.u32": (4, 2**32 - 1),
    "a.i32": (5, -(2**31)),
    "a.f32": (6, 0.5),
    "a.bool": (w.BOOL, 1),
    "a.string": (w.STRING, "häß 日本 🙂"),
    "a.u64": (10, 2**64 - 1),
    "a.i64": (11, -(2**63)),
    "a.f64": (12, math.pi),
    "b.strings": (w.ARRAY, (w.STRING, ["", "x", "ü"])),
    "b.bools": (w.ARRAY, (w.BOOL, [1, 0, 1])),
    "b.u8": (w.ARRAY, (0, [0, 255])),
    "b.f32": (w.ARRAY, (w.F32, [1.5, -2.0])),
    "b.u64": (w.ARRAY, (10, [2**64 - 1])),
    "b.empty": (w.ARRAY, (5, [])),
}


@pytest.fixture
def write(tmp_path):
    def write(data, name="odd.gguf"):
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 65536])
def test_metadata_of_every_type(write, version, alignment):
    metadata = {**METADATA, "general.alignment": (w.U32, alignment)}
    tensors = {"one": ("F32", (1,), bytes(4)), "two": ("F32", (2, 1), bytes(8))}
    got = GGUF(write(w.gguf(metadata, tensors, version, alignment)))
    wanted = {name: content[1] if kind == w.ARRAY else content for name, (kind, content) in metadata.items()}
    assert got.metadata == wanted
    assert got.metadata["a.bool"] is True
    assert [type(x) for x in got.metadata["b.bools"]] == [bool] * 3
    assert [type(x) for x in got.metadata["b.u8"] + got.metadata["b.f32"]] == [int, int, float, float]


@pytest.mark.parametrize("kind", list(w.TYPES))
def test_tensors_equal_the_scalar_reference(write, kind):
    rng = random.Random(kind)
    shapes = {"a": (64,), "b": (3, 32), "c": (2, 3, 96), "d": (1, 2, 1, 32)}
    tensors = {name: (kind, shape, w.random_blocks(rng, kind, math.prod(shape))) for name, shape in shapes.items()}
    got = GGUF(write(w.gguf({}, tensors)))
    assert list(got.tensors) == list(shapes)
    for name, (_, shape, data) in tensors.items():
        values = got.read(name)
        assert (values.dtype, values.shape, got.tensors[name].dtype) == (np.float32, shape, kind)
        # A code times a scale is exact in float32, so at most one rounding: that of the sum.
        assert values.reshape(-1).tolist() == np.array(w.scalars(kind, data), dtype=np.float32).tolist()


def test_blocks_at_the_edges_of_their_range(write):
    largest, smallest = 65504.0, 2.0**-24
    blocks = b"".join(
        struct.pack("<e", scale) + struct.pack("<e", low) + bytes([0x00, 0xFF, 0x0F, 0xF0] * 4)
        for scale in (0.0, largest, -largest, smallest)
        for low in (0.0, largest, -smallest)
    )
    got = GGUF(write(w.gguf({}, {"x": ("Q4_1", (12, 32), blocks)}))).read("x")
    assert got.reshape(-1).tolist() == np.array(w.scalars("Q4_1", blocks), dtype=np.float32).tolist()


def test_a_file_cut_short_after_opening_is_an_error(write):
    path = write(w.gguf({}, {"x": ("F32", (64,), bytes(256))}))
    got = GGUF(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ModelFormatError, match=r"odd\.gguf.*inside tensor x"):
        got.read("x")


def one_tensor(dims, kind=0, offset=0, data=b"", num=1, alignment=32):
    head = w.header(num, 0) + w.tensor_info("t", dims, kind, offset)
    return head + bytes(-len(head) % alignment) + data


def two_tensors(offsets, names=("a", "b")):
    head = w.header(2, 0) + b"".join(w.tensor_info(names[i], [16], 0, offsets[i]) for i in range(2))
    return head + bytes(-len(head) % 32) + bytes(256)


def with_alignment(alignment, kind=w.U32):
    return w.gguf({"general.alignment": (kind, alignment)}, {})


MALFORMED = {
    "empty": (b"", "magic"),
    "short magic": (b"GG", "magic"),
    "other magic": (w.header(0, 0, magic=b"GGML"), "not a GGUF file"),
    "version 1": (w.header(0, 0, version=1), "version 1 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648 is not supported"),
    "no counts": (w.header(0, 0)[:20], "past the end"),
    "2^63 tensors": (w.header(2**63, 0), "9223372036854775808 tensors"),
    "2^63 keys": (w.header(0, 2**63), "9223372036854775808 keys"),
    "2^32 keys": (w.header(0, 2**32) + bytes(100), "4294967296 keys"),
    "one key too many": (w.header(0, 2) + w.key("a.long.name.of.a.key", 0, 1), "past the end|keys announced"),
    "key name longer than the file": (w.header(0, 1) + struct.pack("<Q", 2**62) + bytes(50), "name of key 0"),
    "string longer than the file": (w.header(0, 1) + w.string("k") + struct.pack("<IQ", 8, 2**40), "value of k"),
    "string one byte too long": (w.header(0, 1) + w.string("k") + struct.pack("<IQ", 8, 3) + b"ab", "value of k"),
    "string not UTF-8": (w.gguf({"k": (8, b"\xff")}, {}), "not UTF-8"),
    "unknown value type": (w.header(0, 1) + w.string("k") + struct.pack("<I", 13) + bytes(20), "unknown value type 13"),
    "truth value 2": (w.gguf({"k": (7, 2)}, {}), "truth value"),
    "truth value 2 in an array": (w.gguf({"k": (9, (7, [1, 2]))}, {}), "truth value"),
    "array of 2^63": (w.header(0, 1) + w.string("k") + struct.pack("<IIQ", 9, 0, 2**63), "elements of k"),
    "array of 2^63 strings": (w.header(0, 1) + w.string("k") + struct.pack("<IIQ", 9, 8, 2**63), "elements of k"),
    "array whose bytes overflow 64 bits": (w.header(0, 1) + w.string("k") + struct.pack("<IIQ", 9, 10, 2**61), "elem"),
    "array of an unknown type": (w.header(0, 1) + w.string("k") + struct.pack("<IIQ", 9, 99, 0), "unknown type 99"),
    "array of arrays": (w.gguf({"k": (9, (9, [(0, [1])]))}, {}), "array of arrays"),
    "arrays 10^5 deep": (w.header(0, 1) + w.string("k") + b"\t\0\0\0" + struct.pack("<IQ", 9, 1) * 10**5, "arrays"),
    "the same key twice": (w.header(0, 2) + 2 * w.key("k", 0, 1), "'k' appears twice"),
    "alignment 0": (with_alignment(0), "general.alignment .* got 0"),
    "alignment 2^31": (with_alignment(2**31), "general.alignment .* got 2147483648"),
    "alignment 48": (with_alignment(48), "general.alignment .* got 48"),
    "alignment is a string": (with_alignment("32", w.STRING), "general.alignment .* got '32'"),
    "alignment is a truth value": (with_alignment(1, w.BOOL), "general.alignment .* got True"),
    "rank 0": (one_tensor([], data=bytes(64)), "0 dimensions"),
    "rank 5": (one_tensor([1] * 5, data=bytes(64)), "5 dimensions"),
    "rank 2^32 - 1": (w.header(1, 0) + w.string("t") + struct.pack("<I", 2**32 - 1) + bytes(64), "4294967295 dimen"),
    "an empty dimension": (one_tensor([32, 0], data=bytes(64)), "whole blocks"),
    "half a block": (one_tensor([48], kind=2, data=bytes(64)), "whole blocks of 32"),
    "unknown tensor type": (one_tensor([32], kind=14, data=bytes(64)), "ggml type 14"),
    "elements overflow 64 bits": (one_tensor([2**63] * 4, data=bytes(64)), "past the end of the file"),
    "2^64 bytes wrap to 0": (one_tensor([2**62], data=bytes(64)), "past the end of the file"),
    "offset not aligned": (one_tensor([4], offset=4, data=bytes(64)), "offset 4"),
    "offset 2^63": (one_tensor([4], offset=2**63, data=bytes(64)), "past the end of the file"),
    "tensor one byte too long": (one_tensor([16], data=bytes(63)), "past the end of the file"),
    "no data at all": (one_tensor([16]), "past the end of the file"),
    "a tensor inside another": (two_tensors([0, 32]), "overlaps"),
    "the same bytes twice": (two_tensors([64, 64]), "overlaps"),
    "the same name twice": (two_tensors([0, 64], "tt"), "'t' appears twice"),
    "tensor name longer than the file": (w.header(1, 0) + struct.pack("<Q", 2**63) + bytes(64), "name of tensor 0"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "reason"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_files_are_refused_at_once(write, data, reason):
    path = write(data)
    before = time.process_time()
    with pytest.raises(ModelFormatError, match=reason) as caught:
        GGUF(path)
    assert time.process_time() - before < 5  # milliseconds, on any machine
    assert str(path) in str(caught.value)


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("absent", "pipe", "."):
        with pytest.raises(ModelFormatError, match=r"cannot be read|not a regular file"):
            GGUF(tmp_path / name)


def test_two_tensors_side_by_side_and_a_hole_are_fine(write):
    assert len(GGUF(write(two_tensors([64, 0]))).tensors) == 2
    assert len(GGUF(write(two_tensors([0, 128]))).tensors) == 2


SMALL = w.gguf(
    {name: METADATA[name] for name in ("general.architecture", "a.bool", "b.strings", "b.f32", "a.u64")},
    {"x": ("Q4_1", (2, 32), w.random_blocks(random.Random(0), "Q4_1", 64)), "y": ("F16", (3,), bytes(6))},
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinite scales times zero
@settings(max_examples=400, deadline=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(1, 255)), min_size=1, max_size=4),
    length=st.integers(0, len(SMALL)) | st.just(len(SMALL)),
)
def test_flipped_bytes_give_a_tensor_or_a_format_error(write, flips, length):
    data = bytearray(SMALL)
    for at, mask in flips:
        data[at] ^= mask
    try:
        got = GGUF(write(bytes(data[:length])))
        shapes = {name: got.read(name).shape for name in got.tensors}
    except ModelFormatError:
        return
    assert all(shape == got.tensors[name].shape for name, shape in shapes.items())


def test_every_truncation_is_refused(write):
    for length in range(len(SMALL)):
        with pytest.raises(ModelFormatError):
            GGUF(write(SMALL[:length]))
