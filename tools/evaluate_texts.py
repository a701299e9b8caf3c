"""The texts that quality is measured on, cut into windows (no torch).

    file   | window 0 | window 1 | window 2 | rest |     windows of `context` tokens side by side, taken in turn from
             ^ 0        ^ context                        the files until enough tokens are scored

A window has one token more than `context` where the text and the model's context go on: the target of its last scored
position. So `context - score_from` positions of every window are scored. Where the model's tokenizer has a BOS, every
window begins with it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import RequestError
from models.errors import ConfigError

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

# `--text stdlib`: the sources of these modules of the running Python, one behind the other.
STDLIB = ("argparse", "tarfile", "typing", "inspect", "doctest", "difflib")


def read_text(name: str) -> str:
    """The text of a UTF-8 file, of `stdlib`, or of a module of Python, as `module:ast`. Raises RequestError."""
    if name == "stdlib" and not Path(name).is_file():
        return "\n".join(_source(module) for module in STDLIB)
    if name.startswith("module:") and not Path(name).is_file():
        return _source(name.removeprefix("module:"))
    return _read(Path(name))


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or not (spec.origin or "").endswith(".py"):
        raise RequestError(f"this Python has no source of its module {module}; name a file instead")
    return _read(Path(str(spec.origin)))


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}") from None


def first_windows(name: str, tokenizer: Tokenizer, context: int, count: int) -> list[list[int]]:
    """So many whole windows of a text. Raises RequestError where it has fewer."""
    found = windows([name], tokenizer, context, context, 0, (context - 1) * count)
    if len(found) < count:
        raise RequestError(f"{name}: of {context} tokens, {count} windows were asked for, it has {len(found)}")
    return found


def windows(
    texts: Iterable[str], tokenizer: Tokenizer, context: int, longest: int, score_from: int, tokens: int
) -> list[list[int]]:
    """The windows, of at most `longest` tokens, that have `tokens` scored positions together, or all there are.

    texts: what `read_text` takes. Raises RequestError for a text without a whole window.
    """
    if not 0 <= score_from < context - 1:
        raise RequestError(f"need --score-from from 0 to --context - 2, got {score_from} of {context}")
    in_turn = chain.from_iterable(zip_longest(*(_cut(name, tokenizer, context, longest) for name in texts)))
    taken: list[list[int]] = []
    for window in filter(None, in_turn):  # a shorter text ends in None
        taken.append(window)
        if scored(taken, score_from) >= tokens:
            break
    return taken


def scored(taken: list[list[int]], score_from: int) -> int:
    """How many positions of the windows are scored: those from score_from on that have a token behind them."""
    return sum(len(window) - 1 - score_from for window in taken)


def _cut(name: str, tokenizer: Tokenizer, context: int, longest: int) -> list[list[int]]:
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = tokenizer.encode(read_text(name))[len(bos) :]
    step = context - len(bos)
    count = len(ids) // step
    if not count:
        raise RequestError(f"{name}: one window takes {step} tokens, the text has {len(ids)}; use a smaller --context")
    return [bos + ids[i * step : i * step + min(context + 1, longest) - len(bos)] for i in range(count)]


def check_context(context: int, model_context: int) -> int:
    """The longest window: `context` and the token after it, as far as the model goes. Raises ConfigError."""
    if context > model_context:
        raise ConfigError(f"--context {context} is more than the model's context of {model_context} tokens")
    return min(context + 1, model_context)
