"""The report of a run as one HTML file that needs nothing else: no network, no script but its own, none at all for the
averaged view.

What a prompt says cannot become markup: all text is escaped, and the policy in the file's head allows only the style
and the script whose hashes it has. No `style` attributes, for the same reason.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from tools.report_charts import charts, tier
from tools.report_charts import size as in_bytes
from tools.report_record import Record

_HERE = Path(__file__).parent
LEVELS = 9
_TURNS = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # of Unicode's bidi rules
# Characters that HTML cannot have, or reads as others.
_CONTROLS = {0: "\N{REPLACEMENT CHARACTER}", 13: "&#13;"}


def level(values: np.ndarray) -> np.ndarray:
    """Shades 0 to LEVELS - 1 of values in [0, 1]; NaN, of what has no score yet, has none."""
    shades: np.ndarray = np.minimum(np.nan_to_num(values, nan=0.0) * LEVELS, LEVELS - 1).astype(int)
    return shades


def lift_level(lifts: np.ndarray) -> np.ndarray:
    """An even share, a lift of 1, is in the middle."""
    return level(lifts / (1 + lifts))


def render(record: Record, facts: dict[str, str], data: dict[str, Any], kv_budget: float) -> str:
    """The file. facts: what the header says, by name; data: `classes` and `code`, rows of report_classes."""
    style, script = (_read(name) for name in ("report.css", "report.js"))
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'"
    layers = record.lifts.shape[0]
    size = record.report["page_size"]
    views = [lift_level(record.lifts.mean(0)), level(record.scores), *map(lift_level, record.lifts)]
    names = [f"attention, mean of {layers} layers", "page score", *(f"attention, layer {i + 1}" for i in range(layers))]
    options = "".join(f"<option>{name}</option>" for name in names)
    levels = json.dumps(["".join(map(str, shades.tolist())) for shades in views])
    header = "".join(f"<div><dt>{escape(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="referrer" content="no-referrer">
<title>What the cache keeps</title>
<style>{style}</style></head>
<body>
<header><h1>What the cache keeps</h1>
<dl>{header}</dl></header>
<main>
<section><h2>Over time</h2>
<p>A step reads a chunk of the prompt or writes one token; left of the upright line the prompt is read.</p>
<div class="charts">{charts(record, kv_budget)}</div>
<details><summary>All steps as a table</summary><div class="scroll">{_steps(record)}</div></details></section>
<section><h2>Kinds of tokens</h2>
<p>Attention by queries that come at least {size} tokens later, a page, most attended first; a lift of 1 is an even
share. Left out: the first token, and the newest ones, which no such query has seen. Pages go down whole, so bits
differ between kinds only as far as their pages do.</p>
<div class="scroll">{_classes(data["classes"])}</div></section>
{_code(data["code"])}
<section><h2>The text</h2>
{_legend(record)}
<p class="control" hidden><label for="view">Tint by </label><select id="view">{options}</select></p>
<noscript><p class="soft">The tint is the mean of all layers; single layers need JavaScript.</p></noscript>
<div id="text">{_pages(record, views[0])}</div></section>
</main>
<script type="application/json" id="levels">{levels}</script>
<script>{script}</script>
</body></html>
"""


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def _text(text: str) -> str:
    return escape(text).translate(_CONTROLS)


def _legend(record: Record) -> str:
    present = [bits for bits in (record.exact_bits, 8, 4, 3, 2) if bits in record.bits]
    words = {8: "8 bits", 4: "4 bits", 3: "3 bits", 2: "2 bits, no line", record.exact_bits: "exact"}
    marks = " ".join(f'<i class="b{min(bits, 16)}">{words[bits]}</i>' for bits in present)
    shades = ((0, "0.06"), (2, "0.4"), (4, "1, an even share"), (6, "2.6"), (8, "8 and more"))
    tints = " ".join(f'<i class="a{shade}">&nbsp;{lift}&nbsp;</i>' for shade, lift in shades)
    return (
        f'<div class="legend"><p>Tint, lift of the attention: {tints}</p><p>Line below, bits of the page: {marks}</p>'
        '<p class="soft">Scores of pages run from 0 to 1, and the lowest go down first; tinted by score, none is 0. '
        '<i class="n"></i> a new line, <i class="e"></i> a token without text of its own, <i class="c"></i> one that '
        "would turn the direction of writing; "
        "the upright bar in the text is where the answer begins.</p></div>"
    )


def _pages(record: Record, shades: np.ndarray) -> str:
    lifts = record.lifts.mean(0)
    found = []
    for number, page in enumerate(record.pages, 1):
        tokens = []
        for i in range(page.first, page.first + page.tokens):
            piece = record.pieces[i]
            marks = f"a{shades[i]}{_marks(piece, i == record.num_prompt_tokens)}"
            tokens.append(f'<i class="{marks}" title="lift {lifts[i]:.3g}">{_text(piece)}</i>')
        score = "being filled" if page.score is None else f"score {page.score:.2f}"
        bar = "" if page.score is None else _bar(page.score)
        found.append(
            f'<section class="page b{min(page.bits, 16)}"><div class="head">'
            f"<b>{tier(page.bits, record.exact_bits)}</b> "
            f"<div>page {number}, tokens {page.first + 1} to {page.first + page.tokens}</div> "
            f'<div>{bar}{score}</div></div><p class="text" dir="auto">{"".join(tokens)}</p></section>'
        )
    return "\n".join(found)


def _marks(piece: str, begins: bool) -> str:
    """Classes beside the tint, of what cannot be seen in the text."""
    turns = any(letter in _TURNS for letter in piece)
    kind = " c" if turns else " e" if not piece else " n" if "\n" in piece else ""
    return kind + (" answer" if begins else "")


def _bar(share: float) -> str:
    return (
        '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="rest" width="100" height="10"/><rect width="{100 * share:.1f}" height="10"/></svg>'
    )


_HEADS = {
    "class": "kind", "tokens": "tokens", "mean_lift": "mean lift", "lift_se": "± s.e.", "median_lift": "median lift",
    "mean_score": "mean page score", "mean_bits": "mean bits", "share_exact": "in exact pages",
    "share_recalled": "read exact from copies",
}  # fmt: skip


def _classes(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "<p>The text is too short: no query comes a page behind any of its tokens.</p>"
    names = [name for name in _HEADS if any(row[name] is not None for row in rows)]
    most = max(row["mean_lift"] for row in rows) or 1.0
    body = []
    for row in rows:
        cells = [_cell(name, row[name]) for name in names]
        cells[names.index("mean_lift")] = _bar(row["mean_lift"] / most) + cells[names.index("mean_lift")]
        body.append(cells)
    return _table([_HEADS[name] for name in names], body)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.startswith("share"):
        return f"{value:.1%}"
    return f"{value:.2f}" if isinstance(value, float) else escape(str(value))


def _table(heads: list[str], body: list[list[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for cells in body)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _steps(record: Record) -> str:
    formats = [bits for bits in (record.exact_bits, 8, 4, 3, 2) if any(step.pages.get(bits) for step in record.steps)]
    heads = ["step", "reads", "tokens", *(f"pages, {tier(bits, record.exact_bits)}" for bits in formats)]
    heads += ["resident", "exact cache", "copies", "moves", "cold hits"]
    body = [
        [str(i), "prompt" if step.is_prompt else "answer", str(step.tokens),
         *(str(step.pages.get(bits, 0)) for bits in formats), in_bytes(step.resident_bytes), in_bytes(step.full_bytes),
         in_bytes(step.cold_bytes), str(step.moves), "-" if step.cold_hit_rate is None else f"{step.cold_hit_rate:.1%}"]
        for i, step in enumerate(record.steps, 1)
    ]  # fmt: skip
    return _table(heads, body)


def _code(code: dict[str, Any] | None) -> str:
    if code is None:
        return ""
    return (
        f"<section><h2>Structure against names</h2><p>{escape(code['words'])}</p>"
        f'<div class="scroll">{_classes(code["rows"])}</div></section>'
    )
