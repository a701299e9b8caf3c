"""`python -m engine.generate`: complete a prompt. The text streams to stdout, everything else goes to stderr."""

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from engine.arguments import Parser
from engine.cli import add_run_flags, rates, run, run_settings, show, with_defaults
from engine.config import RequestOutput
from engine.errors import RequestError
from engine.signals import raise_exceptions

_COLD_HITS = 0.15  # of the tokens attended exactly; above it, reading takes time that a knob can save


def parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m engine.generate", description="Complete a prompt with a Llama model.")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", help='text to complete; "-" reads it from stdin')
    source.add_argument("-f", "--file", help='file with the text to complete; "-" is stdin')
    add_run_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    prompt = _prompt(args)
    flags, settings = run_settings(args)
    begin = time.perf_counter()
    from engine import LLM

    llm = LLM(progress=not args.quiet, **settings)
    load_s = time.perf_counter() - begin
    raise_exceptions()
    params = with_defaults(flags, llm.generation_config, args.quiet)
    with contextlib.closing(llm.stream(prompt, params)) as outputs:
        last, times = show(outputs, lambda text: None if args.json else print(text, end="", flush=True))
    assert last is not None
    report = _report(last, llm.stats(), load_s, times)
    print(json.dumps(report) if args.json else "")
    if not args.quiet:
        if not last.text and last.finish_reason == "stop":
            print("the model had nothing to add; for questions and answers: python -m engine.chat", file=sys.stderr)
        print(_summary(report), file=sys.stderr)
    return 1 if last.finish_reason == "error" else 0


def _prompt(args: argparse.Namespace) -> str:
    piped = args.file in (None, "-")
    name = "stdin" if piped else args.file
    if args.file is None and args.prompt is None and sys.stdin.isatty():
        raise RequestError("no prompt: give --prompt TEXT or --file FILE, or pipe text in")
    try:
        if args.prompt not in (None, "-"):
            name, data = "--prompt", os.fsencode(args.prompt)
        else:  # the newline that ends a file or an echo is not meant
            data = sys.stdin.buffer.read() if piped else Path(args.file).read_bytes()
            data = data.removesuffix(b"\n").removesuffix(b"\r")
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from None
    except OSError as error:
        raise RequestError(f"{name}: cannot be read: {error.strerror}") from None


def _report(output: RequestOutput, stats: dict[str, Any], load_s: float, times: list[float]) -> dict[str, Any]:
    cache = output.cache_report
    memory = {key: stats[key] for key in ("weights_bytes", "peak_rss_bytes", "kv_shared_bytes")}
    for key in ("resident_bytes", "full_bytes", "total_bytes", "peak_bytes", "cold_bytes"):
        memory[f"kv_{key}"] = cache[key]
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(output.token_ids),
        "finish_reason": output.finish_reason,
        "timings": {"load_s": load_s} | rates(times, len(output.prompt_token_ids)),
        "memory": memory,
        "cache": cache
        | {"num_cached_tokens": output.num_cached_tokens}
        | {key: stats[key] for key in ("prefix_tree_depth", "flash", "compute_s_per_token")},
    }


def _summary(report: dict[str, Any]) -> str:
    timings, memory, cache = report["timings"], report["memory"], report["cache"]
    mb = {key: f"{value / 1e6:.1f} MB" for key, value in memory.items()}
    decode = f", {timings['decode_tok_s']:.1f} tok/s" if timings["decode_tok_s"] else ""
    tiers = ""
    if cache["warm_tokens"]:
        tiers = (
            f" = {memory['kv_resident_bytes'] / memory['kv_full_bytes']:.2f} of {mb['kv_full_bytes']} exact, with the "
            f"chunk in flight at most {mb['kv_peak_bytes']}, in the host {mb['kv_cold_bytes']} | "
            f"{cache['hot_tokens']} tokens exact, {cache['warm_tokens']} compressed, {cache['moves']} moves, "
            f"attention to compressed ones {cache['warm_mass']:.0%}, missed {cache['missed_mass']:.0%}"
        )
    if cache["read_bytes_per_token"]:
        read, hits = cache["read_bytes_per_token"] / 1e6, cache["cold_hit_rate"]
        less = " (a lower --recall reads less)" if hits > _COLD_HITS else ""
        tiers += f", {read:.2f} MB of copies read a token, cold hits {hits:.0%}{less}"
    if flash := cache["flash"]:
        tiers += f" | flash: {flash['hits']:.0f} pages read, {flash['writes']:.0f} written"
        if flash["hits"] and cache["compute_s_per_token"]:
            read, compute = flash["read_seconds"] / flash["hits"], cache["compute_s_per_token"] * cache["page_size"]
            tiers += f", {read * 1e3:.1f} ms to read a page that takes {compute * 1e3:.1f} ms to compute"
    return (
        f"Prompt: {report['prompt_tokens']} tokens, {timings['prefill_tok_s']:.1f} tok/s | "
        f"Generation: {report['completion_tokens']} tokens{decode} | "
        f"TTFT {timings['ttft_s'] * 1e3:.0f} ms | KV cache {mb['kv_resident_bytes']}{tiers} | "
        f"Peak memory {memory['peak_rss_bytes'] / 1e9:.2f} GB | finish: {report['finish_reason']}"
    )


if __name__ == "__main__":
    run(main)
