"""Converts a model to a Hugging Face folder: `python -m tools.convert SOURCE OUTDIR`.

    SOURCE                                                     read by
    a Llama GGUF file of F32, F16, BF16, Q8_0, Q4_0 or Q4_1    tools/convert_gguf.py
    Meta's folder: consolidated.*.pth beside params.json       tools/convert_pth.py

OUTDIR is complete or absent afterwards, also when the conversion is interrupted. The path goes to stdout.
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path

from engine.cli import run
from engine.settings import parse_size
from models.errors import ConfigError, ModelFormatError
from tools.convert_gguf import plan_gguf
from tools.convert_pth import plan_pth
from tools.convert_writer import (
    DTYPES,
    SHARD_BYTES,
    ConvertError,
    Plan,
    TargetTakenError,
    check_target,
    command,
    new_folder,
    say,
    write_folder,
)
from tools.gguf import GGUF

__all__ = ["ConvertError", "TargetTakenError", "convert", "main"]


def convert(
    source: str | os.PathLike[str],
    outdir: str | os.PathLike[str],
    *,
    dtype: str = "bfloat16",
    shard_size: int = SHARD_BYTES,
    context_length: int | None = None,
    progress: bool = False,
) -> Path:
    """Convert a GGUF file or Meta's folder, and return the folder written.

    dtype: bfloat16, float16 or float32. shard_size: bytes of a safetensors file. context_length: where the source does
    not say it (Meta's) or says it wrong. progress: tell on stderr what happens, with a bar if that is a terminal.
    Raises ModelFormatError (a source that is damaged or not supported), ConvertError (target taken, no space), OSError.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if shard_size < 1:
        raise ConfigError(f"shard_size must be at least one byte, got {shard_size}")
    target = Path(os.path.realpath(Path(outdir).expanduser()))
    check_target(target)
    plan = _plan(Path(source).expanduser(), context_length)
    for note in plan.notes:
        say(progress, f"note: {note}")
    with new_folder(target, plan.nbytes(dtype) + (64 << 20)) as folder:
        write_folder(plan, folder, dtype, shard_size, progress)
    return target


def _plan(source: Path, context_length: int | None) -> Plan:
    if source.is_file():
        with source.open("rb") as file:
            if file.read(2).startswith((b"PK", b"\x80")):  # a zip archive, as torch.save writes it, or a bare pickle
                raise ModelFormatError(f"{source}: a pickle; give the folder that holds consolidated.*.pth")
        return plan_gguf(GGUF(source), context_length)
    if not source.is_dir():
        reason = "neither a file nor a folder" if source.exists() else "no such file or folder"
        raise ModelFormatError(f"{source}: {reason}")
    if any(source.glob("consolidated.*.pth")):
        return plan_pth(source, context_length)
    reason = "no consolidated.*.pth in it"
    if found := sorted(source.glob("*.gguf")):
        reason = f"give the GGUF file itself, {found[0]}"
    elif any(source.glob("*.safetensors")):
        reason = "safetensors need no conversion"
    elif any(source.glob("pytorch_model*.bin")):
        reason = "Hugging Face's pickles are not supported; use the safetensors files of this model"
    raise ModelFormatError(f"{source}: {reason}")


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size < 1:
        raise argparse.ArgumentTypeError(f"must be at least one byte, got {text}")
    return size


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.convert",
        description="Convert a Llama GGUF file, or Meta's consolidated.*.pth, to a Hugging Face folder.",
    )
    parser.add_argument("source", metavar="SOURCE", help="a GGUF file, or a folder with consolidated.*.pth")
    parser.add_argument("outdir", metavar="OUTDIR", help="folder to write, absent or empty")
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="bfloat16", help="of the weights (default: %(default)s)"
    )
    parser.add_argument("--shard-size", type=_size, default=SHARD_BYTES, help="of one file at most (default: 5GB)")
    parser.add_argument(
        "--context-length", type=int, metavar="TOKENS", help="the model was trained for; Meta's files do not say it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the path")
    args = parser.parse_args(argv)
    make = functools.partial(
        convert, args.source, args.outdir, dtype=args.dtype, shard_size=args.shard_size,
        context_length=args.context_length, progress=True,
    )  # fmt: skip
    return command(make, args.outdir, {"dtype": args.dtype}, args.json)


if __name__ == "__main__":
    run(main)
