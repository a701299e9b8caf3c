"""Everything that needs a GPU, in one run: `python -m tools.gpu_check [--minutes 8] [--output FILE]`. Without a GPU it
runs itself, tiny, in Triton's interpreter and with torch, so that it is known to work; times of kernels are then left
out, and those of the model say nothing.

    correct  each kernel against float64 on scattered pages with NaN in everything that no sequence owns; then greedy
             ids of a random Llama: the Triton path equals the torch path, in float32, and on a GPU with CUDA graphs too
    speed    each kernel at the real shapes of tools.profile_kernels, fresh random data in rotating buffers larger than
             the second-level cache, medians of CUDA events, beside the roofline
    engine   Llama-2-7B with random weights: prompts and decoding, by weights and by what is kept of the cache, beside
             Transformers if it can be imported; some of it with CUDA graphs, which take a GPU

Exit code 1 if anything differs. What the time does not suffice for is left out, and said so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.gpu_engine import Budget, Scale
    from tools.gpu_speed import Timer

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": None,
}  # fmt: skip

COLUMNS = ("part", "what", "setting", "value", "unit", "of_peak", "note")


def check_kernels(device: str) -> Iterator[dict[str, Any]]:
    """Each kernel's worst error against float64, in units of what its dtype allows (float64.TOLERANCE)."""
    import torch

    # The interpreter is wrong about bfloat16 (the tests repair it). A GPU's exp2 and rsqrt are approximate, and its
    # fused operations round elsewhere: four times the tolerance that the interpreter's float32 keeps.
    dtypes = [torch.float32, torch.float16] + [torch.bfloat16] * (device == "cuda")
    slack = 4.0 if device == "cuda" else 1.0
    shapes = (
        [(9, 3, 64), (4, 4, 128)] if device == "cpu" else [(9, 3, 64), (4, 4, 128), (8, 1, 80), (5, 5, 8), (32, 8, 128)]
    )
    for dtype in dtypes:
        for heads, kv_heads, head_dim in shapes:
            torch.manual_seed(0)
            for kernel, error in _errors(device, dtype, heads, kv_heads, head_dim):
                yield {
                    "kernel": kernel,
                    "dtype": str(dtype).removeprefix("torch."),
                    "shape": f"{heads}/{kv_heads}x{head_dim}",
                    "error": round(error, 3),
                    "ok": error <= slack,
                }


def _errors(device: str, dtype: Any, heads: int, kv_heads: int, head_dim: int) -> Iterator[tuple[str, float]]:
    """(kernel, worst error / tolerance) for one shape."""
    import numpy as np
    import torch

    import kernels
    from tools import float64

    ops = kernels.load("triton")

    def error(got: Any, want: Any, scale: float = 1.0) -> float:
        got, want = got.double().cpu(), want.double().cpu()
        worst = ((got - want).abs() / (float64.TOLERANCE[dtype] * scale * want.abs().clamp_min(1.0))).max()
        return float(worst) if not got.isnan().any() else float("inf")

    width = heads * head_dim
    x, residual, weight = (torch.randn(*size).to(dtype).to(device) for size in ((3, width), (3, width), (width,)))
    yield "rms_norm", error(ops.rms_norm(x, weight, 1e-5), float64.rms_norm(x, weight, 1e-5))
    total = (x.double() + residual.double()).to(dtype)
    yield "add_rms_norm", error(ops.add_rms_norm(x, residual, weight, 1e-5), float64.rms_norm(total, weight, 1e-5))
    gate, up = x.double(), residual.double()
    yield "silu_mul", error(ops.silu_mul(x, residual), gate * gate.sigmoid() * up, scale=4)

    batch = float64.make_batch([5, 3], [70, 3], heads, kv_heads, head_dim, dtype, device=device)
    angles = torch.rand(8, head_dim // 2, dtype=torch.float64) * 100
    k, v = (torch.randn(8, kv_heads, head_dim).to(dtype).to(device) for _ in "kv")
    want = float64.rotate(batch.q.cpu(), angles)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1).float().to(device)
    ops.rope_store(batch.q, k, v, cos_sin, batch.plan.slots, batch.cache.k, batch.cache.v)
    yield "rope_store", error(batch.q, want, scale=2)

    small = device == "cpu"
    lengths = [200, 40] if small else [5000, 64, 65, 1, 700]
    chunks, chunk_lengths = ([20, 2], [90, 2]) if small else ([300, 1, 65], [1000, 64, 65])
    formats: dict[str, dict[int, list[int]]] = {"": {}, ", all formats": {8: [1, 0], 4: [1, 1], 3: [0, 1], 2: [2, 0]}}
    if not small:
        formats[", 4 bits"] = {4: [40, 0, 1, 3, 0]}
        formats[", all formats"] = {8: [20, 0, 1, 3, 0], 4: [30, 1, 0, 0, 0], 3: [1, 5, 0, 2, 0], 2: [0, 0, 70, 0, 0]}
    for name, warm in formats.items():
        batch = float64.make_batch(
            [1] * len(lengths), lengths, heads, kv_heads, head_dim, dtype, 64, len(lengths), device, warm
        )
        logits = torch.zeros(len(lengths), heads, batch.plan.num_columns(64), device=device)
        lse = torch.zeros(len(lengths), heads, device=device)
        out = ops.decode_attention(batch.q, batch.cache, batch.plan, batch.scale, logits, lse)
        want, _ = float64.attention(batch, range(len(lengths)))
        rounded = 2.0 if warm else 1.0  # for compressed pages, q (in prefill K and V too) is rounded once more
        yield f"decode_attention{name}", error(out, want, rounded)
        mass = torch.stack(
            [
                (row[:, batch.columns(b)] - m[:, None]).exp2().sum(-1)
                for b, (row, m) in enumerate(zip(logits, lse, strict=True))
            ]
        )
        yield f"decode_attention{name} mass", error(mass, torch.ones_like(mass), scale=4)

        warm = {bits: pages[: len(chunks)] for bits, pages in warm.items()}
        batch = float64.make_batch(chunks, chunk_lengths, heads, kv_heads, head_dim, dtype, device=device, warm=warm)
        out = ops.prefill_attention(batch.q, batch.cache, batch.plan, batch.scale)
        want, _ = float64.attention(batch, range(len(chunks)))
        yield f"prefill_attention{name}", error(out, want, rounded)

    lens, lengths, reads = ([1, 5], [40, 30], [9, 40]) if small else ([1, 300, 40], [500, 700, 40], [100, 60, 900])
    warm = {8: [1, 1, 0], 4: [2, 1, 9], 3: [1, 2, 5], 2: [0, 1, 0]}
    warm = {bits: [n if small else 5 * n for n in pages[: len(lens)]] for bits, pages in warm.items()}
    for copies, share in ((dtype, 64), (torch.int8, 90)):
        batch = float64.make_batch(lens, lengths, heads, kv_heads, head_dim, dtype, 64, 1, device, warm, copies)
        batch = float64.with_recall(batch, 16, reads, share)
        lse, rest = torch.zeros(sum(lens), heads, device=device), (batch.cache, batch.plan, batch.scale)
        out = torch.cat(
            [
                ops.decode_attention(batch.q[:1], *rest, lse=lse[:1]),
                ops.prefill_attention(batch.q[1:], *rest, lse=lse[1:]),
            ]
        )
        want, spread = float64.recall(batch)
        off = ((ops.recall(batch.q, out, lse, *rest).double().cpu() - want).abs() - spread).clamp_min(0)
        # Rounded twice, and what is taken away of compressed pages once more than where it was added.
        yield f"recall, {str(copies).removeprefix('torch.')} copies", error(want + off, want, 3)

    warm = {4: [2, 1], 2: [1, 1]} if small else {4: [20, 10], 2: [5, 9]}
    batch = float64.make_batch([1, 1], [30, 40], heads, kv_heads, head_dim, dtype, 64, 2, device, warm, dtype)
    batch = float64.with_recall(batch, 1, [9, 20] if small else [100, 60])
    lse, q, plan, scale = torch.zeros(2, heads, device=device), batch.q, batch.plan, batch.scale
    out = ops.decode_attention(q, batch.cache, plan, scale, lse=lse)
    want, cache = ops.recall(q, out, lse, batch.cache, plan, scale), float64.with_overlay(batch, 128).cache
    for step in ("first", "again"):  # read from the copies, then from the overlay
        got = ops.recall(q, out, lse, cache, plan, scale)
        yield f"recall, overlay, {step}", error(got, want)

    pages = torch.randn(1 if small else 20, 64, head_dim).to(dtype).to(device)
    for bits in (8, 4, 3, 2):
        for kind, is_key in (("K", True), ("V", False)):
            codes, records = ops.compress(pages, bits, is_key)
            kept = [
                float64.decompress(c, r, bits, is_key, 64, head_dim)
                for c, r in zip(codes.cpu().numpy(), records.cpu().numpy(), strict=True)
            ]
            exact = torch.from_numpy(np.stack(kept))
            # The mean square over that of steps of 3.2 sigma, which the narrowest clips can reach in the worst token.
            noise = float((exact - pages.double().cpu()).square().mean().sqrt())
            yield f"compress, {bits} bits {kind}", noise / (3.2 / (2**bits - 1))
            yield f"decompress, {bits} bits {kind}", error(ops.decompress(codes, records, bits, is_key, pages), exact)


def check_engine(device: str) -> dict[str, Any]:
    """Greedy ids of the Triton path and of the torch path, several prompts at once, on a random Llama in float32."""
    import torch
    from safetensors.torch import save_file

    from engine import LLM, SamplingParams
    from models.llama.config import LlamaConfig
    from models.llama.model import LlamaWeights

    torch.manual_seed(0)
    shapes = LlamaWeights(LlamaConfig.from_dict(CONFIG))
    weights = {k: torch.ones(v.shape) if len(v.shape) == 1 else torch.randn(v.shape) * 0.08 for k, v in shapes.items()}
    tokens = 3 if device == "cpu" else 100
    prompts = [list(range(3, 3 + n)) for n in ((70, 1, 5) if device == "cpu" else (300, 1, 65, 64, 5))]
    params = SamplingParams(max_tokens=tokens, temperature=0)
    answers, seconds = {}, {}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(CONFIG))
        save_file(weights, Path(directory, "model.safetensors"))
        ways = {"torch": ("torch", "off"), "triton": ("triton", "off")}
        if device == "cuda":
            ways["CUDA graphs"] = ("triton", "on")
        for name, (backend, graphs) in ways.items():
            llm = LLM(
                directory, device=device, dtype="float32", backend=backend, cuda_graphs=graphs, skip_tokenizer_init=True
            )
            begin = time.perf_counter()
            answers[name] = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            seconds[name] = round(time.perf_counter() - begin, 2)
    equal = all(answer == answers["torch"] for answer in answers.values())
    return {"tokens": tokens * len(prompts), "equal": equal, "seconds": seconds}


def check(
    device: str, timer: Timer, scale: Scale, budget: Budget, peer_python: str, roof: tuple[float, float] | None
) -> dict[str, Any]:
    """All of it. roof: (bytes, 16-bit flops) a second of the device, if known."""
    from tools import gpu_engine, gpu_speed

    begin = time.perf_counter()
    late: list[str] = []

    def in_time(part: str, rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        done = []
        for row in rows:
            done.append(row)
            if budget.left <= 0:
                late.append(f"{part}: what follows {next(iter(row.values()))} was {gpu_engine.OUT_OF_TIME}")
                break
        return done

    correct = in_time("correct", check_kernels(device))
    end_to_end = check_engine(device)
    copied = gpu_speed.copy_speed(timer, device)
    roof = roof or (None if copied is None else (copied, float("inf")))  # of a GPU that is not known
    report: dict[str, Any] = {
        "rows": correct,
        "end_to_end": end_to_end,
        "copy_gb_s": None if copied is None else round(copied / 1e9),
        "speed": in_time("speed", gpu_speed.kernel_rows(device, timer, roof)),
        "engine": list(gpu_engine.engine_rows(scale, gpu_engine.CASES, budget, roof and roof[0])),
        "peer": gpu_engine.peer_rows(scale, budget, device, peer_python),
        "skipped": late,
    }
    report["seconds"] = round(time.perf_counter() - begin, 1)
    report["ok"] = all(row["ok"] for row in report["rows"]) and end_to_end["equal"]
    return report


def table(report: dict[str, Any]) -> list[dict[str, Any]]:
    """All rows under the same columns."""
    rows = []

    def add(part: str, what: str, setting: str, value: Any, unit: str, of_peak: Any = "", note: str = "") -> None:
        shown = ["" if x is None else x for x in (value, unit if value is not None else "", of_peak)]
        rows.append(dict(zip(COLUMNS, (part, what, setting, *shown, note), strict=True)))

    for row in report["rows"]:
        verdict = "ok" if row["ok"] else "WRONG"
        add("correct", row["kernel"], f"{row['dtype']} {row['shape']}", row["error"], "of tolerance", note=verdict)
    end = report["end_to_end"]
    add("correct", "greedy ids", "float32", end["tokens"], "tokens", note="equal" if end["equal"] else "DIFFERENT")
    for row in report["speed"]:
        speed = "" if row["achieved_gb_s"] is None else f"{row['achieved_gb_s']} GB/s"
        add("speed", row["kernel"], "", row["measured_us"], "us", row["of_peak"], speed)
    for row in [*report["engine"], *report["peer"]]:
        setting = ", ".join(str(row[key]) for key in ("weights", "kv", "context") if row[key] is not None)
        add("engine", row["what"], setting, row["tok_s"], "tok/s", row["of_peak"], row["note"])
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_check", description="Check and time every kernel and the whole engine."
    )
    parser.add_argument("--minutes", type=float, default=8.0, metavar="N", help="at most (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there, as JSON")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON", help="that may have transformers")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    device = "cuda" if Path("/dev/nvidia0").exists() else "cpu"
    if device == "cpu":
        print("no GPU here: a tiny run in Triton's interpreter, without times", file=sys.stderr)
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    import torch
    import triton

    from tools import gpu_engine, gpu_speed
    from tools.bench import print_table
    from tools.interpreter import hurry

    if device == "cpu":
        hurry()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "interpreter",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}",
    }
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(CONFIG))
        tiny = gpu_engine.Scale(directory, "float32", (70,), (10, 70), 3)
        budget = gpu_engine.Budget(60 * args.minutes)
        if device == "cuda":
            roof = gpu_speed.peaks()
            report |= check(device, gpu_speed.CudaTimer(), gpu_engine.REAL, budget, args.peer_python, roof)
        else:
            report |= check(device, gpu_speed.NoTimer(), tiny, budget, args.peer_python, None)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1))
    if args.json:
        print(json.dumps(report))
    else:
        print_table(table(report))
        print(*report["skipped"], sep="\n")
        verdict = "everything agrees" if report["ok"] else "SOMETHING DIFFERS"
        print(f"{report['device']}, {report['versions']}, {report['seconds']} s: {verdict}")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
