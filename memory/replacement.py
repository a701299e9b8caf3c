"""Which pages of which sequences are compressed when: the moves that a budget, or a pool that is short, asks for.

    sequences ──> survey: every page once, with its score (importance.py) ──> policy.plan ──> frames.compress

Of a page that several sequences hold, the one that needs it most decides when it goes down, and each pays its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from memory import policy
from memory.config import WARM_BITS, CacheConfig
from memory.frames import Frames
from memory.importance import Scorer, page_ages, score_pages
from memory.prefix import CachedSequence


class _Survey(NamedTuple):
    """Pages that may move, each once; `rows[i]` are those of `sequences[i]`, in its order."""

    sequences: Sequence[CachedSequence]
    rows: list[np.ndarray]
    pages: np.ndarray  # ids
    scores: np.ndarray
    ages: np.ndarray
    sinks: np.ndarray
    users: np.ndarray  # sequences that have the page


class Replacement:
    """Compresses pages of sequences, least important first. Only where the configuration has tiers."""

    def __init__(self, config: CacheConfig, frames: Frames, scorer: Scorer) -> None:
        self.config = config
        self.num_moves = 0
        self._frames = frames
        self._scorer = scorer

    def scores(self, sequence: CachedSequence) -> np.ndarray:
        """Of its full pages, float64 in [0, 1]."""
        assert self.config.tiers is not None
        ages = page_ages(sequence.length // self.config.page_size, self.config.page_size, sequence.length)
        return score_pages(self._scorer, sequence.attention, ages, self.config.tiers.importance)

    def shrink(self, sequences: Sequence[CachedSequence], excess: int, limit: int) -> bool:
        """Free `excess` bytes of a plane, if there are as many; says whether any page could move. limit: what the
        pages may take together; exact ones leave warm_layer_ratio of it to the others."""
        if self.config.tiers is None or not sequences:
            return False
        survey = self._survey(sequences)
        survey = survey._replace(users=np.ones_like(survey.users))  # the pool gets back all of a page's bytes
        return self._shrink(survey, np.arange(len(survey.pages)), excess, limit)

    def settle(self, sequences: Sequence[CachedSequence]) -> None:
        """Compress what the budget asks of each sequence, and what the bound on exact tokens asks of all together. Of
        pages that several share, each pays its part."""
        tiers, size = self.config.tiers, self.config.page_size
        if tiers is None or not sequences:
            return
        budgeted = tiers.budget is not None and tiers.budget < 1  # of 1, the page that is being filled is no reason
        if budgeted or tiers.hot_ratio:
            survey = None
            every = [np.array(sequence.pages) for sequence in sequences]
            users = np.bincount(np.concatenate(every), minlength=len(self._frames.bits))
            for row, (sequence, pages) in enumerate(zip(sequences, every, strict=True)):
                if (
                    budgeted
                    and len(pages) == self.config.pages_for(sequence.length)  # none is reserved behind it
                    and 0 < 2 * (sequence.length % size) <= size
                ):
                    self._frames.halve(sequence.pages[sequence.length // size])
                limit = self._limit(sequence.length, tiers.budget or 1.0)
                excess = int((self._frames.costs(pages) / users[pages]).sum()) - limit
                if excess > 0 or tiers.hot_ratio:
                    survey = survey or self._survey(sequences)
                    self._shrink(survey, survey.rows[row], excess, limit)
        exact = np.unique(np.concatenate([np.array(sequence.pages) for sequence in sequences]))
        hot = int(np.count_nonzero(self._frames.bits[exact] == self.config.exact_bits)) * size
        if tiers.hot_layer_size is not None and hot > tiers.hot_layer_size:
            survey = self._survey(sequences)
            self._shrink(survey, np.arange(len(survey.pages)), 0, 0, hot_tokens=tiers.hot_layer_size)

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

    def _survey(self, sequences: Sequence[CachedSequence]) -> _Survey:
        """The full pages of the sequences, each once: of what several share the one that needs it most decides."""
        size = self.config.page_size
        every = [np.array(sequence.pages[: sequence.length // size], dtype=np.int64) for sequence in sequences]
        page_ids, inverse, users = np.unique(np.concatenate(every), return_inverse=True, return_counts=True)
        rows = np.split(inverse, np.cumsum([len(pages) for pages in every])[:-1])
        scores = np.zeros(len(page_ids))
        ages = np.full(len(page_ids), 1 << 62)
        sinks = np.zeros(len(page_ids), dtype=bool)
        for sequence, mine in zip(sequences, rows, strict=True):
            scores[mine] = np.fmax(scores[mine], self.scores(sequence))
            ages[mine] = np.minimum(ages[mine], page_ages(len(mine), size, sequence.length))
            sinks[mine[:1]] = True
        return _Survey(sequences, rows, page_ids, scores, ages, sinks, users)

    def _shrink(
        self, survey: _Survey, rows: np.ndarray, excess: int, limit: int, hot_tokens: int | None = None
    ) -> bool:
        """Move some of the pages, those of `rows`, down until `excess` bytes of a plane are free; says whether any
        could move.

        limit: what they may take together; exact pages leave warm_layer_ratio of it to the others. hot_tokens: exact
        tokens there may be.
        """
        config, tiers = self.config, self.config.tiers
        assert tiers is not None
        if not len(rows):
            return False
        page_ids, ages = survey.pages[rows], survey.ages[rows]
        pages = policy.Pages(
            scores=survey.scores[rows],
            bits=self._frames.bits[page_ids].astype(np.int64),
            ages=ages,
            recent=ages < tiers.recent_tokens,
            sinks=survey.sinks[rows],
            shares=1 / survey.users[rows],
        )
        costs = {bits: config.page_cost(bits) for bits in (config.exact_bits, *WARM_BITS)}
        exact_pages = int((pages.bits == config.exact_bits).sum())
        room = hot_tokens // config.page_size if hot_tokens is not None else (
            int(limit * (1 - tiers.warm_layer_ratio)) // costs[config.exact_bits]
        )  # fmt: skip
        moves = policy.plan(pages, costs, excess, exact_pages - room, tiers)
        for bits in {move.bits for move in moves}:
            self._frames.compress(page_ids[[move.page for move in moves if move.bits == bits]], bits)
        moved = rows[[move.page for move in moves]]
        for sequence, mine in zip(survey.sequences, survey.rows, strict=True):
            sequence.moves += int(np.isin(mine, moved).sum())
        self.num_moves += len(moves)
        return bool(moves)
