"""`tools.bench buddy`: what one call of the buddy allocator costs in the steady state.

An arena of 2^17 units is filled to 70 %; then batches of random blocks are freed and as many allocated again, each
batch timed as a whole in CPU time of this process. Figures are medians over the batches.

    pages "1"             blocks of one unit
    pages "1..16"         a request for 1..16 pages, rounded up to one block
    pages "run of 1..16"  `alloc_run` of 1..16 pages, each of which is then freed on its own: alloc_ns is per run,
                          free_ns per page, and mops counts one call for a run and one for each page freed
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from memory.buddy import BuddyAllocator

_UNITS = 1 << 17
_USE = 0.7
_BATCH = 1000


def rows(repeats: int, seed: int) -> list[dict[str, Any]]:
    """One row per kind of request: pages, alloc_ns, free_ns, mops (million calls a second, both kinds together).

    repeats: batches per row.
    """
    return [
        _row("1", lambda rng: 1, False, repeats, seed),
        _row("1..16", lambda rng: rng.randint(1, 16), False, repeats, seed),
        _row("run of 1..16", lambda rng: rng.randint(1, 16), True, repeats, seed),
    ]


def _row(pages: str, draw: Callable[[random.Random], int], as_run: bool, repeats: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    arena = BuddyAllocator(_UNITS)
    alloc, alloc_run, free = arena.alloc, arena.alloc_run, arena.free
    live: list[tuple[int, int]] = []  # (first start, blocks)
    alloc_ns, free_ns, calls_per_us = [], [], []

    def fill(requests: list[int]) -> tuple[list[int], int]:
        """Allocate the requests; the starts, and the nanoseconds that took."""
        starts = []
        before = time.process_time_ns()
        if as_run:
            for request in requests:
                starts.append(alloc_run(request, 0))  # noqa: PERF401 - the loop is what is timed, alike in both branches
        else:
            for request in requests:
                starts.append(alloc(request))  # noqa: PERF401
        return starts, time.process_time_ns() - before

    def batch(size: int) -> list[int]:
        """Requests: pages of a run, or orders of a block."""
        return [draw(rng) if as_run else (draw(rng) - 1).bit_length() for _ in range(size)]

    def remember(starts: list[int], requests: list[int]) -> None:
        live.extend(zip(starts, requests if as_run else [1] * len(starts), strict=True))

    while arena.used_units < _USE * _UNITS:
        requests = batch(1)
        remember(fill(requests)[0], requests)
    for _ in range(repeats):
        gone = [_take(live, rng.randrange(len(live))) for _ in range(_BATCH)]
        victims = [start + i for start, count in gone for i in range(count)]
        before = time.process_time_ns()
        for start in victims:
            free(start)
        freeing = time.process_time_ns() - before
        requests = batch(_BATCH)
        starts, allocating = fill(requests)
        remember(starts, requests)
        free_ns.append(freeing / len(victims))
        alloc_ns.append(allocating / _BATCH)
        calls_per_us.append(1000 * (len(victims) + _BATCH) / (freeing + allocating))
    return {
        "pages": pages,
        "alloc_ns": round(statistics.median(alloc_ns)),
        "free_ns": round(statistics.median(free_ns)),
        "mops": round(statistics.median(calls_per_us), 2),
    }


def _take(items: list[tuple[int, int]], i: int) -> tuple[int, int]:
    """Remove and return items[i] in O(1); the last item takes its place."""
    items[i], items[-1] = items[-1], items[i]
    return items.pop()
