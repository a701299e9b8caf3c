"""What the cache keeps of a prompt, and what the project weighs.

python -m tools.report --model M --prompt-file F --out report.html     reads the prompt, writes an answer, and shows
                                                                       the text with what was kept of each token
python -m tools.report --size                                          code lines by package; fails above the limit
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import sys
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli import run
from engine.config import EngineConfig
from engine.errors import RequestError
from models.resolve import resolve

if TYPE_CHECKING:
    from engine import LLM
    from tools.report_record import Record

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("engine", "models", "kernels", "memory")  # what the limit counts
LIMIT = 6000
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(source: str) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def sizes() -> dict[str, dict[str, int]]:
    """{package: {file: code lines}}, tests and tools too."""
    return {
        package: {
            str(path.relative_to(ROOT)): code_lines(path.read_text(encoding="utf-8"))
            for path in sorted((ROOT / package).rglob("*.py"))
        }
        for package in (*PRODUCT, "tools", "tests")
    }


def _size(as_json: bool) -> int:
    files = sizes()
    totals = {package: sum(counts.values()) for package, counts in files.items()}
    product = sum(totals[package] for package in PRODUCT)
    if as_json:
        print(json.dumps({"packages": totals, "product": product, "limit": LIMIT, "files": files}))
    else:
        print("| package | files | code lines |\n|---|---|---|")
        for package, total in totals.items():
            print(f"| {package} | {len(files[package])} | {total} |")
        print(f"engine + models + kernels + memory: {product} of at most {LIMIT} code lines")
    return int(product > LIMIT)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.report", description="What the cache keeps of a prompt, or what the project weighs.",
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--size", action="store_true", help="code lines by package, and the limit; nothing else")
    parser.add_argument("-m", "--model", help="name or directory, as smollm2-135m or ./my-model")
    parser.add_argument("-f", "--prompt-file", type=Path, metavar="FILE", help="UTF-8 text, or a conversation in JSON")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE.html", help="the report; a file that is there is replaced"
    )
    parser.add_argument(
        "--ansi", nargs="?", const="auto", choices=("auto", "always", "never"),
        help="print the text, tinted on a terminal unless NO_COLOR is set; the legend goes to stderr",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every token")
    parser.add_argument("--code", action="store_true", help="the prompt is Python (so are files that end in .py)")
    parser.add_argument("--kv-budget", type=float, default=0.31, metavar="FRACTION", help="(default: %(default)s)")
    parser.add_argument("--recall", type=float, metavar="FRACTION", help="tokens that a query reads of exact copies")
    parser.add_argument("-n", "--max-tokens", type=int, default=64, metavar="N", help="of the answer (default: 64)")
    parser.add_argument("--chunk", type=int, default=128, metavar="N", help="prompt tokens a step (default: 128)")
    parser.add_argument("--dtype", default="auto", help="of weights and the exact cache (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.size:
        return _size(args.json)
    if not (args.model and args.prompt_file and (args.out or args.ansi or args.json)):
        parser.error("give --model M --prompt-file F and --out FILE.html, --ansi or --json; or --size")
    if args.ansi and args.json:
        parser.error("--ansi and --json both print: give one of them")
    settings = {"kv_budget": args.kv_budget, "max_num_batched_tokens": args.chunk, "dtype": args.dtype}
    settings |= {name: value for name in ("recall", "threads") if (value := getattr(args, name)) is not None}
    EngineConfig(model=args.model, **settings)  # errors need not wait for the model
    if args.max_tokens < 1:
        raise RequestError(f"--max-tokens must be 1 at least, got {args.max_tokens}")
    _check_place(args.out)
    resolve(args.model)
    prompt = _prompt(args.prompt_file)
    from engine import LLM
    from tools import report_ansi, report_html
    from tools.report_record import record

    llm = LLM(args.model, progress=not args.json, **settings)
    assert llm.tokenizer is not None
    is_text = isinstance(prompt, str)
    ids = llm.tokenizer.encode(prompt) if is_text else llm.chat_template.encode(prompt)
    ends = llm._engine.eos_ids | (frozenset() if is_text else llm.chat_template.end_ids)
    try:
        result = record(llm, ids, args.max_tokens, ends)
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    data = _data(result, args.code or args.prompt_file.suffix == ".py")
    facts = _facts(llm, result, args)
    if args.out:
        _write(args.out, report_html.render(result, facts, data, args.kv_budget))
        print(f"{args.out}: written", file=sys.stderr)
    if args.json:
        print(json.dumps(_object(result, settings | {"model": args.model}, data)))
    if args.ansi:
        colour = report_ansi.wants_colour(sys.stdout, args.ansi)
        print(report_ansi.text(result, colour))
        if colour:
            print(report_ansi.legend(result), file=sys.stderr)
    return 0


def _check_place(out: Path | None) -> None:
    """Before the minutes that a run may take."""
    if out is not None and out.is_dir():
        raise RequestError(f"--out {out}: this is a directory; give a file's name, as {out / 'report.html'}")
    if out is not None and out.exists() and not out.is_file():
        raise RequestError(f"--out {out}: not a regular file")
    if out is not None and not out.absolute().parent.is_dir():
        raise RequestError(f"--out {out}: there is no directory {out.absolute().parent}")


def _prompt(file: Path) -> Any:
    """A text, or the messages of a conversation."""
    try:
        text = file.read_bytes().decode("utf-8").removesuffix("\n").removesuffix("\r")
        messages = json.loads(text) if file.suffix == ".json" else None
    except OSError as error:
        raise RequestError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{file}: not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{file}: not JSON: {error}") from None
    if messages is not None:
        return messages if isinstance(messages, list) else text
    if not text:
        raise RequestError(f"{file}: the prompt is empty")
    return text


def _write(out: Path, text: str) -> None:
    """All of it or nothing."""
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8", newline="")
        part.replace(out)
    except OSError as error:
        raise RequestError(f"--out {out}: cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def _data(record: Record, is_code: bool) -> dict[str, Any]:
    """Rows of the kinds of tokens, and for source code what is structure and what are names."""
    from tools import report_classes

    measured = (record.far_lifts, record.scores, record.bits, record.exact_bits, record.recalled)
    data: dict[str, Any] = {"classes": report_classes.table(report_classes.classes(record.pieces), *measured)}
    kinds = report_classes.code_classes(record.pieces) if is_code else []
    both = report_classes.groups(kinds, *measured) if is_code else []
    rows = [*both, *report_classes.table(kinds, *measured)] if is_code else []
    return data | {"code": {"rows": rows, "words": report_classes.compared(both)} if is_code else None}


def _facts(llm: LLM, record: Record, args: argparse.Namespace) -> dict[str, str]:
    from tools.bench import provenance
    from tools.report_charts import size

    cache, config = record.report, llm._cache.config
    resident, total, full = (cache[f"{name}_bytes"] for name in ("resident", "total", "full"))
    about = provenance()
    facts = {
        "model": args.model,
        "shape": f"{config.num_layers} layers, {config.num_kv_heads} KV heads of {config.head_dim}",
        "exact cache": f"{str(llm._model.dtype).removeprefix('torch.')}, pages of {config.page_size}",
        "--kv-budget": f"{args.kv_budget:g}",
        "--recall": f"{llm.config.recall:g}" if llm.config.recall is not None else "none",
        "prompt": f"{record.num_prompt_tokens} tokens, {args.chunk} a step",
        "answer": f"{len(record.ids) - record.num_prompt_tokens + 1} tokens, greedy",
        "resident": f"{size(resident)} = {resident / full:.3f} of {size(full)} exact",
        "with the copies": f"{size(total)} = {total / full:.3f}",
        "at most, with a chunk": size(cache["peak_bytes"]),
        "exact, compressed": f"{cache['hot_tokens']}, {cache['warm_tokens']} tokens",
        "moves": f"{cache['moves']}, by {len(record.pages)} pages",
        "attention to compressed": f"{cache['warm_mass']:.0%}",
    }
    if cache["cold_hit_rate"]:
        facts["cold hits"] = f"{cache['cold_hit_rate']:.1%}"
    return facts | {"machine": about["machine"], "commit": str(about["commit"])}


def _object(record: Record, settings: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """What --json prints."""
    scores = [page.score for page in record.pages]
    return {
        "settings": settings,
        "prompt_tokens": record.num_prompt_tokens,
        "completion_tokens": len(record.ids) - record.num_prompt_tokens + 1,
        "finish_reason": record.finish_reason,
        "cache": record.report,
        "pages": [vars(page) for page in record.pages],
        "mean_score": sum(filter(None, scores)) / max(sum(score is not None for score in scores), 1),
        "steps": [vars(step) for step in record.steps],
        "tokens": {
            "ids": record.ids,
            "text": record.pieces,
            "bits": record.bits.tolist(),
            "lift": record.lifts.mean(0).round(4).tolist(),
            "far_lift": [None if lift != lift else round(lift, 4) for lift in record.far_lifts.tolist()],
            "recalled": None if record.recalled is None else record.recalled.round(4).tolist(),
        },
        "lift_by_layer": record.lifts.round(4).tolist(),
        **data,
    }


if __name__ == "__main__":
    run(main)
