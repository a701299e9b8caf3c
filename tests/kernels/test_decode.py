"""decode_attention against float64: splits, ragged batches, every head layout, emitted logits."""

import math

import pytest
import torch

from kernels import attention
from kernels.attention import MAX_SPLITS, count_splits, decode_attention
from tools import float64

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def decode_batch(seq_lens: list[int], *shape: int, **options) -> float64.Batch:
    ones = [1] * len(seq_lens)
    return float64.make_batch(ones, seq_lens, *shape, num_decodes=len(seq_lens), **options)


def run(batch: float64.Batch, **outputs: torch.Tensor) -> torch.Tensor:
    q = batch.q[: batch.plan.num_decodes]
    return decode_attention(q, batch.k_cache, batch.v_cache, batch.plan, batch.scale, **outputs)


@pytest.fixture
def num_splits(monkeypatch: pytest.MonkeyPatch):
    """Decides the number of splits, whatever the device."""
    return lambda count: monkeypatch.setattr(attention, "count_splits", lambda *_: count)


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
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_lengths_and_splits(splits: int, page_size: int, device: str, num_splits) -> None:
    """Page edges, split edges, empty splits (5 splits of 1 page), all in one ragged batch."""
    num_splits(splits)
    edge = 2 * splits * page_size
    lengths = [1, page_size - 1, page_size, page_size + 1, edge - 1, edge, edge + 1]
    batch = decode_batch(lengths, 3, 1, 16, page_size=page_size, device=device)
    lse = torch.full((len(lengths), 3), math.nan, device=device)
    got = run(batch, lse=lse)
    want, logits = float64.attention(batch, range(len(lengths)))
    float64.assert_close(got, want, torch.float32)
    float64.assert_close(lse, torch.stack([row[0].exp2().sum(-1).log2() for row in logits]), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_emitted_logits(splits: int, dtype: torch.dtype, device: str, num_splits) -> None:
    num_splits(splits)
    lengths = [130, 64, 7]
    batch = decode_batch(lengths, 8, 2, 64, dtype=dtype, device=device)
    logits = torch.full((3, 8, 150), math.nan, device=device)
    lse = torch.full((3, 8), math.nan, device=device)
    got = run(batch, logits=logits, lse=lse)
    want, want_logits = float64.attention(batch, range(3))
    float64.assert_close(got, want, dtype)
    for b, length in enumerate(lengths):
        # Products of the rounded inputs are exact in float32: the logits are float32 results in every type.
        float64.assert_close(logits[b, :, :length], want_logits[b][0], torch.float32, scale=4)
        assert logits[b, :, length:].isnan().all(), "logits past the sequence were written"
        mass = (logits[b, :, :length] - lse[b][:, None]).exp2().sum(-1)
        float64.assert_close(mass, torch.ones(8), torch.float32, scale=4)


def test_large_logits(device: str) -> None:
    """One token takes everything: the softmax must not overflow."""
    batch = decode_batch([100], 2, 2, 64, device=device)
    batch.k_cache.nan_to_num_(0.0).mul_(200)
    batch.keys[0].mul_(200)
    float64.assert_close(run(batch), float64.attention(batch, range(1))[0], torch.float32, scale=50)


def test_prefill_chunks_behind_the_decodes_are_ignored(device: str) -> None:
    batch = float64.make_batch([1, 1, 9], [70, 3, 9], 4, 2, 16, num_decodes=2, device=device)
    float64.assert_close(run(batch), float64.attention(batch, range(2))[0], torch.float32)


def test_no_decodes(device: str) -> None:
    batch = float64.make_batch([2], [9], 4, 2, 16, device=device)
    assert run(batch).shape == (0, 4, 16)


def test_count_splits() -> None:
    assert count_splits(1, 8, 16384, 64, 108) == 54  # 432 programs, four for each multiprocessor
    assert count_splits(64, 8, 16384, 64, 108) == 1  # the batch fills the device
    assert count_splits(1, 8, 100, 64, 108) == 1  # too short to share
    assert count_splits(1, 1, 10**6, 64, 132) == MAX_SPLITS
    assert count_splits(1, 32, 16384, 64, 108) == 14


def test_wrong_arguments_are_named(device: str) -> None:
    batch = decode_batch([20], 4, 2, 16, device=device)
    with pytest.raises(AssertionError, match=r"logits.*float16"):
        run(batch, logits=torch.zeros(1, 4, 20, dtype=torch.float16, device=device))
    with pytest.raises(AssertionError, match="19"):
        run(batch, logits=torch.zeros(1, 4, 19, device=device))
    with pytest.raises(AssertionError, match="float16"):
        decode_attention(batch.q.half(), batch.k_cache, batch.v_cache, batch.plan, 1.0)
    with pytest.raises(AssertionError, match=r"seq_lens: .*int64"):
        run(float64.with_plan(batch, seq_lens=batch.plan.seq_lens.long()))
