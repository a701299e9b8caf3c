"""Everything that needs a GPU, in one run: `python -m tools.gpu_check [--json]`. Without a GPU it runs itself, tiny, in
Triton's interpreter, so that it is known to work; times are then left out.

    kernels     each against float64 on scattered pages with NaN in everything that no sequence owns
    speed       each at the real shapes of tools.profile_kernels, beside this device's own copy speed (GPU only)
    end to end  greedy ids of a random Llama: the Triton path equals the torch path, in float32

Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": None,
}  # fmt: skip


def check_kernels(device: str) -> list[dict[str, Any]]:
    """Each kernel's worst error against float64, in units of what its dtype allows (float64.TOLERANCE)."""
    import torch

    # The interpreter is wrong about bfloat16 (the tests repair it). A GPU's exp2 and rsqrt are approximate, and its
    # fused operations round elsewhere: four times the tolerance that the interpreter's float32 keeps.
    dtypes = [torch.float32, torch.float16] + [torch.bfloat16] * (device == "cuda")
    slack = 4.0 if device == "cuda" else 1.0
    shapes = (
        [(9, 3, 64), (4, 4, 128)] if device == "cpu" else [(9, 3, 64), (4, 4, 128), (8, 1, 80), (5, 5, 8), (32, 8, 128)]
    )
    rows = []
    for dtype in dtypes:
        for heads, kv_heads, head_dim in shapes:
            torch.manual_seed(0)
            for kernel, error in _errors(device, dtype, heads, kv_heads, head_dim):
                rows.append(
                    {
                        "kernel": kernel,
                        "dtype": str(dtype).removeprefix("torch."),
                        "shape": f"{heads}/{kv_heads}x{head_dim}",
                        "error": round(error, 3),
                        "ok": error <= slack,
                    }
                )
    return rows


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
    for copies in (dtype, torch.int8):
        batch = float64.make_batch(lens, lengths, heads, kv_heads, head_dim, dtype, 64, 1, device, warm, copies)
        batch = float64.with_recall(batch, 16, reads)
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


def measure_speed() -> list[dict[str, Any]]:
    """Each kernel at real shapes on the GPU: time, and its least bytes a second beside the device's own copy speed."""
    import torch
    from triton.testing import do_bench

    from tools import profile_kernels

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_speed = 2 * source.numel() / (1e-3 * do_bench(lambda: target.copy_(source)))
    rows: list[dict[str, Any]] = [
        {"kernel": "copy of 1 GiB", "us": None, "gb_s": round(copy_speed / 1e9), "of_copy": 1.0}
    ]
    for name, op, model in profile_kernels.manifest():
        if op.cost is None:
            continue
        function, args, options, grid = profile_kernels.record_launch(op, model, "cuda")
        seconds = 1e-3 * do_bench(lambda f=function, g=grid, a=args, o=options: f[g](*a, **o))
        speed = op.cost(model, op.tokens).bytes / seconds
        rows.append(
            {
                "kernel": f"{name}[{model.name}]",
                "us": round(1e6 * seconds, 1),
                "gb_s": round(speed / 1e9),
                "of_copy": round(speed / copy_speed, 2),
            }
        )
    return rows


def check_engine(device: str) -> dict[str, Any]:
    """Greedy ids of the Triton path and of the torch path, several prompts at once, on a random Llama in float32."""
    import torch
    from safetensors.torch import save_file

    from engine import LLM, SamplingParams
    from models.llama.config import LlamaConfig
    from models.llama.model import LlamaWeights

    torch.manual_seed(0)
    shapes = LlamaWeights(LlamaConfig.from_dict(CONFIG))
    weights = {k: torch.ones(v.shape) if v.dim() == 1 else torch.randn(v.shape) * 0.08 for k, v in shapes.items()}
    tokens = 3 if device == "cpu" else 100
    prompts = [list(range(3, 3 + n)) for n in ((70, 1, 5) if device == "cpu" else (300, 1, 65, 64, 5))]
    params = SamplingParams(max_tokens=tokens, temperature=0)
    answers, seconds = {}, {}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(CONFIG))
        save_file(weights, Path(directory, "model.safetensors"))
        for backend in ("torch", "triton"):
            llm = LLM(directory, device=device, dtype="float32", backend=backend, skip_tokenizer_init=True)
            begin = time.perf_counter()
            answers[backend] = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            seconds[backend] = round(time.perf_counter() - begin, 2)
    return {"tokens": tokens * len(prompts), "equal": answers["torch"] == answers["triton"], "seconds": seconds}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_check", description="Check every kernel and the whole engine."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    begin = time.perf_counter()
    device = "cuda" if Path("/dev/nvidia0").exists() else "cpu"
    if device == "cpu":
        print("no GPU here: a tiny run in Triton's interpreter, without times", file=sys.stderr)
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    import torch

    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "interpreter",
        "rows": check_kernels(device),
        "speed": measure_speed() if device == "cuda" else None,
        "end_to_end": check_engine(device),
    }
    report["seconds"] = round(time.perf_counter() - begin, 1)
    report["ok"] = all(row["ok"] for row in report["rows"]) and report["end_to_end"]["equal"]
    if args.json:
        print(json.dumps(report))
    else:
        from tools.bench import print_table

        print_table(report["rows"])
        if report["speed"]:
            print_table(report["speed"])
        print(f"end to end: {report['end_to_end']}")
        print(
            f"{report['device']}, {report['seconds']} s: {'everything agrees' if report['ok'] else 'SOMETHING DIFFERS'}"
        )
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
