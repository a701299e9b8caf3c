"""Settings in frozen dataclasses: what their fields accept, and the flags that some of them have (no torch).

What a flag is called beside --the-field-name, its help and its metavar stand in flags.json, by class and field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import shown
from models.errors import ConfigError

Accepts = tuple[str, Callable[[Any], bool]]  # in words, and the test

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str | int) -> int:
    """Bytes of "64MiB", "8GB", "1.5g" or a plain number. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]i?|)b?\s*", str(text).lower())
    if match is None:
        raise ConfigError(f"a size is a number with a unit, as 64MiB or 8GB; got {shown(text)}")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_json_object(text: str) -> dict[str, Any]:
    """A JSON object given on the command line. Raises ConfigError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f'a JSON object is wanted, as {{"rope_type": "linear", "factor": 2}}; got {shown(text)}')
    return value


class Flag(NamedTuple):
    """A field that is also a flag. One whose `parse` is bool takes no value."""

    name: str  # of the field
    default: Any
    parse: Callable[[str], Any]
    help: str
    names: list[str]
    metavar: str


# By the first word of a field's annotation, or by its metavar.
_PARSERS: dict[str, Callable[[str], Any]] = {
    "int": int, "float": float, "bool": bool, "str": str, "SIZE": parse_size, "JSON": parse_json_object,
}  # fmt: skip


def flags(settings: type[Any]) -> list[Flag]:
    """The flags of a dataclass, in the order of its fields."""
    table = json.loads(Path(__file__).with_name("flags.json").read_text("utf-8"))[settings.__name__]
    found = []
    for field in fields(settings):
        if (row := table.get(field.name)) is not None:
            metavar = row.get("metavar", field.name.rsplit("_", 1)[-1].upper())
            parse = _PARSERS.get(metavar) or _PARSERS[field.type.partition(" ")[0]]
            found.append(Flag(field.name, field.default, parse, row["help"], row.get("names", []), metavar))
    return found


def check(settings: Any, accepted: Mapping[str, Accepts], error: type[ValueError]) -> None:
    """Raise the error, with wanted and got, for a field that is not as accepted; None is where it is the default."""
    for name, (wanted, accepts) in accepted.items():
        value = getattr(settings, name)
        default = settings.__dataclass_fields__[name].default
        if not accepts(value) and not (value is None and default is None):
            raise error(f"{name} must be {wanted}, got {shown(value)}")


def one_of(*choices: Any) -> Accepts:
    text = " or ".join(filter(None, (", ".join(map(str, choices[:-1])), str(choices[-1]))))
    return text, lambda value: any(value == choice and type(value) is type(choice) for choice in choices)


def integer(least: int, greatest: int) -> Accepts:
    return f"an integer from {least} to {greatest}", lambda value: type(value) is int and least <= value <= greatest


def number(least: float, greatest: float, words: str | None = None) -> Accepts:
    # Written as "accept only if", so that NaN is refused.
    return (
        f"a number {words or f'from {least} to {greatest}'}",
        lambda value: type(value) in (int, float) and least <= value <= greatest,
    )
