"""The operations a model and its cache need, as one typed interface with two implementations.

`kernels.reference` (torch ops: the specification, and the CPU backend) and `kernels.fused` (hand-written Triton) are
modules with exactly these functions; `kernels.load` picks one, once, when the engine starts.

The cache as a kernel sees it, for one layer and for K or V (a view of the arena, see memory/cache.py):

    cache [num_kv_heads, num_frames, page_size, head_dim]

    frames lie side by side in the arena: the stride of a frame is page_size * head_dim
    slot  = frame * page_size + offset in page     one token's place; equal in every layer and head
    piece = a run of consecutive slots             frames with consecutive ids are one piece

Shapes use: T tokens of the step, B sequences, Hq query heads, Hkv KV heads, D head_dim, F hidden or intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What attention needs to know of one step: made once per step, used by every layer.

    The step's tokens are flattened without padding. Sequences [0, num_decodes) have exactly one query token each and
    come first; the others are prefill chunks of any length >= 1. A sequence's queries are the newest tokens of its
    cache: query i of a chunk of n sees the cache tokens [0, seq_len - n + i].
    """

    query_start: Tensor  # [B + 1] int32: sequence b has the query tokens [query_start[b], query_start[b + 1])
    seq_lens: Tensor  # [B] int32: tokens in the cache, this step's included
    page_table: Tensor  # [B, max_pages] int32 frame ids; entries past a sequence's last page are 0 and never read
    slots: Tensor  # [T] int64: where this step's tokens are stored
    num_decodes: int
    max_query_len: int  # over the prefill chunks; 0 if there is none
    max_seq_len: int
    pieces: tuple[tuple[tuple[int, int], ...], ...]  # per sequence: (first slot, number of tokens), in token order


class Ops(Protocol):
    """One backend. Every tensor is on the backend's device; outputs are new tensors unless said otherwise."""

    def pack_linear(self, weight: Tensor) -> Tensor:
        """The weight [out, in] in the layout that `linear` reads fastest (it may share the weight's storage)."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] @ packed weight [out, in] + bias [out] -> [T, out]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm (arXiv 1910.07467) of x [T, F] times weight [F], computed in float32 -> [T, F]."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x, in place; returns rms_norm(residual, weight, eps). x, residual [T, F]."""
        ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, computed in float32. gate, up [T, F] -> [T, F]."""
        ...

    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> None:
        """Rotate q in place; write rotated k, and v, to their slots of the cache.

        q [T, Hq, D], k and v [T, Hkv, D] (the last dimension contiguous; token and head strides free).
        cos_sin [T, D] float32: cos of the D/2 angles, then sin. The pairs are (i, i + D/2), the half-split order of
        Hugging Face checkpoints (RoPE: arXiv 2104.09864). slots [T] int64.
        """
        ...

    def prefill_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        """Causal attention of the prefill chunks, the sequences [plan.num_decodes, B), over the page table.

        q [query tokens of those sequences, Hq, D], rotated; its K and V are in the cache already. -> the shape of q.
        """
        ...

    def decode_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: AttentionPlan,
        scale: float,
        logits: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attention of the sequences [0, plan.num_decodes), one query each, over the page table -> the shape of q.

        q [num_decodes, Hq, D], rotated. Where given, `logits` [num_decodes, Hq, >= max_seq_len] float32 receives the
        base-2 logits (log2(e) * scale * q.k; entries past a sequence's length are left alone) and `lse`
        [num_decodes, Hq] float32 their base-2 log-sum-exp, so that exp2(logits - lse) is the attention each token got.
        """
        ...
