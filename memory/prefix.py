"""Prefixes that are kept for later requests: pages under a radix tree of token ids.

    sequence A   [ system prompt | question 1 ...]        tree   system prompt ──> question 1 ...
    pages          0    1    2    3                              0  1             2    3
    sequence B   [ system prompt | question 2 ...]                            └──> question 2 ...
    pages          0    1    4    5                                               4    5

Page 4 begins like page 2 with the end of the system prompt: what two sequences share of a page is copied, token by
token, so that a prefix is used to its last token and a page is written by one sequence only.

The tree owns each of its pages like a sequence does, and a page is freed with its last owner. So whatever the tree lets
go, no running sequence loses anything; locks only keep it from letting go what would free nothing.

Rejected: sharing whole pages only (a system prompt of 1,000 tokens would lose 40 of them); a sequence's pages entering
the tree when it ends (requests that arrive together would share nothing).
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from memory.config import CacheConfig
from memory.eviction import Importance
from memory.frames import Frames
from memory.importance import AttentionRecord
from memory.radix import Match, RadixTree

# Tokens behind which attention over all of them costs a token as much as the rest: some six times the hidden size, as
# 3,500 for 135M parameters and 25,000 for 7B.
_EVEN = 8192.0


class CachedSequence:
    """The cached tokens of one request: `length` of them, in the order of `pages`."""

    def __init__(self) -> None:
        self.pages = array("i")
        self.length = 0
        self.attention = AttentionRecord()
        self.held: Match | None = None  # of the tree of prefixes, which keeps it
        self.moves = 0
        self.peak_bytes = 0  # of its pages, the chunk in flight included
        self.reads: Counter[str] = Counter()  # see memory/recall.py
        self.stored = 0  # pages that are on flash, or cannot be
        self.warm_mass = 0.0  # share of the attention observed last that went to compressed pages


class PrefixCache:
    """The tree, as one of the owners of its pages."""

    def __init__(self, config: CacheConfig, frames: Frames, fingerprint: bytes) -> None:
        self._page_size = size = config.page_size
        self._uses = Importance(len(frames.bits), size * array("i").itemsize, _EVEN)
        keep = attrgetter("last_used") if config.eviction_policy == "lru" else self._uses.keep
        self.tree: RadixTree[int] = RadixTree(size, max_children=config.max_prefix_children,
                                              max_depth=config.max_prefix_depth, keep=keep)  # fmt: skip
        self._frames = frames
        self._kept = np.zeros(len(frames.bits), dtype=np.int32)  # whether the tree is one of the page's owners
        self._fingerprint = fingerprint

    def match(self, tokens: list[int], salt: str, exact: bool) -> Match:
        """The longest cached beginning of the tokens, of what was kept with the same salt. Changes nothing.

        exact: only what was computed over exact pages, and is exact still.
        """
        match = self.tree.match(array("i", tokens).tobytes(), self.namespace(salt))
        tail, lossy, keep = match.tail, self._frames.lossy, len(match.values)
        if exact and lossy[match.values].any():
            keep = int(np.argmax(lossy[match.values]))
        elif tail is None or (self._frames.is_known(tail) and not (exact and lossy[tail])):
            return match
        return match._replace(tail=None, values=match.values[:keep], length=keep * self._page_size)

    def adopt(self, sequence: CachedSequence, match: Match) -> None:
        """Begin an empty sequence with the full pages of a match."""
        assert not sequence.pages, "only an empty sequence can begin with a prefix"
        sequence.held = self.tree.lock(match)
        self._uses.used(match.values)
        self._frames.share(match.values)
        sequence.pages.extend(match.values)
        sequence.length = len(match.values) * self._page_size

    def keep(self, sequence: CachedSequence, tokens: list[int], salt: str, score: float) -> None:
        """Have the tree keep the sequence's pages, whose tokens these are; also one that is filled in part."""
        key, namespace = array("i", tokens[: sequence.length]).tobytes(), self.namespace(salt)
        pages = sequence.pages[: -(-sequence.length // self._page_size)].tolist()
        self._frames.share(pages)
        self._kept[pages] += 1
        self._release(self.tree.insert(key, pages, namespace, score=score, better=self._better))
        self.unlock([sequence])
        match = self.tree.match(key, namespace)
        self._uses.added(key, namespace, match.values if match.tail is None else [*match.values, match.tail])
        sequence.held = self.tree.lock(match)

    def unlock(self, sequences: Sequence[CachedSequence]) -> bool:
        """Let the tree let go of what the sequences have of it, if it comes to that; says whether it held any."""
        held = [(sequence, sequence.held) for sequence in sequences if sequence.held is not None]
        for sequence, match in held:
            self.tree.unlock(match)
            sequence.held = None
        return bool(held)

    def idle_pages(self) -> np.ndarray:
        """Pages that the tree alone owns."""
        return np.flatnonzero((self._kept > 0) & (self._frames.owners == self._kept))

    def evict(self, num_pages: int) -> bool:
        """Let go of so many pages that no running sequence needs, or all there are; says whether there was any."""
        pages = self.tree.evict(num_pages)
        self._release(pages)
        return bool(pages)

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            self._kept[page] -= 1
            if not self._kept[page]:
                self._uses.removed(page)
            self._frames.free(page)

    def _better(self, page: int, other: int) -> bool:
        lossy, bits = self._frames.lossy, self._frames.bits
        return (not lossy[page], bits[page]) > (not lossy[other], bits[other])

    def namespace(self, salt: str) -> bytes:
        """What a tenant's prefixes are kept under."""
        return hashlib.sha256(self._fingerprint + b"\0" + salt.encode("utf-8", "surrogatepass")).digest()
