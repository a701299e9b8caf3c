"""Isotherm: a light Llama inference engine for long contexts on small memory.

    from engine import LLM, SamplingParams
    llm = LLM("smollm2-135m")
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=16))[0].text)

Importing this package imports nothing else of weight; each name is imported when it is first used, and only `LLM` and
`AsyncLLM` need torch.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if sys.argv[:1] == ["-m"]:  # python -m engine.generate and its like: before their imports take their time
    from engine.signals import exit_at_once

    exit_at_once()

if TYPE_CHECKING:
    from engine.async_llm import AsyncLLM
    from engine.config import EngineConfig, RequestOutput, SamplingParams
    from engine.errors import RequestError, TokenizerError
    from engine.llm import LLM
    from memory.errors import AllocatorError, CapacityError
    from models.errors import ConfigError, ModelFormatError

__all__ = [
    "LLM", "AllocatorError", "AsyncLLM", "CapacityError", "ConfigError", "EngineConfig", "ModelFormatError",
    "RequestError", "RequestOutput", "SamplingParams", "TokenizerError"]  # fmt: skip

_HEAVY = {"LLM": "engine.llm", "AsyncLLM": "engine.async_llm"}
_LIGHT = ("engine.config", "engine.errors", "memory.errors", "models.errors")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    if name in _HEAVY and (problems := strangers(origins("kernels"))):
        raise ModuleNotFoundError(f"{problems[0]}; give Isotherm an environment of its own", name="kernels")
    homes = map(importlib.import_module, [_HEAVY[name]] if name in _HEAVY else _LIGHT)
    return next(getattr(home, name) for home in homes if hasattr(home, name))


def origins(*packages: str) -> dict[str, str | None]:
    """The files that these packages come from."""
    from importlib.util import find_spec

    return {name: getattr(find_spec(name), "origin", None) for name in packages}


def strangers(origins: dict[str, str | None]) -> list[str]:
    """What is wrong with where packages of ours come from. Their names are common ones (the Hub's `kernels` is another
    package), and whichever is first on sys.path is imported; ours lie beside this one, installed or not."""
    home = os.path.dirname(os.path.dirname(__file__))
    return [
        f"the package {name} is imported from {origin}, not from {home}: another one is before it on sys.path"
        for name, origin in origins.items()
        if origin is None or os.path.realpath(os.path.dirname(os.path.dirname(origin))) != os.path.realpath(home)
    ]
