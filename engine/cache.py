"""`isotherm cache ls|verify|clear`: what prefixes left on flash (no torch)."""

import argparse
import json
from pathlib import Path

from engine.arguments import Parser
from models.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    parser = Parser(prog="isotherm cache", description="List, check or delete what --flash-cache-dir has.")
    parser.add_argument("action", choices=("ls", "verify", "clear"), help="verify also reads every page")
    parser.add_argument("--flash-cache-dir", type=lambda text: Path(text).expanduser(), required=True, metavar="DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str] | None = None) -> int:
    """1 where verify finds damage."""
    args = parser().parse_args(argv)
    from memory.flash import StoreRefused, clear, inspect  # needs fcntl, which the parser does not

    try:
        rows = inspect(args.flash_cache_dir, verify=args.action == "verify")
        if args.action == "clear":
            gone = clear(args.flash_cache_dir)
            rows = [row for row in rows if row["name"] in gone]
    except StoreRefused as error:
        raise ConfigError(str(error)) from None
    if args.json:
        print(json.dumps({"rows": rows}))
    else:
        print(f"{'deleted' if args.action == 'clear' else 'file':19}  {'size':>10}  version  records  damaged")
        for row in rows:
            size = f"{row['bytes'] / 1e6:.1f} MB"
            print(f"{row['name']}  {size:>10}  {row['version'] or '-':>7}  {row['records']:>7}  {row['damaged']:>7}")
    return int(args.action == "verify" and any(row["damaged"] for row in rows))
