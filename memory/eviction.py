"""Which cached prefix goes first when pages run out.

    a page by its uses      0        1       2-3   ...        learned: of 100 pages that came into a class,
    and by its age        [1][2-3][4-7][8-15] ...             how many were asked for again at which age

The page that goes first is the last one of the leaf that promises the fewest uses for the room it takes: of all ages up
to which it might be held, the best of (uses until then) / (time until then). Both are learned from the requests as they
come, and slowly forgotten, so nothing has to be tuned: what comes but once goes at once, a loop that is a little larger
than the cache keeps most of itself, and where only recency tells, the order is that of LRU (before anything is learned,
too: a page is taken to come again as likely between ages 1 and 2 as between 1,000 and 2,000). A page that has gone is
remembered for a while, by a hash of all that leads to it, for what is seen of its next use; without that, a small cache
would never learn of uses that are further apart than it is large.

Source: Beckmann, Chen and Cidon, LHD: Improving Cache Hit Rate by Maximizing Hit Density (NSDI 2018), with the classes
and the memory of what has gone chosen here.

Rejected, by the share of blocks that hit in the Mooncake conversation trace, at 1,000 / 5,000 / 20,000 blocks, in a
simulator with whole edges in place of pages (LRU .045 .112 .288, the optimum .179 .340 .366, this policy .079 .169
.298); unless it says otherwise, all remember what has gone, 3,000 edges:
  - uses / age: .060 .152 .297; uses / time since the first: .045 .126 .297; the least used first: .077 .142 .249;
    LRU-2: .073 .164 .250; GDSF: .056 .140 .299; 20,000 blocks of time for each use, to five: .082 .163 .301, but that
    is a number for one trace;
  - learning without remembering what has gone: .054 .130 .294;
  - counting never used pages half: .079 .173 .301, but .511 for .526 in steady chats;
  - life tables that correct for pages too young to have come again: .080 .172, but where only recency tells, 5 % of
    all blocks worse than LRU;
  - more classes, by turns, by the new pages of the request, by their place, by the time between uses, by the uses of
    what leads there: at most .001 better (.004 at 20,000 blocks), and up to .006 worse.
Half of the way to the optimum is out of reach for what a page's uses tell: holding each class for the time that was
best in hindsight gives .088 .178 .306.
"""

from collections.abc import Sequence
from itertools import accumulate
from zlib import crc32

import numpy as np

from memory.radix import Node

_CLASSES = 6  # of pages by their uses: 0, 1, 2-3, 4-7, 8-15, more
_AGES = 40  # powers of two
_REMEMBERED = 32  # pages that are gone, for each that there may be
_PRIOR = 256.0  # pages that a class has seen before it sees any
_FORGET = 1 / 512  # of what was learned, each time a quarter of the pages has been asked for


class Importance:
    """Uses that a page may still bring, for the time that it has to wait for them, times what each is worth.

    num_pages: page ids are below it. page_bytes: of a key, for one page. even: the position, in items, at which a page
    costs twice as much to compute as the first one, since attention over all before it costs as much as the rest.
    """

    def __init__(self, num_pages: int, page_bytes: int, even: float) -> None:
        self._page_bytes, self._even = page_bytes, even
        self._clock = self._due = 0  # in pages asked for
        self._seen = np.zeros(num_pages, dtype=np.int64)  # last use * 256 + uses
        self._mark = np.zeros(num_pages, dtype=np.uint32)  # of all that the page covers; 0: unknown, or not full yet
        self._gone = np.zeros(_REMEMBERED * num_pages, dtype=np.uint32)  # marks; of two for a place the newer one stays
        self._known = np.zeros(len(self._gone), dtype=np.int64)  # what was seen of these
        likely = (np.arange(_CLASSES) + 1) / (np.arange(_CLASSES) + 2)  # after so many uses another: Laplace's rule
        self._prior = np.outer(likely, np.full(_AGES, _PRIOR / _AGES))
        self._again = self._prior.copy()  # uses of class c at an age of bit length a
        self._ever = np.full(_CLASSES, _PRIOR)  # pages that came into class c
        self._learn()

    def keep(self, node: Node[int]) -> float:
        """The priority of the leaf's last page. O(1)."""
        last, hits = divmod(int(self._seen[node.values[-1]]), 256)
        age = self._clock - last
        density = self._density[min(hits.bit_length(), _CLASSES - 1)][min(age.bit_length(), _AGES - 1)]
        return float(density * (1 + node.score) * (1 + node.end / self._even))

    def used(self, pages: Sequence[int]) -> None:
        """A request begins with these pages."""
        ids = np.asarray(pages, dtype=np.int64)
        self._enter(ids, self._seen[ids])

    def added(self, key: bytes, namespace: bytes, pages: Sequence[int]) -> None:
        """The tree has these pages for this key, the last one perhaps not full; those that are new to us begin."""
        size, ids = self._page_bytes, np.asarray(pages, dtype=np.int64)
        rest, ids = ids[len(key) // size :], ids[: len(key) // size]
        rest = rest[self._mark[rest] == 0]
        self._seen[rest] = self._clock * 256
        new = np.flatnonzero(self._mark[ids] == 0)
        if len(new):
            first = int(new[0])
            start = int(self._mark[ids[first - 1]]) if first else crc32(namespace)
            parts = (key[i * size : (i + 1) * size] for i in range(first, len(ids)))
            marks = np.fromiter(accumulate(parts, lambda mark, part: crc32(part, mark), initial=start), np.int64)
            marks, ids = marks[new - first + 1], ids[new]
            self._mark[ids], place = marks, marks % len(self._gone)
            self._enter(ids, np.where(self._gone[place] == marks, self._known[place], -1))

    def removed(self, page: int) -> None:
        """The tree has let go of it; what is known of it is remembered."""
        if mark := int(self._mark[page]):
            place = mark % len(self._gone)
            self._gone[place], self._known[place] = mark, self._seen[page]
            self._mark[page] = 0

    def _enter(self, ids: np.ndarray, seen: np.ndarray) -> None:
        """Another use of pages of which that was seen (-1: not even the first use), or their first."""
        known = seen[seen >= 0]
        np.add.at(self._again, (_bits(known % 256, _CLASSES), _bits(self._clock - known // 256, _AGES)), 1)
        hits = np.where(seen < 0, 0, np.minimum(seen % 256 + 1, 255))
        self._ever += np.bincount(_bits(hits, _CLASSES), minlength=_CLASSES)
        self._seen[ids] = self._clock * 256 + hits
        self._clock += len(ids)
        if self._clock >= self._due:
            self._learn()

    def _learn(self) -> None:
        """The density of class c at age a: of all ages b to hold it up to, the best of uses until b / time until b."""
        uses = self._again / np.maximum(self._ever, self._again.sum(1))[:, None]
        alive = np.maximum(1 - uses.cumsum(1), 0) + uses / 2  # in the middle of each age
        waits = alive * np.diff(2.0 ** np.arange(_AGES + 1) // 2)
        sums = np.pad(np.cumsum([uses, waits], 2), ((0, 0), (0, 0), (1, 0)))
        gains, costs = sums[:, :, None, 1:] - sums[:, :, :-1, None]  # from any age to any other
        with np.errstate(invalid="ignore", divide="ignore"):
            self._density = np.triu(gains / costs).max(2).tolist()
        self._again += (self._prior - self._again) * _FORGET
        self._ever += (_PRIOR - self._ever) * _FORGET
        self._due = self._clock + len(self._seen) // 4


def _bits(numbers: np.ndarray, most: int) -> np.ndarray:
    """The bit length of each, of `most` different ones."""
    return np.asarray(np.minimum(np.frexp(numbers)[1], most - 1))
