"""Scores of pages: what they are made of, that they can be trained, and what observing a step measures."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kernels import reference
from kernels.ops import NUM_FEATURES
from memory.importance import (
    DEFAULT,
    FEATURE_VERSION,
    AttentionRecord,
    Scorer,
    adapt,
    load_scorer,
    page_ages,
    score_pages,
)
from memory.observation import SAMPLES, Observation
from tools import float64


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def record_of(*lifts, length=100, window=64, size=1):
    """Observed once after another, a token apart; the tokens are older than the window."""
    record = AttentionRecord()
    for i, values in enumerate(lifts):
        ages = np.full(len(values), 10 * window)
        record.observe(np.array(values, dtype=np.float32), ages, length + i, window)
    return record


def scores_of(scorer, record, ages, importance="score"):
    return score_pages(scorer.packed().detach(), record, ages, importance, reference)


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
    scores = scores_of(scorer, record_of(lifts), page_ages(len(lifts), 16, length))
    assert scores.dtype == np.float64 and scores.shape == (len(lifts),)
    assert (scores >= 0).all() and (scores <= 1 + 1e-6).all()


def test_the_formula_by_hand():
    features, ages = torch.zeros(1, NUM_FEATURES), torch.tensor([512.0])
    features[0, 1] = 0.75
    got = float(Scorer()(features, ages).detach())
    assert math.isclose(got, 0.6 * 0.75 + 0.3 * math.exp(-1) + 0.1 * 0.5, rel_tol=1e-5)


def test_more_attention_and_less_age_score_higher():
    ages = page_ages(3, 16, 48)
    assert ages.tolist() == [32, 16, 0] and page_ages(3, 16, 40).tolist() == [24, 8, 0]
    assert np.all(np.diff(scores_of(Scorer(), AttentionRecord(), ages)) > 0)
    assert scores_of(Scorer(), record_of([9.0, 0.1, 0.1]), ages).argmax() == 0


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
    assert scores_of(scorer, AttentionRecord(), np.arange(4)).tolist() == [0.0] * 4


def test_factors_change_the_terms_weights():
    features, ages = torch.rand(9, NUM_FEATURES), torch.rand(9) * 1000
    scorer, weighted = Scorer(), Scorer()
    with torch.no_grad():
        weighted.beta.mul_(2)
    got = reference.score(features, ages, scorer.packed((1, 2, 1)))
    torch.testing.assert_close(got, weighted(features, ages))


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
    record, ages = record_of([5.0, 0.0, math.nan, 1.0]), np.arange(6)
    assert scores_of(Scorer(), record, ages, "none").tolist() == [0.0] * 6
    random = scores_of(Scorer(), record, ages, "random")
    assert len(set(random)) == 6 and (random >= 0).all() and (random < 1).all()
    # A page keeps its number while others come.
    assert scores_of(Scorer(), record, np.arange(9), "random")[:6].tolist() == random.tolist()


def test_a_page_that_was_never_observed_and_nan():
    for lifts in ([], [1.0], [1.0] * 5):
        assert scores_of(Scorer(), record_of(lifts) if lifts else AttentionRecord(), np.arange(3)).shape == (3,)
    assert scores_of(Scorer(), AttentionRecord(), np.arange(0)).shape == (0,)
    for odd in (math.nan, math.inf):
        scores = scores_of(Scorer(), record_of([odd, 1.0], [1.0, odd]), np.arange(2))
        assert np.isfinite(scores).all() and scores[1] > 0


# The averages.


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.floats(0, 20, width=32), min_size=3, max_size=3)),
        min_size=1, max_size=12,
    ),
    window=st.integers(4, 200),
)  # fmt: skip
def test_the_averages(steps, window):
    """Of three tokens at 0, 1 and 2: while one is young, the newest; then the mean of all that was observed since it is
    not, weighted by the tokens between, as long as these are fewer than the window; then an exponential one."""
    record, length = AttentionRecord(), 3
    of, span = [lambda x: x, *[lambda x: x / (1 + x)] * 3, *[lambda x: x] * 2], [0, 1, 4, math.inf, 1, math.inf]
    wanted, seen = [[0.0] * 6 for _ in range(3)], [0] * 3
    for count, lifts in steps:
        length += count
        since = count if record.length else length
        ages = np.array([length - 1, length - 2, length - 3])
        for i, lift in enumerate(map(float, np.float32(lifts))):
            seen[i] = seen[i] + since if ages[i] >= window else 0
            for j in range(6):
                keep = 0.0 if seen[i] <= since or not span[j] else min(
                    math.exp(-since / (window * span[j])), 1 - since / seen[i]
                )  # fmt: skip
                wanted[i][j] = keep * wanted[i][j] + (1 - keep) * of[j](lift)
        record.observe(np.array(lifts, dtype=np.float32), ages, length, window)
    np.testing.assert_allclose(record.averages, wanted, rtol=1e-4, atol=1e-5)


def test_what_a_page_got_while_it_was_new_is_forgotten():
    record = AttentionRecord()
    for length, lift in ((70, 500.0), (100, 500.0), (130, 2.0), (140, 4.0)):
        record.observe(np.array([lift], dtype=np.float32), np.array([length - 64]), length, 64)
    assert 2.0 < record.averages[0, 4] < 4.0 and record.averages[0, 5] == pytest.approx((30 * 2 + 10 * 4) / 40)


def test_features_have_the_neighbours_and_nothing_of_what_was_not_observed():
    features = record_of([1.0, 3.0, 0.0]).features(5)
    assert features.shape == (5, NUM_FEATURES) and features.dtype == np.float32
    assert features[:, 1].tolist() == [0.5, 0.75, 0, 0, 0]
    assert features[:, 6].tolist() == [0, 0.5, 0.75, 0, 0] and features[:, 7].tolist() == [0.75, 0, 0, 0, 0]
    assert record_of([1.0, 3.0, 0.0]).features(2).tolist() == [features[0].tolist(), [*features[1, :7], 0]]


def test_heads_side_by_side_are_as_each_alone():
    both, alone = AttentionRecord(), [AttentionRecord(), AttentionRecord()]
    for length in (40, 50, 70):
        lifts, ages = np.random.default_rng(length).random((2, length), dtype=np.float32), page_ages(length, 1, length)
        both.observe(lifts, ages, length, 8)
        for record, row in zip(alone, lifts, strict=True):
            record.observe(row, ages, length, 8)
    np.testing.assert_array_equal(both.features(70), np.stack([record.features(70) for record in alone]))


# Files.


@pytest.fixture
def file(tmp_path):
    def write(change=lambda tensors: None, version=FEATURE_VERSION):
        tensors = {name: value.clone() for name, value in Scorer().state_dict().items()}
        change(tensors)
        save_file(tensors, tmp_path / "a.safetensors", {"feature_version": version, "model": "m"})
        return tmp_path / "a.safetensors"

    return write


def test_a_scorer_comes_back_from_its_file(file):
    scorer, about = load_scorer(file(lambda tensors: tensors["beta"].fill_(0.7)))
    assert float(scorer.beta.detach()) == pytest.approx(0.7) and about["model"] == "m"


@pytest.mark.parametrize(
    ("change", "version", "words"),
    [
        (lambda t: None, "1", "a scorer of feature version 1, 2 is wanted"),
        (lambda t: t.pop("gamma"), FEATURE_VERSION, "wanted the tensors .*gamma.*, got"),
        (lambda t: t.update(gamma=torch.zeros(2)), FEATURE_VERSION, r"wanted .*, got .*'gamma': \(2,\)"),
        (lambda t: t.update(other=torch.zeros(1)), FEATURE_VERSION, "got .*other"),
        (lambda t: t["relevance.0.weight"].fill_(math.nan), FEATURE_VERSION, "NaN or infinity in relevance.0.weight"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(file, change, version, words):
    with pytest.raises(ValueError, match=words):
        load_scorer(file(change, version))


def test_no_file_and_no_scorer(tmp_path):
    (tmp_path / "b").write_bytes(b"not a scorer")
    for name in ("a", "b"):
        with pytest.raises(ValueError, match=f"{tmp_path / name}: no scorer"):
            load_scorer(tmp_path / name)


def test_the_scorer_that_ships_is_small_trained_and_says_where_it_is_from():
    scorer, about = load_scorer(DEFAULT)
    assert DEFAULT.stat().st_size < 8192 and "tools.train_scorer" in about["command"] and about["model"]
    assert not torch.equal(scorer.packed(), Scorer().packed())


# Following the text.


def test_adapting_follows_what_foretells_attention_and_is_bounded():
    """Lifts that are as the averages were raise alpha over beta, lifts of the newest tokens beta over alpha."""
    ages = page_ages(40, 16, 640)
    attended = np.random.default_rng(0).random(40).astype(np.float32) * 5
    recent = np.exp(-ages / 512).astype(np.float32) * 5
    for lifts, more, less in ((attended, 0, 1), (recent, 1, 0)):
        record = record_of(attended, length=640)
        weights = Scorer().packed().detach()
        first = record.factors.copy()
        for i in range(300):
            adapt(weights, record, ages, lifts, reference)
            if i == 0:
                assert record.factors[more] > record.factors[less] and np.abs(record.factors - first).max() < 0.1
        assert record.factors[more] > record.factors[less] and abs(np.log2(record.factors)).max() <= 1
    adapt(weights, record, ages, np.full(40, math.nan, dtype=np.float32), reference)
    assert np.isfinite(record.factors).all()


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
