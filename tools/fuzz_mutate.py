"""Damaged files for `tools.fuzz`: valid ones, changed where their structure is, or anywhere."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

_INTERESTING: list[Any] = [
    None, True, False, 0, 1, 2, -1, 3, 7, 64, 255, 256, 4096, 1 << 31, (1 << 31) - 1, 1 << 40, 1 << 63, (1 << 63) - 1,
    1 << 64, 10**30, -(1 << 63), 0.0, 0.5, 1.0, -0.0, 1e-300, 1e308, float("nan"), float("inf"), float("-inf"), "", "x",
    "0", "64", "../x", "/etc/passwd", "a/b", "a\\b", "a\0b", "\ud800", "é" * 50, "x" * 3000, [], [0], [[]], [1, 2],
    [0, 16], [-1, 4], {}, {"a": 1}, "F32", "BF16", "F16", "I8", "F64", "linear", "dynamic", "yarn", "llama3", "default",
    "float32", "bfloat16", "silu", ["LlamaForCausalLM"], ["MistralForCausalLM"], {"rope_type": "linear", "factor": 2.0},
]  # fmt: skip
_CHANGES = (1, 1, 1, 2, 3, 5)  # to one file: mostly few, so that what follows the first check is reached too


def mutate_json(rng: random.Random, value: Any) -> bytes:
    """A JSON document like `value`, some of its parts replaced, removed, doubled, renamed or exchanged, or its text."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice(_CHANGES)):
        containers = [c for c in _containers(value) if c]
        if containers:
            _change(rng, rng.choice(containers), value)
    text = json.dumps(value, indent=rng.choice([None, None, 1]))
    if rng.random() < 0.1 and isinstance(value, dict) and value:  # a key twice
        key = rng.choice(list(value))
        other = rng.choice([value[key], *_INTERESTING])
        text = f"{{{json.dumps(key)}: {json.dumps(other)}, {text[1:]}"
    data = text.encode("utf-8", "surrogatepass")
    kind = rng.random()
    if kind < 0.1:
        return mutate_bytes(rng, data)
    if kind < 0.12:
        return b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n")
    if kind < 0.13:
        return rng.choice([b"[", b'{"a":']) * rng.choice([100, 5000, 100_000]) + data
    if kind < 0.14:
        return text.encode("utf-16", "surrogatepass")
    return data


def _containers(value: Any) -> list[Any]:
    found, pending = [], [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict | list):
            found.append(item)
            pending += item.values() if isinstance(item, dict) else item
    return found


def _change(rng: random.Random, container: Any, root: Any) -> None:
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    key = rng.choice(keys)
    kind = rng.randrange(7)
    old = container[key]
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):  # renamed
        new = rng.choice(["x", "", "__metadata__", "..", "a/b", f"{key}x", str(key)[:-1], rng.choice(keys)])
        container[new] = container.pop(key)
    elif kind == 2:  # another value of the same document
        other = rng.choice([c for c in _containers(root) if c])
        container[key] = copy.deepcopy(rng.choice(list(other.values()) if isinstance(other, dict) else other))
    elif kind == 3 and isinstance(old, int | float) and not isinstance(old, bool):
        container[key] = rng.choice([old + 1, old - 1, old * 2, old // 2 if old == old else old, -old, float(old)])
    elif kind == 4:  # exchanged with a neighbour
        other_key = rng.choice(keys)
        container[key], container[other_key] = container[other_key], container[key]
    elif kind == 5 and isinstance(container, list):
        container.insert(key, rng.choice(_INTERESTING))
    else:
        container[key] = copy.deepcopy(rng.choice(_INTERESTING))


def mutate_bytes(rng: random.Random, data: bytes, start: int = 0, end: int | None = None) -> bytes:
    """Bits turned, bytes set, pieces cut, doubled or moved within [start, end); perhaps the file cut or lengthened."""
    end = len(data) if end is None else min(end, len(data))
    changed = bytearray(data)
    for _ in range(rng.choice(_CHANGES)):
        if start >= min(end, len(changed)):
            break
        at = rng.randrange(start, min(end, len(changed)))
        kind = rng.randrange(7)
        length = min(rng.choice([1, 2, 4, 8, 16, 100]), len(changed) - at)
        if kind <= 1:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            changed[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        elif kind == 3:
            number = struct.pack(
                "<Q", rng.choice([0, 1, 7, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
            )
            changed[at : at + min(length, 8)] = number[: min(length, 8)]
        elif kind == 4:
            del changed[at : at + length]
        elif kind == 5:
            changed[at:at] = changed[at : at + length]
        else:
            other = rng.randrange(start, min(end, len(changed)))
            changed[at : at + length] = changed[other : other + length]
    kind_of_end = rng.random()
    if kind_of_end < 0.05:
        del changed[rng.randrange(len(changed) + 1) :]
    elif kind_of_end < 0.08:
        changed += rng.randbytes(rng.choice([1, 8, 100]))
    return bytes(changed)


def mutate_safetensors(rng: random.Random, header: dict[str, Any], data: bytes) -> bytes:
    """A file with a header like `header` before the same tensors' bytes."""
    encoded = mutate_json(rng, header) if rng.random() < 0.85 else json.dumps(header).encode()
    length = len(encoded)
    if rng.random() < 0.1:
        length = rng.choice([0, 1, 2, length - 1, length + 1, length + 8, len(data), 1 << 24, 1 << 40, 1 << 63]) % (
            1 << 64
        )
    if rng.random() < 0.1:
        data = data[: rng.randrange(len(data))] if rng.random() < 0.5 else data + rng.randbytes(rng.randrange(1, 64))
    whole = length.to_bytes(8, "little") + encoded + data
    return mutate_bytes(rng, whole, 0, 8 + len(encoded)) if rng.random() < 0.1 else whole
