"""Sampling parameters at and past their bounds, and the sampler against distributions computed in float64 here."""

import math

import numpy as np
import pytest
import torch

from engine import RequestError, SamplingParams
from engine.sampler import sample, top_logprobs

HUGE = 10**400


# Parameters.


@pytest.mark.parametrize(
    ("name", "least", "most", "integer"),
    [
        ("max_tokens", 1, 1 << 30, True),
        ("temperature", 0.0, 100.0, False),
        ("top_p", math.ulp(0.0), 1.0, False),
        ("top_k", 0, 1 << 30, True),
        ("min_p", 0.0, 1.0, False),
        ("repetition_penalty", 0.01, 100.0, False),
        ("seed", 0, (1 << 63) - 1, True),
        ("logprobs", 0, 20, True),
        ("n", 1, 16, True),
    ],
)
def test_bounds(name, least, most, integer):
    for value in (least, most):
        assert getattr(SamplingParams(**{name: value}), name) == value
    below = least - 1 if integer else math.nextafter(least, -1)
    above = most + 1 if integer else math.nextafter(most, math.inf)
    for value in (below, above, -1, -1.0, -HUGE, HUGE, math.nan, math.inf, -math.inf):
        with pytest.raises(RequestError, match=rf"^{name} must be"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "logprobs", "n"],
)
@pytest.mark.parametrize("value", [True, False, "1", b"1", [1], {}, 1 + 0j, object()], ids=lambda x: type(x).__name__)
def test_wrong_types(name, value):
    with pytest.raises(RequestError, match=rf"^{name} must be"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "n"])
def test_none_is_no_number(name):
    with pytest.raises(RequestError, match=rf"^{name} must be"):
        SamplingParams(**{name: None})


@pytest.mark.parametrize("name", ["seed", "logprobs"])
def test_none_is_off(name):
    assert getattr(SamplingParams(**{name: None}), name) is None


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed", "logprobs", "n"])
def test_a_float_is_no_count(name):
    with pytest.raises(RequestError, match=rf"^{name} must be an integer"):
        SamplingParams(**{name: 2.0})


def test_a_number_too_long_to_print():
    with pytest.raises(RequestError, match=r"^max_tokens must be"):
        SamplingParams(max_tokens=10**5000)


@pytest.mark.parametrize("value", ["no", 1, None, 0.5], ids=repr)
def test_ignore_eos_is_true_or_false(value):
    with pytest.raises(RequestError, match=r"^ignore_eos must be"):
        SamplingParams(ignore_eos=value)


@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        (None, ()),
        ((), ()),
        ([], ()),
        ("end", ("end",)),
        (["a", "b"], ("a", "b")),
        (["x" * 256] * 16, ("x" * 256,) * 16),
    ],
    ids=["none", "tuple", "list", "str", "two", "most"],
)
def test_stop(stop, kept):
    assert SamplingParams(stop=stop).stop == kept


@pytest.mark.parametrize(
    "stop",
    [[""], ["a", ""], ["x" * 257], ["a"] * 17, ["a"] * 100_000, "y" * 1_000_000, [5], [None], [b"a"], b"ab", 5, 1.5],
    ids=["empty", "one-empty", "long", "17", "100000", "1MB", "int", "none", "bytes-in", "bytes", "number", "float"],
)
def test_bad_stop(stop):
    with pytest.raises(RequestError, match=r"^stop must be"):
        SamplingParams(stop=stop)


def test_parameters_are_frozen():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5


# Distributions. The expected ones are computed in float64 from the definitions, tokens looked at one by one.

VOCAB = 24
DRAWS = 4000


def logits_for(seed=0, spread=2.0):
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def expected(logits, params, history=()):
    x = logits.double().numpy().copy()
    for token in set(history):
        penalty = params.repetition_penalty
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    x = x / params.temperature
    order = sorted(range(len(x)), key=lambda i: -x[i])
    if params.top_k:
        for i in order[params.top_k :]:
            x[i] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    if params.top_p < 1:
        held, kept = 0.0, []
        for i in order:
            if held >= params.top_p:
                break
            kept.append(i)
            held += p[i]
        p = np.array([p[i] if i in kept else 0.0 for i in range(len(p))])
    if params.min_p:
        p = np.where(p < params.min_p * p.max(), 0.0, p)
    return p / p.sum()


def assert_drawn_from(p, tokens):
    """Chi-square against p at 4.5 sigma (1 in 300,000, and the seeds are fixed); nothing outside p's support."""
    counts = np.bincount(tokens, minlength=len(p))
    assert not counts[p == 0].any(), "a token that was filtered out was drawn"
    # Rare tokens together: the statistic wants some draws in every cell.
    common = p * len(tokens) >= 5
    cells = [*counts[common], counts[~common].sum()]
    means = [*(p[common] * len(tokens)), p[~common].sum() * len(tokens)]
    pairs = [(c, m) for c, m in zip(cells, means, strict=True) if m > 0]
    freedom = len(pairs) - 1
    if freedom == 0:
        return
    statistic = sum((c - m) ** 2 / m for c, m in pairs)
    # Wilson-Hilferty: the cube root of chi-square over its freedom is nearly normal.
    spread = 2 / (9 * freedom)
    sigma = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5
    assert sigma < 4.5, f"chi-square {statistic:.1f} with {freedom} degrees of freedom: {sigma:.1f} sigma"


def draws(logits, params, history=(), seed=0, count=DRAWS):
    generator = torch.Generator().manual_seed(seed)
    return [sample(logits, params, list(history), generator) for _ in range(count)]


CASES = [
    pytest.param({}, id="plain"),
    pytest.param({"temperature": 0.5}, id="cold"),
    pytest.param({"temperature": 3.0}, id="hot"),
    pytest.param({"temperature": 100.0}, id="hottest"),
    pytest.param({"top_k": 1}, id="top-k-1"),
    pytest.param({"top_k": 5}, id="top-k-5"),
    pytest.param({"top_k": VOCAB}, id="top-k-all"),
    pytest.param({"top_k": 1 << 30}, id="top-k-more-than-all"),
    pytest.param({"top_p": 0.5}, id="top-p-half"),
    pytest.param({"top_p": 0.9}, id="top-p"),
    pytest.param({"top_p": 1e-9}, id="top-p-one-token"),
    pytest.param({"min_p": 0.1}, id="min-p"),
    pytest.param({"min_p": 1.0}, id="min-p-one-token"),
    pytest.param({"repetition_penalty": 1.8}, id="penalty"),
    pytest.param({"repetition_penalty": 0.5}, id="reward"),
    pytest.param({"temperature": 2.0, "top_k": 12, "top_p": 0.8, "min_p": 0.05}, id="all-filters"),
    pytest.param({"temperature": 0.7, "repetition_penalty": 1.3, "top_k": 8, "top_p": 0.95}, id="with-penalty"),
]


@pytest.mark.parametrize("settings", CASES)
def test_distribution(settings):
    params = SamplingParams(**settings)
    logits = logits_for()
    history = [int(logits.argmax()), 0, 1, 1, 2] if params.repetition_penalty != 1 else []
    assert_drawn_from(expected(logits, params, history), draws(logits, params, history))


def test_the_statistic_can_fail():
    params = SamplingParams(temperature=1.1)
    with pytest.raises(AssertionError, match="sigma"):
        assert_drawn_from(expected(logits_for(), SamplingParams()), draws(logits_for(), params))


def test_top_k_comes_before_top_p():
    # Of the two that top_k leaves the first has 0.45 / 0.8 = 0.5625, enough for top_p; of all four it has too little.
    logits = torch.tensor([0.45, 0.35, 0.1, 0.1]).log()
    params = SamplingParams(top_k=2, top_p=0.55)
    assert set(draws(logits, params, count=200)) == {0}
    assert set(draws(logits, SamplingParams(top_p=0.55), count=200)) == {0, 1}


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": math.ulp(0.0)},
        {"top_p": 1e-46},  # 0 in float32
        {"min_p": 1.0},
        {"top_k": 1},
        {"temperature": math.ulp(0.0)},
        {"temperature": 1e-300},
        {"temperature": 1e-40},
        {"temperature": 1e-20, "top_k": 3, "top_p": 1e-46, "min_p": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4], ids=["flat", "usual", "steep"])
def test_filters_are_never_empty(settings, scale):
    logits = logits_for(3) * scale
    assert set(draws(logits, SamplingParams(**settings), count=20)) == {int(logits.argmax())}


@pytest.mark.parametrize("settings", CASES)
def test_temperature_0_is_the_argmax(settings):
    settings = {**settings, "temperature": 0.0, "repetition_penalty": 1.0}
    for seed in range(20):
        logits = logits_for(seed)
        assert sample(logits, SamplingParams(**settings), [], None) == int(logits.argmax())


def test_greedy_with_penalty():
    logits = torch.tensor([5.0, 4.0, -1.0])
    assert sample(logits, SamplingParams(temperature=0, repetition_penalty=2.0), [0], None) == 1
    assert sample(logits, SamplingParams(temperature=0, repetition_penalty=2.0), [0, 1], None) == 0
    negative = torch.tensor([-1.0, -1.5, -9.0])  # a penalty makes a negative logit more negative
    assert sample(negative, SamplingParams(temperature=0, repetition_penalty=2.0), [0], None) == 1
    assert sample(negative, SamplingParams(temperature=0, repetition_penalty=2.0), [], None) == 0


def test_penalty_counts_a_token_once():
    params = SamplingParams(repetition_penalty=1.5)
    once, often = draws(logits_for(), params, [3], count=100), draws(logits_for(), params, [3] * 9, count=100)
    assert once == often


def test_ties():
    flat = torch.zeros(8)
    assert sample(flat, SamplingParams(temperature=0), [], None) == 0  # the lowest id
    assert_drawn_from(np.full(8, 1 / 8), draws(flat, SamplingParams()))
    # The nucleus of equal tokens has as many as it needs, the lowest ids first.
    assert set(draws(flat, SamplingParams(top_p=0.5), count=400)) == {0, 1, 2, 3}
    assert set(draws(flat, SamplingParams(min_p=1.0), count=400)) == set(range(8))


def test_logits_are_not_changed():
    logits = logits_for()
    before = logits.clone()
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=2.0)
    draws(logits, params, [1, 2], count=5)
    top_logprobs(logits, 1, 5)
    assert torch.equal(logits, before)


def test_same_seed_same_draws():
    a, b, c = (draws(logits_for(), SamplingParams(), seed=seed, count=50) for seed in (7, 7, 8))
    assert a == b and a != c


def test_minus_infinity_is_never_drawn():
    logits = logits_for()
    logits[::2] = -torch.inf
    for settings in ({}, {"top_k": 20}, {"top_p": 0.99}, {"temperature": 1e-30}, {"min_p": 0.01}):
        assert all(token % 2 for token in draws(logits, SamplingParams(**settings), count=200)), settings


# Log-probabilities.


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_top_logprobs(count):
    logits = logits_for()
    p = expected(logits, SamplingParams())
    order = np.argsort(-p)
    token = int(order[-1])
    found = top_logprobs(logits, token, count)
    assert set(found) == {token, *order[:count].tolist()}
    for i, value in found.items():
        assert type(i) is int and type(value) is float
        assert value == pytest.approx(math.log(p[i]), abs=1e-5)


def test_top_logprobs_where_the_token_is_among_the_best():
    logits = logits_for()
    best = int(logits.argmax())
    assert len(top_logprobs(logits, best, 3)) == 3
    assert next(iter(top_logprobs(logits, best, 3))) == best


def test_more_logprobs_than_tokens():
    assert set(top_logprobs(torch.randn(5), 0, 20)) == set(range(5))
