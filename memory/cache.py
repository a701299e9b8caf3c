"""The paged KV cache: sequences of pages, and the budget that compresses them.

    sequence   pages [0, 1, 2]   length 150   attention [3, features]
                      |  |  |
    frames            4 16 16 bits            memory/frames.py: where the bytes are, in which format
                      |  |  |
    plan       warm[0]: page 0                what one step's attention reads: compressed pages by format, ...
               page_table: frames of 1, 2     ... and the exact ones in their order, the newest tokens last
               pieces: (slot 64, 64 tokens), (slot 128, 22 tokens)

    step       schedule -> make_room, reserve -> plan -> forward -> observe -> commit -> settle
                                                                     |                    |
                              importance.py: who was attended to  <--+    policy.py: who goes down a format

A page is exact while it is filled, and goes down the ladder of memory/policy.py when the budget is short, never up:
what it becomes is one block (or two) of the same arena, so tiers have no boundaries between them.

Invariants (`check()` asserts them):
  - a page id is free or belongs to exactly one sequence (sharing will count references);
  - a sequence of n tokens has at least pages_for(n) pages, and the page that its next token goes to is exact.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.ops import AttentionPlan, Ops
from memory import policy
from memory.config import WARM_BITS, CacheConfig
from memory.frames import Frames, OutOfPages, padded
from memory.importance import AttentionRecord, Scorer, page_ages, score_pages


class CachedSequence:
    """The cached tokens of one request: `length` of them, in the order of `pages`."""

    __slots__ = ("attention", "length", "moves", "pages", "peak_bytes", "warm_mass")

    def __init__(self) -> None:
        self.pages = array("i")
        self.length = 0
        self.attention = AttentionRecord()
        self.moves = 0
        self.peak_bytes = 0  # of its pages, the chunk in flight included
        self.warm_mass = 0.0  # share of the attention observed last that went to compressed pages


class KVCache:
    """K and V of every live token. One owner: not safe for threads."""

    def __init__(
        self, config: CacheConfig, dtype: torch.dtype, device: torch.device, ops: Ops, scorer: Scorer | None = None
    ) -> None:
        """Allocates the arena. Raises CapacityError if the device does not have the bytes."""
        self.config = config
        self.device = device
        self.num_moves = 0
        self._scorer = scorer or Scorer()
        self._frames = Frames(config, dtype, device, ops)
        self.layers = self._frames.layers
        self._planes = config.unit_total_bytes // config.unit_bytes

    @property
    def num_free_pages(self) -> int:
        """Exact pages that can still be allocated."""
        return max(self._frames.free_units(), 0) >> self.config.exact_order

    @property
    def resident_bytes(self) -> int:
        """Bytes allocated to pages and scales, whole blocks, and the frame table."""
        return self._frames.resident_bytes

    @property
    def shared_bytes(self) -> int:
        """Of the resident bytes, those in shared host memory."""
        return self._frames.shared_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the whole pool and the frame table."""
        return self.config.num_units * self.config.unit_total_bytes + self._frames.table_bytes

    def report(self, sequence: CachedSequence) -> dict[str, Any]:
        """What the sequence holds, in tokens and bytes by tier; the keys stay the same from version to version."""
        config = self.config
        counts = self._pages_by_bits(sequence)
        sizes = {bits: config.page_cost(bits) * count * self._planes for bits, count in counts.items()}
        warm_pages = sum(count for bits, count in counts.items() if bits < config.exact_bits)
        sizes[config.exact_bits] = sizes.get(config.exact_bits, 0) - self._halves(sequence) * config.page_bytes // 2
        hot_bytes = sizes[config.exact_bits]
        resident = sum(sizes.values())
        return {
            "hot_tokens": sequence.length - warm_pages * config.page_size,
            "warm_tokens": warm_pages * config.page_size,
            "cold_tokens": 0,
            "hot_bytes": hot_bytes,
            "warm_bytes": resident - hot_bytes,
            "cold_bytes": 0,
            "pages_by_bits": counts,
            "resident_bytes": resident,
            "total_bytes": resident,
            "full_bytes": sequence.length * config.token_bytes,
            "peak_bytes": max(sequence.peak_bytes, resident),
            "moves": sequence.moves,  # of pages, each to a format below its own; none ever moves up
            "warm_mass": sequence.warm_mass,
            "missed_mass": 0.0,  # no token is dropped: every query attends to all of them
        }

    def _pages_by_bits(self, sequence: CachedSequence) -> dict[int, int]:
        bits, counts = np.unique(self._frames.bits[sequence.pages], return_counts=True)
        return dict(zip(bits.tolist(), counts.tolist(), strict=True))

    def _cost(self, sequence: CachedSequence) -> int:
        """Bytes of its pages in one plane of one head."""
        whole = sum(self.config.page_cost(bits) * count for bits, count in self._pages_by_bits(sequence).items())
        return whole - self._halves(sequence) * self.config.page_cost(self.config.exact_bits) // 2

    def _halves(self, sequence: CachedSequence) -> int:
        """1 if its last page, the only one that can be, is halved, else 0."""
        return int(bool(sequence.pages) and self._frames.is_half(sequence.pages[-1]))

    def missing_pages(self, sequence: CachedSequence, length: int) -> int:
        """Exact pages that the sequence lacks for `length` tokens."""
        return max(self.config.pages_for(length) - len(sequence.pages), 0)

    def outgrows(self, sequence: CachedSequence, length: int) -> bool:
        """Whether the sequence's last page is halved, and `length` tokens need all of it."""
        return 2 * length > (2 * len(sequence.pages) - 1) * self.config.page_size and self._halves(sequence) > 0

    def reserve(self, sequence: CachedSequence, length: int, room: int = 0) -> None:
        """Give the sequence the pages for `length` tokens. room: further tokens expected, to be placed beside them.

        Raises OutOfPages if the pool is short, and changes nothing but that a halved last page may be whole by then.
        """
        if self.outgrows(sequence, length):
            self._frames.complete(sequence.pages[-1])
        missing = self.missing_pages(sequence, length)
        if missing > 0:
            further = self.config.pages_for(length + room) - self.config.pages_for(length)
            last = sequence.pages[-1] if sequence.pages else None
            sequence.pages.extend(self._frames.alloc(last, missing, further))

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget the tokens from `length` on and give back the pages that held nothing else."""
        assert 0 <= length <= sequence.length, f"cannot truncate {sequence.length} tokens to {length}"
        keep = self.config.pages_for(length)
        whole = length % self.config.page_size == 0
        assert whole or self._frames.is_exact(sequence.pages[keep - 1]), "the next token would go to a compressed page"
        for page in sequence.pages[keep:]:
            self._frames.free(page)
        del sequence.pages[keep:]
        sequence.length = length

    def free(self, sequence: CachedSequence) -> None:
        """Give back everything the sequence has, reserved pages included."""
        self.truncate(sequence, 0)

    # What the budget moves.

    def settle(self, sequences: Iterable[CachedSequence]) -> None:
        """Compress what the budget asks of each sequence, and what the bound on exact tokens asks of all together."""
        tiers = self.config.tiers
        if tiers is None:
            return
        sequences = list(sequences)
        budgeted = tiers.budget is not None and tiers.budget < 1  # of 1, the page that is being filled is no reason
        if budgeted or tiers.hot_ratio:
            for sequence in sequences:
                if (
                    budgeted
                    and len(sequence.pages) == self.config.pages_for(sequence.length)  # none is reserved behind it
                    and 0 < 2 * (sequence.length % self.config.page_size) <= self.config.page_size
                ):
                    self._frames.halve(sequence.pages[sequence.length // self.config.page_size])
                limit = self._limit(sequence.length, tiers.budget or 1.0)
                self._shrink([sequence], self._cost(sequence) - limit, limit)
        hot = sum(self._pages_by_bits(sequence).get(self.config.exact_bits, 0) for sequence in sequences)
        if tiers.hot_layer_size is not None and hot * self.config.page_size > tiers.hot_layer_size:
            self._shrink(sequences, 0, 0, hot_tokens=tiers.hot_layer_size)

    def _limit(self, length: int, budget: float) -> int:
        """Bytes of one plane of one head that `budget` grants a sequence.

        Full pages have a format that the budget pays for, and never fall below it for the sake of the page that is
        being filled and of the first page, which stays at 8 bits: in a short text these two may come on top.
        """
        config = self.config
        full, rest = divmod(length, config.page_size)
        exact, *costs = (config.page_cost(bits) for bits in (config.exact_bits, *WARM_BITS))
        # A block of records may be this sequence's alone.
        limit = int(budget * length * exact) // config.page_size - (config.unit_bytes << config.record_order)
        paid = next((cost for cost in costs if cost <= budget * exact), costs[-1])
        filled = 0 if not rest else exact // 2 if 2 * rest <= config.page_size else exact
        return max(limit, min(full, 1) * costs[0] + max(full - 1, 0) * paid + filled)

    def obtainable_pages(self, sequences: Sequence[CachedSequence]) -> int:
        """Exact pages there could be beside what the sequences hold, once that is as small as it can be."""
        least = sum(self.config.least_units(sequence.length) for sequence in sequences)
        return max(self.config.num_units - least, 0) >> self.config.exact_order

    def make_room(
        self, num_pages: int, sequences: Sequence[CachedSequence], growing: Sequence[CachedSequence] = ()
    ) -> None:
        """Have room for so many exact pages, at the cost of what the sequences hold, once the halved last pages of the
        growing ones are whole. Raises OutOfPages."""
        wanted = num_pages << self.config.exact_order
        while (short := wanted - self._frames.free_units(len(growing))) > 0 and self.config.tiers:
            capacity = (self.config.num_units - wanted) * self.config.unit_bytes
            if not self._shrink(sequences, short * self.config.unit_bytes, capacity):
                break
        if short > 0:
            raise OutOfPages(f"{num_pages} pages wanted, {self.num_free_pages} of {self.config.num_pages} free")
        self._frames.join(num_pages, [sequence.pages[-1] for sequence in growing])

    def _shrink(
        self,
        sequences: Sequence[CachedSequence],
        excess: int,
        limit: int,
        hot_tokens: int | None = None,
    ) -> bool:
        """Move pages of the sequences down until `excess` bytes of a plane are free; says whether any could move.

        limit: what they may take together; exact pages leave warm_layer_ratio of it to the others. hot_tokens: exact
        tokens there may be.
        """
        config, tiers = self.config, self.config.tiers
        assert tiers is not None
        counts = [sequence.length // config.page_size for sequence in sequences]  # full pages
        every = [page for sequence, count in zip(sequences, counts, strict=True) for page in sequence.pages[:count]]
        if not every or (excess <= 0 and hot_tokens is None and not tiers.hot_ratio):
            return False
        ages = [page_ages(n, config.page_size, sequence.length) for sequence, n in zip(sequences, counts, strict=True)]
        scores = [
            score_pages(self._scorer, sequence.attention, age, tiers.importance)
            for sequence, age in zip(sequences, ages, strict=True)
        ]
        page_ids, age = np.array(every), np.concatenate(ages)
        pages = policy.Pages(
            scores=np.concatenate(scores),
            bits=self._frames.bits[page_ids].astype(np.int64),
            ages=age,
            recent=age < tiers.recent_tokens,
            sinks=np.concatenate([np.arange(n) == 0 for n in counts]),
        )
        costs = {bits: config.page_cost(bits) for bits in (config.exact_bits, *WARM_BITS)}
        exact_pages = int((pages.bits == config.exact_bits).sum())
        room = hot_tokens // config.page_size if hot_tokens is not None else (
            int(limit * (1 - tiers.warm_layer_ratio)) // costs[config.exact_bits]
        )  # fmt: skip
        moves = policy.plan(pages, costs, excess, exact_pages - room, tiers)
        for bits in {move.bits for move in moves}:
            self._frames.compress(page_ids[[move.page for move in moves if move.bits == bits]], bits)
        owners = np.repeat(np.arange(len(sequences)), counts)
        for move in moves:
            sequences[owners[move.page]].moves += 1
        self.num_moves += len(moves)
        return bool(moves)

    # What a step reads and writes.

    def plan(self, sequences: Sequence[CachedSequence], counts: Sequence[int], num_decodes: int) -> AttentionPlan:
        """Where this step's tokens go and what they see: `counts[i]` new tokens of `sequences[i]`, whose pages are
        reserved. The first `num_decodes` sequences have one each. The sequences do not change: see `commit`."""
        size, exact_bits = self.config.page_size, self.config.exact_bits
        lengths = [sequence.length + count for sequence, count in zip(sequences, counts, strict=True)]
        tables = [np.array(s.pages)[: self.config.pages_for(n)] for s, n in zip(sequences, lengths, strict=True)]
        exact = [pages[self._frames.bits[pages] == exact_bits] for pages in tables]
        frames = [self._frames.exact_frames(pages) for pages in exact]
        exact_lens, slots, pieces = [], [], []
        for sequence, pages, mine, length in zip(sequences, tables, frames, lengths, strict=True):
            compressed = (len(pages) - len(mine)) * size  # the new tokens are exact, and the last of those that are
            new = np.arange(sequence.length, length) - compressed
            slots.append(mine[new // size].astype(np.int64) * size + new % size)
            pieces.append(_pieces(mine, length - compressed, size))
            exact_lens.append(length - compressed)
        present = sorted({bits for pages in tables for bits in self._frames.bits[pages].tolist()} - {exact_bits})
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return AttentionPlan(
            query_start=self._tensor(starts),
            exact_lens=self._tensor(np.array(exact_lens, dtype=np.int32)),
            page_table=self._tensor(padded(frames)),
            slots=self._tensor(np.concatenate(slots)),
            num_decodes=num_decodes,
            max_query_len=max(counts[num_decodes:], default=0),
            max_exact_len=max(exact_lens),
            pieces=tuple(pieces),
            warm=tuple(self._frames.warm_pages(tables, bits) for bits in present),
        )

    def observe(self, sequences: Sequence[CachedSequence], plan: AttentionPlan, shares: list[np.ndarray]) -> None:
        """Keep what the step's attention was: shares (`Observation.shares`) of the plan's page columns. Before the
        step's tokens are committed."""
        assert self.config.tiers is not None
        formats = [self.config.exact_bits, *(warm.bits for warm in plan.warm)]
        first = np.cumsum([0, plan.page_table.shape[1], *(warm.codes.shape[1] for warm in plan.warm)])
        lengths = (plan.exact_lens.cpu().numpy() + self.config.page_size * sum(
            (warm.counts.cpu().numpy() for warm in plan.warm), np.zeros(len(sequences), dtype=np.int32)
        ))  # fmt: skip
        for sequence, share, length in zip(sequences, shares, lengths.tolist(), strict=True):
            bits = self._frames.bits[np.array(sequence.pages)[: self.config.pages_for(length)]]
            lifts = np.empty(len(bits), dtype=np.float32)
            for column, kind in zip(first, formats, strict=False):
                places = np.flatnonzero(bits == kind)
                lifts[places] = share[column : column + len(places)]
            sequence.warm_mass = float(lifts[bits < self.config.exact_bits].sum())
            lifts *= length / self.config.page_size
            sequence.attention.observe(lifts, length, self.config.tiers.attention_window)

    def commit(self, sequence: CachedSequence, count: int) -> None:
        """The next `count` tokens have been written."""
        sequence.length += count
        if self.config.tiers is not None:
            sequence.peak_bytes = max(sequence.peak_bytes, self._cost(sequence) * self._planes)
        assert self.config.pages_for(sequence.length) <= len(sequence.pages), "tokens written past the reserved pages"

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def check(self, sequences: Iterable[CachedSequence]) -> None:
        """Assert the invariants; `sequences` are all that are alive."""
        sequences = list(sequences)
        self._frames.check([page for sequence in sequences for page in sequence.pages])
        for sequence in sequences:
            assert len(sequence.pages) >= self.config.pages_for(sequence.length), "a sequence lacks pages"
            if sequence.length % self.config.page_size:
                page = sequence.pages[sequence.length // self.config.page_size]
                assert self._frames.is_exact(page), "a page that is being filled is compressed"


def _pieces(frames: np.ndarray, length: int, page_size: int) -> tuple[tuple[int, int], ...]:
    """Runs of consecutive slots: (first slot, tokens), the last one cut to the sequence's length."""
    heads = np.flatnonzero(np.diff(frames, prepend=frames[:1] - 2) != 1)
    begins = heads * page_size
    ends = np.append(begins[1:], length)
    return tuple(zip((frames[heads].astype(np.int64) * page_size).tolist(), (ends - begins).tolist(), strict=True))
