"""Memory: the buddy arena, the frame table and the paged KV cache. Importing this package does not import torch."""
