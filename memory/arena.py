"""One buffer of units, the allocator that hands them out, and the records that are cut from them."""

import numpy as np
import torch

from memory.buddy import BuddyAllocator
from memory.config import CacheConfig
from memory.errors import CapacityError


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
            size = f"{num_units * config.unit_total_bytes} bytes ({num_units >> config.exact_order} pages)"
            hint = "use a smaller --kv-cache-memory or --max-model-len"
            raise CapacityError(f"a KV cache of {size} does not fit {device}; {hint}") from error
        self.allocator = BuddyAllocator(num_units)
        self._shift = config.records_per_block.bit_length() - 1
        # Of all the records that there could be. Where a whole block of them is free, it is no block of records.
        self._records = BuddyAllocator(num_units >> config.record_order << self._shift, unit="record")

    def rows(self, row_bytes: int) -> torch.Tensor:
        """The units as aligned blocks, or as records of scales: [layers, 2, heads, rows, row_bytes], a view."""
        return self.bytes.view(*self.bytes.shape[:3], -1, row_bytes)

    def alloc_record(self) -> int:
        """A record's number. Raises OutOfUnits."""
        if self._records.free_units > self._records.num_free(self._shift) << self._shift:
            return self._records.alloc(0)
        record = self.allocator.alloc(self.config.record_order) >> self.config.record_order << self._shift
        self._records.extend(record, 0)
        return record

    def free_record(self, record: int) -> None:
        """Give a record back, and its block when it was the last. Raises AllocatorError if it is free."""
        whole = self._records.num_free(self._shift)
        self._records.free(record)
        if self._records.num_free(self._shift) > whole:
            self.allocator.free(record >> self._shift << self.config.record_order)

    def compact(self, frames: dict[int, bool]) -> np.ndarray:
        """Move all blocks in use together, the largest first, so that everything free is in blocks as long as can be.

        frames: starts of exact pages, which have whole frames afterwards or, where it is True, lower halves. Returns
        where each unit went, [units] int32.
        """
        units = self.allocator.num_units
        records = np.array(self._records.used_blocks(), dtype=np.int64)
        sizes = {start: self.allocator.block_order(start) for start in self.allocator.used_blocks()}
        whole = sizes | dict.fromkeys(frames, self.config.exact_order)
        fresh = BuddyAllocator(units)
        places = np.arange(units, dtype=np.int32)
        for start in sorted(sizes, key=lambda start: (-whole[start], start)):  # neighbours of one size stay in order
            new = fresh.alloc(whole[start])
            if frames.get(start):
                fresh.halve(new)
            places[start : start + (1 << sizes[start])] += new - start
        away = np.flatnonzero(places != np.arange(units))
        source, target = (torch.from_numpy(x).to(self.bytes.device) for x in (away, places[away].astype(np.int64)))
        for head in self.bytes.flatten(0, 2):  # one at a time, so that the copy stays small
            head.index_copy_(0, target, head.index_select(0, source))
        self.allocator = fresh
        self._records = BuddyAllocator(self._records.num_units, unit="record")
        for record in self.moved_records(records, places).tolist():
            self._records.extend(record, 0)
        return places

    def moved_records(self, records: np.ndarray, places: np.ndarray) -> np.ndarray:
        """What the numbers of records are after `compact`."""
        order, shift = self.config.record_order, self._shift
        return np.asarray((places.take(records >> shift << order) >> order << shift) + records % (1 << shift))
