"""The operations a model and its cache need, as one typed interface with two implementations.

`kernels.reference` (torch ops: the specification, and the CPU backend) and `kernels.fused` (hand-written Triton) are
modules with exactly these functions; `kernels.load` picks one, once, when the engine starts.

The cache as a kernel sees it, for one layer and for K or V (views of an arena, see memory/cache.py):

    units [num_kv_heads, num_units, unit_bytes] uint8       unit_bytes = page_size * head_dim / 8: one bit an element
    exact [num_kv_heads, num_frames, page_size, head_dim]   the same bytes: a frame is 8 * itemsize units

    frames lie side by side in the arena: the stride of a frame is page_size * head_dim
    slot  = frame * page_size + offset in page     one token's place; equal in every layer and head
    piece = a run of consecutive slots             frames with consecutive ids are one piece

A compressed page of b bits is kept in a rotated basis: every token's K and V times H, the Hadamard matrix of the
largest power of two that divides head_dim, over its square root, in blocks on the diagonal (H = H^T = H^-1). There the
elements of a token are alike, so that one scale serves all of them. Attention needs no element back: q.k = (q H).(k H),
and the weighted sum of V H is rotated once. A page is a *code run* of b units and a *record*:

    codes  [page_size, head_dim * b / 8] uint8     byte j of a token holds the elements j, j + w, j + 2w, ... where
                                                   w = head_dim * b / 8, the first in the lowest bits
           3 bits: two runs, of 2 units (the low two bits of each code) and of 1 unit (the high bit)
    record of K  scales [page_size], means [head_dim]       k H = (code - (2^b - 1) / 2) * scale + mean
    record of V  scales [page_size], zeros [page_size]      v H = (code - 2^(b - 1) + zero) * scale

    scale  uint8, of a token: the float32 whose bits are (code << 19) + ((min_exponent(b) + 127) << 23)
    mean   uint8, of a channel over the page: sign in bit 7; the float32 whose bits are (code % 128 << 20) +
           ((MEAN_EXPONENT + 127) << 23), and 0 where code % 128 is 0
    zero   int8, of a token: a whole number of steps, so that a code and its zero add without rounding

Scales have 4 bits of exponent and 4 of mantissa, means 4 and 3, and both are rounded before the codes are made, so that
writer and reader agree.

Shapes use: T tokens of the step, B sequences, Hq query heads, Hkv KV heads, D head_dim, F hidden or intermediate size.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

SPREAD = 2  # times the mean of the KV heads, that one of them recalls at most
CLIPS = (1.0, 0.85, 0.7, 0.6)
MEAN_EXPONENT = -8  # means reach from 2^-8 to 2^8
NUM_FEATURES, SCORE_HIDDEN = 8, 8  # what is known of a page, and the width of the network over it


def min_exponent(bits: int) -> int:
    """The scales of a format reach from 2^min_exponent to 2^(min_exponent + 16): wider codes take finer steps."""
    return -8 - bits


def hadamard(head_dim: int) -> Tensor:
    """[D, D] float64: the matrix H, times the square root of the size of its blocks: of 1, -1 and, around them, 0."""
    block = torch.ones(1, 1, dtype=torch.float64)
    while head_dim % (2 * len(block)) == 0:
        block = torch.kron(torch.tensor([[1, 1], [1, -1]]), block)
    matrix: Tensor = torch.block_diag(*[block] * (head_dim // len(block)))
    return matrix


class QuantizedWeight(NamedTuple):
    """A weight [out, in] in 8 or 4 bits. Scales and zeros are bfloat16, and rounded before the codes are made.

        8 bits   codes [out, in] int8, scales [out, 1]                          w = code * scale
        4 bits   codes [out, in / 2] uint8, scales and zeros [out, groups]      w = (code - 8) * scale + zero

    A group is `group` consecutive inputs, the last one what is left of them; of n inputs it has n / 2 bytes, byte j of
    which holds the inputs j, in its low bits, and j + n / 2. So a tile of bytes is two tiles of weights, each beside
    consecutive inputs, and no byte is read twice.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int  # of 8 bits: all inputs

    @property
    def bits(self) -> int:
        return 8 if self.zeros is None else 4

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)


Weight = Tensor | QuantizedWeight


class Overlay(NamedTuple):
    """Rows of a layer's exact copies that stay on the device from step to step, for the decoding steps that read them
    again. What lies there is known by its key, slot * page_size + token, whichever sequence it is of."""

    rows: Tensor  # [Hkv, C, 2, D], as those of LayerCache.copies
    keys: Tensor  # [Hkv, C + 1] int32: of the rows; -1: there is none. The last is of no row: what finds no place
    recency: Tensor  # [Hkv, C + 1] float32: 1 for those that the last step read, half as much for each step before
    counts: Tensor  # [2] int64: rows that were read, from copies or here; of these, here

    @classmethod
    def of(cls, rows: Tensor) -> "Overlay":
        """An empty one of rows [Hkv, C, 2, D], whatever is in them."""
        keys = rows.new_full((len(rows), rows.shape[1] + 1), -1, dtype=torch.int32)
        return cls(rows, keys, torch.zeros_like(keys, dtype=torch.float32), rows.new_zeros(2, dtype=torch.int64))


class LayerCache(NamedTuple):
    """One layer's cache: exact K and V [Hkv, frames, page_size, D], and the arena of compressed pages as units
    [Hkv, units, unit_bytes] uint8, from which `units_k` and `units_v` start at the same address as k and v unless
    compressed pages have an arena of their own. `copies` are what compressed pages were, in the host's memory: the rows
    of one token's K and of its V in a head, [slots, Hkv, page_size, 2, D] in k's dtype, or [..., 2, D + 2] int8: the
    float16 in a row's last two bytes times the others. `share` is in 64ths: what the layer recalls of a plan's mean."""

    k: Tensor
    v: Tensor
    units_k: Tensor
    units_v: Tensor
    copies: Tensor | None = None
    overlay: Overlay | None = None
    share: int = 64


@dataclass(frozen=True, slots=True)
class WarmPages:
    """The compressed pages of one format in a step's sequences. Every query sees all of them.

    Entries past a sequence's count are 0 and never read, but that recall reads a first one and makes nothing of it. A
    run of b units that starts at unit u has the index u / b (for 3 bits u / 2), so a run's first byte in a head's plane
    is index * b * unit_bytes.
    """

    bits: int  # 8, 4, 3 or 2
    record_bytes: int  # from one record to the next, in K's plane and in V's; records lie in the same units as codes
    codes: Tensor  # [B, most pages] int32: index of the code run (3 bits: of the run of two)
    high: Tensor | None  # [B, most pages] int32, for 3 bits: index of the run of one unit
    records: Tensor  # [B, most pages] int32: a record's first byte in a head's plane is record * record_bytes
    counts: Tensor  # [B] int32: pages of each sequence
    copies: Tensor | None = None  # [B, most pages] int32: slot of each page's copy, -1 where there is none


class Recall(NamedTuple):
    """What queries read of the copies of compressed pages: see `Ops.recall`."""

    block: int  # consecutive queries of a chunk that read the same tokens; a chunk's last block may have fewer
    # Of each sequence: tokens that a block reads for a KV head, in the mean of heads and layers; 0 without copies.
    counts: tuple[int, ...]
    blocks: Tensor  # [N, 4] int32: sequence, first query of the step, queries, tokens; of sequences that read any

    @property
    def most(self) -> int:
        """The largest of the counts, rounded up to a power of two."""
        return 1 << (max(self.counts) - 1).bit_length()


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What attention needs to know of one step: made once per step, used by every layer.

    The step's tokens are flattened without padding. Sequences [0, num_decodes) have exactly one query token each and
    come first; the others are prefill chunks of any length >= 1. A sequence's queries are the newest of its exact
    tokens: query i of a chunk of n sees the exact tokens [0, exact_len - n + i] and all compressed ones.

    In a plan of decodes alone the tables are as wide as a power of two, and decoding takes from it shapes and what is
    in tensors only, but for `warm[i].bits` and `recall.most`: launches are the same in many steps (engine/graphs.py).

    Where each token's attention is wanted, the columns of a sequence are its exact pages in the order of `page_table`
    (page_table.shape[1] of them for every sequence), then the pages of warm[0], warm[1] and so on, likewise padded;
    page_size columns a page. See `Ops.decode_attention`.
    """

    query_start: Tensor  # [B + 1] int32: sequence b has the query tokens [query_start[b], query_start[b + 1])
    exact_lens: Tensor  # [B] int32 >= 1: exact tokens in the cache, this step's included
    page_table: Tensor  # [B, max_pages] int32 frames of the exact tokens, all full but the last; 0 past the end
    slots: Tensor  # [T] int64: where this step's tokens are stored
    num_decodes: int
    max_query_len: int  # over the prefill chunks; 0 if there is none
    pieces: tuple[tuple[tuple[int, int], ...], ...]  # per sequence: (first slot, number of tokens), in token order
    warm: tuple[WarmPages, ...] = ()
    recall: Recall | None = None

    def tensors(self) -> list[Tensor]:
        """All that it has; which, the formats decide, and whether there are copies and something is recalled."""
        found = [self.query_start, self.exact_lens, self.page_table, self.slots]
        for warm in self.warm:
            found += [x for x in (warm.codes, warm.high, warm.records, warm.counts, warm.copies) if x is not None]
        return found if self.recall is None else [*found, self.recall.blocks]

    def num_columns(self, page_size: int) -> int:
        """Columns of the logits that `decode_attention` gives."""
        return (self.page_table.shape[1] + sum(warm.codes.shape[1] for warm in self.warm)) * page_size


class Ops(Protocol):
    """One backend. Every tensor is on the backend's device; outputs are new tensors unless said otherwise."""

    def pack_linear(self, weight: Weight) -> Any:
        """The weight [out, in] in the layout that `linear` reads fastest (it may share the weight's storage)."""

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """x [T, in] @ packed weight [out, in] + bias [out] -> [T, out]."""

    def linear_float32(self, x: Tensor, weight: Any) -> Tensor:
        """x [T, in] @ packed weight [out, in] -> [T, out] float32, not rounded to x's dtype on the way."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm (arXiv 1910.07467) of x [T, F] times weight [F], computed in float32 -> [T, F] in the
        weight's dtype; x may be float32 beside a narrower weight."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x, in place; returns rms_norm(residual, weight, eps). x [T, F]; residual [T, F] in x's dtype or
        float32."""

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, computed in float32. gate, up [T, F] -> [T, F]."""

    def rope_store(self, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, slots: Tensor, k_cache: Tensor,
                   v_cache: Tensor) -> None:
        """Rotate q in place; write rotated k, and v, to their slots of the cache.

        q [T, Hq, D], k and v [T, Hkv, D] (the last dimension contiguous; token and head strides free).
        cos_sin [T, D] float32: cos of the D/2 angles, then sin. The pairs are (i, i + D/2), the half-split order of
        Hugging Face checkpoints (RoPE: arXiv 2104.09864). slots [T] int64.
        """

    def prefill_attention(self, q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float,
                          lse: Tensor | None = None) -> Tensor:
        """Attention of the prefill chunks, the sequences [plan.num_decodes, B), over their exact and compressed tokens:
        causal over the chunk itself.

        q [query tokens of those sequences, Hq, D], rotated; its K and V are in the cache already. -> the shape of q.
        `lse` [query tokens, Hq], where given, receives what it does of `decode_attention`.
        """

    def decode_attention(self, q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float,
                         logits: Tensor | None = None, lse: Tensor | None = None) -> Tensor:
        """Attention of the sequences [0, plan.num_decodes), one query each, over their exact and compressed tokens ->
        the shape of q.

        q [num_decodes, Hq, D], rotated. Where given, `logits` [num_decodes, Hq, plan.num_columns()] float32 receives
        the base-2 logits (log2(e) * scale * q.k; columns of no token are left alone) and `lse` [num_decodes, Hq]
        float32 their base-2 log-sum-exp, so that exp2(logits - lse) is the attention each token got.
        """

    def recall(self, q: Tensor, out: Tensor, lse: Tensor, cache: LayerCache, plan: AttentionPlan,
               scale: float) -> Tensor:
        """Attention in which the compressed tokens that matter most are exact: q [T, Hq, D] are the step's queries,
        `out` and `lse` [T, Hq] what attention gave them. -> the shape of q.

        Of the tokens whose pages have copies, a block of `plan.recall.block` queries takes, of all KV heads together,
        the ones with the largest sum of the squares of what its queries and heads gave them, as errors add up in
        squares: for each head as many in the mean as `plan.recall` says, times cache.share / 64, rounded down, and for
        one SPREAD times that at most. Their share of `out` is replaced by what their copies give:
        (out + sum of p' v' - p v) / (1 + sum of p' - p), where p = exp2(logit - lse), and ' means: of the copies.

        Where there is an overlay, steps that only decode read from it what it has, and leave there what they read
        besides, in the place of what was read least lately.
        """

    def compress(self, x: Tensor, bits: int, is_key: bool) -> tuple[Tensor, Tensor]:
        """Pages x [N, page_size, D] as codes [N, bits * page_size * D / 8] uint8 (for 3 bits the low plane, then the
        high one) and records [N, record length] uint8, laid out as the module says.

        A token's scale is that of its range times the one of CLIPS (from 4 bits on, of 1) with the least squared error,
        rounded to the nearest there is, at 8 bits up.
        Infinities are taken as 2^14 in size, NaN as 0: a bad element costs its own page its precision, nothing else.
        """

    def decompress(self, codes: Tensor, records: Tensor, bits: int, is_key: bool, like: Tensor) -> Tensor:
        """What `compress` kept, [N, page_size, D], as an exact cache `like` [..., page_size, D] would have it: in its
        dtype, not rotated."""

    def score(self, features: Tensor, ages: Tensor, weights: Tensor) -> Tensor:
        """How important pages are: features [N, NUM_FEATURES] and ages in tokens [N], float32 -> [N] float32 in [0, 1].

        features (memory/importance.py): a page's lift for the newest query; means of lift / (1 + lift) over the window,
        four of it, and all; means of the lift over the window and all; both neighbours' features[:, 1]. NaN counts as
        0, more than 1e6 as that. With H = SCORE_HIDDEN:

            attention = features[:, 1]        decay = exp(-ages / tau)
            relevance = sigmoid(W2 silu(W1 [log(1 + features), decay, exp(-ages / tau / 8)] + b1) + b2)
            score = alpha * attention + beta * decay + gamma * relevance

        weights: alpha, beta, gamma (that sum to 1), 1 / tau, W1 [H, NUM_FEATURES + 2], b1 [H], W2 [H], b2; flat.
        """
