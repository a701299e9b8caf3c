"""Bits by importance with calibrated codes: `python -m tools.evaluate bits`.

    calibration text --> what an error in K or V costs --> transforms, levels (tools/transform_codes.py)
    text to choose on --> what it costs in each tier of tokens --> bits of each component; the mix of tiers
    other text ---------> KL of what is predicted from K and V as they are read back

Codes are of one token, layer and side: K before RoPE, or V, of all KV heads together. RoPE comes back behind them, by
the model's own table. The tokens of a layer are ranked by a signal, the same for K and V, and stand in tiers: so many
of the highest in the first, ... Each tier of a layer has a number of bits of its own.

What an error costs: of an error e in K or V of one old token the KL of the predictions to the exact ones is e' F e / 2,
where F is the mean of g g', g the gradient of the log-probability of a token drawn from the prediction. It holds the
queries, their positions and the output projection, and what the layers behind make of it; so errors in all layers, in K
and in V are in the same unit, and one water level gives the bits of all of them.

The first four tokens, the newest 64 and the 64 that are predicted are exact. The choice stays as it is for the 64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine import LLM
from engine.progress import Progress
from kernels import reference
from memory.importance import Scorer
from models.errors import ConfigError
from tools.evaluate_attention import PAGE, RECENT, SINKS, Differentiable, Sample, causal, forward, record
from tools.evaluate_importance import standard_error
from tools.transform_codes import Tables, Transform, fit, stored_bytes, water_fill

STEPS, EVERY = 64, 16
MIXES = ((0.05, 0.30, 0.65), (0.10, 0.25, 0.65), (0.02, 0.08, 0.30, 0.60))  # of the old tokens, to choose among
BY = ("trained", "attention", "random", "oracle of squares")
ENGINE = (4, 3, 2)  # bits of the engine's own codes, to compare with
_EXACT_BITS = 16  # of a number in the exact window
_DRAWN = 2  # tokens drawn at each position, to measure what errors cost
_POINTS = 7  # of a window, at which this is measured
_THINNED = 16  # of so many vectors one fits the levels


@dataclass(frozen=True)
class Past:
    """K before RoPE and V of a window, [T, Hkv * D] float32 for each layer: pairs."""

    pairs: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, llm: LLM, rotated: Sequence[tuple[Tensor, Tensor]]) -> Past:
        """From K and V [Hkv, T, D] as attention reads them."""
        cos, sin = llm._model.rope[: rotated[0][0].shape[1], None].chunk(2, dim=-1)
        size = (cos.square() + sin.square()).repeat(1, 1, 2)  # 1, but where a scaling of RoPE has an amplitude
        return cls([
            ((reference._rotate(k.transpose(0, 1), cos, -sin) / size).flatten(1), v.transpose(0, 1).flatten(1))
            for k, v in rotated
        ])  # fmt: skip


def _rotated(llm: LLM, keys: Tensor) -> Tensor:
    """Keys [T, Hkv * D] of the positions from 0 on, with RoPE."""
    cos, sin = llm._model.rope[: len(keys), None].chunk(2, dim=-1)
    found: Tensor = reference._rotate(keys.unflatten(1, (-1, llm._model.config.head_dim)), cos, sin)
    return found.flatten(1)


def _attended(llm: LLM, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the queries q [B, STEPS, Hq, D], the newest, to k and v [B, T, Hkv, D]: [B, STEPS, Hq, D]."""
    heads, length = llm._model.config.num_kv_heads, k.shape[1]
    grouped = q.unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    visible = torch.ones(STEPS, length, dtype=torch.bool).tril(length - STEPS).repeat(grouped.shape[2] // STEPS, 1)
    out = scaled_dot_product_attention(grouped, k.transpose(1, 2), v.transpose(1, 2), visible)
    by_query: Tensor = out.unflatten(2, (-1, STEPS)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return by_query


def gradients(
    llm: LLM, past: Past, window: Sequence[int], start: int, drawn: int, generator: torch.Generator
) -> Iterator[list[Tensor]]:
    """How the log-probability of the tokens that the model itself would say at start .. start + STEPS changes with the
    old K (before RoPE) and V: [n, Hkv * D] for each layer and side, K first; as often as they are to be drawn."""
    model = copy.copy(llm._model)
    model.ops = Differentiable(model.ops)
    size = model.config.head_dim
    leaves = [x[:start].clone().requires_grad_() for pair in past.pairs for x in pair]

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor) -> Tensor:
        cos, sin = cos_sin[:, None].chunk(2, dim=-1)
        q, k = (reference._rotate(x, cos, sin) for x in (q, k))
        old_k, old_v = _rotated(llm, leaves[2 * layer]), leaves[2 * layer + 1]
        all_k, all_v = (torch.cat([x.unflatten(1, (-1, size)), y]) for x, y in ((old_k, k), (old_v, v)))
        return _attended(llm, q[None], all_k[None], all_v[None])[0]

    with torch.enable_grad():
        positions = torch.arange(start, start + STEPS)
        hidden = model.forward(torch.tensor(window[start : start + STEPS]), positions, attention)
        log_p = model.exact_logits(hidden).log_softmax(-1)
        for i in range(drawn):
            said = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
            found = torch.autograd.grad(log_p.gather(1, said).sum(), leaves, retain_graph=i + 1 < drawn)
            yield [x[SINKS : start - RECENT] for x in found]


@dataclass(frozen=True)
class Calibration:
    """The transforms of K and V of each layer, in turn, and the levels of all their components."""

    transforms: list[Transform]
    tables: Tables

    @property
    def costs(self) -> Tensor:
        """[2 * layers, C] float64"""
        return torch.stack([transform.costs for transform in self.transforms])

    @property
    def nbytes(self) -> int:
        each = sum(x.nbytes for t in self.transforms for x in (t.mean, t.analysis, t.synthesis))
        return each + sum(levels.nbytes for levels in self.tables.levels)


def calibrate(llm: LLM, windows: Sequence[list[int]]) -> Calibration:
    """From windows of text: mean, covariance and cost of errors of K and V in each layer, and the levels."""
    config, generator = llm._model.config, torch.Generator().manual_seed(0)
    sides, width = 2 * config.num_layers, config.num_kv_heads * config.head_dim
    sums = torch.zeros(sides, width, dtype=torch.float64)
    squares, costs = torch.zeros(2, sides, width, width, dtype=torch.float64)
    some: list[list[Tensor]] = [[] for _ in range(sides)]
    count = drawn = 0
    for window in Progress(windows, desc="Calibrating", unit="window", shown=True):
        rotated: list[tuple[Tensor, Tensor]] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, kept: list[tuple[Tensor, Tensor]] = rotated) -> Tensor:
            kept.append((k.clone(), v.clone()))
            return causal(q, k, v)

        forward(llm, window, attend)
        past = Past.of(llm, rotated)
        count += len(window) - SINKS
        for i, x in enumerate(x[SINKS:] for pair in past.pairs for x in pair):
            sums[i] += x.sum(0, dtype=torch.float64)
            squares[i] += x.double().T @ x.double()
            some[i].append(x[::_THINNED].clone())
        first, last = len(window) // 4, len(window) - STEPS
        for point in range(_POINTS):
            start = (first + (last - first) * point // (_POINTS - 1)) // PAGE * PAGE
            for found in gradients(llm, past, window, start, _DRAWN, generator):
                costs += torch.stack([x.T @ x for x in found])
                drawn += len(found[0])
    means = sums / count
    covariances = squares / count - means[:, :, None] * means[:, None]
    transforms = [fit(*each) for each in zip(means, covariances, costs / drawn, strict=True)]
    components = [t.forward(torch.cat(x)).flatten() for t, x in zip(transforms, some, strict=True)]
    return Calibration(transforms, Tables.of(torch.cat(components)))


@dataclass(frozen=True)
class Plan:
    """fractions of the old tokens in each tier, highest first; bits [2 * layers, tiers, C] of their components."""

    fractions: tuple[float, ...]
    bits: Tensor

    def tiers(self, ranks: Tensor) -> Tensor:
        """The tier of each of n tokens by its rank [..., n] int64, 0 the highest."""
        ends = torch.tensor(self.fractions[:-1]).cumsum(0).mul(ranks.shape[-1]).long()
        return torch.bucketize(ranks, ends, right=True)

    def nbytes(self, old: int) -> int:
        """Of the codes of so many tokens, and of the map that says which tier each is in."""
        counts = self.tiers(torch.arange(old)).bincount(minlength=len(self.fractions)).tolist()
        by_layer = self.bits.sum(-1).unflatten(0, (-1, 2)).sum(1).tolist()
        tier_map = stored_bytes([old], [_map_bits(self.fractions)])
        return sum(stored_bytes(counts, bits) + tier_map for bits in by_layer)


def _map_bits(fractions: Sequence[float]) -> int:
    return (len(fractions) - 1).bit_length()


def exact_bytes(llm: LLM, tokens: float) -> float:
    """Of the exact K and V of so many tokens, in bfloat16."""
    config = llm._model.config
    return tokens * 2 * config.num_layers * config.num_kv_heads * config.head_dim * _EXACT_BITS / 8


def share(llm: LLM, coded: float, start: int) -> float:
    """Of the exact bytes, what is held with `coded` bytes for the old tokens of a block: mean over its steps."""
    own = (STEPS + 1) / 2
    return (coded + exact_bytes(llm, SINKS + RECENT + own)) / exact_bytes(llm, start + own)


def bits_within(llm: LLM, wanted: float, start: int, fractions: Sequence[float]) -> float:
    """Bits of codes that there are for all components of a token, so that `share` is at most what is wanted."""
    layers, old = llm._model.config.num_layers, start - RECENT - SINKS
    total = (wanted - share(llm, 0, start)) * exact_bytes(llm, start + (STEPS + 1) / 2) * 8
    partial = 8 * (len(fractions) + 1) * layers  # bytes that are not full
    return (total - partial) / old - layers * _map_bits(fractions)


def plan(
    calibration: Calibration, fractions: tuple[float, ...], factors: Tensor, bits: float, alike: bool = False
) -> Plan:
    """So many bits a token of all layers, where errors cost most. factors [2 * layers, tiers]: what they cost in a
    tier, to the mean. alike: every layer gets the same bits, and K as many as V less a bit."""
    costs = calibration.costs[:, None] * factors[..., None]
    prices = torch.tensor(fractions, dtype=torch.float64)[:, None].expand(costs.shape)
    if not alike:
        return Plan(fractions, water_fill(costs, calibration.tables.distortion, prices, bits))
    each, width = bits / len(costs), costs.shape[-1]
    budgets = [each + width * part for part in (-0.5, 0.5)] * (len(costs) // 2)
    parts = (
        water_fill(cost, calibration.tables.distortion, price, budget)
        for cost, price, budget in zip(costs, prices, budgets, strict=True)
    )
    return Plan(fractions, torch.stack(list(parts)))


@dataclass(frozen=True)
class Read:
    """A window: where its blocks start, its past, K and V as attention reads them, and the ranks of its old tokens
    [layers, n] by signal and block."""

    window: list[int]
    starts: list[int]
    past: Past
    rotated: list[tuple[Tensor, Tensor]]
    ranks: dict[tuple[str, int], Tensor]


def read(llm: LLM, scorer: Scorer, window: list[int], blocks: int) -> Read:
    layers = range(llm._model.config.num_layers)
    starts = [len(window) - STEPS * (blocks - i) for i in range(blocks)]
    rotated: list[tuple[Tensor, Tensor]] = []
    samples = [x for x in record(llm, window, layers, starts, STEPS, EVERY, rotated) if x.layer is not None]
    weights, random = scorer.packed().detach(), torch.Generator().manual_seed(0)
    signals: dict[str, Callable[[Sample], Tensor]] = {
        "trained": lambda x: reference.score(
            x.features.flatten(0, 1), x.ages.repeat(len(x.features)), weights
        ).view_as(x.mass).mean(0),
        "attention": lambda x: x.features[..., 1].mean(0),
        "random": lambda x: torch.rand(x.mass.shape[1], generator=random),
        "oracle of squares": lambda x: x.squares.sum(0),
    }  # fmt: skip
    ranks = {
        (name, start): torch.stack([signals[name](x) for x in samples if x.start == start]).argsort(1, True).argsort(1)
        for name, start in product(BY, starts)
    }
    return Read(window, starts, Past.of(llm, rotated), rotated, ranks)


def tier_factors(
    llm: LLM, calibration: Calibration, reads: Sequence[Read], mixes: Sequence[tuple[float, ...]], rest: Tensor
) -> list[Tensor]:
    """What errors cost in each tier of each mix, to the mean of all old tokens: [2 * layers, tiers], tokens ranked by
    the trained score. rest [2 * layers, C]: what is left of the variance of each component."""
    generator = torch.Generator().manual_seed(1)
    sums = [torch.zeros(len(rest), len(mix), dtype=torch.float64) for mix in mixes]
    counts = [torch.zeros(len(mix), dtype=torch.float64) for mix in mixes]
    for one in reads:
        for start in Progress(one.starts, desc="Weighing", unit="block", shown=True):
            cost = torch.zeros(len(rest), start - RECENT - SINKS)
            for found in gradients(llm, one.past, one.window, start, _DRAWN, generator):
                for i, (x, t) in enumerate(zip(found, calibration.transforms, strict=True)):
                    cost[i] += (x @ t.synthesis.T).square_() @ rest[i].float()
            ranks = one.ranks["trained", start].repeat_interleave(2, 0)  # K and V alike
            for mix, total, count in zip(mixes, sums, counts, strict=True):
                tiers = Plan(mix, torch.empty(0)).tiers(ranks)
                total.scatter_add_(1, tiers, cost.double())
                count += tiers[0].bincount(minlength=len(mix))
    return [total / count / (total.sum(1, True) / count.sum()) for total, count in zip(sums, counts, strict=True)]


@dataclass(frozen=True)
class Row:
    """A cache to compare: a plan with the signal that ranks for it, or the engine's codes of so many bits."""

    name: str
    plan: Plan | int
    signal: str = "random"  # of one tier none matters


def engine_codes(x: Tensor, bits: int, is_key: bool) -> tuple[Tensor, float]:
    """K or V [Hkv, T, D] as the engine's pages of so many bits give it back, and its bytes a token."""
    pages = x.unflatten(1, (-1, PAGE)).flatten(0, 1)
    codes, records = reference.compress(pages, bits, is_key)
    back = reference.decompress(codes, records, bits, is_key, x[:, :PAGE]).view_as(x)
    return back, (codes.nbytes + records.nbytes) / x.shape[1]


def divergences(llm: LLM, calibration: Calibration, one: Read, rows: Sequence[Row]) -> Tensor:
    """KL in nats a token of each row and block of a window, to the exact cache: [rows, blocks] float32."""
    plans = list({id(row.plan): row.plan for row in rows}.values())
    counts = [1 if isinstance(each, int) else len(each.fractions) for each in plans]
    first = dict(zip(map(id, plans), torch.tensor([1, *counts]).cumsum(0).tolist(), strict=False))  # 0: exact
    model, versions = llm._model, 1 + len(rows)
    size = model.config.head_dim

    def as_read(layer: int) -> Tensor:
        """[1 + all tiers, 2, T, Hkv * D]: K, rotated, and V, exact and of each plan and tier."""
        pair = calibration.transforms[2 * layer : 2 * layer + 2]
        components = [t.forward(x) for t, x in zip(pair, one.past.pairs[layer], strict=True)]
        exact = [x.transpose(0, 1).flatten(1) for x in one.rotated[layer]]
        found = [torch.stack(exact)]
        for each in plans:
            if isinstance(each, int):
                coded = (engine_codes(x, each, not i)[0] for i, x in enumerate(one.rotated[layer]))
                found.append(torch.stack([x.transpose(0, 1).flatten(1) for x in coded]))
                continue
            for bits in each.bits[2 * layer : 2 * layer + 2].unbind(1):
                coded = (calibration.tables.code(x, b) for x, b in zip(components, bits, strict=True))
                k, v = (t.inverse(x) for t, x in zip(pair, coded, strict=True))
                found.append(torch.stack([_rotated(llm, k), v]))
        return torch.stack(found)

    def chosen(layer: int, start: int) -> Tensor:
        """Which of them each version has of each token: [versions, start]."""
        which = torch.zeros(versions, start, dtype=torch.long)
        for mine, row in zip(which[1:, SINKS : start - RECENT], rows, strict=True):
            tiers = 0 if isinstance(row.plan, int) else row.plan.tiers(one.ranks[row.signal, start][layer])
            mine[:] = first[id(row.plan)] + tiers
        return which

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor) -> Tensor:
        cos, sin = cos_sin[:, None].chunk(2, dim=-1)
        q, k = (reference._rotate(x, cos, sin) for x in (q, k))
        past, out = as_read(layer), []
        blocks = (x.unflatten(0, (-1, versions, STEPS)) for x in (q, k, v))
        for start, queries, *new in zip(one.starts, *blocks, strict=True):
            which, tokens = chosen(layer, start), torch.arange(start)
            old = (past[which, side, tokens].unflatten(2, (-1, size)) for side in (0, 1))
            out.append(_attended(llm, queries, *(torch.cat(both, 1) for both in zip(old, new, strict=True))))
        return torch.cat(out).flatten(0, 1)

    ids = torch.tensor([one.window[start : start + STEPS] for start in one.starts])
    positions = torch.tensor(one.starts)[:, None] + torch.arange(STEPS)
    ids, positions = (x.repeat(1, versions).flatten() for x in (ids, positions))
    with torch.no_grad():
        hidden = model.forward(ids, positions, attention)
        found = []
        for block in hidden.split(versions * STEPS):
            log_p = model.exact_logits(block).log_softmax(-1).unflatten(0, (versions, STEPS))
            found.append((log_p[0].exp() * (log_p[0] - log_p[1:])).sum(-1).mean(1))
    return torch.stack(found, 1)


def planned(
    llm: LLM, calibration: Calibration, reads: Sequence[Read], wanted: float
) -> tuple[list[Row], list[dict[str, Any]]]:
    """What is compared at such a share of the bytes, and what each mix of tiers costs where one is chosen."""
    start = reads[0].starts[0]
    bits = bits_within(llm, wanted, start, (1.0,))
    even = torch.ones(len(calibration.transforms), 1, dtype=torch.float64)
    uniform, alike = (plan(calibration, (1.0,), even, bits, alike) for alike in (False, True))
    rest = calibration.tables.distortion[uniform.bits[:, 0]]
    factors = tier_factors(llm, calibration, reads, MIXES, rest)
    plans = [
        plan(calibration, mix, each, bits_within(llm, wanted, start, mix))
        for mix, each in zip(MIXES, factors, strict=True)
    ]
    tried = [Row("trained", each, "trained") for each in plans]
    kl = torch.cat([divergences(llm, calibration, one, tried) for one in reads], 1).mean(1).tolist()
    best, mixes = plans[kl.index(min(kl))], []
    for each, value in zip(plans, kl, strict=True):
        means = each.bits.double().mean(-1).unflatten(0, (-1, 2)).mean(0)
        mixes.append({
            "wanted": wanted, "mix": " / ".join(f"{100 * x:g} %" for x in each.fractions), "kl": value,
            "bits_k": means[0].tolist(), "bits_v": means[1].tolist(), "chosen": each is best,
        })  # fmt: skip
    found = [Row(f"{by}, {wanted:g}", best, by) for by in BY]
    found += [Row(f"uniform, {wanted:g}", uniform), Row(f"uniform, all layers alike, {wanted:g}", alike)]
    return found, mixes


def rows(
    llm: LLM, scorer: Scorer, texts: dict[str, list[int]], fitted: Sequence[list[int]], choosing: Sequence[list[int]],
    wanted: Sequence[float], blocks: int,
) -> dict[str, Any]:  # fmt: skip
    """A row for each share of the bytes, signal and text. texts: a window of each; fitted: the windows that the codes
    are made of; choosing: those that the bits of tiers and the mix are chosen on."""
    start = len(choosing[0]) - STEPS * blocks  # of the first block, where the exact window is the largest share
    if lacking := [of for of in wanted if bits_within(llm, of, start, (1.0,)) <= 0]:
        raise ConfigError(f"--bytes {lacking[0]:g}: the exact window alone is {share(llm, 0, start):.3f} of the bytes")
    calibration = calibrate(llm, fitted)
    reads = [read(llm, scorer, window, blocks) for window in choosing]
    compared = [Row(f"engine, {bits} bits", bits) for bits in ENGINE]
    mixes: list[dict[str, Any]] = []
    uniform_of: dict[str, str] = {}
    for of in wanted:
        new, tried = planned(llm, calibration, reads, of)
        uniform_of |= dict.fromkeys((row.name for row in new), f"uniform, {of:g}")
        compared, mixes = compared + new, mixes + tried
    found = []
    for text, window in Progress(texts.items(), desc="Reading", unit="text", shown=True):
        one = read(llm, scorer, window, blocks)
        kl_of = dict(zip((row.name for row in compared), divergences(llm, calibration, one, compared), strict=True))
        for row in compared:
            mine = kl_of[row.name].double().numpy()
            less = mine - kl_of[uniform_of[row.name]].double().numpy() if row.name in uniform_of else None
            found.append({
                "signal": row.name, "text": text, "kl": mine.mean(), "se": standard_error(mine),
                "kl_above_uniform": None if less is None else less.mean(),
                "its_se": None if less is None else standard_error(less), "bytes": _bytes(llm, one, row),
            })  # fmt: skip
    return {
        "rows": found,
        "mixes": mixes,
        "calibration_bytes": calibration.nbytes,
        "exact_window": (SINKS + RECENT + (STEPS + 1) / 2) / (start + (STEPS + 1) / 2),
    }


def _bytes(llm: LLM, one: Read, row: Row) -> float:
    """Share of the exact bytes in all, mean over the blocks."""
    shares = []
    for start in one.starts:
        old = start - RECENT - SINKS
        if isinstance(row.plan, int):
            sides = (engine_codes(x, row.plan, not i)[1] for i, x in enumerate(one.rotated[0]))
            coded = old * sum(sides) * llm._model.config.num_layers
        else:
            coded = row.plan.nbytes(old)
        shares.append(share(llm, coded, start))
    return sum(shares) / len(shares)
