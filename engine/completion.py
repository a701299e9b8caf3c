"""`isotherm completion bash|zsh`: a completion script made from the commands' own parsers (no torch).

isotherm completion bash > ~/.local/share/bash-completion/completions/isotherm
isotherm completion zsh > "${fpath[1]}/_isotherm"
"""

from __future__ import annotations

import argparse
import importlib

from engine.arguments import Parser

# What is completed behind a flag with this placeholder, or this name.
_FILES = {"--file", "--tokenizer", "--save", "--load"}
_VALUES = {"--dtype": "auto float32 bfloat16 float16", "--device": "auto cpu cuda", "--backend": "auto torch triton",
           "--page-size": "16 32 64"}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = Parser(prog="isotherm completion", description="Print a completion script for a shell.")
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that will read it")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    from engine.__main__ import COMMANDS

    parsers = {name: importlib.import_module(f"engine.{name}").parser() for name in COMMANDS}
    print((_bash if args.shell == "bash" else _zsh)(COMMANDS, parsers))
    return 0


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.help != argparse.SUPPRESS]


def _kind(action: argparse.Action) -> str:
    """What follows the flag: "" nothing, "models", "files", "value", or the words it can be."""
    if action.nargs == 0:
        return ""
    if action.choices:
        return " ".join(map(str, action.choices))
    for flag in action.option_strings:
        if flag == "--model":
            return "models"
        if flag in _FILES:
            return "files"
        if flag in _VALUES:
            return _VALUES[flag]
    return "value"


_BASH = """# bash completion for isotherm; made by: isotherm completion bash
_isotherm() {{
    local cur prev command
    cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} command=${{COMP_WORDS[1]}}
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=( $(compgen -W "{commands}" -- "$cur") )
        return
    fi
    case "$command $prev" in
{values}
    esac
    case "$command" in
{flags}
    esac
}}
complete -F _isotherm isotherm"""
_ACTIONS = {
    "models": 'COMPREPLY=( $(compgen -d -- "$cur") $(compgen -W "$(ls "${ISOTHERM_MODELS:-/none}" 2>&-)" -- "$cur") )',
    "files": 'COMPREPLY=( $(compgen -f -- "$cur") )',
    "value": "",
}


def _bash(commands: dict[str, str], parsers: dict[str, argparse.ArgumentParser]) -> str:
    values, flags = [], []
    for name, parser in parsers.items():
        words: list[str] = []
        for action in _actions(parser):
            words += action.option_strings
            kind = _kind(action)
            if not action.option_strings:
                words += kind.split() if kind != "value" else []
            elif kind:
                reply = _ACTIONS.get(kind, f'COMPREPLY=( $(compgen -W "{kind}" -- "$cur") )')
                patterns = "|".join(f'"{name} {flag}"' for flag in action.option_strings)
                values.append(f"        {patterns}) {reply + '; ' if reply else ''}return ;;")
        flags.append(f'        {name}) COMPREPLY=( $(compgen -W "{" ".join(words)}" -- "$cur") ) ;;')
    return _BASH.format(commands=" ".join(commands), values="\n".join(values), flags="\n".join(flags))


_ZSH = """#compdef isotherm
# zsh completion for isotherm; made by: isotherm completion zsh
_isotherm() {{
    local -a commands
    commands=(
{commands}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
{cases}
    esac
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _isotherm "$@"; else compdef _isotherm isotherm; fi"""


def _zsh(commands: dict[str, str], parsers: dict[str, argparse.ArgumentParser]) -> str:
    named = [f"        {_quoted(f'{name}:{text}')}" for name, text in commands.items()]
    cases = []
    for name, parser in parsers.items():
        specs = []
        for action in _actions(parser):
            kind = _kind(action)
            after = {"models": ":model:_files -/", "files": ":file:_files", "value": ":value:", "": ""}.get(
                kind, f":value:({kind})"
            )
            text = (action.help or "").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
            text = text.replace("%(default)s", str(action.default)).replace("%%", "%")
            if not action.option_strings:
                specs.append(_quoted(f"1{after}"))
            specs.extend(_quoted(f"{flag}[{text}]{after}") for flag in action.option_strings)
        cases.append(f"        {name}) _arguments {' '.join(specs)} ;;")
    return _ZSH.format(commands="\n".join(named), cases="\n".join(cases))


def _quoted(text: str) -> str:
    """For a shell, in single quotes."""
    return "'" + text.replace("'", "'\\''") + "'"
