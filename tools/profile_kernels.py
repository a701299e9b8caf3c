"""What the Triton kernels cost, without a GPU: compiled for each target at real shapes, then read as machine code.

    python -m tools.profile_kernels [--targets sm_80,sm_90] [--json] [--peers] [--baseline tools/kernel_baseline.json]

A kernel is compiled exactly as its wrapper would launch it: the wrappers run on meta tensors, and their launches are
recorded instead of run. With --baseline, exit code 1 where anything is worse (tools.kernel_report has the limits).

    spills                  spill instructions, in the whole kernel
    loop_spills             of them, those in the loop that is counted
    load_bits               the width that moves most bytes from global memory (attention: in the inner loop)
    instructions_per_token  a static count of warp instructions. Attention: of the inner loop over whole pages (where
                            bits are named: over compressed ones), per cached token and KV head; for prefill per 128
                            rows too, a row being one query of one head. Linear maps: of the loop over inputs, per
                            1,024 weights and 128 rows. The others: of the whole kernel, per token
    predicted_us            a roofline model, not a measurement: the largest of bytes / bandwidth, bytes from the host /
                            its link, instructions / issue slots, flops / peak. It ranks variants; latency, occupancy
                            and launch cost are not in it
    traffic_ratio, l2_ratio bytes that the programs ask for, and bytes of distinct 32-byte sectors, over the bytes that
                            must move at least. Counted in Triton's interpreter, on a smaller problem; of an operation
                            of several kernels in one row, for all of them
    measured_us, achieved_gb_s, of_peak
                            where there is a GPU, in the rows of its target: the median time, the least bytes over it,
                            and the time that bandwidth and tensor cores need at least over it
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from engine.cli import run
from engine.progress import Progress
from models.errors import ConfigError
from tools import kernel_report
from tools.kernel_report import print_table

TARGETS = "sm_80,sm_86,sm_87,sm_89,sm_90,sm_100,gfx942"
GPUS = {  # target -> name: (bytes/s, multiprocessors, clock in Hz, 16-bit tensor flops/s); the vendors' figures
    "sm_80": {"A100": (2039e9, 108, 1.41e9, 312e12)},
    "sm_87": {"Orin": (204.8e9, 16, 1.3e9, 42.5e12)},  # AGX, 64 GB
    "sm_89": {"RTX 4090": (1008e9, 128, 2.52e9, 165e12)},
    "sm_90": {"H100": (3350e9, 132, 1.755e9, 989e12), "H200": (4800e9, 132, 1.755e9, 989e12)},
}
LINKS = {"A100": 25e9, "Orin": 204.8e9, "RTX 4090": 25e9, "H100": 50e9, "H200": 50e9}  # bytes/s from the host
ISSUE_PER_CYCLE = 4  # warp instructions that a multiprocessor starts in a cycle
MULTIPROCESSORS = 108  # that the wrappers are told of: they decide the number of splits
PATIENCE = 240.0  # seconds for one kernel and target, which take 1 to 20
PAGE = SHORT = 64  # tokens of a page; rows (queries * group) of a short chunk


class Cost(NamedTuple):
    """The least a problem takes; `units` is how often its `instructions_per_token` is spent."""

    bytes: float
    flops: float
    units: float
    link: float = 0.0  # bytes that come from the host's memory


@dataclass(frozen=True)
class Model:
    """A shape, and the cost of the operations on n tokens: of the step, or, for attention, in the cache."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    dtype: str

    def chunk(self, n: int, short: bool, bits: int) -> int:
        """Queries of a prefill."""
        return (SHORT if short else 4 * SHORT) * self.kv_heads // self.heads if short or bits else n

    def decode(self, n: int, emit: bool = False, bits: int = 0) -> Cost:
        cost = self._attention(n, 1, n)
        logits = 4 * (n + PAGE * bool(bits)) * self.heads * emit
        return Cost(cost.bytes + logits - self._saved(n, bits, PAGE), cost.flops, n * self.kv_heads)

    def prefill(self, n: int, short: bool = False, bits: int = 0) -> Cost:
        queries = self.chunk(n, short, bits)
        cost = self._attention(n, queries, n / 2 if queries == n else n)
        return cost._replace(bytes=cost.bytes - self._saved(n, bits, queries))

    def _saved(self, n: int, bits: int, exact: int) -> float:
        """Bytes that n tokens of b bits and `exact` tokens take less than n exact ones."""
        compressed = 2 * self.head_dim * bits / 8 + 3 + self.head_dim / PAGE  # codes, scales and zeros, means
        return self.kv_heads * (n * (4 * self.head_dim - compressed) - exact * 4 * self.head_dim) if bits else 0

    def compress(self, n: int, bits: int) -> Cost:
        """Of n tokens of K or V, or back; their records are left out."""
        return Cost(n * self.kv_heads * self.head_dim * (2 + bits / 8), 0, n)

    def merge(self, n: int) -> Cost:
        """Of the slices of decode: float32 in, 16 bits out. Its loop is short, and not counted."""
        from kernels.attention import count_slices

        (slices,) = count_slices(self.kv_heads, [n], PAGE, MULTIPROCESSORS)
        return Cost(self.heads * (slices * 4 * (self.head_dim + 1) + 2 * self.head_dim), 0, 0)

    def recall_score(self, n: int, bits: int, queries: int) -> Cost:
        """Of n compressed tokens, for blocks of 16 queries: K once a block, a float32 a token and block."""
        blocks, rows = self._blocks(queries)
        floor = n * (self.head_dim * bits / 8 + 1 + self.head_dim / PAGE)
        q = 2 * self.head_dim * self.heads * queries
        flops = 2 * self.head_dim * blocks * rows * self.kv_heads * n
        return Cost(blocks * self.kv_heads * (floor + 4 * n) + q, flops, blocks * self.kv_heads * n * rows / 128)

    def recall_swap(self, n: int, bits: int, queries: int) -> Cost:
        """Of a twentieth of n tokens, by a block: their codes, exact K and V from the host, q, and out twice; the
        number of each takes 8 bytes. The loop that is counted takes away; the other one adds."""
        blocks, rows = self._blocks(queries)
        tokens = blocks * self.kv_heads * (n // 20)
        codes = 2 * self.head_dim * bits / 8 + 3 + self.head_dim / PAGE
        bytes_ = tokens * (codes + 8) + 8 * self.head_dim * self.heads * queries
        return Cost(bytes_, 8 * self.head_dim * rows * tokens, tokens * rows / 128, tokens * 4 * self.head_dim)

    def recall(self, n: int, bits: int, queries: int) -> Cost:
        parts = self.recall_score(n, bits, queries), self.recall_swap(n, bits, queries)
        return Cost(*map(sum, zip(*parts, strict=True)))

    def _blocks(self, queries: int) -> tuple[int, int]:
        """Blocks of queries, and the rows of each as tensor cores take them."""
        rows = min(16, queries) * self.heads // self.kv_heads
        return -(-queries // 16), max(16, 1 << (rows - 1).bit_length())

    def linear(self, rows: int, bits: int) -> Cost:
        """By the weight of gate and up; tiles of 16 rows, of chunks of 128."""
        outputs, inputs = 2 * self.intermediate, self.hidden
        scales = outputs * (2 if bits == 8 else 4 * inputs / 128)
        moved = outputs * inputs * bits / 8 + scales + 2 * rows * (inputs + outputs)
        tile = 128 if rows > 64 else 16
        return Cost(moved, 2 * rows * outputs * inputs, outputs * inputs / 1024 * -(-rows // tile) * tile / 128)

    def _attention(self, n: int, queries: int, seen: float) -> Cost:
        """Of `queries` of a sequence, each seeing `seen` of its n tokens."""
        cache, q_and_out = 4 * n * self.kv_heads * self.head_dim, 4 * queries * self.heads * self.head_dim
        rows = queries * self.heads
        return Cost(cache + q_and_out, 4 * self.head_dim * rows * seen, seen * rows / 128)


class Problem:
    """Runs the operations on n tokens: on the meta device to compile, on zeros on the CPU to count traffic."""

    def __init__(self, model: Model, device: str) -> None:
        import torch

        import kernels

        self.torch, self.device, self.model = torch, device, model
        self.ops: Any = kernels.load("triton")
        # The interpreter is wrong about bfloat16, and traffic depends on the size of a type only.
        self.dtype = torch.float16 if device == "cpu" else getattr(torch, model.dtype)

    def rms_norm(self, n: int) -> None:
        self.ops.rms_norm(self.zeros(n, self.model.hidden), self.zeros(self.model.hidden), 1e-5)

    def add_rms_norm(self, n: int) -> None:
        x, residual = self.zeros(2, n, self.model.hidden)
        self.ops.add_rms_norm(x, residual, self.zeros(self.model.hidden), 1e-5)

    def silu_mul(self, n: int) -> None:
        self.ops.silu_mul(*self.zeros(n, 2 * self.model.intermediate).chunk(2, 1))

    def importance(self, n: int) -> None:
        from kernels.ops import NUM_FEATURES, SCORE_HIDDEN

        shapes = (n, NUM_FEATURES), (n,), (4 + SCORE_HIDDEN * (NUM_FEATURES + 4) + 1,)
        self.ops.score(*(self.zeros(*shape, dtype="float32") for shape in shapes))

    def rope_store(self, n: int) -> None:
        cos_sin = self.zeros(n, self.model.head_dim, dtype="float32")
        slots = self.torch.arange(n, device=self.device)
        self.ops.rope_store(*self.qkv(n), cos_sin, slots, *self.caches(n))

    def decode(self, n: int, emit: bool = False, bits: int = 0) -> None:
        """bits: of all tokens but a page."""
        plan = self.plan(PAGE if bits else n, 1, True, n if bits else 0, bits)
        logits = self.zeros(1, self.model.heads, plan.num_columns(PAGE), dtype="float32") if emit else None
        cache, scale = self.layer_cache(PAGE if bits else n, n, bits), self.model.head_dim**-0.5
        self.ops.decode_attention(self.qkv(1)[0], cache, plan, scale, logits)

    def prefill(self, n: int, short: bool = False, bits: int = 0) -> None:
        """A whole prompt; or the last few queries of one, or some more behind compressed tokens."""
        queries = self.model.chunk(n, short, bits)
        scale = self.model.head_dim**-0.5
        exact = queries if bits else n
        plan = self.plan(exact, queries, False, n if bits else 0, bits)
        self.ops.prefill_attention(self.qkv(queries)[0], self.layer_cache(exact, n, bits), plan, scale)

    def recall(self, n: int, bits: int, queries: int, overlay: bool = False) -> None:
        """Of a twentieth of n compressed tokens, which an empty overlay has room for."""
        from kernels.ops import Overlay, Recall

        m, many = self.model, n // 20
        plan = self.plan(queries, queries, queries == 1, n, bits)
        warm = replace(plan.warm[0], copies=self.zeros(1, n // PAGE, dtype="int32"))
        blocks = [(0, first, min(16, queries), many) for first in range(0, queries, 16)]
        read = Recall(16, (many,), self.torch.tensor(blocks, dtype=self.torch.int32, device=self.device))
        copies = self.zeros(n // PAGE, m.kv_heads, PAGE, 2, m.head_dim)
        copies = copies.cpu().pin_memory() if self.device == "cuda" else copies
        cache = self.layer_cache(queries, n, bits)._replace(copies=copies)
        if overlay:
            cache = cache._replace(overlay=Overlay.of(self.zeros(m.kv_heads, many, 2, m.head_dim)))
        q, lse = self.qkv(queries)[0], self.zeros(queries, m.heads, dtype="float32")
        plan, scale = replace(plan, warm=(warm,), recall=read), m.head_dim**-0.5
        self.ops.recall(q, self.torch.zeros_like(q), lse, cache, plan, scale)

    def linear(self, rows: int, bits: int) -> None:
        """By the weight of gate and up."""
        from kernels.ops import QuantizedWeight

        outputs, inputs = 2 * self.model.intermediate, self.model.hidden
        codes = self.zeros(outputs, inputs * bits // 8, dtype="int8" if bits == 8 else "uint8")
        scales, zeros = self.zeros(2, outputs, 1 if bits == 8 else inputs // 128, dtype="bfloat16")
        weight = QuantizedWeight(codes, scales, None if bits == 8 else zeros, inputs if bits == 8 else 128)
        self.ops.linear(self.zeros(rows, inputs), weight)

    def compress(self, n: int, bits: int, is_key: bool) -> None:
        pages = self.zeros(n // PAGE * self.model.kv_heads, PAGE, self.model.head_dim)
        self.ops.compress(pages, bits, is_key)

    def decompress(self, n: int, bits: int, is_key: bool) -> None:
        pages, head_dim = n // PAGE * self.model.kv_heads, self.model.head_dim
        codes = self.zeros(pages, bits * PAGE * head_dim // 8, dtype="uint8")
        records = self.zeros(pages, self.record_bytes, dtype="uint8")
        self.ops.decompress(codes, records, bits, is_key, self.zeros(PAGE, head_dim))

    def zeros(self, *shape: int, dtype: str | None = None) -> Any:
        kind = getattr(self.torch, dtype) if dtype else self.dtype
        return self.torch.zeros(shape, dtype=kind, device=self.device)

    def qkv(self, tokens: int) -> Any:
        m = self.model
        fused = self.zeros(tokens, m.heads + 2 * m.kv_heads, m.head_dim)
        return fused.split([m.heads, m.kv_heads, m.kv_heads], 1)

    def caches(self, tokens: int) -> Any:
        arena = self.zeros(-(-tokens // PAGE), 2, self.model.kv_heads, PAGE, self.model.head_dim)
        return arena[:, 0].transpose(0, 1), arena[:, 1].transpose(0, 1)

    def layer_cache(self, exact: int, compressed: int, bits: int) -> Any:
        from kernels.ops import LayerCache

        unit_bytes = PAGE * self.model.head_dim // 8
        units = compressed // PAGE * (bits + 1 + self.record_bytes // unit_bytes)
        planes = self.zeros(2, self.model.kv_heads, units, unit_bytes, dtype="uint8")
        return LayerCache(*self.caches(exact), *planes)

    @property
    def record_bytes(self) -> int:
        return PAGE + max(self.model.head_dim, PAGE)

    def plan(self, exact: int, queries: int, decode: bool, compressed: int = 0, bits: int = 0) -> Any:
        from kernels.ops import AttentionPlan, WarmPages

        pages = compressed // PAGE
        after_codes = -(-pages * PAGE * self.model.head_dim * bits // 8 // self.record_bytes)
        query_start, exact_lens, table, codes, records, counts = (
            self.torch.tensor(values, dtype=self.torch.int32, device=self.device)
            for values in (
                [0, queries], [exact], [range(-(-exact // PAGE))], [range(pages)],
                [range(after_codes, after_codes + pages)], [pages],
            )
        )  # fmt: skip
        warm = (WarmPages(bits, self.record_bytes, codes, None, records, counts),) if bits else ()
        slots, query_len = self.zeros(queries, dtype="int64"), 0 if decode else queries
        return AttentionPlan(query_start, exact_lens, table, slots, int(decode), query_len, (), warm)


@dataclass(frozen=True)
class Op:
    function: str  # the Triton kernel, of those that the operation launches
    run: Callable[[Problem, int], None]
    cost: Callable[[Model, int], Cost]
    tokens: int = 2048
    traffic_tokens: int = 8  # for the interpreter; 0: what another row of the operation counts
    loop: int | None = None  # count only this one of the loops that use tensor cores
    loop_tokens: int = PAGE
    models: tuple[int, ...] = (0, 1, 2)  # of MODELS
    whole: Callable[[Model, int], Cost] | None = None  # of all kernels of the operation, where the others count
    traffic_width: int | None = None  # hidden and inner, for the interpreter; None: the model's


LATER = (1, 2)  # the first model would repeat the second one
LLAMA_2, LLAMA_3 = (0,), (1,)
OPS = {
    "rms_norm": Op("_rms_norm_kernel", Problem.rms_norm, lambda m, n: Cost(4 * n * m.hidden, 0, n), models=LATER),
    "add_rms_norm": Op(
        "_rms_norm_kernel", Problem.add_rms_norm, lambda m, n: Cost(8 * n * m.hidden, 0, n), models=LATER
    ),
    "silu_mul": Op("_silu_mul_kernel", Problem.silu_mul, lambda m, n: Cost(6 * n * m.intermediate, 0, n), models=LATER),
    "rope_store": Op(
        "_rope_store_kernel", Problem.rope_store,
        lambda m, n: Cost(4 * n * m.head_dim * (m.heads + 2 * m.kv_heads + 1), 0, n),
    ),
    "decode_attention": Op("_decode_kernel", Problem.decode, Model.decode, 16384, 2048, 0),
    "decode_attention+logits": Op(
        "_decode_kernel", lambda p, n: p.decode(n, True), lambda m, n: m.decode(n, True), 16384, 2048, 0
    ),
    "decode_attention+logits,4 bits": Op(
        "_decode_kernel", lambda p, n: p.decode(n, True, 4), lambda m, n: m.decode(n, True, 4), 16384, 2048, 1,
        models=LATER,
    ),
    "decode_attention,8 bits": Op(
        "_decode_kernel", lambda p, n: p.decode(n, bits=8), lambda m, n: m.decode(n, bits=8), 16384, 2048, 1,
        models=LLAMA_3,
    ),
    "decode_merge": Op("_merge_kernel", Problem.decode, Model.merge, 16384, 0, models=LATER),
    "prefill_attention": Op("_prefill_kernel", Problem.prefill, Model.prefill, 4096, 192, 0),
    "prefill_attention,short": Op(
        "_prefill_kernel", lambda p, n: p.prefill(n, True), lambda m, n: m.prefill(n, True), 16384, 1024, 0,
        models=LATER,
    ),
    "prefill_attention,4 bits": Op(
        "_prefill_kernel", lambda p, n: p.prefill(n, bits=4), lambda m, n: m.prefill(n, bits=4), 16384, 2048, 0, 16,
        models=LLAMA_3,
    ),
    "recall score,4 bits": Op(
        "_score_kernel", lambda p, n: p.recall(n, 4, 1), lambda m, n: m.recall_score(n, 4, 1), 16384, 0, 0, 16,
        models=LATER,
    ),
    "recall score,4 bits,chunk": Op(
        "_score_kernel", lambda p, n: p.recall(n, 4, 256), lambda m, n: m.recall_score(n, 4, 256), 16384, 0, 0, 16,
        models=LATER,
    ),
    "recall swap,4 bits": Op(
        "_swap_kernel", lambda p, n: p.recall(n, 4, 1), lambda m, n: m.recall_swap(n, 4, 1), 16384, 1024, 0, 16,
        models=LATER, whole=lambda m, n: m.recall(n, 4, 1),
    ),
    "recall swap,4 bits,overlay": Op(
        "_swap_kernel", lambda p, n: p.recall(n, 4, 1, True), lambda m, n: m.recall_swap(n, 4, 1), 16384, 0, 0, 16,
        models=LLAMA_2,
    ),
    "recall swap,4 bits,chunk": Op(
        "_swap_kernel", lambda p, n: p.recall(n, 4, 256), lambda m, n: m.recall_swap(n, 4, 256), 16384, 0, 0, 16,
        models=LATER,
    ),
    "importance": Op(
        "_importance_kernel", Problem.importance, lambda m, n: Cost(40 * n, 0, n), traffic_tokens=2048, models=LLAMA_3
    ),
    "compress,4 bits K": Op(
        "_compress_kernel", lambda p, n: p.compress(n, 4, True), lambda m, n: m.compress(n, 4), 2048, 128,
        models=LLAMA_3,
    ),
    "compress,4 bits V": Op(
        "_compress_kernel", lambda p, n: p.compress(n, 4, False), lambda m, n: m.compress(n, 4), 2048, 128,
        models=LLAMA_3,
    ),
    "decompress,4 bits K": Op(
        "_decompress_kernel", lambda p, n: p.decompress(n, 4, True), lambda m, n: m.compress(n, 4), 2048, 128,
        models=LLAMA_3,
    ),
    **{
        f"linear,int{bits}{name}": Op(
            "_linear_kernel", partial(Problem.linear, bits=bits), partial(Model.linear, bits=bits), rows, counted, 0,
            tile, models=LLAMA_2, traffic_width=1024,
        )
        for name, rows, counted, tile in (("", 1, 1, 8), (",chunk", 256, 64, 16))
        for bits in (8, 4)
    },
}  # fmt: skip
MODELS = [
    Model("llama-2-7b", 32, 32, 128, 4096, 11008, "float16"),
    Model("llama-3-8b", 32, 8, 128, 4096, 14336, "bfloat16"),
    Model("smollm2-135m", 9, 3, 64, 576, 1536, "bfloat16"),
]


def manifest() -> list[tuple[str, Op, Model]]:
    return [(name, op, model) for name, op in OPS.items() for model in map(MODELS.__getitem__, op.models)]


def record_launch(
    op: Op, model: Model, device: str = "meta", tokens: int | None = None
) -> tuple[Any, tuple[Any, ...], dict[str, Any], tuple[int, ...]]:
    """What the wrapper would launch, with so many tokens: (function, arguments, options, grid)."""
    from kernels import attention

    launches = []

    def record(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        launches.append((self, args, options, grid))

    multiprocessors = (lambda _: MULTIPROCESSORS) if device == "meta" else attention._num_multiprocessors
    with (
        mock.patch.object(type(attention._merge_kernel), "run", record),  # compiled or interpreted
        mock.patch.object(attention, "_num_multiprocessors", multiprocessors),
    ):
        op.run(Problem(model, device), tokens or op.tokens)
    (launch,) = [launch for launch in launches if launch[0].__name__ == op.function]
    return launch


def profile(name: str, op: Op, model: Model, target: str) -> dict[str, Any]:
    from tools.machine_code import compile_for, read_amd, read_nvidia

    function, args, options, grid = record_launch(op, model)
    kernel = compile_for(target, function, args, options)
    columns, counted = (read_amd(kernel), None) if target.startswith("gfx") else read_nvidia(kernel, op.loop)
    per_token = None
    if counted is not None and op.loop is not None:
        per_token = counted * kernel.metadata.num_warps / op.loop_tokens * 128 / options.get("BLOCK_M", 128)
    elif counted is not None and op.cost(model, op.tokens).units:
        per_token = counted * kernel.metadata.num_warps * math.prod(grid) / op.tokens
    return {
        "kernel": f"{name}[{model.name}]",
        "target": target,
        **columns,
        "shared_bytes": kernel.metadata.shared,
        "instructions_per_token": None if per_token is None else round(per_token, 2),
        "predicted_us": predict(op, model, target, per_token),
    }


def profile_job(job: tuple[int, str]) -> dict[str, Any]:
    return profile(*manifest()[job[0]], job[1])


def predict(op: Op, model: Model, target: str, per_token: float | None) -> dict[str, float]:
    cost = op.cost(model, op.tokens)
    issue_cycles = (per_token or 0.0) * cost.units / ISSUE_PER_CYCLE
    return {
        gpu: round(1e6 * max(cost.bytes / bandwidth, cost.link / LINKS[gpu], issue_cycles / (sms * clock),
                             cost.flops / peak), 2)
        for gpu, (bandwidth, sms, clock, peak) in GPUS.get(target, {}).items()
    }  # fmt: skip


def count_traffic() -> dict[str, dict[str, float]]:
    """kernel -> its two ratios. Runs in the interpreter: TRITON_INTERPRET must be set."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    from kernels import attention
    from tools.interpreter import hurry

    hurry()
    asked: list[int] = []
    sectors: dict[str, list[Any]] = {"create_masked_load": [], "create_masked_store": []}

    def counting(access: Any, mask_at: int) -> Any:
        def counted(builder: Any, ptrs: Any, *rest: Any) -> Any:
            addresses = ptrs.data[np.broadcast_to(rest[mask_at].data, ptrs.data.shape)]
            asked.append(addresses.size * ptrs.get_element_ty().primitive_bitwidth // 8)
            sectors[access.__name__].append(np.unique(addresses // np.uint64(32)))
            return access(builder, ptrs, *rest)

        return counted

    ratios = {}
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    with (
        mock.patch.object(InterpreterBuilder, load.__name__, counting(load, 0)),
        mock.patch.object(InterpreterBuilder, store.__name__, counting(store, 1)),
        mock.patch.object(attention, "_num_multiprocessors", lambda _: 4),
    ):
        for name, op, model in manifest():
            if op.traffic_tokens:
                width = op.traffic_width
                small = replace(model, hidden=width, intermediate=width) if width else model
                op.run(Problem(small, "cpu"), op.traffic_tokens)
                cost = (op.whole or op.cost)(small, op.traffic_tokens)
                least = cost.bytes + cost.link
                unique = 32 * sum(len(np.unique(np.concatenate(touched))) for touched in sectors.values())
                ratios[f"{name}[{model.name}]"] = {
                    "traffic_ratio": round(sum(asked) / least, 3),
                    "l2_ratio": round(unique / least, 3),
                }
            for counts in (asked, *sectors.values()):
                counts.clear()
    return ratios


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.profile_kernels", description="What the kernels cost.")
    parser.add_argument("--targets", default=TARGETS, help="comma-separated (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--peers", action="store_true", help="print the figures of others' published code beside ours")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="exit code 1 where the kernels are worse")
    parser.add_argument("--write-baseline", type=Path, metavar="FILE", help="keep the figures there")
    parser.add_argument("--count-traffic", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.targets.split(",")) - kernel_report.SHARED_LIMIT.keys():
        parser.error(f"unknown targets {', '.join(sorted(unknown))}: known are {','.join(kernel_report.SHARED_LIMIT)}")
    if arguments.count_traffic:
        print(json.dumps(count_traffic()))
        return 0
    baseline = kernel_report.read_baseline(arguments.baseline) if arguments.baseline else None
    rows = measure(compile_all(arguments.targets.split(",")))
    report = {
        "rows": rows,
        "complaints": None if baseline is None else list(kernel_report.complaints(rows, baseline)),
        "missed_floors": list(kernel_report.missed_floors(rows)),
        **({"peers": kernel_report.beside_peers(rows)} if arguments.peers else {}),
    }
    if arguments.write_baseline:
        kernel_report.write_baseline(arguments.write_baseline, rows, version("triton"))
    if arguments.json:
        print(json.dumps(report))
    else:
        show(report)
    if baseline is not None and report["complaints"] and baseline["triton"] != version("triton"):
        print(f"note: the baseline is of Triton {baseline['triton']}, this is {version('triton')}", file=sys.stderr)
    return 1 if report["complaints"] else 0


def compile_all(targets: list[str]) -> list[dict[str, Any]]:
    """A row for each kernel and target, with its traffic."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise ConfigError("TRITON_INTERPRET is set: there is nothing to compile in the interpreter")
    work = [(index, target) for target in targets for index in range(len(manifest()))]
    # Whether Triton compiles or interprets is fixed when it is imported: hence another process.
    command = [sys.executable, "-m", "tools.profile_kernels", "--count-traffic"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as counting:
        compiled = list(Progress(in_processes(profile_job, work), desc="Compiling", total=len(work), shown=True))
        counted = counting.communicate()[0]
    if counting.returncode:
        raise ConfigError("counting the traffic failed: its message is above")
    traffic = json.loads(counted)
    not_counted = {"traffic_ratio": None, "l2_ratio": None}
    return [row | traffic.get(row["kernel"], not_counted) for row in compiled]


def in_processes(function: Callable[[Any], Any], work: list[Any], patience: float = PATIENCE) -> Iterator[Any]:
    """function(item) of each, in order, from a few processes. A pool waits for ever for one that died or hangs, as
    compilers now and then do: where no result comes for `patience` seconds, others go on from there, once an item."""
    done = retried = 0
    while done < len(work):
        with multiprocessing.Pool() as pool:
            results = pool.imap(function, work[done:])
            try:
                while done < len(work):
                    yield results.next(timeout=patience)
                    done += 1
            except multiprocessing.TimeoutError:
                stuck = f"no result for {work[done]} in {patience:g} s: its process died or hangs"
                if retried > done:
                    raise ConfigError(f"{stuck}, twice") from None
                print(f"{stuck}; once more", file=sys.stderr)
                retried = done + 1


def measure(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of this machine's GPU, if it has one, with what they take on it."""
    import torch

    if not torch.cuda.is_available():
        return rows
    from tools import gpu_speed

    target = "sm_{}{}".format(*torch.cuda.get_device_capability())
    measured = {row.pop("kernel"): row for row in gpu_speed.kernel_rows("cuda", gpu_speed.CudaTimer())}
    return [row | (measured[row["kernel"]] if row["target"] == target else {}) for row in rows]


def show(report: dict[str, Any]) -> None:
    print("predicted_us is a model, not a measurement\n")
    print_table(report["rows"])
    if "peers" in report:
        print("\npeers: published code, compiled by the same meter, not run (tools/kernel_peers.json)\n")
        print_table(report["peers"])
    for title in ("missed_floors", "complaints"):
        if report[title]:
            print(f"\n{title.replace('_', ' ')}:", *report[title], sep="\n  ")
    if report["complaints"] == []:
        print("\nno worse than the baseline")


if __name__ == "__main__":
    run(main)
