"""Compressed pages against a codec in float64 numpy, written from the words of `kernels.ops`, byte after byte."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.ops import CLIPS, MEAN_EXPONENT, min_exponent

BITS = (8, 4, 3, 2)
DIMS = (8, 16, 64, 80, 96, 128)
bits_ = pytest.mark.parametrize("bits", BITS)
keys_ = pytest.mark.parametrize("is_key", [True, False], ids=["key", "value"])
ROUNDING = 2e-6  # of float32 sums of up to 128 terms, relative to the largest


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


# The codec.


def hadamard(dim):
    """[D, D] float64: Sylvester's matrix of the largest power of two in dim, in blocks on the diagonal."""
    size = 1
    while dim % (2 * size) == 0:
        size *= 2
    block = np.ones((1, 1))
    while len(block) < size:
        block = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), block)
    return np.kron(np.eye(dim // size), block) / math.sqrt(size)


def codes_of(page, bits, page_size, dim):
    """Every element's code [page_size, D], from the bytes of its page [bits * page_size * dim / 8]."""

    def fields(run, width):
        row = dim * width // 8
        tokens = run.reshape(page_size, row).astype(int)
        columns = [tokens[:, i % row] >> (i // row * width) & (1 << width) - 1 for i in range(dim)]
        return np.stack(columns, axis=1)

    if bits != 3:
        return fields(page, bits)
    low = page_size * dim // 4
    return fields(page[:low], 2) + 4 * fields(page[low:], 1)


def scale_of(code, bits):
    """4 bits of exponent and 4 of mantissa, as numbers."""
    return (1 + code % 16 / 16) * 2.0 ** (min_exponent(bits) + code // 16)


def mean_of(code):
    size = code % 128
    value = 0.0 if size == 0 else (1 + size % 8 / 8) * 2.0 ** (MEAN_EXPONENT + size // 8)
    return -value if code >= 128 else value


def scales_of(record, page_size, bits):
    return np.array([scale_of(int(code), bits) for code in record[:page_size]])


def decode(page, record, bits, is_key, page_size, dim):
    """The page in its rotated basis, [page_size, D] float64."""
    codes, scales = codes_of(page, bits, page_size, dim), scales_of(record, page_size, bits)[:, None]
    if is_key:
        means = np.array([mean_of(int(code)) for code in record[page_size : page_size + dim]])
        return (codes - (2**bits - 1) / 2) * scales + means
    zeros = record[page_size : 2 * page_size].astype(np.int8).astype(int)[:, None]
    return (codes - 2 ** (bits - 1) + zeros) * scales


def compress(x, bits, is_key):
    codes, records = reference.compress(x, bits, is_key)
    assert codes.dtype == records.dtype == torch.uint8
    n, page_size, dim = x.shape
    assert codes.shape == (n, bits * page_size * dim // 8)
    assert records.shape == (n, page_size + (dim if is_key else page_size))
    return codes.numpy(), records.numpy()


def round_trip(x, bits, is_key, like=None):
    return reference.decompress(*reference.compress(x, bits, is_key), bits, is_key, x if like is None else like)


def pages(n, page_size, dim, dtype=torch.float32, size=1.0):
    """Pages such as K has: a channel with a mean, tokens of different sizes."""
    x = torch.randn(n, page_size, dim) * torch.rand(n, page_size, 1).add(0.2) + torch.randn(n, 1, dim)
    return (x * size).to(dtype)


def f64(x):
    return x.double().numpy()


# The layout.


@keys_
@bits_
@pytest.mark.parametrize("dim", DIMS)
def test_what_is_written_is_read_by_the_words_of_the_specification(dim, bits, is_key):
    x = pages(2, 16, dim)
    codes, records = compress(x, bits, is_key)
    out = round_trip(x, bits, is_key)
    for page in range(2):
        rotated = decode(codes[page], records[page], bits, is_key, 16, dim)
        limit = ROUNDING * np.abs(rotated).max() * dim**0.5
        np.testing.assert_allclose(f64(out[page]), rotated @ hadamard(dim), rtol=0, atol=limit)


@keys_
@bits_
@pytest.mark.parametrize(("page_size", "dim"), [(16, 8), (32, 80), (64, 96)])
def test_any_bytes_are_read_as_the_specification_says(page_size, dim, bits, is_key):
    """Bytes that no writer wrote: every code, every mean, every zero, scales that keep the sums comparable."""
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 256, (2, bits * page_size * dim // 8), dtype=np.uint8)
    records = rng.integers(0, 256, (2, page_size + (dim if is_key else page_size)), dtype=np.uint8)
    out = reference.decompress(
        torch.from_numpy(codes), torch.from_numpy(records), bits, is_key, torch.zeros(page_size, dim)
    )
    for page in range(2):
        rotated = decode(codes[page], records[page], bits, is_key, page_size, dim)
        expected = rotated @ hadamard(dim)
        largest = np.abs(rotated).max(axis=1, keepdims=True)  # of the token, whose elements are added
        assert (np.abs(f64(out[page]) - expected) <= ROUNDING * largest * dim**0.5 + 1e-30).all()


def test_scales_and_means_are_the_floats_whose_bits_they_are():
    for bits in BITS:
        for code in range(256):
            pattern = (code << 19) + ((min_exponent(bits) + 127) << 23)
            assert np.array(pattern, dtype=np.int32).view(np.float32) == scale_of(code, bits)
        assert scale_of(0, bits) == 2.0 ** min_exponent(bits)
    for code in range(1, 128):
        pattern = (code << 20) + ((MEAN_EXPONENT + 127) << 23)
        assert np.array(pattern, dtype=np.int32).view(np.float32) == mean_of(code) == -mean_of(code + 128)
    assert mean_of(0) == mean_of(128) == 0


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 8, 12, 64, 80, 96, 100, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_rotation(dim, dtype):
    matrix = f64(reference.rotate(torch.eye(dim, dtype=dtype)))
    rounding = {torch.float32: 1e-7, torch.float64: 1e-15, torch.bfloat16: 2e-3}[dtype]
    np.testing.assert_allclose(matrix, hadamard(dim), rtol=0, atol=rounding)
    exact = f64(reference.rotate(torch.eye(dim, dtype=torch.float64)))
    np.testing.assert_allclose(exact @ exact, np.eye(dim), atol=1e-14)  # its own inverse
    x = torch.randn(2, 3, dim).to(dtype)
    assert reference.rotate(x).shape == x.shape and reference.rotate(x).dtype == dtype
    # In blocks: elements of one never reach another.
    size = dim & -dim
    blocks = hadamard(dim).reshape(dim // size, size, dim // size, size)
    assert all(not blocks[i, :, j].any() for i in range(dim // size) for j in range(dim // size) if i != j)


# The error.


def check_error(x, bits, is_key):
    """Each token of the page has the scale of the best clip, and each element the nearest code."""
    n, page_size, dim = x.shape
    codes, records = compress(x, bits, is_key)
    steps = 2**bits - 1
    for page in range(n):
        rotated = f64(x[page]) @ hadamard(dim)
        scales = scales_of(records[page], page_size, bits)
        means = np.array([mean_of(int(c)) for c in records[page][page_size:]]) if is_key else np.zeros(dim)
        wanted = rotated - means
        got = decode(codes[page], records[page], bits, is_key, page_size, dim) - means
        tiny = 4 * ROUNDING * np.abs(wanted).max() + 1e-12
        if is_key:  # the means are the nearest there are, to an eighth
            true = rotated.mean(0)
            bound = np.maximum(np.abs(true) / 16, 1.07 * 2.0**MEAN_EXPONENT) + tiny
            assert (np.abs(means - true) <= bound)[np.abs(true) < 240].all()
        found = codes_of(codes[page], bits, page_size, dim)
        inside = (found > 0) & (found < steps)
        half = (scales / 2)[:, None] + tiny
        assert (np.abs(got - wanted) <= half)[inside].all(), "an element that was not clipped is over half a step off"
        # Clipped ones are beyond the range, to their own side.
        assert (got - wanted <= half)[found == steps].all() and (got - wanted >= -half)[found == 0].all()
        errors = ((got - wanted) ** 2).sum(1)
        others = np.array([error_of_clip(wanted, clip, bits, is_key) for clip in (CLIPS if bits < 4 else CLIPS[:1])])
        # As good as the best clip; where two are as good as equal in float32, either.
        assert (errors <= others.min(0) * (1 + 1e-4) + dim * tiny**2).all()


def error_of_clip(wanted, clip, bits, is_key):
    """Squared error of each token, with the scale that the clip of its range asks for; in float64."""
    steps = 2**bits - 1
    if is_key:
        high = np.abs(wanted).max(1)
        low = -high
    else:
        low, high = wanted.min(1), wanted.max(1)
    half = (high - low) / 2 * clip
    step = np.maximum(2 * half / steps, np.abs(high + low) / 240)
    errors = []
    for near in (1 - 1e-5, 1 + 1e-5):  # where float32 may choose either, the worse of both
        scale = nearest_scale(step * near, bits)[:, None]
        middle = (high + low)[:, None] / 2 / scale
        for offset in [-steps / 2] if is_key else [np.round((middle - steps / 2) * near)]:
            codes = np.clip(np.round(wanted / scale - offset), 0, steps)
            errors.append((((codes + offset) * scale - wanted) ** 2).sum(1))
    return np.max(errors, axis=0)


EVERY_SCALE = {bits: np.array([scale_of(code, bits) for code in range(256)]) for bits in BITS}


def nearest_scale(values, bits):
    """At 8 bits the next one up."""
    every = EVERY_SCALE[bits]
    if bits == 8:
        return every[np.minimum(np.searchsorted(every, values), 255)]
    return every[np.abs(every[:, None] - values).argmin(0)]


@keys_
@bits_
@pytest.mark.parametrize("dim", DIMS)
def test_elements_are_within_half_a_step_and_the_best_clip_is_taken(dim, bits, is_key):
    check_error(pages(1, 32, dim), bits, is_key)


@keys_
@bits_
@pytest.mark.parametrize("size", [2.0**-7, 10.0, 40.0])
def test_of_any_size(size, bits, is_key):
    check_error(pages(1, 16, 32, size=size), bits, is_key)


@keys_
@bits_
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_half_precision(page_size, dtype, bits, is_key):
    x = pages(2, page_size, 32, dtype)
    check_error(x, bits, is_key)
    out = round_trip(x, bits, is_key)
    assert out.dtype == dtype
    wide = round_trip(x.float(), bits, is_key)
    torch.testing.assert_close(out, wide.to(dtype), rtol=0, atol=0)  # the arithmetic is float32's, whatever the dtype


EXPECTED = {8: 0.01, 4: 0.12, 3: 0.25, 2: 0.5}  # root of the mean square error over that of the (mean-free) elements


@keys_
@bits_
def test_the_size_of_the_error(bits, is_key):
    """Of normal numbers a quantiser of so many levels cannot be much better: 2 bits lose a third of the size."""
    x = torch.randn(8, 64, 64)
    error = (round_trip(x, bits, is_key) - x).square().mean().sqrt()
    assert EXPECTED[bits] / 4 < error < EXPECTED[bits]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_page(data):
    dim = data.draw(st.sampled_from([8, 24, 40]), "dim")
    kind = st.floats(-60, 60, width=16) if data.draw(st.booleans(), "wild") else st.sampled_from([-1.0, 0.0, 0.5, 2.0])
    values = data.draw(st.lists(kind, min_size=dim * 4, max_size=dim * 4), "values")
    x = torch.tensor(values).view(4, dim).repeat(4, 1)[None]
    check_error(x, data.draw(st.sampled_from(BITS), "bits"), data.draw(st.booleans(), "is_key"))


# Pages that are not like others.


@keys_
@bits_
def test_zeros_come_back_as_almost_zero(bits, is_key):
    out = round_trip(torch.zeros(1, 16, 64), bits, is_key)
    least = 2.0 ** min_exponent(bits)  # the smallest step there is: K has no code for 0
    assert out.abs().max() <= (least / 2 * 8 if is_key else 0)  # 64 halves of a step, over the root of 64


@pytest.mark.parametrize("kind", ["ones", "zeros", "one-channel"])
def test_values_of_one_sign_at_8_bits(kind):
    """As rotated: a V that is alike in all channels, or 0, or has most of its size in its block's first channel."""
    x = {"ones": torch.ones(1, 16, 64), "zeros": torch.zeros(1, 16, 64), "one-channel": torch.randn(1, 16, 64) / 99}
    x = x[kind].clone()
    if kind == "one-channel":
        x[0, 0, 0] = 3.0
    out = round_trip(x, 8, False)
    assert (out - x).abs().max() <= 0.05 * x.abs().max()


@keys_
@bits_
@pytest.mark.parametrize("value", [1.0, -3.7, 20.0, 2.0**-9])
def test_a_constant_page(value, bits, is_key):
    """All of it is in the first channel of each block: of K as its mean, of V as one outlier."""
    x = torch.full((1, 16, 64), value)
    check_error(x, bits, is_key)
    out = round_trip(x, bits, is_key)
    if is_key:
        assert (out - x).abs().max() <= max(abs(value) / 8, 2.0**-8)


@keys_
@bits_
def test_one_outlier_channel_costs_the_others_little(bits, is_key):
    """The rotation spreads it over its token, the means of K take what is the same in all tokens."""
    torch.manual_seed(3)
    plain = torch.randn(4, 64, 128)
    x = plain.clone()
    x[:, :, 5] += 20.0
    error = (round_trip(x, bits, is_key) - x).square().mean().sqrt()
    usual = (round_trip(plain, bits, is_key) - plain).square().mean().sqrt()
    assert error <= usual * (1.25 if is_key else 2.0)


@keys_
@bits_
def test_one_outlier_token_costs_the_others_nothing(bits, is_key):
    plain = torch.randn(1, 64, 64)
    plain -= plain.mean(1, keepdim=True)
    x = plain.clone()
    x[0, 7] *= 1000
    out, usual = round_trip(x, bits, is_key), round_trip(plain, bits, is_key)
    others = torch.arange(64) != 7
    if not is_key:
        assert torch.equal(out[0, others], usual[0, others])
        return
    # Of K it moves the means, by a 64th of itself, which the other tokens' scales have to span.
    moved = x.mean(1).norm() / 8
    error = (out - x)[0, others].square().mean().sqrt()
    assert error <= EXPECTED[bits] * (1 + moved)


@keys_
@bits_
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("where", [(0, 0), (9, 33)], ids=str)
def test_a_bad_element_costs_its_own_page_its_precision_and_nothing_else(where, bad, bits, is_key):
    x = torch.randn(3, 16, 64)
    good = [part.clone() for part in reference.compress(x, bits, is_key)]
    x[(1, *where)] = bad
    before = x.clone()
    codes, records = reference.compress(x, bits, is_key)
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)
    for page in (0, 2):
        assert torch.equal(codes[page], good[0][page]) and torch.equal(records[page], good[1][page])
    out = reference.decompress(codes, records, bits, is_key, x)
    assert out.isfinite().all()
    # Taken as 2^14 in size, or as 0: no element comes back larger than what was put in.
    assert out.abs().max() <= (8 if math.isnan(bad) else 2.0**14 * 1.5)
    if not is_key:  # each token has a scale of its own
        others = torch.arange(16) != where[0]
        assert torch.equal(out[1, others], reference.decompress(*good, bits, is_key, x)[1, others])


@keys_
@bits_
def test_a_page_of_nothing_but_nan_or_infinities(bits, is_key):
    for value in (math.nan, math.inf, -math.inf):
        assert round_trip(torch.full((1, 16, 32), value), bits, is_key).isfinite().all()


@keys_
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_going_down_step_by_step_is_nearly_as_good_as_at_once(dtype, is_key):
    x = pages(8, 64, 64, dtype)
    step = x
    for bits in BITS:
        step = round_trip(step, bits, is_key)
        direct = round_trip(x, bits, is_key)
        errors = [(y.float() - x.float()).square().mean().sqrt() for y in (step, direct)]
        assert errors[0] <= 1.35 * errors[1]


@keys_
@bits_
def test_the_same_page_gives_the_same_bytes(bits, is_key):
    """Alone or among others, again and again, wherever it lies in memory."""
    x = pages(5, 32, 80)
    codes, records = reference.compress(x, bits, is_key)
    strided = torch.zeros(5, 32, 160)[..., ::2].copy_(x)
    for again in (reference.compress(x.clone(), bits, is_key), reference.compress(strided, bits, is_key)):
        assert torch.equal(codes, again[0]) and torch.equal(records, again[1])
    alone = [reference.compress(x[i : i + 1], bits, is_key) for i in range(5)]
    out = reference.decompress(codes, records, bits, is_key, x)
    for i, (own_codes, own_records) in enumerate(alone):
        difference = reference.decompress(own_codes, own_records, bits, is_key, x) - out[i]
        # A product of more rows may round differently: then a code is the next one, at a tie.
        assert (difference.abs() > 1e-4).sum() <= 80
