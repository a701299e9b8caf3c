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


def encode(kind, values):
    """Bytes of numbers in a type: the nearest code in each block, with a scale that covers the block's range."""
    values = [float(value) for value in values]
    if kind in ("F32", "F16"):
        return struct.pack(f"<{len(values)}{'f' if kind == 'F32' else 'e'}", *values)
    if kind == "BF16":  # cut off, which is a legal bfloat16 too
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return b"".join(_encode_block(kind, values[at : at + 32]) for at in range(0, len(values), 32))


def _encode_block(kind, values):
    low, levels = (min(values), 15) if kind == "Q4_1" else (0.0, 7 if kind == "Q4_0" else 127)
    reach = max(values) - low if kind == "Q4_1" else max(abs(value) for value in values)
    scale, low = (struct.unpack("<e", struct.pack("<e", x))[0] for x in (reach / levels, low))
    codes = [round((value - low) / scale) if scale else 0 for value in values]
    if kind == "Q8_0":
        return struct.pack("<e32b", scale, *(min(max(code, -127), 127) for code in codes))
    codes = [min(max(code + 8 * (kind == "Q4_0"), 0), 15) for code in codes]
    head = struct.pack("<ee", scale, low) if kind == "Q4_1" else struct.pack("<e", scale)
    return head + bytes(codes[i] | codes[i + 16] << 4 for i in range(16))


NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_name(name):
    """llama.cpp's name of a tensor of a Hugging Face checkpoint."""
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, *part, end = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(part)]}.{end}"


def pair_order(heads, head_dim):
    """Row of a Hugging Face q or k projection for each row of llama.cpp's and Meta's: pairs lie side by side."""
    half = head_dim // 2
    return [head * head_dim + pair + side * half for head in range(heads) for pair in range(half) for side in (0, 1)]


def llama_tensors(weights, kind, heads, kv_heads, head_dim):
    """(tensors for `gguf`, what they stand for as {name: nested rows}) of numpy weights in Hugging Face's layout."""
    tensors, values = {}, {}
    for name, weight in weights.items():
        order = range(len(weight))
        if "q_proj" in name or "k_proj" in name:
            order = pair_order(heads if "q_proj" in name else kv_heads, head_dim)
        stored = kind if weight.ndim == 2 else "F32"
        data = encode(stored, weight[list(order)].reshape(-1).tolist())
        tensors[llama_name(name)] = (stored, weight.shape, data)
        flat, width = scalars(stored, data), weight.size // len(weight)
        rows = {row: flat[i * width : (i + 1) * width] for i, row in enumerate(order)}
        values[name] = [rows[i] if weight.ndim == 2 else rows[i][0] for i in range(len(weight))]
    return tensors, values
