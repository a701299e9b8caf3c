"""`isotherm completion bash|zsh`: a completion script; `tools.make_completion` makes them (no torch).

isotherm completion bash > ~/.local/share/bash-completion/completions/isotherm
isotherm completion zsh > "${fpath[1]}/_isotherm"
"""

import argparse
from pathlib import Path

from engine.arguments import Parser


def parser() -> argparse.ArgumentParser:
    parser = Parser(prog="isotherm completion", description="Print a completion script for a shell.")
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that will read it")
    return parser


def main(argv: list[str] | None = None) -> int:
    shell = parser().parse_args(argv).shell
    print(Path(__file__).with_name(f"completion.{shell}").read_text("utf-8"), end="")
    return 0
