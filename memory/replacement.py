"""Which pages of which sequences are compressed when: the moves that a budget, or a pool that is short, asks for.

    sequences ──> survey: every page once, with its score (importance.py) ──> policy.plan ──> frames.compress

Of a page that several sequences hold, the one that needs it most decides when it goes down, and each pays its part.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from kernels.ops import Ops
from memory import policy
from memory.config import WARM_BITS, CacheConfig, TierConfig
from memory.frames import Frames
from memory.importance import adapt, page_ages, score_pages
from memory.prefix import CachedSequence


class _Survey(NamedTuple):
    """Pages that may move, each once; `rows[i]` are those of `sequences[i]`, in its order."""

    sequences: Sequence[CachedSequence]
    rows: list[np.ndarray]
    ids: np.ndarray
    pages: policy.Pages


class Replacement:
    """Compresses pages of sequences, least important first. Only where the configuration has tiers."""

    def __init__(self, config: CacheConfig, frames: Frames, ops: Ops, scorer: Tensor) -> None:
        """scorer: `Scorer.packed`, on the device."""
        self.config = config
        self.num_moves = 0
        self.num_promotions = 0  # of compressed pages to exact ones
        self._frames = frames
        self._ops, self._scorer = ops, scorer
        self._tiers = config.tiers or TierConfig()
        self._costs = {bits: config.page_cost(bits) for bits in (config.exact_bits, *WARM_BITS)}  # bytes of a plane

    def scores(self, sequence: CachedSequence) -> np.ndarray:
        """Of its full pages, float64 in [0, 1]."""
        ages = page_ages(sequence.length // self.config.page_size, self.config.page_size, sequence.length)
        return score_pages(self._scorer, sequence.attention, ages, self._tiers.importance, self._ops)

    def observe(self, sequence: CachedSequence, lifts: np.ndarray, length: int) -> None:
        """What its pages were attended to by the newest queries, once it is `length` tokens long."""
        ages = page_ages(len(lifts), self.config.page_size, length)
        if self._tiers.adapt and sequence.attention.length:
            adapt(self._scorer, sequence.attention, ages, lifts, self._ops)
        sequence.attention.observe(lifts, ages, length, self._tiers.attention_window)

    def shrink(self, sequences: Sequence[CachedSequence], excess: int, limit: int) -> bool:
        """Free `excess` bytes of a plane, if there are as many; says whether any page could move. limit: what the
        pages may take together; exact ones leave warm_layer_ratio of it to the others."""
        if self.config.tiers is None or not sequences:
            return False
        survey = self._survey(sequences)
        pages = survey.pages._replace(shares=np.ones(len(survey.ids)))  # the pool gets back all of a page's bytes
        rows = np.arange(len(survey.ids))
        return self._shrink(survey._replace(pages=pages), rows, excess, self._exact_pages(limit))

    def settle(self, sequences: Sequence[CachedSequence]) -> None:
        """Compress what the budget asks of each sequence, and what the bound on exact tokens asks of all together. Of
        pages that several share, each pays its part."""
        tiers, size = self._tiers, self.config.page_size
        if self.config.tiers is None or not sequences:
            return
        budgeted = tiers.budget is not None and tiers.budget < 1  # of 1, the page that is being filled is no reason
        survey = None
        every = [np.array(sequence.pages) for sequence in sequences]
        users = np.bincount(np.concatenate(every), minlength=len(self._frames.bits))
        if budgeted or tiers.hot_ratio:
            for row, (sequence, pages) in enumerate(zip(sequences, every, strict=True)):
                last = len(pages) == self.config.pages_for(sequence.length)  # none is reserved behind it
                if budgeted and last and 0 < 2 * (sequence.length % size) <= size:
                    self._frames.halve(sequence.pages[-1])
                limit = self._limit(sequence.length, tiers.budget or 1.0)
                excess = int((self._frames.costs(pages) / users[pages]).sum()) - limit
                if excess > 0 or tiers.hot_ratio:
                    survey = survey or self._survey(sequences)
                    self._shrink(survey, survey.rows[row], excess, self._exact_pages(limit))
        hot = int(np.count_nonzero(self._frames.bits[users > 0] == self.config.exact_bits)) * size
        if tiers.hot_layer_size is not None and hot > tiers.hot_layer_size:
            survey = survey or self._survey(sequences)
            self._shrink(survey, np.arange(len(survey.ids)), 0, tiers.hot_layer_size // size)

    def promote(self, sequences: Sequence[CachedSequence]) -> None:
        """Make compressed pages exact again, the most important first and a few at a time, while more than a quarter of
        the pool is free: it has to fill up before they go down once more. A budget leaves no such room."""
        copies, tiers = self._frames.copies, self._tiers
        if not copies.exact or tiers.budget is not None or tiers.hot_ratio:
            return
        room = (self._frames.free_units() - self.config.num_units // 4) >> self.config.exact_order
        promotable = (copies.slots >= 0) & (self._frames.bits < self.config.exact_bits)
        if room < 1 or not sequences or not promotable.any():
            return
        survey = self._survey(sequences)
        if tiers.hot_layer_size is not None:
            # And those being filled.
            exact = len(sequences) + int(np.count_nonzero(survey.pages.bits == self.config.exact_bits))
            room = min(room, tiers.hot_layer_size // self.config.page_size - exact)
        rows = np.flatnonzero(promotable[survey.ids])
        best = rows[np.argsort(-survey.pages.scores[rows], kind="stable")][: max(min(room, tiers.max_moves), 0)]
        self.num_promotions += sum(self._frames.restore(page) for page in survey.ids[best].tolist())

    def _limit(self, length: int, budget: float) -> int:
        """Bytes of one plane of one head that `budget` grants a sequence.

        Full pages have a format that the budget pays for, and never fall below it for the sake of the page that is
        being filled and of the first page, which may stay at 8 bits: in a short text these two may come on top.
        """
        config = self.config
        full, rest = divmod(length, config.page_size)
        exact, *costs = self._costs.values()
        # A block of records may be this sequence's alone.
        limit = int(budget * length * exact) // config.page_size - (config.unit_bytes << config.record_order)
        paid = next((cost for cost in costs if cost <= budget * exact), costs[-1])
        filled = 0 if not rest else exact // 2 if 2 * rest <= config.page_size else exact
        first = paid if self._tiers.recalled else costs[0]
        return max(limit, min(full, 1) * first + max(full - 1, 0) * paid + filled)

    def _exact_pages(self, limit: int) -> int:
        """How many exact pages may be among those that take `limit` bytes of a plane together."""
        return int(limit * (1 - self._tiers.warm_layer_ratio)) // self._costs[self.config.exact_bits]

    def _survey(self, sequences: Sequence[CachedSequence]) -> _Survey:
        """The full pages of the sequences, each once: of what several share the one that needs it most decides."""
        size = self.config.page_size
        every = [np.array(sequence.pages[: sequence.length // size], dtype=np.int64) for sequence in sequences]
        ids, inverse, users = np.unique(np.concatenate(every), return_inverse=True, return_counts=True)
        rows = np.split(inverse, np.cumsum([len(pages) for pages in every])[:-1])
        scores = np.zeros(len(ids))
        ages = np.full(len(ids), 1 << 62)
        sinks = np.zeros(len(ids), dtype=bool)
        for sequence, mine in zip(sequences, rows, strict=True):
            scores[mine] = np.fmax(scores[mine], self.scores(sequence))
            ages[mine] = np.minimum(ages[mine], page_ages(len(mine), size, sequence.length))
            sinks[mine[:1]] = True
        bits = self._frames.bits[ids].astype(np.int64)
        pages = policy.Pages(scores, bits, ages, ages < self._tiers.recent_tokens, sinks, 1 / users)
        return _Survey(sequences, rows, ids, pages)

    def _shrink(self, survey: _Survey, rows: np.ndarray, excess: int, exact: int) -> bool:
        """Move pages, those of `rows`, down until `excess` bytes of a plane are free and at most `exact` of them are
        exact; says whether any could move."""
        pages = policy.Pages(*(column[rows] for column in survey.pages))
        exact_excess = int((pages.bits == self.config.exact_bits).sum()) - exact
        wanted = policy.plan(pages, self._costs, excess, exact_excess, self._tiers)
        moved = rows[wanted != pages.bits]
        survey.pages.bits[rows] = wanted
        for bits in np.unique(survey.pages.bits[moved]).tolist():
            self._frames.compress(survey.ids[moved[survey.pages.bits[moved] == bits]], bits)
        for sequence, mine in zip(survey.sequences, survey.rows, strict=True):
            sequence.moves += int(np.isin(mine, moved).sum())
        self.num_moves += len(moved)
        return len(moved) > 0
