"""Writes a checkpoint with quantised weights: `python -m tools.quantize MODEL OUTDIR --quantization int8|int4`.

Loading it gives the bits that quantising on load does, as fast as it is read; with --text, int4 loses less (see
tools/quantize_gptq.py), and with --steps still less (tools/quantize_tuned.py). Tensor by tensor: no more than one of
the source is held; with a text, a layer of it, all codes and the text's hidden states; with steps, all of it. OUTDIR is
complete or absent afterwards, also when the command is interrupted. Its path goes to stdout.

    config.json             with "quantization_config": {"quant_method": "isotherm", "bits": 4, "group_size": 128}
    NAME.weight             the codes of `kernels.ops.QuantizedWeight`: I8 [out, in], or U8 [out, in / 2]
    NAME.weight_scale       BF16 [out, 1], or [out, groups]
    NAME.weight_zero        BF16 [out, groups], of 4 bits
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli import run
from models.checkpoint import open_checkpoint
from models.errors import ConfigError, ModelFormatError
from models.files import opened, read_object
from models.llama.config import DEFAULT_GROUP, GROUPS, METHOD, LlamaConfig, Quantization
from models.resolve import resolve
from tools.convert_writer import (
    SHARD_BYTES,
    check_target,
    command,
    file_name,
    finite,
    new_folder,
    write_json,
    write_safetensors,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.ops import QuantizedWeight, Weight
    from models.checkpoint import TensorInfo

TOKENS = 12_288  # of a text that int4 is fitted to
_LEAST = 128  # of them
_OTHERS = ("*.json", "*.model", "*.txt", "*.jinja")  # files that belong to a checkpoint: tokenizer, generation


def quantize(
    model: str, outdir: str, quantization: str, group: int | None = None, shard_bytes: int = SHARD_BYTES,
    progress: bool = False, texts: Sequence[str] = (), tokens: int = TOKENS, steps: int = 0,
) -> Path:  # fmt: skip
    """Write the checkpoint and return its folder. Raises ConfigError, ModelFormatError, ConvertError, OSError."""
    source, target = resolve(model), Path(os.path.realpath(Path(outdir).expanduser()))
    check_target(target)
    raw = read_object(source / "config.json")
    config = LlamaConfig.from_dict(raw)
    if config.quantization is not None:
        raise ConfigError(f"{source}: the weights are {config.quantization} already; quantise what they were made from")
    if steps < 0 or (steps and not texts):
        raise ConfigError(f"--steps must be 0 or more, and above 0 needs --text, got {steps}")
    if tokens < _LEAST:
        raise ConfigError(f"--tokens must be {_LEAST} or more to fit to, got {tokens}")
    if group is not None and quantization != "int4":
        raise ConfigError(f"--group-size is of int4, and --quantization is {quantization}")
    if texts and quantization != "int4":
        raise ConfigError(f"--text is for int4, and --quantization is {quantization}")
    tensors = open_checkpoint(source)
    wanted = Quantization(8) if quantization == "int8" else Quantization(4, group or DEFAULT_GROUP)

    from models.llama.model import LlamaWeights
    from models.loader import check_fit

    weights = LlamaWeights(replace(config, quantization=wanted))
    check_fit(weights, tensors)
    said: dict[str, Any] = {"quant_method": METHOD, "bits": wanted.bits}
    raw["quantization_config"] = said | ({"group_size": wanted.group} if wanted.group else {})
    with new_folder(target, weights.nbytes(4) + (64 << 20)) as folder:  # what cannot be written is not fitted first
        fitted = _fit(source, config, wanted.group, tensors, texts, tokens, steps, progress) if texts else {}
        for pattern in _OTHERS:
            for file in source.glob(pattern):
                if file.name not in ("config.json", "model.safetensors.index.json"):
                    with opened(file) as content, (folder / file.name).open("wb") as copy:
                        shutil.copyfileobj(content, copy)
        _write(folder, weights, tensors, fitted, shard_bytes, progress)
        write_json(folder / "config.json", raw)
    return target


def _fit(
    source: Path, config: LlamaConfig, group: int, tensors: dict[str, TensorInfo], texts: Sequence[str], tokens: int,
    steps: int, progress: bool,
) -> dict[str, QuantizedWeight | Tensor]:  # fmt: skip
    """The layers' weights, fitted to the texts, and if these are tuned in steps, the norms as well."""
    import torch

    from engine.progress import Progress
    from engine.tokenizer import load_tokenizer
    from tools import evaluate_texts, quantize_gptq, quantize_tuned

    words = [evaluate_texts.read_text(text)[: 16 * tokens] for text in texts]
    for name, text in zip(texts, words, strict=True):
        if not text:
            raise ConfigError(f"--text {name} is empty, and cannot be fitted to")
    ids = map(load_tokenizer(source, config.vocab_size).encode, words)
    windows = quantize_gptq.windows(list(ids), tokens, config.context_length)
    if (count := sum(map(len, windows))) < _LEAST:
        raise ConfigError(f"--text has {count} tokens, {_LEAST} at least are needed to fit to; give more of it")

    def read(name: str) -> Tensor | None:
        return _read(name, tensors) if name in tensors else None

    maps = config.num_layers * len(quantize_gptq.MAPS)
    with torch.no_grad(), Progress(total=maps, desc="Fitting", unit="map", shown=progress) as bar:
        found = quantize_gptq.quantize(read, config, group, windows, bar.update)
    if not steps:
        return {**found}
    with Progress(total=steps, desc="Tuning", unit="step", shown=progress) as bar:
        return quantize_tuned.tune(read, config, found, windows, steps, bar.update)


def _write(
    folder: Path, weights: dict[str, Weight], tensors: dict[str, TensorInfo],
    fitted: dict[str, QuantizedWeight | Tensor], shard_bytes: int, progress: bool,
) -> None:  # fmt: skip
    from engine.progress import Progress

    order = sorted(weights, key=lambda name: (str(tensors[name].file), tensors[name].offset))
    shards: list[dict[str, Any]] = [{}]
    names: list[list[str]] = [[]]
    size = total = 0
    for name in order:
        entry = _entry(name, weights[name], tensors[name])
        nbytes = sum(part[2] for part in entry.values())
        if names[-1] and size + nbytes > shard_bytes:
            shards.append({})
            names.append([])
            size = 0
        shards[-1] |= entry
        names[-1].append(name)
        size, total = size + nbytes, total + nbytes
    weight_map: dict[str, str] = {}
    with Progress(total=len(order), desc="Quantising", unit="tensor", shown=progress) as bar:
        for number, (shard, some) in enumerate(zip(shards, names, strict=True), 1):
            file = file_name(number, len(shards))
            write_safetensors(folder / file, shard, _values(some, weights, tensors, fitted, bar))
            weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def _entry(name: str, weight: Weight, info: TensorInfo) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """What a weight is in the file: dtype, shape and bytes by name."""
    import torch

    from models.loader import parts_of

    if isinstance(weight, torch.Tensor):
        return {name: (info.dtype, info.shape, info.nbytes)}
    sizes = [part.nbytes for part in weight[:3] if part is not None]
    parts = parts_of(name, weight, True).items()
    return {key: (kinds[0], shape, size) for (key, (shape, kinds)), size in zip(parts, sizes, strict=True)}


def _read(name: str, tensors: dict[str, TensorInfo]) -> Tensor:
    from models.loader import read_tensor

    tensor = read_tensor(tensors[name])
    if not finite(tensor):
        raise ModelFormatError(f"{tensors[name].file}: {name} has values that are NaN or infinite")
    return tensor


def _values(
    names: list[str], weights: dict[str, Weight], tensors: dict[str, TensorInfo],
    fitted: dict[str, QuantizedWeight | Tensor], bar: Any,
) -> Iterator[Tensor]:  # fmt: skip
    import torch

    from kernels import reference_linear

    for name in names:
        weight = weights[name]
        value = fitted[name] if name in fitted else _read(name, tensors)
        if isinstance(value, torch.Tensor) and not isinstance(weight, torch.Tensor):
            value = reference_linear.quantize(value, weight.bits, weight.group)
        yield from [value] if isinstance(value, torch.Tensor) else (part for part in value[:3] if part is not None)
        del value  # before the next one is read
        bar.update()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.quantize", description=__doc__.split("\n")[0])
    parser.add_argument("model", metavar="MODEL", help="name or directory")
    parser.add_argument("outdir", metavar="OUTDIR", help="folder to write, absent or empty")
    parser.add_argument("--quantization", choices=("int8", "int4"), required=True, help="of the weights")
    parser.add_argument(
        "--group-size", type=int, choices=GROUPS, metavar="N",
        help=f"inputs that share a scale in int4: 32, 64 or 128 (default: {DEFAULT_GROUP})",
    )  # fmt: skip
    parser.add_argument(
        "--text", nargs="+", default=[], metavar="FILE", help="int4: lose less on texts like these (`stdlib`: Python's)"
    )
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, metavar="N", help="of the texts together (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=0, metavar="N",
        help="then tune scales, zeros and norms on them, the whole model at once, a window a step (default: none)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the path")
    args = parser.parse_args(argv)
    make = functools.partial(
        quantize, args.model, args.outdir, args.quantization, args.group_size,
        progress=True, texts=args.text, tokens=args.tokens, steps=args.steps,
    )  # fmt: skip
    return command(make, args.outdir, {"quantization": args.quantization}, args.json)


if __name__ == "__main__":
    run(main)
