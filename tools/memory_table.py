"""The table of the README: what Llama-2 takes by weights, context and cache, how fast that may be, and what fits."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from engine.config import EngineConfig
from tools import memory_plan
from tools.bench import print_table
from tools.profile_kernels import GPUS

CONTEXTS = (4096, 16384, 20480, 32768)
WEIGHTS = (None, "int8", "int4")
BUDGETS = {"exact": None, "1/3": 0.333, "1/4": 0.25, "1/6": 0.167}
DEVICES = {"8 GB": 8e9, "12 GB": 12e9, "16 GB": 16e9, "24 GB": 24e9, "48 GB": 48e9, "80 GB": 80e9}
LINKS = {"A100": "pcie4", "H100": "pcie5"}  # to the host
_SPEED_AT = 16384  # tokens
# model, context, weights, cache, chunk: GB that it is to fit in
FLOORS = (
    ("llama2-7b", 16384, "int8", "1/3", 512, 9.8),
    ("llama2-7b", 16384, "int8", "1/3", 64, 9.8),
    ("llama2-7b", 16384, "int4", "1/6", 512, 6.5),
    ("llama2-7b", 32768, "int4", "1/6", 512, 8.0),
    ("llama2-13b", 16384, "int4", "1/3", 512, 13.0),
)


class Planner:
    """Plans by what they are of, each made once; without copies in the host's memory unless recall is asked for."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._plans: dict[tuple[Any, ...], dict[str, Any]] = {}

    def plan(
        self, model: str, context: int, weights: str | None, kv: str, chunk: int, recall: float = 0.0
    ) -> dict[str, Any]:
        key = (model, context, weights, kv, chunk, recall)
        if key not in self._plans:
            shape, settings = memory_plan.shape(model), self.settings(model, context, kv, chunk, recall)
            self._plans[key] = memory_plan.plan(shape, settings, weights, group=self._group)
        return self._plans[key]

    @staticmethod
    def settings(model: str, context: int, kv: str, chunk: int, recall: float = 0.0) -> EngineConfig:
        return EngineConfig(
            model=model, dtype="float16", max_model_len=context, max_num_seqs=1, max_num_batched_tokens=chunk,
            kv_budget=BUDGETS[kv], recall=recall, cold_format="exact" if recall else "none",
        )  # fmt: skip

    def longest(self, model: str, weights: str | None, kv: str, chunk: int, memory: float) -> int:
        """Tokens of a context, of which so many bytes hold all."""
        shape = memory_plan.shape(model)
        held = memory_plan.weights_bytes(shape, 2, weights, self._group)

        def needed(length: int) -> int:
            return held + memory_plan.beside_weights(shape, self.settings(model, length, kv, chunk))

        return bisect.bisect_right(range(1, 1 << 22), memory, key=needed)


def tokens_per_second(model: str, plan: dict[str, Any], weights: str | None, group: int, gpu: str) -> float:
    """A roofline model of decoding: weights and cache are read once a token at the device's bandwidth, with recall K's
    codes once more, and its rows over the link after that. Nothing else takes time."""
    bandwidth = next(figures[gpu][0] for figures in GPUS.values() if gpu in figures)
    shape = memory_plan.shape(model)
    # Of the embedding a row is read, not the table.
    table = memory_plan.weights_bytes(replace(shape, num_layers=0), 2, weights, group) / 2
    read = plan["weights_bytes"] - table + plan["kv_bytes"]["hot"] + plan["kv_bytes"]["warm"]
    link = plan["read_ms_per_token"][LINKS[gpu]] / 1e3
    read += plan["kv_bytes"]["warm"] / 2 if link else 0
    return float(1 / (read / bandwidth + link))


def memory_rows(planner: Planner, chunk: int) -> Iterator[dict[str, Any]]:
    for model in ("llama2-7b", "llama2-13b"):
        for context in CONTEXTS:
            for weights in WEIGHTS:
                totals = {
                    f"KV {kv}": f"{planner.plan(model, context, weights, kv, chunk)['total_bytes'] / 1e9:.2f}"
                    for kv in BUDGETS
                }
                copies = planner.plan(model, context, weights, "1/3", chunk, memory_plan.RECALL)
                yield {
                    "GB": model, "tokens": context, "weights": weights or "16 bits", **totals,
                    "KV 1/3, recall": f"{copies['total_bytes'] / 1e9:.2f}",
                    "host": f"{copies['host_bytes'] / 1e9:.2f}",
                }  # fmt: skip


def speed_rows(planner: Planner, chunk: int, group: int) -> Iterator[dict[str, Any]]:
    for model in ("llama2-7b", "llama2-13b"):
        for weights in WEIGHTS:
            row: dict[str, Any] = {"tok/s, modelled": model, "weights": weights or "16 bits"}
            for gpu, link in LINKS.items():
                for kv, recall in (("exact", 0.0), ("1/3", 0.0), ("1/4", memory_plan.RECALL)):
                    plan = planner.plan(model, _SPEED_AT, weights, kv, chunk, recall)
                    name = f"{gpu}, KV {kv}" + (f", recall over {link}" if recall else "")
                    row[name] = round(tokens_per_second(model, plan, weights, group, gpu))
            yield row


def context_rows(planner: Planner, chunk: int) -> Iterator[dict[str, Any]]:
    for model in ("llama2-7b", "llama2-13b"):
        for weights in WEIGHTS:
            for kv in ("exact", "1/3", "1/6"):
                longest = {
                    device: planner.longest(model, weights, kv, chunk, memory) for device, memory in DEVICES.items()
                }
                yield {"longest context": model, "weights": weights or "16 bits", "KV": kv} | {
                    device: length or "-" for device, length in longest.items()
                }


def floor_rows(planner: Planner) -> Iterator[dict[str, Any]]:
    for model, context, weights, kv, chunk, most in FLOORS:
        total = planner.plan(model, context, weights, kv, chunk)["total_bytes"] / 1e9
        yield {
            "to fit": model, "tokens": context, "weights": weights, "KV": kv, "chunk": chunk, "GB": f"{total:.2f}",
            "at most": most, "": "holds" if total <= most else f"{total - most:.2f} too much",
        }  # fmt: skip


def show(chunk: int, group: int) -> None:
    planner = Planner(group)
    budgets = ", ".join(f"{kv} is --kv-budget {budget}" for kv, budget in BUDGETS.items() if budget)
    print("Planned, not measured: GB (1e9 bytes) of the device for one sequence, all counted, with a chunk of")
    print(f"{chunk} tokens. {budgets}; int4 in groups of {group}. Recall: with copies of")
    print("what is compressed in the host's memory, whose GB stand under host.\n")
    print_table(list(memory_rows(planner, chunk)))
    print(
        f"\nA model, not a measurement: weights and cache once a token at the vendor's bandwidth, {_SPEED_AT} tokens;"
    )
    print(f"recall of {memory_plan.RECALL:.0%} of the tokens waits for its link.\n")
    print_table(list(speed_rows(planner, chunk, group)))
    print(
        "\nTokens of the longest context that a device holds; more than the 4,096 of the model need --rope-scaling.\n"
    )
    print_table(list(context_rows(planner, chunk)))
    print("\nWhat is to fit.\n")
    print_table(list(floor_rows(planner)))
