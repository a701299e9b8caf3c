"""recall, behind both kinds of attention, against float64; and the log-sum-exp that it gets of prefill_attention."""

import math
from dataclasses import replace

import pytest
import torch
from test_safety import reserved

from kernels import recall as module
from kernels.attention import decode_attention
from kernels.prefill import prefill_attention
from kernels.recall import recall
from tools import float64

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def attend(batch: float64.Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the compressed pages as they are, and its log-sum-exp."""
    lse = torch.full(batch.q.shape[:2], math.nan, device=batch.q.device)
    decodes, rest = batch.plan.num_decodes, (batch.cache, batch.plan, batch.scale)
    parts = (
        decode_attention(batch.q[:decodes], *rest, lse=lse[:decodes]),
        prefill_attention(batch.q[decodes:], *rest, lse=lse[decodes:]),
    )
    return torch.cat(parts), lse


def run(batch: float64.Batch) -> torch.Tensor:
    out, lse = attend(batch)
    before = out.clone(), lse.clone()
    got = recall(batch.q, out, lse, batch.cache, batch.plan, batch.scale)
    assert got.dtype == batch.q.dtype and got.is_contiguous() and got.data_ptr() != out.data_ptr()
    assert torch.equal(out, before[0]) and torch.equal(lse, before[1])
    return got


def check(batch: float64.Batch, block: int, counts: list[int], scale: float = 3.0, share: int = 64) -> torch.Tensor:
    """scale: out is rounded twice, and what is taken away of compressed pages once more than where it was added."""
    batch = float64.with_recall(batch, block, counts, share)
    got = run(batch)
    want, spread = float64.recall(batch)
    error = ((got.double().cpu() - want).abs() - spread).clamp_min(0)
    float64.assert_close(want + error, want, batch.q.dtype, scale=scale)
    return got


@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 96, 128])
def test_head_dims(head_dim: int, device: str) -> None:
    dtype = DTYPES[[8, 16, 64, 80, 96, 128].index(head_dim) % 3]
    warm = {4: [2, 1], 3: [0, 2]}
    batch = float64.make_batch([1, 9], [3, 12], 4, 2, head_dim, dtype, 16, 1, device=device, warm=warm, copies=dtype)
    check(batch, 16, [5, 20])


@pytest.mark.parametrize("group", [1, 3, 4, 5, 8])
def test_groups(group: int, device: str) -> None:
    dtype = DTYPES[group % 3]
    batch = float64.make_batch(
        [1, 18], [3, 20], 2 * group, 2, 64, dtype, 16, 1, device=device, warm={4: [2, 3]}, copies=dtype
    )
    check(batch, 16, [4, 17])


@pytest.mark.parametrize(("dtype", "page_size"), list(zip(DTYPES, (64, 32, 16), strict=True)), ids=str)
def test_all_formats_at_once(dtype: torch.dtype, page_size: int, device: str) -> None:
    """Sequences with all, some and none; copies of 8 bits; a format that no sequence has."""
    warm = {8: [1, 1, 1, 0], 4: [2, 0, 2, 0], 3: [1, 0, 1, 0], 2: [0, 0, 0, 0]}
    batch = float64.make_batch(
        [1, 1, 5, 3], [5, 20, 9, 3], 3, 1, 16, dtype, page_size, 2, device=device, warm=warm, copies=torch.int8
    )
    out, _ = attend(batch)
    got = check(batch, 4, [7, 3, 20, 0])
    assert torch.equal(got[7:], out[7:]) and not torch.equal(got[:7], out[:7])


@pytest.mark.parametrize(("block", "dtype"), [(1, torch.float16), (2, torch.float32), (64, torch.float16)], ids=str)
def test_blocks(block: int, dtype: torch.dtype, device: str) -> None:
    """Of a single query; of so many rows that they take several programs, the last of them none."""
    batch = float64.make_batch([7, 20], [7, 25], 8, 1, 16, dtype, 16, device=device, warm={2: [3, 2]}, copies=dtype)
    check(batch, block, [9, 3])


@pytest.mark.parametrize("share", [3, 40, 250, 6400])
def test_shares_of_layers(share: int, device: str) -> None:
    """Of nothing at all, and of more than there is."""
    batch = float64.make_batch([1, 9], [3, 12], 4, 2, 16, torch.float32, 16, 1, device=device,
                               warm={4: [2, 1], 2: [1, 2]}, copies=torch.float32)  # fmt: skip
    out, _ = attend(batch)
    got = check(batch, 16, [5, 13], share=share)
    assert torch.allclose(got, out, rtol=0, atol=1e-6) == (share == 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recalling_everything_gives_exact_attention(dtype: torch.dtype, device: str) -> None:
    """More than there is: of a page in three there is no copy, and of one sequence none at all."""
    warm = {4: [3, 0, 2], 3: [0, 1, 1]}
    batch = float64.make_batch([1, 1, 9], [1, 30, 12], 6, 2, 64, dtype, 16, 2, device=device, warm=warm, copies=dtype)
    check(batch, 16, [1000] * 3)


def test_only_decodes(device: str) -> None:
    batch = float64.make_batch([1, 1], [5, 20], 4, 2, 16, page_size=16, num_decodes=2, device=device,
                               warm={4: [3, 2]}, copies=torch.float32)  # fmt: skip
    check(batch, 16, [10, 3])


def test_a_copy_that_matters_far_more_than_its_compressed_token(device: str) -> None:
    """By more than float16 can hold."""
    batch = float64.make_batch([1, 9], [3, 12], 2, 2, 64, torch.float16, 16, 1, device=device,
                               warm={4: [1, 1]}, copies=torch.float16)  # fmt: skip
    slots = batch.plan.warm[0].copies[:, 0].tolist()
    for b, slot in enumerate(slots):
        key = 3 * batch.q[-1 if b else 0, 0].cpu()
        batch.cache.copies[slot, 0, 5, 0] = key
        batch.copied_keys[b][0, int(batch.plan.exact_lens[b]) + 5] = key.double()
    check(batch, 16, [16, 16])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_sum_exp_of_prefill(dtype: torch.dtype, device: str) -> None:
    batch = float64.make_batch([1, 9, 40, 3], [5, 9, 70, 3], 6, 2, 64, dtype, num_decodes=1, device=device,
                               warm={4: [1, 2, 0, 1], 2: [0, 1, 0, 0]})  # fmt: skip
    lse = torch.full((52, 6), math.nan, device=device)
    out = prefill_attention(batch.q[1:], batch.cache, batch.plan, batch.scale, lse)
    assert torch.equal(out, prefill_attention(batch.q[1:], batch.cache, batch.plan, batch.scale))
    float64.assert_close(lse, log_sum_exp(batch, range(1, 4)), dtype, scale=2)


def log_sum_exp(batch: float64.Batch, sequences: range) -> torch.Tensor:
    _, logits = float64.attention(batch, sequences)
    return torch.cat([(x * math.log(2)).logsumexp(-1) / math.log(2) for x in logits])


@pytest.mark.parametrize(("entries", "dtype"), [(1, torch.float16), (9, torch.float32), (64, torch.bfloat16)], ids=str)
def test_an_overlay_changes_no_bit(entries: int, dtype: torch.dtype, device: str) -> None:
    """Of queries that change, of two sequences that share pages. Afterwards it holds the rows of its keys, and where
    there is room for all, all that it held before."""
    batch = float64.make_batch([1, 1, 1], [5, 20, 7], 6, 2, 16, dtype, 16, 3, device=device,
                               warm={4: [3, 2, 3], 2: [1, 1, 1]}, copies=dtype)  # fmt: skip
    shared = tuple(replace(w, copies=w.copies[[0, 1, 0]].contiguous()) for w in batch.plan.warm)
    batch = float64.with_recall(float64.with_plan(batch, warm=shared), 16, [10, 3, 8], share=70)
    cache, before, page = float64.with_overlay(batch, entries).cache, set(), batch.cache.k.shape[2]
    generator = torch.Generator(device).manual_seed(0)
    for step in range(6):
        noise = torch.randn(batch.q.shape, generator=generator, device=device).to(dtype)
        now = replace(batch, q=batch.q + (0.3 * noise if step % 2 else 0))
        out, lse = attend(now)
        want = recall(now.q, out, lse, now.cache, now.plan, now.scale)
        got = recall(now.q, out, lse, cache, now.plan, now.scale)
        assert torch.equal(got, want)
        found = cache.overlay.keys[:, :entries].tolist()
        held = {(head, entry, key) for head, keys in enumerate(found) for entry, key in enumerate(keys) if key >= 0}
        for head, entry, key in held:
            assert torch.equal(cache.overlay.rows[head, entry].cpu(), cache.copies[key // page, head, key % page])
        assert len({(head, key) for head, _, key in held}) == len(held), "a row lies there twice"
        assert entries < 64 or before <= held
        before = held
    read, here = cache.overlay.counts.tolist()
    assert 0 < here < read and (entries < 64 or here > read / 2)


def test_chunks_leave_the_overlay_alone(device: str) -> None:
    batch = float64.make_batch([1, 9], [3, 12], 4, 2, 16, torch.float16, 16, 1, device=device, warm={4: [2, 1]},
                               copies=torch.float16)  # fmt: skip
    batch = float64.with_recall(batch, 16, [5, 9])
    beside = float64.with_overlay(batch, 8)
    assert torch.equal(run(beside), run(batch))
    assert (beside.cache.overlay.keys == -1).all() and not beside.cache.overlay.counts.any()


class Watched:
    """A kernel whose launches tell the meter what of its arguments they may touch."""

    def __init__(self, kernel, meter, batch: float64.Batch) -> None:
        self.kernel, self.meter, self.batch = kernel, meter, batch

    def __getitem__(self, grid):
        def launch(*args, **options):
            named = dict(zip(self.kernel.arg_names, args, strict=False))
            for name in ("q", "rotated", "lse", "ends", "chosen", "blocks", "signs"):
                if name in named:
                    self.meter.watch(name, named[name])
            for name in ("mass", "out"):
                if name in named:
                    self.meter.watch(name, named[name], write=True)
            for warm in self.batch.plan.warm:
                for b, count in enumerate(warm.counts.tolist()):
                    self.meter.watch(
                        "copied pages", *(self.batch.cache.copies[s] for s in warm.copies[b, :count] if s >= 0)
                    )
            self.meter.watch("slots", named["slots"])
            self.meter.watch("warm", *(x for table in named["warm"] for x in table if isinstance(x, torch.Tensor)))
            self.meter.watch("units", self.batch.cache.units_k, self.batch.cache.units_v)
            return self.kernel[grid](*args, **options)

        return launch


@pytest.mark.parametrize("copies", [torch.float16, torch.int8], ids=str)
def test_what_it_touches_past_two_billion_elements(copies, meter, int32_checks, monkeypatch) -> None:
    """Copies at the far end of their buffer. Nothing of other ones is read."""
    batch = float64.make_batch([1, 5], [20, 9], 4, 2, 128, torch.float16, num_decodes=1, warm={4: [2, 1], 3: [0, 2]},
                               copies=copies)  # fmt: skip
    near = batch.cache.copies
    count = 2**33 // (near[0].numel() * near.element_size())
    far = reserved(count * near[0].numel(), copies).view(count, *near.shape[1:])
    far[count - len(near) :] = near
    shift = count - len(near)
    warm = (replace(warm, copies=torch.where(warm.copies < 0, -1, warm.copies + shift)) for warm in batch.plan.warm)
    batch = replace(float64.with_plan(batch, warm=tuple(warm)), cache=batch.cache._replace(copies=far))
    want, _ = float64.attention(batch, range(2))
    out, lse = want.half(), log_sum_exp(batch, range(2)).float()
    batch = float64.with_recall(batch, 2, [30, 50])
    for name in ("_score_kernel", "_swap_kernel"):
        monkeypatch.setattr(module, name, Watched(getattr(module, name), meter, batch))
    got = recall(batch.q, out, lse, batch.cache, batch.plan, batch.scale)
    want, spread = float64.recall(batch)
    error = ((got.double() - want).abs() - spread).clamp_min(0)
    float64.assert_close(want + error, want, torch.float16, scale=3)


def test_wrong_arguments_are_named(device: str) -> None:
    batch = float64.make_batch([1], [5], 4, 2, 16, page_size=16, num_decodes=1, device=device, warm={4: [2]},
                               copies=torch.float32)  # fmt: skip
    batch = float64.with_recall(batch, 16, [3])
    out, lse = attend(batch)
    rest = batch.plan, batch.scale
    with pytest.raises(AssertionError, match="there are no copies"):
        recall(batch.q, out, lse, batch.cache._replace(copies=None), *rest)
    with pytest.raises(AssertionError, match=r"copies: torch.float16"):
        recall(batch.q, out, lse, batch.cache._replace(copies=batch.cache.copies.half()), *rest)
    with pytest.raises(AssertionError, match=r"lse: torch.float64"):
        recall(batch.q, out, lse.double(), batch.cache, *rest)
