"""A whole model of real shape end to end, with random weights: tokens a second of prompts and of decoding."""

from __future__ import annotations

import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine import LLM, CapacityError, ConfigError, SamplingParams
from engine.config import EngineConfig
from tools import memory_plan
from tools.random_model import random_llm


@dataclass(frozen=True)
class Case:
    """Settings of the engine under one name. Of cases with the same weights the first one's are used by the others."""

    weights: str  # exact, as the dtype says; int8 | int4
    kv: str
    settings: dict[str, Any] = field(default_factory=dict)


_THIRD = {"kv_budget": 0.33, "cold_format": "none"}
_QUARTER = {"kv_budget": 0.25, "recall": 0.05, "cold_format": "exact"}
_GRAPHS = {"cuda_graphs": "on"}  # off where nothing is said of them
CASES = (
    Case("exact", "exact"),
    Case("exact", "0.33", _THIRD),
    Case("exact", "0.25, recall 0.05", _QUARTER),
    Case("exact", "exact, CUDA graphs", _GRAPHS),
    Case("exact", "0.33, CUDA graphs", {**_THIRD, **_GRAPHS}),
    Case("exact", "0.25, recall 0.05, CUDA graphs", {**_QUARTER, **_GRAPHS}),
    Case("exact", "0.25, recall 0.05, overlay, CUDA graphs", {**_QUARTER, **_GRAPHS, "overlay_size": 1}),
    Case("int8", "exact"),
    Case("int8", "0.33", _THIRD),
    Case("int4", "exact"),
    Case("int4", "0.33", _THIRD),
    Case("int4", "exact, CUDA graphs", _GRAPHS),
    Case("int4", "0.33, CUDA graphs", {**_THIRD, **_GRAPHS}),
)


@dataclass(frozen=True)
class Scale:
    """How large all is: on a GPU as it is used, on a CPU just large enough to run every line."""

    model: str
    dtype: str
    prefills: tuple[int, ...]
    decodes: tuple[int, ...]
    tokens: int  # that are generated at each length


REAL = Scale("llama2-7b", "bfloat16", (2048, 16384), (2048, 16384, 32768), 32)


class Budget:
    """Seconds that a run may take."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._end = clock, clock() + seconds

    @property
    def left(self) -> float:
        return self._end - self._clock()


OUT_OF_TIME = "skipped: the time is over"


def engine_rows(
    scale: Scale, cases: Sequence[Case], budget: Budget, bandwidth: float | None
) -> Iterator[dict[str, Any]]:
    """A row for each case, prompt length and context. bandwidth: bytes a second of the device, if known.

    of_peak: the time that reading weights and cache once takes, over the time of a token that is generated.
    """
    engines = _Engines(scale)
    for case in cases:
        yield from _case_rows(engines, case, budget, bandwidth)


class _Engines:
    """The engine of one case at a time."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self._llm: LLM | None = None
        self._weights = ""

    def of(self, case: Case) -> LLM:
        """Raises ConfigError, CapacityError."""
        if self._llm is not None and self._weights == case.weights:
            self._llm = self._llm.twin(**_settings(self.scale, case, quantized=False))
        else:
            self._llm = None  # before the next one is made
            gc.collect()
            self._llm = random_llm(self.scale.model, dtype=self.scale.dtype, **_settings(self.scale, case))
            self._weights = case.weights
        return self._llm


def _case_rows(engines: _Engines, case: Case, budget: Budget, bandwidth: float | None) -> Iterator[dict[str, Any]]:
    scale = engines.scale
    if budget.left <= 0:
        yield _row(case, "prefill and decode", None, None, note=OUT_OF_TIME)
        return
    try:
        llm = engines.of(case)
        for _ in _rows(llm, scale, case, max(scale.prefills), budget, bandwidth):
            pass  # the first time compiles, for each set of formats that pages come to have
        for length in sorted({*scale.prefills, *scale.decodes}):
            yield from _rows(llm, scale, case, length, budget, bandwidth)
    except (ConfigError, CapacityError, torch.OutOfMemoryError) as why:
        yield _row(case, "prefill and decode", None, None, note=f"skipped: {str(why).splitlines()[0]}")


def _settings(scale: Scale, case: Case, quantized: bool = True) -> dict[str, Any]:
    length = max(*scale.prefills, *scale.decodes) + scale.tokens + 1
    settings: dict[str, Any] = {"max_model_len": length, "max_num_seqs": 1, "enable_prefix_caching": False}
    settings |= dict.fromkeys(("kv_budget", "recall", "overlay_size"))  # those of the case before
    settings |= {"cold_format": "none", "cuda_graphs": "off", **case.settings}
    if settings["cold_format"] != "none":
        # Pinned memory is taken as a whole: as much as a text of this length fills.
        config = EngineConfig(model=scale.model, dtype=scale.dtype, **settings)
        copies = memory_plan.cache_config(memory_plan.shape(scale.model), config)
        settings["host_cache_size"] = copies.copy_bytes * copies.pages_for(length)
        if settings["overlay_size"]:  # room for two sets
            settings["overlay_size"] = copies.token_bytes * length // 10
    if quantized and case.weights in ("int8", "int4"):
        settings["quantization"] = case.weights
    return settings


def _rows(
    llm: LLM, scale: Scale, case: Case, length: int, budget: Budget, bandwidth: float | None
) -> Iterator[dict[str, Any]]:
    if budget.left <= 0:
        yield _row(case, "prefill and decode", length, None, note=OUT_OF_TIME)
        return
    prompt = random.Random(length).choices(range(llm.vocab_size), k=length)
    params = SamplingParams(max_tokens=scale.tokens + 1, temperature=0, ignore_eos=True)
    request = llm.add_request(prompt, params)
    try:
        begin = time.perf_counter()
        while not llm.step():
            if budget.left <= 0:
                yield _row(case, "prefill", length, None, note=OUT_OF_TIME)
                return
        seconds = time.perf_counter() - begin
        if length in scale.prefills:
            yield _row(case, "prefill", length, length / seconds)
        if length in scale.decodes:
            times = []
            for _ in range(scale.tokens):
                begin = time.perf_counter()
                (output,) = llm.step()
                times.append(time.perf_counter() - begin)
            middle = statistics.median(times)
            read = llm.stats()["weights_bytes"] + output.cache_report["resident_bytes"]
            of_peak = None if bandwidth is None else round(read / bandwidth / middle, 3)
            yield _row(case, "decode", length, 1 / middle, of_peak)
    finally:
        llm.abort(request)


def _row(
    case: Case, what: str, length: int | None, speed: float | None, of_peak: float | None = None, note: str = ""
) -> dict[str, Any]:
    return {
        "what": what, "weights": case.weights, "kv": case.kv, "context": length,
        "tok_s": None if speed is None else round(speed, 1), "of_peak": of_peak, "note": note,
    }  # fmt: skip


def peer_rows(scale: Scale, budget: Budget, device: str, python: str = sys.executable) -> list[dict[str, Any]]:
    """The same of Transformers with its DynamicCache, in a process of its own: it has another package `kernels`."""
    case = Case("exact", "Transformers")

    def skipped(note: str) -> list[dict[str, Any]]:
        return [_row(case, "prefill and decode", None, None, note=f"skipped: {note}")]

    if budget.left <= 0:
        return [_row(case, "prefill and decode", None, None, note=OUT_OF_TIME)]
    config = memory_plan.shape(scale.model)
    asked = {
        "config": {
            "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
            "max_position_embeddings": max(*scale.prefills, *scale.decodes) + scale.tokens + 1,
        },
        "dtype": scale.dtype, "device": device, "prefills": scale.prefills, "decodes": scale.decodes,
        "tokens": scale.tokens,
    }  # fmt: skip
    command = [python, str(Path(__file__).with_name("gpu_peer.py").resolve()), json.dumps(asked)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tempfile.gettempdir(), timeout=max(budget.left, 1)
        )
        lines, complaint = done.stdout, done.stderr.strip().splitlines()[-1:]
    except subprocess.TimeoutExpired as late:
        lines, complaint = (late.stdout or b"").decode(), ["the time is over"]
    rows = []
    for line in lines.splitlines():
        row = json.loads(line)
        rows.append(_row(case, row["what"], row["context"], row["tok_s"], note=row["version"]))
    wanted = len(scale.prefills) + len(scale.decodes)
    return rows if len(rows) == wanted else rows + skipped(*complaint or ["it said nothing"])
