"""The radix tree against brute force: the oracle knows which items each value stands for, and nothing of nodes."""

import itertools
import os
import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memory.radix import RadixTree
from tools.bench_radix import measure

BOUNDS = [(None, None), (2, None), (3, 2), (8, 4), (None, 1)]  # max_children, max_depth


def common(a, b):
    """How many items two byte strings begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Oracle:
    """A tree of one-byte items beside what it should hold: for each value the beginning that it covers.

    Values are numbers that no two pages have in common, so one that is lost, doubled or made up is seen at once.
    """

    def __init__(self, page_size, max_children=8, max_depth=None, **kwargs):
        self.tree = RadixTree(page_size, item_bytes=1, max_children=max_children, max_depth=max_depth, **kwargs)
        self.page_size = page_size
        self.bounded = max_depth is not None
        self.held = {}  # value -> (namespace, the items up to the end of its page)
        self.locks = []  # (what lock returned, namespace, the items of its full pages)
        self.numbers = itertools.count()

    def pages(self, key):
        return [key[: i + self.page_size] for i in range(0, len(key), self.page_size)]

    def match(self, key, namespace=b""):
        match = self.tree.match(key, namespace)
        length = max((common(key, items) for other, items in self.held.values() if other == namespace), default=0)
        assert match.length == length
        full = length // self.page_size
        assert [self.held[value] for value in match.values] == [(namespace, page) for page in self.pages(key)[:full]]
        if length % self.page_size:
            other, items = self.held[match.tail]
            assert other == namespace and items[:length] == key[:length]
            assert len(items) <= (full + 1) * self.page_size
        else:
            assert match.tail is None
        return match

    def insert(self, key, namespace=b"", **kwargs):
        given = {next(self.numbers): (namespace, page) for page in self.pages(key)}
        before = set(self.held.values())
        returned = self.tree.insert(key, list(given), namespace, **kwargs)
        everything = {**self.held, **given}
        assert len(set(returned)) == len(returned)
        self.held = {value: everything[value] for value in everything if value not in returned}
        assert len(self.held) == len(everything) - len(returned)
        after = set(self.held.values())
        assert len(after) == len(self.held), "two values for the same items"
        for other, items in before - after:  # only what this very sequence fills further may go
            assert other == namespace and len(items) % self.page_size and key.startswith(items) and items != key
        assert self.bounded or self.match(key, namespace).length == len(key)
        return returned

    def lock(self, key, namespace=b"", pages=None):
        match = self.match(key, namespace)
        if pages is not None:
            pages = min(pages, len(match.values))
            match = match._replace(length=pages * self.page_size, values=match.values[:pages], tail=None)
        kept = key[: match.length // self.page_size * self.page_size]
        self.locks.append((self.tree.lock(match), namespace, kept))

    def unlock(self, i=0):
        self.tree.unlock(self.locks.pop(i)[0])

    def evict(self, count):
        evictable = self.tree.num_evictable
        freed = self.tree.evict(count)
        assert len(freed) == min(count, evictable)
        for value in freed:
            namespace, items = self.held.pop(value)
            # Tails first: nothing that is left goes on behind what was taken.
            assert not any(
                other == namespace and left.startswith(items) and len(left) > len(items)
                for other, left in self.held.values()
            )
        return freed

    def check(self):
        self.tree.check()
        assert self.tree.num_values == len(self.held)
        for _, namespace, kept in self.locks:
            assert self.tree.match(kept, namespace).length == len(kept)
        pinned = {(namespace, page) for _, namespace, kept in self.locks for page in self.pages(kept)}
        assert self.tree.num_evictable == len(self.held) - len(pinned)

    def drain(self):
        """With every lock gone all can go, and nothing is left over."""
        while self.locks:
            self.unlock()
        self.check()
        assert sorted(self.tree.evict(10**9)) == sorted(self.held)
        self.held = {}
        self.check()
        assert (self.tree.num_values, self.tree.num_evictable, self.tree.num_nodes, self.tree.depth) == (0, 0, 0, 0)


KEYS = st.lists(st.sampled_from([b"a", b"b", b"ab", b"aab", b"aaaaaaa", b"c"]), max_size=6).map(b"".join)
NAMESPACES = st.sampled_from([b"", b"a"])


class TreeMachine(RuleBasedStateMachine):
    """Every public method; what is locked stays, and each value is in the tree or was returned, once."""

    @initialize(page_size=st.sampled_from([1, 2, 3, 5]), bounds=st.sampled_from(BOUNDS))
    def build(self, page_size, bounds):
        self.oracle = Oracle(page_size, *bounds)

    @rule(key=KEYS, namespace=NAMESPACES, better=st.none() | st.integers(2, 3))
    def insert(self, key, namespace, better):
        self.oracle.insert(key, namespace, better=better and (lambda new, old: new % better < old % better))

    @rule(key=KEYS, namespace=NAMESPACES)
    def match(self, key, namespace):
        self.oracle.match(key, namespace)

    @rule(key=KEYS, namespace=NAMESPACES, pages=st.none() | st.integers(0, 3))
    def lock(self, key, namespace, pages):
        self.oracle.lock(key, namespace, pages)

    @precondition(lambda self: self.oracle.locks)
    @rule(data=st.data())
    def unlock(self, data):
        self.oracle.unlock(data.draw(st.integers(0, len(self.oracle.locks) - 1)))

    @rule(count=st.integers(0, 4))
    def evict(self, count):
        self.oracle.evict(count)

    @rule()
    def evict_all(self):
        evictable = self.oracle.tree.num_evictable
        freed = self.oracle.tree.evict(10**9)
        assert len(freed) == evictable
        for value in freed:
            del self.oracle.held[value]

    @invariant()
    def well(self):
        if hasattr(self, "oracle"):
            self.oracle.check()

    def teardown(self):
        if hasattr(self, "oracle"):
            self.oracle.drain()


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("page_size", "bounds"), list(zip([1, 4, 3, 7, 4], BOUNDS, strict=True)))
def test_random_operations_keep_to_brute_force(page_size, bounds):
    """10,000 of them; ISOTHERM_SOAK=1000000 runs a million."""
    operations = int(os.environ.get("ISOTHERM_SOAK", "10000")) // len(BOUNDS)
    rng = random.Random(page_size)
    oracle = Oracle(page_size, *bounds)
    recent = [b""] * 50
    taken = 0
    for i in range(operations):
        start = rng.choice(recent)
        key = start[: rng.randint(0, len(start))] + bytes(rng.choices(range(rng.choice((2, 30))), k=rng.randrange(12)))
        recent[i % 50] = key = key[:40]
        namespace = rng.choice([b"", b"", b"x"])
        action = rng.random()
        if action < 0.45:
            oracle.insert(key, namespace, better=rng.choice([None, lambda new, old: new % 3 > old % 3]))
        elif action < 0.6 and len(oracle.locks) < 20:
            oracle.lock(key, namespace, rng.choice([None, 0, 1, 3]))
        elif action < 0.8 and oracle.locks:
            oracle.unlock(rng.randrange(len(oracle.locks)))
        elif action < 0.999 and len(oracle.held) > rng.choice([0, 60, 60, 60]):
            taken += len(oracle.evict(rng.randint(1, 8)))
        elif action >= 0.999:
            oracle.drain()
        oracle.match(key, namespace)
        if i % 10 == 0:
            oracle.check()
    oracle.drain()
    assert taken > operations // 10


def tree_of(*keys, page_size=4, **kwargs):
    """A tree of one-byte items with the values "0", "1", ... of the keys in their order, and what it gave back."""
    tree = RadixTree(page_size, item_bytes=1, **kwargs)
    numbers, returned = itertools.count(), []
    for key in keys:
        returned += tree.insert(key, [str(next(numbers)) for _ in range(0, len(key), page_size)])
    tree.check()
    return tree, returned


def test_the_drawing_at_the_top_of_the_module():
    tree = RadixTree(4, item_bytes=1)
    assert tree.insert(b"abcdefghij", ["A", "B", "C"]) == []
    assert tree.insert(b"abcdefxyz", ["A'", "D", "E"]) == ["A'"]
    assert (tree.num_values, tree.num_nodes, tree.depth) == (5, 3, 2)
    assert tree.match(b"abcdefgh..")[1:] == (8, ["A", "B"], None)
    assert tree.match(b"abcdefg..")[1:] == (7, ["A"], "B")
    assert tree.evict(4) == ["C", "B", "E", "D"]
    assert tree.match(b"abcdefg..")[1:] == (4, ["A"], None)
    assert (tree.num_values, tree.num_nodes, tree.depth) == (1, 1, 1)

    levels, _ = tree_of(*(bytes([item]) for item in (2, 3, 5, 7)), max_children=2)
    first, second, below = levels.match(b"").node.children
    assert [first, second, below] == [bytes([2]), bytes([3]), 1]
    assert list(levels.match(b"").node.children[1]) == [bytes([5]), bytes([7])]


def test_a_match_ends_at_the_last_equal_item_and_finds_a_tail_wherever_it_lies():
    tree, _ = tree_of(b"aaaabbbbccc", b"aaaabbbbddddee", b"aaaabx")
    for key, length in ((b"", 0), (b"z", 0), (b"a", 1), (b"aaaa", 4), (b"aaaab", 5), (b"aaaabbbbd", 9), (b"aaaaby", 5)):
        match = tree.match(key)
        assert match.length == length
        assert len(match.values) == length // 4
        assert (match.tail is None) == (length % 4 == 0)
    assert tree.match(b"aaaabxyz")[1:] == (6, ["0"], "8")


def everything(tree):
    """Every field of every node, by value."""
    nodes = [tree._top]
    for node in nodes:
        nodes += tree._children(node)
    fields = [name for name in nodes[0].__slots__ if name not in ("parent", "children")]
    return [
        (id(node), id(node.parent), repr(node.children), repr([getattr(node, name) for name in fields]))
        for node in nodes
    ], (repr(tree._heap), tree._clock)


def test_match_changes_nothing_at_all():
    tree, _ = tree_of(b"aaaabbbbccc", b"aaaabbbbddddee", b"aaaabx", *(bytes([i]) * 9 for i in range(200)))
    tree.lock(tree.match(b"aaaabbbb"))
    before = everything(tree)
    for key in (b"", b"a", b"aaaab", b"aaaabbbbdd", b"aaaabbbbddddeeff", b"\xff", bytes(300), b"zzz"):
        tree.match(key)
        tree.match(key, b"another tenant")
    assert everything(tree) == before


def test_what_max_depth_refuses_and_what_is_there_comes_back():
    tree, returned = tree_of(b"aaaaaaaa", b"aaaabbbb", max_depth=2)
    assert (returned, tree.depth) == (["2"], 2)
    assert tree.insert(b"aaaabbcc", ["x", "y"]) == ["x", "y"]  # would be the third node of its path
    assert tree.insert(b"aabb", ["z"]) == ["z"]  # would put a third above those that are there
    assert tree.insert(b"aaaabbbbdddd", ["x", "y", "z"]) == ["x", "y"]  # a leaf is extended, no path grows
    assert tree.insert(b"bbbb", ["v"]) == []
    assert tree.depth == 2
    tree.check()
    assert tree.match(b"aaaabbcc")[1:] == (6, ["0"], "3")


def test_a_chat_of_fifty_turns_is_one_edge_and_gives_back_each_tail_that_grew():
    tree = RadixTree(16)
    rng = np.random.default_rng(0)
    key, pages, handle = b"", 0, None
    for turn in range(50):
        key += rng.integers(0, 32000, 37, dtype=np.int32).tobytes()
        count = -(-len(key) // 64)
        returned = tree.insert(key, [(turn, page) for page in range(count)])
        tail = [(turn - 1, pages - 1)] if turn * 37 % 16 else []
        assert returned == [(turn, page) for page in range(turn * 37 // 16)] + tail
        if handle is not None:
            tree.unlock(handle)
        handle = tree.lock(tree.match(key))
        pages = count
        tree.check()
    assert (tree.num_nodes, tree.depth, tree.num_values) == (1, 1, -(-50 * 37 // 16))


def test_better_values_replace_those_for_the_same_items_and_no_others():
    tree, _ = tree_of(b"aaaabbbbcc")
    assert tree.insert(b"aaaabbbbcc", ["9", "0", "9"], better=lambda new, old: new > old) == ["0", "0", "2"]
    assert tree.match(b"aaaabbbbcc")[1:] == (10, ["9", "1"], "9")
    # The tail of a shorter sequence is not the page that the tree has, though it is better.
    assert tree.insert(b"aaaabbbbc", ["8", "8", "99"], better=lambda new, old: new > old) == ["8", "1", "99"]
    assert tree.insert(b"aaaabbbx", ["A", "B"], better=lambda new, old: new > old) == ["9"]
    assert tree.match(b"aaaabbbbcc")[1:] == (10, ["A", "8"], "9")
    tree.check()


def test_namespaces_share_nothing_and_leave_nothing_behind():
    tree = RadixTree(4)
    key = np.arange(8, dtype=np.int32).tobytes()
    for i in range(1000):
        salt = f"fingerprint, tenant {i}".encode()
        assert tree.match(key, salt).length == 0
        assert tree.insert(key, [(i, 0), (i, 1)], salt) == []
        assert tree.match(key, salt).values == [(i, 0), (i, 1)]
    tree.check()
    assert tree.match(key).length == 0
    handle = tree.lock(tree.match(key, b"fingerprint, tenant 7"))
    assert len(tree.evict(10**9)) == 1998
    tree.check()
    assert (tree.num_values, list(tree._roots)) == (2, [b"fingerprint, tenant 7"])
    tree.unlock(handle)
    assert tree.evict(10**9) == [(7, 1), (7, 0)]
    assert not tree._roots


def test_keys_and_values_are_opaque():
    """Image patches by 8-byte ids, and results that are objects of any kind."""
    rng = np.random.default_rng(0)
    tree = RadixTree(3, item_bytes=8)
    image = rng.integers(0, 2**63, 10, dtype=np.uint64)
    values = [{"expert": 1}, object(), None, [1, 2]]
    assert tree.insert(image.tobytes(), values) == []
    other = np.concatenate([image[:7], rng.integers(0, 2**63, 5, dtype=np.uint64)])
    match = tree.match(other.tobytes())
    assert match.length == 7 and match.values[0] is values[0] and match.values[1] is values[1] and match.tail is None
    assert match.values == values[:2]
    # An id that agrees in all bytes but the last is another id.
    near = image.copy()
    near[4] ^= np.uint64(1 << 63)
    assert tree.match(near.tobytes()).length == 4
    tree.check()


@pytest.mark.parametrize("max_children", [2, 3, 8, 100, None])
def test_fan_out_is_bounded_whatever_the_items_are(max_children):
    for items in (range(1000), range(0, 1 << 30, 1 << 20), [8**i for i in range(10)], [-1, -2, 0, 1 << 31 - 1]):
        tree = RadixTree(1, max_children=max_children)
        keys = [np.array([item, 7]).astype(np.int32).tobytes() for item in items]
        for i, key in enumerate(keys):
            tree.insert(key, [i, -i])
        tree.check()  # no dict, no level has more entries
        assert (tree.num_nodes, tree.depth) == (len(keys), 1)
        for i, key in enumerate(keys):
            assert tree.match(key).values == [i, -i]
        assert len(tree.evict(10**9)) == 2 * len(keys)
        tree.check()


def test_a_million_items_in_one_sequence():
    tokens = np.random.default_rng(0).integers(0, 32000, 1_000_000, dtype=np.int32)
    tree = RadixTree(64)
    values = list(range(-(-len(tokens) // 64)))
    assert tree.insert(tokens.tobytes(), values) == []
    assert tree.match(tokens.tobytes()).values == values
    other = tokens.copy()
    other[777_777] += 1
    match = tree.match(other.tobytes())
    assert (match.length, match.values, match.tail) == (777_777, values[: 777_777 // 64], 777_777 // 64)
    handle = tree.lock(match)
    assert tree.evict(1) == [values[-1]]
    assert len(tree.evict(10**9)) == len(values) - 1 - 777_777 // 64
    tree.check()
    assert tree.match(tokens.tobytes()).length == 777_777 // 64 * 64
    tree.unlock(handle)
    assert sorted(tree.evict(10**9)) == values[: 777_777 // 64]


@pytest.mark.parametrize(("teeth", "max_depth"), [(100_000, None), (2000, 100)])
def test_a_comb_with_a_node_for_every_item(teeth, max_depth):
    """Each tooth leaves the spine one item earlier. No recursion, and no step but a lookup walks the whole path."""
    tree = RadixTree(64, item_bytes=1, max_depth=max_depth)
    spine = b"a" * teeth
    values = range(-(-teeth // 64))
    tree.insert(spine, values)
    kept = len(values)
    for i in range(teeth - 1, 0, -1):
        pages = -(-(i + 1) // 64)
        kept += pages - len(tree.insert(spine[:i] + b"b", values[:pages]))
    assert tree.num_values == kept
    split = teeth - 1 if max_depth is None else max_depth - 1
    assert (tree.num_nodes, tree.depth) == (2 * split + 1, max_depth or 20)
    match = tree.match(spine)
    assert (match.length, len(match.values)) == (teeth, teeth // 64)
    handle = tree.lock(match)
    assert tree.num_evictable == kept - teeth // 64
    tree.check()
    tree.unlock(handle)
    assert len(tree.evict(1)) == 1
    tree.check()
    assert len(tree.evict(10**9)) == kept - 1
    tree.check()
    assert (tree.num_nodes, tree.depth) == (0, 0)


def test_one_more_than_needed_is_never_evicted():
    tree, _ = tree_of(*(bytes([i]) * 20 for i in range(50)))
    for left in range(249, -1, -1):
        assert len(tree.evict(1)) == 1
        assert (tree.num_values, tree.num_evictable) == (left, left)
    assert tree.evict(1) == []


def test_least_recently_used_goes_first_and_from_its_end():
    tree, _ = tree_of(b"aaaaAAAA", b"bbbbBBBB", b"ccccCCCC")
    tree.unlock(tree.lock(tree.match(b"aaaa")))
    tree.insert(b"bbbbBBBB", ["x", "y"])
    assert tree.evict(3) == ["5", "4", "1"]
    assert tree.evict(10**9) == ["0", "3", "2"]


def test_the_policy_decides_and_equals_go_by_age():
    seen = []

    def keep(node):
        seen.append((node.start, node.end))
        return node.score

    tree = RadixTree(2, item_bytes=1, keep=keep)
    scores = {b"a": 0.5, b"b": 0.1, b"c": float("nan"), b"d": 0.5, b"e": float("-inf")}
    for key, score in scores.items():
        tree.insert(key * 2, [key], score=score)
    tree.unlock(tree.lock(tree.match(b"cc")))
    tree.unlock(tree.lock(tree.match(b"aa")))
    tree.insert(b"bb", ["again"], score=0.7)
    assert tree.evict(9) == [b"e", b"c", b"d", b"a", b"b"]  # NaN and less than 0 are as none
    assert set(seen) == {(0, 2)}


@pytest.mark.parametrize("score", [float("nan"), 0.0, 0.25])
def test_scores_that_say_nothing_leave_the_order_of_use(score):
    tree = RadixTree(1, item_bytes=1, keep=lambda node: node.score)
    for i in range(100):
        tree.insert(bytes([i]), [i], score=score)
    for i in range(50):
        tree.unlock(tree.lock(tree.match(bytes([i]))))
    assert tree.evict(10**9) == [*range(50, 100), *range(50)]


def test_score_and_last_use_are_handed_up_when_a_node_goes():
    tree, _ = tree_of(b"aaaabbbb")
    tree.insert(b"aaaacccc", ["x", "y"], score=0.5)
    upper, other = (tree.match(key).node for key in (b"aaaa", b"aaaacccc"))
    tree.unlock(tree.lock(tree.match(b"aaaabbbb")))
    tree.insert(b"aaaacccc", ["x", "y"], score=0.25)
    assert (other.score, upper.score) == (0.5, 0.0)
    used = other.last_used
    assert tree.evict(2) == ["1", "y"]
    assert (upper.score, upper.last_used) == (0.5, used)
    tree.check()


def test_a_lock_keeps_the_full_pages_of_its_match_and_nothing_else():
    tree, _ = tree_of(b"aaaabbbbccccdddd", b"aaaabbbbccxx")
    assert (tree.num_values, tree.num_evictable) == (5, 5)
    handle = tree.lock(tree.match(b"aaaabbbbccc"))  # 11 items: two full pages, and a tail that is not kept
    assert tree.num_evictable == 3
    short = tree.match(b"aaaabbbbccxx")
    second = tree.lock(short._replace(length=4, values=short.values[:1], tail=None))
    assert len(tree.evict(99)) == 3
    assert tree.match(b"aaaabbbbccccdddd")[1:] == (8, ["0", "1"], None)
    tree.check()
    tree.unlock(handle)
    assert (tree.num_evictable, tree.evict(99)) == (1, ["1"])
    tree.unlock(second)
    assert tree.evict(99) == ["0"]
    with pytest.raises(AssertionError, match="unlocked at item 4"):
        tree.unlock(second)
    nothing = tree.lock(tree.match(b"zzz"))
    assert tree.insert(b"zzz", ["z"]) == [] and tree.num_evictable == 1
    tree.unlock(nothing)
    tree.check()


def test_locks_hold_while_the_edge_around_them_is_split_extended_and_cut():
    tree, _ = tree_of(b"aaaabbbbcc")
    handle = tree.lock(tree.match(b"aaaabbbbcc"))
    tree.insert(b"aaaabbbbccccdddd", ["x", "x", "C", "D"])  # in place
    assert tree.num_evictable == 2
    tree.insert(b"aaxx", ["X"])  # above the place
    tree.insert(b"aaaabbbbcxcx", ["x", "x", "Y"])  # in its page
    assert tree.num_evictable == 4
    assert sorted(tree.evict(99)) == ["C", "D", "X", "Y"]
    assert tree.match(b"aaaabbbbcc")[1:] == (8, ["0", "1"], None)
    tree.insert(b"aaaabbbbcccc", ["x", "x", "C"])
    tree.check()
    tree.unlock(handle)
    tree.check()
    assert tree.num_evictable == 3


def test_eviction_looks_at_few_leaves_of_a_large_tree():
    looks = 0

    def keep(node):
        nonlocal looks
        looks += 1
        return node.last_used

    tree = RadixTree(1, keep=keep)
    keys = [np.array([i % 300, i]).astype(np.int32).tobytes() for i in range(20_000)]
    for i, key in enumerate(keys):
        tree.insert(key, [i, i])
    for key in keys[:5000]:
        tree.unlock(tree.lock(tree.match(key)))
    looks = 0
    assert len(tree.evict(1)) == 1
    assert looks < 2 * 5000 + 100  # each use is made up for once ...
    looks = 0
    for _ in range(1000):
        assert len(tree.evict(1)) == 1
    assert looks <= 3000  # ... and from then on a few looks a victim


def test_a_priority_that_sank_is_seen_before_a_quarter_of_the_leaves_has_gone():
    priorities = list(range(1000))
    tree = RadixTree(1, keep=lambda node: priorities[node.values[-1]])
    for i in range(1000):
        tree.insert(np.int32(i).tobytes(), [i])
    assert tree.evict(10) == list(range(10))
    priorities[10] = priorities[900] = -1
    freed = tree.evict(400)
    assert 0 < freed.index(900) < 1000 // 4
    freed.remove(900)
    assert freed == list(range(10, 409))
    tree.check()


@pytest.mark.parametrize("arguments", [
    {"page_size": 0}, {"page_size": -1}, {"page_size": 1, "item_bytes": 0}, {"page_size": 1, "max_children": 1},
    {"page_size": 1, "max_children": -8}, {"page_size": 1, "max_depth": -1},
])  # fmt: skip
def test_senseless_numbers_are_value_errors(arguments):
    with pytest.raises(ValueError, match="need 1, 2 children"):
        RadixTree(**arguments)


@pytest.mark.parametrize(("key", "values"), [(b"abc", "A"), (b"abcdefgh", "AB"), (b"", "A"), (b"abcd", ""),
                                            (b"abcdefghijkl", "A")])  # fmt: skip
def test_values_that_do_not_fit_the_key_change_nothing(key, values):
    tree = RadixTree(2)
    with pytest.raises(ValueError, match="a value for each page of 2 items"):
        tree.insert(key, list(values))
    tree.check()
    assert tree.num_values == 0


@pytest.mark.parametrize("break_it", [
    lambda tree, node: node.values.pop(),
    lambda tree, node: node.edge.pop(),
    lambda tree, node: setattr(node, "pins", (4,)),
    lambda tree, node: node.children.clear(),
    lambda tree, node: node.heights.update({3: 1}),
    lambda tree, node: setattr(node, "start", node.start + 1),
    lambda tree, node: next(iter(node.children.values())).edge.__setitem__(0, 0),
    lambda tree, node: setattr(node, "parent", node),
    lambda tree, node: setattr(node, "queued", True),
    lambda tree, node: tree._heap.pop(),
    lambda tree, node: tree._heap.append(tree._heap[0]),
    lambda tree, node: setattr(tree, "_fan", 1),
    lambda tree, node: setattr(tree, "_max_depth", 1),
    lambda tree, node: tree._roots.update({b"x": type(node)(tree._top, b"x", 0, 0, bytearray(), [])}),
])  # fmt: skip
def test_check_sees_each_broken_invariant(break_it):
    tree, _ = tree_of(b"aaaabbbb", b"aaaacccc")
    break_it(tree, tree.match(b"aaaa").node)
    with pytest.raises(AssertionError, match="items"):
        tree.check()


def test_the_benchmark_prints_its_tables():
    """The structures beside ours are checked there: each finds what it should."""
    tables = measure([100], [40], seed=0, nodes=300)
    rows, improvements, floors = tables["rows"], tables["improvements"], tables["floors"]
    assert [(row["shape"], row["tokens"]) for row in rows] == [("chat", 100), ("code", 100)]
    for row in rows:
        names = ["tokens", "sequences", "shape", "ours_us", "plain_us", "page_hash_us", "token_tree_us"]
        assert list(row) == names and all(row[name] > 0 for name in names[3:])
    assert len(improvements) == 3 * 3
    lazy = [row for row in improvements if row["improvement"] == "lazy updates"]
    assert all(row["bytes_on"] == row["bytes_off"] and row["matched_on"] == row["matched_off"] for row in lazy)
    assert [row["floor_us"] for row in floors] == [None, 3.0, 20.0, 20.0]
