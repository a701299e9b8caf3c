"""What the commands share: flags from dataclass fields, and errors as exit codes instead of tracebacks (no torch)."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from engine.errors import RequestError, TokenizerError
from engine.signals import exit_at_once
from memory.errors import CapacityError
from models.errors import ConfigError, ModelFormatError

# The most specific class first; 0 is success, 2 also argparse's own, 130 and 143 end by SIGINT and SIGTERM.
EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (ModelFormatError, 3),
    (ConfigError, 3),
    (TokenizerError, 3),
    (RequestError, 2),
    (CapacityError, 4),
    (ModuleNotFoundError, 1),
    (KeyboardInterrupt, 130),
    (BrokenPipeError, 141),
    (OSError, 1),  # as a full disk under stdout
)


def add_flags(parser: argparse._ActionsContainer, config: type[Any]) -> None:
    """A flag for every field of the dataclass that `engine.config.flag` made; absent flags leave no attribute."""
    for field in dataclasses.fields(config):
        if field.metadata:
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                *field.metadata["names"],
                dest=field.name,
                type=_argument(field.metadata["parse"]),
                default=argparse.SUPPRESS,
                metavar=field.metadata["metavar"] or field.name.rsplit("_", 1)[-1].upper(),
                help=field.metadata["help"].replace("%(default)s", str(field.default)),
            )


def given(args: argparse.Namespace, config: type[Any]) -> dict[str, Any]:
    """The fields of the dataclass that were given on the command line."""
    names = {field.name for field in dataclasses.fields(config)}
    return {key: value for key, value in vars(args).items() if key in names}


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    convert.__name__ = parse.__name__  # argparse names it in "invalid int value"
    return convert


def run(main: Callable[[list[str] | None], int], argv: list[str] | None = None) -> NoReturn:
    """Run a command to its exit code: one line on stderr for a known error, none for Ctrl-C, SIGTERM, a closed pipe."""
    exit_at_once()
    if sys.stdout is None:  # closed by the caller, who wants no output
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it stays open as long as the process
    with contextlib.suppress(AttributeError):  # a stream of somebody else's
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = main(argv)
        sys.stdout.flush()
    except tuple(kind for kind, _ in EXIT_CODES) as error:
        code = next(number for kind, number in EXIT_CODES if isinstance(error, kind))
        if isinstance(error, OSError):
            # The interpreter flushes stdout once more at exit; let that go nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, KeyboardInterrupt | BrokenPipeError):
            print(f"error: {error}", file=sys.stderr)
    sys.exit(code)
