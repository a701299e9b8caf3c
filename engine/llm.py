"""The engine: from prompts to answers."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from engine.config import EngineConfig
from engine.errors import RequestError
from engine.loading import load
from engine.metrics import peak_rss_bytes
from engine.request import RequestOutput, SamplingParams
from engine.runner import Runner
from engine.sampler import sample, top_logprobs
from engine.scheduler import Request, Scheduler
from engine.tokenizer import Detokenizer
from memory import CapacityError
from models.errors import ConfigError

Prompt = str | list[int]


class LLM:
    """A model, its cache and the requests in flight. One thread at a time; several `LLM`s may live in one process."""

    def __init__(self, model: str | os.PathLike[str], *, progress: bool = False, **settings: Any) -> None:
        """Load a model. `settings` are the fields of `EngineConfig`; progress: a bar on stderr, on a terminal only.

        Raises ConfigError, ModelFormatError, TokenizerError, or CapacityError where model and cache do not fit.
        """
        unknown = settings.keys() - EngineConfig.__dataclass_fields__.keys()
        if unknown:
            raise ConfigError(f"unknown settings: {', '.join(sorted(unknown))}; see EngineConfig")
        self.config = EngineConfig(model=os.fspath(model), **settings)
        engine = load(self.config, progress)
        self.tokenizer = engine.tokenizer
        self.max_model_len = engine.max_model_len
        self.generation_config = engine.generation_config
        self._model = engine.model
        self._cache = engine.cache
        self._eos_ids = engine.eos_ids
        self._runner = Runner(engine.model, engine.cache, engine.ops)
        self._scheduler = Scheduler(engine.cache, self.config.max_num_batched_tokens, self.config.max_num_seqs)
        self._ids = itertools.count()
        self._requests: dict[int, Request] = {}

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 to vocab_size - 1."""
        return self._model.config.vocab_size

    def generate(
        self,
        prompts: str | list[str] | list[list[int]],
        params: SamplingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers to one or several prompts, computed together; n > 1 gives n consecutive answers a prompt.

        use_tqdm: a progress bar, on a terminal only. Raises RequestError before anything is computed.
        """
        params = params or SamplingParams()
        ids = self._add_all(prompts, params)
        done: dict[int, RequestOutput] = {}
        with (
            self._abort_on_error(ids),
            tqdm(total=len(ids), desc="Generating", disable=None if use_tqdm else True) as bar,
        ):
            while len(done) < len(ids):
                for output in self.step():
                    if output.finish_reason and output.request_id in ids:
                        done[output.request_id] = output
                        bar.update()
        return [done[i] for i in ids]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[RequestOutput, None, None]:
        """One answer as it grows; each output has the whole text so far, the last one a finish_reason."""
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"stream gives one answer: n must be 1, got {params.n}")
        request_id = self.add_request(prompt, params)
        with self._abort_on_error([request_id]):
            finished = False
            while not finished:
                for output in self.step():
                    if output.request_id == request_id:
                        finished = output.finish_reason is not None
                        yield output

    def score(self, prompts: str | list[str] | list[list[int]]) -> list[np.ndarray]:
        """Natural log-probability of every token after the first, for each prompt: float32 arrays of length n - 1."""
        requests = [
            self._request(tokens, SamplingParams(temperature=0.0, max_tokens=1), scores=[])
            for tokens in self._tokenize_all(prompts)
        ]
        for request in requests:
            self._add(request)
        with self._abort_on_error([request.id for request in requests]):
            while any(request.finish_reason is None for request in requests):
                self.step()
        return [torch.cat([torch.empty(0), *(request.scores or [])]).numpy() for request in requests]

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a request; `step` advances it. Raises RequestError if it can never be served."""
        if not (isinstance(prompt, str) or (isinstance(prompt, list) and all(type(i) is int for i in prompt))):
            raise RequestError(f"a prompt is a text or a list of token ids, got {type(prompt).__name__}")
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"add_request takes n = 1, got {params.n}; add the prompt n times")
        request = self._request(self._tokenize(prompt), params)
        self._add(request)
        return request.id

    def step(self) -> list[RequestOutput]:
        """Advance the requests by one step; returns those that have a new token or ended. Empty: nothing to do."""
        schedule = self._scheduler.schedule()
        if not schedule.requests:
            return []
        logits = self._runner.forward(schedule)
        ready = [request for request in schedule.requests if not request.num_pending]
        return [self._commit(request, row) for request, row in zip(ready, logits, strict=True)]

    def abort(self, request_id: int) -> None:
        """End a request and free its pages; unknown and ended ones are left alone."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._scheduler.finish(request, "abort")

    def stats(self) -> dict[str, Any]:
        """Requests in the engine and bytes by use; the keys stay the same from version to version."""
        return {
            "num_requests_running": len(self._scheduler.running),
            "num_requests_waiting": len(self._scheduler.waiting),
            "weights_bytes": self._model.nbytes,
            "kv_resident_bytes": self._cache.resident_bytes,
            "kv_capacity_bytes": self._cache.capacity_bytes,
            "kv_cold_bytes": 0,
            "kv_bytes_per_token": self._cache.config.token_bytes,
            "kv_cache_usage": 1 - self._cache.num_free_pages / self._cache.config.num_pages,
            "max_model_len": self.max_model_len,
            "peak_rss_bytes": peak_rss_bytes(),
        }

    def _commit(self, request: Request, logits: torch.Tensor) -> RequestOutput:
        """Choose the next token of a request whose tokens are all computed, and see whether it ends."""
        params = request.params
        request.cache_report = self._cache_report(request)
        if request.scores is not None:
            return self._end(request, "length")
        if not torch.isfinite(logits.max()):  # the maximum of a row with a NaN is NaN
            return self._end(request, "error")
        token = sample(logits, params, request.tokens, request.generator)
        request.tokens.append(token)
        if params.logprobs is not None:
            request.logprobs.append(top_logprobs(logits, token, params.logprobs))
        if token in request.eos_ids:
            return self._end(request, "stop")
        if request.detokenizer is not None:
            request.text += request.detokenizer.push(token)
            if self._stopped(request):
                return self._end(request, "stop")
        if len(request.tokens) - request.num_prompt_tokens == request.max_tokens:
            return self._end(request, "length")
        return request.output()

    def _stopped(self, request: Request) -> bool:
        """Cut the text at the first stop string, or note how much of it cannot be part of one any more."""
        stops = request.params.stop
        # A stop string can begin no earlier than its length before what was shown.
        found = [at for at in (request.text.find(stop, request.shown) for stop in stops) if at >= 0]
        if found:
            request.text = request.text[: min(found)]
            return True
        held = max((_overlap(request.text[request.shown :], stop) for stop in stops), default=0)
        request.shown = len(request.text) - held
        return False

    def _end(self, request: Request, reason: str) -> RequestOutput:
        if request.detokenizer is not None and reason != "error":
            end = request.detokenizer.flush()
            if not request.params.stop or reason == "length":
                request.text += end
        self._scheduler.finish(request, reason)
        del self._requests[request.id]
        return request.output()

    def _cache_report(self, request: Request) -> dict[str, int]:
        tokens = request.sequence.length
        return {
            "hot_tokens": tokens,
            "resident_bytes": len(request.sequence.pages) * self._cache.config.page_bytes,
            "full_bytes": tokens * self._cache.config.token_bytes,
        }

    def _tokenize_all(self, prompts: Any) -> list[list[int]]:
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, list) or not prompts or any(type(prompt) is int for prompt in prompts):
            raise RequestError("prompts must be a text, a list of texts, or a list of token-id lists")
        return [self._tokenize(prompt) for prompt in prompts]

    def _tokenize(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("a text prompt needs the tokenizer; skip_tokenizer_init is set: give token ids")
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, list) or not all(
            type(i) is int and 0 <= i < self._model.config.vocab_size for i in prompt
        ):
            raise RequestError(f"token ids must be integers from 0 to {self._model.config.vocab_size - 1}")
        return list(prompt)

    def _request(self, tokens: list[int], params: SamplingParams, scores: list[torch.Tensor] | None = None) -> Request:
        length = len(tokens)
        if not tokens:
            raise RequestError("the prompt is empty, and this model has no BOS token to begin with")
        longest = self.max_model_len if scores is not None else self.max_model_len - 1
        if length > longest:
            raise RequestError(
                f"the prompt has {length} tokens, max_model_len is {self.max_model_len}"
                + ("" if scores is not None else " with at least one for the answer")
                + "; it is never cut: shorten it, or raise --max-model-len as far as the model allows"
            )
        request_id = next(self._ids)
        generator = None
        if params.temperature > 0:
            generator = torch.Generator().manual_seed(
                params.seed if params.seed is not None else self.config.seed * 1_000_003 + request_id
            )
        request = Request(
            id=request_id,
            params=params,
            tokens=tokens,
            num_prompt_tokens=length,
            max_tokens=min(params.max_tokens, self.max_model_len - length) if scores is None else 0,
            eos_ids=frozenset() if params.ignore_eos else self._eos_ids,
            generator=generator,
            detokenizer=Detokenizer(self.tokenizer, tokens) if self.tokenizer and scores is None else None,
            scores=scores,
        )
        need = self._cache.config.pages_for(request.most_tokens)
        if need > self._cache.config.num_pages:
            fits = self._cache.config.num_pages * self._cache.config.page_size
            raise CapacityError(
                f"the request needs {request.most_tokens} tokens of cache ({length} of the prompt), {fits} fit in "
                f"{self._cache.capacity_bytes / 1e6:.1f} MB; use a larger --kv-cache-memory, fewer --max-tokens, or a "
                "shorter prompt"
            )
        return request

    def _add(self, request: Request) -> None:
        self._requests[request.id] = request
        self._scheduler.add(request)

    def _add_all(self, prompts: Any, params: SamplingParams) -> list[int]:
        """Queue every prompt n times; nothing is queued if one of them is refused."""
        requests = []
        for tokens in self._tokenize_all(prompts):
            for i in range(params.n):
                seed = None if params.seed is None else params.seed + i
                requests.append(self._request(list(tokens), replace(params, n=1, seed=seed)))
        for request in requests:
            self._add(request)
        return [request.id for request in requests]

    @contextlib.contextmanager
    def _abort_on_error(self, request_ids: list[int]) -> Iterator[None]:
        """Whatever ends the block early (Ctrl-C, a generator that is closed), its requests leave the engine."""
        try:
            yield
        finally:
            for request_id in request_ids:
                self.abort(request_id)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a beginning of the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
