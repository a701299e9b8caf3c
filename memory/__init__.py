"""Memory: the buddy arena, the frame table and the paged KV cache. Importing this package does not import torch."""

from memory.errors import AllocatorError, CapacityError

__all__ = ["AllocatorError", "CapacityError"]
