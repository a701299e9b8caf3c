"""Which tokens of which requests are computed next; deals in plain Python only.

    waiting ──admit──> running ──finish──> gone
            <─preempt─

First come, first served: a request is admitted when what is cached of it, what is free, and prefixes that nobody holds
make room for its tokens so far. A step computes one token of each request that is generating and fills what is left of
the token budget with chunks of prompts: half of it for the shortest, so that none waits behind a long one, the rest in
the order of arrival. A request whose next page an older one is about to compute waits for that page instead.

When the pool runs out, the newest request is preempted: its pages stay as a prefix while there is place, and it waits,
first in line, for what all its tokens will take. So the oldest request always advances, and none is lost. A request
that is alone is compressed to fit, and with `kv_budget` all are, before any is preempted.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from engine.config import RequestOutput, SamplingParams
from engine.tokenizer import Detokenizer
from memory.cache import KVCache
from memory.frames import OutOfPages
from memory.prefix import CachedSequence


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
    num_scored: int = 0  # tokens whose scores there are: they are not given again after a preemption
    every_logit: bool = False  # what is scored is all the logits, not the log-probabilities of the prompt's tokens
    stepped: bool = False  # its outputs are what `LLM.step` returns
    sequence: CachedSequence = field(default_factory=CachedSequence)
    num_cached_tokens: int | None = None  # of the prompt, that were found in the cache; None before its first step
    num_preemptions: int = 0
    private: bool = False  # what it computes is not to be built on
    text: str = ""
    shown: int = 0  # characters of the text that cannot become part of a stop string
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    cache_report: dict[str, Any] = field(default_factory=dict)

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.sequence.length

    @property
    def wanted(self) -> tuple[list[int], str, bool]:
        """What it looks for in the cache; the last of its tokens is for its logits."""
        return self.tokens[:-1], self.params.cache_salt, self.params.exact_prefix

    @property
    def shares(self) -> bool:
        """Whether it uses what is cached and leaves something: one that is scored computes all of its tokens."""
        return self.scores is None and not self.private

    @property
    def most_tokens(self) -> int:
        """The cache length that this request can reach: its last token is never computed."""
        return self.num_prompt_tokens + max(self.max_tokens - 1, 0)

    def extend_text(self, new: str) -> bool:
        """Add text to the answer; cut it at the first stop string and say so if there is one."""
        self.text += new
        stops = self.params.stop
        # What was shown cannot be part of a stop string, so none begins there.
        if found := [at for at in (self.text.find(stop, self.shown) for stop in stops) if at >= 0]:
            self.text = self.text[: min(found)]
            return True
        self.shown = len(self.text) - max((_overlap(self.text[self.shown :], stop) for stop in stops), default=0)
        return False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a beginning of the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class Schedule(NamedTuple):
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
        # The tokens: of requests that were begun, and of these, those that were found in the cache.
        self.counts = dict.fromkeys(("num_preemptions", "num_prompt_tokens", "num_cached_tokens"), 0)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> Schedule:
        """The next step; empty when there is nothing to do."""
        self._admit()
        while True:
            requests, counts, num_decodes = self._choose()
            ends = [(request, request.sequence.length + n) for request, n in zip(requests, counts, strict=True)]
            missing = sum(self.cache.missing_pages(request.sequence, end) for request, end in ends)
            growing = [request.sequence for request, end in ends if self.cache.outgrows(request.sequence, end)]
            try:
                self.cache.make_room(missing, self._squeezed, growing)
                break
            except OutOfPages:
                if not self.preempt():
                    raise
        for request, end in ends:
            self.cache.reserve(request.sequence, end, room=request.most_tokens - end)
        return Schedule(requests, counts, num_decodes)

    @property
    def _squeezed(self) -> list[CachedSequence]:
        """Whose pages go down when the pool is short."""
        budgeted = self.cache.config.tiers is not None and self.cache.config.tiers.budget is not None
        return [request.sequence for request in self.running] if budgeted or len(self.running) == 1 else []

    def _choose(self) -> tuple[list[Request], list[int], int]:
        """Requests, their counts of tokens, and how many of them decode, which come first."""
        prefills: list[Request] = []
        for request in self.running:
            if request.num_pending > 1 and not self._follows(request, prefills):
                prefills.append(request)
        for request in [request for request in prefills if request.shares]:
            if not request.sequence.length:
                self.cache.adopt(request.sequence, *request.wanted)
            self.cache.fetch(request.sequence, *request.wanted, self._squeezed)
        prefills = [request for request in prefills if request.num_pending > 1]
        decodes = [request for request in self.running if request.num_pending == 1]
        budget = max(self.max_num_batched_tokens - len(decodes), 1)  # so that the oldest prompt always advances
        size = self.cache.config.page_size
        # Exact pages that chunks may take beside one for each request, whatever has to be compressed for them.
        pages = self.cache.obtainable_pages([request.sequence for request in self.running]) if prefills else 0
        counts = dict.fromkeys(prefills, 0)
        shortest_first = sorted(prefills[1:], key=lambda request: request.num_pending)
        for order, share in ((shortest_first, budget // 2), (prefills, budget)):
            for request in order:
                first = size - (request.sequence.length + counts[request]) % size
                count = min(request.num_pending - counts[request], share, budget, first + pages * size)
                counts[request] += count
                share -= count
                budget -= count
                pages -= max(-(-(count - first) // size), 0)
        # A chunk of one token is attended as a decode.
        ones = decodes + [request for request in prefills if counts[request] == 1]
        longer = [request for request in prefills if counts[request] > 1]
        return ones + longer, [1] * len(ones) + [counts[request] for request in longer], len(ones)

    def _follows(self, request: Request, older: list[Request]) -> bool:
        """Whether the next page of a request that has not begun is being computed for one of the older requests."""
        if request.sequence.length or not (request.shares and self.cache.config.prefix_caching):
            return False
        size = self.cache.config.page_size
        found, _ = self.cache.cached_tokens(*request.wanted)
        end = (found // size + 1) * size
        begins = (request.params.cache_salt, request.tokens[:end])
        return end < len(request.tokens) and any(
            other.shares and other.sequence.length < end and (other.params.cache_salt, other.tokens[:end]) == begins
            for other in older
        )

    def commit(self, request: Request, count: int) -> None:
        """`count` more tokens of the request are computed; what there is of its prompt serves others from now on."""
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.sequence.length
            self.counts["num_prompt_tokens"] += request.num_prompt_tokens
            self.counts["num_cached_tokens"] += request.num_cached_tokens
        self.cache.commit(request.sequence, count)
        if request.shares:
            if count > 1:
                self.cache.keep(request.sequence, request.tokens, request.params.cache_salt)
            self.cache.store(request.sequence, request.tokens, request.params.cache_salt)

    def _admit(self) -> None:
        """Move waiting requests to the running ones while there is room."""
        units = self.cache.config.planned_units
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            _, shared = self.cache.cached_tokens(*request.wanted) if request.shares else (0, 0)
            growth = [(units(self._expected(other)), units(other.sequence.length)) for other in self.running]
            wanted = units(self._expected(request)) - (shared << self.cache.config.exact_order)
            wanted += sum(max(planned - held, 0) for planned, held in growth)
            # One that does not fit the whole pool is compressed to fit it, alone.
            if wanted > self.cache.idle_units() and self.running:
                break
            self.running.append(self.waiting.popleft())

    def _expected(self, request: Request) -> int:
        """The cache length that there should be room for: of one that was preempted once, all it can reach."""
        page = self.cache.config.page_size
        return request.most_tokens if request.num_preemptions else min(len(request.tokens) + page, request.most_tokens)

    def preempt(self) -> bool:
        """Have the newest request wait for what all its tokens will take; says whether there are others to run."""
        if len(self.running) < 2:
            return False
        request = self.running.pop()
        self._leave(request)
        request.num_preemptions += 1
        self.counts["num_preemptions"] += 1
        self.waiting.appendleft(request)
        return True

    def output(self, request: Request) -> RequestOutput:
        """The answer so far, and what the cache holds of it."""
        if request.finish_reason is None:
            request.cache_report = self.cache.report(request.sequence)
        prompt, answer = request.tokens[: request.num_prompt_tokens], request.tokens[request.num_prompt_tokens :]
        text = request.text if request.finish_reason else request.text[: request.shown]
        logprobs = None if request.params.logprobs is None else list(request.logprobs)
        cached, report = request.num_cached_tokens or 0, request.cache_report
        return RequestOutput(prompt, answer, text, request.finish_reason, logprobs, cached, report, request.id)

    def finish(self, request: Request, reason: str) -> None:
        """End a request, running or waiting, and free its pages, which serve others until their place is needed."""
        request.cache_report = self.cache.report(request.sequence)
        request.finish_reason = reason
        (self.running if request in self.running else self.waiting).remove(request)
        if reason == "error":
            # What it computed may be no numbers: nobody is to build on it, nor on what others have built on it already.
            for other in self.running:
                other.private = True
            self.cache.free(request.sequence)
            self.cache.forget([other.sequence for other in self.running])
        else:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        if request.shares:
            self.cache.keep(request.sequence, request.tokens, request.params.cache_salt)
        self.cache.free(request.sequence)
