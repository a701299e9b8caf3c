"""What kinds of tokens there are in a text, and what the cache keeps of each (no torch).

Each token belongs to one class: in prose by what it looks like, in Python by what `tokenize` says of its characters.
"""

from __future__ import annotations

import io
import keyword
import math
import tokenize
import warnings
from collections import Counter
from typing import Any

import numpy as np

_FUNCTION_WORDS = """
    a about after all also am an and any are as at be been before being but by can could did do does for from had
    has have he her him his how i if in into is it its may me might more most must my no nor not of off on one only
    or our out over own shall she should so some such than that the their them then there these they this those to
    too under until up upon us very was we were what when where which while who whom why will with would you your
"""
STRUCTURE = ("brackets", "indentation", "keywords", "operators")
NAMES = ("identifiers", "literals")
_BRACKETS = frozenset("()[]{}")


def classes(pieces: list[str]) -> list[str]:
    """The class of each token of a text; pieces: the tokens' texts."""
    found, before = [], " "
    for piece in pieces:
        found.append(_class(piece, before))
        before = piece[-1:] or before
    return found


def _class(piece: str, before: str) -> str:
    """before: the character in front of it."""
    word = piece.strip()
    if not piece:
        return "control and partial characters"
    if not word:
        return "newlines" if "\n" in piece else "spaces"
    if word.isdigit():
        return "digits"
    if not any(letter.isalnum() for letter in word):
        return "punctuation" if word.isascii() else "symbols"
    if not piece[0].isspace() and before.isalpha():
        return "parts of words"
    if word.lower() in _FUNCTION_WORDS.split():
        return "function words"
    if word[0].isupper():
        return "capitalised words"
    return "other words"


def code_classes(pieces: list[str]) -> list[str]:
    """The class of each token of Python source: the one that most of its characters have, spaces apart. What follows
    a place where the source cannot be read is "not read"."""
    text = "".join(pieces)
    kinds = _kinds(text)
    found, end = [], 0
    for piece in pieces:
        start, end = end, end + len(piece)
        mine = Counter(kind for kind, letter in zip(kinds[start:end], piece, strict=True) if not letter.isspace())
        if mine:
            found.append(mine.most_common(1)[0][0])
        elif not piece:
            found.append("control and partial characters")
        else:  # of what is all space, what ends it says most
            found.append(kinds[end - 1] if kinds[end - 1] in ("indentation", "newlines") else "spaces")
    return found


def _kinds(text: str) -> list[str]:
    """Of each character."""
    lines = io.StringIO(text, newline="\n").readlines()
    starts = np.cumsum([0, *map(len, lines)]).tolist()
    kinds = ["not read"] * len(text)
    at = 0  # all before it is read

    def fill(end: int, kind: str) -> None:
        nonlocal at
        for i in range(at, min(end, len(text))):
            kinds[i] = kind
        at = max(at, end)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for token in tokenize.generate_tokens(iter([*lines, ""]).__next__):
                start, end = (starts[min(row - 1, len(lines))] + column for row, column in (token.start, token.end))
                fill(start, "indentation" if at in starts else "spaces")
                fill(end, _kind(token))
    except (tokenize.TokenError, SyntaxError, StopIteration):
        pass  # a text may end, or an answer go, where no Python does; the rest says that it was not read
    return kinds


def _kind(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.OP:
        return "brackets" if token.string in _BRACKETS else "operators"
    if token.type == tokenize.NAME:
        return "keywords" if keyword.iskeyword(token.string) else "identifiers"
    if token.type in (tokenize.NEWLINE, tokenize.NL):
        return "newlines"
    if token.type in (tokenize.INDENT, tokenize.DEDENT):
        return "indentation"
    return "comments" if token.type == tokenize.COMMENT else "literals"


def table(
    kinds: list[str], lifts: np.ndarray, scores: np.ndarray, bits: np.ndarray, exact_bits: int,
    recalled: np.ndarray | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each class, the one with the largest mean lift first; all arrays [tokens]; lifts: `Record.far_lifts`.
    Left out are the tokens that have none, and the first one: queries leave there what they need nowhere, a hundred
    times an even share, whatever it is."""
    names = np.where(_counted(lifts), kinds, "")
    found = sorted({*names.tolist()} - {""})
    rows = [_row(name, names == name, lifts, scores, bits, exact_bits, recalled) for name in found]
    return sorted(rows, key=lambda row: -row["mean_lift"])


def groups(
    kinds: list[str], lifts: np.ndarray, scores: np.ndarray, bits: np.ndarray, exact_bits: int,
    recalled: np.ndarray | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Structure and names of source code, as rows of `table`; none for what there is not."""
    rows = []
    for name, members in (("structure", STRUCTURE), ("names", NAMES)):
        chosen = np.isin(kinds, members) & _counted(lifts)
        if chosen.any():
            rows.append(_row(name, chosen, lifts, scores, bits, exact_bits, recalled))
    return rows


def _counted(lifts: np.ndarray) -> np.ndarray:
    counted: np.ndarray = ~np.isnan(lifts) & (np.arange(len(lifts)) > 0)
    return counted


def _row(
    name: str, chosen: np.ndarray, lifts: np.ndarray, scores: np.ndarray, bits: np.ndarray, exact_bits: int,
    recalled: np.ndarray | None,
) -> dict[str, Any]:  # fmt: skip
    known = chosen & ~np.isnan(scores)
    return {
        "class": name,
        "tokens": int(chosen.sum()),
        "mean_lift": float(lifts[chosen].mean()),
        "median_lift": float(np.median(lifts[chosen])),
        "lift_se": float(lifts[chosen].std(ddof=1) / np.sqrt(chosen.sum())) if chosen.sum() > 1 else None,
        "mean_score": float(scores[known].mean()) if known.any() else None,
        "mean_bits": float(bits[chosen].mean()),
        "share_exact": float((bits[chosen] == exact_bits).mean()),
        "share_recalled": None if recalled is None else float(recalled[chosen].mean()),
    }


def compared(rows: list[dict[str, Any]]) -> str:
    """What `groups` found, in a sentence or two."""
    if len(rows) < 2:
        return "The text has not both: brackets, indentation, keywords or operators, and identifiers or literals."
    structure, names = rows
    ratio = structure["mean_lift"] / max(names["mean_lift"], 1e-9)
    error = math.hypot(structure["lift_se"] or 0.0, names["lift_se"] or 0.0)
    apart = abs(structure["mean_lift"] - names["mean_lift"]) > 2 * error
    attended = f"{ratio:.2f} times the attention of names" if apart else "as much attention as names, within two errors"
    bits = f"{structure['mean_bits']:.2f} bits against {names['mean_bits']:.2f}"
    exact = f"{structure['share_exact']:.1%} against {names['share_exact']:.1%} in exact pages"
    found = f"A token of structure gets {attended}; it is kept at {bits}, {exact}."
    if structure["share_recalled"] is not None:
        found += f" Read exact from copies: {structure['share_recalled']:.1%} against {names['share_recalled']:.1%}."
    return found
