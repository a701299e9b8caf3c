"""LLM as its users call it, on a tiny random Llama in float32, against the float64 oracle and against itself."""

import itertools
import logging
import math
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle.checkpoint import make_checkpoint, random_weights, write_weights
from oracle.llama64 import forward, greedy, load_config, load_weights, logprobs

import engine.llm
import engine.loading
from engine import (
    LLM,
    CapacityError,
    ConfigError,
    EngineConfig,
    ModelFormatError,
    RequestError,
    RequestOutput,
    SamplingParams,
    TokenizerError,
)

CONTEXT = 512
PAGE = 16
PAGES = CONTEXT // PAGE
PROMPTS = ["The cat sat near the stove", "wind", "The mouse waited until the light was out. " * 4]
SMOLLM2 = Path.home() / ".cache" / "isotherm" / "models" / "smollm2-135m"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def shared(directory):
    """Small pages and chunks, so that short texts cross their borders."""
    return load(directory, max_num_batched_tokens=48)


@pytest.fixture
def llm(shared):
    """The shared engine, seen to be empty before and after."""
    assert_empty(shared)
    yield shared
    for request_id in list(shared._requests):  # what a failed test left
        shared.abort(request_id)


def load(path, **settings):
    return LLM(path, **{"threads": 1, "dtype": "float32", "page_size": PAGE, **settings})


def assert_empty(llm):
    llm._cache.forget()
    stats = llm.stats()
    assert stats["num_requests_running"] == stats["num_requests_waiting"] == 0
    assert stats["kv_cache_usage"] == 0 and not llm._requests
    llm._cache.check([])


def live(llm):
    """The sequences that hold pages."""
    return [request.sequence for request in llm._requests.values()]


def greedily(max_tokens=24, **settings):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **settings})


def run(llm, ids, outputs=None):
    """Step until the requests ended; their last outputs. A step that does nothing while some live is a hang."""
    done = {} if outputs is None else outputs
    while not all(i in done for i in ids):
        step = llm.step()
        done.update({output.request_id: output for output in step if output.finish_reason})
        llm._cache.check(live(llm))
        assert step or llm.stats()["num_requests_running"], "the requests are lost"
    return [done[i] for i in ids]


# Prompts in every form.


def test_generate_a_text(llm):
    outputs = llm.generate(PROMPTS[0], greedily(8), use_tqdm=False)
    assert isinstance(outputs, list) and len(outputs) == 1
    output = outputs[0]
    assert isinstance(output, RequestOutput)
    assert output.prompt_token_ids == llm.tokenizer.encode(PROMPTS[0])
    assert len(output.token_ids) == 8 and output.finish_reason == "length"
    assert output.logprobs is None and output.num_cached_tokens == 0 and output.cache_report
    assert_empty(llm)


def test_the_text_is_what_the_tokens_add_to_the_prompt(llm):
    for prompt in [*PROMPTS, ""]:
        output = llm.generate(prompt, greedily(40))[0]
        decode = llm.tokenizer.decode
        whole = decode(output.prompt_token_ids + output.token_ids)
        assert output.text == whole[len(decode(output.prompt_token_ids)) :]


def test_generate_keeps_the_order_of_the_prompts(llm):
    outputs = llm.generate(PROMPTS, greedily(6))
    assert [o.prompt_token_ids for o in outputs] == [llm.tokenizer.encode(p) for p in PROMPTS]


def test_generate_token_ids(llm):
    ids = [llm.tokenizer.encode(p) for p in PROMPTS[:2]]
    kept = [list(i) for i in ids]
    by_id, by_text = llm.generate(ids, greedily()), llm.generate(PROMPTS[:2], greedily())
    assert [o.token_ids for o in by_id] == [o.token_ids for o in by_text]
    assert [o.text for o in by_id] == [o.text for o in by_text]
    assert ids == kept, "the caller's list was changed"


def test_default_parameters(llm):
    output = llm.generate(PROMPTS[0])[0]
    assert 1 <= len(output.token_ids) <= 128


@pytest.mark.parametrize(
    "prompts",
    [
        [1, 2, 3],
        [],
        [[]],
        [[1], []],
        None,
        5,
        ("a", "b"),
        {"prompt": "a"},
        b"abc",
        [b"abc"],
        [None],
        [["a"]],
        [[1.0]],
        [[True]],
        [[-1]],
        [[352]],
        [[1 << 70]],
        [[1, None]],
        [np.arange(3)],
        ["a", 1],
        [[[1]]],
    ],
    ids=repr,
)
@pytest.mark.parametrize("call", ["generate", "score"])
def test_prompts_that_are_refused(llm, call, prompts):
    with pytest.raises(RequestError, match=r"prompt|token id"):
        getattr(llm, call)(prompts)
    assert_empty(llm)


@pytest.mark.parametrize(
    "prompt", [[], None, 5, ["a"], ["a", "b"], [[1]], [-1], [352], [True], [1.5], b"x", (1, 2)], ids=repr
)
@pytest.mark.parametrize("call", ["stream", "add_request"])
def test_one_prompt_that_is_refused(llm, call, prompt):
    with pytest.raises(RequestError, match=r"prompt|token id"):
        result = getattr(llm, call)(prompt, greedily(2))
        next(result)
    assert_empty(llm)


def test_lone_surrogate(llm):
    with pytest.raises((RequestError, TokenizerError), match="surrogate"):
        llm.generate(["fine", "\ud800"], greedily(2))
    assert_empty(llm)


def test_empty_prompt_is_bos_alone(llm):
    output = llm.generate("", greedily(4))[0]
    assert output.prompt_token_ids == [1] and len(output.token_ids) == 4


def test_empty_prompt_without_bos(tmp_path):
    make_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    llm = load(tmp_path)
    with pytest.raises(RequestError, match=r"empty.*BOS"):
        llm.generate("", greedily(4))
    assert llm.generate("The", greedily(4))[0].prompt_token_ids[0] != 1


def test_without_a_tokenizer(directory):
    llm = load(directory, skip_tokenizer_init=True)
    output = llm.generate([[1, 300, 301]], greedily(5))[0]
    assert len(output.token_ids) == 5 and output.text == ""
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        llm.generate("text", greedily(5))
    with pytest.raises(RequestError, match=r"stop.*tokenizer"):
        llm.generate([[1, 300]], greedily(5, stop="x"))


# Right answers.


def test_greedy_is_the_oracles(llm, directory):
    config, weights = load_config(directory), load_weights(directory)
    for prompt in PROMPTS:
        output = llm.generate(prompt, greedily(20))[0]
        assert output.token_ids == greedy(config, weights, output.prompt_token_ids, 20), prompt


def test_greedy_is_deterministic(llm):
    assert llm.generate(PROMPTS, greedily())[0].text == llm.generate(PROMPTS, greedily())[0].text


def test_score_is_the_oracles(llm, directory):
    config, weights = load_config(directory), load_weights(directory)
    prompts = [llm.tokenizer.encode(p) for p in PROMPTS]
    prompts.append([random.Random(0).randrange(352) for _ in range(300)])  # several chunks, and over 128 rows
    scores = llm.score(prompts)
    assert_empty(llm)
    for ids, score in zip(prompts, scores, strict=True):
        assert isinstance(score, np.ndarray) and score.dtype == np.float32 and score.shape == (len(ids) - 1,)
        np.testing.assert_allclose(score, logprobs(config, weights, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 48, 49, 50, CONTEXT])
def test_score_lengths(llm, length):
    (score,) = llm.score([[5] * length])
    assert score.shape == (length - 1,) and score.dtype == np.float32 and np.isfinite(score).all()


def test_score_a_text(llm):
    (a,), (b,) = llm.score(PROMPTS[0]), llm.score([llm.tokenizer.encode(PROMPTS[0])])
    assert a.tolist() == b.tolist()


def test_score_of_too_many_tokens(llm):
    with pytest.raises(RequestError, match=f"{CONTEXT + 1} tokens.*{CONTEXT}"):
        llm.score([[5] * 3, [5] * (CONTEXT + 1)])
    assert_empty(llm)


@pytest.mark.parametrize("chunk", [1, 3, 17, 512])
def test_chunks_change_nothing(directory, llm, chunk):
    other = load(directory, max_num_batched_tokens=chunk)
    assert [o.token_ids for o in other.generate(PROMPTS, greedily())] == [
        o.token_ids for o in llm.generate(PROMPTS, greedily())
    ]


def test_several_prompts_answer_as_each_alone(llm):
    prompts = [*PROMPTS, "", "Who was warm?", "a", "b " * 60]
    alone = [llm.generate(p, greedily())[0].token_ids for p in prompts]
    assert [o.token_ids for o in llm.generate(prompts, greedily())] == alone


# Randomness.


def test_a_seed_gives_the_same_text_again(llm):
    params = SamplingParams(max_tokens=24, seed=11, ignore_eos=True)
    first = llm.generate(PROMPTS[0], params)[0]
    llm.generate(PROMPTS[1], SamplingParams(max_tokens=3))  # other requests in between
    assert llm.generate(PROMPTS[0], params)[0].token_ids == first.token_ids
    among = llm.generate([PROMPTS[1], PROMPTS[0], PROMPTS[2]], params)[1]
    assert among.token_ids == first.token_ids
    assert [*llm.stream(PROMPTS[0], params)][-1].token_ids == first.token_ids


def test_seeds_differ(llm):
    texts = {
        tuple(llm.generate(PROMPTS[0], SamplingParams(max_tokens=16, seed=seed, ignore_eos=True))[0].token_ids)
        for seed in (0, 1, 2, (1 << 63) - 1)
    }
    assert len(texts) == 4


def test_without_a_seed_each_request_differs(llm):
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    outputs = llm.generate([PROMPTS[0]] * 3, params)
    assert len({tuple(o.token_ids) for o in outputs}) == 3


def test_without_a_seed_a_new_engine_repeats_itself_and_its_seed_matters(directory):
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    a, b, c = (load(directory, seed=seed).generate(PROMPTS[0], params)[0].token_ids for seed in (0, 0, 1))
    assert a == b != c


def test_n_answers_stand_together_and_differ(llm):
    params = SamplingParams(max_tokens=12, n=3, seed=5, ignore_eos=True)
    outputs = llm.generate(PROMPTS[:2], params)
    ids = [llm.tokenizer.encode(p) for p in PROMPTS[:2]]
    assert [o.prompt_token_ids for o in outputs] == [ids[0]] * 3 + [ids[1]] * 3
    assert len({tuple(o.token_ids) for o in outputs[:3]}) == 3
    again = llm.generate(PROMPTS[:2], params)
    assert [o.token_ids for o in again] == [o.token_ids for o in outputs]
    assert_empty(llm)


def test_n_with_the_largest_seed(llm):
    outputs = llm.generate(PROMPTS[0], SamplingParams(max_tokens=4, n=2, seed=(1 << 63) - 1))
    assert len(outputs) == 2


@pytest.mark.parametrize("call", ["stream", "add_request"])
def test_n_where_one_answer_is_given(llm, call):
    with pytest.raises(RequestError, match=r"n must be 1|n = 1"):
        next(getattr(llm, call)("The", SamplingParams(n=2)))
    assert_empty(llm)


def test_repetition_penalty(llm):
    plain = llm.generate(PROMPTS[0], greedily(60))[0].token_ids
    assert len(set(plain)) < len(plain), "this test needs a text that repeats itself"
    strong = llm.generate(PROMPTS[0], greedily(60, repetition_penalty=100.0))[0]
    # A positive logit shrinks to nearly nothing: no token comes again, and none of the prompt's.
    assert len(set(strong.token_ids)) == 60
    assert not set(strong.token_ids) & set(strong.prompt_token_ids)


# Ends.


def end_token(llm, prompt=PROMPTS[0], at=5):
    """A token that greedy decoding first gives as number `at`."""
    ids = llm.generate(prompt, greedily(40))[0].token_ids
    return next((ids[i], i) for i in range(at, 40) if ids[i] not in ids[:i])


@pytest.mark.parametrize("where", ["config", "generation_config"])
@pytest.mark.parametrize("form", ["one", "list"])
def test_eos_stops(tmp_path, llm, where, form):
    token, at = end_token(llm)
    config = make_checkpoint(
        tmp_path, eos_token_id=(token if form == "one" else [2, token]) if where == "config" else 2
    )
    assert config["eos_token_id"] is not None
    if where == "generation_config":
        (tmp_path / "generation_config.json").write_text(
            f'{{"eos_token_id": {token if form == "one" else [2, token]}}}'
        )
    other = load(tmp_path)
    output = other.generate(PROMPTS[0], greedily(40, ignore_eos=False))[0]
    assert output.finish_reason == "stop" and output.token_ids[-1] == token and len(output.token_ids) == at + 1
    # The end is no text.
    before = llm.generate(PROMPTS[0], greedily(at))[0]
    assert output.token_ids[:-1] == before.token_ids and output.text == before.text
    ignored = other.generate(PROMPTS[0], greedily(40))[0]
    assert ignored.finish_reason == "length" and len(ignored.token_ids) == 40


@pytest.mark.parametrize("count", [1, 2, 17])
def test_max_tokens(llm, count):
    output = llm.generate(PROMPTS[0], greedily(count))[0]
    assert len(output.token_ids) == count and output.finish_reason == "length"


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT - 2, CONTEXT - 10])
def test_answer_is_clamped_to_the_context(llm, length):
    output = llm.generate([[5] * length], greedily(100))[0]
    assert len(output.token_ids) == CONTEXT - length and output.finish_reason == "length"
    assert output.prompt_token_ids == [5] * length
    assert_empty(llm)


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 5000])
def test_prompt_that_fills_the_context_is_refused(llm, length):
    for call in (lambda: llm.generate([[5], [5] * length], greedily(4)), lambda: llm.add_request([5] * length)):
        with pytest.raises(RequestError, match=rf"{length} tokens.*{CONTEXT}"):
            call()
    assert_empty(llm)


def test_max_model_len(directory):
    llm = load(directory, max_model_len=40)
    assert llm.max_model_len == llm.stats()["max_model_len"] == 40
    assert len(llm.generate([[5] * 30], greedily(100))[0].token_ids) == 10
    with pytest.raises(RequestError, match=r"40 tokens.*40"):
        llm.generate([[5] * 40], greedily(1))


@pytest.mark.parametrize("length", [513, 100_000])
def test_max_model_len_beyond_the_model(directory, length):
    with pytest.raises(ConfigError, match=rf"max_model_len {length}.*512"):
        load(directory, max_model_len=length)


# Stop strings.


def cuts(text, count=12):
    """Pieces of the text, 1 to 6 characters, with where each stands first."""
    rng = random.Random(1)
    found = []
    while len(found) < count:
        begin = rng.randrange(2, len(text) - 6)
        stop = text[begin : begin + rng.randrange(1, 7)]
        if "\ufffd" not in stop:
            found.append((stop, text.find(stop)))
    return found


def test_stop_strings(llm):
    """Wherever it stands, across tokens or within one, the text ends before it, and stream never shows a part of it."""
    plain = llm.generate(PROMPTS[2], greedily(60))[0]
    for stop, at in cuts(plain.text):
        outputs = list(llm.stream(PROMPTS[2], greedily(60, stop=(stop,))))
        last = outputs[-1]
        assert last.finish_reason == "stop", stop
        assert last.text == plain.text[:at], stop
        assert last.token_ids == plain.token_ids[: len(last.token_ids)]
        for output in outputs:
            assert last.text.startswith(output.text), (stop, output.text)
        assert_empty(llm)


def test_stop_across_a_token_border(llm):
    plain = llm.generate(PROMPTS[2], greedily(60))[0]
    shown = [len(output.text) for output in llm.stream(PROMPTS[2], greedily(60))]
    border = next(n for n in shown if 4 < n < len(plain.text) - 3 and "\ufffd" not in plain.text[n - 1 : n + 1])
    stop = plain.text[border - 1 : border + 1]
    output = llm.generate(PROMPTS[2], greedily(60, stop=stop))[0]  # a text stands for a list of one
    assert output.finish_reason == "stop" and output.text == plain.text[: plain.text.find(stop)]


def test_the_first_of_several_stops_counts(llm):
    plain = llm.generate(PROMPTS[2], greedily(60))[0]
    stops = [stop for stop, _ in cuts(plain.text)]
    output = llm.generate(PROMPTS[2], greedily(60, stop=stops))[0]
    assert output.text == plain.text[: min(plain.text.find(stop) for stop in stops)]


def test_two_stops_within_one_token(directory):
    llm = load(directory)
    the = llm.tokenizer.encode("the")[-1]
    assert llm.tokenizer.decode([1, the]) == "the"
    forced(llm, lambda _: the)
    output = llm.generate("The", greedily(8, stop=("e", "h", "the the")))[0]
    assert (output.text, output.finish_reason, output.token_ids) == (" t", "stop", [the])


def test_stop_that_never_comes_holds_nothing_back_at_the_end(llm):
    plain = llm.generate(PROMPTS[2], greedily(30))[0]
    output = llm.generate(PROMPTS[2], greedily(30, stop=(plain.text[-3:] + "~never~", "\x00\x00")))[0]
    assert output.text == plain.text and output.finish_reason == "length"


def test_stop_in_the_prompt_does_not_count(llm):
    plain = llm.generate("The stove", greedily(10))[0]
    output = llm.generate("The stove", greedily(10, stop="The stove"))[0]
    assert output.text == plain.text


def test_text_that_ends_in_half_a_character_is_whole_with_and_without_stop(tmp_path):
    """The last bytes before the end of text belong to the answer, whether or not stop strings are given."""
    make_checkpoint(tmp_path)
    llm = load(tmp_path)
    rows = iter([3 + 0xF0, 3 + 0x9F, 2])  # two bytes of an emoji, then the end of text
    forced(llm, lambda _: next(rows))
    plain = llm.generate("The", greedily(8, ignore_eos=False))[0]
    rows = iter([3 + 0xF0, 3 + 0x9F, 2])
    stopped = llm.generate("The", greedily(8, ignore_eos=False, stop="~"))[0]
    assert plain.finish_reason == stopped.finish_reason == "stop"
    assert plain.text == stopped.text != ""


def forced(llm, choose):
    """Make the model's logits say choose(row number) for each row."""
    compute = llm._model.logits

    def logits(hidden):
        rows = compute(hidden)
        for i, row in enumerate(rows):
            row[choose(i)] = 1e6
        return rows

    llm._model.logits = logits


# Log-probabilities.


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs(llm, count):
    params = SamplingParams(max_tokens=12, seed=4, logprobs=count, temperature=1.7, top_k=200, ignore_eos=True)
    output = llm.generate(PROMPTS[0], params)[0]
    assert len(output.logprobs) == len(output.token_ids)
    (score,) = llm.score([output.prompt_token_ids + output.token_ids])
    for token, entry, value in zip(output.token_ids, output.logprobs, score[-12:], strict=True):
        assert count <= len(entry) <= count + 1 and token in entry
        assert all(type(i) is int and type(v) is float and v <= 0 for i, v in entry.items())
        # Of the model's own distribution, whatever temperature and filters do.
        assert entry[token] == pytest.approx(float(value), abs=1e-4)
        best = sorted(entry.values(), reverse=True)[:count]
        assert entry[token] <= (best[0] if best else 0)


def test_logprobs_are_the_oracles_best(llm, directory):
    output = llm.generate(PROMPTS[0], greedily(6, logprobs=3))[0]
    ids = output.prompt_token_ids + output.token_ids
    rows = forward(load_config(directory), load_weights(directory), ids)[-7:-1]
    for row, entry in zip(rows, output.logprobs, strict=True):
        row = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        best = np.argsort(-row)[:3]
        assert list(entry) == best.tolist()
        np.testing.assert_allclose(list(entry.values()), row[best], atol=1e-4)


# Streaming.


def test_stream_grows_to_what_generate_gives(llm):
    for prompt in PROMPTS:
        whole = llm.generate(prompt, greedily(40))[0]
        outputs = list(llm.stream(prompt, greedily(40)))
        assert len(outputs) == 40
        for number, (before, after) in enumerate(itertools.pairwise(outputs), 1):
            assert before.finish_reason is None and after.text.startswith(before.text)
            assert before.token_ids == whole.token_ids[:number]
        assert outputs[-1].finish_reason == "length"
        assert outputs[-1].text == whole.text and outputs[-1].token_ids == whole.token_ids
        assert_empty(llm)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_closed_stream_frees_its_pages(llm, after):
    stream = llm.stream(PROMPTS[0], greedily(40))
    for _ in range(after):
        next(stream)
    stream.close()
    assert_empty(llm)


def test_an_exception_in_the_callers_loop_frees_the_pages(llm):
    stream = llm.stream(PROMPTS[0], greedily(40))
    with pytest.raises(ZeroDivisionError):
        for _ in stream:
            1 / 0  # noqa: B018
    del stream
    assert_empty(llm)


def bounded(monkeypatch, llm, most=300):
    """A call that loops without end fails instead."""
    step, taken = llm.step, itertools.count(1)

    def counted():
        assert next(taken) <= most, f"not done after {most} steps: it waits for what will not come"
        return step()

    monkeypatch.setattr(llm, "step", counted)


def test_two_streams_side_by_side(llm, monkeypatch):
    alone = [list(llm.stream(p, greedily(10)))[-1].text for p in PROMPTS[:2]]
    bounded(monkeypatch, llm)
    a, b = (llm.stream(p, greedily(10)) for p in PROMPTS[:2])
    texts = ["", ""]
    for x, y in itertools.zip_longest(a, b):  # the first one starts a step earlier
        texts = [output.text if output else text for output, text in zip((x, y), texts, strict=True)]
    assert texts == alone


def test_generate_within_a_stream(llm, monkeypatch):
    alone = [llm.generate(p, greedily(10))[0].text for p in PROMPTS[:2]]
    bounded(monkeypatch, llm)
    stream = llm.stream(PROMPTS[0], greedily(10))
    next(stream)
    assert llm.generate(PROMPTS[1], greedily(10))[0].text == alone[1]
    assert list(stream)[-1].text == alone[0]


def test_generate_beside_an_added_request(llm, monkeypatch):
    alone = llm.generate(PROMPTS[0], greedily(10))[0].text
    added = llm.add_request(PROMPTS[0], greedily(10))
    llm.generate(PROMPTS[1], greedily(30))
    bounded(monkeypatch, llm)
    assert run_bounded(llm, added).text == alone


def run_bounded(llm, request_id):
    while True:
        for output in llm.step():
            if output.request_id == request_id and output.finish_reason:
                return output


# Requests one by one.


def test_add_request_and_step(llm):
    alone = [llm.generate(p, greedily(10))[0] for p in PROMPTS]
    ids = [llm.add_request(p, greedily(10)) for p in PROMPTS]
    assert len(set(ids)) == 3 and llm.stats()["num_requests_waiting"] == 3
    outputs = run(llm, ids)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
    assert [o.text for o in outputs] == [o.text for o in alone]
    assert llm.step() == []
    assert_empty(llm)


@pytest.mark.parametrize("victim", range(3))
def test_abort_at_every_step(llm, victim):
    """Whenever one of a batch goes, the others answer as if it had never been."""
    alone = [llm.generate(p, greedily(8))[0].token_ids for p in PROMPTS]
    for when in range(14):
        ids = [llm.add_request(p, greedily(8)) for p in PROMPTS]
        done = {}
        for _ in range(when):
            done.update({o.request_id: o for o in llm.step() if o.finish_reason})
        llm.abort(ids[victim])
        llm._cache.check(live(llm))
        assert ids[victim] not in llm._requests
        others = [i for i in range(3) if i != victim]
        outputs = run(llm, [ids[i] for i in others], done)
        assert [o.token_ids for o in outputs] == [alone[i] for i in others], when
        assert_empty(llm)


def test_a_request_can_join_at_every_step(llm):
    alone = [llm.generate(p, greedily(8))[0].token_ids for p in PROMPTS]
    for when in range(8):
        done = {}
        first = [llm.add_request(p, greedily(8)) for p in PROMPTS[:2]]
        for _ in range(when):
            done.update({o.request_id: o for o in llm.step() if o.finish_reason})
        ids = [*first, llm.add_request(PROMPTS[2], greedily(8))]
        assert [o.token_ids for o in run(llm, ids, done)] == alone, when


@pytest.mark.parametrize("request_id", [-1, 10**9, None, "x"], ids=repr)
def test_abort_of_an_unknown_id(llm, request_id):
    llm.abort(request_id)
    assert_empty(llm)


def test_abort_twice_and_after_the_end(llm):
    request_id = llm.add_request(PROMPTS[0], greedily(2))
    run(llm, [request_id])
    llm.abort(request_id)
    other = llm.add_request(PROMPTS[0], greedily(2))
    llm.abort(other)
    llm.abort(other)
    assert llm.step() == []
    assert_empty(llm)


def test_step_without_requests(llm):
    assert llm.step() == []


# Memory.


def test_a_pool_for_one_request_serves_five(directory, llm):
    page_bytes = llm._cache.config.page_bytes
    small = load(directory, kv_cache_memory=5 * page_bytes)
    prompts = [[i] * 60 for i in range(5, 10)]  # 60 + 20 - 1 tokens: five pages each
    outputs = small.generate(prompts, greedily(20))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in llm.generate(prompts, greedily(20))]
    assert_empty(small)


def test_a_request_larger_than_the_pool(directory, llm, monkeypatch):
    """Two pages are 64 units: one stays exact, the other holds a page of 8 units and seven of 2, each with a record. So
    143 tokens fit."""
    small = load(directory, kv_cache_memory=2 * llm._cache.config.page_bytes)
    assert small.generate([[5] * 124], greedily(20))[0].finish_reason == "length"
    assert_empty(small)
    monkeypatch.setattr(small._runner, "forward", lambda _: pytest.fail("something was computed"))
    for call in (
        lambda: small.generate([[5] * 4, [5] * 125], greedily(20)),
        lambda: small.add_request([5] * 125, greedily(20)),
        lambda: small.score([[5] * 4, [5] * 144]),
        lambda: next(small.stream([5] * 125, greedily(20))),
    ):
        # What it needs, what there is, and what to change.
        with pytest.raises(CapacityError, match=r"needs 144 tokens.*143 fit.*--kv-cache-memory.*--max-tokens"):
            call()
        assert_empty(small)


def test_generate_leaves_nothing_when_one_prompt_is_refused(llm):
    for prompts in (["fine", "x" * 5000], [[5], [5] * 1000], [[5], [999]]):
        with pytest.raises(RequestError):
            llm.generate(prompts, greedily(4))
        assert_empty(llm)
    assert llm.generate("fine", greedily(4))[0].finish_reason == "length"


@pytest.mark.parametrize("size", [1, 100, 4095])
def test_a_pool_smaller_than_a_page(directory, size):
    with pytest.raises(CapacityError, match=rf"KV cache.*{size}.*--kv-cache-memory"):
        load(directory, kv_cache_memory=size)


def test_too_little_memory(directory, monkeypatch):
    monkeypatch.setattr(engine.loading, "free_memory_bytes", lambda _: 4_000_000_000)
    monkeypatch.setattr(engine.loading, "load_weights", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(CapacityError, match=r"8\.00 GB.*4\.00 GB are free") as caught:
        load(directory, kv_cache_memory=8_000_000_000)
    for flag in ("--kv-cache-memory", "--max-model-len", "--dtype"):
        assert flag in str(caught.value)


@pytest.mark.parametrize("free", [0, 1000, 230_000], ids=["none", "little", "weights-only"])
def test_no_memory_for_the_weights(directory, monkeypatch, free):
    monkeypatch.setattr(engine.loading, "free_memory_bytes", lambda _: free)
    with pytest.raises(CapacityError, match=r"--kv-cache-memory.*--max-model-len"):
        load(directory)


def test_half_of_the_free_memory_and_says_so(directory, monkeypatch, caplog):
    weights = sum(w.size for w in random_weights(load_config(directory), 0).values()) * 4
    weights += 512 * 16 * 4  # the table of rotations
    token_bytes = 2 * 2 * 2 * 16 * 4
    free = weights + 2 * 100 * token_bytes + 7
    monkeypatch.setattr(engine.loading, "free_memory_bytes", lambda _: free)
    with caplog.at_level(logging.WARNING, logger="isotherm"):
        llm = load(directory)
    assert llm._cache.config.num_pages == 100 // PAGE
    assert "100 tokens of 512" in caplog.text


def test_the_pool_is_the_context_by_default(llm):
    assert llm._cache.config.num_pages == PAGES


def test_stats(llm):
    keys = {
        "num_requests_running", "num_requests_waiting", "weights_bytes", "kv_resident_bytes", "kv_capacity_bytes",
        "kv_cold_bytes", "kv_bytes_per_token", "kv_cache_usage", "max_model_len", "peak_rss_bytes",
    }  # fmt: skip
    llm._cache.forget()  # of other tests
    empty = llm.stats()
    assert keys <= set(empty)
    assert empty["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, head_dim, bytes
    assert empty["weights_bytes"] == 4 * sum(w.size for w in random_weights(load_config(llm.config.model), 0).values())
    request_id = llm.add_request([5] * 40, greedily(10))
    llm.step()
    busy = llm.stats()
    assert busy["num_requests_running"] == 1
    assert busy["kv_cache_usage"] == pytest.approx(3 / PAGES)  # 40 tokens in pages of 16
    assert busy["kv_resident_bytes"] - empty["kv_resident_bytes"] == 3 * PAGE * empty["kv_bytes_per_token"]
    numbers = [value for value in busy.values() if not isinstance(value, dict)] + [*busy["read_ms_per_token"].values()]
    assert busy["flash"] == {}  # there is none
    assert all(isinstance(value, int | float) and math.isfinite(value) for value in numbers)
    llm.abort(request_id)
    after = llm.stats()
    assert after["num_requests_running"] == after["kv_cache_usage"] == 0
    assert after["kv_prefix_bytes"] == after["kv_resident_bytes"] - empty["kv_resident_bytes"] > 0
    assert after["num_prompt_tokens"] == empty["num_prompt_tokens"] + 40 and after["prefix_tree_depth"] == 1
    llm._cache.forget()
    changed = {"peak_rss_bytes", "num_prompt_tokens", "compute_s_per_token"}
    assert {k: v for k, v in llm.stats().items() if k not in changed} == {
        k: v for k, v in empty.items() if k not in changed
    }


def test_cache_report(llm):
    output = llm.generate([[5] * 40], greedily(10))[0]
    token_bytes = llm.stats()["kv_bytes_per_token"]
    assert output.cache_report["full_bytes"] == 49 * token_bytes  # the last token is never computed
    assert output.cache_report["resident_bytes"] == 4 * PAGE * token_bytes


# Faults in the middle.


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("when", [1, 2, 5])
def test_nan_logits_end_that_request_alone(llm, monkeypatch, value, when):
    alone = [llm.generate(p, greedily(10))[0] for p in PROMPTS[:2]]
    compute, calls = llm._model.logits, itertools.count(1)

    def logits(hidden):
        rows = compute(hidden)
        if next(calls) == when:
            rows[0, 17] = value
        return rows

    monkeypatch.setattr(llm._model, "logits", logits)
    first, second = llm.generate(PROMPTS[:2], greedily(10))
    assert first.finish_reason == "error"
    assert first.token_ids == alone[0].token_ids[: when - 1]
    assert alone[0].text.startswith(first.text.rstrip("\ufffd"))
    assert (second.finish_reason, second.token_ids) == ("length", alone[1].token_ids)
    assert_empty(llm)


def test_nan_weights_end_every_request(tmp_path):
    config = make_checkpoint(tmp_path)
    weights = random_weights(config, 0)
    weights["model.norm.weight"][3] = np.nan
    write_weights(tmp_path, weights)
    llm = load(tmp_path)
    assert [o.finish_reason for o in llm.generate(PROMPTS, greedily(4))] == ["error"] * 3
    assert list(llm.stream("The", greedily(4)))[-1].finish_reason == "error"
    assert_empty(llm)


INTERRUPTIBLE = {
    "generate": lambda llm: llm.generate(PROMPTS, greedily(10)),
    "stream": lambda llm: list(llm.stream(PROMPTS[0], greedily(10))),
    "score": lambda llm: llm.score(PROMPTS),
}


def interrupt(patch, llm, where, when):
    """Ctrl-C within the call number `when` of a part of a step."""
    owner, name = {
        "runner": (llm._runner, "forward"),
        "model": (llm._model, "forward"),
        "logits": (llm._model, "logits"),
        "sample": (engine.llm, "sample"),
    }[where]
    function, calls = getattr(owner, name), itertools.count(1)

    def interrupted(*args):
        if next(calls) == when:
            raise KeyboardInterrupt
        return function(*args)

    patch.setattr(owner, name, interrupted)


# Scoring samples nothing.
@pytest.mark.parametrize(
    ("call", "where"),
    [
        (call, where)
        for call in INTERRUPTIBLE
        for where in ("runner", "model", "logits", "sample")
        if (call, where) != ("score", "sample")
    ],
)
@pytest.mark.parametrize("when", [1, 3])
def test_interrupt_frees_the_pages(llm, monkeypatch, call, where, when):
    with monkeypatch.context() as patch:
        interrupt(patch, llm, where, when)
        with pytest.raises(KeyboardInterrupt):
            INTERRUPTIBLE[call](llm)
    assert_empty(llm)
    assert llm.generate(PROMPTS[0], greedily(4))[0].finish_reason == "length"


@pytest.mark.parametrize("where", ["runner", "model", "logits", "sample"])
@pytest.mark.parametrize("when", [1, 2, 4])
def test_an_added_request_survives_the_interrupt_of_another_call(llm, monkeypatch, where, when):
    alone = llm.generate(PROMPTS[1], greedily(10))[0].token_ids
    added = llm.add_request(PROMPTS[1], greedily(10))
    with monkeypatch.context() as patch:
        interrupt(patch, llm, where, when)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[0], greedily(10))
    llm._cache.check(live(llm))
    bounded(monkeypatch, llm)
    assert run_bounded(llm, added).token_ids == alone


# Settings.


@pytest.mark.parametrize(
    ("name", "value"),
    [],
)
def test_settings_of_later_versions_are_refused_by_name(directory, name, value):
    with pytest.raises(ConfigError, match=rf"^{name} must be .* come later\), got"):
        load(directory, **{name: value})


def test_settings_of_later_versions_at_their_defaults(directory):
    llm = load(
        directory, quantization=None, quantization_group=None,
        kv_budget=None, recall=None, cold_format="auto", host_cache_size=None,
        flash_cache_dir=None, flash_cache_size=None, preset=None, profile="default", scorer=None,
        enable_prefix_caching=True, seed=0, tokenizer=None, skip_tokenizer_init=False, device="auto",
        max_model_len=None, rope_scaling=None, kv_cache_memory=None,
    )  # fmt: skip
    assert llm.max_model_len == CONTEXT


def test_unknown_settings_are_named(directory):
    with pytest.raises(ConfigError, match=r"max_modellen.*page_sizes"):
        load(directory, page_sizes=16, max_modellen=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "int8"),
        ("dtype", torch.float32),
        ("dtype", None),
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("device", None),
        ("backend", "numpy"),
        ("page_size", 0),
        ("page_size", 48),
        ("page_size", "16"),
        ("page_size", 16.0),
        ("kv_cache_memory", 0),
        ("kv_cache_memory", -1),
        ("kv_cache_memory", 1.5),
        ("kv_cache_memory", math.nan),
        ("kv_cache_memory", True),
        ("kv_cache_memory", 1 << 60),
        ("max_model_len", 0),
        ("max_model_len", -5),
        ("max_model_len", 40.0),
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", 0),
        ("threads", 0),
        ("threads", -1),
        ("threads", 1 << 20),
        ("seed", "x"),
        ("seed", None),
        ("seed", 1.5),
        ("seed", -1),
        ("seed", 1 << 64),
        ("rope_scaling", "linear"),
        ("rope_scaling", {"rope_type": "magic"}),
        ("rope_scaling", {"rope_type": "linear"}),
        ("tokenizer", 5),
        ("skip_tokenizer_init", "no"),
        ("enable_prefix_caching", "no"),
        ("max_prefix_children", 1),
        ("recall", 1.5),
        ("recall", math.nan),
        ("recall_block", 65),
        ("recall_block", None),
        ("cold_format", "int4"),
        ("cold_policy", "both"),
        ("host_cache_size", 0),
        ("flash_cache_dir", ""),
        ("flash_cache_size", 1.5),
        ("flash_cache_persist", 1),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_bad_settings(directory, name, value):
    with pytest.raises(ConfigError, match=rf"{name}|^factor"):
        load(directory, **{name: value})


@pytest.mark.parametrize("model", [None, "", 5, b"tiny"], ids=repr)
def test_bad_model(model):
    with pytest.raises(ConfigError, match="model"):
        LLM(model)


def test_sizes_and_paths_in_settings():
    config = EngineConfig(model="-", kv_cache_memory="64MiB", host_cache_size="1g", flash_cache_dir=Path("/a/b"))
    assert (config.kv_cache_memory, config.host_cache_size, config.flash_cache_dir) == (64 << 20, 10**9, "/a/b")


def test_model_as_text_and_as_path(directory):
    assert load(str(directory)).generate("The", greedily(2)) and load(Path(directory)).config.model == str(directory)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_where_there_is_none(directory):
    with pytest.raises(ConfigError, match=r"cuda.*--device cpu"):
        load(directory, device="cuda")


def test_missing_model_lists_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOTHERM_MODELS", str(tmp_path / "models"))
    with pytest.raises(ModelFormatError, match="not found") as caught:
        LLM("no-such-model")
    assert str(tmp_path / "models" / "no-such-model") in str(caught.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near_the_oracle(directory, dtype):
    llm = load(directory, dtype=dtype)
    ids = llm.tokenizer.encode(PROMPTS[0])
    (score,) = llm.score([ids])
    error = np.abs(score - logprobs(load_config(directory), load_weights(directory), ids))
    assert error.mean() < (0.2 if dtype == "bfloat16" else 0.03)
    assert llm.stats()["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2


# The process around it.


def test_two_engines_in_one_process(directory, llm, tmp_path):
    make_checkpoint(tmp_path, seed=1)
    other = load(tmp_path)
    alone = llm.generate(PROMPTS, greedily(8)), other.generate(PROMPTS, greedily(8))
    assert alone[0][0].token_ids != alone[1][0].token_ids
    ids = [e.add_request(p, greedily(8)) for p in PROMPTS for e in (llm, other)]
    done = ({}, {})
    while any(len(d) < 3 for d in done):
        for e, d in zip((llm, other), done, strict=True):
            d.update({o.request_id: o.token_ids for o in e.step() if o.finish_reason})
    for number, d in enumerate(done):
        assert [d[i] for i in ids[number::2]] == [o.token_ids for o in alone[number]]
    assert_empty(other)


def test_no_thread_is_left_behind(directory):
    before = set(threading.enumerate())
    llm = load(directory)
    llm.generate(PROMPTS, greedily(4))
    list(llm.stream("The", greedily(4)))
    llm.score("The cat")
    # The progress bars' monitor too, which an earlier test of this process may have started.
    left = (set(threading.enumerate()) - before) | {t for t in threading.enumerate() if "tqdm" in t.name}
    assert not left


def test_no_global_state_of_torch_is_changed(directory):
    def state():
        return {
            "dtype": torch.get_default_dtype(),
            "device": torch.get_default_device(),
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "precision": torch.get_float32_matmul_precision(),
            "interop": torch.get_num_interop_threads(),
            "mkldnn": torch.backends.mkldnn.enabled,
            "random": torch.get_rng_state().tolist(),
            "numpy": np.random.get_state()[1].tolist(),
            "python": random.getstate(),
        }

    before = state()
    llm = load(directory)
    llm.generate(PROMPTS, SamplingParams(max_tokens=4, seed=3))
    llm.score("The cat")
    assert state() == before


def test_no_progress_bar_without_a_terminal(llm, capsys):
    llm.generate(PROMPTS, greedily(4), use_tqdm=True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason=f"no {SMOLLM2}")
def test_a_real_model_answers():
    llm = LLM(str(SMOLLM2), threads=1, max_model_len=256)
    output = llm.generate("The capital of France is", greedily(6))[0]
    assert "Paris" in output.text


@pytest.mark.parametrize("nth", [0, 1, 2])
def test_an_exception_while_a_token_is_added_ends_that_request_only(llm, monkeypatch, nth):
    alone = llm.generate(PROMPTS[1], greedily(6))[0].token_ids
    first, second = (llm.add_request(prompt, greedily(6)) for prompt in PROMPTS[:2])
    original, calls = llm._extend, itertools.count()

    def failing(request, token):
        if request.id == first and next(calls) == nth:
            raise RuntimeError("injected")
        return original(request, token)

    monkeypatch.setattr(llm, "_extend", failing)
    done, failures = {}, 0
    for _ in range(100):
        try:
            done |= {output.request_id: output for output in llm.step()}
        except RuntimeError:
            failures += 1
        if not llm.has_unfinished_requests():
            break
    assert failures == 1 and not llm.has_unfinished_requests()
    assert done[first].finish_reason == "error" and done[second].token_ids == alone
    llm._cache.check([])


def test_an_aborted_request_is_never_returned(llm):
    added = llm.add_request(PROMPTS[0], greedily(8))
    llm.generate(PROMPTS[1], greedily(3), use_tqdm=False)  # advances it, for the next step to return
    llm.abort(added)
    assert llm.step() == [] and not llm.has_unfinished_requests()
