"""Benchmarks: `python -m tools.bench NAME`. Each subcommand measures one thing and prints a table, or JSON with --json.

A subcommand is one function from its parsed arguments to a dict; tables stand under "rows". It imports what is heavy
itself, after parsing, so that --help is quick. To add one: write the function, and list it in `_parser`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.cli import run
from engine.settings import parse_size
from models.errors import ConfigError


def buddy(args: argparse.Namespace) -> dict[str, Any]:
    """Nanoseconds per call of the buddy allocator. Plain Python: --threads has no effect here."""
    from tools.bench_buddy import rows

    return {"rows": rows(args.repeats, args.seed)}


def eviction(args: argparse.Namespace) -> dict[str, Any]:
    """Blocks of a trace of requests that hit a prefix cache: LRU, ours, and the most there could be."""
    from tools.bench_eviction import rows

    return {"rows": rows(args.trace, args.blocks, args.seed)}


def radix(args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a lookup in the radix tree and in others, and what its bounds gain. --threads has no effect."""
    from tools.bench_radix import measure

    return measure(args.tokens, args.sequences, args.seed)


def decode(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second while one sequence is generated."""
    return _beside_peer(args, "decode")


def prefill(args: argparse.Namespace) -> dict[str, Any]:
    """Prompt tokens a second."""
    return _beside_peer(args, "prefill")


def _beside_peer(args: argparse.Namespace, measurement: str) -> dict[str, Any]:
    from engine import LLM
    from tools import bench_llm

    longest = max(args.context) + bench_llm.DECODE_TOKENS * (args.repeats + 1) + 1
    llm = LLM(args.model, dtype=args.dtype, threads=args.threads, skip_tokenizer_init=True, **_quantized(args))
    if longest > llm.max_model_len:
        raise ConfigError(f"{longest} tokens are needed, the model's context is {llm.max_model_len}")
    peer: bench_llm.Peer | bench_llm.FullCache | None = None
    if args.peer_python:
        peer = bench_llm.Peer(args.peer_python, args.model, args.dtype, args.threads)
    elif args.kv_budget:
        peer = bench_llm.FullCache(llm)
    if args.kv_budget:
        llm = llm.twin(kv_budget=args.kv_budget)
    try:
        rows = getattr(bench_llm, measurement)(llm, peer, args.context, args.repeats, args.seed)
    finally:
        if peer:
            peer.close()
    return {
        "model": args.model,
        "dtype": args.dtype,
        "kv_budget": args.kv_budget,
        **_quantized(args),
        "weights_bytes": llm.stats()["weights_bytes"],
        "peer": peer.version if peer else None,
        "rows": rows,
    }


def _quantized(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of the weights."""
    return {name: getattr(args, name) for name in ("quantization", "quantization_group")}


def prefix(args: argparse.Namespace) -> dict[str, Any]:
    """What a stream of requests that begin alike computes and stores."""
    from engine import LLM
    from tools import bench_prefix

    workload = bench_prefix.WORKLOADS[args.workload](args.data, args.max_tokens, args.seed)
    settings = {"kv_budget": args.kv_budget, "page_size": args.page_size}
    llm = LLM(args.model, dtype=args.dtype, threads=args.threads, **settings)
    result = bench_prefix.measure(llm, workload, args.requests, args.kv_cache_memory)
    return {"model": args.model, "workload": args.workload, **settings, **result}


def chat(args: argparse.Namespace) -> dict[str, Any]:
    """A dialogue, with prefixes kept and without."""
    from engine import LLM
    from tools import bench_serving

    settings = {"kv_budget": args.kv_budget, "kv_cache_memory": args.kv_cache_memory}
    llm = LLM(args.model, dtype=args.dtype, threads=args.threads, **settings)
    result = bench_serving.chat(llm, args.turns, args.max_tokens, args.repeats, args.seed)
    return {"model": args.model, **settings, **result}


def offline(args: argparse.Namespace) -> dict[str, Any]:
    """Requests that run together, beside the same one by one."""
    from engine import LLM
    from tools import bench_serving

    settings = {"kv_budget": args.kv_budget, **_quantized(args)}
    llm = LLM(args.model, dtype=args.dtype, threads=args.threads, **settings)
    result = bench_serving.offline(llm, args.batch, args.requests or 2 * args.batch, args.repeats, args.seed)
    return {"model": args.model, **settings, **result}


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """What a model of a shape takes, planned and measured, with random weights."""
    from tools import bench_memory

    settings = {
        "dtype": args.dtype, "kv_budget": args.kv_budget, "recall": args.recall, "backend": args.backend,
        "cold_format": args.cold_format or ("exact" if args.recall else "none"), "threads": args.threads,
        "max_num_batched_tokens": args.chunk, **_quantized(args),
    }  # fmt: skip
    return bench_memory.measure(args.model, args.context, args.decode, args.direct_state, args.seed, **settings)


def _contexts(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--threads", type=_positive, default=1, metavar="N", help="threads for torch (default: 1)")
    common.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all random input (default: 0)")
    common.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description="Measure one part of the engine.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="NAME")

    command = commands.add_parser("buddy", parents=[common], help="alloc and free of the buddy allocator")
    command.add_argument("--repeats", type=_positive, default=200, metavar="N", help="batches of 1000 calls per row")
    command.set_defaults(run=buddy)

    command = commands.add_parser("radix", parents=[common], help="lookups in the radix tree, beside other structures")
    for name, default in (("tokens", "16,128,1024,8192,32768"), ("sequences", "1000,10000,100000")):
        command.add_argument(f"--{name}", type=_contexts, default=default, metavar="N,N", help="(default: %(default)s)")
    command.set_defaults(run=radix)

    command = commands.add_parser("eviction", parents=[common], help="hits of a trace, by what is evicted first")
    command.add_argument("--trace", default="synthetic", help="JSON lines with hash_ids (default: seeded workloads)")
    command.add_argument(
        "--blocks", type=_contexts, default="1000,5000,20000", metavar="N,N", help="(default: %(default)s)"
    )
    command.set_defaults(run=eviction)

    quantized = argparse.ArgumentParser(add_help=False)
    quantized.add_argument("--quantization", metavar="NAME", help="int8 or int4 weights, of ours")
    quantized.add_argument("--quantization-group", type=_positive, metavar="N", help="of int4")
    for function, contexts in ((decode, "128,1024,8000"), (prefill, "512,4096")):
        name = function.__name__
        command = commands.add_parser(
            name, parents=[common, quantized], help=f"{name} of one sequence, beside Transformers"
        )
        command.add_argument("--model", default="smollm2-135m", help="name or directory (default: %(default)s)")
        command.add_argument(
            "--context", type=_contexts, default=contexts, metavar="N,N", help="(default: %(default)s)"
        )
        command.add_argument("--dtype", default="bfloat16", help="of both engines (default: %(default)s)")
        command.add_argument("--repeats", type=_positive, default=5, metavar="N", help="timed runs (default: 5)")
        command.add_argument(
            "--kv-budget", type=float, metavar="FRACTION", help="compress our cache; the peer is then ours in full"
        )
        command.add_argument("--peer-python", metavar="PYTHON", help="an interpreter that has transformers (4.57.6)")
        command.set_defaults(run=function)

    engine = argparse.ArgumentParser(add_help=False, parents=[common])
    engine.add_argument("--model", default="smollm2-135m", help="name or directory (default: %(default)s)")
    engine.add_argument("--dtype", default="auto", help="(default: %(default)s)")
    engine.add_argument("--kv-budget", type=float, metavar="FRACTION", help="compress the cache")

    command = commands.add_parser("prefix", parents=[engine], help="what requests that begin alike share")
    command.add_argument("--workload", required=True, choices=("gsm8k", "humaneval-editor", "humaneval-samples"))
    command.add_argument("--data", required=True, type=Path, metavar="DIR", help="where its files are, or one level up")
    command.add_argument("--requests", type=_positive, metavar="N", help="(default: all; 200 samples)")
    command.add_argument("--max-tokens", type=_positive, metavar="N", help="of an answer (default: 1; 64 of samples)")
    command.add_argument(
        "--kv-cache-memory", type=parse_size, metavar="SIZE", help="(default: as much as all that is stored takes)"
    )
    command.add_argument("--page-size", type=int, default=64, metavar="N", help="(default: %(default)s)")
    command.set_defaults(run=prefix)

    command = commands.add_parser(
        "chat", parents=[engine], help="a dialogue turn by turn, with kept prefixes and without"
    )
    command.add_argument("--turns", type=_positive, default=50, metavar="N", help="(default: %(default)s)")
    command.add_argument(
        "--max-tokens", type=_positive, default=24, metavar="N", help="an answer (default: %(default)s)"
    )
    command.add_argument(
        "--kv-cache-memory", type=parse_size, metavar="SIZE", help="(default: the model's context once)"
    )
    command.add_argument("--repeats", type=_positive, default=5, metavar="N", help="first turns (default: %(default)s)")
    command.set_defaults(run=chat)

    command = commands.add_parser(
        "offline",
        aliases=["serve-offline"],
        parents=[engine, quantized],
        help="a batch of requests beside the same one by one",
    )
    command.add_argument("--batch", type=_positive, default=16, metavar="N", help="at most (default: %(default)s)")
    command.add_argument("--requests", type=_positive, metavar="N", help="in all (default: twice the batch)")
    command.add_argument("--repeats", type=_positive, default=3, metavar="N", help="timed runs (default: %(default)s)")
    command.set_defaults(run=offline)

    command = commands.add_parser("memory", parents=[common], help="what a shape takes, planned and measured")
    command.add_argument("--model", required=True, help="as of tools.memory_plan; the weights are random")
    command.add_argument("--context", type=_positive, required=True, metavar="N", help="tokens, the answer's included")
    command.add_argument("--decode", type=int, default=8, metavar="N", help="of these generated (default: %(default)s)")
    command.add_argument("--dtype", default="bfloat16", help="of weights and cache (default: %(default)s)")
    command.add_argument("--quantization", choices=("int8", "int4"), help="of the weights")
    command.add_argument("--quantization-group", type=int, choices=(32, 64, 128), help="of int4 (default: 32)")
    command.add_argument("--kv-budget", type=float, metavar="FRACTION", help="compress the cache")
    command.add_argument("--recall", type=float, metavar="FRACTION", help="of all tokens, read from copies")
    command.add_argument("--cold-format", choices=("exact", "int8", "none"), help="(default: none without --recall)")
    command.add_argument("--chunk", type=_positive, default=512, metavar="N", help="of a prompt (default: %(default)s)")
    command.add_argument(
        "--backend", choices=("auto", "torch", "triton"), default="auto", help="(default: %(default)s)"
    )
    command.add_argument(
        "--direct-state", action="store_true", help="fill the cache instead of computing all but the last chunk"
    )
    command.set_defaults(run=memory)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"need a number >= 1, got {value}")
    return value


def provenance() -> dict[str, str]:
    """What every figure is recorded with: the command, the commit and the machine."""
    root = Path(__file__).resolve().parent.parent
    try:
        git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "command": " ".join(["python -m tools.bench", *sys.argv[1:]]),
        "commit": commit,
        "machine": f"{_cpu_name()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}",
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """The rows as a Markdown table on stdout; the columns are the keys of the first row."""
    columns = list(rows[0])
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(row.get(column, "")) for column in columns) + " |")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    # Read by OpenMP and MKL when torch is imported, so it has to be said before a subcommand does that.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(args.threads)
    result = {**provenance(), **args.run(args)}
    if args.json:
        print(json.dumps(result))
        return 0
    for key, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            print(f"\n{key}")
            print_table(value)
        else:
            print(f"{key}: {value}")
    return 0


if __name__ == "__main__":
    run(main)
