"""What the kernels must compute, in float64, one sequence and one head at a time; and caches to try them on.

Written apart from `kernels.reference`, for `tools.gpu_check` and the kernels' tests. A cache is a view of a larger
arena: frames of a sequence are scattered, there are gaps between heads and frames, and everything that no sequence owns
is NaN: free frames, gaps, the rest of each last page. Compressed pages hold random codes, scales and zeros, in an arena
of their own where every other byte is 255: a scale larger than all that are drawn. Their copies are their elements with
some noise, at scattered slots among others that are NaN (or bytes of -1: of NaN as a scale); some pages have none.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.ops import SPREAD, AttentionPlan, LayerCache, Overlay, Recall, WarmPages

# Half a unit in the last place of a result near 1, times a few: the inputs of both sides are the same rounded numbers,
# and the arithmetic between is float32. In attention p is rounded to the 16-bit type too, which averages out over the
# tokens but not for two or three of them.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
# The fraction by which shares of attention differ: their squares decide which tokens are recalled.
UNSURE = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.15}


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    error = (got.double().cpu() - want.double().cpu()).abs()
    limit = TOLERANCE[dtype] * scale * want.double().cpu().abs().clamp_min(1.0)
    assert bool((error <= limit).all()), f"worst error {error.nan_to_num(math.inf).max():.3g} in {dtype}"


@dataclass(frozen=True)
class Batch:
    """Keys and values of some sequences, both dense and in a paged cache."""

    q: Tensor  # [T, Hq, D], possibly a view
    keys: list[Tensor]  # per sequence [Hkv, tokens, D]: the exact tokens in their dtype, then the others in float64
    values: list[Tensor]
    cache: LayerCache  # views
    plan: AttentionPlan
    copied: list[Tensor]  # per sequence [tokens] bool: those that have copies; of these, in the order of `keys`:
    copied_keys: list[Tensor]  # per sequence [Hkv, tokens, D] float64: what the copies mean
    copied_values: list[Tensor]

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def columns(self, b: int) -> list[int]:
        """Where the logits of sequence b's tokens are, in the order of `keys[b]`."""
        page_size = self.cache.k.shape[2]
        columns, first = list(range(int(self.plan.exact_lens[b]))), self.plan.page_table.shape[1] * page_size
        for warm in self.plan.warm:
            columns += range(first, first + int(warm.counts[b]) * page_size)
            first += warm.codes.shape[1] * page_size
        return columns


def make_batch(
    query_lens: list[int],
    exact_lens: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    page_size: int = 64,
    num_decodes: int = 0,
    device: str = "cpu",
    warm: Mapping[int, Sequence[int]] | None = None,
    copies: torch.dtype | None = None,
) -> Batch:
    """A batch of random numbers; sequence b asks query_lens[b] queries of the exact_lens[b] exact tokens in its cache
    and of its compressed pages: warm[bits][b] of each format. copies: of what type those of two pages in three are."""
    num_pages = [-(-n // page_size) for n in exact_lens]
    frames = sum(num_pages) + 3
    order = torch.randperm(frames).tolist()
    k_cache = _make_cache(num_kv_heads, frames, page_size, head_dim, dtype, device)
    v_cache = _make_cache(num_kv_heads, frames, page_size, head_dim, dtype, device)
    page_table = torch.zeros(len(exact_lens), max(num_pages) + 1, dtype=torch.int32)
    keys, values, slots, pieces = [], [], [], []
    query_start = [0]
    for b, (num_queries, length) in enumerate(zip(query_lens, exact_lens, strict=True)):
        ids = [order.pop() for _ in range(num_pages[b])]
        page_table[b, : len(ids)] = torch.tensor(ids)
        places = [ids[t // page_size] * page_size + t % page_size for t in range(length)]
        keys.append(torch.randn(num_kv_heads, length, head_dim).to(dtype).to(device))
        values.append(torch.randn(num_kv_heads, length, head_dim).to(dtype).to(device))
        for cache, rows in ((k_cache, keys[b]), (v_cache, values[b])):
            for page, frame in enumerate(ids):
                part = rows[:, page * page_size : (page + 1) * page_size]
                cache[:, frame, : part.shape[1]] = part
        slots += places[length - num_queries :]
        pieces.append(tuple((place, 1) for place in places))
        query_start.append(query_start[-1] + num_queries)
    arena = _Arena(num_kv_heads, page_size, head_dim, warm or {})
    formats = [arena.make_pages(bits, counts, keys, values, device) for bits, counts in (warm or {}).items()]
    tokens = query_start[-1]
    # A view with gaps between tokens and between heads: no stride is the product of the sizes inside.
    fused = torch.randn(tokens, num_heads + 2 * num_kv_heads, head_dim + 8).to(dtype).to(device)[..., :head_dim]
    plan = AttentionPlan(
        query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
        exact_lens=torch.tensor(exact_lens, dtype=torch.int32, device=device),
        page_table=page_table.to(device),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        num_decodes=num_decodes,
        max_query_len=max(query_lens[num_decodes:], default=0),
        pieces=tuple(pieces),
        warm=tuple(formats),
    )
    units_k, units_v = (torch.from_numpy(plane).to(device)[:num_kv_heads] for plane in (arena.k, arena.v))
    layer = LayerCache(k_cache, v_cache, units_k, units_v)
    bare = Batch(fused[:, :num_heads], keys, values, layer, plan, [], [], [])
    return bare if copies is None else _with_copies(bare, copies)


def _with_copies(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with copies of most of its compressed pages, in the host's memory."""
    (num_heads, _, page_size, head_dim), device = batch.cache.k.shape, batch.cache.k.device
    pages = sum(int(warm.counts.sum()) for warm in batch.plan.warm)
    order = torch.randperm(pages + 3).tolist()
    width = head_dim if dtype != torch.int8 else head_dim + 2
    # As in memory.cold: the rows of other layers lie between.
    nothing = -1 if dtype == torch.int8 else math.nan
    arena = torch.full((pages + 3, 2, num_heads, page_size, 2, width), nothing, dtype=dtype)
    rows = arena.pin_memory()[:, 1] if device.type == "cuda" else arena[:, 1]
    tables = [torch.zeros_like(warm.codes, device="cpu") for warm in batch.plan.warm]
    copied = [torch.zeros(k.shape[1], dtype=torch.bool) for k in batch.keys]
    new = [[x.double().cpu().clone() for x in dense] for dense in (batch.keys, batch.values)]
    for b, exact in enumerate(batch.plan.exact_lens.tolist()):
        for warm, table in zip(batch.plan.warm, tables, strict=True):
            for page in range(int(warm.counts[b])):
                table[b, page], tokens = -1, slice(exact, exact + page_size)
                exact += page_size
                if (page + b) % 3 < 2:
                    table[b, page], copied[b][tokens] = order.pop(), True
                    for part, dense in enumerate(new):
                        x = dense[b][:, tokens] + torch.randn(num_heads, page_size, head_dim) / 2
                        rows[table[b, page], :, :, part], dense[b][:, tokens] = _encode(x, dtype)
    formats = (replace(warm, copies=x.to(device)) for warm, x in zip(batch.plan.warm, tables, strict=True))
    cache, plan = batch.cache._replace(copies=rows), replace(batch.plan, warm=tuple(formats))
    return Batch(batch.q, batch.keys, batch.values, cache, plan, copied, *new)


def _encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of copies, and what they mean in float64."""
    if dtype != torch.int8:
        return x.to(dtype), x.to(dtype).double()
    scales = (x.abs().amax(-1, keepdim=True) / 127).half()
    codes = (x / scales.double()).round().clamp(-127, 127)
    return torch.cat([codes.to(torch.int8), scales.view(torch.int8)], -1), codes * scales.double()


def _make_cache(heads: int, frames: int, page_size: int, head_dim: int, dtype: torch.dtype, device: str) -> Tensor:
    # Frame-major, unlike the engine's arena: the kernels take any stride of heads and frames.
    arena = torch.full((frames, heads + 1, page_size, head_dim), math.nan, dtype=dtype, device=device)
    return arena[:, :heads].transpose(0, 1)


class _Arena:
    """Compressed pages as `kernels.ops` describes them, scattered over chunks of 8 units.

    k, v [Hkv + 1, units, unit bytes] uint8: one head more than there is.
    """

    def __init__(self, heads: int, page_size: int, head_dim: int, warm: Mapping[int, Sequence[int]]) -> None:
        self.heads, self.page_size, self.head_dim = heads, page_size, head_dim
        self.chunk_bytes = page_size * head_dim
        self.record_bytes = 16
        while self.record_bytes < page_size + max(head_dim, page_size):
            self.record_bytes *= 2
        chunks = 3 + sum(3 + sum(counts) * (1 + -(-self.record_bytes // self.chunk_bytes)) for counts in warm.values())
        self.k, self.v = (np.full((heads + 1, 8 * chunks, self.chunk_bytes // 8), 255, np.uint8) for _ in "kv")
        self.free = torch.randperm(chunks).tolist()

    def make_pages(
        self, bits: int, counts: Sequence[int], keys: list[Tensor], values: list[Tensor], device: str
    ) -> WarmPages:
        """Random pages, counts[b] of them for sequence b; their elements are appended to keys[b] and values[b]."""
        planes = [2, 1] if bits == 3 else [bits]
        runs = [self._places(sum(counts), 8 // units) for units in planes]
        records = self._places(sum(counts), self.chunk_bytes // self.record_bytes)
        tables = torch.zeros(3, len(counts), max(counts), dtype=torch.int32)
        for b, count in enumerate(counts):
            for page in range(count):
                index = [run.pop() for run in runs]
                record = records.pop()
                tables[:, b, page] = torch.tensor([index[0], index[-1], record])
                for arena, dense, is_key in ((self.k, keys, True), (self.v, values, False)):
                    content = np.stack([
                        self._fill(arena[head].reshape(-1), bits, planes, index, record, is_key)
                        for head in range(self.heads)
                    ])  # fmt: skip
                    dense[b] = torch.cat([dense[b].double(), torch.from_numpy(content).to(device)], 1)
        codes, high, record_table = tables.to(device).unbind()
        total = torch.tensor(counts, dtype=torch.int32, device=device)
        return WarmPages(bits, self.record_bytes, codes, high if bits == 3 else None, record_table, total)

    def _places(self, count: int, per_chunk: int) -> list[int]:
        """`count` indices of runs of which `per_chunk` make a chunk, in random order."""
        assert per_chunk, "a record is larger than a chunk"
        chunks = [self.free.pop() for _ in range(-(-count // per_chunk))]
        places = [chunk * per_chunk + i for chunk in chunks for i in range(per_chunk)]
        return [places[i] for i in torch.randperm(len(places))[:count].tolist()]

    def _fill(self, plane: Any, bits: int, planes: list[int], index: list[int], record: int, is_key: bool) -> Any:
        """Write one head's page at random -> what it means, [page_size, D] float64."""
        runs = []
        for width, place in zip(planes, index, strict=True):
            runs.append(plane[place * width * self.chunk_bytes // 8 :][: width * self.chunk_bytes // 8])
            runs[-1][:] = torch.randint(256, runs[-1].shape).numpy()
        content = plane[record * self.record_bytes :][: self.page_size + (self.head_dim if is_key else self.page_size)]
        # Of elements of the size of a real K or V: a token spans 1 to 4, a mean is 0 or 2^-4 to 2.
        first = round(16 * (8 + bits - math.log2(2**bits - 1)))
        content[: self.page_size] = torch.randint(first, first + 33, (self.page_size,)).numpy()
        second = content[self.page_size :]
        if is_key:
            sizes = torch.randint(4 * 8, 9 * 8, second.shape) * torch.randint(0, 4, second.shape).clamp_max(1)
            second[:] = (sizes + 128 * torch.randint(0, 2, second.shape)).numpy()
        else:
            second[:] = torch.randint(-3, 4, second.shape).numpy().astype(np.int8).view(np.uint8)
        return decompress(np.concatenate(runs), content, bits, is_key, self.page_size, self.head_dim)


def decompress(codes: Any, record: Any, bits: int, is_key: bool, page_size: int, head_dim: int) -> Any:
    """What the codes (of 3 bits the low plane, then the high one) and the record of a page mean, [page_size, D]."""
    values, below = np.zeros((page_size, head_dim), np.int64), 0
    for width in [2, 1] if bits == 3 else [bits]:
        row = head_dim * width // 8
        run, codes = codes[: page_size * row].reshape(page_size, row).astype(np.int64), codes[page_size * row :]
        for element in range(head_dim):
            values[:, element] += ((run[:, element % row] >> element // row * width) % 2**width) << below
        below += width
    scale_codes = record[:page_size].astype(np.int64)
    scales = ((1 + scale_codes % 16 / 16) * 2.0 ** (scale_codes // 16 - 8 - bits))[:, None]
    if is_key:
        means = record[page_size : page_size + head_dim].astype(np.int64)
        size = means % 128
        mean = np.where(means > 127, -1, 1) * np.where(size == 0, 0, (1 + size % 8 / 8) * 2.0 ** (size // 8 - 8))
        return ((values - (2**bits - 1) / 2) * scales + mean) @ hadamard(head_dim)
    zeros = record[page_size : 2 * page_size].view(np.int8).astype(np.int64)[:, None]
    return (values - 2 ** (bits - 1) + zeros) * scales @ hadamard(head_dim)


@functools.lru_cache
def hadamard(head_dim: int) -> Any:
    """[D, D]: where i and j are in the same block, the sign is the parity of the bits that they have in common."""
    size = 1
    while head_dim % (2 * size) == 0:
        size *= 2
    return np.array(
        [
            [
                (-1) ** (i & j & (size - 1)).bit_count() / size**0.5 if i // size == j // size else 0
                for j in range(head_dim)
            ]
            for i in range(head_dim)
        ]
    )


def attention(batch: Batch, sequences: range) -> tuple[Tensor, list[Tensor]]:
    """-> output [query tokens, Hq, D], per sequence the base-2 logits [queries, Hq, tokens] with -inf where unseen."""
    starts = batch.plan.query_start.tolist()
    outputs, all_logits = [], []
    for b in sequences:
        q = batch.q[starts[b] : starts[b + 1]].double().cpu()
        k, v = batch.keys[b].double().cpu(), batch.values[b].double().cpu()
        group = q.shape[1] // k.shape[0]
        exact = int(batch.plan.exact_lens[b])
        unseen = torch.ones(q.shape[0], k.shape[1]).triu(exact - q.shape[0] + 1).bool()
        unseen[:, exact:] = False
        heads, logits = [], []
        for h in range(q.shape[1]):
            score = (q[:, h] @ k[h // group].T * batch.scale).masked_fill(unseen, -math.inf)
            heads.append(score.softmax(-1) @ v[h // group])
            logits.append(score / math.log(2))
        outputs.append(torch.stack(heads, 1))
        all_logits.append(torch.stack(logits, 1))
    return torch.cat(outputs), all_logits


def with_recall(batch: Batch, block: int, counts: Sequence[int], share: int = 64) -> Batch:
    """The batch with a plan in which each block of queries of sequence b recalls counts[b] tokens, in a layer that
    takes so many 64ths of it."""
    starts = batch.plan.query_start.tolist()
    blocks = [
        (b, first, min(block, end - first), counts[b])
        for b, (start, end) in enumerate(itertools.pairwise(starts))
        for first in range(start, end if counts[b] else start, block)
    ]
    table = torch.tensor(blocks, dtype=torch.int32).view(-1, 4).to(batch.plan.query_start.device)
    beside = replace(batch, cache=batch.cache._replace(share=share))
    return with_plan(beside, recall=Recall(block, tuple(counts), table))


def with_overlay(batch: Batch, entries: int) -> Batch:
    """The batch with an overlay where nothing lies yet, and what nobody has put there is no number."""
    assert batch.cache.copies is not None
    heads, device = batch.cache.k.shape[0], batch.q.device
    rows = torch.full((heads, entries, 2, batch.q.shape[2]), math.nan, dtype=batch.cache.copies.dtype, device=device)
    return replace(batch, cache=batch.cache._replace(overlay=Overlay.of(rows)))


def recall(batch: Batch) -> tuple[Tensor, Tensor]:
    """Attention in which the tokens that got most of it are read from their copies -> output [T, Hq, D], and how far
    it may be off where attention that differs by UNSURE decides which tokens those are."""
    out, all_logits = attention(batch, range(len(batch.keys)))
    spread = torch.zeros_like(out)
    starts, group = batch.plan.query_start.tolist(), batch.q.shape[1] // batch.cache.k.shape[0]
    assert batch.plan.recall is not None
    for b, first, queries, mean in batch.plan.recall.blocks.tolist():
        count = math.floor(mean * batch.cache.share / 64)
        places = batch.copied[b].nonzero()[:, 0]
        if not len(places) or not count:
            continue
        heads = range(batch.cache.k.shape[0])
        logits_of = [
            all_logits[b][first - starts[b] :, head * group : (head + 1) * group][:queries] * math.log(2)
            for head in heads
        ]
        masses = [logits.softmax(-1)[..., places].square().sum((0, 1)) for logits in logits_of]
        joint = torch.cat(masses).sort(descending=True).values
        taken = min(count * len(heads), len(joint))
        borders = [(joint[taken - 1], joint[taken])] if taken < len(joint) else []
        for head in heads:
            rows = (slice(first, first + queries), slice(head * group, (head + 1) * group))
            logits, mass = logits_of[head], masses[head]
            shares = logits.softmax(-1)
            order = mass.argsort(descending=True)[: min(int((mass >= joint[taken - 1]).sum()), SPREAD * count)]
            k, v = (x[b][head].double().cpu().clone() for x in (batch.keys, batch.values))
            for x, copies in ((k, batch.copied_keys), (v, batch.copied_values)):
                x[places[order]] = copies[b][head, places[order]]
            q = batch.q[rows].double().cpu()
            scores = (q @ k.T * batch.scale).masked_fill(logits == -math.inf, -math.inf)
            out[rows] = scores.softmax(-1) @ v
            sorted_mass, most = mass.sort(descending=True).values, SPREAD * count
            capped = [(sorted_mass[most - 1], sorted_mass[most])] if most < len(mass) else []
            unsure = 2 * UNSURE[batch.q.dtype]  # of squares
            for near, far in borders + capped:
                either = places[(mass > near * (1 - unsure)) & (mass < far * (1 + unsure))]
                k, v = batch.copied_keys[b][head, either], batch.copied_values[b][head, either]
                new = (q @ k.T * batch.scale - logits.logsumexp(-1, keepdim=True)).exp()
                sizes = v.abs() + batch.values[b][head, either].double().cpu().abs()
                spread[rows] += (new + shares[..., either]) @ sizes
    return out, spread


def with_plan(batch: Batch, **changes: Any) -> Batch:
    return replace(batch, plan=replace(batch.plan, **changes))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [T, H, D], angles [T, D/2]: pair (i, i + D/2) as a complex number times exp(i angle)."""
    half = x.shape[-1] // 2
    x = x.double()
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], -1)
