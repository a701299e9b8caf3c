"""What queries read of the copies below. Which tokens is the kernels' choice (`Ops.recall`), how many is made here."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kernels.ops import Recall
from memory.config import CacheConfig
from memory.prefix import CachedSequence

# Bytes a second of scattered rows: 16 lanes of PCIe, memory that a GPU shares with its CPU, a disk.
LINKS = {"pcie4": 25e9, "pcie5": 50e9, "unified": 100e9, "nvme": 5e9}


# Shorter texts recall as many tokens as one of this length: what their K and V lose, all that follows loses.
_LEAST = 1024


class Reads:
    """Plans the reads of each step, and counts them: for every sequence, and in all.

    queries: those over compressed pages; exact: tokens that were exact for them, of these `recalled` from copies; read:
    tokens read for that, fewer because queries of a block share them; decoded: of these, those of steps that only
    decode, which look into the overlay first.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.counts: Counter[str] = Counter()
        self._shares = np.array(config.recall_shares)

    def plan(
        self, sequences: Sequence[CachedSequence], counts: Sequence[int], exact_lens: list[int],
        copied: Iterable[int], decoding: bool, device: torch.device) -> Recall | None:  # fmt: skip
        """The reads of a step of counts[i] queries of sequences[i], which has exact_lens[i] exact tokens and copied[i]
        compressed pages that have copies; counted."""
        cold = self.config.cold
        if cold is None or not cold.recall:
            return None
        tokens, blocks, start = [0] * len(counts), [], 0
        for b, (sequence, count, exact, pages) in enumerate(zip(sequences, counts, exact_lens, copied, strict=True)):
            if pages:
                tokens[b] = math.ceil(cold.recall * max(sequence.length + count, _LEAST))
                mean = int(np.minimum(tokens[b] * self._shares // 64, pages * self.config.page_size).mean().round())
                mine = [(b, start + i, min(cold.block, count - i), tokens[b]) for i in range(0, count, cold.block)]
                blocks += mine
                recalled, read = count * mean, len(mine) * mean
                for reads in (sequence.reads, self.counts):
                    reads.update(queries=count, exact=count * exact + recalled, recalled=recalled, read=read,
                                 decoded=decoding * read)  # fmt: skip
            start += count
        table = torch.from_numpy(np.array(blocks, dtype=np.int32)).to(device)
        return Recall(cold.block, tuple(tokens), table) if blocks else None

    def report(self, reads: Mapping[str, int], near: float = 0.0) -> dict[str, Any]:
        """What the counts say, where a share `near` of what was decoded was in the overlay; the keys stay the same from
        version to version."""
        saved, row_bytes = near * reads["decoded"], self.config.copy_bytes / self.config.page_size
        per_token = round((reads["read"] - saved) * row_bytes / max(reads["queries"], 1))
        return {
            # Of the tokens attended exactly, those whose copy was read while the query waited.
            "cold_hit_rate": (reads["recalled"] - saved) / max(reads["exact"], 1),
            "overlay_hit_rate": near,
            "read_bytes_per_token": per_token,
            "read_ms_per_token": {link: per_token / rate * 1e3 for link, rate in LINKS.items()},
        }
