"""The text of a run in a terminal, tinted as the HTML is (256 colours)."""

from __future__ import annotations

import os
from typing import TextIO

import numpy as np

from tools.report_charts import tier
from tools.report_html import lift_level
from tools.report_record import Record

_SHADES = ("", *(f"38;5;16;48;5;{shade}" for shade in (231, 195, 159, 153, 117, 111, 75, 39)))  # black on light blue
_MARKS = {8: "4", 4: "", 3: "3", 2: "9"}  # underlined, plain, italic, struck through
_EXACT = "1;4"  # bold and underlined
# What a terminal would act on, as the signs that stand for it.
_CONTROLS = (
    {i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"} | {127: 0x2421} | dict.fromkeys(range(128, 160), 63)
)


def wants_colour(stream: TextIO, when: str) -> bool:
    """when: auto, always or never; NO_COLOR (no-color.org) has the last word but over always."""
    return when == "always" or (when == "auto" and not os.environ.get("NO_COLOR") and stream.isatty())


def text(record: Record, colour: bool) -> str:
    """The whole text; with colour, each token with its tint and its page's mark."""
    if not colour:
        return "".join(record.pieces)
    shades, bits = lift_level(record.lifts.mean(0)), record.bits
    return "".join(
        _painted(piece, _codes(int(shade), int(kind), record.exact_bits))
        for piece, shade, kind in zip(record.pieces, shades, bits, strict=True)
    )


def legend(record: Record) -> str:
    """One line for the tints, one for the marks that there are."""
    shades = lift_level(np.array([0.06, 0.4, 1.0, 2.6, 9.0])).tolist()
    names = ("0.06", "0.4", "1, an even share", "2.6", "8 and more")
    tints = " ".join(_painted(f" {name} ", _SHADES[shade]) for name, shade in zip(names, shades, strict=True))
    present = [kind for kind in (record.exact_bits, 8, 4, 3, 2) if kind in record.bits]
    marks = " ".join(_painted(tier(kind, record.exact_bits), _codes(0, kind, record.exact_bits)) for kind in present)
    return f"lift of the attention: {tints}\nbits of the page: {marks}"


def _codes(shade: int, bits: int, exact_bits: int) -> str:
    return ";".join(filter(None, (_SHADES[shade], _EXACT if bits == exact_bits else _MARKS[bits])))


def _painted(piece: str, codes: str) -> str:
    """Line by line, so that no line's end is painted to the terminal's edge."""
    piece = piece.translate(_CONTROLS)
    return "\n".join(f"\x1b[{codes}m{part}\x1b[0m" if codes and part else part for part in piece.split("\n"))
