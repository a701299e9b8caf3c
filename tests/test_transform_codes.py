"""Transform coding and its bits against plain arithmetic in float64, and the measurement on a tiny model."""

import itertools
import json
import math

import pytest
import torch
from oracle.checkpoint import TEXT, make_checkpoint

from engine import LLM, ConfigError, RequestError
from memory.importance import Scorer
from tools import evaluate, evaluate_bits
from tools.evaluate_attention import causal, forward
from tools.transform_codes import MOST, Tables, Transform, fit, lloyd, quantize, stored_bytes, water_fill


@pytest.fixture(scope="module")
def vectors():
    """Correlated ones [4000, 12], and what errors in them cost [12, 12]."""
    generator = torch.Generator().manual_seed(0)
    mix, root = torch.randn(2, 12, 12, generator=generator, dtype=torch.float64)
    scales = torch.logspace(0, -2, 12, dtype=torch.float64)
    x = torch.randn(4000, 12, generator=generator, dtype=torch.float64) * scales @ mix + 3
    return x, root @ root.T


@pytest.fixture(scope="module")
def fitted(vectors):
    x, weight = vectors
    return fit(x.mean(0), x.T.cov(correction=0), weight)


@pytest.fixture(scope="module")
def tables():
    return Tables.of(torch.randn(200_000, generator=torch.Generator().manual_seed(1)))


def cost_of(errors, weight):
    """Mean of e' W e."""
    return float(torch.einsum("ni,ij,nj->n", errors, weight, errors).mean())


# The transform.


def test_the_transform_can_be_undone_and_its_components_are_uncorrelated(vectors, fitted):
    x, _ = vectors
    components = fitted.forward(x.float())
    torch.testing.assert_close(fitted.inverse(components).double(), x, rtol=1e-4, atol=1e-4)
    covariance = components.double().T.cov(correction=0)
    torch.testing.assert_close(covariance, torch.eye(12, dtype=torch.float64), rtol=0, atol=1e-3)
    assert (fitted.costs.diff() <= 0).all()


def test_what_is_dropped_costs_what_is_said(vectors):
    """Of vectors whose covariance the transform knows exactly: the sum over the dropped components."""
    x, weight = vectors
    transform = fit(x.mean(0), x.T.cov(correction=0), weight)
    components = transform.forward(x.float())
    ridge = 1e-2 * float(weight.diagonal().mean()) * torch.eye(12, dtype=torch.float64)
    for kept in (0, 3, 8):
        dropped = components.clone()
        dropped[:, kept:] = 0
        found = cost_of(x - transform.inverse(dropped).double(), weight + ridge)
        assert found == pytest.approx(float(transform.costs[kept:].sum()), rel=1e-3)


def test_no_other_basis_of_as_many_components_costs_less(vectors, fitted):
    """Beside plain principal components, which know nothing of the costs."""
    x, weight = vectors
    components = fitted.forward(x.float())
    centred = x - x.mean(0)
    plain = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(-1)
    for kept in (1, 2, 4, 8):
        mine = components.clone()
        mine[:, kept:] = 0
        projected = centred @ plain[:, :kept] @ plain[:, :kept].T
        assert cost_of(x - fitted.inverse(mine).double(), weight) < cost_of(centred - projected, weight)


def test_more_bits_cost_less_up_to_next_to_nothing(vectors, fitted, tables):
    x, weight = vectors
    components = fitted.forward(x.float())
    costs = []
    for bits in range(MOST + 1):
        coded = tables.code(components, torch.full((12,), bits))
        costs.append(cost_of(x - fitted.inverse(coded).double(), weight))
    assert all(after < 0.6 * before for before, after in itertools.pairwise(costs))
    assert costs[MOST] < 2e-4 * costs[0]
    expected = [float(fitted.costs.sum() * left) for left in tables.distortion]
    assert costs[3] == pytest.approx(expected[3], rel=0.2), "normal components leave what normal tables say"


# Levels.


def test_levels_of_a_normal_distribution_are_those_in_the_books(tables):
    """Max 1960: distortion, and the positive levels of one and two bits."""
    assert tables.distortion[:6].tolist() == pytest.approx([1, 0.3634, 0.1175, 0.03454, 0.009497, 0.002499], rel=0.03)
    assert tables.levels[1].tolist() == pytest.approx([-0.7979, 0.7979], abs=0.01)
    assert tables.levels[2].tolist() == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=0.02)


def test_each_level_is_the_mean_of_what_is_nearest(tables):
    x = torch.rand(5000, generator=torch.Generator().manual_seed(2)).square()
    levels = lloyd(x, 3)
    nearest = (x[:, None] - levels).abs().argmin(1)
    torch.testing.assert_close(quantize(x, levels), levels[nearest])
    means = torch.stack([x[nearest == i].mean() for i in range(8)])
    torch.testing.assert_close(levels, means, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_levels_without_values_stay_finite_and_in_order(bits):
    x = torch.tensor([-5.0] * 50 + [0.25] * 50 + [100.0])
    levels = lloyd(x, bits)
    assert len(levels) == 1 << bits and levels.isfinite().all() and (levels.diff() >= 0).all()
    if bits == 8:
        assert float((quantize(x, levels) - x).abs().max()) < 0.5, "each of three values has a level of its own"


# Bits.


def test_water_filling_is_as_good_as_trying_all():
    distortion = torch.tensor([1, 0.36, 0.12, 0.035, 0.01], dtype=torch.float64)
    costs = torch.tensor([5.0, 1.3, 0.4, 0.02], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    for budget in range(12):
        bits = water_fill(costs, distortion, ones, budget)
        assert int(bits.sum()) == budget
        tried = (t for t in itertools.product(range(5), repeat=4) if sum(t) <= budget)
        best = min(float(sum(c * distortion[b] for c, b in zip(costs, t, strict=True))) for t in tried)
        assert float((costs * distortion[bits]).sum()) == pytest.approx(best)


def test_bits_follow_prices_and_costs_within_the_budget():
    """A tier with a tenth of the tokens and as much of the cost: the bits of tiers differ by half the logarithm."""
    distortion = 0.25 ** torch.arange(9, dtype=torch.float64)
    costs = torch.tensor([64.0, 1.0], dtype=torch.float64)[:, None].expand(2, 50)
    prices = torch.tensor([0.1, 0.9], dtype=torch.float64)[:, None].expand(2, 50)
    bits = water_fill(costs, distortion, prices, 100)
    assert 98 < float((prices * bits).sum()) <= 100
    assert float(bits[0].double().mean() - bits[1].double().mean()) == pytest.approx(math.log2(64) / 2, abs=0.6)
    assert int(water_fill(costs, distortion, prices, 0).sum()) == 0
    assert (water_fill(costs, distortion, prices, 1e9) == 8).all()


# Bytes.


def test_bytes_are_those_of_packed_codes():
    assert stored_bytes([8, 3], [5, 11]) == 5 + 5
    assert stored_bytes([0], [7]) == 0
    bits = torch.tensor([[[3, 1], [1, 0]], [[2, 2], [1, 1]]])  # K and V of one layer, two tiers: 8 and 3 bits
    plan = evaluate_bits.Plan((0.1, 0.9), bits)
    assert plan.tiers(torch.arange(100)).tolist() == [0] * 10 + [1] * 90
    assert plan.nbytes(100) == 10 + 34 + 13, "codes of ten and ninety tokens, and a bit each for the map"
    assert evaluate_bits.Plan((1.0,), bits[:, :1]).nbytes(100) == 100


# The measurement.


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("bits")
    make_checkpoint(path / "model", seed=1, max_position_embeddings=1024)
    (path / "text").write_text(TEXT * 9)
    return path


@pytest.fixture(scope="module")
def llm(directory):
    return LLM(directory / "model", dtype="float32", threads=1, max_model_len=512)


@pytest.fixture(scope="module")
def window(llm):
    return llm.tokenizer.encode(TEXT * 3)[:512]


def rotated_of(llm, window):
    pairs = []

    def attend(layer, q, k, v):
        pairs.append((k.clone(), v.clone()))
        return causal(q, k, v)

    forward(llm, window, attend)
    return pairs


def test_keys_lose_their_positions_and_get_them_back(llm, window):
    pairs = rotated_of(llm, window)
    past = evaluate_bits.Past.of(llm, pairs)
    layer = llm._model.layers[0]
    residual = llm._model.embedding[torch.tensor(window)].float()
    normed = llm._model.ops.rms_norm(residual, layer.input_norm, llm._model.config.rms_norm_eps)
    own = torch.nn.functional.linear(normed, layer.qkv[0])[:, 64:96]
    torch.testing.assert_close(past.pairs[0][0], own, rtol=1e-4, atol=1e-5)
    for (k, v), (plain, values) in zip(pairs, past.pairs, strict=True):
        torch.testing.assert_close(evaluate_bits._rotated(llm, plain), k.transpose(0, 1).flatten(1))
        assert torch.equal(values, v.transpose(0, 1).flatten(1))


def test_gradients_say_what_a_small_error_costs(llm, window):
    """The mean of (g . e)^2 / 2 over many draws is the KL that the error makes, as `divergences` measures it."""
    start, generator = 256, torch.Generator().manual_seed(0)
    past = evaluate_bits.Past.of(llm, rotated_of(llm, window))
    old = slice(4, start - 64)
    errors = [1e-2 * torch.randn(start - 68, 32, generator=generator) for _ in range(4)]
    drawn = evaluate_bits.gradients(llm, past, window, start, 400, generator)
    foreseen = torch.tensor([[float((g * e).sum()) ** 2 / 2 for g, e in zip(g4, errors, strict=True)] for g4 in drawn])
    moved = [tuple(x.clone() for x in pair) for pair in past.pairs]
    exact = predicted(llm, past.pairs, window, start)
    for i, error in enumerate(errors):
        changed = [list(pair) for pair in moved]
        changed[i // 2][i % 2] = changed[i // 2][i % 2].clone()
        changed[i // 2][i % 2][old] += error
        log_p = predicted(llm, changed, window, start)
        kl = float((exact.exp() * (exact - log_p)).sum())
        assert kl == pytest.approx(float(foreseen[:, i].mean()), rel=0.25), f"layer {i // 2}, {'KV'[i % 2]}"


def predicted(llm, pairs, window, start):
    """Log-probabilities [64, vocabulary] behind that past, head by head, in float64."""

    def attention(layer, q, k, v, cos_sin):
        table = llm._model.rope[: start + 64].double()
        k, v = (
            torch.cat([x[:start].view(start, 2, 16), y]).double() for x, y in zip(pairs[layer], (k, v), strict=True)
        )
        q, k = turn(q.double(), table[start:]), turn(k, table)
        out = []
        for head in range(4):
            logits = q[:, head] @ k[:, head // 2].T / 4
            seen = torch.arange(start + 64) <= torch.arange(start, start + 64)[:, None]
            out.append(logits.masked_fill(~seen, -math.inf).softmax(1) @ v[:, head // 2])
        return torch.stack(out, 1).float()

    def turn(x, table):
        cos, sin = table[:, None].chunk(2, -1)
        low, high = x.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    with torch.no_grad():
        ids = torch.tensor(window[start : start + 64])
        hidden = llm._model.forward(ids, torch.arange(start, start + 64), attention)
        return llm._model.exact_logits(hidden).double().log_softmax(1)


def test_eight_bits_everywhere_cost_next_to_nothing_and_none_cost_much(llm, window):
    calibration = evaluate_bits.calibrate(llm, [window])
    one = evaluate_bits.read(llm, Scorer(), window, 2)
    plans = [evaluate_bits.Plan((1.0,), torch.full((4, 1, 32), bits)) for bits in (8, 3, 0)]
    compared = [evaluate_bits.Row(str(i), plan) for i, plan in enumerate(plans)]
    kl = evaluate_bits.divergences(llm, calibration, one, compared)
    assert kl.shape == (3, 2)
    assert (kl[0] < 1e-3 * kl[2]).all() and (kl[0] < 0.05 * kl[1]).all() and (kl[1] < kl[2]).all()


def test_a_plan_spends_what_it_may_and_no_more(llm):
    eye, zero = torch.eye(32, dtype=torch.float64), torch.zeros(32, dtype=torch.float64)
    parts = [fit(zero, eye * scale, eye) for scale in (1, 4, 16, 64)]
    calibration = evaluate_bits.Calibration(
        parts, Tables.of(torch.randn(5000, generator=torch.Generator().manual_seed(3)))
    )
    assert all(isinstance(part, Transform) for part in parts) and calibration.nbytes > 4 * 2 * 32 * 32 * 4
    start, wanted = 448, 0.4
    for fractions in ((1.0,), (0.05, 0.30, 0.65)):
        factors = torch.tensor([8.0, 1, 0.1], dtype=torch.float64)[: len(fractions)].expand(4, -1)
        bits = evaluate_bits.bits_within(llm, wanted, start, fractions)
        for alike in (False, True):
            plan = evaluate_bits.plan(calibration, fractions, factors, bits, alike)
            share = evaluate_bits.share(llm, plan.nbytes(start - 68), start)
            assert wanted - 0.01 < share <= wanted
            by_side = plan.bits.double().mean((1, 2))
            assert alike or (by_side.diff() >= 0.5).all(), "about a bit for a factor of four"


def arguments(directory, *more):
    text = directory / "text"
    words = ["bits", "--model", directory / "model", "--text", text, "--calibrate", text, "--windows", 1, "--context",
             1024, "--blocks", 2, *more]  # fmt: skip
    return [str(word) for word in words]


def test_the_command(directory, capsys):
    assert evaluate.main(arguments(directory, "--bytes", "0.3,0.25", "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["signal"]: row for row in result["rows"]}
    names = (*evaluate_bits.BY, "uniform", "uniform, all layers alike")
    assert set(rows) == {f"{name}, {of}" for name in names for of in ("0.3", "0.25")} | {
        f"engine, {bits} bits" for bits in (4, 3, 2)
    }
    for name, row in rows.items():
        assert row["kl"] > 0 and row["se"] >= 0 and row["text"] == str(directory / "text")
        if not name.startswith("engine"):
            of = float(name.rsplit(", ", 1)[1])
            assert of - 0.01 < row["bytes"] <= of
            assert row["kl"] - row["kl_above_uniform"] == pytest.approx(rows[f"uniform, {of:g}"]["kl"])
    assert rows["uniform, 0.3"]["kl"] < rows["uniform, 0.25"]["kl"] < rows["engine, 2 bits"]["kl"]
    assert rows["oracle of squares, 0.25"]["kl"] < rows["random, 0.25"]["kl"]
    # 64 exact, 4 first, on average 32.5 of the block's own; 2 bits and a scale each, K a mean a page, V a zero.
    coded = (4 + 1 + 16 / 64 + 4 + 1 + 1) / 64
    expected = [(100.5 + (start - 68) * coded) / (start + 32.5) for start in (896, 960)]
    assert rows["engine, 2 bits"]["bytes"] == pytest.approx(sum(expected) / 2)
    assert [mix["chosen"] for mix in result["mixes"]].count(True) == 2
    assert result["calibration_bytes"] > 0 and result["exact_window"] == pytest.approx(100.5 / 928.5)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (["--dtype", "bfloat16"], ConfigError, "need --dtype float32, got bfloat16"),
        (["--blocks", "9"], ConfigError, "--context in whole 256 tokens, 1088 at least"),
        (["--windows", "99"], RequestError, "have no 99 windows and others to choose on"),
        (["--bytes", "0.05"], ConfigError, "--bytes 0.05: the exact window alone is 0.108 of the bytes"),
    ],
)
def test_what_the_command_refuses(directory, wrong, error, words):
    with pytest.raises(error, match=words):
        evaluate.main([*arguments(directory), *wrong])
