"""The shape and size of the KV cache, in plain numbers (no torch)."""

from __future__ import annotations

from dataclasses import dataclass

# An exact page is one block of 2^4 units of the arena, so that codes of 8, 4 and 2 bits and a 1-bit plane are
# 2^3, 2^2, 2^1 and 2^0 units: whatever a page becomes, its block is used to the last byte.
EXACT_ORDER = 4


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What a cache holds and how large it may grow. Raises ValueError for numbers that cannot be."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    itemsize: int  # bytes of one element of an exact K or V: 4 (float32) or 2
    capacity_bytes: int  # the pool; rounded down to whole pages
    page_size: int = 64  # tokens

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "itemsize"):
            if getattr(self, name) < 1:
                raise ValueError(f"need {name} >= 1, got {getattr(self, name)}")
        if self.page_size not in (16, 32, 64):
            raise ValueError(f"need a page_size of 16, 32 or 64 tokens, got {self.page_size}")
        if self.num_pages < 1:
            raise ValueError(f"need room for one page of {self.page_bytes} bytes, got {self.capacity_bytes}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one exact token, all layers, K and V."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one exact page, all layers, K and V."""
        return self.page_size * self.token_bytes

    @property
    def num_pages(self) -> int:
        """Exact pages that fit the pool."""
        return self.capacity_bytes // self.page_bytes

    @property
    def num_units(self) -> int:
        return self.num_pages << EXACT_ORDER

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit of one layer's K (or V) of one head."""
        return (self.page_size * self.head_dim * self.itemsize) >> EXACT_ORDER

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens of one sequence."""
        return -(-num_tokens // self.page_size)
