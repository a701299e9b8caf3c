"""The engine: from prompts to answers."""

import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine.config import EngineConfig, RequestOutput, SamplingParams
from engine.errors import RequestError, require_request
from engine.graphs import Graphs, cuda_recorder
from engine.loading import Engine, load, second_cache, uses_graphs
from engine.metrics import peak_rss_bytes
from engine.progress import Progress
from engine.runner import Runner
from engine.sampler import sample, top_logprobs
from engine.scheduler import Request, Scheduler
from engine.templates import ChatTemplate, Message, find_template
from engine.tokenizer import Detokenizer
from memory.errors import CapacityError
from models.errors import require_config

Prompt = str | list[int]
Outputs = Generator[RequestOutput, None, None]
log = logging.getLogger("isotherm")


class LLM:
    """A model, its cache and the requests in flight. One thread at a time; several `LLM`s may live in one process."""

    def __init__(self, model: str | os.PathLike[str], *, progress: bool = False, **settings: Any) -> None:
        """Load a model. `settings` are the fields of `EngineConfig`; progress: bars on stderr, on a terminal only,
        while it loads and while `stream` reads a long prompt.

        Raises ConfigError, ModelFormatError, TokenizerError, or CapacityError where model and cache do not fit.
        """
        unknown = settings.keys() - EngineConfig.__dataclass_fields__.keys()
        require_config(not unknown, f"unknown settings: {', '.join(sorted(unknown))}; see EngineConfig")
        self.config = EngineConfig(model=model, **settings)  # type: ignore[arg-type]
        self._start(load(self.config, progress), progress)

    def _start(self, engine: Engine, progress: bool) -> None:
        self._engine = engine
        self._progress = progress
        self._num_failed = 0
        self._out_of_memory = False  # in the last step
        self.tokenizer = engine.tokenizer
        self.max_model_len = engine.max_model_len
        self.generation_config = engine.generation_config
        self.vocab_size = engine.model.config.vocab_size  # token ids are below it
        self._model = engine.model
        self._cache = engine.cache
        device = engine.model.device
        graphs = Graphs(cuda_recorder(device)) if uses_graphs(self.config, device) else None
        self._runner = Runner(engine.model, engine.cache, graphs)
        self._scheduler = Scheduler(engine.cache, self.config.max_num_batched_tokens, self.config.max_num_seqs)
        self._ids = itertools.count()
        self._requests: dict[int, Request] = {}
        self._changed: dict[int, Request] = {}  # what the next `step` returns

    def twin(self, **changes: Any) -> "LLM":
        """Another `LLM` of the same weights, which are not loaded again, with an empty cache of its own.

        changes: its other settings of cache and steps, as kv_budget or page_size. Raises ConfigError, CapacityError.
        """
        same = {"model", "tokenizer", "dtype", "device", "backend", "rope_scaling", "flash_cache_dir"}
        same |= {"quantization", "quantization_group"}
        fixed = changes.keys() & same
        require_config(not fixed, f"a twin has the same {', '.join(sorted(fixed))}; load another LLM instead")
        other = object.__new__(type(self))
        other.config = replace(self.config, **changes)
        other._start(second_cache(self._engine, other.config), self._progress)
        return other

    def generate(
        self, prompts: str | list[str] | list[list[int]], params: SamplingParams | None = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Answers to one or several prompts, computed together; n > 1 gives n consecutive answers a prompt.

        use_tqdm: a progress bar, on a terminal only. Raises RequestError before anything is computed.
        """
        params = _checked(params)
        seeds = [None if params.seed is None else (params.seed + i) % 2**63 for i in range(params.n)]
        every = [replace(params, n=1, seed=seed) for seed in seeds]
        requests = [self._request(list(tokens), own) for tokens in self._prompts(prompts) for own in every]
        with Progress(total=len(requests), desc="Generating", shown=use_tqdm) as bar:
            for _ in self._steps(requests):
                bar.update(sum(request.finish_reason is not None for request in requests) - bar.n)
        return [self._scheduler.output(request) for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Outputs:
        """One answer as it grows; each output has the whole text so far, the last one a finish_reason."""
        yield from self._stream(self._request(self._one_prompt(prompt), _checked(params, "stream gives one answer")))

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """How `chat` makes prompts: the checkpoint's own template, until another is assigned."""
        if self.tokenizer is None:
            raise RequestError("chat needs the tokenizer; skip_tokenizer_init is set")
        return ChatTemplate(find_template(self.config), self.tokenizer)

    def chat(self, messages: list[Message], params: SamplingParams | None = None) -> RequestOutput:
        """The answer to a conversation: {"role": "user", "content": "Hello"} and so on, in turn, the last a user's.

        Raises RequestError for messages that are no conversation, ConfigError where there is no template for them.
        """
        *_, last = self.stream_chat(messages, params)
        return last

    def stream_chat(self, messages: list[Message] | list[int], params: SamplingParams | None = None) -> Outputs:
        """`chat` as the answer grows: an output after every step, so that the first may have no token yet.

        messages may also be what `chat_template.encode` made of them.
        """
        params = _checked(params, "chat gives one answer")
        template = self.chat_template
        encoded = isinstance(messages, list) and messages and type(messages[0]) is int
        prompt: Any = messages if encoded else template.encode(messages)  # type: ignore[arg-type]
        request = self._request(self._one_prompt(prompt), params, end_ids=template.end_ids)
        yield from self._stream(request, every_step=True)

    def _stream(self, request: Request, every_step: bool = False) -> Outputs:
        """Its outputs, one for every token; with every_step also while the prompt is read, which has a bar where it
        takes over a second."""
        seen = total = request.num_prompt_tokens
        bar = Progress(total=total, desc="Reading", unit="token", delay=1.0, shown=self._progress)
        with contextlib.closing(self._steps([request])) as steps, bar:
            while True:
                # Other calls may have advanced it too.
                if len(request.tokens) == seen:
                    next(steps, None)
                    bar.update(min(request.sequence.length, total) - bar.n)
                if request.finish_reason or len(request.tokens) > seen:
                    bar.close()
                elif not every_step or seen > total:
                    continue
                seen = len(request.tokens)
                output = self._scheduler.output(request)
                yield output
                if output.finish_reason is not None:
                    return

    def score(self, prompts: str | list[str] | list[list[int]]) -> list[np.ndarray]:
        """Natural log-probability of every token after the first, for each prompt: float32 arrays of length n - 1."""
        params = SamplingParams(temperature=0.0, max_tokens=1)
        requests = [self._request(tokens, params, scored=True) for tokens in self._prompts(prompts)]
        for _ in self._steps(requests):
            pass
        return [torch.cat([torch.empty(0), *(request.scores or [])]).numpy() for request in requests]

    def logits(self, prompt: Prompt) -> Generator[torch.Tensor, None, None]:
        """Logits of the token after each token of the prompt, as the engine computes them: one [tokens, vocab_size]
        float32 tensor on the model's device for every step, whose length is that of the step's chunk."""
        request = self._request(self._one_prompt(prompt), SamplingParams(temperature=0.0, max_tokens=1), scored=True)
        request.every_logit = True
        for _ in self._steps([request]):
            yield from request.scores or []
            request.scores = []

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, end_ids: frozenset[int] = frozenset()
    ) -> int:
        """Queue a request; `step` advances it. end_ids: tokens that end the answer as EOS does (those of
        `chat_template`). Raises RequestError if it can never be served."""
        params = _checked(params, "add_request takes one answer")
        request = self._request(self._one_prompt(prompt), params, end_ids=end_ids)
        request.stepped = True
        self._add(request)
        return request.id

    def step(self) -> list[RequestOutput]:
        """Advance all requests by one step; returns those of `add_request` that have a new token or ended.

        A step that computes a part of a long prompt returns nothing: `has_unfinished_requests` says when to stop.
        """
        self._advance()
        changed, self._changed = self._changed, {}
        return [self._scheduler.output(request) for request in changed.values()]

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do, or to return."""
        return bool(self._requests or self._changed)

    def abort(self, request_id: int) -> None:
        """End a request, whose pages others may take; unknown and ended ones are left alone."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._changed.pop(request_id, None)
            self._scheduler.finish(request, "abort")

    def stats(self) -> dict[str, Any]:
        """Requests in the engine and bytes by use; the keys stay the same from version to version."""
        return {
            "num_requests_running": len(self._scheduler.running),
            "num_requests_waiting": len(self._scheduler.waiting),
            "num_requests_failed": self._num_failed,  # that ended with finish_reason "error"
            **self._scheduler.counts, "max_model_len": self.max_model_len,
            "prefix_tree_depth": self._cache.prefixes.tree.depth,
            "weights_bytes": self._model.nbytes, "peak_rss_bytes": peak_rss_bytes(),
        } | self._cache.stats()  # fmt: skip

    def _advance(self) -> None:
        """One step: schedule, forward, sample, commit. If it fails, requests that were not committed compute the same
        tokens again in the next step."""
        schedule = self._scheduler.schedule()
        if not schedule.requests:
            return
        try:
            logits, scores = self._runner.forward(schedule)
        except torch.OutOfMemoryError:
            # The pages are the pool's, but a step has tensors of its own: with fewer requests they may fit.
            if self._runner.graphs is not None and self._runner.graphs.clear():
                return  # beside them it did not fit; without, it may
            tried, self._out_of_memory = self._out_of_memory, True
            if self._scheduler.preempt():
                most = self._scheduler.max_num_seqs = len(self._scheduler.running)
                log.warning("out of memory in a step: at most %d requests are computed together from now on", most)
            elif tried:
                self._finish(schedule.requests[0], "error")
                self._out_of_memory = False
                if schedule.requests[0].scores is not None:
                    raise  # who asked for scores reads no finish_reason
            return
        self._out_of_memory = False
        rows = iter(logits)
        for request, count, scored in zip(schedule.requests, schedule.counts, scores, strict=True):
            ready = count == request.num_pending
            row = next(rows) if ready else None
            token = None if row is None or scored is not None else self._choose(request, row)
            try:
                self._scheduler.commit(request, count)
                if scored is not None and request.scores is not None:
                    request.scores.append(scored)
                    request.num_scored = max(request.num_scored, request.sequence.length)
                if ready:
                    self._extend(request, token)
            except BaseException:
                # Half of it may be done, and what that is worth nobody knows.
                if request.finish_reason is None:
                    self._finish(request, "error")
                raise
        self._cache.settle([request.sequence for request in self._scheduler.running])

    def _choose(self, request: Request, logits: torch.Tensor) -> int | None:
        """The next token, or None for logits that are not numbers. logits [vocab_size] float32."""
        if not torch.isfinite(logits.max()):  # the maximum of a row with a NaN is NaN
            return None
        token = sample(logits, request.params, request.tokens, request.generator)
        if request.params.logprobs is not None:
            request.logprobs.append(top_logprobs(logits, token, request.params.logprobs))
        return token

    def _extend(self, request: Request, token: int | None) -> None:
        """Add the token to the answer of a request that is computed as far as it goes, and see whether it ends."""
        if token is None:
            self._finish(request, "error" if request.scores is None else "length")
            return
        request.tokens.append(token)
        ended = token in request.eos_ids
        full = len(request.tokens) - request.num_prompt_tokens == request.max_tokens
        if request.detokenizer is not None:
            text = "" if ended else request.detokenizer.push(token)
            # At the end, bytes that never became a character come out as replacement characters.
            ended |= request.extend_text(text + request.detokenizer.flush() if ended or full else text)
        if ended or full:
            self._finish(request, "stop" if ended else "length")
        elif request.stepped:
            self._changed[request.id] = request

    def _finish(self, request: Request, reason: str) -> None:
        self._num_failed += reason == "error"
        self._scheduler.finish(request, reason)
        del self._requests[request.id]
        if request.stepped:
            self._changed[request.id] = request

    def _prompts(self, prompts: Any) -> list[list[int]]:
        if isinstance(prompts, str):
            prompts = [prompts]
        several = isinstance(prompts, list) and prompts != [] and not any(type(prompt) is int for prompt in prompts)
        require_request(several, "prompts must be a text, a list of texts, or a list of token-id lists")
        return [self._one_prompt(prompt) for prompt in prompts]

    def _one_prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("a text prompt needs the tokenizer; skip_tokenizer_init is set: give token ids")
            return self.tokenizer.encode(prompt)
        listed = isinstance(prompt, list)
        require_request(listed, f"a prompt is a text or a list of token ids, got {type(prompt).__name__}")
        known = all(type(i) is int and 0 <= i < self.vocab_size for i in prompt)
        require_request(known, f"token ids must be integers from 0 to {self.vocab_size - 1}")
        return list(prompt)

    def _request(
        self, tokens: list[int], params: SamplingParams, end_ids: frozenset[int] = frozenset(), scored: bool = False
    ) -> Request:
        length, answered = len(tokens), not scored
        scores: list[torch.Tensor] | None = [] if scored else None
        stoppable = self.tokenizer is not None or not params.stop
        require_request(stoppable, "stop strings need the tokenizer; skip_tokenizer_init is set")
        require_request(length > 0, "the prompt is empty, and this model has no BOS token to begin with")
        most = f"max_model_len is {self.max_model_len}{' with at least one for the answer' if answered else ''}"
        way = "it is never cut: shorten it, or raise --max-model-len as far as the model allows"
        require_request(length + answered <= self.max_model_len, f"the prompt has {length} tokens, {most}; {way}")
        request_id = next(self._ids)
        seed = (self.config.seed * 1_000_003 + request_id) % 2**63 if params.seed is None else params.seed
        generator = torch.Generator().manual_seed(seed) if params.temperature > 0 else None
        max_tokens = min(params.max_tokens, self.max_model_len - length) if answered else 0
        eos_ids = frozenset() if params.ignore_eos else self._engine.eos_ids | end_ids
        detokenizer = Detokenizer(self.tokenizer, tokens) if self.tokenizer and answered else None
        request = Request(request_id, params, tokens, length, max_tokens, eos_ids, generator, detokenizer, scores)
        cache, longest = self._cache.config, request.most_tokens
        if cache.pages_for(longest) > cache.num_pages and cache.least_units(longest) > cache.num_units:
            needs = f"{longest} tokens of cache ({length} of the prompt)"
            fit = f"{cache.most_tokens} fit in {self._cache.capacity_bytes / 1e6:.1f} MB"
            way = "use a larger --kv-cache-memory, fewer --max-tokens, or a shorter prompt"
            raise CapacityError(f"the request needs {needs}, {fit}; {way}")
        return request

    def _add(self, request: Request) -> None:
        self._requests[request.id] = request
        self._scheduler.add(request)

    def _steps(self, requests: list[Request]) -> Generator[None, None, None]:
        """Until all have ended; whatever ends it early (Ctrl-C, that it is closed), the requests leave the engine."""
        try:
            for request in requests:
                self._add(request)
            while any(request.finish_reason is None for request in requests):
                self._advance()
                yield
        finally:
            for request in requests:
                self.abort(request.id)


def _checked(params: SamplingParams | None, one: str | None = None) -> SamplingParams:
    """one: what to say of an n above 1 where it cannot be."""
    params = SamplingParams() if params is None else params
    one_for_all = isinstance(params, SamplingParams)
    require_request(one_for_all, "params must be one SamplingParams for all prompts, got", params)
    require_request(not one or params.n == 1, f"{one}: n must be 1, got", params.n)
    return params
