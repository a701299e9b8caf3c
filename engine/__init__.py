"""Isotherm: a light Llama inference engine for long contexts on small memory.

    from engine import LLM, SamplingParams
    llm = LLM("smollm2-135m")
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=16))[0].text)

Importing this package imports nothing else; each name is imported when it is first used, and only `LLM` needs torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.errors import RequestError, TokenizerError
    from engine.llm import LLM
    from engine.request import RequestOutput, SamplingParams
    from memory.errors import AllocatorError, CapacityError
    from models.errors import ConfigError, ModelFormatError

__all__ = [
    "LLM",
    "AllocatorError",
    "CapacityError",
    "ConfigError",
    "EngineConfig",
    "ModelFormatError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TokenizerError",
]

_HOMES = {
    "LLM": "engine.llm",
    "AllocatorError": "memory.errors",
    "CapacityError": "memory.errors",
    "ConfigError": "models.errors",
    "EngineConfig": "engine.config",
    "ModelFormatError": "models.errors",
    "RequestError": "engine.errors",
    "RequestOutput": "engine.request",
    "SamplingParams": "engine.request",
    "TokenizerError": "engine.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    if name == "LLM":
        _check_kernels()
    return getattr(importlib.import_module(_HOMES[name]), name)


def _check_kernels() -> None:
    """That `kernels` is ours: the Hugging Face Hub's package has the same name, and whichever is first is imported."""
    found = importlib.import_module("kernels").__file__
    # Ours lies beside this package, installed or not.
    if found is None or os.path.dirname(os.path.dirname(found)) != os.path.dirname(os.path.dirname(__file__)):
        raise ModuleNotFoundError(
            f"the package kernels at {found} is not Isotherm's: another one of that name is before it on sys.path; "
            "give Isotherm an environment of its own",
            name="kernels",
        )
