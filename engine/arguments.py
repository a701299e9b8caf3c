"""argparse for people who come from other engines: a flag or command nobody knows is answered with the one that does
it here, or with why there is none (no torch)."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from engine.config import NOT_YET

_GPUS = "one device computes; several are not supported"
_MAPPED = "weights are always read into memory of their own"
# Flags of llama.cpp, vLLM, SGLang, LightLLM and mlx-lm: what they are called here, or why there is none.
FOREIGN = {
    "--n-predict": "--max-tokens", "--predict": "--max-tokens", "--max-completion-tokens": "--max-tokens",
    "--model-path": "--model", "--model-dir": "--model", "-hf": "--model", "--hf-repo": "--model",
    "--context-length": "--max-model-len", "--max-seq-len": "--max-model-len", "--max-kv-size": "--max-model-len",
    "--max-req-total-len": "--max-model-len", "-t": "--threads", "--threads-batch": "--threads", "-r": "--stop",
    "--reverse-prompt": "--stop", "--sampling-seed": "--seed", "--rope-scale": "--rope-scaling",
    "--rope-freq-base": "--rope-scaling", "--rope-freq-scale": "--rope-scaling", "--block-size": "--page-size",
    "--gpu-memory-utilization": "--kv-cache-memory", "--mem-fraction-static": "--kv-cache-memory",
    "--mem-fraction": "--kv-cache-memory", "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--batch-size": "--max-num-batched-tokens", "-b": "--max-num-batched-tokens", "-ub": "--max-num-batched-tokens",
    "--ubatch-size": "--max-num-batched-tokens", "--chunked-prefill-size": "--max-num-batched-tokens",
    "--max-prefill-tokens": "--max-num-batched-tokens", "--parallel": "--max-num-seqs", "-np": "--max-num-seqs",
    "--max-running-requests": "--max-num-seqs", "--tokenizer-path": "--tokenizer", "--log-disable": "--quiet",
    "--n-gpu-layers": "--device", "--gpu-layers": "--device", "-ngl": "--device", "--attention-backend": "--backend",
    "--load-format": "safetensors files are what is loaded; python -m tools.convert makes them of GGUF and .pth",
    "--trust-remote-code": "code of a model directory is never run",
    "--tensor-parallel-size": _GPUS, "--tp-size": _GPUS, "--tp": _GPUS, "-tp": _GPUS, "-sm": _GPUS, "-ts": _GPUS,
    "--mlock": _MAPPED, "--no-mmap": _MAPPED, "--mmap": _MAPPED, "--flash-attn": "attention is always fused",
    "-fa": "attention is always fused", "--enforce-eager": "there are no graphs to switch off",
    "--no-display-prompt": "the prompt is never printed", "-cnv": "use the command chat", "--conversation":
    "use the command chat", "--chat": "use the command chat", "--interactive": "use the command chat",
}  # fmt: skip
# Flags that stand for a setting which is not there yet; ours have the setting's own name.
_LATER = {
    "--kv-cache-dtype": "cold_format", "--kv-bits": "cold_format", "-ctk": "cold_format", "-ctv": "cold_format",
    "--cache-type-k": "cold_format", "--cache-type-v": "cold_format", "--cache-ram": "host_cache_size",
    "--kv-offloading-size": "host_cache_size", "--swap-space": "host_cache_size", "--hicache-size": "host_cache_size",
    "--slot-save-path": "flash_cache_dir", "--prompt-cache": "flash_cache_dir",
    **{f"--{name.replace('_', '-')}": name for name in NOT_YET},
}  # fmt: skip
# Commands of the same engines.
_COMMANDS = {
    "run": "generate", "complete": "generate", "completions": "generate", "cli": "chat", "list": "models",
    "ls": "models", "inspect": "models", "collect-env": "doctor", "env": "doctor", "check": "doctor",
}  # fmt: skip
_TOOLS = {"convert": "convert", "quantize": "quantize", "bench": "bench", "benchmark": "bench"}


class Parser(argparse.ArgumentParser):
    """Flags must be spelled out (an abbreviation would change its meaning when a flag is added); unknown ones are
    answered before a missing one is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        args = sys.argv[1:] if args is None else list(args)
        for arg in args:
            if arg == "--":
                break
            if arg.startswith("-") and " " not in arg and (answer := self._answer(arg.partition("=")[0])):
                self.error(answer)
        return super().parse_known_args(args, namespace)

    def _answer(self, flag: str) -> str | None:
        """What to say of a flag that this parser does not have; None for those it has, for values, and for no idea."""
        known = self._option_string_actions
        spelled = flag.replace("_", "-")
        if flag in known:
            return None
        if spelled in known:
            return f"unrecognized argument {flag}: use {spelled}"
        if spelled in _LATER:
            part = NOT_YET[_LATER[spelled]]
            return f"{flag} is not available in this version ({part} come later); leave it out"
        if spelled in FOREIGN:
            use = FOREIGN[spelled]
            return f"unrecognized argument {flag}: {f'use {use}' if use.startswith('-') else use}"
        if not flag.startswith("--"):
            return None  # short flags joined, a negative number, or what argparse itself refuses
        near = difflib.get_close_matches(spelled, list(known), n=1, cutoff=0.7)
        return f"unrecognized argument {flag}: did you mean {near[0]}?" if near else None

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n{self.prog} --help lists the flags\n")


def command_hint(name: str, commands: Iterable[str]) -> str:
    """One line about a command that is none of `commands`."""
    known = sorted(commands)
    if name.startswith("-"):
        return f"error: the command comes first, as isotherm generate {name} ..."
    if name in _TOOLS:
        return f"error: unknown command {name!r}: use python -m tools.{_TOOLS[name]}"
    near = [_COMMANDS[name]] if name in _COMMANDS else difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near and near[0] in known:
        return f"error: unknown command {name!r}: did you mean {near[0]}?"
    return f"error: unknown command {name!r}"
