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
what it becomes is one block (or two) of the same arena, so tiers have no boundaries between them. Full pages may belong
to several sequences, and to the tree of prefixes (memory/prefix.py), whose pages go first when the pool is short.

Invariants (`check()` asserts them):
  - a page id is free or has as many owners as sequences and trees hold it;
  - a sequence of n tokens has at least pages_for(n) pages, and the page that its next token goes to is exact and in no
    other sequence;
  - what a sequence and the tree both hold, the tree does not let go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.ops import AttentionPlan, Ops
from memory.config import CacheConfig
from memory.frames import Frames, OutOfPages, padded
from memory.importance import AttentionRecord, Scorer
from memory.prefix import CachedSequence, PrefixCache
from memory.replacement import Replacement


class KVCache:
    """K and V of every live token. One owner: not safe for threads."""

    def __init__(
        self,
        config: CacheConfig,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
        scorer: Scorer | None = None,
        fingerprint: bytes = b"",
    ) -> None:
        """Allocates the arena. fingerprint: of the model, for the keys of prefixes. Raises CapacityError if the device
        does not have the bytes."""
        self.config = config
        self.device = device
        self._frames = Frames(config, dtype, device, ops)
        self._replacement = Replacement(config, self._frames, scorer or Scorer())
        self.prefixes = PrefixCache(config, self._frames, fingerprint) if config.prefix_caching else None
        self.layers = self._frames.layers
        self._planes = config.unit_total_bytes // config.unit_bytes

    @property
    def num_moves(self) -> int:
        """Of pages, to a format below their own, so far."""
        return self._replacement.num_moves

    @property
    def num_free_pages(self) -> int:
        """Exact pages that can still be allocated without letting go of any prefix."""
        return max(self._frames.free_units(), 0) >> self.config.exact_order

    @property
    def prefix_bytes(self) -> int:
        """Of the resident bytes, those of pages that only later requests may need: the first to go."""
        if self.prefixes is None:
            return 0
        return int(self._frames.costs(self.prefixes.idle_pages()).sum()) * self._planes

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
        pages = np.array(sequence.pages)
        bits, costs = self._frames.bits[pages], self._frames.costs(pages) * self._planes
        warm = bits < self.config.exact_bits
        warm_tokens = int(warm.sum()) * self.config.page_size
        resident = int(costs.sum())
        return {
            "hot_tokens": sequence.length - warm_tokens,
            "warm_tokens": warm_tokens,
            "cold_tokens": 0,
            "hot_bytes": int(costs[~warm].sum()),
            "warm_bytes": int(costs[warm].sum()),
            "cold_bytes": 0,
            "pages_by_bits": {kind: int((bits == kind).sum()) for kind in np.unique(bits).tolist()},
            "resident_bytes": resident,  # of which other requests may hold a part too
            "total_bytes": resident,
            "full_bytes": sequence.length * self.config.token_bytes,
            "peak_bytes": max(sequence.peak_bytes, resident),
            "moves": sequence.moves,  # of pages, each to a format below its own; none ever moves up
            "warm_mass": sequence.warm_mass,
            "missed_mass": 0.0,  # no token is dropped: every query attends to all of them
        }

    def missing_pages(self, sequence: CachedSequence, length: int) -> int:
        """Exact pages that the sequence lacks for `length` tokens."""
        return max(self.config.pages_for(length) - len(sequence.pages), 0)

    def outgrows(self, sequence: CachedSequence, length: int) -> bool:
        """Whether the sequence's last page is halved, and `length` tokens need all of it."""
        half = bool(sequence.pages) and self._frames.is_half(sequence.pages[-1])
        return half and 2 * length > (2 * len(sequence.pages) - 1) * self.config.page_size

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

    def free(self, sequence: CachedSequence) -> None:
        """Give back everything the sequence has, reserved pages included; what others own too stays theirs."""
        if self.prefixes is not None:
            self.prefixes.unlock([sequence])
        for page in sequence.pages:
            self._frames.free(page)
        del sequence.pages[:]
        sequence.length = 0
        sequence.attention = AttentionRecord()

    # What requests share.

    def cached_tokens(self, tokens: list[int], salt: str = "", exact: bool = False) -> tuple[int, int]:
        """How many of the tokens, from the first on, `adopt` would find; and how many of their full pages running
        sequences own too, so that they take no place. Changes nothing."""
        if self.prefixes is None:
            return 0, 0
        match = self.prefixes.match(tokens, salt, exact)
        return match.length, int(np.count_nonzero(self._frames.owners[match.values] > 1))

    def adopt(self, sequence: CachedSequence, tokens: list[int], salt: str = "", exact: bool = False) -> None:
        """Begin an empty sequence with as many of the tokens as are cached. What a page is found in part of is copied,
        if there is place."""
        if self.prefixes is None:
            return
        match = self.prefixes.match(tokens, salt, exact)
        if not match.length:
            return
        self.free(sequence)  # a step that failed may have left pages reserved
        self.prefixes.adopt(sequence, match)
        if match.tail is not None:
            self._frames.share([match.tail])  # so that making room for the copy does not let go of it
            try:
                self.make_room(1, ())
                self.reserve(sequence, match.length)
            except OutOfPages:
                pass  # then these few tokens are computed again
            else:
                self._frames.copy(sequence.pages[-1], match.tail, match.length % self.config.page_size)
                sequence.length = match.length
            finally:
                self._frames.free(match.tail)

    def keep(self, sequence: CachedSequence, tokens: list[int], salt: str = "") -> None:
        """Let later sequences that begin with the same tokens find this one's; tokens: at least its `length`."""
        if self.prefixes is None or not sequence.length:
            return
        measured = self.config.tiers is not None and sequence.length >= self.config.page_size
        score = float(self._replacement.scores(sequence).mean()) if measured else 0.0
        self.prefixes.keep(sequence, tokens, salt, score)

    def forget(self, sequences: Sequence[CachedSequence] = ()) -> None:
        """Let go of every prefix that no sequence holds, but these."""
        if self.prefixes is not None:
            self.prefixes.unlock(sequences)
            self.prefixes.clear()

    # What the budget moves.

    def settle(self, sequences: Sequence[CachedSequence]) -> None:
        """Compress what the budget asks of the running sequences, after a step."""
        self._replacement.settle(sequences)

    def obtainable_pages(self, sequences: Sequence[CachedSequence]) -> int:
        """Exact pages there could be beside what the sequences hold, once that is as small as it can be."""
        size = self.config.page_size
        full = {page for sequence in sequences for page in sequence.pages[: sequence.length // size]}
        least = self.config.least_units(len(full) * size, len(sequences))
        return max(self.config.num_units - least, 0) >> self.config.exact_order

    def idle_units(self) -> int:
        """Units that are free, or will be when prefixes go that no running sequence holds."""
        idle = 0 if self.prefixes is None else int(self._frames.bits[self.prefixes.idle_pages()].sum())
        return self._frames.free_units() + idle

    def make_room(
        self, num_pages: int, sequences: Sequence[CachedSequence], growing: Sequence[CachedSequence] = ()
    ) -> None:
        """Have room for so many exact pages, at the cost of prefixes that no sequence holds, then of what the sequences
        hold, once the halved last pages of the growing ones are whole. Raises OutOfPages."""
        wanted = num_pages << self.config.exact_order
        while (short := wanted - self._frames.free_units(len(growing))) > 0:
            if self.prefixes is not None and (
                self.prefixes.evict(-(-short >> self.config.exact_order)) or self.prefixes.unlock(sequences)
            ):
                continue
            capacity = (self.config.num_units - wanted) * self.config.unit_bytes
            if not self._replacement.shrink(sequences, short * self.config.unit_bytes, capacity):
                raise OutOfPages(f"{num_pages} pages wanted, {self.num_free_pages} of {self.config.num_pages} free")
        self._frames.join(num_pages, [sequence.pages[-1] for sequence in growing])

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
        if self.config.tiers is not None:
            pages = np.array(sequence.pages)
            sequence.peak_bytes = max(sequence.peak_bytes, int(self._frames.costs(pages).sum()) * self._planes)
            if self._frames.lossy[pages].any():
                self._frames.lossy[pages[sequence.length // self.config.page_size :]] = True
        sequence.length += count
        assert self.config.pages_for(sequence.length) <= len(sequence.pages), "tokens written past the reserved pages"

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def check(self, sequences: Iterable[CachedSequence]) -> None:
        """Assert the invariants; `sequences` are all that are alive."""
        sequences = list(sequences)
        used = [page for sequence in sequences for page in sequence.pages]
        if self.prefixes is not None:
            self.prefixes.tree.check()
            used += self.prefixes.pages().tolist()
        self._frames.check(used)
        filled: list[int] = []
        for sequence in sequences:
            assert len(sequence.pages) >= self.config.pages_for(sequence.length), "a sequence lacks pages"
            if sequence.length % self.config.page_size:
                filled.append(sequence.pages[sequence.length // self.config.page_size])
                assert self._frames.is_exact(filled[-1]), "a page that is being filled is compressed"
        assert len(set(filled)) == len(filled), "two sequences fill one page"


def _pieces(frames: np.ndarray, length: int, page_size: int) -> tuple[tuple[int, int], ...]:
    """Runs of consecutive slots: (first slot, tokens), the last one cut to the sequence's length."""
    heads = np.flatnonzero(np.diff(frames, prepend=frames[:1] - 2) != 1)
    begins = heads * page_size
    ends = np.append(begins[1:], length)
    return tuple(zip((frames[heads].astype(np.int64) * page_size).tolist(), (ends - begins).tolist(), strict=True))
