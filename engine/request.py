"""What a caller asks for and what comes back (no torch)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from engine.errors import RequestError
from engine.settings import Accepts, check, integer, number, one_of

MAX_STOPS = 16
MAX_STOP_LENGTH = 256


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an answer is chosen. temperature 0 is greedy; the filters apply in the order of the fields.

    logprobs: for every token of the answer, the log-probabilities (natural, of the unfiltered distribution) of this
    many most likely tokens and of the chosen one. n: answers per prompt, each with its own randomness.
    Raises RequestError naming the parameter, got and wanted.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    cache_salt: str = ""  # cached prefixes serve requests of the same salt only
    exact_prefix: bool = False  # use cached prefixes only as far as they were computed by an exact cache

    def __post_init__(self) -> None:
        stop: Any = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        right = isinstance(stop, list | tuple) and len(stop) <= MAX_STOPS
        if not right or not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH for text in stop):
            raise RequestError(f"stop must be at most {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters")
        object.__setattr__(self, "stop", tuple(stop))
        check(self, _CHECKS, RequestError)


_CHECKS: dict[str, Accepts] = {
    **dict.fromkeys(("ignore_eos", "exact_prefix"), one_of(True, False)),
    "max_tokens": integer(1, 1 << 30),
    "temperature": number(0, 100),
    "top_p": number(math.ulp(0.0), 1.0, "above 0 up to 1"),
    "top_k": integer(0, 1 << 30),
    "min_p": number(0, 1),
    "repetition_penalty": number(0.01, 100),
    "seed": integer(0, (1 << 63) - 1),
    "logprobs": integer(0, 20),
    "n": integer(1, 16),
    "cache_salt": ("a text of at most 128 characters", lambda value: isinstance(value, str) and len(value) <= 128),
}


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """An answer so far. finish_reason is None while it grows, then stop, length, abort or error."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[dict[int, float]] | None
    num_cached_tokens: int  # of the prompt, that were found in the cache and not computed
    cache_report: dict[str, Any] = field(default_factory=dict)
    request_id: int = 0
