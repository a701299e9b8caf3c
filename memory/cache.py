"""The paged KV cache: sequences of pages, a frame table, and one arena that the buddy allocator hands out.

    sequence      pages [0, 1, 2]   length 150        page ids are logical and stay when bytes move
                         |  |  |
    frame table   page   0  1  2                      page -> first unit of its code run
                  unit  16 32  0
                         |  |  |
    arena         [layer][K or V][head]  | frame 0   | frame 1   | frame 2   | ...       16 units a frame when exact
                                           page 2      page 0      page 1
                  pieces of the sequence: (slot 64, 128 tokens), (slot 0, 22 tokens)

The arena is one uint8 buffer [layers, 2, heads, units, unit bytes]. A page has the same units in every layer, for K and
for V and in every head, so one allocation and one table entry place it everywhere; within one head's plane a frame is
[page_size, head_dim], and frames side by side are one contiguous run of tokens. That is why growth asks for the unit
behind the last page first: attention on a CPU reads a sequence piece by piece, and a GPU tile is one block copy.

Invariants (`check()` asserts them):
  - a page id is free or belongs to exactly one sequence (sharing will count references);
  - a page in use has one block of the allocator, of its format's order; no two pages share a unit;
  - a sequence of n tokens has at least pages_for(n) pages.

Rejected: frames with all layers inside ([frame, layer, ...]): moves are one copy, but side by side frames are then not
contiguous in any layer; tokens outermost ([token, head, dim]): torch's matrix products read it at a third of the speed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.ops import AttentionPlan
from memory.buddy import BuddyAllocator, OutOfUnits
from memory.config import EXACT_ORDER, CacheConfig
from memory.errors import CapacityError


class OutOfPages(Exception):
    """The pool has too few free pages. Normal flow: the scheduler waits or makes room, and retries."""


class CachedSequence:
    """The cached tokens of one request: `length` of them, in the order of `pages`."""

    __slots__ = ("length", "pages")

    def __init__(self) -> None:
        self.pages = array("i")
        self.length = 0


class KVCache:
    """K and V of every live token. One owner: not safe for threads."""

    def __init__(self, config: CacheConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates the arena (on a CPU the system backs it with memory only as pages are written).

        Raises CapacityError if the device does not have the bytes.
        """
        self.config = config
        shape = (config.num_layers, 2, config.num_kv_heads, config.num_units, config.unit_bytes)
        try:
            arena = torch.empty(shape, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # torch raises this for a CPU and its subclass OutOfMemoryError for CUDA
            size = config.num_pages * config.page_bytes
            raise CapacityError(
                f"a KV cache of {size} bytes ({config.num_pages} pages) does not fit {device}; "
                "use a smaller --kv-cache-memory or --max-model-len"
            ) from error
        frames = (config.num_layers, 2, config.num_kv_heads, config.num_pages, config.page_size, config.head_dim)
        exact = arena.view(dtype).view(frames)
        # (K, V) of each layer, [heads, frames, page_size, head_dim]
        self.layers: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in exact]
        self.device = device
        self._allocator = BuddyAllocator(config.num_units)
        self._frame_table = np.zeros(config.num_pages, dtype=np.int32)  # page -> first unit
        self._free_pages = list(range(config.num_pages - 1, -1, -1))

    @property
    def num_free_pages(self) -> int:
        """Exact pages that can still be allocated."""
        return self._allocator.free_units >> EXACT_ORDER

    @property
    def resident_bytes(self) -> int:
        """Bytes allocated to pages, whole blocks, and the frame table."""
        used = self._allocator.used_units * self.config.unit_bytes * 2 * self.config.num_layers
        return used * self.config.num_kv_heads + self._frame_table.nbytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the whole pool and the frame table."""
        return self.config.num_pages * self.config.page_bytes + self._frame_table.nbytes

    def reserve(self, sequence: CachedSequence, length: int, room: int = 0) -> None:
        """Give the sequence the pages for `length` tokens. room: further tokens expected, to be placed beside them.

        Raises OutOfPages, and changes nothing, if the pool is short.
        """
        missing = self.config.pages_for(length) - len(sequence.pages)
        if missing <= 0:
            return
        if missing > len(self._free_pages):
            raise OutOfPages(f"{missing} pages wanted, {len(self._free_pages)} of {self.config.num_pages} free")
        last = int(self._frame_table[sequence.pages[-1]]) if sequence.pages else None
        starts: list[int] = []
        try:
            self._place(starts, last, missing, self.config.pages_for(length + room) - self.config.pages_for(length))
        except BaseException as error:
            for start in starts:
                self._allocator.free(start)
            if isinstance(error, OutOfUnits):
                raise OutOfPages(str(error)) from None
            raise
        for start in starts:
            page = self._free_pages.pop()
            self._frame_table[page] = start
            sequence.pages.append(page)

    def _place(self, starts: list[int], last: int | None, missing: int, room: int) -> None:
        """Append the first units of `missing` frames: behind the sequence's last, else in runs as long as can be."""
        allocator, step = self._allocator, 1 << EXACT_ORDER
        while missing:
            if last is not None and allocator.extend(last + step, EXACT_ORDER):
                last += step
                starts.append(last)
                missing -= 1
                continue
            count = min(missing, max(1, allocator.longest_run(EXACT_ORDER)))
            first = allocator.alloc_run(count, EXACT_ORDER, room=room + missing - count)
            starts.extend(range(first, first + count * step, step))
            last = starts[-1]
            missing -= count

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget the tokens from `length` on and give back the pages that held nothing else."""
        assert 0 <= length <= sequence.length, f"cannot truncate {sequence.length} tokens to {length}"
        keep = self.config.pages_for(length)
        for page in sequence.pages[keep:]:
            self._allocator.free(int(self._frame_table[page]))
            self._free_pages.append(page)
        del sequence.pages[keep:]
        sequence.length = length

    def free(self, sequence: CachedSequence) -> None:
        """Give back everything the sequence has, reserved pages included."""
        self.truncate(sequence, 0)

    def plan(self, sequences: Sequence[CachedSequence], counts: Sequence[int], num_decodes: int) -> AttentionPlan:
        """Where this step's tokens go and what they see: `counts[i]` new tokens of `sequences[i]`, whose pages are
        reserved. The first `num_decodes` sequences have one each. The sequences do not change: see `commit`."""
        size = self.config.page_size
        lengths = [sequence.length + count for sequence, count in zip(sequences, counts, strict=True)]
        page_table = np.zeros((len(sequences), max(map(self.config.pages_for, lengths))), dtype=np.int32)
        slots, pieces = [], []
        for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            pages = np.array(sequence.pages)[: self.config.pages_for(length)]
            frames = self._frame_table[pages] >> EXACT_ORDER
            page_table[row, : len(frames)] = frames
            new = np.arange(sequence.length, length)
            slots.append(frames[new // size].astype(np.int64) * size + new % size)
            pieces.append(_pieces(frames, length, size))
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return AttentionPlan(
            query_start=self._tensor(starts),
            seq_lens=self._tensor(np.array(lengths, dtype=np.int32)),
            page_table=self._tensor(page_table),
            slots=self._tensor(np.concatenate(slots)),
            num_decodes=num_decodes,
            max_query_len=max(counts[num_decodes:], default=0),
            max_seq_len=max(lengths),
            pieces=tuple(pieces),
        )

    def commit(self, sequence: CachedSequence, count: int) -> None:
        """The next `count` tokens have been written."""
        sequence.length += count
        assert self.config.pages_for(sequence.length) <= len(sequence.pages), "tokens written past the reserved pages"

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def check(self, sequences: Iterable[CachedSequence]) -> None:
        """Assert the invariants; `sequences` are all that are alive."""
        self._allocator.check()
        used = [page for sequence in sequences for page in sequence.pages]
        assert sorted(used + self._free_pages) == list(range(self.config.num_pages)), "a page is lost or used twice"
        starts = [int(self._frame_table[page]) for page in used]
        assert len(set(starts)) == len(starts), "two pages have the same frame"
        assert all(self._allocator.block_order(start) == EXACT_ORDER for start in starts), "a frame has the wrong order"
        assert len(used) << EXACT_ORDER == self._allocator.used_units, "the allocator holds blocks that no page has"
        for sequence in sequences:
            assert len(sequence.pages) >= self.config.pages_for(sequence.length), "a sequence lacks pages"


def _pieces(frames: np.ndarray, length: int, page_size: int) -> tuple[tuple[int, int], ...]:
    """Runs of consecutive slots: (first slot, tokens), the last one cut to the sequence's length."""
    heads = np.flatnonzero(np.diff(frames, prepend=frames[:1] - 2) != 1)
    begins = heads * page_size
    ends = np.append(begins[1:], length)
    return tuple(zip((frames[heads].astype(np.int64) * page_size).tolist(), (ends - begins).tolist(), strict=True))
