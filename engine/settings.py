"""Settings in frozen dataclasses: what their fields accept, and the flags that some of them have (no torch).

Both stand in flags.json, by class and field. A field must be `one_of` some values, an `integer` or a `number` from the
least to the greatest, a text that `matches` a pattern, or, where its metavar is JSON, "auto" or a mapping; `words` say
it where these do not. One with a `help` is a flag, with more `names` than --the-field-name where there are some.
"""

import argparse
import contextlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from models.errors import ConfigError, shown


class UnreadableError(ConfigError, argparse.ArgumentTypeError):
    """What a text cannot be read as, in words that argparse shows for a flag."""


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str | int) -> int:
    """Bytes of "64MiB", "8GB", "1.5g" or a plain number. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]i?|)b?\s*", str(text).lower())
    if match is None:
        raise UnreadableError(f"a size is a number with a unit, as 64MiB or 8GB; got {shown(text)}")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_json_object(text: str) -> dict[str, Any] | str:
    """A JSON object given on the command line, or "auto". Raises ConfigError."""
    with contextlib.suppress(ValueError, RecursionError):
        value: dict[str, Any] | str = text if text == "auto" else json.loads(text)
        if value == text or isinstance(value, dict):
            return value
    wanted = 'auto or a JSON object is wanted, as {"rope_type": "linear", "factor": 2}'
    raise UnreadableError(f"{wanted}; got {shown(text)}")


_TABLE: dict[str, dict[str, dict[str, Any]]] = json.loads(Path(__file__).with_name("flags.json").read_text("utf-8"))
# By the first word of a field's annotation, or by its metavar.
_PARSERS: dict[str, Callable[[str], Any]] = {
    "int": int, "float": float, "bool": bool, "str": str, "SIZE": parse_size, "JSON": parse_json_object}  # fmt: skip


def flags(settings: type[Any], defaults: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields that are flags: by their names, what argparse is to know. One without a default leaves no attribute
    where it is not given."""
    found = {}
    for name, row in _TABLE[settings.__name__].items():
        if "help" in row:
            field = settings.__dataclass_fields__[name]
            metavar = row.get("metavar", name.rsplit("_", 1)[-1].upper())
            parse = _PARSERS.get(metavar) or _PARSERS[field.type.partition(" ")[0]]
            takes = {"action": "store_true"} if parse is bool else {"type": parse, "metavar": metavar}
            words = row["help"].replace("%(default)s", str(defaults.get(name, field.default)))
            names = " ".join([f"--{name.replace('_', '-')}", *row.get("names", [])])
            found[names] = {"dest": name, "default": defaults.get(name, argparse.SUPPRESS), "help": words, **takes}
    return found


def check(settings: Any, error: type[ValueError]) -> None:
    """Raise the error, with wanted and got, for a field that the table does not accept; None is, if its type has it."""
    for name, row in _TABLE[type(settings).__name__].items():
        value = getattr(settings, name)
        fits, words = _fits(row, value)
        if not fits and not (value is None and "None" in settings.__dataclass_fields__[name].type):
            raise error(f"{name} must be {row.get('words', words)}, got {shown(value)}")


def _fits(row: dict[str, Any], value: Any) -> tuple[bool, str]:
    """Whether the value is what the row accepts, and what that is."""
    if "one_of" in row:
        *others, last = row["one_of"]
        same = any(value == choice and type(value) is type(choice) for choice in row["one_of"])
        return same, f"{', '.join(map(str, others))} or {last}"
    if "matches" in row:
        return isinstance(value, str) and re.fullmatch(row["matches"], value, re.DOTALL) is not None, ""
    if row.get("metavar") == "JSON":
        return value == "auto" or isinstance(value, Mapping), ""
    kind, types = ("an integer", [int]) if "integer" in row else ("a number", [int, float])
    least, greatest = row.get("integer") or row["number"]
    # Written as "accept only if", so that NaN is refused.
    return type(value) in types and least <= value <= greatest, f"{kind} from {least} to {greatest}"
