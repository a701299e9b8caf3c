"""`python -m engine.doctor`: what this machine has, which code paths that switches on, what is missing for what.

Exit code 1 where something is wrong (said last); a missing extra is no fault, only something that is not there.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports take their time
    from engine.signals import exit_at_once

    exit_at_once()

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine import origins, strangers
from engine.arguments import Parser
from engine.cli import run
from engine.config import usable_cpus
from engine.errors import TokenizerError
from engine.models import describe
from models.checkpoint import open_checkpoint
from models.errors import ConfigError, ModelFormatError, require
from models.files import read_object
from models.llama.config import LlamaConfig
from models.resolve import cache_directory, places, resolve

# The core's packages and the oldest versions that work, as pyproject.toml has them.
CORE = {"torch": "2.6", "safetensors": "0.4.3", "sentencepiece": "0.2", "numpy": "1.24", "tqdm": "4.60"}
# What an extra package is for, and the extra that has it.
EXTRAS = {
    "tokenizers": ("models with a tokenizer.json", "hf"),
    "jinja2": ("chat templates that come with a model", "chat"),
    "shtab": ("isotherm completion", "completion"),
}

# Of a run's statistics, the most that a number should be, and which knob to turn where it is more.
_ADVICE = {
    "prefix_tree_depth": (
        6,
        "cached prefixes branch {} times on one path: --max-prefix-depth {} keeps none below, so that lookups and "
        "evictions stay short, and requests compute again what they share beyond that",
    ),
}


def parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m engine.doctor", description="Check this machine, and perhaps a model.")
    parser.add_argument("-m", "--model", help="also check this model, without loading its weights")
    parser.add_argument("--stats", metavar="FILE", help="also advise on a run: LLM.stats() as JSON, or generate --json")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    report = examine(args.model)
    if args.stats:
        report = {"advice": advice(read_object(Path(args.stats)))} | report
    print(json.dumps(report) if args.json else _text(report))
    return 1 if report["problems"] else 0


def advice(stats: dict[str, Any]) -> list[str]:
    """Which knobs to turn, from a run's statistics: those of `LLM.stats()`, or all that `generate --json` printed."""
    part = stats.get("cache")
    values: dict[str, Any] = {key: (part if isinstance(part, dict) else stats).get(key) for key in _ADVICE}
    require(all(type(value) is int for value in values.values()), f"no statistics of a run: {values}")
    return [text.format(values[key], most) for key, (most, text) in _ADVICE.items() if values[key] > most]


def examine(model: str | None = None) -> dict[str, Any]:
    """Everything that is known, by section; `problems` lists what is wrong, in words."""
    cpus = usable_cpus()
    packages = origins("engine", "models", "memory", "kernels")
    problems = strangers(packages)
    report: dict[str, Any] = {
        "versions": _versions(problems),
        "packages": packages,
        "cpu": {"model": _cpu_model(), "usable_cpus": cpus, "default_threads": max(1, cpus // 2)},
    }
    try:
        report |= _compute(report["versions"], problems)
    except ImportError as error:  # said already, where the package is not there at all
        problems.append(f"torch cannot be imported: {error}")
    gpu = bool(report.get("gpu", {}).get("devices"))
    report |= {"directories": _directories(problems), "features": _features(report["versions"], gpu)}
    if model is not None:
        report["model"] = _model(model)
        problems += filter(None, [report["model"]["error"]])
    return report | {"problems": problems}


def _versions(problems: list[str]) -> dict[str, str | None]:
    found = reversed(list(importlib.metadata.distributions()))  # of two the first is imported
    installed = {str(package.name).lower(): package.version for package in found}
    versions = {name: installed.get(name) for name in ("isotherm", *CORE, "triton", *EXTRAS)}
    for name, oldest in CORE.items():
        version = versions[name]
        if version is None or _numbers(version) < _numbers(oldest):
            what = f"{name} {version} is too old" if version else f"the package {name} is missing"
            problems.append(f"{what}: pip install '{name}>={oldest}'")
    return {"python": platform.python_version(), "platform": platform.platform(), **versions}


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1]
    return platform.processor() or platform.machine()


def _compute(versions: dict[str, str | None], problems: list[str]) -> dict[str, Any]:
    import torch

    from engine.metrics import free_memory_bytes
    from kernels.reference import cpu_computes_bfloat16

    bf16 = cpu_computes_bfloat16()
    gpus = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        capability = f"sm_{properties.major}{properties.minor}"
        gpus.append({"name": properties.name, "capability": capability, "free_bytes": free, "total_bytes": total})
    if gpus and versions["triton"] is None:
        problems.append("there is a GPU, and no triton for its kernels: pip install triton")
    return {
        "memory": {"free_bytes": free_memory_bytes(torch.device("cpu"))},
        "gpu": {"torch_cuda": torch.version.cuda, "devices": gpus},
        "code_paths": {
            "device": "cuda" if gpus else "cpu",
            "backend": "triton" if gpus else "torch",
            "cpu_dtype": "bfloat16" if bf16 else "float32",
            "packed_bfloat16_linear": bf16,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
    }


def _directories(problems: list[str]) -> dict[str, Any]:
    own = os.environ.get("ISOTHERM_MODELS")
    if own and not os.path.isdir(os.path.expanduser(own)):
        problems.append(f"ISOTHERM_MODELS is {own}, which is no directory")
    cache = cache_directory()
    existing = next(place for place in (cache, *cache.parents) if place.exists())
    if not os.access(existing, os.W_OK):
        problems.append(f"the cache directory {cache} cannot be written: set ISOTHERM_CACHE to one that can")
    return {"cache": str(cache), "models": {str(place): place.is_dir() for place in places()}}


def _features(versions: dict[str, str | None], gpu: bool) -> dict[str, str]:
    """What works here, or what it needs."""
    features = {
        what: "yes" if versions[package] else f"no, needs {package}: pip install 'isotherm[{extra}]'"
        for package, (what, extra) in EXTRAS.items()
    }
    return features | {"Triton kernels": "yes" if gpu else "no, needs an NVIDIA GPU that torch finds, and triton"}


def _model(name: str) -> dict[str, Any]:
    """Config, headers and tokenizer of a model; no weights. `error` says what is wrong, if anything is."""
    row: dict[str, Any] = {"name": name}
    try:
        path = resolve(name)
        row = describe(name, path)
        return row if row["error"] else row | {"tokenizer": _fit(path)}
    except (ConfigError, ModelFormatError, TokenizerError, ImportError) as error:
        return row | {"error": str(error)}


def _fit(path: Path) -> dict[str, Any]:
    """Tensors against the config, and the tokenizer against both."""
    from engine.tokenizer import check_vocabulary, load_tokenizer
    from models.llama.model import LlamaWeights
    from models.loader import check_fit

    config = LlamaConfig.from_dict(read_object(path / "config.json"))
    check_fit(LlamaWeights(config), open_checkpoint(path))
    tokenizer = load_tokenizer(path)
    check_vocabulary(tokenizer, config.vocab_size, path)
    return {"kind": type(tokenizer).__name__, "vocab_size": tokenizer.vocab_size, "bos_id": tokenizer.bos_id}


def _text(report: dict[str, Any]) -> str:
    """The report for people: a line a fact, indented by section; what is wrong comes last."""
    wrong = [f"WRONG: {problem}" for problem in report["problems"]] or ["nothing is wrong"]
    return "\n".join([*_lines({key: value for key, value in report.items() if key != "problems"}), *wrong])


def _lines(facts: dict[str, Any], indent: str = "") -> Iterator[str]:
    words = {"True": "yes", "False": "no", "None": "-", "[]": "-"}
    for key, value in facts.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ")
        elif key.endswith("_bytes") and value is not None:
            yield f"{indent}{key.removesuffix('_bytes')}: {value / 1e9:.2f} GB"
        else:
            yield f"{indent}{key}: {words.get(str(value), value)}"


if __name__ == "__main__":
    run(main)
