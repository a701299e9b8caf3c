"""The scheduler alone: a real cache, and in place of a model a count that is committed and a token that is appended."""

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


def make_scheduler(pages=8, budget=32, seqs=8):
    token_bytes = 2 * 8 * 4  # K and V of one head of 8 float32
    config = CacheConfig(
        num_layers=1, num_kv_heads=1, head_dim=8, itemsize=4, capacity_bytes=pages * PAGE * token_bytes, page_size=PAGE
    )
    return Scheduler(KVCache(config, torch.float32, torch.device("cpu"), reference), budget, seqs)


_ids = itertools.count()


def make_request(prompt, answer, scores=None):
    return Request(
        id=next(_ids),
        params=SamplingParams(max_tokens=max(answer, 1)),
        tokens=list(range(prompt)),
        num_prompt_tokens=prompt,
        max_tokens=answer,
        eos_ids=frozenset(),
        generator=None,
        detokenizer=None,
        scores=scores,
    )


def check(scheduler):
    scheduler.cache.check([request.sequence for request in scheduler.running])
    assert not any(request.sequence.pages for request in scheduler.waiting)


def step(scheduler):
    """What the engine does with a schedule; returns it. A request ends with its last token, which is not computed."""
    schedule = scheduler.schedule()
    assert schedule.requests or not (scheduler.running or scheduler.waiting), "nothing is computed and requests remain"
    check(scheduler)
    for request, count in zip(schedule.requests, schedule.counts, strict=True):
        assert 1 <= count <= request.num_pending
        scheduler.cache.commit(request.sequence, count)
        if request.num_pending == 0:
            if request.scores is None:
                request.tokens.append(0)
            if len(request.tokens) - request.num_prompt_tokens >= request.max_tokens:
                scheduler.finish(request, "length")
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
    step(scheduler)  # 10 of the first
    schedule = step(scheduler)
    assert (schedule.requests, schedule.counts, schedule.num_decodes) == ([first, second], [1, 9], 1)
    scheduler = make_scheduler(pages=16, budget=10)
    one, other = make_request(9, 1), make_request(20, 1)
    scheduler.add(one)
    scheduler.add(other)
    schedule = step(scheduler)  # 9 of the first, and room for one token of the second
    assert (schedule.requests, schedule.counts, schedule.num_decodes) == ([other, one], [1, 9], 1)


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


@settings(max_examples=150, deadline=None)
@given(workload=workload, pages=st.integers(7, 20), budget=st.integers(1, 48), seqs=st.integers(1, 16))
def test_any_workload(workload, pages, budget, seqs):
    """The promises: the budget holds, no admitted request runs out of pages, the order is kept, everybody ends."""
    scheduler = make_scheduler(pages, budget, seqs)
    arrivals = [(arrival, make_request(prompt, answer), abort) for prompt, answer, arrival, abort in workload]
    arrivals.sort(key=lambda entry: entry[0])
    started = []
    for number in range(5000):
        for arrival, request, _ in arrivals:
            if arrival == number:
                scheduler.add(request)
        before = {id(r): r.sequence.length for _, r, _ in arrivals}
        schedule = step(scheduler)
        assert len(schedule.requests) == len(schedule.counts) <= seqs
        assert len({id(request) for request in schedule.requests}) == len(schedule.requests)
        assert all(count == 1 for count in schedule.counts[: schedule.num_decodes])
        assert all(count > 1 for count in schedule.counts[schedule.num_decodes :])
        # Requests that generate take a token each whatever the budget is; prompts share what they leave of it.
        generating = sum(before[id(r)] >= r.num_prompt_tokens for r in schedule.requests)
        assert sum(schedule.counts) <= max(budget, generating)
        # First come, first served: whoever still waits came after all that run.
        running, waiting = scheduler.running, list(scheduler.waiting)
        assert [r for _, r, _ in arrivals if r in waiting] == waiting
        started += [r for r in running if r not in started]
        assert [r for _, r, _ in arrivals if r in started] == started
        for _, request, abort in arrivals:
            if abort == number and request.finish_reason is None and any(r is request for r in scheduler.running):
                scheduler.finish(request, "abort")
        check(scheduler)
        if not (scheduler.running or scheduler.waiting) and number >= max(arrival for arrival, _, _ in arrivals):
            break
    else:
        raise AssertionError("some request never ended")
    for _, request, abort in arrivals:
        assert request.finish_reason == "length" or (request.finish_reason == "abort" and abort is not None)
        assert request.finish_reason == "abort" or len(request.tokens) == request.num_prompt_tokens + request.max_tokens
    assert scheduler.cache.num_free_pages == pages


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
)  # fmt: skip
def test_any_workload_in_a_pool_that_is_too_small(workload, pages, budget, seqs, tiers, shape, fails):
    """What fits the pool at its smallest is served to its end, in its order, also when a step fails before its commit:
    room is found for every page that is scheduled."""
    serve(workload, pages, budget, seqs, tiers, shape, fails)


def serve(workload, pages, budget, seqs, tiers, shape, fails=()):
    dim, size, itemsize = shape
    config = CacheConfig(1, 1, dim, itemsize, pages * size * 2 * dim * itemsize, size, tiers)
    cache = KVCache(config, torch.float32 if itemsize == 4 else torch.bfloat16, torch.device("cpu"), reference)
    scheduler = Scheduler(cache, budget, seqs)
    entries = [(arrival, make_request(prompt, answer), abort) for prompt, answer, arrival, abort in workload]
    entries = [entry for entry in entries if config.least_units(entry[1].most_tokens) <= config.num_units]
    last = max((arrival for arrival, _, _ in entries), default=0)
    for number in range(5000):
        for arrival, request, _ in entries:
            if arrival == number:
                scheduler.add(request)
        schedule = scheduler.schedule()
        assert schedule.requests or not (scheduler.running or scheduler.waiting), "nothing is computed"
        check(scheduler)
        if number not in fails:
            for request, count in zip(schedule.requests, schedule.counts, strict=True):
                cache.commit(request.sequence, count)
                if request.num_pending == 0:
                    request.tokens.append(0)
                    if len(request.tokens) - request.num_prompt_tokens >= request.max_tokens:
                        scheduler.finish(request, "length")
            cache.settle([request.sequence for request in scheduler.running])
        for _, request, abort in entries:
            if abort == number and request.finish_reason is None and any(r is request for r in scheduler.running):
                scheduler.finish(request, "abort")
        check(scheduler)
        if not (scheduler.running or scheduler.waiting) and number >= last:
            break
    else:
        raise AssertionError("some request never ended")
    assert all(request.finish_reason for _, request, _ in entries)
    assert cache.num_free_pages == pages and cache.resident_bytes == cache._frames.table_bytes


def test_pages_that_are_halved_leave_room():
    """A budget in a small pool; the first of these alone fails with 2 pages: 24 tokens, the second page halved."""
    for seed in range(30):
        rng = random.Random(seed)
        workload = [(rng.randint(1, 60), rng.randint(1, 60), 0, None) for _ in range(8)]
        for share in (0.2, 0.3, 0.5):
            serve(workload, 2 + seed % 12, 64, 16, TierConfig(budget=share), (8, 16, 2))
