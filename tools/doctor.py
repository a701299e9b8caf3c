"""`python -m engine.doctor`: what this machine has, which code paths that switches on, what is missing for what; and
`isotherm models`: the models that are found on it, and whether they can be loaded (no torch).

The doctor's exit code is 1 where something is wrong (said last); a missing extra is no fault, only not there.
"""

import importlib.metadata
import json
import math
import platform
import re
from pathlib import Path
from typing import Any

from engine import origins, strangers
from engine.cli import parser, run
from engine.config import usable_cpus
from engine.errors import TokenizerError
from models.checkpoint import open_checkpoint
from models.errors import ConfigError, ModelFormatError, require
from models.files import read_object
from models.llama.config import LlamaConfig
from models.resolve import cache_directory, found, places, resolve
from tools.facts import lines

# core: its packages and the oldest versions that work, as pyproject.toml has them. extras: packages, what they are for,
# and the extra that has them. advice: of a run's statistics, the most a number should be, and which knob to turn.
_FACTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("doctor.json").read_text("utf-8"))
CORE, EXTRAS, _ADVICE = _FACTS["core"], _FACTS["extras"], _FACTS["advice"]


def main(argv: list[str] | None = None) -> int:
    args = parser("doctor").parse_args(argv)
    report = examine(args.model)
    if args.stats:
        report = {"advice": advice(read_object(Path(args.stats)))} | report
    problems = report.pop("problems")  # said last
    wrong = [f"WRONG: {problem}" for problem in problems] or ["nothing is wrong"]
    print(json.dumps(report | {"problems": problems}) if args.json else "\n".join([*lines(report), *wrong]))
    return 1 if problems else 0


def advice(stats: dict[str, Any]) -> list[str]:
    """Which knobs to turn, from a run's statistics: those of `LLM.stats()`, or what `generate --json` or
    `tools.train_scorer --json` printed."""
    part = stats.get("cache")
    part = part if isinstance(part, dict) else stats
    values: dict[str, Any] = {key: part[key] for key in _ADVICE if key in part}
    known = values and all(type(value) in (int, float) for value in values.values())
    require(bool(known), f"no statistics of a run or of training: {values}")
    return [_ADVICE[key][1].format(value, _ADVICE[key][0]) for key, value in values.items() if value > _ADVICE[key][0]]


def examine(model: str | None = None) -> dict[str, Any]:
    """Everything that is known, by section; `problems` lists what is wrong, in words."""
    packages = origins("engine", "models", "memory", "kernels", "tools")
    distributions = reversed(list(importlib.metadata.distributions()))  # of two the first is imported
    installed = {str(package.name).lower(): package.version for package in distributions}
    versions = {name: installed.get(name) for name in ("isotherm", *CORE, "triton", *EXTRAS)}
    problems = strangers(packages)
    for name, oldest in CORE.items():
        if _numbers(version := versions[name] or "") < _numbers(oldest):
            what = f"{name} {version} is too old" if version else f"the package {name} is missing"
            problems.append(f"{what}: pip install '{name}>={oldest}'")
    report: dict[str, Any] = {
        "versions": {"python": platform.python_version(), "platform": platform.platform(), **versions},
        "packages": packages, "cpu": {"usable_cpus": usable_cpus(), "default_threads": max(1, usable_cpus() // 2)},
        "directories": {"cache": str(cache_directory()), "models": {str(place): place.is_dir() for place in places()}},
        "features": {what: "yes" if versions[package] else f"no, needs {package}: pip install 'isotherm[{extra}]'"
                     for package, (what, extra) in EXTRAS.items()},
    }  # fmt: skip
    try:
        import torch

        from engine.metrics import free_memory_bytes
        from kernels.reference import cpu_computes_bfloat16

        bf16 = cpu_computes_bfloat16()
        gpus = []
        for i in range(torch.cuda.device_count()):
            gpu, (free, total) = torch.cuda.get_device_properties(i), torch.cuda.mem_get_info(i)
            row = {"name": gpu.name, "capability": f"sm_{gpu.major}{gpu.minor}"}
            gpus.append(row | {"free_bytes": free, "total_bytes": total})
        report |= {
            "memory": {"free_bytes": free_memory_bytes(torch.device("cpu"))},
            "gpu": {"torch_cuda": torch.version.cuda, "devices": gpus},
            "code_paths": {"device": "cuda" if gpus else "cpu", "backend": "triton" if gpus else "torch",
                           "cpu_dtype": "bfloat16" if bf16 else "float32", "packed_bfloat16_linear": bf16,
                           "cpu_capability": torch.backends.cpu.get_cpu_capability()},
        }  # fmt: skip
        if gpus and versions["triton"] is None:
            problems.append("there is a GPU, and no triton for its kernels: pip install triton")
    except ImportError as error:  # said already, where the package is not there at all
        problems.append(f"torch cannot be imported: {error}")
    if model is not None:
        report["model"] = describe(model, model, closely=True)
        problems += filter(None, [report["model"]["error"]])
    return report | {"problems": problems}


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]


def describe(name: str, place: str | Path, closely: bool = False) -> dict[str, Any]:
    """A model from its config and headers, and closely from its tokenizer too, each against the others; no weights.
    `error` says why it cannot be loaded, and is None where that succeeds."""
    row: dict[str, Any] = {"name": name, "error": None}
    try:
        path = resolve(str(place))
        row["path"] = str(path)
        config = LlamaConfig.from_dict(read_object(path / "config.json"))
        row |= {"context": config.context_length, "kv_bytes_per_token": config.kv_bytes_per_token(2)}
        tensors = open_checkpoint(path)
        sizes = [(info.nbytes, info.dtype, math.prod(info.shape)) for info in tensors.values()]
        _, dtype, _ = max(sizes, default=(0, None, 0))  # of the largest tensor
        row |= {"size_bytes": sum(size for size, *_ in sizes), "dtype": dtype, "parameters": sum(n for *_, n in sizes)}
        if closely:
            from engine.tokenizer import load_tokenizer
            from models.llama.model import LlamaWeights
            from models.loader import check_fit

            check_fit(LlamaWeights(config), tensors, config.quantization is not None)
            tokenizer = load_tokenizer(path, config.vocab_size)
            kind = type(tokenizer).__name__
            row["tokenizer"] = {"kind": kind, "vocab_size": tokenizer.vocab_size, "bos_id": tokenizer.bos_id}
    except (ConfigError, ModelFormatError, TokenizerError, ImportError) as error:
        row["error"] = str(error)
    return row


def models(argv: list[str] | None = None) -> int:
    args = parser("models").parse_args(argv)
    rows = [describe(name, path) for name, path in found().items()]
    looked = [str(place) for place in places()]
    if args.json:
        print(json.dumps({"rows": rows, "looked_at": looked}))
    elif rows:
        print(*lines({row.pop("name"): row for row in rows}), sep="\n")
    else:
        print("no models found in:", *looked, sep="\n  ")
        print("A demo model (93 MB): python -m tools.get_demo_model. A directory anywhere: --model DIRECTORY.")
    return 0


if __name__ == "__main__":
    run(main)
