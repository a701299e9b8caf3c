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

Invariants (tests/oracle/invariants.py asserts them):
  - a page id is free or has as many owners as sequences and trees hold it;
  - a sequence of n tokens has at least pages_for(n) pages, and the page that its next token goes to is exact and in no
    other sequence;
  - what a sequence and the tree both hold, the tree does not let go.
"""

from array import array
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from kernels.ops import AttentionPlan, Ops
from memory.config import CacheConfig
from memory.flash import FlashStore
from memory.frames import Frames, OutOfPages, padded
from memory.importance import AttentionRecord, Scorer
from memory.prefix import CachedSequence, PrefixCache
from memory.recall import Reads
from memory.replacement import Replacement


class KVCache:
    """K and V of every live token. One owner: not safe for threads."""

    def __init__(
        self, config: CacheConfig, dtype: torch.dtype, device: torch.device, ops: Ops,
        scorer: torch.Tensor | None = None, fingerprint: bytes = b"", flash: FlashStore | None = None,
    ) -> None:  # fmt: skip
        """Allocates the arena. scorer: `Scorer.packed`; hand weights without one. fingerprint: of the model, for the
        keys of prefixes. flash: keeps their pages beyond the pool and the process. Raises CapacityError if the device
        does not have the bytes."""
        self.config = config
        self.device = device
        self._frames = Frames(config, dtype, device, ops)
        weights = Scorer().packed() if scorer is None else scorer
        self._replacement = Replacement(config, self._frames, ops, weights.detach().to(device))
        self.prefixes = PrefixCache(config, self._frames, fingerprint)  # empty without prefix caching
        self.flash = flash if config.prefix_caching else None
        self.seconds_per_token = 0.0  # that computing takes; 0 as long as nobody knows
        self.layers = self._frames.layers
        # Of the whole pool, and of the frame table and the overlay.
        self.capacity_bytes = config.num_units * config.unit_total_bytes + self._frames.table_bytes
        self._planes = config.unit_total_bytes // config.unit_bytes
        self.reads = Reads(config)

    @property
    def num_free_pages(self) -> int:
        """Exact pages that can still be allocated without letting go of any prefix."""
        return max(self._frames.free_units(), 0) >> self.config.exact_order

    @property
    def resident_bytes(self) -> int:
        """Bytes allocated to pages and scales, whole blocks, and the frame table."""
        return self._frames.resident_bytes

    def stats(self) -> dict[str, Any]:
        """What the cache holds and did; the keys stay the same from version to version."""
        copied = self._frames.owners[self._frames.copies.slots >= 0]
        idle = int(self._frames.costs(self.prefixes.idle_pages()).sum())
        return {
            "kv_resident_bytes": self.resident_bytes,
            "kv_prefix_bytes": idle * self._planes,  # of these, no running request's
            "kv_shared_bytes": self._frames.shared_bytes,  # of these, in shared host memory
            "kv_capacity_bytes": self.capacity_bytes,
            "kv_cold_bytes": len(copied) * self.config.copy_bytes,  # of what is compressed, beside the resident ones
            # Copies that there would be if every sequence and prefix had its own, over those that there are.
            "host_dedup_ratio": float(np.mean(copied)) if len(copied) else 1.0,
            "kv_moves": self._replacement.num_moves,  # of pages, each to a format below its own
            "kv_promotions": self._replacement.num_promotions,  # of compressed pages to exact ones
            "thrash_rate": self._replacement.num_promotions / max(self._replacement.num_moves, 1),
            "kv_bytes_per_token": self.config.token_bytes,
            "kv_cache_usage": 1 - self.idle_units() / self.config.num_units,  # by running requests
            "flash": self.flash.stats() if self.flash else {},
            "compute_s_per_token": self.seconds_per_token,  # of prompts; flash is read where that is faster
        } | self.reads.report(self.reads.counts, self._frames.copies.overlay_hit_rate)

    def report(self, sequence: CachedSequence) -> dict[str, Any]:
        """What the sequence holds, in tokens and bytes by tier; the keys stay the same from version to version."""
        pages = np.array(sequence.pages)
        bits, costs = self._frames.bits[pages], self._frames.costs(pages) * self._planes
        warm = bits < self.config.exact_bits
        warm_tokens = int(warm.sum()) * self.config.page_size
        resident = int(costs.sum())
        copied = int(np.count_nonzero(self._frames.copies.slots[pages] >= 0))
        return {
            "page_size": self.config.page_size,
            "hot_tokens": sequence.length - warm_tokens,
            "warm_tokens": warm_tokens,
            "cold_tokens": copied * self.config.page_size,  # that have a copy in the host's memory
            "hot_bytes": int(costs[~warm].sum()),
            "warm_bytes": int(costs[warm].sum()),
            "cold_bytes": copied * self.config.copy_bytes,
            "pages_by_bits": {kind: int((bits == kind).sum()) for kind in np.unique(bits).tolist()},
            "resident_bytes": resident,  # of which other requests may hold a part too
            "total_bytes": resident + copied * self.config.copy_bytes,
            "full_bytes": sequence.length * self.config.token_bytes,
            "peak_bytes": max(sequence.peak_bytes, resident),
            "moves": sequence.moves,  # of pages, each to a format below its own
            "warm_mass": sequence.warm_mass,
            "missed_mass": 0.0,  # no token is dropped: every query attends to all of them
        } | self.reads.report(sequence.reads, self._frames.copies.overlay_hit_rate)

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
        self.prefixes.unlock([sequence])
        for page in sequence.pages:
            self._frames.free(page)
        del sequence.pages[:]
        sequence.length = sequence.stored = 0
        sequence.attention = AttentionRecord()

    # What requests share.

    def cached_tokens(self, tokens: list[int], salt: str = "", exact: bool = False) -> tuple[int, int]:
        """How many of the tokens, from the first on, `adopt` would find; and how many of their full pages running
        sequences own too, so that they take no place. Changes nothing."""
        match = self.prefixes.match(tokens, salt, exact)
        return match.length, int(np.count_nonzero(self._frames.owners[match.values] > 1))

    def adopt(self, sequence: CachedSequence, tokens: list[int], salt: str = "", exact: bool = False) -> None:
        """Begin an empty sequence with as many of the tokens as are cached. What a page is found in part of is copied,
        if there is place."""
        match = self.prefixes.match(tokens, salt, exact)
        if self.flash is not None:
            stored = self._stored(tokens, salt, exact)
            if len(stored) > len(match.values):  # the whole of the page that the tail is of, and more
                match = match._replace(tail=None, length=len(match.values) * self.config.page_size)
        if not match.length:
            return
        self.free(sequence)  # a step that failed may have left pages reserved
        self.prefixes.adopt(sequence, match)
        if match.tail is not None:
            self._frames.share([match.tail])  # so that making room for the copy does not let go of it
            try:
                with suppress(OutOfPages):  # then these few tokens are computed again
                    self.make_room(1, ())
                    self.reserve(sequence, match.length)
                    values, lossy = self._frames.read(match.tail)
                    rest = match.length % self.config.page_size
                    self._frames.write(sequence.pages[-1], values[..., :rest, :], lossy)
                    sequence.length = match.length
            finally:
                self._frames.free(match.tail)

    def keep(self, sequence: CachedSequence, tokens: list[int], salt: str = "") -> None:
        """Let later sequences that begin with the same tokens find this one's; tokens: at least its `length`."""
        if not (self.config.prefix_caching and sequence.length):
            return
        measured = self.config.tiers is not None and sequence.length >= self.config.page_size
        score = float(self._replacement.scores(sequence).mean()) if measured else 0.0
        self.prefixes.keep(sequence, tokens, salt, score)

    def store(self, sequence: CachedSequence, tokens: list[int], salt: str = "") -> None:
        """Have flash keep the sequence's full pages, as far as what was written to them is still known."""
        full = sequence.length // self.config.page_size
        if self.flash is None or full == sequence.stored:
            return
        key, namespace = array("i", tokens[: full * self.config.page_size]).tobytes(), self.prefixes.namespace(salt)
        sequence.stored, pages = full, sequence.pages
        first, stored = (len(self.flash.match(namespace, key, exact)) for exact in (True, False))
        better = takewhile(lambda page: self._frames.is_known(pages[page], exact=True), range(first, stored))
        for page in (*better, *range(stored, full)):
            if not self._frames.is_known(pages[page]):
                break
            values, lossy = self._frames.read(pages[page])
            payload = values.cpu().contiguous().view(torch.uint8).numpy().data
            # No numbers, as a request may have that ends in an error, are not for later processes.
            if not (torch.isfinite(values).all() and self.flash.write(namespace, key, page, payload, lossy)):
                break

    def fetch(self, sequence: CachedSequence, tokens: list[int], salt: str, exact: bool,
              others: Sequence[CachedSequence]) -> None:  # fmt: skip
        """Read the pages that follow the sequence's from flash, as far as it has them, unless computing them is faster.
        What has to go down for it are pages of the others and, if they are settled, of this one."""
        size = self.config.page_size
        if self.flash is None or sequence.length % size:
            return
        found = self._stored(tokens, salt, exact)[sequence.length // size :]
        known = self.flash.stats()
        slow = known["hits"] > 15 and known["read_seconds"] / known["hits"] > size * self.seconds_per_token > 0
        if slow or not found:
            return
        shape = self._frames.page_shape
        for record in found:
            try:
                self.make_room(1, others)
                self.reserve(sequence, sequence.length + size)
            except OutOfPages:
                break
            page = self.flash.read(record)
            if page is None:
                break
            values = torch.frombuffer(bytearray(page[0]), dtype=torch.uint8).view(self.layers[0].k.dtype).view(shape)
            self._frames.write(sequence.pages[sequence.length // size], values, page[1])
            sequence.length += size
            self.settle(others)

    def _stored(self, tokens: list[int], salt: str, exact: bool) -> list[int]:
        """What flash has of them. Without tiers exact pages alone: where nothing is compressed, answers are exact."""
        assert self.flash is not None
        exact = exact or self.config.tiers is None
        return self.flash.match(self.prefixes.namespace(salt), array("i", tokens).tobytes(), exact)

    def forget(self, sequences: Sequence[CachedSequence] = ()) -> None:
        """Let go of every prefix that no sequence holds, but these."""
        self.prefixes.unlock(sequences)
        self.prefixes.evict(self.config.num_units)  # as many as there can be

    # What the budget moves.

    def settle(self, sequences: Sequence[CachedSequence]) -> None:
        """Compress what the budget asks of the running sequences, after a step; make exact what there is room for."""
        self._replacement.settle(sequences)
        self._replacement.promote(sequences)

    def obtainable_pages(self, sequences: Sequence[CachedSequence]) -> int:
        """Exact pages there could be beside what the sequences hold, once that is as small as it can be."""
        size = self.config.page_size
        full = {page for sequence in sequences for page in sequence.pages[: sequence.length // size]}
        least = self.config.least_units(len(full) * size, len(sequences))
        return max(self.config.num_units - least, 0) >> self.config.exact_order

    def idle_units(self) -> int:
        """Units that are free, or will be when prefixes go that no running sequence holds."""
        return self._frames.free_units() + int(self._frames.bits[self.prefixes.idle_pages()].sum())

    def make_room(self, num_pages: int, sequences: Sequence[CachedSequence],
                  growing: Sequence[CachedSequence] = ()) -> None:  # fmt: skip
        """Have room for so many exact pages, at the cost of prefixes that no sequence holds, then of what the sequences
        hold, once the halved last pages of the growing ones are whole. Raises OutOfPages."""
        wanted = num_pages << self.config.exact_order
        while (short := wanted - self._frames.free_units(len(growing))) > 0:
            if self.prefixes.evict(-(-short >> self.config.exact_order)) or self.prefixes.unlock(sequences):
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
        decoding = num_decodes == len(sequences)
        return AttentionPlan(
            query_start=self._frames.tensor(starts),
            exact_lens=self._frames.tensor(np.array(exact_lens, dtype=np.int32)),
            page_table=self._frames.tensor(padded(frames, decoding)),
            slots=self._frames.tensor(np.concatenate(slots)),
            num_decodes=num_decodes,
            max_query_len=max(counts[num_decodes:], default=0),
            pieces=tuple(pieces),
            warm=tuple(self._frames.warm_pages(tables, bits, decoding) for bits in present),
            recall=self.reads.plan(
                sequences, counts, exact_lens, map(self._frames.num_copied, tables), decoding, self.device
            ),
        )

    def observe(self, sequences: Sequence[CachedSequence], counts: Sequence[int], plan: AttentionPlan,
                shares: np.ndarray) -> None:  # fmt: skip
        """Keep what the attention of the step of this plan was: shares (`Observation.shares`) of its page columns.
        Before its tokens are committed."""
        formats = [self.config.exact_bits, *(warm.bits for warm in plan.warm)]
        first = np.cumsum([0, plan.page_table.shape[1], *(warm.codes.shape[1] for warm in plan.warm)])
        for sequence, count, share in zip(sequences, counts, shares, strict=True):
            length = sequence.length + count
            bits = self._frames.bits[np.array(sequence.pages)[: self.config.pages_for(length)]]
            lifts = np.empty(len(bits), dtype=np.float32)
            for column, kind in zip(first, formats, strict=False):
                places = np.flatnonzero(bits == kind)
                lifts[places] = share[column : column + len(places)]
            sequence.warm_mass = float(lifts[bits < self.config.exact_bits].sum())
            lifts *= length / self.config.page_size
            self._replacement.observe(sequence, lifts, length)

    def commit(self, sequence: CachedSequence, count: int) -> None:
        """The next `count` tokens have been written."""
        if self.config.tiers is not None:
            pages = np.array(sequence.pages)
            sequence.peak_bytes = max(sequence.peak_bytes, int(self._frames.costs(pages).sum()) * self._planes)
            if self._frames.lossy[pages].any():
                self._frames.lossy[pages[sequence.length // self.config.page_size :]] = True
        sequence.length += count
        assert self.config.pages_for(sequence.length) <= len(sequence.pages), "tokens written past the reserved pages"


def _pieces(frames: np.ndarray, length: int, page_size: int) -> tuple[tuple[int, int], ...]:
    """Runs of consecutive slots: (first slot, tokens), the last one cut to the sequence's length."""
    heads = np.flatnonzero(np.diff(frames, prepend=frames[:1] - 2) != 1)
    begins = heads * page_size
    ends = np.append(begins[1:], length)
    return tuple(zip((frames[heads].astype(np.int64) * page_size).tolist(), (ends - begins).tolist(), strict=True))
