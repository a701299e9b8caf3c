"""`isotherm cache ls|verify|clear`: what prefixes left on flash (no torch)."""

import json
from pathlib import Path

from engine.cli import parser, run
from models.errors import ConfigError, require_config
from tools.facts import lines


def main(argv: list[str] | None = None) -> int:
    """1 where verify finds damage."""
    args = parser("cache").parse_args(argv)
    from memory.flash import StoreRefused, clear, inspect  # needs fcntl, which the parser does not

    require_config(bool(args.flash_cache_dir), "--flash-cache-dir needs the name of a directory")
    directory = Path(args.flash_cache_dir).expanduser()
    try:
        rows = inspect(directory, verify=args.action == "verify")
        if args.action == "clear":
            gone = clear(directory)
            rows = [row for row in rows if row["name"] in gone]
    except (StoreRefused, OSError) as error:
        raise ConfigError(str(error)) from None
    if args.json:
        print(json.dumps({"rows": rows}))
    else:
        named = {row.pop("name"): row for row in rows}
        print(*lines({"deleted" if args.action == "clear" else "files": named}), sep="\n")
    return int(args.action == "verify" and any(row["damaged"] for row in rows))


if __name__ == "__main__":
    run(main)
