"""`isotherm completion bash|zsh`: a completion script that shtab makes from the commands' own parsers (no torch).

isotherm completion bash > ~/.local/share/bash-completion/completions/isotherm
isotherm completion zsh > "${fpath[1]}/_isotherm"
"""

from __future__ import annotations

import argparse
import importlib

from engine.arguments import Parser

# What is completed behind a flag, by its destination; behind others nothing is.
_WORDS = {"dtype": ("auto", "float32", "bfloat16", "float16"), "device": ("auto", "cpu", "cuda"),
          "backend": ("auto", "torch", "triton"), "page_size": ("16", "32", "64")}  # fmt: skip
_MODELS = '_isotherm_models() { compgen -d -- "$1"; compgen -W "$(ls "${ISOTHERM_MODELS:-/none}" 2>&-)" -- "$1"; }'


def parser() -> argparse.ArgumentParser:
    parser = Parser(prog="isotherm completion", description="Print a completion script for a shell.")
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that will read it")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        import shtab
    except ImportError:
        raise ModuleNotFoundError("completion needs the package shtab: pip install 'isotherm[completion]'") from None
    from engine.__main__ import COMMANDS

    ways = dict.fromkeys(("file", "tokenizer", "chat_template"), shtab.FILE)
    ways["model"] = {"bash": "_isotherm_models", "zsh": "_files -/"}
    isotherm = argparse.ArgumentParser(prog="isotherm")
    commands = isotherm.add_subparsers()
    for name, text in COMMANDS.items():
        command = importlib.import_module(f"engine.{name}").parser()
        commands.add_parser(name, help=text, parents=[command], add_help=False)
        for action in command._actions:
            action.choices = action.choices or _WORDS.get(action.dest)
            if action.dest in ways:
                action.complete = ways[action.dest]
    print(shtab.complete(isotherm, args.shell, preamble=_MODELS if args.shell == "bash" else ""))
    return 0
