"""One buffer of units, the allocator that hands them out, and the records that are cut from them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from memory.buddy import BuddyAllocator
from memory.config import CacheConfig
from memory.errors import AllocatorError, CapacityError


class Arena:
    """`bytes` [layers, 2 (K, V), heads, units, unit bytes] uint8: a unit is the same in every layer, plane and head."""

    def __init__(self, config: CacheConfig, num_units: int, device: torch.device, shared: bool = False) -> None:
        """shared: a POSIX shared-memory segment of the host, whose name is gone as soon as it is mapped, so that
        nothing is left of it however the process ends; pinned where CUDA is, so that kernels read it in place.

        On a CPU the system backs the buffer with memory only as pages are written. Raises CapacityError if the device
        does not have the bytes.
        """
        self.config = config
        shape = (config.num_layers, 2, config.num_kv_heads, num_units, config.unit_bytes)
        try:
            if shared:
                storage = torch.UntypedStorage._new_shared(int(np.prod(shape, dtype=np.int64)), device="cpu")
                self.bytes = torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)
                if device.type == "cuda":
                    torch.cuda.cudart().cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0)
            else:
                self.bytes = torch.empty(shape, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # torch raises this for a CPU and its subclass OutOfMemoryError for CUDA
            size = num_units * config.unit_total_bytes
            raise CapacityError(
                f"a KV cache of {size} bytes ({num_units >> config.exact_order} pages) does not fit {device}; "
                "use a smaller --kv-cache-memory or --max-model-len"
            ) from error
        self.allocator = BuddyAllocator(num_units)
        self._free_records: dict[int, None] = {}
        self._records_used: dict[int, int] = {}  # block number -> records in use

    @property
    def used_bytes(self) -> int:
        return self.allocator.used_units * self.config.unit_total_bytes

    def runs(self, order: int) -> Tensor:
        """The units in aligned blocks: [layers, 2, heads, units >> order, unit bytes << order], a view."""
        layers, planes, heads, units, size = self.bytes.shape
        return self.bytes.view(layers, planes, heads, units >> order, size << order)

    def records(self) -> Tensor:
        """The units as records of scales: [layers, 2, heads, records, record bytes], a view."""
        layers, planes, heads = self.bytes.shape[:3]
        return self.bytes.view(layers, planes, heads, -1, self.config.record_bytes)

    def alloc_record(self) -> int:
        """A record's number. Raises OutOfUnits."""
        if not self._free_records:
            per_block = self.config.records_per_block
            block = self.allocator.alloc(self.config.record_order) >> self.config.record_order
            self._records_used[block] = 0
            self._free_records.update(dict.fromkeys(range((block + 1) * per_block - 1, block * per_block - 1, -1)))
        record, _ = self._free_records.popitem()
        self._records_used[record // self.config.records_per_block] += 1
        return record

    def free_record(self, record: int) -> None:
        """Give a record back, and its block when it was the last. Raises AllocatorError if it is free."""
        block = record // self.config.records_per_block
        if not self._records_used.get(block) or record in self._free_records:
            raise AllocatorError(f"record {record} is freed twice, or was never allocated")
        self._free_records[record] = None
        self._records_used[block] -= 1
        if not self._records_used[block]:
            del self._records_used[block]
            for i in range(block * self.config.records_per_block, (block + 1) * self.config.records_per_block):
                del self._free_records[i]
            self.allocator.free(block << self.config.record_order)

    def free(self, start: int) -> None:
        """Give a block back. Raises AllocatorError."""
        if self.config.poison and 0 <= start < self.allocator.num_units:
            size = 1 << self.allocator.block_order(start)
            self.bytes[:, :, :, start : start + size] = 0xFF  # NaN in every float type
        self.allocator.free(start)

    def halve(self, start: int) -> None:
        """Give back the upper half of a block."""
        upper = self.allocator.halve(start)
        if self.config.poison:
            self.bytes[:, :, :, upper : 2 * upper - start] = 0xFF

    def compact(self, blocks: np.ndarray, frames: dict[int, bool]) -> np.ndarray:
        """Move all blocks in use together, the largest first, so that everything free is in blocks as long as can be.

        blocks: starts of all in use but those of records; frames: of these, those of exact pages, which have whole
        frames afterwards or, where it is True, lower halves. Returns where each unit went, [units] int32.
        """
        order = self.config.record_order
        taken = sorted([int(start) for start in blocks] + [block << order for block in self._records_used])
        sizes = {start: self.allocator.block_order(start) for start in taken}
        fresh = BuddyAllocator(self.allocator.num_units)
        places = np.arange(self.allocator.num_units, dtype=np.int32)
        whole = sizes | dict.fromkeys(frames, self.config.exact_order)
        for start in sorted(taken, key=lambda start: -whole[start]):  # neighbours of one size stay in their order
            new = fresh.alloc(whole[start])
            if frames.get(start):
                fresh.halve(new)
            places[start : start + (1 << sizes[start])] = np.arange(new, new + (1 << sizes[start]))
        used = np.concatenate([np.arange(start, start + (1 << size)) for start, size in sizes.items()])
        away = used[places[used] != used]
        source, target = (torch.from_numpy(x).to(self.bytes.device) for x in (away, places[away].astype(np.int64)))
        for plane in self.bytes.flatten(0, 1):  # of one layer at a time, so that the copy stays small
            for head in plane:
                head.index_copy_(0, target, head.index_select(0, source))
        self.allocator = fresh
        per_block = self.config.records_per_block
        moved = {block: int(places[block << order]) >> order for block in self._records_used}
        self._records_used = {moved[block]: count for block, count in self._records_used.items()}
        free = [moved[r // per_block] * per_block + r % per_block for r in self._free_records]
        self._free_records = dict.fromkeys(free)
        return places

    def moved_records(self, records: np.ndarray, places: np.ndarray) -> np.ndarray:
        """What the numbers of records are after `compact`."""
        per_block, order = self.config.records_per_block, self.config.record_order
        moved: np.ndarray = (places[records // per_block << order] >> order) * per_block + records % per_block
        return moved

    def check(self, blocks: list[int], records: list[int]) -> None:
        """Assert that exactly these blocks, and the blocks of these records, are in use."""
        self.allocator.check()
        assert len(set(blocks)) == len(blocks), "two pages have the same block"
        assert len(set(records)) == len(records), "two pages have the same record"
        per_block = self.config.records_per_block
        counts: dict[int, int] = {}
        for record in records:
            assert record not in self._free_records, f"record {record} is in use and free"
            counts[record // per_block] = counts.get(record // per_block, 0) + 1
        assert counts == self._records_used, "blocks of records and the records in them disagree"
        assert len(counts) * per_block == len(records) + len(self._free_records), "a record is lost"
        sizes = (1 << self.allocator.block_order(start) for start in blocks)
        used = sum(sizes) + (len(counts) << self.config.record_order)
        assert used == self.allocator.used_units, "the allocator holds blocks that no page has"
