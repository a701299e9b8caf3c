"""The shape and size of the KV cache, and what moves its pages, in plain numbers (no torch)."""

from bisect import bisect_right
from dataclasses import dataclass

WARM_BITS = (8, 4, 3, 2)  # the formats below exact, each a step further down


@dataclass(frozen=True, slots=True)
class TierConfig:
    """When and how pages are compressed. Thresholds are scores, in [0, 1]. Raises ValueError."""

    budget: float | None = None  # resident bytes, as a fraction of the exact bytes of the same tokens
    recent_tokens: int = 64  # the newest ones, which go down last in every step of the ladder
    attention_window: int = 64  # tokens over which the attention that a page gets is averaged
    hot_threshold: float = 1.0  # pages at or above it stay a step above the others
    evict_threshold: float = 0.15  # compressed pages below it go one step further than they must
    warm_threshold: float = 0.3  # exact pages below it are compressed along with those that must be
    max_moves: int = 8  # pages that are moved though they need not be, in one step
    hot_layer_size: int | None = None  # exact tokens of all sequences together, at most; None: any number
    warm_layer_ratio: float = 0.3  # of the budget, that exact pages leave to compressed ones once there are any
    hot_ratio: float = 0.0  # where above 0, tiers are shares of the pages: the highest scores stay exact, ...
    cold_ratio: float = 0.0  # ... the lowest have 2 bits, and those between 4, whatever the budget
    importance: str = "score"  # score | random | none (the older, the less important)
    adapt: bool = False  # alpha, beta and gamma follow each sequence's attention
    recalled: bool = False  # queries read what they attend to most from exact copies
    shared: bool = False  # compressed pages lie in shared host memory

    def __post_init__(self) -> None:
        if self.budget is not None and not 0 < self.budget <= 1:
            raise ValueError(f"need a budget above 0, up to 1, got {self.budget}")
        for name in "hot_threshold", "evict_threshold", "warm_threshold", "warm_layer_ratio", "hot_ratio", "cold_ratio":
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"need {name} from 0 to 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class ColdConfig:
    """What is kept below the cache of the pages that it compresses, and how much of it queries read. Raises
    ValueError."""

    format: str  # exact | int8
    capacity_bytes: int
    recall: float = 0.0  # tokens that a query reads exact, for each KV head, as a fraction of all it attends to
    block: int = 16  # consecutive queries of a prompt that read the same tokens
    exclusive: bool = False  # a page that is made exact again loses its copy
    overlay_bytes: int = 0  # on the device, for rows of exact copies that the next steps may read again
    shares: tuple[int, ...] = ()  # of each layer, in 64ths of `recall`; none: all alike

    def __post_init__(self) -> None:
        if not (0 <= self.recall <= 1 and self.block >= 1):
            raise ValueError(f"need recall from 0 to 1 and blocks of 1 query at least, got {self.recall}, {self.block}")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What a cache holds and how large it may grow. Raises ValueError for numbers that cannot be."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    itemsize: int  # bytes of one element of an exact K or V: 4 (float32) or 2
    capacity_bytes: int  # the pool; rounded down to whole pages
    page_size: int = 64  # tokens
    tiers: TierConfig | None = None  # None: every page stays exact
    cold: ColdConfig | None = None  # None: what compressing rounds away is gone
    prefix_caching: bool = False  # what sequences leave behind serves those that begin alike
    eviction_policy: str = "importance"  # importance | lru: which prefixes go first
    max_prefix_children: int | None = 8  # of a node of their tree, see memory/radix.py
    max_prefix_depth: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "itemsize"):
            if getattr(self, name) < 1:
                raise ValueError(f"need {name} >= 1, got {getattr(self, name)}")
        if self.page_size not in (16, 32, 64):
            raise ValueError(f"need a page_size of 16, 32 or 64 tokens, got {self.page_size}")
        if self.tiers and self.head_dim % 8:
            raise ValueError(f"need a head_dim that is a multiple of 8 to compress pages, got {self.head_dim}")
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
    def copy_bytes(self) -> int:
        """Bytes of one page's copy in the host's memory."""
        if self.cold is None or self.cold.format == "exact":
            return self.page_bytes
        return self.page_bytes // (self.head_dim * self.itemsize) * (self.head_dim + 2)

    @property
    def overlay_rows(self) -> int:
        """Rows of copies that each KV head of a layer keeps on the device, in the mean."""
        return self.cold.overlay_bytes // self.token_bytes if self.cold else 0

    @property
    def recall_shares(self) -> tuple[int, ...]:
        """Of each layer, in 64ths of what a query recalls in the mean."""
        return (self.cold.shares if self.cold else ()) or (64,) * self.num_layers

    @property
    def num_pages(self) -> int:
        """Exact pages that fit the pool."""
        return self.capacity_bytes // self.page_bytes

    @property
    def exact_bits(self) -> int:
        """Bits of an element of an exact page, which are the units of its frame."""
        return 8 * self.itemsize

    @property
    def exact_order(self) -> int:
        return self.exact_bits.bit_length() - 1

    @property
    def num_units(self) -> int:
        return self.num_pages << self.exact_order

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit of one layer's K (or V) of one head: one bit of each element of a page. So a page of 8, 4
        or 2 bits, or a plane of 1 bit, is one block of the allocator, used to the last byte."""
        return self.page_size * self.head_dim // 8

    @property
    def unit_total_bytes(self) -> int:
        """Bytes of one unit, all layers and heads, K and V."""
        return 2 * self.num_layers * self.num_kv_heads * self.unit_bytes

    @property
    def record_order(self) -> int:
        """Records of scales are cut from blocks of 2^record_order units."""
        length = self.page_size + max(self.page_size, self.head_dim)
        return max(0, (-(-length // self.unit_bytes) - 1).bit_length())

    @property
    def records_per_block(self) -> int:
        """A power of two, so that records lie at multiples of their size."""
        length = self.page_size + max(self.page_size, self.head_dim)
        return 1 << ((self.unit_bytes << self.record_order) // length).bit_length() - 1

    @property
    def record_bytes(self) -> int:
        """From one record to the next, in K's plane and in V's."""
        return (self.unit_bytes << self.record_order) // self.records_per_block

    def page_cost(self, bits: int) -> int:
        """Bytes of a page of so many bits in one plane: codes and record."""
        return bits * self.unit_bytes + (self.record_bytes if bits < self.exact_bits else 0)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens of one sequence."""
        return -(-num_tokens // self.page_size)

    def planned_units(self, num_tokens: int) -> int:
        """Units that a sequence of so many tokens may fill by its budget; without one, all exact."""
        units = self.pages_for(num_tokens) << self.exact_order
        if self.tiers is None or self.tiers.budget is None:
            return units
        return max(int(self.tiers.budget * units) + (1 << self.exact_order), self.least_units(num_tokens))

    @property
    def most_tokens(self) -> int:
        """Tokens of one sequence that fit the pool with every full page as small as it can be."""
        return bisect_right(range(self.num_units * self.page_size), self.num_units, key=self.least_units) - 1

    def may_compress(self, most_tokens: list[int]) -> bool:
        """Whether sequences that grow to so many tokens can make pages go down."""
        if self.tiers is None:
            return False
        bounds = (self.tiers.hot_layer_size, self.num_pages * self.page_size)
        exact = min(bound for bound in bounds if bound is not None)
        pages = sum(map(self.pages_for, most_tokens))
        return (self.tiers.budget or 1) < 1 or self.tiers.hot_ratio > 0 or pages * self.page_size > exact

    def least_units(self, num_tokens: int, sequences: int = 1) -> int:
        """Units of so many tokens in so many sequences with every full page as small as it can be, beside the page that
        each is filling."""
        if self.tiers is None:
            return (self.pages_for(num_tokens) + sequences - 1) * self.exact_bits
        full = num_tokens // self.page_size
        records = -(-full // self.records_per_block) << self.record_order
        sinks = (WARM_BITS[0] - WARM_BITS[-1]) * min(full, sequences)  # the first pages stay at 8 bits
        return full * WARM_BITS[-1] + sinks + records + sequences * self.exact_bits
