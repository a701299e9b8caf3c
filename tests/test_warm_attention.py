"""Attention over exact and compressed pages in torch, against float64 attention over what the pages mean.

The caches are those of `tools.float64`: scattered, everything that belongs to no sequence NaN, or 255 among the codes.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from tools import float64

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
# Of values of size 1 to 10, averaged: absolute. torch's own prefill kernel rounds p, K and V to 16 bits.
DECODE = {torch.float32: 2e-5, torch.bfloat16: 0.05, torch.float16: 0.01}
PREFILL = {torch.float32: 2e-5, torch.bfloat16: 0.12, torch.float16: 0.03}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def make_batch(*args, **settings):
    """With frames side by side, as this backend wants them."""
    batch = float64.make_batch(*args, **settings)
    cache = batch.cache._replace(k=batch.cache.k.contiguous(), v=batch.cache.v.contiguous())
    return replace(batch, cache=cache)


def check_decode(batch, dtype, limit=None):
    """Output, every logit in its column, the log-sum-exp, and no column touched that belongs to no token."""
    n, heads = batch.plan.num_decodes, batch.q.shape[1]
    page_size = batch.cache.k.shape[2]
    q = batch.q[:n]
    logits = torch.full((n, heads, batch.plan.num_columns(page_size)), torch.nan)
    lse = torch.full((n, heads), torch.nan)
    before = [x.clone() for x in filter(torch.is_tensor, batch.cache)]
    out = reference.decode_attention(q, batch.cache, batch.plan, batch.scale, logits, lse)
    assert out.dtype == dtype and out.shape == q.shape
    assert torch.equal(out, reference.decode_attention(q, batch.cache, batch.plan, batch.scale))
    for x, y in zip(filter(torch.is_tensor, batch.cache), before, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    expected, every = float64.attention(batch, range(n))
    error = (out.double() - expected).abs().max()
    assert error <= (limit or DECODE[dtype]), error
    for b, wanted in enumerate(every):
        columns = batch.columns(b)
        assert len(columns) == wanted.shape[2]
        scale = wanted.abs().max().clamp_min(1)
        # What is multiplied is exact in float32: so in every dtype.
        np.testing.assert_allclose(logits[b][:, columns], wanted[0], rtol=0, atol=4e-6 * scale)
        np.testing.assert_allclose(lse[b], torch.logsumexp(wanted[0] * np.log(2), -1) / np.log(2), atol=4e-6 * scale)
        others = torch.ones(logits.shape[2], dtype=torch.bool)
        others[columns] = False
        assert logits[b][:, others].isnan().all(), "columns of no token were touched"
        shares = torch.exp2(logits[b][:, columns] - lse[b][:, None]).sum(-1)
        np.testing.assert_allclose(shares, 1, rtol=0, atol=1e-5)


def check_prefill(batch, dtype, limit=None):
    first = batch.plan.num_decodes
    q = batch.q[int(batch.plan.query_start[first]) :]
    out = reference.prefill_attention(q, batch.cache, batch.plan, batch.scale)
    assert out.dtype == dtype and out.shape == q.shape
    expected, _ = float64.attention(batch, range(first, len(batch.keys)))
    error = (out.double() - expected).abs().max()
    assert error <= (limit or PREFILL[dtype]), error


EVERY = {8: [1, 0, 3, 2], 4: [0, 2, 1, 3], 3: [2, 1, 0, 4], 2: [1, 3, 2, 0]}
SHAPES = pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size"),
    [(4, 2, 16, 16), (3, 3, 64, 32), (8, 1, 64, 64), (5, 1, 80, 16), (6, 2, 96, 32), (4, 2, 128, 16), (2, 2, 8, 64)],
    ids=lambda x: str(x),
)


@DTYPES
@SHAPES
def test_decode_over_every_format_at_once(heads, kv_heads, dim, page_size, dtype):
    batch = make_batch([1] * 4, [1, 40, 16, 17], heads, kv_heads, dim, dtype, page_size, 4, warm=EVERY)
    check_decode(batch, dtype)


@DTYPES
@SHAPES
def test_prefill_over_every_format_at_once(heads, kv_heads, dim, page_size, dtype):
    batch = make_batch([1, 2, 16, 33], [1, 40, 16, 50], heads, kv_heads, dim, dtype, page_size, 1, warm=EVERY)
    check_prefill(batch, dtype)
    check_decode(batch, dtype)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_one_format_alone(bits):
    """Of a sequence whose only exact token is the query; and beside one that has no compressed page."""
    batch = make_batch([1, 1], [1, 30], 4, 2, 16, torch.float32, 16, 2, warm={bits: [5, 0]})
    check_decode(batch, torch.float32)
    batch = make_batch([2, 30], [2, 30], 4, 2, 16, torch.float32, 16, 0, warm={bits: [5, 0]})
    check_prefill(batch, torch.float32)


@pytest.mark.parametrize("chunk", [1, 700, 1 << 21])
def test_pages_are_read_a_few_at_a_time(monkeypatch, chunk):
    """Whatever number of elements is decompressed at once, and never many more than that."""
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", chunk)
    sizes, original = [], reference._unpack

    def recorded(*args):
        out = original(*args)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr(reference, "_unpack", recorded)
    batch = make_batch([1, 9], [20, 60], 4, 2, 16, torch.float32, 16, 1, warm={4: [9, 7], 3: [1, 12]})
    check_decode(batch, torch.float32)
    check_prefill(batch, torch.float32)
    assert max(sizes) <= max(chunk // 2, 2 * 16 * 16)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_ragged_batch(data):
    decodes = data.draw(st.lists(st.integers(1, 70), max_size=3), "decodes")
    chunks = data.draw(st.lists(st.tuples(st.integers(2, 40), st.integers(0, 50)), max_size=3), "chunks")
    count = len(decodes) + len(chunks)
    if not count:
        return
    per_sequence = st.lists(st.integers(0, 4), min_size=count, max_size=count)
    formats = data.draw(st.lists(st.sampled_from([8, 4, 3, 2]), unique=True, max_size=4), "formats")
    # The engine lists a format only where a sequence of the step has one.
    warm = {bits: data.draw(per_sequence.filter(any), f"{bits} bits") for bits in sorted(formats)}
    torch.manual_seed(data.draw(st.integers(0, 100), "seed"))
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 3), (3, 1)]), "heads")
    batch = make_batch(
        [1] * len(decodes) + [n for n, _ in chunks], decodes + [n + past for n, past in chunks], kv_heads * group,
        kv_heads, data.draw(st.sampled_from([8, 24, 32]), "dim"), torch.float32,
        data.draw(st.sampled_from([16, 32]), "page_size"), len(decodes), warm=warm,
    )  # fmt: skip
    if decodes:
        check_decode(batch, torch.float32, 1e-4)
    if chunks:
        check_prefill(batch, torch.float32, 1e-4)
