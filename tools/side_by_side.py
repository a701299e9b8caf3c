"""One long document, read with the full KV cache and with a budget: `python -m tools.side_by_side [--kv-budget 0.31]`.

Both answers are greedy and of the same weights. Says whether the texts are the same, where they part if not, and how
many bytes each cache held: resident, at most (with the chunk in flight), and in all with the host's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from engine.cli import run
from engine.errors import RequestError

ROOT = Path(__file__).parent.parent


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.side_by_side", description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", default="smollm2-135m", help="name or directory (default: %(default)s)")
    parser.add_argument("-f", "--file", type=Path, help="the document (default: this project's own documentation)")
    parser.add_argument(
        "--context", type=int, default=4096, help="tokens of the document to read (default: %(default)s)"
    )
    parser.add_argument("-n", "--max-tokens", type=int, default=64, help="tokens to generate (default: %(default)s)")
    parser.add_argument(
        "--kv-budget", type=float, default=0.31, help="fraction of the exact bytes (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    text = args.file.read_text() if args.file else documentation()
    from engine import LLM, SamplingParams

    length = args.context + args.max_tokens
    full = LLM(args.model, threads=args.threads, max_model_len=length, progress=True)
    assert full.tokenizer is not None
    tokens = full.tokenizer.encode(text)[: args.context]
    if len(tokens) < args.context:
        raise RequestError(f"the document has {len(tokens)} tokens, --context asks for {args.context}")
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, ignore_eos=True)
    result: dict[str, Any] = {"context": args.context, "kv_budget": args.kv_budget}
    answers = {}
    for name, llm in (("full", full), ("budget", full.twin(kv_budget=args.kv_budget))):
        *_, output = llm.stream(tokens, params)
        answers[name] = output.token_ids
        result[name] = {"text": output.text, **output.cache_report}
    pairs = zip(answers["full"], answers["budget"], strict=True)
    result["equal_tokens"] = next((i for i, (a, b) in enumerate(pairs) if a != b), args.max_tokens)
    if args.json:
        print(json.dumps(result))
        return 0
    same = result["equal_tokens"] == args.max_tokens
    print(f"{args.context} tokens read, {args.max_tokens} generated: ", end="")
    print("the same text" if same else f"the same text for {result['equal_tokens']} tokens")
    for name in ("full", "budget") if not same else ("full",):
        print(f"\n{name:6}  ...{result[name]['text']}")
    print("\n| cache | resident MB | of the full cache | at most MB | with the host's MB | exact tokens | compressed |")
    print("|---|---|---|---|---|---|---|")
    for name in ("full", "budget"):
        row = result[name]
        sizes = [row[key] / 1e6 for key in ("resident_bytes", "peak_bytes", "total_bytes")]
        ratio = row["resident_bytes"] / row["full_bytes"]
        tokens_by_tier = f"{row['hot_tokens']} | {row['warm_tokens']}"
        print(f"| {name} | {sizes[0]:.1f} | {ratio:.3f} | {sizes[1]:.1f} | {sizes[2]:.1f} | {tokens_by_tier} |")
    return 0


def documentation() -> str:
    """README and docs of this project, in one text."""
    return "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])


if __name__ == "__main__":
    run(main)
