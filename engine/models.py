"""`isotherm models`: the models that are found on this machine, and whether they can be loaded (no torch)."""

import json
import math
from pathlib import Path
from typing import Any

from engine.cli import parser
from models.checkpoint import open_checkpoint
from models.errors import ConfigError, ModelFormatError
from models.files import read_object
from models.llama.config import LlamaConfig
from models.resolve import found, places


def main(argv: list[str] | None = None) -> int:
    args = parser("models").parse_args(argv)
    rows = [describe(name, path) for name, path in found().items()]
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
    _, dtype = max(((info.nbytes, info.dtype) for info in tensors), default=(0, None))  # of the largest tensor
    parameters = sum(math.prod(info.shape) for info in tensors)
    return row | {"size_bytes": sum(info.nbytes for info in tensors), "dtype": dtype, "parameters": parameters}


def _table(rows: list[dict[str, Any]]) -> str:
    width = max(len(row["name"]) for row in rows)
    lines = [f"{'model':{width}}  {'size':>9}  dtype  {'parameters':>10}  context"]
    for row in rows:
        size = f"{row['size_bytes'] / 1e9:.2f} GB" if "size_bytes" in row else "-"
        count = f"{row['parameters'] / 1e6:.1f} M" if "parameters" in row else "-"
        dtype, context = row.get("dtype") or "-", row.get("context", "-")
        lines.append(f"{row['name']:{width}}  {size:>9}  {dtype:5}  {count:>10}  {context:>7}")
        lines.append(f"    cannot be loaded: {row['error']}" if row["error"] else f"    {row['path']}")
    return "\n".join(lines)
