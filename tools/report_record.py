"""One prompt through the engine, with all that its cache does written down, step by step and token by token.

    Runner -> Recorder -> ops       the recorder stands where the engine's operations do; what they compute is the same

Attention: every query of an answer and some of each chunk of the prompt are asked once more with their logits kept, as
memory/observation.py does, but nothing is summed over pages. A token's *lift* in a layer is the share of the attention
that it got, over the share that it would get if the query attended to all that it sees alike; the mean over the heads,
and over the queries that see it. So 1 is an even share, whatever the length. Neighbours get most, and lie in pages that
are exact anyway: for what matters to the cache there are the lifts by queries that come a page later, or more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine import LLM, RequestError, SamplingParams
from engine.tokenizer import Detokenizer
from kernels.ops import AttentionPlan, LayerCache
from memory.cache import KVCache
from memory.observation import _rows, _without_last
from memory.prefix import CachedSequence

SAMPLES = 16  # queries of a chunk that are asked, spread over it


@dataclass(frozen=True)
class Step:
    """What the cache held after a step's moves, and what the step did."""

    tokens: int  # in the cache
    is_prompt: bool  # whether a chunk of the prompt was computed
    pages: dict[int, int]  # by bits
    resident_bytes: int
    full_bytes: int  # of the same tokens, exact
    cold_bytes: int
    moves: int
    cold_hit_rate: float | None  # None where nothing is recalled


@dataclass(frozen=True)
class Page:
    """first and tokens: where it lies in the text. score: None while it is filled."""

    first: int
    tokens: int
    bits: int
    score: float | None


@dataclass
class Record:
    """What the cache held when the answer was there.

    pieces[i] is the text of token i: of characters that several tokens spell, all is the last one's. lifts [layers,
    tokens]; far_lifts [tokens]: the layers' mean by queries at least a page later, NaN where there is none. recalled
    [tokens]: how often, of all layers, KV heads and steps of the answer, the token was read from its copy; None without
    recall.
    """

    pieces: list[str]
    ids: list[int]
    num_prompt_tokens: int
    exact_bits: int
    steps: list[Step] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)
    lifts: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    far_lifts: np.ndarray = field(default_factory=lambda: np.zeros(0))
    recalled: np.ndarray | None = None
    report: dict[str, Any] = field(default_factory=dict)  # KVCache.report
    finish_reason: str | None = None

    @property
    def bits(self) -> np.ndarray:
        """Of each token, [tokens] int."""
        return np.repeat([page.bits for page in self.pages], [page.tokens for page in self.pages])

    @property
    def scores(self) -> np.ndarray:
        """Of each token's page, [tokens] float, NaN in the page that is being filled."""
        values = [np.nan if page.score is None else page.score for page in self.pages]
        return np.repeat(values, [page.tokens for page in self.pages])


class Recorder:
    """The operations of an engine that computes one request, and what they attended to."""

    def __init__(self, llm: LLM, most_tokens: int) -> None:
        self._ops = llm._runner.ops
        self._llm = llm
        self._layers = {id(layer): i for i, layer in enumerate(llm._cache.layers)}
        self._plan: AttentionPlan | None = None  # of the running step, and what is derived from it
        self._asked: AttentionPlan
        self._after = np.zeros(0, dtype=int)  # tokens behind each query that is asked
        self._columns = torch.zeros(0, dtype=torch.long)  # of each token's logits
        self._copied = torch.zeros(0, dtype=torch.bool)  # tokens that can be recalled
        self._lifts = np.zeros((len(self._layers), most_tokens))
        self._seen = np.zeros(most_tokens)  # queries that see each token
        self._far_lifts, self._far_seen = np.zeros(most_tokens), np.zeros(most_tokens)
        self._reads = np.zeros(most_tokens)
        self._num_reads = 0  # heads and layers and queries that recalled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def decode_attention(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float, logits: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if logits is not None:  # the engine observes for itself
            return self._ops.decode_attention(q, cache, plan, scale, logits, lse)
        self._begin(plan, [0])
        return self._attend(q, cache, scale, lse)

    def prefill_attention(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float, lse: Tensor | None = None
    ) -> Tensor:
        self._begin(plan, sorted({len(q) * i // SAMPLES for i in range(SAMPLES)}))
        self._attend(q[torch.from_numpy(len(q) - 1 - self._after)], cache, scale, None)
        return self._ops.prefill_attention(q, cache, plan, scale, lse)

    def lifts(self, length: int) -> np.ndarray:
        """[layers, length]."""
        return self._lifts[:, :length] / np.maximum(self._seen[:length], 1)

    def far_lifts(self, length: int) -> np.ndarray:
        """[length]; see `Record`."""
        seen = np.where(self._far_seen[:length] > 0, self._far_seen[:length], np.nan)
        return self._far_lifts[:length] / seen / len(self._layers)

    def recalled(self, length: int) -> np.ndarray | None:
        """See `Record`."""
        return self._reads[:length] / self._num_reads if self._num_reads else None

    def _begin(self, plan: AttentionPlan, after: list[int]) -> None:
        """Ask the queries of this step that have so many tokens `after` them; each as a decode over what it sees."""
        if plan is self._plan:
            return  # another layer of the same step
        self._plan, self._after = plan, np.array(after)
        which = torch.zeros(len(after), dtype=torch.long, device=plan.exact_lens.device)
        behind = torch.tensor(after, dtype=torch.int32, device=which.device)
        self._asked = plan if after == [0] else replace(
            plan,
            exact_lens=plan.exact_lens[which] - behind,
            page_table=plan.page_table[which],
            num_decodes=len(after),
            pieces=tuple(_without_last(plan.pieces[0], count) for count in after),
            warm=tuple(_rows(warm, which) for warm in plan.warm),
        )  # fmt: skip
        cache, sequence = self._llm._cache, self._llm._scheduler.running[0].sequence
        size, exact_bits = cache.config.page_size, cache.config.exact_bits
        length = int(plan.exact_lens[0]) + size * sum(int(warm.counts[0]) for warm in plan.warm)
        pages = np.array(sequence.pages)[: cache.config.pages_for(length)]
        bits, copies = cache._frames.bits[pages], cache._frames.copies
        places, first = np.zeros(len(pages), dtype=int), 0
        formats = [(exact_bits, plan.page_table), *((warm.bits, warm.codes) for warm in plan.warm)]
        for kind, table in formats:
            mine = np.flatnonzero(bits == kind)
            places[mine] = first + np.arange(len(mine))
            first += table.shape[1]
        offsets = np.arange(size)
        self._columns = torch.from_numpy((places[:, None] * size + offsets).ravel()[:length]).to(which.device)
        copied = (bits < exact_bits) & (copies.slots[pages] >= 0) if copies else np.zeros(len(pages), dtype=bool)
        self._copied = torch.from_numpy(np.repeat(copied, size)[:length])

    def _attend(self, q: Tensor, cache: LayerCache, scale: float, lse: Tensor | None) -> Tensor:
        """Attention of the queries that are asked, [N, Hq, D], and what it gave each token."""
        plan, length = self._asked, len(self._columns)
        logits = torch.full((*q.shape[:2], plan.num_columns(cache.k.shape[2])), -torch.inf, device=q.device)
        lse = torch.empty(q.shape[:2], device=q.device) if lse is None else lse
        out: Tensor = self._ops.decode_attention(q, cache, plan, scale, logits, lse)
        shares = (logits - lse[..., None]).exp2_()[..., self._columns].cpu()  # [N, Hq, length]
        visible = length - self._after[:, None]
        layer, lifts = self._layers[id(cache)], shares.mean(1).numpy() * visible
        far = np.arange(length) < visible - cache.k.shape[2]
        self._lifts[layer, :length] += lifts.sum(0)
        self._far_lifts[:length] += (lifts * far).sum(0)
        if layer == 0:
            self._seen[:length] += (np.arange(length) < visible).sum(0)
            self._far_seen[:length] += far.sum(0)
        if plan.recall is not None and plan is self._plan:
            self._note_reads(shares[0].unflatten(0, (len(cache.k), -1)), plan.recall.counts[0])
        return out

    def _note_reads(self, shares: Tensor, count: int) -> None:
        """What `Ops.recall` reads of copies for the query that has these shares [Hkv, G, length]."""
        mass = shares.square().sum(1).masked_fill_(~self._copied, -1.0)
        chosen = mass.topk(min(count, int(self._copied.sum())), sorted=False).indices
        self._reads[: mass.shape[1]] += np.bincount(chosen.flatten().numpy(), minlength=mass.shape[1])
        self._num_reads += len(mass)


def record(llm: LLM, prompt: list[int], max_tokens: int, ends: frozenset[int]) -> Record:
    """Read the prompt and write up to max_tokens, greedily, or to one of the `ends`. The engine's operations are the
    recorder's for good.

    Raises RequestError, also for a prompt that does not fit with the answer, CapacityError, and FloatingPointError for
    logits that are not numbers.
    """
    if prompt and len(prompt) + max_tokens + 1 > llm.max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, the answer up to {max_tokens} and one to look at the cache; the "
            f"model's context has {llm.max_model_len}: shorten the prompt or lower --max-tokens"
        )
    # The request goes on when its answer is there, so that the cache can be looked at.
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens + 1, ignore_eos=True)
    request_id = llm.add_request(prompt, params)
    request, cache = llm._requests[request_id], llm._cache
    sequence = request.sequence
    recorder = Recorder(llm, request.most_tokens)
    llm._runner.ops = recorder
    result = Record([], [], len(prompt), cache.config.exact_bits)
    ended = False
    while not ended and len(request.tokens) < len(prompt) + max_tokens:
        reads, moves, is_prompt = Counter(sequence.reads), sequence.moves, len(request.tokens) == len(prompt)
        llm.step()
        if request.finish_reason is not None:
            raise FloatingPointError("the model's logits are not finite numbers")
        result.steps.append(_step(cache, sequence, reads, moves, is_prompt))
        ended = len(request.tokens) > len(prompt) and request.tokens[-1] in ends
    result.finish_reason = "stop" if ended else "length"
    result.report, result.pages = cache.report(sequence), _pages(cache, sequence)
    result.ids, length = request.tokens[: sequence.length], sequence.length
    llm.abort(request_id)
    result.lifts, result.far_lifts = recorder.lifts(length), recorder.far_lifts(length)
    result.recalled = recorder.recalled(length)
    result.pieces = pieces(llm, result.ids)
    return result


def _step(cache: KVCache, sequence: CachedSequence, reads: Counter[str], moves: int, is_prompt: bool) -> Step:
    """reads, moves: of the sequence before the step."""
    report = cache.report(sequence)
    exact, recalled = (sequence.reads[key] - reads[key] for key in ("exact", "recalled"))
    return Step(
        tokens=sequence.length,
        is_prompt=is_prompt,
        pages=report["pages_by_bits"],
        resident_bytes=report["resident_bytes"],
        full_bytes=report["full_bytes"],
        cold_bytes=report["cold_bytes"],
        moves=sequence.moves - moves,
        cold_hit_rate=recalled / exact if exact else None,
    )


def _pages(cache: KVCache, sequence: CachedSequence) -> list[Page]:
    size, length = cache.config.page_size, sequence.length
    pages = np.array(sequence.pages)[: cache.config.pages_for(length)]
    scores = [*cache._replacement.scores(sequence).tolist(), None]
    bits = cache._frames.bits[pages].tolist()
    return [Page(i * size, min(size, length - i * size), kind, scores[i]) for i, kind in enumerate(bits)]


def pieces(llm: LLM, ids: list[int]) -> list[str]:
    """The text that each token adds; joined they are the text of all."""
    assert llm.tokenizer is not None
    detokenizer = Detokenizer(llm.tokenizer, [])
    found = [detokenizer.push(token) for token in ids]
    found[-1] += detokenizer.flush()
    return found
