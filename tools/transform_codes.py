"""Transform coding: a few bits for each component of a vector, as much as it matters. No scale per vector.

    x [n, C] --- less the mean, times `analysis` ---> components of variance 1, uncorrelated
             --- bits [C] (`water_fill`) -----------> the nearest of 2^bits levels of each (`lloyd`), side by side
             --- levels, times `synthesis`, mean ---> x

An error e costs e' W e, whatever W the caller has measured. The components are the principal ones of W^1/2 x: errors
in them add, and the error of a standard deviation in component i costs `costs[i]`, of which a code of b bits leaves
`distortion[b]`. So the bits that lower the cost most are found one by one, and best by a water level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST = 8  # bits of a component
_RIDGE = 1e-2  # of the mean of the diagonal, that no direction counts as free
_LEAST = 1e-9  # of the largest cost of a component
_ROUNDS = 1000  # of fitting levels


@dataclass(frozen=True)
class Transform:
    """mean [C], analysis and synthesis [C, C], float32: x = mean + components @ synthesis; costs [C] float64, falling:
    what an error of one in each component costs."""

    mean: Tensor
    analysis: Tensor
    synthesis: Tensor
    costs: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Components [n, C] of x [n, C]."""
        return (x - self.mean) @ self.analysis

    def inverse(self, components: Tensor) -> Tensor:
        return torch.addmm(self.mean, components, self.synthesis)


def fit(mean: Tensor, covariance: Tensor, weight: Tensor) -> Transform:
    """The transform of vectors of that mean [C] and covariance [C, C], whose errors e cost e' weight e; float64."""
    weight = weight + _RIDGE * float(weight.diagonal().mean()) * torch.eye(len(weight))
    values, vectors = torch.linalg.eigh(weight)
    root, inverse = ((vectors * values.pow(power)) @ vectors.T for power in (0.5, -0.5))
    costs, directions = (x.flip(-1) for x in torch.linalg.eigh(root @ covariance @ root))
    costs = costs.clamp_min(_LEAST * float(costs[0]))  # rounding leaves less than nothing
    deviations = costs.sqrt()
    analysis, synthesis = root @ directions / deviations, deviations[:, None] * directions.T @ inverse
    return Transform(mean.float(), analysis.float(), synthesis.float(), costs)


def lloyd(x: Tensor, bits: int) -> Tensor:
    """Levels [2^bits], rising, each the mean of the values of x [n] that are nearest to it. A level that has no value
    stays where it is."""
    x = x.double().sort().values
    sums = torch.cat([x.new_zeros(1), x.cumsum(0)])
    # Many levels are best as dense as the cube root of the density: of a normal one, that of one sqrt(3) as wide. The
    # same share of the values as there lies below each.
    parts = (torch.arange(1 << bits, dtype=torch.float64) + 0.5) / (1 << bits)
    places = torch.special.ndtr(3**0.5 * torch.special.ndtri(parts)) * (len(x) - 1)
    levels = torch.lerp(x[places.floor().long()], x[places.ceil().long()], places.frac())
    for _ in range(_ROUNDS):
        edges = torch.searchsorted(x, midpoints(levels))
        ends = torch.cat([edges.new_zeros(1), edges, edges.new_full((1,), len(x))])
        counts = ends.diff()
        levels = torch.where(counts > 0, sums[ends].diff() / counts.clamp_min(1), levels)
    return levels.float()


def midpoints(levels: Tensor) -> Tensor:
    return (levels[1:] + levels[:-1]) / 2


def quantize(x: Tensor, levels: Tensor) -> Tensor:
    """Each value of x as its nearest level [2^bits]."""
    return levels[torch.bucketize(x, midpoints(levels))]


@dataclass(frozen=True)
class Tables:
    """The levels of each number of bits from 0 to MOST, and what they leave of the variance, `distortion`
    [MOST + 1]."""

    levels: tuple[Tensor, ...]
    distortion: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Tables:
        """Fitted to components x [n] of variance 1."""
        levels = tuple(lloyd(x, bits) for bits in range(MOST + 1))
        errors = [float((quantize(x, some) - x).double().square().mean()) for some in levels]
        return cls(levels, torch.tensor(errors, dtype=torch.float64))

    def code(self, components: Tensor, bits: Tensor) -> Tensor:
        """components [n, C] with bits [C] each, as they are read back."""
        result = torch.empty_like(components)
        for number in bits.unique().tolist():
            chosen = bits == number
            result[:, chosen] = quantize(components[:, chosen], self.levels[number])
        return result


def water_fill(costs: Tensor, distortion: Tensor, prices: Tensor, budget: float) -> Tensor:
    """Bits of each component, as costs [..., C], that make sum(prices * costs * distortion[bits]) least where
    sum(prices * bits) is at most the budget, but for a part of one bit. prices [..., C]: how many vectors have it."""
    gains = costs[..., None] * -distortion.diff()  # of each further bit of a vector; falling
    order = gains.flatten().argsort(descending=True, stable=True)
    prices = prices[..., None].expand(gains.shape)
    taken = torch.zeros(gains.numel(), dtype=torch.long)
    taken[order] = (prices.flatten()[order].double().cumsum(0) <= budget * (1 + 1e-12)).long()
    return taken.view(gains.shape).sum(-1)


def stored_bytes(tokens: Sequence[int], bits: Sequence[int]) -> int:
    """Bytes of the codes of so many vectors with so many bits each, each kind packed side by side."""
    return sum(-(-count * each // 8) for count, each in zip(tokens, bits, strict=True))
