"""prefill_attention against float64: chunk starts, ragged batches, every head layout and format."""

import pytest
import torch

from kernels.prefill import prefill_attention
from tools import float64

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def check(batch: float64.Batch) -> None:
    first = batch.plan.num_decodes
    got = prefill_attention(batch.q[first:], batch.cache, batch.plan, batch.scale)
    want, _ = float64.attention(batch, range(first, len(batch.keys)))
    assert got.dtype == batch.q.dtype and got.is_contiguous()
    # Compressed pages: q, K and V are rounded once more, in the rotated basis; the interpreter sums a dot in the order
    # of this CPU's BLAS: 128 dimensions of 2 bits in float32 come to 2.2 on one CPU, and to less than 2 on others.
    float64.assert_close(got, want, batch.q.dtype, scale=3.0 if batch.plan.warm else 1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 96, 128])
def test_head_dims(head_dim: int, dtype: torch.dtype, device: str) -> None:
    check(float64.make_batch([70], [100], 2, 2, head_dim, dtype=dtype, device=device))


@pytest.mark.parametrize("group", [1, 3, 4, 5, 8])
def test_groups(group: int, device: str) -> None:
    check(float64.make_batch([67], [131], 2 * group, 2, 64, dtype=torch.float16, device=device))


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_lengths_and_chunk_starts(page_size: int, device: str) -> None:
    """Whole prompts and chunks behind a cached prefix, each ending or starting around a page edge; one single query."""
    p = page_size
    query_lens = [1, p - 1, p, p + 1, 1, 1, p, 2, p + 3]
    prefix_lens = [0, 0, 0, 0, p - 1, p, p + 1, 2 * p - 1, 2 * p + 5]
    exact_lens = [a + b for a, b in zip(query_lens, prefix_lens, strict=True)]
    check(float64.make_batch(query_lens, exact_lens, 3, 1, 16, page_size=page_size, device=device))


def test_decodes_before_the_chunks_are_skipped(device: str) -> None:
    check(float64.make_batch([1, 1, 40, 5], [66, 3, 40, 70], 4, 2, 16, num_decodes=2, device=device))


def test_many_query_blocks(device: str) -> None:
    check(float64.make_batch([150], [300], 5, 1, 64, dtype=torch.bfloat16, device=device))


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_compressed_pages(head_dim: int, bits: int, device: str) -> None:
    dtype = DTYPES[(head_dim // 8 + bits) % 3]
    check(float64.make_batch([35, 1], [70, 9], 4, 2, head_dim, dtype=dtype, device=device, warm={bits: [1, 2]}))


@pytest.mark.parametrize("group", [1, 3, 5, 8])
def test_groups_and_compressed_pages(group: int, device: str) -> None:
    check(float64.make_batch([30], [30], 2 * group, 2, 64, dtype=torch.float16, device=device, warm={4: [2]}))


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_all_formats_at_once(page_size: int, device: str) -> None:
    """Behind a decode; sequences with all, some and none."""
    lens, queries = [5, 70, 3, 40], [1, 9, 3, 40]
    warm = {8: [1, 1, 0, 0], 4: [0, 3, 1, 0], 3: [0, 1, 1, 0], 2: [0, 2, 0, 0]}
    options = {"num_decodes": 1, "device": device, "page_size": page_size}
    check(float64.make_batch(queries, lens, 3, 1, 16, warm=warm, **options))


def test_no_chunks(device: str) -> None:
    batch = float64.make_batch([1], [9], 4, 2, 16, num_decodes=1, device=device)
    assert prefill_attention(batch.q[1:], batch.cache, batch.plan, 1.0).shape == (0, 4, 16)


def test_wrong_arguments_are_named(device: str) -> None:
    batch = float64.make_batch([2], [9], 4, 2, 16, device=device)
    with pytest.raises(AssertionError, match="scale -1"):
        prefill_attention(batch.q, batch.cache, batch.plan, -1.0)
    with pytest.raises(AssertionError, match="page_size 24"):
        cache = torch.zeros(2, 1, 24, 16, device=device)
        prefill_attention(batch.q, batch.cache._replace(k=cache, v=cache), batch.plan, 1.0)
