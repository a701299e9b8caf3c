"""`python -m engine.generate`: complete a prompt. The text streams to stdout, everything else goes to stderr."""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports take their time
    from engine.signals import exit_at_once

    exit_at_once()

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from engine.cli import add_flags, given, run
from engine.config import EngineConfig
from engine.errors import RequestError
from engine.request import RequestOutput, SamplingParams
from engine.signals import raise_exceptions
from models.resolve import resolve

if TYPE_CHECKING:
    from engine.llm import LLM

# What generation_config.json may set, where no flag does.
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.generate", description="Complete a prompt with a Llama model."
    )
    parser.add_argument("-m", "--model", required=True, help="name or directory, as smollm2-135m or ./my-model")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", help='text to complete; "-" reads it from stdin')
    source.add_argument("-f", "--file", help='file with the text to complete; "-" is stdin')
    add_flags(parser.add_argument_group("answer"), SamplingParams)
    answer = parser.add_argument_group("ending")
    answer.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    answer.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    add_flags(parser.add_argument_group("engine"), EngineConfig)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("-q", "--quiet", action="store_true", help="nothing on stderr but errors")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    prompt = _prompt(args)
    # Checked before the seconds that torch takes to import and a model to load.
    flags = given(args, SamplingParams) | {"stop": tuple(args.stop)}
    SamplingParams(**flags)
    settings = given(args, EngineConfig)
    settings.pop("seed", None)  # the answer's seed
    EngineConfig(**settings)

    resolve(args.model)

    begin = time.perf_counter()
    from engine.llm import LLM

    llm = LLM(progress=not args.quiet, **settings)
    load_s = time.perf_counter() - begin
    raise_exceptions()
    params = _with_defaults(flags, llm, args.quiet)
    with contextlib.closing(llm.stream(prompt, params)) as outputs:
        last, times = _print(outputs, silent=args.json)
    report = _report(llm, last, load_s, times)
    if args.json:
        print(json.dumps(report))
    if not args.quiet:
        print(_summary(report), file=sys.stderr)
    return 1 if last.finish_reason == "error" else 0


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt not in (None, "-"):
        data, name = os.fsencode(args.prompt), "--prompt"
    elif args.file in (None, "-"):
        if args.file is None and args.prompt is None and sys.stdin.isatty():
            raise RequestError("no prompt: give --prompt TEXT or --file FILE, or pipe text in")
        data, name = sys.stdin.buffer.read(), "stdin"
    else:
        name = args.file
        try:
            with open(args.file, "rb") as file:
                data = file.read()
        except OSError as error:
            raise RequestError(f"{args.file}: cannot be read: {error.strerror}") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from None


def _with_defaults(flags: dict[str, Any], llm: LLM, quiet: bool) -> SamplingParams:
    """The flags over the checkpoint's generation_config.json, which is said."""
    found = {key: llm.generation_config.get(key) for key in _SAMPLING_DEFAULTS}
    defaults = {key: value for key, value in found.items() if value is not None and key not in flags}
    if llm.generation_config.get("do_sample") is False and "temperature" not in flags:
        defaults["temperature"] = 0.0
    if defaults and not quiet:
        print("generation_config.json: " + ", ".join(f"{k} {v}" for k, v in defaults.items()), file=sys.stderr)
    return SamplingParams(**(defaults | flags))


def _print(outputs: Iterator[RequestOutput], silent: bool) -> tuple[RequestOutput, list[float]]:
    """Stream the text to stdout; returns the last output and the times of the call and of each token."""
    times = [time.perf_counter()]
    shown = 0
    last = None
    for last in outputs:
        times.append(time.perf_counter())
        if not silent and len(last.text) > shown:
            sys.stdout.write(last.text[shown:])
            sys.stdout.flush()
            shown = len(last.text)
    assert last is not None
    if not silent:
        sys.stdout.write("\n")
    return last, times


def _report(llm: LLM, output: RequestOutput, load_s: float, times: list[float]) -> dict[str, Any]:
    stats = llm.stats()
    cache = output.cache_report
    ttft = times[1] - times[0]
    steps = len(times) - 2  # a token each, after the first
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(output.token_ids),
        "finish_reason": output.finish_reason,
        "timings": {
            "load_s": load_s,
            "ttft_s": ttft,
            "prefill_tok_s": len(output.prompt_token_ids) / ttft,
            "decode_tok_s": steps / (times[-1] - times[1]) if steps else None,
        },
        "memory": {
            "weights_bytes": stats["weights_bytes"],
            "kv_resident_bytes": cache["resident_bytes"],
            "kv_full_bytes": cache["full_bytes"],
            "kv_cold_bytes": stats["kv_cold_bytes"],
            "peak_rss_bytes": stats["peak_rss_bytes"],
        },
        "cache": cache | {"num_cached_tokens": output.num_cached_tokens},
    }


def _summary(report: dict[str, Any]) -> str:
    timings, memory = report["timings"], report["memory"]
    decode = f", {timings['decode_tok_s']:.1f} tok/s" if timings["decode_tok_s"] else ""
    return (
        f"Prompt: {report['prompt_tokens']} tokens, {timings['prefill_tok_s']:.1f} tok/s | "
        f"Generation: {report['completion_tokens']} tokens{decode} | "
        f"TTFT {timings['ttft_s'] * 1e3:.0f} ms | KV cache {memory['kv_resident_bytes'] / 1e6:.1f} MB | "
        f"Peak memory {memory['peak_rss_bytes'] / 1e9:.2f} GB | finish: {report['finish_reason']}"
    )


if __name__ == "__main__":
    run(main)
