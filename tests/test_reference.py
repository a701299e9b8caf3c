"""The torch operations against formulas in float64 numpy, over caches whose unused slots are NaN.

Tolerances: float32 rounds at 6e-8 of the largest term and sums of up to 2,000 terms come in any order: 1e-5. bfloat16
has 8 bits, so an output is off by 2^-9 of itself when rounded once (2^-8: also its inputs' products or a sum of parts).
"""

import math
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear as torch_linear

from kernels import load, reference
from kernels.ops import AttentionPlan, LayerCache

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def f64(x):
    return x.detach().double().numpy()


def assert_near(actual, expected, dtype, scale=1.0):
    assert actual.dtype == dtype
    error = np.abs(f64(actual) - expected)
    limit = LIMITS[dtype] * scale * np.maximum(1.0, np.abs(expected))
    assert not np.isnan(error).any() and (error <= limit).all(), (error / limit).max()


def test_load_gives_this_module_and_torch_only():
    assert load("torch") is reference
    with pytest.raises(KeyError):
        load("numpy")


# Norms, activation, products.

SHAPES = pytest.mark.parametrize("shape", [(1, 8), (7, 63), (3, 576), (0, 16), (64, 4096)], ids=str)


def norm64(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


@dtypes
@SHAPES
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_rms_norm(shape, dtype, eps):
    x, weight = (torch.randn(shape) * 3).to(dtype), (1 + 0.2 * torch.randn(shape[1])).to(dtype)
    before = x.clone()
    assert_near(reference.rms_norm(x, weight, eps), norm64(f64(x), f64(weight), eps), dtype)
    assert torch.equal(x, before)


@dtypes
def test_rms_norm_of_values_whose_squares_do_not_fit_the_dtype(dtype):
    x = torch.full((2, 64), 300.0 if dtype == torch.float16 else 1e10).to(dtype)  # 300^2 is past float16's 65,504
    weight = torch.ones(64, dtype=dtype)
    assert_near(reference.rms_norm(x, weight, 1e-5), np.ones((2, 64)), dtype)
    assert_near(reference.rms_norm(torch.zeros(2, 64, dtype=dtype), weight, 1e-5), np.zeros((2, 64)), dtype)


@dtypes
@SHAPES
def test_add_rms_norm_adds_in_place(shape, dtype):
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = (1 + 0.2 * torch.randn(shape[1])).to(dtype)
    x_before, total, storage = x.clone(), f64(x) + f64(residual), residual.data_ptr()
    out = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(x, x_before)
    assert residual.data_ptr() == storage and (out.data_ptr() != storage or not x.numel())
    assert_near(residual, total, dtype)
    # The norm is of the sum as it was stored.
    assert_near(out, norm64(f64(residual), f64(weight), 1e-5), dtype)


@dtypes
@SHAPES
def test_norms_of_a_float32_stream_beside_a_narrower_weight(shape, dtype):
    """As the model calls them: what is summed up stays float32, and what goes to the products has their dtype."""
    x, weight = (torch.randn(shape) * 3), (1 + 0.2 * torch.randn(shape[1])).to(dtype)
    before = x.clone()
    assert_near(reference.rms_norm(x, weight, 1e-5), norm64(f64(x), f64(weight), 1e-5), dtype)
    assert torch.equal(x, before)
    residual, added = torch.randn(shape), torch.randn(shape).to(dtype)
    total, storage = f64(residual) + f64(added), residual.data_ptr()
    out = reference.add_rms_norm(added, residual, weight, 1e-5)
    assert residual.data_ptr() == storage
    assert_near(residual, total, torch.float32)
    assert_near(out, norm64(total, f64(weight), 1e-5), dtype)


@dtypes
@SHAPES
def test_silu_mul(shape, dtype):
    both = (torch.randn(shape[0], 2 * shape[1]) * 4).to(dtype)
    gate, up = both.chunk(2, dim=1)  # as the model calls it: halves of one product
    before = both.clone()
    expected = f64(gate) / (1 + np.exp(-f64(gate))) * f64(up)
    assert_near(reference.silu_mul(gate, up), expected, dtype)
    assert torch.equal(both, before)


@dtypes
def test_silu_mul_of_large_values_does_not_overflow(dtype):
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]]).to(dtype)
    assert_near(reference.silu_mul(gate, torch.ones_like(gate)), np.maximum(f64(gate), 0), dtype)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("shape", [(8, 16), (63, 100), (352, 64), (1536, 576)], ids=str)
@dtypes
def test_packed_linear_is_torchs_linear_to_the_bit(dtype, shape, tokens, bias):
    weight = (torch.randn(shape) / shape[1] ** 0.5).to(dtype)
    x, added = torch.randn(tokens, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype) if bias else None
    packed = reference.pack_linear(weight)
    out = reference.linear(x, packed, added)
    assert out.shape == (tokens, shape[0])
    assert torch.equal(out, torch_linear(x, weight, added))
    expected = f64(x) @ f64(weight).T + (f64(added) if bias else 0)
    assert_near(out, expected, dtype)


@dtypes
@pytest.mark.parametrize("shape", [(63, 100), (352, 64), (512, 576)], ids=str)
def test_linear_float32_is_not_rounded_on_the_way(dtype, shape):
    """The inputs are rounded numbers, the product of them is as good as float32 makes it: of bfloat16, half a percent
    of what the rounded product is off by at most."""
    weight, x = (torch.randn(shape) / shape[1] ** 0.5).to(dtype), torch.randn(7, shape[1]).to(dtype)
    packed = reference.pack_linear(weight)
    out = reference.linear_float32(x, packed)
    assert out.dtype == torch.float32
    expected = f64(x) @ f64(weight).T
    # Two roundings to 8 bits, of which the second is of what the first left.
    limit = 2.0**-15 if packed.is_mkldnn else 1e-5
    assert (np.abs(f64(out) - expected) <= limit * np.maximum(1, np.abs(expected))).all()


def test_only_bfloat16_is_packed():
    for dtype in (torch.float32, torch.float16):
        weight = torch.randn(32, 16).to(dtype)
        assert reference.pack_linear(weight).data_ptr() == weight.data_ptr()
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert reference.pack_linear(torch.randn(32, 16).bfloat16()).is_mkldnn


# The cache.


def runs(slots):
    """(first slot, count) of each run of consecutive slots."""
    pieces = []
    for slot in slots.tolist():
        if pieces and slot == sum(pieces[-1]):
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + 1)
        else:
            pieces.append((slot, 1))
    return tuple(pieces)


class Batch:
    """Sequences in a cache whose frames are drawn at random, all unused slots NaN; and the same tokens in plain arrays.

    `lengths[b]` tokens are cached of sequence b, the newest `queries[b]` of them are its queries. spread: how far the
    frames lie apart, 1 gives a single piece.
    """

    def __init__(self, lengths, queries, kv_heads, groups, dim, dtype, page_size=16, spread=3, seed=0):
        rng = np.random.default_rng(seed)
        pages = [-(-n // page_size) for n in lengths]
        num_frames = sum(pages) * spread + 2
        free = rng.permutation(num_frames) if spread > 1 else np.arange(num_frames)
        frames = [free[sum(pages[:b]) : sum(pages[: b + 1])].astype(np.int32) for b in range(len(lengths))]
        table = np.zeros((len(lengths), max(pages)), dtype=np.int32)
        for row, own in zip(table, frames, strict=True):
            row[: len(own)] = own
        slots = [own[np.arange(n) // page_size].astype(np.int64) * page_size + np.arange(n) % page_size
                 for own, n in zip(frames, lengths, strict=True)]  # fmt: skip
        decodes = sum(n == 1 for n in queries)
        assert all(n == 1 for n in queries[:decodes])
        self.plan = AttentionPlan(
            query_start=torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32),
            exact_lens=torch.tensor(lengths, dtype=torch.int32),
            page_table=torch.from_numpy(table),
            slots=torch.from_numpy(np.concatenate([s[len(s) - n :] for s, n in zip(slots, queries, strict=True)])),
            num_decodes=decodes,
            max_query_len=max(queries[decodes:], default=0),
            pieces=tuple(map(runs, slots)),
        )
        self.queries, self.scale = queries, 1.3 * dim**-0.5
        shape = (kv_heads, num_frames, page_size, dim)
        self.k_cache, self.v_cache = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        units = [x.view(torch.uint8).view(kv_heads, -1, page_size * dim // 8) for x in (self.k_cache, self.v_cache)]
        self.cache = LayerCache(self.k_cache, self.v_cache, *units)
        self.keys, self.values = [], []
        for sequence in slots:
            for cache, tokens in ((self.k_cache, self.keys), (self.v_cache, self.values)):
                x = torch.from_numpy(rng.standard_normal((kv_heads, len(sequence), dim))).to(dtype)
                cache.view(kv_heads, -1, dim)[:, torch.from_numpy(sequence)] = x
                tokens.append(f64(x))
        heads = kv_heads * groups
        self.q = torch.from_numpy(rng.standard_normal((sum(queries), heads, dim))).to(dtype)

    def expected(self, b):
        """(output [n, heads, dim], scores [n, heads, length] with -inf where hidden) of sequence b in float64."""
        n, start = self.queries[b], int(self.plan.query_start[b])
        q, length = f64(self.q[start : start + n]), self.keys[b].shape[1]
        groups = q.shape[1] // len(self.keys[b])
        out, scores = np.empty_like(q), np.full((n, q.shape[1], length), -np.inf)
        for i in range(n):
            seen = length - n + i + 1
            for head in range(q.shape[1]):
                s = self.keys[b][head // groups, :seen] @ q[i, head] * self.scale
                p = np.exp(s - s.max())
                out[i, head] = p @ self.values[b][head // groups, :seen] / p.sum()
                scores[i, head, :seen] = s
        return out, scores


SHAPED = pytest.mark.parametrize(
    ("kv_heads", "groups", "dim"),
    [(4, 2, 8), (2, 1, 16), (1, 8, 64), (3, 3, 64), (1, 5, 80), (2, 3, 96), (2, 4, 128)],
    ids=lambda x: str(x),
)
# Attention averages values of size 1: absolute errors. The sum of parts in bfloat16 rounds each of them.
ATTENTION = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.0025}
spreads = pytest.mark.parametrize("spread", [1, 3], ids=["one-piece", "scattered"])


def assert_attention(out, expected, dtype):
    assert out.dtype == dtype and out.shape == expected.shape
    assert not out.isnan().any()
    np.testing.assert_allclose(f64(out), expected, rtol=0, atol=ATTENTION[dtype])


@spreads
@dtypes
@SHAPED
def test_prefill_attention(kv_heads, groups, dim, dtype, spread):
    lengths, queries = [1, 40, 5, 16, 17, 90, 64, 33], [1, 1, 5, 16, 2, 57, 17, 32]
    batch = Batch(lengths, queries, kv_heads, groups, dim, dtype, spread=spread)
    before = batch.k_cache.clone()
    out = reference.prefill_attention(batch.q[2:], batch.cache, batch.plan, batch.scale)
    expected = np.concatenate([batch.expected(b)[0] for b in range(2, len(lengths))])
    assert_attention(out, expected, dtype)
    torch.testing.assert_close(batch.k_cache, before, rtol=0, atol=0, equal_nan=True)


@spreads
@dtypes
@SHAPED
def test_decode_attention(kv_heads, groups, dim, dtype, spread):
    lengths, queries = [1, 40, 16, 17, 129, 30, 64], [1, 1, 1, 1, 1, 30, 2]
    batch = Batch(lengths, queries, kv_heads, groups, dim, dtype, spread=spread)
    heads = kv_heads * groups
    logits, lse = torch.full((5, heads, 140), torch.nan), torch.full((5, heads), torch.nan)
    q = batch.q[:5]
    plain = reference.decode_attention(q, batch.cache, batch.plan, batch.scale)
    out = reference.decode_attention(q, batch.cache, batch.plan, batch.scale, logits, lse)
    assert torch.equal(plain, out)
    outputs, scores = zip(*(batch.expected(b) for b in range(5)), strict=True)
    assert_attention(out, np.concatenate(outputs), dtype)
    for b, natural in enumerate(scores):
        n = lengths[b]
        # q and k are exact in float32, so these are as good in every dtype.
        np.testing.assert_allclose(f64(logits[b, :, :n]), natural[0] * math.log2(math.e), rtol=0, atol=2e-5)
        expected_lse = np.logaddexp.reduce(natural[0], axis=-1) * math.log2(math.e)
        np.testing.assert_allclose(f64(lse[b]), expected_lse, rtol=0, atol=2e-5)
        assert logits[b, :, n:].isnan().all(), "entries past the length were touched"
        np.testing.assert_allclose(torch.exp2(logits[b, :, :n] - lse[b, :, None]).sum(-1), 1, rtol=0, atol=1e-5)


@dtypes
@pytest.mark.parametrize("chunk", [1, 100, 4096], ids="chunk{}".format)
def test_long_sequences_are_converted_in_chunks(monkeypatch, dtype, chunk):
    sizes, copies = [], []
    convert = torch.Tensor.float

    def recorded(self):
        result = convert(self)
        if self is not batch.q and dtype != torch.float32:
            assert not any(copy() is not None for copy in copies), "two copies at once"
            sizes.append(self.numel())
            copies.append(weakref.ref(result))
        return result

    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(torch.Tensor, "float", recorded)
    batch = Batch([700, 300], [1, 1], 2, 2, 16, dtype, page_size=64, spread=2)
    logits, lse = torch.empty(2, 4, 700), torch.empty(2, 4)
    out = reference.decode_attention(batch.q, batch.cache, batch.plan, batch.scale, logits, lse)
    assert_attention(out, np.concatenate([batch.expected(b)[0] for b in range(2)]), dtype)
    np.testing.assert_allclose(f64(logits[1, :, :300]), batch.expected(1)[1][0] * math.log2(math.e), rtol=0, atol=2e-5)
    if dtype != torch.float32:
        assert sum(sizes) == 1000 * 32 and max(sizes) <= max(chunk, 32)


@dtypes
def test_attention_that_is_sure_of_itself(dtype):
    """Scores of some hundreds: a softmax without its maximum would overflow, and a merge lose all parts but one."""
    batch = Batch([150, 150], [1, 3], 2, 2, 16, dtype, spread=3)
    batch.q *= 40
    out = reference.decode_attention(batch.q[:1], batch.cache, batch.plan, batch.scale)
    # Nearly all weight on one token; where two are near, the rounding of scores of 300 in float32 shows.
    np.testing.assert_allclose(f64(out), batch.expected(0)[0], rtol=0, atol=5 * ATTENTION[dtype])
    if dtype == torch.float32:  # torch's own kernel rounds half-precision scores
        out = reference.prefill_attention(batch.q[1:], batch.cache, batch.plan, batch.scale)
        np.testing.assert_allclose(f64(out), batch.expected(1)[0], rtol=0, atol=5e-4)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_ragged_batch(data):
    page_size = data.draw(st.sampled_from([16, 32, 64]), "page_size")
    decodes = data.draw(st.lists(st.integers(1, 150), max_size=3), "decodes")
    chunks = data.draw(st.lists(st.tuples(st.integers(2, 70), st.integers(0, 100)), max_size=3), "chunks")
    if not decodes and not chunks:
        return
    batch = Batch(
        [*decodes, *(n + past for n, past in chunks)],
        [*(1 for _ in decodes), *(n for n, _ in chunks)],
        data.draw(st.sampled_from([1, 2]), "kv_heads"),
        data.draw(st.sampled_from([1, 3]), "groups"),
        16,
        torch.float32,
        page_size,
        data.draw(st.sampled_from([1, 2, 3]), "spread"),
        data.draw(st.integers(0, 1000), "seed"),
    )
    n = len(decodes)
    parts = []
    if n:
        parts.append(reference.decode_attention(batch.q[:n], batch.cache, batch.plan, batch.scale))
    if chunks:
        parts.append(reference.prefill_attention(batch.q[n:], batch.cache, batch.plan, batch.scale))
    expected = np.concatenate([batch.expected(b)[0] for b in range(n + len(chunks))])
    assert_attention(torch.cat(parts), expected, torch.float32)


@dtypes
@SHAPED
def test_rope_store(kv_heads, groups, dim, dtype):
    batch = Batch([40, 1, 17], [1, 1, 17], kv_heads, groups, dim, dtype)
    tokens, heads = 19, kv_heads * groups
    # As the model calls it: parts of one product, so that tokens lie far apart.
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    q64, k64, v64 = f64(q), f64(k), f64(v)
    angles = torch.rand(tokens, dim // 2, dtype=torch.float64) * 2 * math.pi
    cos_sin = (torch.cat([angles.cos(), angles.sin()], dim=1) * 1.2).float()
    k_before, v_before = batch.k_cache.clone(), batch.v_cache.clone()
    reference.rope_store(q, k, v, cos_sin, batch.plan.slots, batch.k_cache, batch.v_cache)

    def rotated(x):
        cos, sin = np.split(f64(cos_sin)[:, None], 2, axis=-1)
        low, high = np.split(x, 2, axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    assert_near(q, rotated(q64), dtype)
    stored_k, stored_v = (x.view(kv_heads, -1, dim) for x in (batch.k_cache, batch.v_cache))
    slots = batch.plan.slots
    assert_near(stored_k[:, slots].transpose(0, 1), rotated(k64), dtype)
    np.testing.assert_array_equal(f64(stored_v[:, slots].transpose(0, 1)), v64)
    # Nothing else changed.
    others = torch.ones(stored_k.shape[1], dtype=torch.bool)
    others[slots] = False
    for stored, before in ((stored_k, k_before), (stored_v, v_before)):
        same = stored[:, others], before.view(stored.shape)[:, others]
        torch.testing.assert_close(*same, rtol=0, atol=0, equal_nan=True)


def test_rope_store_turns_the_first_position_not_at_all_and_keeps_lengths():
    q, k, v = torch.randn(2, 4, 16), torch.randn(2, 2, 16), torch.randn(2, 2, 16)
    angles = torch.tensor([[0.0] * 8, [1.7] * 8])
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    q_before = q.clone()
    caches = torch.full((2, 2, 3, 16, 16), torch.nan)
    reference.rope_store(q, k, v, cos_sin, torch.tensor([47, 5]), *caches)
    assert torch.equal(q[0], q_before[0])
    torch.testing.assert_close(q[1].norm(dim=-1), q_before[1].norm(dim=-1))
    assert torch.equal(caches[0, :, 2, 15], k[0]) and torch.equal(caches[1, :, 0, 5], v[1])
    assert (~caches.isnan()).sum() == 2 * 2 * 2 * 16
