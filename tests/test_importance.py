"""Scores of pages: what they are made of, that they can be trained, and what observing a step measures."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from memory.importance import NUM_FEATURES, AttentionRecord, Scorer, page_ages, score_pages
from memory.observation import SAMPLES, Observation
from tools import float64


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def record_of(*lifts, length=100, window=64):
    record = AttentionRecord()
    for i, values in enumerate(lifts):
        record.observe(np.array(values, dtype=np.float32), length + i, window)
    return record


# The scorer.


@settings(max_examples=100, deadline=None)
@given(
    lifts=st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=20),
    length=st.integers(1, 10**6),
    weights=st.lists(st.floats(-5, 5), min_size=4, max_size=4),
)
def test_scores_are_from_0_to_1(lifts, length, weights):
    scorer = Scorer()
    with torch.no_grad():
        for parameter, value in zip((scorer.alpha, scorer.beta, scorer.gamma, scorer.log_tau), weights, strict=True):
            parameter.fill_(value)
    scores = score_pages(scorer, record_of(lifts), page_ages(len(lifts), 16, length), "score")
    assert scores.dtype == np.float64 and scores.shape == (len(lifts),)
    assert (scores >= 0).all() and (scores <= 1 + 1e-6).all()


def test_the_formula_by_hand():
    scorer = Scorer()
    features, ages = torch.tensor([[3.0, 0.5, 2.0]]), torch.tensor([512.0])
    attention = (3 / 4 + 0.5) / 2
    assert math.isclose(
        float(scorer(features, ages).detach()), 0.6 * attention + 0.3 * math.exp(-1) + 0.1 * 0.5, rel_tol=1e-5
    )  # fmt: skip


def test_more_attention_and_less_age_score_higher():
    scorer = Scorer()
    ages = page_ages(3, 16, 48)
    assert ages.tolist() == [32, 16, 0] and page_ages(3, 16, 40).tolist() == [24, 8, 0]
    assert np.all(np.diff(score_pages(scorer, AttentionRecord(), ages, "score")) > 0)
    attended = score_pages(scorer, record_of([9.0, 0.1, 0.1]), ages, "score")
    assert attended.argmax() == 0


def test_gradients_reach_every_parameter():
    """Also the relevance network, whose last layer begins at 0: its first layer from the second step on."""
    scorer = Scorer()
    optimizer = torch.optim.SGD(scorer.parameters(), lr=1.0)
    features, ages = torch.rand(30, NUM_FEATURES) * 3, torch.arange(30.0) * 40
    target = torch.rand(30)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (scorer(features, ages) - target).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    assert losses[-1] < losses[0]
    for name, parameter in scorer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_relevance_is_neutral_until_it_is_trained():
    scorer, other = Scorer(), Scorer()
    features, ages = torch.rand(9, NUM_FEATURES), torch.rand(9) * 1000
    with torch.no_grad():
        other.gamma.zero_()
        plain = other(features, ages) * 0.9 + 0.1 * 0.5
    torch.testing.assert_close(scorer(features, ages), plain)


def test_weights_of_nothing_are_no_division_by_zero():
    scorer = Scorer()
    with torch.no_grad():
        for parameter in (scorer.alpha, scorer.beta, scorer.gamma):
            parameter.zero_()
    assert score_pages(scorer, AttentionRecord(), np.arange(4), "score").tolist() == [0.0] * 4


def test_a_scorer_is_the_same_every_time_and_takes_no_random_number_from_the_caller():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = Scorer()
    assert torch.equal(torch.rand(3), expected)
    second = Scorer()
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_scorer_leaves_the_seed_of_gpus_alone(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    Scorer()
    assert not seeded


def test_the_other_modes():
    scorer, record = Scorer(), record_of([5.0, 0.0, math.nan, 1.0])
    ages = np.arange(6)
    assert score_pages(scorer, record, ages, "none").tolist() == [0.0] * 6
    random = score_pages(scorer, record, ages, "random")
    assert len(set(random)) == 6 and (random >= 0).all() and (random < 1).all()
    # A page keeps its number while others come.
    assert score_pages(scorer, record, np.arange(9), "random")[:6].tolist() == random.tolist()


def test_a_page_that_was_never_observed_and_nan():
    scorer = Scorer()
    assert score_pages(scorer, AttentionRecord(), np.arange(3), "score").shape == (3,)
    assert score_pages(scorer, record_of([1.0]), np.arange(3), "score").shape == (3,)
    assert score_pages(scorer, record_of([1.0] * 5), np.arange(3), "score").shape == (3,)
    assert score_pages(scorer, AttentionRecord(), np.arange(0), "score").shape == (0,)
    scores = score_pages(scorer, record_of([math.nan, 1.0]), np.arange(2), "score")
    assert np.isfinite(scores[1]) and scores[1] > 0


# The average.


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.floats(0, 20, width=32), min_size=3, max_size=3)),
        min_size=1, max_size=12,
    ),
    window=st.integers(1, 200),
)  # fmt: skip
def test_the_average_is_an_exponential_one(steps, window):
    record, length = AttentionRecord(), 0
    mean, often = [None] * 3, [None] * 3
    for count, lifts in steps:
        keep = math.exp(-count / window)
        length += count
        for i, lift in enumerate(lifts):
            lift = float(np.float32(lift))
            mean[i] = lift if mean[i] is None else keep * mean[i] + (1 - keep) * lift
            often[i] = float(lift > 1) if often[i] is None else keep * often[i] + (1 - keep) * (lift > 1)
        record.observe(np.array(lifts, dtype=np.float32), length, window)
    np.testing.assert_allclose(record.features[:, 0], mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(record.features[:, 1], often, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(record.features[:, 2], np.float32(steps[-1][1]), rtol=1e-6)


def test_a_new_page_begins_with_what_it_gets():
    record = record_of([2.0], [4.0, 8.0], length=100, window=1000)
    assert record.features[1].tolist() == [8.0, 1.0, 8.0]
    assert 2.0 < record.features[0, 0] < 2.01


# Observing.


@pytest.mark.parametrize("warm", [{}, {8: [1, 0, 2], 3: [0, 0, 1]}], ids=["exact", "compressed"])
def test_shares_are_the_attention_that_pages_get(warm):
    """Of a decode, a short chunk of which every query is asked, and a longer one; two layers, averaged."""
    counts, lengths = [1, 3, 40], [20, 19, 50]
    layers = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        layers.append(float64.make_batch(counts, lengths, 4, 2, 16, torch.float32, 16, 1, warm=warm))
    plan = layers[0].plan
    observation = Observation(plan, counts)
    expected = []
    for batch in layers:
        # A plan is one step's: the frames of the second layer's cache are its own.
        own = Observation(batch.plan, counts)
        cache = batch.cache._replace(k=batch.cache.k.contiguous(), v=batch.cache.v.contiguous())
        own.observe(batch.q, cache, reference, batch.scale)
        expected.append([wanted_share(batch, b, count) for b, count in enumerate(counts)])
        for share, wanted in zip(own.shares(), expected[-1], strict=True):
            np.testing.assert_allclose(share, wanted, rtol=0, atol=1e-5)
            assert math.isclose(share.sum(), 1, abs_tol=1e-5)
    batch = layers[0]
    cache = batch.cache._replace(k=batch.cache.k.contiguous(), v=batch.cache.v.contiguous())
    observation.observe(batch.q, cache, reference, batch.scale)
    observation.observe(batch.q * 2, cache, reference, batch.scale)
    louder = [wanted_share(batch, b, count, 2.0) for b, count in enumerate(counts)]
    for share, a, b in zip(observation.shares(), expected[0], louder, strict=True):
        np.testing.assert_allclose(share, (a + b) / 2, rtol=0, atol=1e-5)


def wanted_share(batch, b, count, louder=1.0):
    """[page columns]: the attention of the sampled queries of sequence b by page, mean over queries and heads."""
    start = int(batch.plan.query_start[b])
    asked = sorted({count - 1 - count * i // SAMPLES for i in range(SAMPLES)})
    exact = int(batch.plan.exact_lens[b])
    keys = batch.keys[b].double()
    total = np.zeros(batch.plan.num_columns(16))
    for query in asked:
        for head in range(batch.q.shape[1]):
            scores = keys[head // 2] @ batch.q[start + query, head].double() * batch.scale * louder
            scores[exact - count + query + 1 : exact] = -math.inf
            total[batch.columns(b)] += scores.softmax(0).numpy()
    return total.reshape(-1, 16).sum(1) / len(asked) / batch.q.shape[1]
