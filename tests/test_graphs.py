"""Steps of decoding by graphs, on torch's operators, with a stand-in for what records them (tests/recorder.py).

These operators read what a step's plan says outside of its tensors, too: here that is worked out of the tensors anew,
as the Triton kernels have it (tests/kernels/test_graphs_triton.py).
"""

import contextlib
import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracle.checkpoint import make_checkpoint
from recorder import PAGE, Recorder, Spy

from engine import LLM, CapacityError, ConfigError, SamplingParams, loading
from engine import graphs as engine_graphs
from engine.config import EngineConfig
from engine.graphs import EAGER_STEPS, Graphs, cuda_recorder
from kernels import reference
from kernels.ops import AttentionPlan

TIERS = {"kv_budget": 0.4, "recall": 0.0, "cold_format": "none", "recent_tokens": 16}
RECALL = {"kv_budget": 0.3, "recall": 0.05, "cold_format": "exact", "recent_tokens": 16}
SETTINGS = {"tiers": TIERS, "recall": RECALL}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint(path, max_position_embeddings=1024)
    return path


def of_tensors(plan):
    """The plan with the rest of it as its tensors say."""
    pieces = []
    for length, frames in zip(plan.exact_lens.tolist(), plan.page_table.tolist(), strict=True):
        starts = range(0, length, PAGE)
        pieces.append(tuple((frames[at // PAGE] * PAGE, min(PAGE, length - at)) for at in starts))
    recall = plan.recall
    if recall is not None:
        counts = dict(recall.blocks[:, [0, 3]].tolist())
        recall = recall._replace(counts=tuple(counts.get(b, 0) for b in range(len(pieces))))
    return replace(plan, pieces=tuple(pieces), recall=recall)


class Operators:
    """torch's, by plans that are `of_tensors`."""

    def __getattr__(self, name):
        operator = getattr(reference, name)
        if name not in ("decode_attention", "prefill_attention", "recall"):
            return operator

        def by_tensors(*args, **kwargs):
            return operator(*(of_tensors(x) if isinstance(x, AttentionPlan) else x for x in args), **kwargs)

        return by_tensors


def load(directory, recorder=None, **settings):
    fixed = {"threads": 1, "dtype": "float32", "page_size": PAGE, "enable_prefix_caching": False, "backend": "torch"}
    llm = LLM(directory, **{**fixed, **settings})
    llm._runner.ops = Operators()
    if recorder is not None:
        llm._runner.graphs = Spy(recorder)
    return llm


def prompt(length, seed):
    return np.random.default_rng(seed).integers(3, 350, length).tolist()


def serve(llm):
    """Requests that come and go while others decode, of lengths around the borders of pages: their ids and the
    log-probabilities of these."""
    arrivals = {0: (40, 100), 20: (15, 60), 21: (16, 31), 50: (100, 50), 51: (1, 17), 90: (33, 250)}
    done, step = {}, 0
    while llm.has_unfinished_requests() or step <= max(arrivals):
        if step in arrivals:
            length, tokens = arrivals[step]
            params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=3)
            llm.add_request(prompt(length, step), params)
        done |= {output.request_id: (output.token_ids, output.logprobs) for output in llm.step()}
        step += 1
    return done


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_graphs_give_the_bits_of_steps_launched_one_by_one(directory, settings):
    recorder = Recorder()
    llm = load(directory, recorder, **settings)
    eager = load(directory, **settings)
    assert serve(llm) == serve(eager)
    spy = llm._runner.graphs
    assert recorder.replayed > 100 and len(spy.formats) >= 2 and spy.observed
    assert bool(spy.recalled) == bool(settings["recall"])
    assert 0 < eager.stats()["kv_moves"] == llm.stats()["kv_moves"]


@pytest.fixture(scope="module")
def exact(directory):
    return serve(load(directory))


def test_a_key_is_recorded_once_and_after_a_few_steps(directory, exact):
    recorder = Recorder()
    llm = load(directory, recorder)
    assert serve(llm) == exact
    keys = llm._runner.graphs.keys
    assert recorder.recorded == sum(count > EAGER_STEPS for count in keys.values()) <= engine_graphs.MOST_GRAPHS
    assert recorder.replayed == sum(max(count - EAGER_STEPS, 0) for count in keys.values())


@pytest.mark.parametrize("fails_after", [0, 2])
def test_where_recording_fails_it_is_said_once_and_all_goes_on(directory, exact, caplog, fails_after):
    recorder = Recorder(fails_after)
    llm = load(directory, recorder)
    with caplog.at_level(logging.WARNING, "isotherm"):
        assert serve(llm) == exact
    (record,) = caplog.records
    assert "--cuda-graphs" in record.getMessage() and "out of memory" in record.getMessage()
    assert recorder.recorded == fails_after
    with pytest.raises(StopIteration):  # and what the graphs held is free
        next(iter(llm._runner.graphs.graphs._graphs))


def out_of_memory(schedule):
    raise torch.OutOfMemoryError("injected")


def test_a_step_out_of_memory_lets_go_of_the_graphs(directory, monkeypatch):
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    (wanted,) = load(directory).generate([prompt(20, 0)], params, use_tqdm=False)
    recorder, ids = Recorder(), []
    llm = load(directory, recorder)
    before = llm._scheduler.max_num_seqs
    llm.add_request(prompt(20, 0), params)
    for step in range(60):
        if step == 20:
            assert llm._runner.graphs.graphs._graphs
            with monkeypatch.context() as patch:
                patch.setattr(llm._runner, "forward", out_of_memory)
                assert llm.step() == []
            assert not llm._runner.graphs.graphs._graphs
            assert llm._scheduler.max_num_seqs == before, "without the graphs the step may fit"
            recorded = recorder.recorded
        if step == 22:
            assert recorder.recorded == recorded, "recorded again at once"
        ids = [output.token_ids for output in llm.step()] or ids
    assert ids == [wanted.token_ids]


def test_keys_are_few(directory):
    """Of one text: for exact pages and for each format as many as its table doubles, with and without measuring."""
    llm = load(directory, Recorder(), **TIERS)
    params = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)
    llm.generate([prompt(5, 0)], params, use_tqdm=False)
    keys = llm._runner.graphs.keys
    assert sum(keys.values()) == 899
    doublings = 1 + (905 // PAGE).bit_length()
    assert len(keys) <= 2 * doublings * 3 < 50
    assert sum(count for count in keys.values() if count <= EAGER_STEPS) < 60


def step(width):
    """Tokens and plan of one sequence whose table has so many pages."""
    table = torch.zeros(1, width, dtype=torch.int32)
    ones = torch.ones(1, dtype=torch.int64)
    return torch.ones(2, 1), AttentionPlan(torch.tensor([0, 1]), torch.ones(1), table, ones, 1, 0, pieces=())


def hidden(tokens, plan):
    return (tokens[0] * plan.page_table.shape[1],)


def test_the_graph_that_was_not_used_for_the_longest_goes(monkeypatch):
    monkeypatch.setattr(engine_graphs, "MOST_GRAPHS", 2)
    recorder = Recorder()
    graphs = Graphs(recorder)
    seen = []
    for width in (1, 2, 1, 4, 1, 2):
        for _ in range(EAGER_STEPS + 1):
            assert graphs(hidden, *step(width))[0].tolist() == [width]
        seen.append(recorder.recorded)
    assert seen == [1, 2, 2, 3, 3, 4]


def test_a_key_that_comes_rarely_is_not_recorded():
    recorder = Recorder()
    graphs = Graphs(recorder)
    for _ in range(10):
        for width in range(1, engine_graphs.RECENT_STEPS):
            graphs(hidden, *step(width))
    assert recorder.recorded == 0


def test_all_is_recorded_on_one_stream_into_one_pool(monkeypatch):
    """`cuda_recorder` on stand-ins for what it calls of torch.cuda; the stream is left, also where recording fails."""
    log, streams = [], ["default"]

    class Graph:
        def replay(self):
            log.append("replay")

    @contextlib.contextmanager
    def stream(chosen):
        streams.append(chosen)
        try:
            yield
        finally:
            del streams[1:]

    @contextlib.contextmanager
    def graph(graph, *place, **settings):
        assert isinstance(graph, Graph)
        log.append((*place, settings))
        streams.append("inner")
        yield

    cuda = SimpleNamespace(
        CUDAGraph=Graph, Stream="stream of {}".format, stream=stream, graph=graph, graph_pool_handle=lambda: "pool"
    )
    monkeypatch.setattr(engine_graphs.torch, "cuda", cuda)
    record = cuda_recorder(torch.device("cuda:1"))
    graphs = Graphs(record)
    place = ("pool", "stream of cuda:1", {"capture_error_mode": "thread_local"})
    for width in (1, 2):
        for _ in range(EAGER_STEPS + 2):
            graphs(hidden, *step(width))
    assert log == [place, "replay", "replay"] * 2
    with pytest.raises(ZeroDivisionError):
        record(lambda: 1 / 0)
    assert streams == ["default"]


@pytest.mark.parametrize(
    ("device", "backend", "wanted", "uses"),
    [
        ("cuda", "auto", "auto", True), ("cuda:1", "triton", "auto", True), ("cuda", "auto", "on", True),
        ("cuda", "triton", "off", False), ("cuda", "torch", "auto", False), ("cpu", "auto", "auto", False),
        ("cpu", "triton", "off", False),
    ],
)  # fmt: skip
def test_where_graphs_are_used(device, backend, wanted, uses):
    config = EngineConfig(model="any", backend=backend, cuda_graphs=wanted)
    assert loading.uses_graphs(config, torch.device(device)) == uses


@pytest.mark.parametrize("settings", [{}, {"backend": "torch"}])
def test_on_is_refused_where_there_are_none(directory, settings):
    with pytest.raises(ConfigError, match="cuda_graphs on needs a GPU and backend triton; device is cpu"):
        LLM(directory, cuda_graphs="on", device="cpu", **settings)
    with pytest.raises(ConfigError, match="cuda_graphs on needs"):
        load(directory).twin(cuda_graphs="on")
    with pytest.raises(ConfigError, match="cuda_graphs must be auto, on or off, got 'yes'"):
        EngineConfig(model="any", cuda_graphs="yes")


def test_memory_is_left_for_graphs(directory, monkeypatch):
    monkeypatch.setattr(loading, "free_memory_bytes", lambda device: loading.GRAPH_BYTES + (8 << 20))
    size = {"kv_cache_memory": 16 << 20, "device": "cpu", "dtype": "float32"}
    LLM(directory, **size)
    monkeypatch.setattr(loading, "uses_graphs", lambda config, device: True)
    with pytest.raises(CapacityError, match=r"0\.01 GB are free"):
        LLM(directory, **size)
