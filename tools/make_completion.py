"""Writes tools/completion.bash and .zsh, which `isotherm completion` prints, from the commands' own parsers, by shtab.

python -m tools.make_completion, after a flag or a command was added or renamed (tests/test_commands.py notices)
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import shtab

from engine.cli import COMMANDS, parser

HERE = Path(__file__).resolve().parent
# What is completed behind a flag, by its destination, beside the choices of a setting; behind others nothing is.
_WAYS = {
    **dict.fromkeys(("file", "tokenizer", "chat_template", "stats"), shtab.FILE),
    "flash_cache_dir": shtab.DIRECTORY,
    "model": {"bash": "_isotherm_models", "zsh": "_files -/"},
}
_MODELS = '_isotherm_models() { compgen -d -- "$1"; compgen -W "$(ls "${ISOTHERM_MODELS:-/none}" 2>&-)" -- "$1"; }'


def script(shell: str) -> str:
    settings = json.loads((HERE.parent / "engine" / "flags.json").read_text("utf-8"))["EngineConfig"]
    choices = {name: [str(choice) for choice in row["one_of"]] for name, row in settings.items() if "one_of" in row}
    choices["device"] = ["auto", "cpu", "cuda"]
    isotherm = argparse.ArgumentParser(prog="isotherm")
    commands = isotherm.add_subparsers()
    for name in COMMANDS:
        command: Any = parser(name)
        commands.add_parser(name, help=command.description, parents=[command], add_help=False)
        for action in command._actions:
            if action.nargs != 0 and action.choices is None and action.dest in choices:
                action.choices = choices[action.dest]
            if action.dest in _WAYS:
                action.complete = _WAYS[action.dest]
    made = shtab.complete(isotherm, shell, preamble=_MODELS if shell == "bash" else "")
    return "\n".join([*(line.rstrip() for line in made.splitlines()), f"# by shtab {shtab.__version__}", ""])


def main() -> int:
    for shell in ("bash", "zsh"):
        file = HERE / f"completion.{shell}"
        file.write_text(script(shell), "utf-8")
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
