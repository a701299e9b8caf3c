"""Which pages go down a tier: a pure function from scores and sizes to formats (no torch).

    exact ──> 8 bits ──> 4 bits ──> 3 bits ──> 2 bits           a move goes down one step or several, never up:
                                                                 what was rounded away is gone

When the pages take more than the limit, the ladder is walked one step at a time: all exact pages may fall to 8 bits
before the first falls to 4, so that the worst page of a sequence is as good as it can be. Pages at or above
`hot_threshold` stay a step above the others, and the page with the attention sinks stays at 8 bits: what it loses, all
later tokens lose (at 3 bits from the start of a text, the text is lost: a KL of 0.2); unless queries recall what they
attend to most, then it is a step above the others like those. Within a step the lowest scores
go first and the newest tokens last. No page moves while all fit.

Moves that are not needed (`evict_threshold`, `warm_threshold`) are made only in a step that needed one, and boundedly:
they make room ahead, so that the next steps need none.

Rejected: keeping the newest pages exact and the others at 4 bits. A page kept exact costs as much beyond 4 bits as
three kept at 8, and a whole cache at 8 bits has a KL of 0.5e-3 where rounding alone has 0.4e-3 (README).
"""

from typing import NamedTuple

import numpy as np

from memory.config import WARM_BITS, TierConfig

# The order in which pages fall: (bits, whether the sinks and those at or above hot_threshold, a step above the others).
_LADDER = ((8, False), (4, False), (8, True), (3, False), (4, True), (2, False), (3, True), (2, True))


class Pages(NamedTuple):
    """The pages that may move, by any number of sequences; arrays of one length."""

    scores: np.ndarray  # float, in [0, 1]; NaN counts as 0
    bits: np.ndarray  # int: of each page's format
    ages: np.ndarray  # int: tokens between the page's last token and its sequence's newest
    recent: np.ndarray  # bool: last in every step of the ladder
    sinks: np.ndarray  # bool: the page of a sequence's first tokens, which all queries attend to
    shares: np.ndarray  # float: of its bytes, that count: 1, or less where others who have the page pay for it too


def plan(pages: Pages, costs: dict[int, int], excess: int, exact_excess: int, tiers: TierConfig) -> np.ndarray:
    """The bits that pages are to have, for moves that free at least `excess` bytes, or all that can be freed; and that
    take at least `exact_excess` pages out of the exact ones. costs: bytes of a page of each format."""
    bits: np.ndarray = pages.bits.copy()
    scores = np.nan_to_num(pages.scores, nan=0.0)
    if tiers.hot_ratio:  # fixed shares of the pages: the best stay exact, the lowest have 2 bits, the others 4
        lowest = np.lexsort((-pages.ages, scores))
        for share, step in ((np.ceil(len(bits) * (1 - tiers.hot_ratio)), 4), (len(bits) * tiers.cold_ratio, 2)):
            bits[lowest[: int(share)]] = np.minimum(bits[lowest[: int(share)]], step)
    sizes = np.zeros(max(costs) + 1)
    sizes[list(costs)] = list(costs.values())
    excess -= int(((sizes[pages.bits] - sizes[bits]) * pages.shares).sum())
    hot = pages.sinks | (scores >= tiers.hot_threshold)
    # Lowest score first; of equal ones the oldest, so that without scores this is first in, first down.
    order = np.lexsort((-pages.ages, scores, pages.recent))
    for step, of_hot in _LADDER:
        movable = (bits > step) & (hot == of_hot)
        if step < WARM_BITS[0] and not tiers.recalled:
            movable &= ~pages.sinks
        above = order[movable[order]]
        saved = np.cumsum((sizes[bits[above]] - sizes[step]) * pages.shares[above])
        needed = 0 if excess <= 0 else min(int(np.searchsorted(saved, excess)) + 1, len(above))
        if step == WARM_BITS[0]:
            needed = min(max(needed, exact_excess), len(above))
            exact_excess -= needed
        if needed:
            threshold = tiers.warm_threshold if step == WARM_BITS[0] else tiers.evict_threshold
            ahead = above[needed:][: tiers.max_moves]
            ahead = ahead[(scores[ahead] < threshold) & ~pages.recent[ahead]]
            excess -= int(saved[needed - 1])
            bits[above[:needed]] = step
            bits[ahead] = step
    return bits
