"""The scheduler alone: a real cache, and in place of a model a count that is committed and a token that is appended.

What is in the pages is tests/test_sharing_cache.py's, and whether answers stay the same tests/test_sharing.py's.
"""

import itertools
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from engine.scheduler import Request, Scheduler
from kernels import reference
from memory.cache import KVCache
from memory.config import CacheConfig, TierConfig

PAGE = 16


def make_scheduler(pages=8, budget=32, seqs=8, caching=False, page=PAGE, tiers=None, shape=(8, 4)):
    """shape: elements of a head (there is one, in one layer), and their bytes."""
    dim, itemsize = shape
    config = CacheConfig(
        num_layers=1, num_kv_heads=1, head_dim=dim, itemsize=itemsize, capacity_bytes=pages * page * 2 * dim * itemsize,
        page_size=page, tiers=tiers, prefix_caching=caching,
    )  # fmt: skip
    dtype = torch.float32 if itemsize == 4 else torch.bfloat16
    return Scheduler(KVCache(config, dtype, torch.device("cpu"), reference), budget, seqs)


_ids = itertools.count()


def make_request(prompt, answer, scores=None, **params):
    """prompt: its tokens, or how many; those of two requests begin alike."""
    tokens = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    return Request(
        id=next(_ids),
        params=SamplingParams(max_tokens=max(answer, 1), **params),
        tokens=tokens,
        num_prompt_tokens=len(tokens),
        max_tokens=answer,
        eos_ids=frozenset(),
        generator=None,
        detokenizer=None,
        scores=scores,
    )


def check(scheduler):
    scheduler.cache.check([request.sequence for request in scheduler.running])
    assert not any(request.sequence.pages for request in scheduler.waiting)


def assert_empty(scheduler):
    cache = scheduler.cache
    cache.forget()
    check(scheduler)
    assert cache.num_free_pages == cache.config.num_pages and cache.resident_bytes == cache._frames.table_bytes


def step(scheduler, fails=False):
    """What the engine does with a schedule; returns it. A request ends with its last token, which is not computed.
    fails: nothing is committed."""
    schedule = scheduler.schedule()
    assert schedule.requests or not (scheduler.running or scheduler.waiting), "nothing is computed and requests remain"
    check(scheduler)
    assert all(
        1 <= count <= request.num_pending
        for request, count in zip(schedule.requests, schedule.counts, strict=True)
    )  # fmt: skip
    assert all(count == 1 for count in schedule.counts[: schedule.num_decodes])
    assert all(count > 1 for count in schedule.counts[schedule.num_decodes :])
    if not fails:
        for request, count in zip(schedule.requests, schedule.counts, strict=True):
            scheduler.commit(request, count)
            if request.num_pending == 0:
                if request.scores is None:
                    request.tokens.append(sum(request.tokens) % 7)  # equal texts go on alike
                if len(request.tokens) - request.num_prompt_tokens >= request.max_tokens:
                    scheduler.finish(request, "length")
        scheduler.cache.settle([request.sequence for request in scheduler.running])
    check(scheduler)
    return schedule


def drain(scheduler, limit=10_000):
    for number in range(limit):
        if not (scheduler.running or scheduler.waiting):
            return number
        step(scheduler)
    raise AssertionError(f"not done after {limit} steps")


def test_nothing_to_do():
    schedule = make_scheduler().schedule()
    assert (schedule.requests, schedule.counts, schedule.num_decodes) == ([], [], 0)


def test_a_prompt_is_computed_in_chunks_of_the_budget():
    scheduler = make_scheduler(pages=8, budget=32)
    request = make_request(70, 3)
    scheduler.add(request)
    counts = []
    while scheduler.running or scheduler.waiting:
        schedule = step(scheduler)
        counts.append((schedule.counts, schedule.num_decodes))
    assert counts == [([32], 0), ([32], 0), ([6], 0), ([1], 1), ([1], 1)]
    assert request.finish_reason == "length" and len(request.tokens) == 73


def test_decodes_come_first_and_chunks_fill_the_rest():
    scheduler = make_scheduler(pages=16, budget=20)
    a, b, c = make_request(5, 9), make_request(6, 9), make_request(40, 2)
    for request in (a, b, c):
        scheduler.add(request)
    first = step(scheduler)
    assert (first.requests, first.counts, first.num_decodes) == ([a, b, c], [5, 6, 9], 0)
    second = step(scheduler)
    assert (second.requests, second.counts, second.num_decodes) == ([a, b, c], [1, 1, 18], 2)


def test_a_chunk_of_one_token_counts_as_a_decode_and_stands_before_longer_ones():
    scheduler = make_scheduler(pages=16, budget=10)
    first, second = make_request(11, 1), make_request(20, 1)
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    schedule = step(scheduler)
    assert (schedule.requests, schedule.counts, schedule.num_decodes) == ([first, second], [5, 5], 0)
    schedule = step(scheduler)  # one token is left of the first
    assert (schedule.requests, schedule.counts, schedule.num_decodes) == ([first, second], [1, 9], 1)
    scheduler = make_scheduler(pages=16, budget=10)
    long, short = make_request(30, 1), make_request(6, 1)
    scheduler.add(long)
    scheduler.add(short)
    step(scheduler)  # 5 of each
    schedule = step(scheduler)
    assert (schedule.requests, schedule.counts, schedule.num_decodes) == ([short, long], [1, 9], 1)


# Who gets how much.


def test_half_of_the_budget_is_for_the_shortest_and_the_rest_goes_in_the_order_of_arrival():
    scheduler = make_scheduler(pages=400, budget=100)
    lengths = (1000, 500, 30, 40, 10)
    requests = [make_request([1000 * i] * length, 1) for i, length in enumerate(lengths)]
    for request in requests:
        scheduler.add(request)
    schedule = step(scheduler)
    # 10 and 30 of the shortest, 10 of the next one; what is left goes to the oldest.
    assert dict(zip(schedule.requests, schedule.counts, strict=True)) == dict(
        zip([requests[i] for i in (0, 2, 3, 4)], (50, 30, 10, 10), strict=True)
    )
    schedule = step(scheduler)
    assert dict(zip(schedule.requests, schedule.counts, strict=True)) == dict(
        zip([requests[i] for i in (0, 1, 3)], (50, 20, 30), strict=True)
    )


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("others", [0, 1, 5])
def test_a_short_prompt_does_not_wait_behind_long_ones(caching, others):
    """16 tokens behind 32,768, and further long ones: begun in the step after they came, and answered."""
    scheduler = make_scheduler(pages=5000, budget=512, seqs=64, caching=caching, page=64)
    longs = [make_request([i] * 32768, 4) for i in range(1 + others)]
    for request in longs:
        scheduler.add(request)
    for _ in range(3):
        step(scheduler)
    short = make_request([99] * 16, 4)
    scheduler.add(short)
    step(scheduler)
    assert short.sequence.length == 16 and len(short.tokens) == 17
    for _ in range(3):
        step(scheduler)
    assert short.finish_reason == "length"
    # The oldest one has at least half of what decodes leave; the next one, if any, the other half.
    assert longs[0].sequence.length >= 7 * (512 - 4) // 2 - 16


def test_a_long_prompt_goes_on_behind_any_number_of_short_ones():
    scheduler = make_scheduler(pages=400, budget=64, seqs=8)
    long = make_request([1] * 4000, 1)
    scheduler.add(long)
    for number in range(1000):
        if long.finish_reason:
            break
        while len(scheduler.waiting) < 8:
            scheduler.add(make_request([2 + number] * 16, 1))
        before = long.sequence.length
        schedule = step(scheduler)
        left = 64 - schedule.num_decodes
        assert long.finish_reason or long.sequence.length - before >= min(left // 2, 4000 - before)
    assert number <= 4000 / 28


# What begins alike.


def chunks(schedule, *requests):
    counts = dict(zip(schedule.requests, schedule.counts, strict=True))
    return [counts.get(request, 0) for request in requests]


def test_a_prompt_that_is_cached_computes_its_last_token():
    scheduler = make_scheduler(pages=16, caching=True, budget=100)
    first, again, longer = make_request(70, 3), make_request(70, 3), make_request(80, 3)
    scheduler.add(first)
    assert drain(scheduler) == 3
    scheduler.add(again)
    schedule = step(scheduler)
    assert (chunks(schedule, again), schedule.num_decodes, again.num_cached_tokens) == ([1], 1, 69)
    drain(scheduler)
    scheduler.add(longer)
    assert chunks(step(scheduler), longer) == [10] and longer.num_cached_tokens == 70
    drain(scheduler)
    assert scheduler.counts == {"num_preemptions": 0, "num_prompt_tokens": 220, "num_cached_tokens": 139}
    assert first.tokens == again.tokens
    assert_empty(scheduler)


def test_the_answer_is_kept_too():
    """Its last token was never computed."""
    scheduler = make_scheduler(pages=16, caching=True, budget=100)
    first = make_request(20, 30)
    scheduler.add(first)
    drain(scheduler)
    turn = make_request([*first.tokens, 1, 2, 3], 1)
    scheduler.add(turn)
    step(scheduler)
    assert turn.num_cached_tokens == 49
    assert_empty(scheduler)


def test_who_begins_like_an_older_one_waits_for_its_pages():
    """Two equal prompts and one that differs from token 40 on, in one step: no page that they share is computed twice;
    for less than a page nobody waits."""
    scheduler = make_scheduler(pages=32, caching=True, budget=32)
    a, b, c = make_request(70, 2), make_request(70, 2), make_request([*range(40), *[9] * 30], 2)
    for request in (a, b, c):
        scheduler.add(request)
    computed = []
    while a.finish_reason is None or b.finish_reason is None or c.finish_reason is None:
        computed.append(chunks(step(scheduler), a, b, c))
    assert computed[:2] == [[32, 0, 0], [16, 0, 16]]  # the third page of c is its own
    assert [sum(chunk) for chunk in zip(*computed, strict=True)] == [71, 71 - 64, 71 - 32]
    assert [request.num_cached_tokens for request in (a, b, c)] == [0, 64, 32]
    assert a.tokens == b.tokens
    assert_empty(scheduler)


@pytest.mark.parametrize("case", ["salt", "scored", "behind a scored one", "short", "off"])
def test_who_cannot_use_an_older_one_does_not_wait_for_it(case):
    scheduler = make_scheduler(pages=32, caching=case != "off", budget=64)
    length = 15 if case == "short" else 40
    a, b = make_request(length, 2), make_request(length, 2, cache_salt="b" if case == "salt" else "")
    if "scored" in case:
        b = make_request(length, 0, [])
    if "behind" in case:
        a, b = b, a
    scheduler.add(a)
    scheduler.add(b)
    assert all(chunks(step(scheduler), a, b))
    drain(scheduler)
    assert b.num_cached_tokens == 0
    assert_empty(scheduler)


def test_who_waits_for_another_goes_on_without_it():
    """The older one is aborted: what it had computed is there, the rest is not waited for."""
    scheduler = make_scheduler(pages=32, caching=True, budget=32)
    a, b = make_request(100, 2), make_request(100, 2)
    scheduler.add(a)
    scheduler.add(b)
    step(scheduler)
    scheduler.finish(a, "abort")
    assert chunks(step(scheduler), b) == [32] and b.num_cached_tokens == 32
    drain(scheduler)
    assert_empty(scheduler)


def test_a_request_that_begins_after_a_step_that_failed():
    """Its pages were reserved when an older one, of the same text, left what it had computed."""
    scheduler = make_scheduler(pages=32, caching=True, budget=1)
    a = make_request(40, 2)
    scheduler.add(a)
    for _ in range(20):  # token by token, nothing is kept before the end
        step(scheduler)
    scheduler.max_num_batched_tokens = 64
    b = make_request(12, 2)
    scheduler.add(b)
    step(scheduler, fails=True)
    assert b.sequence.pages and not b.sequence.length
    scheduler.finish(a, "abort")
    drain(scheduler)
    assert len(b.tokens) == 14
    assert_empty(scheduler)


def test_who_shares_what_runs_is_admitted_where_a_stranger_has_to_wait():
    """12 pages: 9 of the first and a page to grow into leave two."""
    for alike, waits in ((True, False), (False, True)):
        scheduler = make_scheduler(pages=12, budget=512, caching=True)
        scheduler.add(make_request(140, 20))
        step(scheduler)
        other = make_request([*range(130), 7, 7, 7] if alike else [9] * 133, 3)
        scheduler.add(other)
        step(scheduler)
        assert (other in scheduler.waiting) == waits and bool(other.sequence.length) != waits
        drain(scheduler)
        assert scheduler.counts["num_preemptions"] == 0
        assert_empty(scheduler)


def test_a_scored_request_neither_uses_nor_leaves_anything():
    scheduler = make_scheduler(pages=16, caching=True, budget=100)
    scheduler.add(make_request(40, 0, scores=[]))
    drain(scheduler)
    assert scheduler.cache.cached_tokens(list(range(40))) == (0, 0)
    scheduler.add(make_request(40, 2))
    drain(scheduler)
    scored = make_request(40, 0, scores=[])
    scheduler.add(scored)
    assert chunks(step(scheduler), scored) == [40] and scored.num_cached_tokens == 0
    assert_empty(scheduler)


def test_what_failed_is_not_kept():
    scheduler = make_scheduler(pages=16, caching=True, budget=100)
    request = make_request(40, 9)
    scheduler.add(request)
    step(scheduler)
    scheduler.finish(request, "error")
    assert scheduler.cache.cached_tokens(list(range(40))) == (0, 0)
    assert scheduler.cache.num_free_pages == 16
    assert_empty(scheduler)


# A pool that is short.


@pytest.mark.parametrize("caching", [False, True])
def test_the_newest_request_is_preempted_and_comes_back_first(caching):
    """10 pages: four prompts of two pages each and a page to grow into fit, four answers of 40 tokens do not."""
    scheduler = make_scheduler(pages=10, budget=256, caching=caching)
    requests = [make_request([i] * 17, 40) for i in range(5)]
    for request in requests:
        scheduler.add(request)
    ended, preempted = [], []
    while scheduler.running or scheduler.waiting:
        before = list(scheduler.running)
        step(scheduler)
        gone = [r for r in before if r not in scheduler.running and not r.finish_reason]
        assert gone == before[len(before) - len(gone) :], "an older one made room for a newer one"
        preempted += gone
        assert scheduler.running + list(scheduler.waiting) == [r for r in requests if not r.finish_reason]
        ended += [r for r in requests if r.finish_reason and r not in ended]
    assert ended == requests and all(len(request.tokens) == 57 for request in requests)
    assert [request.num_preemptions for request in requests] == [0, 0, 1, 0, 0]
    assert scheduler.counts["num_preemptions"] == len(preempted) == 1
    assert_empty(scheduler)


def test_a_preempted_request_finds_what_it_had_computed():
    scheduler = make_scheduler(pages=16, budget=256, caching=True)
    a, b = make_request([1] * 33, 30), make_request([2] * 33, 30)
    scheduler.add(a)
    scheduler.add(b)
    for _ in range(5):
        step(scheduler)
    assert scheduler.preempt() and list(scheduler.waiting) == [b] and b.sequence.length == 0
    assert not scheduler.preempt(), "the last one stays"
    assert chunks(step(scheduler), a, b) == [1, 1] and len(b.tokens) == 33 + 6
    assert (b.num_cached_tokens, b.num_preemptions, scheduler.counts["num_cached_tokens"]) == (0, 1, 0)
    drain(scheduler)
    assert_empty(scheduler)


def test_prefixes_that_nobody_holds_go_before_a_request_is_preempted():
    scheduler = make_scheduler(pages=8, budget=256, caching=True)
    for i in range(3):
        scheduler.add(make_request([i] * 40, 1))
        drain(scheduler)
    assert scheduler.cache.num_free_pages == 0
    requests = [make_request([10 + i] * 30, 20) for i in range(2)]
    for request in requests:
        scheduler.add(request)
    drain(scheduler)
    assert scheduler.counts["num_preemptions"] == 0 and all(len(request.tokens) == 50 for request in requests)
    assert_empty(scheduler)


def test_first_come_first_served():
    """A large request at the head keeps the small ones behind it waiting: nobody is overtaken for ever."""
    scheduler = make_scheduler(pages=4)
    running, large, small = make_request(40, 4), make_request(60, 4), make_request(4, 4)
    for request in (running, large, small):
        scheduler.add(request)
    step(scheduler)
    assert scheduler.running == [running] and list(scheduler.waiting) == [large, small]
    while running.finish_reason is None:
        assert large not in scheduler.running and small not in scheduler.running
        step(scheduler)
    step(scheduler)
    assert scheduler.running[0] is large
    drain(scheduler)
    assert small.finish_reason == "length"


def test_max_num_seqs():
    scheduler = make_scheduler(pages=64, budget=512, seqs=3)
    requests = [make_request(4, 3) for _ in range(7)]
    for request in requests:
        scheduler.add(request)
    most = 0
    while scheduler.running or scheduler.waiting:
        schedule = step(scheduler)
        most = max(most, len(schedule.requests))
    assert most == 3 and all(request.finish_reason for request in requests)


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode"])
def test_finish_frees_everything_in_every_state(state):
    scheduler = make_scheduler(pages=4, budget=16)
    request = make_request(40, 10)
    scheduler.add(request)
    for _ in range({"waiting": 0, "prefill": 1, "decode": 4}[state]):
        step(scheduler)
    assert bool(request.sequence.pages) == (state != "waiting")
    scheduler.finish(request, "abort")
    check(scheduler)
    assert request.finish_reason == "abort" and not scheduler.running and not scheduler.waiting
    assert scheduler.cache.num_free_pages == 4 and request.sequence.length == 0
    assert scheduler.schedule().requests == []


def test_finish_after_schedule_and_before_commit():
    """An interrupted step: the pages were reserved, nothing was written."""
    scheduler = make_scheduler(pages=4, budget=16)
    gone, stays = make_request(8, 4), make_request(20, 4)
    scheduler.add(gone)
    scheduler.add(stays)
    scheduler.schedule()
    scheduler.finish(gone, "abort")
    check(scheduler)
    drain(scheduler)
    assert len(stays.tokens) == 24 and scheduler.cache.num_free_pages == 4


def test_a_scored_request_computes_its_prompt_and_ends():
    scheduler = make_scheduler(pages=4, budget=16)
    request = make_request(33, 0, scores=[])
    scheduler.add(request)
    assert request.most_tokens == 33
    assert drain(scheduler) == 3 and request.finish_reason == "length"


def test_a_request_that_fits_to_the_last_token():
    """4 pages hold 64 tokens: a prompt of 60 with an answer of 5, whose last token is never computed."""
    scheduler = make_scheduler(pages=4)
    request = make_request(60, 5)
    assert request.most_tokens == 64
    scheduler.add(request)
    drain(scheduler)
    assert len(request.tokens) == 65


workload = st.lists(
    st.tuples(
        st.integers(1, 60),  # prompt
        st.integers(1, 40),  # answer
        st.integers(0, 12),  # arrives before this step
        st.none() | st.integers(0, 30),  # aborted after this step
    ),
    min_size=1,
    max_size=14,
)
shared = st.integers(0, 70)  # tokens with which all prompts begin


def requests_of(workload, alike):
    """(arrival, request, abort), in the order of arrival: some prompts are equal, all begin alike."""
    entries = []
    for i, (prompt, answer, arrival, abort) in enumerate(workload):
        tokens = [token if token < alike else 100 * (i % 3) + token for token in range(prompt)]
        entries.append((arrival, make_request(tokens, answer, cache_salt="x" * (i % 5 == 4)), abort))
    return sorted(entries, key=lambda entry: entry[0])


def serve(scheduler, entries, fails=()):
    """All requests to their ends, with what is promised at every step."""
    last = max((arrival for arrival, _, _ in entries), default=0)
    for number in range(5000):
        for arrival, request, _ in entries:
            if arrival == number:
                scheduler.add(request)
        schedule = step(scheduler, fails=number in fails)
        assert len(schedule.requests) == len(schedule.counts) <= scheduler.max_num_seqs
        assert len(set(map(id, schedule.requests))) == len(schedule.requests)
        # Requests that generate take a token each whatever the budget is; prompts share what they leave of it.
        assert sum(schedule.counts) <= max(scheduler.max_num_batched_tokens, schedule.num_decodes)
        # First come, first served: whoever waits came after all that run.
        alive = scheduler.running + list(scheduler.waiting)
        assert alive == [r for _, r, _ in entries if any(r is other for other in alive)]
        for _, request, abort in entries:
            if abort == number and request.finish_reason is None and any(r is request for r in alive):
                scheduler.finish(request, "abort")
        check(scheduler)
        if not (scheduler.running or scheduler.waiting) and number >= last:
            break
    else:
        raise AssertionError("some request never ended")
    for _, request, abort in entries:
        assert request.finish_reason == "length" or (request.finish_reason == "abort" and abort is not None)
        assert request.finish_reason == "abort" or len(request.tokens) == request.num_prompt_tokens + request.max_tokens
    assert_empty(scheduler)


@settings(max_examples=150, deadline=None)
@given(
    workload=workload, pages=st.integers(7, 20), budget=st.integers(1, 48), seqs=st.integers(1, 16),
    caching=st.booleans(), alike=shared, fails=st.sets(st.integers(0, 60), max_size=4),
)  # fmt: skip
def test_any_workload(workload, pages, budget, seqs, caching, alike, fails):
    """The promises: the budget holds, the order is kept, everybody ends."""
    serve(make_scheduler(pages, budget, seqs, caching), requests_of(workload, alike), fails)


@settings(max_examples=60, deadline=None)
@given(workload=workload)
def test_one_at_a_time_keeps_the_order(workload):
    scheduler = make_scheduler(pages=7, budget=16, seqs=1)
    requests = [make_request(prompt, answer) for prompt, answer, _, _ in workload]
    for request in requests:
        scheduler.add(request)
    ended = []
    while scheduler.running or scheduler.waiting:
        step(scheduler)
        ended += [r for r in requests if r.finish_reason and r not in ended]
    assert ended == requests


# Where pages are compressed.

tiers = (
    st.just(TierConfig())
    | st.sampled_from([0.2, 0.3, 0.5, 1.0]).map(lambda budget: TierConfig(budget=budget))
    | st.integers(0, 200).map(lambda tokens: TierConfig(hot_layer_size=tokens))
    | st.just(TierConfig(shared=True))
)
larger = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 60), st.integers(0, 12), st.none() | st.integers(0, 30)),
    min_size=1, max_size=7,
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    workload=larger, pages=st.integers(2, 24), budget=st.integers(1, 200), seqs=st.integers(1, 8), tiers=tiers,
    shape=st.sampled_from([(8, 16, 4), (64, 32, 2), (128, 32, 4)]), fails=st.sets(st.integers(0, 60), max_size=4),
    caching=st.booleans(), alike=st.integers(0, 300),
)  # fmt: skip
def test_any_workload_in_a_pool_that_is_too_small(
    workload, pages, budget, seqs, tiers, shape, fails, caching, alike
):  # fmt: skip
    """What fits the pool at its smallest is served to its end, in its order, also when a step fails before its commit:
    room is found for every page that is scheduled."""
    serve_small(workload, pages, budget, seqs, tiers, shape, fails, caching, alike)


def serve_small(workload, pages, budget, seqs, tiers, shape, fails=(), caching=False, alike=1000):
    dim, size, itemsize = shape
    scheduler = make_scheduler(pages, budget, seqs, caching, size, tiers, (dim, itemsize))
    config = scheduler.cache.config
    entries = requests_of(workload, alike)
    entries = [entry for entry in entries if config.least_units(entry[1].most_tokens) <= config.num_units]
    serve(scheduler, entries, fails)


def test_pages_that_are_halved_leave_room():
    """A budget in a small pool; the first of these alone fails with 2 pages: 24 tokens, the second page halved."""
    for seed in range(10):
        rng = random.Random(seed)
        workload = [(rng.randint(1, 60), rng.randint(1, 60), 0, None) for _ in range(8)]
        for share in (0.2, 0.3, 0.5):
            serve_small(workload, 2 + seed % 12, 64, 16, TierConfig(budget=share), (8, 16, 2), caching=seed % 2 == 1)
