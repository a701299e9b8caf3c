"""recall in torch, behind both kinds of attention, against float64 attention over the chosen tokens' copies.

The caches are those of `tools.float64`: scattered, everything that belongs to no sequence NaN, or 255 among the codes.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_warm_attention import DTYPES, one_thread  # noqa: F401 - a fixture
from test_warm_attention import make_batch as side_by_side

from kernels import reference
from tools import float64

# Of values of size 1 to 10. The outputs of attention are rounded to 16 bits before recall and after it.
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


def make_batch(*args, block, counts, share=64, **options):
    return float64.with_recall(side_by_side(*args, **options), block, counts, share)


def attend(batch):
    decodes, lse = batch.plan.num_decodes, torch.full(batch.q.shape[:2], torch.nan)
    of = (batch.cache, batch.plan, batch.scale)
    parts = [reference.decode_attention(batch.q[:decodes], *of, lse=lse[:decodes])] if decodes else []
    if decodes < len(batch.keys):
        parts.append(reference.prefill_attention(batch.q[decodes:], *of, lse=lse[decodes:]))
    return torch.cat(parts), lse


def check(batch, limit=None):
    out, lse = attend(batch)
    given = [x for x in (batch.q, out, lse, *batch.cache) if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in given]
    got = reference.recall(batch.q, out, lse, batch.cache, batch.plan, batch.scale)
    assert got.dtype == batch.q.dtype and got.shape == batch.q.shape and got.data_ptr() != out.data_ptr()
    for x, y in zip(given, before, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    want, spread = float64.recall(batch)
    error = (got.double() - want).abs() - spread
    assert error.max() <= (limit or LIMITS[batch.q.dtype]), error.max()
    return got, out, spread


EVERY = {8: [1, 0, 3, 2, 0], 4: [0, 2, 1, 3, 0], 3: [2, 1, 0, 4, 0], 2: [1, 3, 2, 0, 0]}


@DTYPES
@pytest.mark.parametrize("copies", [None, torch.int8], ids=["exact", "int8"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size"),
    [(4, 2, 16, 16), (3, 3, 64, 32), (8, 1, 64, 64), (5, 1, 80, 16), (6, 2, 96, 32), (4, 2, 128, 16), (2, 2, 8, 64)],
    ids=lambda x: str(x),
)
def test_every_format_at_once(heads, kv_heads, dim, page_size, copies, dtype):
    """Decodes and chunks; pages without copies, and a sequence without compressed pages."""
    batch = make_batch(
        [1, 1, 16, 33, 3], [1, 40, 16, 50, 7], heads, kv_heads, dim, dtype, page_size, 2, warm=EVERY,
        copies=copies or dtype, block=16, counts=[7, 20, 11, 40, 0],
    )  # fmt: skip
    got, out, _ = check(batch)
    assert torch.equal(got[-3:], out[-3:].to(dtype))
    assert not torch.isclose(got[:-3], out[:-3].to(dtype)).all(-1).any()


@pytest.mark.parametrize("block", [1, 5, 16, 64])
def test_blocks(block):
    """Of a chunk that is no multiple of them, or shorter."""
    batch = make_batch([1, 20, 9], [3, 30, 9], 6, 2, 64, torch.float32, 16, 1, warm={4: [2, 3, 1], 2: [0, 2, 2]},
                       copies=torch.float32, block=block, counts=[5, 9, 30])  # fmt: skip
    _, _, spread = check(batch)
    assert (spread > 0).float().mean() < 0.1  # else the test would see little


@pytest.mark.parametrize("share", [1, 9, 63, 100, 400, 6400])
def test_shares_of_layers(share):
    """Of nothing at all, and of more than there is."""
    batch = make_batch([1, 20, 9], [3, 30, 9], 6, 2, 64, torch.float32, 16, 1, warm={4: [2, 3, 1], 2: [0, 2, 2]},
                       copies=torch.float32, block=16, counts=[5, 9, 30], share=share)  # fmt: skip
    got, out, _ = check(batch)
    assert torch.equal(got, out) == (share == 1)


@DTYPES
def test_recalling_everything_gives_exact_attention(dtype):
    """As far as there are copies: of one sequence none, and more is asked for than there is."""
    options = {"warm": {4: [2, 2, 3, 0], 3: [0, 0, 0, 0]}, "copies": dtype, "block": 16, "counts": [500] * 4}
    batch = make_batch([1, 1, 20, 4], [1, 40, 30, 9], 6, 2, 64, dtype, 16, 2, **options)
    check(batch)
    if dtype == torch.float32:
        batch.plan.warm[0].copies[1] = -1
        batch.copied[1][:] = False
        got, out, _ = check(batch, 6e-6)
        assert torch.equal(got[1], out[1]) and not torch.equal(got[0], out[0])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_ragged_batch(data):
    decodes = data.draw(st.lists(st.integers(1, 40), max_size=2), "decodes")
    chunks = data.draw(st.lists(st.tuples(st.integers(2, 40), st.integers(0, 30)), max_size=2), "chunks")
    count = len(decodes) + len(chunks)
    if not count:
        return
    per_sequence = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    formats = data.draw(st.lists(st.sampled_from([8, 4, 3, 2]), unique=True, min_size=1, max_size=4), "formats")
    warm = {bits: data.draw(per_sequence.filter(any), f"{bits} bits") for bits in sorted(formats)}
    pages = [sum(counts) for counts in zip(*warm.values(), strict=True)]
    counts = [data.draw(st.integers(1, 60)) if some else 0 for some in pages]
    torch.manual_seed(data.draw(st.integers(0, 100), "seed"))
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 3), (3, 1)]), "heads")
    batch = make_batch(
        [1] * len(decodes) + [n for n, _ in chunks], decodes + [n + past for n, past in chunks], kv_heads * group,
        kv_heads, data.draw(st.sampled_from([8, 24, 32]), "dim"), torch.float32,
        data.draw(st.sampled_from([16, 32]), "page_size"), len(decodes), warm=warm,
        copies=data.draw(st.sampled_from([torch.float32, torch.int8]), "copies"),
        block=data.draw(st.sampled_from([1, 4, 16]), "block"), counts=counts,
        share=data.draw(st.sampled_from([64, 64, 5, 30, 150]), "share"),
    )  # fmt: skip
    check(batch, 1e-4)


def test_log_sum_exp_of_prefill():
    batch = make_batch([1, 9, 40], [5, 9, 70], 6, 2, 64, torch.float32, 16, 1, warm={4: [1, 2, 0], 2: [0, 1, 3]},
                       copies=torch.float32, block=16, counts=[3, 3, 3])  # fmt: skip
    _, lse = attend(batch)
    _, logits = float64.attention(batch, range(3))
    torch.testing.assert_close(lse.double(), torch.cat([x.exp2().sum(-1).log2() for x in logits]), rtol=0, atol=5e-6)
