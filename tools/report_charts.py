"""Charts of a run as inline SVG: shapes only, stretched to any width; what is to be read stands in HTML around them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tools.report_record import Record, Step

_HEIGHT = 100
COLD_HITS = 0.15  # above it, `generate` and `doctor` advise a lower --recall


def size(count: float) -> str:
    """Bytes as a person reads them."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def charts(record: Record, kv_budget: float) -> str:
    """All of them, as figures."""
    steps = record.steps
    found = [_pages(record, steps), _bytes(steps, kv_budget), _moves(steps)]
    if any(step.cold_hit_rate for step in steps):
        found.append(_hits(steps))
    return "\n".join(found)


def _pages(record: Record, steps: list[Step]) -> str:
    formats = [bits for bits in (record.exact_bits, 8, 4, 3, 2) if any(step.pages.get(bits) for step in steps)]
    most = max(sum(step.pages.values()) for step in steps)
    shapes, floor, keys = [], [0.0] * len(steps), []
    for bits in formats:
        roof = [low + step.pages.get(bits, 0) for low, step in zip(floor, steps, strict=True)]
        shapes.append(f'<path class="f{bits if bits < record.exact_bits else 16}" d="{_band(floor, roof, most)}"/>')
        keys.append((f"f{min(bits, 16)}", f"{tier(bits, record.exact_bits)}: {steps[-1].pages.get(bits, 0)}"))
        floor = roof
    words = "Pages by format, from the bottom up; the numbers are those at the end."
    return _figure("Pages", words, keys, shapes, steps, f"{most} pages")


def _bytes(steps: list[Step], kv_budget: float) -> str:
    budget = [kv_budget * step.full_bytes for step in steps]
    resident = [float(step.resident_bytes) for step in steps]
    full = [float(step.full_bytes) for step in steps]
    most = max(*full, *resident)
    lines = [("l3", full, "exact cache of the same tokens"), ("l2", budget, f"budget, {kv_budget:g} of it")]
    lines.append(("l1", resident, "resident"))
    shapes = [f'<path class="line {name}" d="{_line(values, most)}"/>' for name, values, _ in lines]
    keys = [(f"line {name}", f"{words}: {size(values[-1])}") for name, values, words in lines]
    return _figure("Memory against the budget", "Bytes of the request's pages.", keys, shapes, steps, size(most))


def _moves(steps: list[Step]) -> str:
    moves = [float(step.moves) for step in steps]
    most = max(*moves, 1.0)
    shapes = [f'<path class="f8" d="{_band([0.0] * len(moves), moves, most)}"/>']
    words = f"Pages that went down a format in each step; {int(sum(moves))} in all."
    return _figure("Moves", words, [], shapes, steps, f"{int(most)} in a step")


def _hits(steps: list[Step]) -> str:
    rates = [step.cold_hit_rate or 0.0 for step in steps]
    shapes = [f'<path class="line l2" d="{_line([COLD_HITS] * len(rates), 1)}"/>']
    shapes.append(f'<path class="line l1" d="{_line(rates, 1)}"/>')
    keys = [("line l1", f"cold hits: {rates[-1]:.0%}"), ("line l2", f"advice above {COLD_HITS:.0%}")]
    words = "Of the tokens attended exactly, those whose copies were read while the query waited."
    return _figure("Cold hits", words, keys, shapes, steps, "100 %")


def tier(bits: int, exact_bits: int) -> str:
    return "exact" if bits == exact_bits else f"{bits} bits"


def _figure(
    title: str, words: str, keys: Sequence[tuple[str, str]], shapes: list[str], steps: list[Step], top: str
) -> str:
    read = sum(step.is_prompt for step in steps)
    if read < len(steps):
        shapes.append(f'<path class="read" d="M{read} 0V{_HEIGHT}"/>')
    items = "".join(f"<li>{key(name)}{escape(text)}</li>" for name, text in keys)
    said = escape("; ".join([words, *(text for _, text in keys)]))
    return (
        f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(words)}</p>"
        f"{'<ul class=keys>' + items + '</ul>' if items else ''}</figcaption>"
        f'<div class="plot"><span class="top">{escape(top)}</span>'
        f'<svg viewBox="0 0 {len(steps)} {_HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{said}">'
        f"{''.join(shapes)}</svg></div>"
        f'<div class="axis"><span>step 1: {steps[0].tokens} tokens</span>'
        f"<span>step {len(steps)}: {steps[-1].tokens} tokens</span></div></figure>"
    )


def key(name: str) -> str:
    """A sample of what a class of shapes looks like, for a legend."""
    shape = '<path d="M0 5H22"' if name.startswith("line") else '<path d="M0 0H22V10H0Z"'
    return f'<svg class="key" viewBox="0 0 22 10" aria-hidden="true">{shape} class="{name}"/></svg>'


def _points(values: Sequence[float], most: float) -> list[tuple[int, int, float]]:
    """(begin, end, y) of each step."""
    return [(i, i + 1, round(_HEIGHT * (1 - value / most), 2)) for i, value in enumerate(values)]


def _line(values: Sequence[float], most: float) -> str:
    parts = [f"V{y:g}H{end}" if begin else f"M0 {y:g}H{end}" for begin, end, y in _points(values, most)]
    return "".join(parts)


def _band(floor: Sequence[float], roof: Sequence[float], most: float) -> str:
    back = "".join(f"V{y:g}H{begin}" for begin, _, y in reversed(_points(floor, most)))
    return f"{_line(roof, most)}{back}Z"
