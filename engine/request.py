"""What a caller asks for and what comes back (no torch)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from engine.config import flag
from engine.errors import RequestError, shown

MAX_STOPS = 16
MAX_STOP_LENGTH = 256


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an answer is chosen. temperature 0 is greedy; the filters apply in the order of the fields.

    logprobs: for every token of the answer, the log-probabilities (natural, of the unfiltered distribution) of this
    many most likely tokens and of the chosen one. n: answers per prompt, each with its own randomness.
    Raises RequestError naming the parameter, got and wanted.
    """

    max_tokens: int = flag(
        128, "tokens to generate at most (default: %(default)s)", "-n", "--max-new-tokens", parse=int
    )
    temperature: float = flag(1.0, "0 is greedy (default: %(default)s)", "--temp", parse=float)
    top_p: float = flag(
        1.0, "keep the most likely tokens up to this probability (default: %(default)s, all)", parse=float
    )
    top_k: int = flag(0, "keep this many most likely tokens (default: 0, all)", parse=int)
    min_p: float = flag(0.0, "drop tokens below this share of the most likely one's probability", parse=float)
    repetition_penalty: float = flag(
        1.0, "divide the logits of tokens seen (default: 1, off)", "--repeat-penalty", parse=float
    )
    stop: tuple[str, ...] = ()
    seed: int | None = flag(None, "makes sampling repeatable", "-s", parse=int)
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        stop: Any = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        right = isinstance(stop, list | tuple) and len(stop) <= MAX_STOPS
        if not right or not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH for text in stop):
            raise RequestError(f"stop must be at most {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters")
        object.__setattr__(self, "stop", tuple(stop))
        if type(self.ignore_eos) is not bool:
            raise RequestError(f"ignore_eos must be True or False, got {shown(self.ignore_eos)}")
        self._check("max_tokens", int, 1, 1 << 30)
        self._check("temperature", float, 0, 100)
        self._check("top_p", float, math.ulp(0.0), 1.0, "above 0 up to 1")
        self._check("top_k", int, 0, 1 << 30)
        self._check("min_p", float, 0, 1)
        self._check("repetition_penalty", float, 0.01, 100)
        self._check("seed", int, 0, (1 << 63) - 1, optional=True)
        self._check("logprobs", int, 0, 20, optional=True)
        self._check("n", int, 1, 16)

    def _check(self, name: str, kind: type, least: float, most: float, text: str = "", optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # Written as "accept only if", so that NaN is refused.
        if not (number and (kind is float or isinstance(value, int)) and least <= value <= most):
            noun = "an integer" if kind is int else "a number"
            raise RequestError(f"{name} must be {noun} {text or f'from {least} to {most}'}, got {shown(value)}")


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
