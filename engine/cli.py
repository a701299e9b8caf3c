"""What the commands share: their flags, and errors as exit codes instead of tracebacks (no torch)."""

import argparse
import contextlib
import difflib
import itertools
import json
import os
import pkgutil
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from engine import origins, strangers
from engine.config import EngineConfig, RequestOutput, SamplingParams
from engine.errors import RequestError, TokenizerError
from engine.settings import flags
from engine.signals import exit_at_once, raise_exceptions
from memory.errors import CapacityError
from models.errors import ConfigError, ModelFormatError
from models.resolve import resolve

# commands: how they are called and described, and their flags by group. loading: the flags of those that load a model
# and let it answer, which have defaults for it.
_TABLE: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("commands.json").read_text("utf-8"))
COMMANDS = _TABLE["commands"]
_SETTINGS: dict[str, type[Any]] = {"answer": SamplingParams, "engine": EngineConfig}  # whose flags a group begins with

# What people type who come from llama.cpp, vLLM, SGLang, LightLLM and mlx-lm: flags and what they are called here, or
# why there is none; commands.
FOREIGN: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("foreign.json").read_text("utf-8"))

# What generation_config.json may set, where no flag does.
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

# 0 is success, 2 also argparse's own, 130 and 143 end by SIGINT and SIGTERM. Where two fit, the first counts; the last
# is, among others, a full disk under stdout.
EXIT_CODES: dict[type[BaseException], int] = {
    ModelFormatError: 3, ConfigError: 3, TokenizerError: 3, RequestError: 2, CapacityError: 4, KeyboardInterrupt: 130,
    BrokenPipeError: 141, ModuleNotFoundError: 1, OSError: 1}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Unknown flags are answered before a missing one is."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        args = sys.argv[1:] if args is None else list(args)
        for flag in (arg.partition("=")[0] for arg in itertools.takewhile("--".__ne__, args) if " " not in arg):
            if flag.startswith("-") and flag not in self._option_string_actions and (answer := self._answer(flag)):
                self.error(f"unrecognized argument {flag}: {answer}")
        return super().parse_known_args(args, namespace)

    def _answer(self, flag: str) -> str:
        """What to say of a flag that this parser does not have; nothing of values, and where there is no idea."""
        known, spelled = self._option_string_actions, flag.replace("_", "-")
        use = spelled if spelled in known else FOREIGN["flags"].get(spelled, "")
        if use or not flag.startswith("--"):  # short flags joined, a negative number, or what argparse itself refuses
            return f"use {use}" if use.startswith("-") else use
        return did_you_mean(spelled, known, 0.7)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n{self.prog} --help lists the flags\n")


def parser(command: str) -> Parser:
    """A command's, as commands.json has it; of the group prompt one flag may be given."""
    row = COMMANDS[command]
    # An abbreviation would change its meaning when a flag is added.
    parser = Parser(prog=row["prog"], description=row["description"], allow_abbrev=False)
    for title, table in (row["flags"] | (_TABLE["loading"] if "defaults" in row else {})).items():
        group: argparse._ActionsContainer = parser.add_argument_group(title)
        if title == "prompt":
            group = group.add_mutually_exclusive_group()
        settings = flags(_SETTINGS[title], row["defaults"]) if title in _SETTINGS else {}
        for names, options in (settings | table).items():
            group.add_argument(*names.split(), **options)
    return parser


def command_hint(name: str, commands: Iterable[str]) -> str:
    """One line about a command that is none of `commands`."""
    if name.startswith("-"):
        return f"error: the command comes first, as isotherm generate {name} ..."
    answer = FOREIGN["commands"].get(name) or did_you_mean(name, commands)
    return f"error: unknown command {name!r}" + (f": {answer}" if answer else "")


def main_of(command: str) -> Callable[[list[str] | None], int]:
    """What runs a command. Raises ModuleNotFoundError where another package stands in the way of its own."""
    home, _, _ = COMMANDS[command]["main"].partition(".")
    for problem in strangers(origins(home)):
        raise ModuleNotFoundError(f"{problem}; call it from another directory")
    found: Callable[[list[str] | None], int] = pkgutil.resolve_name(COMMANDS[command]["main"])
    return found


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The question, of the known name that is nearest; nothing if none is near."""
    return "".join(f"did you mean {near}?" for near in difflib.get_close_matches(name, sorted(known), 1, cutoff))


def run_settings(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of SamplingParams and of EngineConfig that were given, checked before the seconds that torch takes to
    import and a model to load."""
    sampling = given(args, SamplingParams) | {"stop": tuple(args.stop)}
    SamplingParams(**sampling)
    # --seed is the answer's; without one, every run is another.
    settings = given(args, EngineConfig) | {"seed": secrets.randbits(62)}
    EngineConfig(**settings)
    resolve(args.model)
    return sampling, settings


def load(quiet: bool, sampling: dict[str, Any], settings: dict[str, Any]) -> tuple[Any, SamplingParams]:
    """The `LLM`, and the sampling flags over the checkpoint's generation_config.json, which is said."""
    from engine.llm import LLM

    llm = LLM(progress=not quiet, **settings)
    raise_exceptions()
    found = llm.generation_config | ({"temperature": 0.0} if llm.generation_config.get("do_sample") is False else {})
    defaults = {key: found[key] for key in _SAMPLING_DEFAULTS if found.get(key) is not None and key not in sampling}
    if defaults and not quiet:
        print("generation_config.json: " + ", ".join(f"{k} {v}" for k, v in defaults.items()), file=sys.stderr)
    return llm, SamplingParams(**(defaults | sampling))


def show(outputs: Iterable[RequestOutput], write: Callable[[str], Any]) -> tuple[RequestOutput | None, list[float]]:
    """Write the text as it grows; returns the last output and the times of the call and of each token."""
    times = [time.perf_counter()]
    shown, last = 0, None
    for last in outputs:
        times.append(time.perf_counter())
        write(last.text[shown:])
        shown = len(last.text)
    return last, times


def rates(times: list[float], prompt_tokens: int) -> dict[str, Any]:
    """What the times that `show` returned say, where there is a token: ttft_s, prefill_tok_s, decode_tok_s."""
    ttft = times[1] - times[0]
    decode = (len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else None  # of the tokens after the first
    return {"ttft_s": ttft, "prefill_tok_s": prompt_tokens / ttft, "decode_tok_s": decode}


def words(command: str, part: str, figures: dict[str, Any]) -> str:
    """The texts of a part of the command in commands.json whose figures are above what stands beside them. A text may
    have a_mb or a_gb of a figure a_bytes, and a_ms of a_s."""
    numbers = {key: value for key, value in figures.items() if isinstance(value, int | float)}
    for unit, other, factor in (("_bytes", "_mb", 1e-6), ("_bytes", "_gb", 1e-9), ("_s", "_ms", 1e3)):
        figures |= {key.replace(unit, other): value * factor for key, value in numbers.items() if unit in key}
    return "".join(text.format(**figures) for key, most, text in COMMANDS[command][part] if numbers.get(key, 0) > most)


def given(args: argparse.Namespace, config: type[Any]) -> dict[str, Any]:
    """The fields of the dataclass that were given on the command line."""
    return {key: value for key, value in vars(args).items() if key in config.__dataclass_fields__}


def run(main: Callable[[list[str] | None], int], argv: list[str] | None = None) -> NoReturn:
    """Run a command to its exit code: one line on stderr for a known error, none for Ctrl-C, SIGTERM, a closed pipe."""
    exit_at_once()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the caller closed it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it stays open as long as the process
    with contextlib.suppress(AttributeError):  # a stream of somebody else's
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = main(argv)
        sys.stdout.flush()
    except tuple(EXIT_CODES) as error:
        code = next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
        if isinstance(error, OSError):
            # The interpreter flushes stdout once more at exit; let that go nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, KeyboardInterrupt | BrokenPipeError):
            inactive = isinstance(error, ModuleNotFoundError) and os.path.isdir(".venv")
            hint = ": activate the environment first, with `source .venv/bin/activate`" if inactive else ""
            print(f"error: {error}{hint}", file=sys.stderr)
    sys.exit(code)
