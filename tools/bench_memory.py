"""Memory that a model of a shape takes, planned and measured: random weights, then a prompt and some tokens more.

On a GPU measured is the allocator's peak. On a CPU it is what the engine holds (weights, rotations, pool) and the most
that one of its steps allocates, tensor by tensor; beside it stands the process's peak over what it took before.
"""

from __future__ import annotations

import random
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import LLM, CapacityError, ConfigError, SamplingParams
from engine.config import EngineConfig
from engine.metrics import free_memory_bytes, peak_rss_bytes
from engine.progress import Progress
from memory.cache import KVCache
from memory.prefix import CachedSequence
from models.llama.config import DEFAULT_GROUP
from tools import memory_plan
from tools.random_model import random_llm


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that were made since it began and are alive, as an allocator would count them; what an
    operation allocates and frees inside itself is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and not tensor.is_mkldnn and tensor.device.type != "meta":
                self._count(tensor.untyped_storage(), args, kwargs)
        return out

    def _count(self, storage: torch.UntypedStorage, args: Any, kwargs: Any) -> None:
        if storage in self._seen:
            return
        given = (x for x in [*args, *(kwargs or {}).values()] if isinstance(x, torch.Tensor) and not x.is_mkldnn)
        if any(x.untyped_storage().data_ptr() == storage.data_ptr() for x in given):
            return  # a view, or changed in place, of one that was there before
        self._seen.add(storage)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, nbytes: int) -> None:
        self.now -= nbytes


def measure(model: str, context: int, decode: int, direct_state: bool, seed: int, **settings: Any) -> dict[str, Any]:
    """A sequence of `context` tokens, the last `decode` of them generated one by one.

    direct_state: the cache is brought to the state before the last chunk without computing it, which of a 7B takes the
    better part of an hour on a CPU; that chunk and the tokens after it are computed. settings: of EngineConfig.
    Raises ConfigError, and CapacityError where it does not fit.
    """
    if not 0 < decode < context:
        raise ConfigError(f"decode must be from 1 to {context - 1}, one less than the context, got {decode}")
    config = EngineConfig(model=model, max_model_len=context, max_num_seqs=1, **settings)
    gpu = torch.cuda.is_available()
    shape, quantization = memory_plan.shape(model), settings.get("quantization")
    group = settings.get("quantization_group") or DEFAULT_GROUP
    # The plan of Triton's operations is that of a GPU, also where the interpreter runs them.
    free = free_memory_bytes(torch.device("cuda" if gpu else "cpu"))
    planned = memory_plan.plan(shape, config, quantization, free, group, not gpu and config.backend != "triton")
    needed = planned["total_bytes"] + (0 if gpu else planned["host_bytes"])
    if free is not None and needed > free:
        raise CapacityError(
            f"{model} with {context} tokens is planned to take {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free: "
            f"{planned['max_context']} tokens fit; or use a smaller --kv-budget, --quantization, or a smaller model"
        )
    before = _begin(gpu)
    begun = time.perf_counter()
    fixed = {"enable_prefix_caching": False, "max_model_len": context, "max_num_seqs": 1, "cuda_graphs": "off"}
    llm = random_llm(model, seed=seed, **fixed, **settings)  # what graphs hold is not planned
    built = time.perf_counter()
    with LiveBytes() as live:
        report = _run(llm, context, decode, direct_state, seed)
    stats = llm.stats()
    held = {
        "weights_bytes": stats["weights_bytes"],
        "rotations_bytes": llm._model.rope.nbytes,
        "pool_bytes": stats["kv_capacity_bytes"],
        "step_bytes": live.peak,
    }
    measured = torch.cuda.max_memory_allocated() - before if gpu else sum(held.values())
    rss = None if gpu else peak_rss_bytes() - before
    return {
        "model": model, "context": context, "decode": decode, "direct_state": direct_state,
        "device": torch.cuda.get_device_name() if gpu else "cpu", **settings, **planned,
        "measured_peak_bytes": measured,
        "measured_of_planned": round(measured / planned["total_bytes"], 3),
        "held_bytes": held,
        "rss_peak_bytes": rss,
        "rss_of_planned": None if rss is None else round(rss / (planned["total_bytes"] + planned["host_bytes"]), 3),
        "cache_report": report,
        "seconds": {"build": round(built - begun, 1), "run": round(time.perf_counter() - built, 1)},
        "notes": list(_notes(direct_state, gpu, config.recall)),
    }  # fmt: skip


def _notes(direct_state: bool, gpu: bool, recall: float | None) -> Iterator[str]:
    if direct_state:
        yield "the cache was filled, not computed, up to the last chunk"
    if not gpu:
        yield "measured: what the engine holds, and tensor by tensor what a step allocates; rss: of the process"
    if recall and not gpu:
        yield "torch's recall holds more than is planned"


def _begin(gpu: bool) -> int:
    """Forget the peak so far -> bytes in use. What libraries take on their first use is in them."""
    with LiveBytes():
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is resident now
    except OSError:
        print("this system does not forget a peak: that of starting up counts as the beginning", file=sys.stderr)
    return peak_rss_bytes()


def _run(llm: LLM, context: int, decode: int, direct_state: bool, seed: int) -> dict[str, Any]:
    """-> what the sequence's cache holds in the end."""
    prompt = random.Random(seed).choices(range(llm.vocab_size), k=context - decode)
    params = SamplingParams(max_tokens=decode, temperature=0, ignore_eos=True)
    llm.add_request(prompt, params)
    (request,) = llm._scheduler.waiting
    chunk = llm.config.max_num_batched_tokens
    if direct_state:
        _fill(llm._cache, request.sequence, max(0, len(prompt) - chunk), chunk)
    with Progress(total=context, desc="Computing", unit="token", initial=request.sequence.length, shown=True) as bar:
        while llm.has_unfinished_requests():
            llm.step()
            bar.update(request.sequence.length - bar.n if request.finish_reason is None else 0)
    return request.cache_report


def _fill(cache: KVCache, sequence: CachedSequence, length: int, chunk: int) -> None:
    """Bring the sequence to that length, as chunks would, with random keys and values."""
    values = torch.randn(cache._frames.page_shape).to(cache.layers[0].k)
    for end in [*range(chunk, length, chunk), *[length] * (length > 0)]:
        cache.reserve(sequence, end)
        for page in sequence.pages[sequence.length // cache.config.page_size :]:
            cache._frames.write(page, values, False)
        cache.commit(sequence, end - sequence.length)
        cache.settle([sequence])
