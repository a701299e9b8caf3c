"""decode_attention against float64: slices, ragged batches, every head layout and format, emitted logits."""

import math
from dataclasses import replace

import pytest
import torch

from kernels import attention
from kernels.attention import MAX_SLICES, count_slices, decode_attention
from tools import float64

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def decode_batch(exact_lens: list[int], *shape: int, **options) -> float64.Batch:
    ones = [1] * len(exact_lens)
    return float64.make_batch(ones, exact_lens, *shape, num_decodes=len(exact_lens), **options)


def run(batch: float64.Batch, **outputs: torch.Tensor) -> torch.Tensor:
    q = batch.q[: batch.plan.num_decodes]
    return decode_attention(q, batch.cache, batch.plan, batch.scale, **outputs)


@pytest.fixture
def num_slices(monkeypatch: pytest.MonkeyPatch):
    """Decides the number of slices of the exact pages and of each format, whatever the device."""
    return lambda count: monkeypatch.setattr(attention, "count_slices", lambda _, tokens, *__: [count] * len(tokens))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 96, 128])
def test_head_dims(head_dim: int, dtype: torch.dtype, device: str) -> None:
    batch = decode_batch([150, 1], 4, 2, head_dim, dtype=dtype, device=device)
    got = run(batch)
    assert got.dtype == dtype and got.is_contiguous()
    float64.assert_close(got, float64.attention(batch, range(2))[0], dtype)


@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 20])
def test_groups(group: int, device: str) -> None:
    batch = decode_batch([200], 2 * group, 2, 64, dtype=torch.float16, device=device)
    float64.assert_close(run(batch), float64.attention(batch, range(1))[0], torch.float16)


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("slices", [1, 2, 5])
def test_lengths_and_slices(slices: int, page_size: int, device: str, num_slices) -> None:
    """Page edges, slice edges, empty slices (5 slices of 1 page), all in one ragged batch."""
    num_slices(slices)
    edge = 2 * slices * page_size
    lengths = [1, page_size - 1, page_size, page_size + 1, edge - 1, edge, edge + 1]
    batch = decode_batch(lengths, 3, 1, 16, page_size=page_size, device=device)
    lse = torch.full((len(lengths), 3), math.nan, device=device)
    got = run(batch, lse=lse)
    want, logits = float64.attention(batch, range(len(lengths)))
    float64.assert_close(got, want, torch.float32)
    float64.assert_close(lse, torch.stack([row[0].exp2().sum(-1).log2() for row in logits]), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slices", [1, 3])
def test_emitted_logits(slices: int, dtype: torch.dtype, device: str, num_slices) -> None:
    num_slices(slices)
    check_with_logits(decode_batch([130, 64, 7], 8, 2, 64, dtype=dtype, device=device))


def check_with_logits(batch: float64.Batch) -> None:
    num_seqs, num_heads, dtype = batch.plan.num_decodes, batch.q.shape[1], batch.q.dtype
    columns = batch.plan.num_columns(batch.cache.k.shape[2])
    logits = torch.full((num_seqs, num_heads, columns), math.nan, device=batch.q.device)
    lse = torch.full((num_seqs, num_heads), math.nan, device=batch.q.device)
    got = run(batch, logits=logits, lse=lse)
    want, want_logits = float64.attention(batch, range(num_seqs))
    float64.assert_close(got, want, dtype, scale=2.0 if batch.plan.warm else 1.0)  # q is rounded once more: see below
    for b, row in enumerate(want_logits):
        tokens, exact = batch.columns(b), int(batch.plan.exact_lens[b])
        # Products of the rounded inputs are exact in float32: the logits are float32 results in every type. To a
        # compressed page a query comes rotated, and rounded to float16.
        float64.assert_close(logits[b][:, tokens[:exact]], row[0][:, :exact], torch.float32, scale=4)
        rounded = torch.float32 if dtype == torch.float32 else torch.float16
        float64.assert_close(logits[b][:, tokens[exact:]], row[0][:, exact:], rounded, scale=4)
        others = torch.ones(columns, dtype=torch.bool).index_fill_(0, torch.tensor(tokens), False)
        assert logits[b][:, others].isnan().all(), "columns of no token were written"
        mass = (logits[b][:, tokens] - lse[b][:, None]).exp2().sum(-1)
        float64.assert_close(mass, torch.ones(num_heads), torch.float32, scale=4)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 96, 128])
def test_compressed_pages(head_dim: int, bits: int, device: str) -> None:
    """Many, none, one; every width of a row of codes."""
    dtype = DTYPES[(head_dim // 8 + bits) % 3]  # each with each width would take minutes
    check_with_logits(decode_batch([70, 3, 64], 4, 2, head_dim, dtype=dtype, device=device, warm={bits: [3, 0, 1]}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 20])
def test_groups_and_compressed_pages(group: int, dtype: torch.dtype, device: str) -> None:
    check_with_logits(decode_batch([9], 2 * group, 2, 64, dtype=dtype, device=device, warm={4: [2]}))


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("slices", [1, 3])
def test_page_sizes_and_slices(slices: int, page_size: int, device: str, num_slices) -> None:
    num_slices(slices)
    warm = {4: [0, 1, slices + 1], 3: [5, 0, slices]}
    batch = decode_batch([page_size + 1, 1, 5], 3, 1, 16, page_size=page_size, device=device, warm=warm)
    check_with_logits(batch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_formats_at_once(dtype: torch.dtype, device: str) -> None:
    """Sequences with all, some and none; a format that no decode has, and one that no sequence has."""
    warm = {8: [1, 0, 2, 0], 4: [3, 1, 0, 0], 3: [0, 0, 0, 0], 2: [0, 0, 0, 1]}
    lens, queries = [65, 1, 130, 7], [1, 1, 1, 2]
    batch = float64.make_batch(queries, lens, 4, 2, 64, dtype, num_decodes=3, device=device, warm=warm)
    assert [pages.codes.shape[1] for pages in batch.plan.warm] == [2, 3, 0, 1]
    check_with_logits(batch)


def test_large_scales(device: str) -> None:
    """A token of V, and one of K, of the largest scale: q and p * s stay in float16's range."""
    batch = decode_batch([3], 4, 2, 64, dtype=torch.float16, device=device, warm={2: [1]})
    warm, cache = batch.plan.warm[0], batch.cache
    first = int(warm.records[0, 0]) * warm.record_bytes
    cache.units_k.flatten(1)[:, first + 5] = 255
    cache.units_v.flatten(1)[:, first + 5] = 255
    for units, dense, is_key in ((cache.units_k, batch.keys, True), (cache.units_v, batch.values, False)):
        for head in range(2):
            plane = units[head].flatten().cpu().numpy()
            codes = plane[int(warm.codes[0, 0]) * 1024 :][:1024]
            page = float64.decompress(codes, plane[first:][:128], 2, is_key, 64, 64)
            dense[0][head, 3:] = torch.from_numpy(page)
    want, logits = float64.attention(batch, range(1))
    assert logits[0].abs().max() > 100 and want.abs().max() > 20
    float64.assert_close(run(batch), want, torch.float16, scale=4)


def test_large_logits(device: str) -> None:
    """One token takes everything: the softmax must not overflow."""
    batch = decode_batch([100], 2, 2, 64, device=device)
    batch.cache.k.nan_to_num_(0.0).mul_(200)
    batch.keys[0].mul_(200)
    float64.assert_close(run(batch), float64.attention(batch, range(1))[0], torch.float32, scale=50)


def test_prefill_chunks_behind_the_decodes_are_ignored(device: str) -> None:
    batch = float64.make_batch([1, 1, 9], [70, 3, 9], 4, 2, 16, num_decodes=2, device=device)
    float64.assert_close(run(batch), float64.attention(batch, range(2))[0], torch.float32)


def test_no_decodes(device: str) -> None:
    batch = float64.make_batch([2], [9], 4, 2, 16, device=device)
    assert run(batch).shape == (0, 4, 16)


def test_count_slices() -> None:
    assert count_slices(8, [16384], 64, 108) == [54]  # 432 programs, four for each multiprocessor
    assert count_slices(64 * 8, [16384], 64, 108) == [1]  # the batch fills the device
    assert count_slices(8, [100], 64, 108) == [1]  # too short to share
    assert count_slices(1, [10**6], 64, 132) == [MAX_SLICES]
    assert count_slices(32, [16384], 64, 108) == [14]
    assert count_slices(8, [1024, 14336], 64, 108) == [7, 48]  # an exact token counts twice
    assert count_slices(64 * 8, [1024, 14336], 64, 108) == [1, 1]
    assert count_slices(8, [64, 14336], 64, 108) == [1, 54]
    assert count_slices(8, [64, 512], 64, 108) == [1, 2]
    for tokens in ([10**6, 1], [10**6] * 5, [1, 10**6, 64]):
        assert MAX_SLICES - len(tokens) < sum(count_slices(1, tokens, 64, 132)) <= MAX_SLICES


def test_wrong_arguments_are_named(device: str) -> None:
    batch = decode_batch([20], 4, 2, 16, device=device)
    with pytest.raises(AssertionError, match=r"logits.*float16"):
        run(batch, logits=torch.zeros(1, 4, 128, dtype=torch.float16, device=device))
    with pytest.raises(AssertionError, match=r"logits: .*wanted: .*\(1, 4, 128\)"):
        run(batch, logits=torch.zeros(1, 4, 19, device=device))
    with pytest.raises(AssertionError, match="float16"):
        decode_attention(batch.q.half(), batch.cache, batch.plan, 1.0)
    with pytest.raises(AssertionError, match=r"exact_lens: .*int64"):
        run(float64.with_plan(batch, exact_lens=batch.plan.exact_lens.long()))
    batch = decode_batch([20], 4, 2, 16, device=device, warm={3: [1]})
    wrong = {"counts: .*int64": {"counts": torch.ones(1).long()}, "3 bits": {"high": None}, "33": {"record_bytes": 33}}
    for message, change in wrong.items():
        with pytest.raises(AssertionError, match=message):
            run(float64.with_plan(batch, warm=(replace(batch.plan.warm[0], **change),)))
