"""`python -m engine.generate`: complete a prompt. The text streams to stdout, everything else goes to stderr."""

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from engine.cli import load, parser, rates, run, run_settings, show, words
from engine.config import RequestOutput
from engine.errors import RequestError


def main(argv: list[str] | None = None) -> int:
    args = parser("generate").parse_args(argv)
    prompt = _prompt(args)
    checked = run_settings(args)
    begin = time.perf_counter()
    llm, params = load(args.quiet, *checked)
    load_s = time.perf_counter() - begin
    with contextlib.closing(llm.stream(prompt, params)) as outputs:
        last, times = show(outputs, lambda text: None if args.json else print(text, end="", flush=True))
    assert last is not None
    report = _report(last, llm.stats(), load_s, times)
    print(json.dumps(report) if args.json else "")
    if not args.quiet:
        if not last.text and last.finish_reason == "stop":
            print("the model had nothing to add; for questions and answers: python -m engine.chat", file=sys.stderr)
        print(_summary(report), file=sys.stderr)
    if last.finish_reason == "error":
        sys.exit("error: the model's output is not a number: there is no answer; --check-tensors looks at the weights")
    return 0


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
    parts = {key: stats[key] for key in ("prefix_tree_depth", "flash", "compute_s_per_token")}
    cache = output.cache_report | {"num_cached_tokens": output.num_cached_tokens} | parts
    memory = {key: stats[key] for key in ("weights_bytes", "peak_rss_bytes", "kv_shared_bytes")}
    memory |= {f"kv_{key}_bytes": cache[f"{key}_bytes"] for key in ("resident", "full", "total", "peak", "cold")}
    prompt_tokens = len(output.prompt_token_ids)
    return {
        "text": output.text, "token_ids": output.token_ids, "prompt_tokens": prompt_tokens,
        "completion_tokens": len(output.token_ids), "finish_reason": output.finish_reason,
        "timings": {"load_s": load_s} | rates(times, prompt_tokens), "memory": memory, "cache": cache}  # fmt: skip


def _summary(report: dict[str, Any]) -> str:
    """The report in a line."""
    cache = report["cache"]
    flash = cache["flash"] or {}
    figures = report | report["timings"] | report["memory"] | cache | {"flash": len(flash)}
    figures |= {f"flash_{key}": value for key, value in flash.items()}
    figures["kv_share"] = figures["kv_resident_bytes"] / max(figures["kv_full_bytes"], 1)
    if flash and flash["hits"] and cache["compute_s_per_token"]:
        figures["compute_s"] = cache["compute_s_per_token"] * cache["page_size"]
        figures["read_s"] = flash["read_seconds"] / flash["hits"]
    return words("generate", "summary", figures)


if __name__ == "__main__":
    run(main)
