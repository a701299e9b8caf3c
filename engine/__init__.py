"""Isotherm: a light Llama inference engine for long contexts on small memory.

    from engine import LLM, SamplingParams
    llm = LLM("smollm2-135m")
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=16))[0].text)

Importing this package does not import torch; building an `LLM` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.errors import RequestError, TokenizerError
from engine.request import RequestOutput, SamplingParams
from memory import AllocatorError, CapacityError
from models import ConfigError, ModelFormatError

if TYPE_CHECKING:
    from engine.llm import LLM as LLM

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


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
