"""What commands say of models, machines and files, for people (no torch)."""

from collections.abc import Iterator
from typing import Any


def lines(facts: dict[str, Any], indent: str = "") -> Iterator[str]:
    """Facts for people: a line a fact, indented by section."""
    words = {"True": "yes", "False": "no", "None": "-", "[]": "-"}
    for key, value in facts.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from lines(value, indent + "  ")
        else:
            said = f"{value / 1e9:.2f} GB" if key.endswith("_bytes") and value is not None else value
            yield f"{indent}{key.removesuffix('_bytes')}: {words.get(str(said), said)}"
