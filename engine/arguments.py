"""argparse for people who come from other engines: a flag or command nobody knows is answered with the one that does
it here, or with why there is none (no torch)."""

import argparse
import difflib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

# What people type who come from llama.cpp, vLLM, SGLang, LightLLM and mlx-lm: flags and what they are called here, or
# why there is none; commands.
FOREIGN: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("foreign.json").read_text("utf-8"))


class Parser(argparse.ArgumentParser):
    """Flags must be spelled out (an abbreviation would change its meaning when a flag is added); unknown ones are
    answered before a missing one is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        args = sys.argv[1:] if args is None else list(args)
        for arg in args:
            if arg == "--":
                break
            if arg.startswith("-") and " " not in arg and (answer := self._answer(arg.partition("=")[0])):
                self.error(answer)
        return super().parse_known_args(args, namespace)

    def _answer(self, flag: str) -> str | None:
        """What to say of a flag that this parser does not have; None for those it has, for values, and for no idea."""
        known = self._option_string_actions
        spelled = flag.replace("_", "-")
        if flag in known:
            return None
        if use := spelled if spelled in known else FOREIGN["flags"].get(spelled):
            return f"unrecognized argument {flag}: {f'use {use}' if use.startswith('-') else use}"
        if not flag.startswith("--"):
            return None  # short flags joined, a negative number, or what argparse itself refuses
        near = difflib.get_close_matches(spelled, list(known), n=1, cutoff=0.7)
        return f"unrecognized argument {flag}: did you mean {near[0]}?" if near else None

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n{self.prog} --help lists the flags\n")


def command_hint(name: str, commands: Iterable[str]) -> str:
    """One line about a command that is none of `commands`."""
    if name.startswith("-"):
        return f"error: the command comes first, as isotherm generate {name} ..."
    near = difflib.get_close_matches(name, sorted(commands), n=1, cutoff=0.6)
    answer = FOREIGN["commands"].get(name) or (f"did you mean {near[0]}?" if near else None)
    return f"error: unknown command {name!r}" + (f": {answer}" if answer else "")
