"""What a kernel touches: nothing out of bounds, no element by two programs, no 32-bit offset. Interpreter only.

The arenas of the last tests are larger than 2^31 elements. Their memory is reserved, not used: the kernels touch a few
frames at the far end of it, where an int32 offset has wrapped around.
"""

import itertools
import mmap
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import attention
from kernels.attention import decode_attention
from kernels.codes import signs_of
from kernels.compress import compress, decompress
from kernels.ops import WarmPages
from kernels.prefill import prefill_attention
from kernels.tokens import add_rms_norm, rms_norm, rope_store, silu_mul
from tools import float64

PAGE = 64


@pytest.fixture
def three_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "count_slices", lambda _, tokens, *__: [3] * len(tokens))


def watch_batch(meter, batch: float64.Batch, q: Tensor) -> None:
    """Only the tokens of the batch may be read from the arenas: not the gaps, free frames, or page tails."""
    plan = batch.plan
    meter.watch("q", q)
    meter.watch("plan", plan.query_start, plan.exact_lens)
    for b, length in enumerate(plan.exact_lens.tolist()):
        pages = -(-length // PAGE)
        meter.watch("page_table", plan.page_table[b, :pages])
        for page, frame in enumerate(plan.page_table[b, :pages].tolist()):
            tokens = min(length - page * PAGE, PAGE)
            for name, cache in (("k_cache", batch.cache.k), ("v_cache", batch.cache.v)):
                for head in range(cache.shape[0]):
                    meter.watch(name, cache[head, frame, :tokens])
    meter.watch("signs", signs_of(q.shape[2], q.dtype, q.device))
    for warm in plan.warm:
        meter.watch("counts", warm.counts)
        for b, count in enumerate(warm.counts.tolist()):
            for page in range(count):
                watch_compressed(meter, batch, warm, b, page)


def watch_compressed(meter, batch: float64.Batch, warm: WarmPages, b: int, page: int) -> None:
    """The codes and the record of one page, and its entries in the tables."""
    head_dim, unit = batch.q.shape[2], batch.cache.units_k.shape[2]
    runs = [(warm.codes, 2 * unit if warm.bits == 3 else warm.bits * unit)]
    runs += [(warm.high, unit)] if warm.high is not None else []
    meter.watch("tables", *(table[b, page : page + 1] for table in (*(run[0] for run in runs), warm.records)))
    record = int(warm.records[b, page]) * warm.record_bytes
    for units, length in ((batch.cache.units_k, PAGE + head_dim), (batch.cache.units_v, 2 * PAGE)):
        for plane in units:
            meter.watch("record", plane.view(-1)[record : record + length])
            for table, size in runs:
                meter.watch("codes", plane.view(-1)[int(table[b, page]) * size :][:size])


def test_norms_and_activation(meter, int32_checks) -> None:
    x, residual, weight = torch.randn(3, 130)[:, :100], torch.randn(3, 108)[:, 4:104], torch.randn(100)
    for row in range(3):
        meter.watch("x", x[row])
        meter.watch("residual", residual[row], write=True)
    meter.watch("weight", weight)
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, residual, weight, 1e-5)
    silu_mul(x, residual)


def test_rope_store(meter, int32_checks) -> None:
    fused = torch.randn(3, 23, 80)
    q, k, v = fused.split([17, 3, 3], 1)
    cos_sin, slots = torch.randn(3, 80), torch.tensor([70, 3, 191])
    arena = torch.zeros(3, 8, PAGE, 80)
    k_cache, v_cache = arena[:, :3].transpose(0, 1), arena[:, 4:7].transpose(0, 1)
    for token, slot in enumerate(slots.tolist()):
        meter.watch("q", q[token], write=True)
        meter.watch("k and v", fused[token, 17:])
        for head in range(3):
            meter.watch("k_cache", k_cache[head, slot // PAGE, slot % PAGE], write=True)
            meter.watch("v_cache", v_cache[head, slot // PAGE, slot % PAGE], write=True)
    meter.watch("inputs", cos_sin, slots)
    rope_store(q, k, v, cos_sin, slots, k_cache, v_cache)


WARM = [{}, {4: [2, 0, 1], 3: [0, 4, 0]}]


@pytest.mark.parametrize("warm", WARM, ids=["exact", "compressed"])
@pytest.mark.parametrize("head_dim", [80, 128])
def test_decode(head_dim: int, warm: dict[int, list[int]], meter, int32_checks, three_slices) -> None:
    lengths = [1, 64, 300]
    batch = float64.make_batch([1] * 3, lengths, 6, 2, head_dim, num_decodes=3, warm=warm)
    logits, lse = torch.zeros(3, 6, batch.plan.num_columns(PAGE)), torch.zeros(3, 6)
    watch_batch(meter, batch, batch.q)
    watch_logits(meter, batch, logits)
    meter.watch("lse", lse, write=True)
    got = decode_attention(batch.q, batch.cache, batch.plan, batch.scale, logits, lse)
    float64.assert_close(got, float64.attention(batch, range(3))[0], torch.float32)


def watch_logits(meter, batch: float64.Batch, logits: Tensor) -> None:
    for b in range(logits.shape[0]):
        columns = batch.columns(b)
        exact = int(batch.plan.exact_lens[b])
        starts = [0, *range(exact, len(columns), PAGE)]
        for first, end in itertools.pairwise([*starts, len(columns)]):
            if first < end:
                meter.watch("logits", *logits[b, :, columns[first] : columns[end - 1] + 1], write=True)


@pytest.mark.parametrize("warm", [{}, {4: [1, 0, 2], 3: [0, 1, 1]}], ids=["exact", "compressed"])
@pytest.mark.parametrize("head_dim", [80, 128])
def test_prefill(head_dim: int, warm: dict[int, list[int]], meter, int32_checks) -> None:
    batch = float64.make_batch([1, 70, 10], [5, 70, 140], 6, 2, head_dim, torch.float16, num_decodes=1, warm=warm)
    watch_batch(meter, batch, batch.q[1:])
    got = prefill_attention(batch.q[1:], batch.cache, batch.plan, batch.scale)
    float64.assert_close(got, float64.attention(batch, range(1, 3))[0], torch.float16, scale=2)


@pytest.mark.parametrize("is_key", [True, False], ids=["K", "V"])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_compress(bits: int, is_key: bool, meter, int32_checks) -> None:
    x = torch.randn(3, 70, 88)[:, :64, :80]
    meter.watch("x", *(row for page in x for row in page))
    meter.watch("signs", signs_of(80, x.dtype, x.device))
    codes, records = compress(x, bits, is_key)
    decompress(codes, records, bits, is_key, x)


def test_the_meter_sees_faults(meter) -> None:
    x, residual, weight = torch.randn(2, 64), torch.randn(2, 64), torch.ones(64)
    meter.watch("x", x[0])
    meter.watch("weight", weight)
    meter.watch("residual", residual)
    with pytest.raises(Exception, match="load of byte 256 of x, 256 bytes"):
        rms_norm(x, weight, 1e-5)
    meter.watch("x", x)
    with pytest.raises(Exception, match="store to byte 0 of residual"):
        add_rms_norm(x, residual, weight, 1e-5)
    overlapping = torch.randn(200).as_strided((2, 64), (32, 1))
    meter.watch("overlapping", overlapping, write=True)
    add_rms_norm(x, overlapping, weight, 1e-5)
    with pytest.raises(AssertionError, match="two programs write the same element"):
        meter.finish_launch()


def test_int32_overflow_is_seen(int32_checks) -> None:
    """The check that the tests above rely on."""
    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(Exception, match="int32 overflow"):
        _square_kernel[(1,)](out, 70_000)


@triton.jit
def _square_kernel(out, value):
    tl.store(out, value * value)


# Beyond 2^31 elements


def reserved(elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are touched."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.13; the number is Linux's
    memory = mmap.mmap(-1, elements * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=dtype)


def far_cache(heads: int, head_dim: int, frames: int) -> tuple[Tensor, Tensor]:
    """(k_cache, v_cache) views of one reserved float16 arena, in which a frame has 2^20 elements."""
    frame_elements = 2**20
    arena = reserved(frames * frame_elements, torch.float16)
    strides = (PAGE * head_dim, frame_elements, head_dim, 1)
    offset = heads * PAGE * head_dim
    k_cache, v_cache = (arena.as_strided((heads, frames, PAGE, head_dim), strides, at) for at in (0, offset))
    return k_cache, v_cache


def moved_far(batch: float64.Batch) -> float64.Batch:
    """The same batch, its frames at the far end of a cache of 4 * 2^30 elements."""
    frames = 4096
    k_cache, v_cache = far_cache(batch.cache.k.shape[0], batch.cache.k.shape[3], frames)
    shift = frames - batch.cache.k.shape[1]
    used = batch.plan.exact_lens.add(PAGE - 1).div(PAGE, rounding_mode="floor").tolist()
    table = batch.plan.page_table.clone()
    for b, pages in enumerate(used):
        table[b, :pages] += shift
        for near, far in zip(batch.plan.page_table[b, :pages].tolist(), table[b, :pages].tolist(), strict=True):
            k_cache[:, far], v_cache[:, far] = batch.cache.k[:, near], batch.cache.v[:, near]
    plan = replace(batch.plan, page_table=table, slots=batch.plan.slots + shift * PAGE)
    return replace(batch, cache=batch.cache._replace(k=k_cache, v=v_cache), plan=plan)


def test_decode_past_two_billion_elements(meter, int32_checks, three_slices) -> None:
    batch = moved_far(float64.make_batch([1, 1], [200, 65], 4, 2, 128, torch.float16, num_decodes=2))
    watch_batch(meter, batch, batch.q)
    got = decode_attention(batch.q, batch.cache, batch.plan, batch.scale)
    float64.assert_close(got, float64.attention(batch, range(2))[0], torch.float16)


def test_prefill_past_two_billion_elements(meter, int32_checks) -> None:
    batch = moved_far(float64.make_batch([20, 3], [90, 65], 4, 2, 128, torch.float16))
    watch_batch(meter, batch, batch.q)
    got = prefill_attention(batch.q, batch.cache, batch.plan, batch.scale)
    float64.assert_close(got, float64.attention(batch, range(2))[0], torch.float16)


def moved_far_compressed(batch: float64.Batch) -> float64.Batch:
    """The same batch, its compressed pages at the far end of planes of 2^32 bytes each."""
    units = 2**32 // batch.cache.units_k.shape[2]
    shift, planes = units - batch.cache.units_k.shape[1], []
    for near in batch.cache[2:4]:
        far = reserved(near.shape[0] * 2**32, torch.uint8).view(near.shape[0], units, -1)
        far[:, shift:] = near
        planes.append(far)
    formats = []
    for warm in batch.plan.warm:
        size = 2 if warm.bits == 3 else warm.bits
        moved = {
            "codes": warm.codes + shift // size,
            "records": warm.records + shift * far.shape[2] // warm.record_bytes,
        }
        high = None if warm.high is None else warm.high + shift
        formats.append(replace(warm, high=high, **moved))
    cache = batch.cache._replace(units_k=planes[0], units_v=planes[1])
    return replace(batch, cache=cache, plan=replace(batch.plan, warm=tuple(formats)))


@pytest.mark.parametrize("bits", [4, 3])
def test_compressed_pages_past_two_billion_bytes(bits: int, meter, int32_checks) -> None:
    batch = float64.make_batch([1, 5], [20, 9], 4, 2, 128, torch.float16, num_decodes=1, warm={bits: [2, 1]})
    batch = moved_far_compressed(batch)
    watch_batch(meter, batch, batch.q)
    got = decode_attention(batch.q[:1], batch.cache, batch.plan, batch.scale)
    float64.assert_close(got, float64.attention(batch, range(1))[0], torch.float16)
    got = prefill_attention(batch.q[1:], batch.cache, batch.plan, batch.scale)
    float64.assert_close(got, float64.attention(batch, range(1, 2))[0], torch.float16, scale=2)


def test_rope_store_past_two_billion_elements(meter, int32_checks) -> None:
    k_cache, v_cache = far_cache(2, 128, 4096)
    q, k, v = torch.randn(2, 8, 128).half().split([4, 2, 2], 1)
    slots = torch.tensor([4096 * PAGE - 1, 2048 * PAGE])
    meter.watch("q", q, write=True)
    meter.watch("inputs", k, v, slots)
    stored = [(slot // PAGE, slot % PAGE) for slot in slots.tolist()]
    for frame, offset in stored:
        meter.watch("cache", *k_cache[:, frame, offset], *v_cache[:, frame, offset], write=True)
    cos_sin = torch.cat([torch.ones(2, 64), torch.zeros(2, 64)], 1)
    meter.watch("cos_sin", cos_sin)
    rope_store(q, k, v, cos_sin, slots, k_cache, v_cache)
    for token, (frame, offset) in enumerate(stored):
        assert torch.equal(k_cache[:, frame, offset], k[token]) and torch.equal(v_cache[:, frame, offset], v[token])


def test_logits_past_two_billion_elements(meter, int32_checks) -> None:
    """A batch of long sequences: every stride of the logits is below 2^31, the place of the last sequence's is not."""
    lengths, row = [3, 5, 70], 2**28 + 4
    batch = float64.make_batch([1, 1, 1], lengths, 4, 2, 16, num_decodes=3, warm={4: [1, 0, 2]})
    arena = reserved(3 * 4 * row, torch.float32).view(3, 4, row)
    logits = arena[:, :, row - batch.plan.num_columns(PAGE) :]
    watch_batch(meter, batch, batch.q)
    watch_logits(meter, batch, logits)
    decode_attention(batch.q, batch.cache, batch.plan, batch.scale, logits)
    want = float64.attention(batch, range(3))[1]
    for b in range(3):
        float64.assert_close(logits[b][:, batch.columns(b)], want[b][0], torch.float32, scale=4)
