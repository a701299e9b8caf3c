"""The kernel that scores pages, and its twin in torch, against float64."""

import math

import pytest
import torch

from kernels import reference
from kernels.ops import NUM_FEATURES, SCORE_HIDDEN
from kernels.score import score

WIDTH = NUM_FEATURES + 2


def inputs(count: int, device: str) -> tuple[torch.Tensor, ...]:
    features = torch.rand(count, NUM_FEATURES).mul(9).exp().sub(1)
    features[:, 1:4] /= 1 + features[:, 1:4]
    ages = torch.rand(count) * 5000
    terms = torch.rand(3)
    weights = torch.cat([terms / terms.sum(), torch.tensor([1 / 300]), torch.randn(SCORE_HIDDEN * (WIDTH + 2) + 1)])
    return features.to(device), ages.to(device), weights.to(device)


def wanted(features: torch.Tensor, ages: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One page at a time, as the formula in `Ops.score` reads."""
    numbers = weights.double().tolist()
    (alpha, beta, gamma, rate), rest = numbers[:4], numbers[4:]
    first = [rest[i * WIDTH : (i + 1) * WIDTH] for i in range(SCORE_HIDDEN)]
    bias, second = (rest[SCORE_HIDDEN * (WIDTH + i) : SCORE_HIDDEN * (WIDTH + i + 1)] for i in range(2))
    scores = []
    for row, age in zip(features.double().tolist(), ages.double().tolist(), strict=True):
        row = [0.0 if math.isnan(x) else min(max(x, 0.0), 1e6) for x in row]
        decay, slower = math.exp(-age * rate), math.exp(-age * rate / 8)
        x = [*map(math.log1p, row), decay, slower]
        hidden = [sum(map(float.__mul__, w, x)) + b for w, b in zip(first, bias, strict=True)]
        total = sum(h / (1 + math.exp(-h)) * w for h, w in zip(hidden, second, strict=True)) + rest[-1]
        scores.append(alpha * row[1] + beta * decay + gamma / (1 + math.exp(-total)))
    return torch.tensor(scores, dtype=torch.float64)


@pytest.mark.parametrize("count", [1, 7, 63, 128, 300])
@pytest.mark.parametrize("function", [score, reference.score], ids=["triton", "torch"])
def test_scores(function, count: int, device: str) -> None:
    features, ages, weights = inputs(count, device)
    got = function(features, ages, weights)
    assert got.dtype == torch.float32 and got.shape == (count,)
    torch.testing.assert_close(got.double().cpu(), wanted(features, ages, weights), rtol=0, atol=3e-6)


@pytest.mark.parametrize("function", [score, reference.score], ids=["triton", "torch"])
def test_what_is_no_number_counts_as_nothing(function, device: str) -> None:
    features, ages, weights = inputs(7, device)
    features[0], features[1, 3], features[2, 0], features[3, 4], features[4, 1] = (
        math.nan,
        math.nan,
        math.inf,
        -1,
        -math.inf,
    )
    got = function(features, ages, weights)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got.double().cpu(), wanted(features, ages, weights), rtol=0, atol=3e-6)


@pytest.mark.parametrize("function", [score, reference.score], ids=["triton", "torch"])
def test_no_pages_and_equal_pages(function, device: str) -> None:
    features, ages, weights = inputs(1, device)
    assert function(features[:0], ages[:0], weights).shape == (0,)
    equal = function(features.repeat(150, 1), ages.repeat(150), weights)
    assert (equal == equal[0]).all()


def test_wrong_arguments_are_named(device: str) -> None:
    features, ages, weights = inputs(5, device)
    with pytest.raises(AssertionError, match="ages"):
        score(features, ages.double(), weights)
    with pytest.raises(AssertionError, match="weights"):
        score(features, ages, weights[:-1])
    with pytest.raises(AssertionError, match="features"):
        score(features.T.contiguous().T, ages, weights)
