"""Writes GGUF files by hand, right and wrong ones, and dequantises blocks one scalar at a time in float64."""

import struct

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30}
BLOCK_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
BLOCK_LENGTH = {"F32": 1, "F16": 1, "BF16": 1, "Q4_0": 32, "Q4_1": 32, "Q8_0": 32}
U32, F32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", U32: "I", 5: "i", F32: "f", 10: "Q", 11: "q", 12: "d"}


def string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind, content):
    """The bytes of a value; for an array `content` is (element type, list)."""
    if kind == STRING:
        return string(content)
    if kind == BOOL:
        return bytes([content])
    if kind == ARRAY:
        inner, items = content
        return struct.pack("<IQ", inner, len(items)) + b"".join(value(inner, item) for item in items)
    return struct.pack("<" + SCALARS[kind], content)


def key(name, kind, content):
    return string(name) + struct.pack("<I", kind) + value(kind, content)


def tensor_info(name, dims, kind, offset):
    """dims: ggml order (the contiguous one first)."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(num_tensors, num_keys, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, num_tensors, num_keys)


def gguf(metadata, tensors, version=3, alignment=32):
    """A valid file. metadata: {name: (kind, content)}; tensors: {name: (type name, shape in C order, bytes)}."""
    keys = b"".join(key(name, kind, content) for name, (kind, content) in metadata.items())
    infos, data = b"", b""
    for name, (kind, shape, content) in tensors.items():
        data += bytes(-len(data) % alignment)
        infos += tensor_info(name, shape[::-1], TYPES[kind], len(data))
        data += content
    head = header(len(tensors), len(metadata), version) + keys + infos
    return head + bytes(-len(head) % alignment) + data


def random_blocks(rng, kind, elements):
    """Bytes of `elements` random values of a type; scales and floats are finite and of moderate size."""
    blocks = []
    for _ in range(elements // BLOCK_LENGTH[kind]):
        if kind == "F32":
            blocks.append(struct.pack("<f", rng.gauss(0, 1)))
        elif kind == "F16":
            blocks.append(struct.pack("<e", rng.gauss(0, 1)))
        elif kind == "BF16":
            blocks.append(struct.pack("<f", rng.gauss(0, 1))[2:])
        else:
            scales = b"".join(struct.pack("<e", rng.gauss(0, 0.1)) for _ in range(2 if kind == "Q4_1" else 1))
            blocks.append(scales + rng.randbytes(BLOCK_BYTES[kind] - len(scales)))
    return b"".join(blocks)


def scalars(kind, data):
    """What the blocks mean, as a list of Python floats, straight from the description of the format."""
    values = []
    for at in range(0, len(data), BLOCK_BYTES[kind]):
        block = data[at : at + BLOCK_BYTES[kind]]
        if kind == "F32":
            values.append(struct.unpack("<f", block)[0])
        elif kind == "F16":
            values.append(struct.unpack("<e", block)[0])
        elif kind == "BF16":
            values.append(struct.unpack("<f", b"\0\0" + block)[0])
        elif kind == "Q8_0":
            scale = struct.unpack("<e", block[:2])[0]
            values += [scale * (byte - 256 if byte > 127 else byte) for byte in block[2:]]
        else:
            scale = struct.unpack("<e", block[:2])[0]
            low = struct.unpack("<e", block[2:4])[0] if kind == "Q4_1" else -8 * scale
            codes = block[4:] if kind == "Q4_1" else block[2:]
            values += [scale * (byte % 16) + low for byte in codes]
            values += [scale * (byte // 16) + low for byte in codes]
    return values
