"""What the project weighs: `python -m tools.report --size` prints code lines by package and fails above the limit."""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from pathlib import Path

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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.report", description=__doc__)
    parser.add_argument("--size", action="store_true", required=True, help="code lines by package, and the limit")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every file")
    args = parser.parse_args(argv)
    files = sizes()
    totals = {package: sum(counts.values()) for package, counts in files.items()}
    product = sum(totals[package] for package in PRODUCT)
    if args.json:
        print(json.dumps({"packages": totals, "product": product, "limit": LIMIT, "files": files}))
    else:
        print("| package | files | code lines |\n|---|---|---|")
        for package, total in totals.items():
            print(f"| {package} | {len(files[package])} | {total} |")
        print(f"engine + models + kernels + memory: {product} of at most {LIMIT} code lines")
    return int(product > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
