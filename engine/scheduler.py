"""Which tokens of which requests are computed next. First come, first served; deals in plain Python only.

A request is admitted when the pool holds the most that it and all admitted ones can grow to, so that no admitted one
ever runs out of pages. A step computes one token of each request that is generating, and fills what is left of the
token budget with chunks of prompts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.request import RequestOutput, SamplingParams
from engine.tokenizer import Detokenizer
from memory.cache import CachedSequence, KVCache


@dataclass(slots=True, eq=False)
class Request:
    """One request in the engine.

    tokens: prompt and answer.
        [0, sequence.length)           in the cache
        [sequence.length, len(tokens)) to be computed: a chunk of the prompt, or the newest token
    """

    id: int
    params: SamplingParams
    tokens: list[int]
    num_prompt_tokens: int
    max_tokens: int  # of the answer, as the context allows
    eos_ids: frozenset[int]
    generator: torch.Generator | None
    detokenizer: Detokenizer | None
    scores: list[torch.Tensor] | None = None  # where given, the prompt is scored and nothing is generated
    every_logit: bool = False  # what is scored is all the logits, not the log-probabilities of the prompt's tokens
    stepped: bool = False  # its outputs are what `LLM.step` returns
    sequence: CachedSequence = field(default_factory=CachedSequence)
    text: str = ""
    shown: int = 0  # characters of the text that cannot become part of a stop string
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    cache_report: dict[str, Any] = field(default_factory=dict)

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.sequence.length

    @property
    def most_tokens(self) -> int:
        """The cache length that this request can reach: its last token is never computed."""
        return self.num_prompt_tokens + max(self.max_tokens - 1, 0)

    def extend_text(self, new: str) -> bool:
        """Add text to the answer; cut it at the first stop string and say so if there is one."""
        self.text += new
        stops = self.params.stop
        # What was shown cannot be part of a stop string, so none begins there.
        found = [at for at in (self.text.find(stop, self.shown) for stop in stops) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
            return True
        held = max((_overlap(self.text[self.shown :], stop) for stop in stops), default=0)
        self.shown = len(self.text) - held
        return False

    def output(self) -> RequestOutput:
        return RequestOutput(
            prompt_token_ids=self.tokens[: self.num_prompt_tokens],
            token_ids=self.tokens[self.num_prompt_tokens :],
            text=self.text if self.finish_reason else self.text[: self.shown],
            finish_reason=self.finish_reason,
            logprobs=None if self.params.logprobs is None else list(self.logprobs),
            num_cached_tokens=0,
            cache_report=self.cache_report,
            request_id=self.id,
        )


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a beginning of the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step: `counts[i]` tokens of `requests[i]`; the first `num_decodes` requests compute one token each."""

    requests: list[Request]
    counts: list[int]
    num_decodes: int


class Scheduler:
    """Holds the requests from their arrival to their end, and their pages."""

    def __init__(self, cache: KVCache, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.cache = cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> Schedule:
        """The next step; empty when there is nothing to do."""
        self._admit()
        decodes = [request for request in self.running if request.num_pending == 1]
        budget = max(self.max_num_batched_tokens - len(decodes), 0)
        size = self.cache.config.page_size
        # Exact pages that chunks may take beside one for each request, whatever has to be compressed for them.
        pages = self.cache.obtainable_pages([request.sequence for request in self.running])
        chunks: list[tuple[Request, int]] = []
        for request in self.running:
            first = size - request.sequence.length % size
            count = min(request.num_pending, budget, first + pages * size)
            if request.num_pending > 1 and count:
                chunks.append((request, count))
                budget -= count
                pages -= max(-(-(count - first) // size), 0)
        # A chunk of one token is attended as a decode, which must come first.
        ones = decodes + [request for request, count in chunks if count == 1]
        longer = [(request, count) for request, count in chunks if count > 1]
        requests = ones + [request for request, _ in longer]
        counts = [1] * len(ones) + [count for _, count in longer]
        lengths = [request.sequence.length + count for request, count in zip(requests, counts, strict=True)]
        missing = sum(self.cache.missing_pages(r.sequence, n) for r, n in zip(requests, lengths, strict=True))
        growing = [r.sequence for r, n in zip(requests, lengths, strict=True) if self.cache.outgrows(r.sequence, n)]
        self.cache.make_room(missing, [request.sequence for request in self.running], growing)
        for request, length in zip(requests, lengths, strict=True):
            self.cache.reserve(request.sequence, length, room=request.most_tokens - length)
        return Schedule(requests, counts, len(ones))

    def _admit(self) -> None:
        """Move waiting requests to the running ones while all can be served to their end."""
        config = self.cache.config
        promised = sum(config.planned_units(request.most_tokens) for request in self.running)
        while self.waiting and len(self.running) < self.max_num_seqs:
            promised += config.planned_units(self.waiting[0].most_tokens)
            # One that does not fit the whole pool is compressed to fit it, alone.
            if promised > config.num_units and self.running:
                break
            self.running.append(self.waiting.popleft())

    def finish(self, request: Request, reason: str) -> None:
        """End a request, running or waiting, and free its pages."""
        request.finish_reason = reason
        self.cache.free(request.sequence)
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
