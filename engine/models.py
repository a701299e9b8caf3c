"""`isotherm models`: the models that are found on this machine, and whether they can be loaded (no torch)."""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports take their time
    from engine.signals import exit_at_once

    exit_at_once()

import argparse
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from engine.arguments import Parser
from engine.cli import run
from models.checkpoint import open_checkpoint
from models.errors import ConfigError, ModelFormatError
from models.files import read_object
from models.llama.config import LlamaConfig
from models.resolve import found, places

_COLUMNS = {"name": "model", "size": "size", "dtype": "dtype", "parameters": "parameters", "context": "context"}


def parser() -> argparse.ArgumentParser:
    parser = Parser(prog="isotherm models", description="List the models that --model finds by name.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    rows = [describe(name, path) for name, path in found()]
    looked = [str(place) for place in places()]
    if args.json:
        print(json.dumps({"rows": rows, "looked_at": looked}))
    elif rows:
        print(_table(rows))
    else:
        print("no models found in:", *looked, sep="\n  ")
        print("A demo model (93 MB): python -m tools.get_demo_model. A directory anywhere: --model DIRECTORY.")
    return 0


def describe(name: str, path: Path) -> dict[str, Any]:
    """A model from its config and headers; `error` says why it cannot be loaded, and is None where that succeeds."""
    row: dict[str, Any] = {"name": name, "path": str(path), "error": None}
    try:
        config = LlamaConfig.from_dict(read_object(path / "config.json"))
        row |= {"context": config.context_length, "kv_bytes_per_token": config.kv_bytes_per_token(2)}
        tensors = open_checkpoint(path).values()
    except (ConfigError, ModelFormatError) as error:
        return row | {"error": str(error)}
    sizes: Counter[str] = Counter()
    parameters = 0
    for info in tensors:
        sizes[info.dtype] += info.nbytes
        parameters += math.prod(info.shape)
    dtype = sizes.most_common(1)[0][0] if sizes else None
    return row | {"size_bytes": sum(sizes.values()), "dtype": dtype, "parameters": parameters}


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [list(_COLUMNS.values())]
    for row in rows:
        size = f"{row['size_bytes'] / 1e9:.2f} GB" if "size_bytes" in row else "-"
        count = f"{row['parameters'] / 1e6:.1f} M" if "parameters" in row else "-"
        lines.append([row["name"], size, str(row.get("dtype") or "-"), count, str(row.get("context", "-"))])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    for i, row in reversed(list(enumerate(rows))):
        text.insert(i + 2, f"    cannot be loaded: {row['error']}" if row["error"] else f"    {row['path']}")
    return "\n".join(text)


if __name__ == "__main__":
    run(main)
