"""AsyncLLM as asyncio programs use it: the same answers as LLM, and nothing left behind however they end."""

import asyncio
import contextlib
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from oracle.checkpoint import make_checkpoint, train_tokenizer, write_json

import engine.async_llm
from engine import LLM, AsyncLLM, CapacityError, ConfigError, RequestError, RequestOutput, SamplingParams
from engine.templates import ChatTemplate

ROOT = Path(__file__).resolve().parent.parent
STORIES = Path(os.environ.get("ISOTHERM_TEST_MODELS", "/work/shared/data")) / "stories260k-hf"
SETTINGS = {"threads": 1, "dtype": "float32", "page_size": 16, "max_num_batched_tokens": 48, "kv_cache_memory": "2MiB"}
PROMPTS = ["The cat sat near the stove", "wind", "The mouse waited until the light was out. " * 7, "Who was cold?"]
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "Who was warm?"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny model that knows ChatML."""
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint(path, vocab_size=354)
    (path / "tokenizer.model").write_bytes(train_tokenizer(352))
    added = {str(352 + i): {"content": f"<|im_{end}|>", "special": True} for i, end in enumerate(("start", "end"))}
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML, "added_tokens_decoder": added}
    write_json(path / "tokenizer_config.json", tokens)
    return path


@pytest.fixture(scope="module")
def alone(directory):
    """The LLM whose answers are expected."""
    return LLM(directory, **SETTINGS)


class Gate:
    """Watches the LLM of an AsyncLLM, and holds the engine thread before every step while it is shut."""

    def __init__(self):
        self.open = True
        self.steps = self.turns = self.most = 0
        self.callers = set()
        self.failures = {}  # what a method of LLM raises
        self.llm = None  # a weak reference to the last one

    def watch(self, name, llm):
        self.callers.add(threading.current_thread().name)
        self.most = max(self.most, len(llm._requests))
        if name == "step" and llm._requests:
            if not self.open:
                self._arrived.release()
                if not self._tickets.acquire(timeout=20):
                    self.open = True  # a test failed, and nobody comes
            self.steps += 1
        self.turns += name == "has_unfinished_requests"
        if name in self.failures:
            raise self.failures[name]

    def shut(self):
        self._arrived, self._tickets = threading.Semaphore(0), threading.Semaphore(0)
        self.open = False

    async def arrived(self):
        """Until the engine thread stands before a step."""
        await asyncio.to_thread(self._arrived.acquire)

    def release(self, steps):
        self._tickets.release(steps)

    async def let(self, steps):
        """From one to another."""
        for _ in range(steps):
            self.release(1)
            await self.arrived()

    def reopen(self):
        if not self.open:
            self.open = True
            self.release(1000)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()

    def watched(name):
        def method(llm, *args, **keywords):
            gate.watch(name, llm)
            return getattr(LLM, name)(llm, *args, **keywords)

        return method

    def remember(llm, *args, **settings):
        LLM.__init__(llm, *args, **settings)
        gate.llm = weakref.ref(llm)

    names = ("add_request", "step", "abort", "stats", "has_unfinished_requests")
    Watched = type("Watched", (LLM,), {"__init__": remember, **{name: watched(name) for name in names}})
    monkeypatch.setattr(engine.async_llm, "LLM", Watched)
    yield gate
    gate.reopen()


def greedily(max_tokens=24, **settings):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **settings})


def load(path, **settings):
    """Without cached prefixes, so that an engine without requests holds nothing."""
    return AsyncLLM(path, **{**SETTINGS, "enable_prefix_caching": False, **settings})


def run(main, *args, **settings):
    """main(llm) in an event loop of its own; whatever takes minutes hangs."""

    async def whole():
        async with load(*args, **settings) as llm:
            return await asyncio.wait_for(main(llm), 120)

    return asyncio.run(whole())


async def last(outputs):
    async for output in outputs:
        newest = output
    return newest


async def assert_empty(llm):
    stats = await llm.stats()
    assert stats["num_requests_running"] == stats["num_requests_waiting"] == 0
    assert stats["kv_cache_usage"] == 0
    assert not llm._engine.readers and not llm._engine.requests


# Right answers.


@pytest.mark.parametrize("caching", [False, True])
def test_many_together_answer_as_each_alone(directory, alone, caching):
    prompts = [*PROMPTS, *(f"{prompt} {i}" for i in range(5) for prompt in PROMPTS)]
    expected = [alone.generate(prompt, greedily())[0] for prompt in prompts]

    async def main(llm):
        outputs = await asyncio.gather(*(last(llm.generate(prompt, greedily())) for prompt in prompts))
        assert (await llm.stats())["num_requests_running"] == 0
        return outputs

    outputs = run(main, directory, enable_prefix_caching=caching)
    assert [(o.prompt_token_ids, o.token_ids, o.text, o.finish_reason) for o in outputs] == [
        (o.prompt_token_ids, o.token_ids, o.text, o.finish_reason) for o in expected
    ]


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs shared/data/stories260k-hf")
def test_stories_together_are_the_stories_alone():
    prompts = ["Once upon a time", "Lily and Tom", "The dog was", "One day, a girl named"]
    llm = LLM(STORIES, **SETTINGS)
    expected = [llm.generate(prompt, greedily(40, ignore_eos=False))[0].token_ids for prompt in prompts]

    async def main(llm):
        params = greedily(40, ignore_eos=False)
        outputs = await asyncio.gather(*(last(llm.generate(prompt, params)) for prompt in prompts))
        await assert_empty(llm)
        return [output.token_ids for output in outputs]

    assert run(main, STORIES) == expected


def test_an_answer_grows(directory, gate):
    async def main(llm):
        gate.shut()
        outputs = []
        generator = llm.generate(PROMPTS[2], greedily(8))
        first = asyncio.create_task(anext(generator))
        await gate.arrived()
        while not first.done():  # the steps of the prompt, then the first token
            await gate.let(1)
            await asyncio.sleep(0)
        outputs.append(await first)
        for _ in range(6):
            await gate.let(1)
            outputs.append(await anext(generator))
        gate.reopen()
        return [*outputs, *[output async for output in generator]]

    outputs = run(main, directory)
    assert [len(output.token_ids) for output in outputs] == list(range(1, 9))
    assert [output.finish_reason for output in outputs] == [None] * 7 + ["length"]
    assert all(b.text.startswith(a.text) for a, b in itertools.pairwise(outputs))
    assert len({output.request_id for output in outputs}) == 1


def test_default_parameters(directory):
    output = run(lambda llm: last(llm.generate([5, 6])), directory)
    assert 1 <= len(output.token_ids) <= 128 and output.prompt_token_ids == [5, 6]


def test_chat_answers_as_llm_does(directory, alone):
    conversations = [[{"role": "user", "content": content}] for content in PROMPTS]
    expected = [alone.chat(messages, greedily(8)) for messages in conversations]

    async def main(llm):
        outputs = await asyncio.gather(*(last(llm.chat(messages, greedily(8))) for messages in conversations))
        await assert_empty(llm)
        return outputs

    for output, right in zip(run(main, directory), expected, strict=True):
        assert (output.prompt_token_ids, output.token_ids) == (right.prompt_token_ids, right.token_ids)


def test_the_end_of_a_turn_ends_a_chat(directory, alone, monkeypatch):
    free = alone.chat(USER, greedily(8)).token_ids
    end = free[4]
    monkeypatch.setattr(ChatTemplate, "_end_ids", lambda template: frozenset([end]))

    async def main(llm):
        with_end = await last(llm.chat(USER, greedily(8, ignore_eos=False)))
        ids = with_end.prompt_token_ids
        by_id = await last(llm.generate(ids, greedily(8, ignore_eos=False), end_ids=frozenset([end])))
        return with_end, by_id, await last(llm.chat(USER, greedily(8)))

    *stopped, ignoring = run(main, directory)
    assert [(o.token_ids, o.finish_reason) for o in stopped] == [(free[: free.index(end) + 1], "stop")] * 2
    assert ignoring.token_ids == free


# What is wrong is said, and does no harm.


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ("word " * 5000, None, RequestError, "max_model_len is 512"),
        ([1, 2], SamplingParams(n=2), RequestError, "got 2"),
        ([1, 354], None, RequestError, "0 to 353"),
        (b"abc", None, RequestError, "bytes"),
        ("a", {"max_tokens": 3}, RequestError, "SamplingParams"),
        ([5] * 300, SamplingParams(max_tokens=200), CapacityError, "499 tokens of cache"),
    ],
    ids=["long", "n", "ids", "bytes", "params", "capacity"],
)
def test_errors_come_with_the_first_output(directory, prompt, params, error, message):
    async def main(llm):
        generator = llm.generate(prompt, params)  # nothing is sent yet
        other = llm.generate("wind", greedily(20))
        await anext(other)
        with pytest.raises(error, match=message):
            await anext(generator)
        assert len((await last(other)).token_ids) == 20
        await assert_empty(llm)

    run(main, directory, kv_cache_memory="32KiB")


def test_errors_of_a_chat(directory, tmp_path):
    make_checkpoint(tmp_path)

    async def main(llm):
        for messages, params, message in (
            ([], None, "at least one"),
            ([{"role": "assistant", "content": "a"}], None, "of role 'user'"),
            (USER, SamplingParams(n=3), "got 3"),
        ):
            with pytest.raises(RequestError, match=message):
                await anext(llm.chat(messages, params))
        await assert_empty(llm)

    run(main, directory)

    async def without(llm):
        with pytest.raises(ConfigError, match="no chat template"):
            await anext(llm.chat(USER))
        assert len((await last(llm.generate("wind", greedily(3)))).token_ids) == 3

    run(without, tmp_path)


@pytest.mark.parametrize("max_queue", [0, -1, 1.0, True, None, "8"])
def test_a_queue_has_room_for_one(directory, max_queue):
    with pytest.raises(ConfigError, match="max_queue must be an integer from 1"):
        AsyncLLM(directory, max_queue=max_queue)


def test_what_does_not_load_starts_no_thread(directory):
    before = threading.enumerate()
    with pytest.raises(ConfigError, match="colour"):
        AsyncLLM(directory, colour="red")
    with pytest.raises(CapacityError):
        AsyncLLM(directory, kv_cache_memory="1KiB")
    assert threading.enumerate() == before


# However a generator is closed, its request ends.


def find(gate, prompt_length):
    """The request of the engine with this prompt."""
    return [r for r in list(gate.llm()._requests.values()) if r.num_prompt_tokens == prompt_length]


@pytest.mark.parametrize("chat", [False, True], ids=["generate", "chat"])
@pytest.mark.parametrize("steps", range(8))
def test_a_task_cancelled_at_any_step(directory, alone, gate, steps, chat):
    """The prompt takes four steps. Another request goes on, and is answered as it is alone."""
    messages = [{"role": "user", "content": PROMPTS[2]}]
    length = len(alone.chat_template.encode(messages) if chat else alone.tokenizer.encode(PROMPTS[2]))
    assert length > 3 * 48

    async def main(llm):
        gate.shut()
        other = asyncio.create_task(last(llm.generate("wind", greedily(100))))
        victim = asyncio.create_task(last(llm.chat(messages) if chat else llm.generate(PROMPTS[2])))
        await gate.arrived()
        while not find(gate, length):
            await gate.let(1)
            await asyncio.sleep(0.002)  # the template is rendered in another thread
        await gate.let(steps)
        assert find(gate, length)
        victim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await victim
        stats = asyncio.create_task(llm.stats())
        await asyncio.sleep(0)
        await gate.let(1)  # the step in flight; then it is gone
        assert not find(gate, length) and (await stats)["num_requests_running"] == 1
        gate.reopen()
        tokens = (await other).token_ids
        await assert_empty(llm)
        gate.llm()._cache.check([])
        return tokens

    assert run(main, directory, max_queue=2) == alone.generate("wind", greedily(100))[0].token_ids


async def by_aclose(generator):
    await anext(generator)
    await generator.aclose()


async def by_leaving(generator):
    async for _ in generator:
        break  # with the caller's reference goes the generator


async def by_raising(generator):
    with contextlib.suppress(KeyError):
        async with contextlib.aclosing(generator):
            async for output in generator:
                raise KeyError(output)


async def by_timeout(generator):
    await anext(generator)
    with pytest.raises(asyncio.TimeoutError):
        while await asyncio.wait_for(anext(generator), 0.2):
            pass


async def by_its_group(generator):
    await anext(generator)
    group = asyncio.gather(last(generator), asyncio.sleep(60))
    await asyncio.sleep(0)
    group.cancel()
    with pytest.raises(asyncio.CancelledError):
        await group


@pytest.mark.parametrize("close", [by_aclose, by_leaving, by_raising, by_timeout, by_its_group])
@pytest.mark.parametrize("chat", [False, True], ids=["generate", "chat"])
def test_ways_to_close(directory, gate, close, chat):
    async def main(llm):
        gate.shut()
        gate.release(2)
        await close(llm.chat(USER) if chat else llm.generate("wind"))
        for _ in range(10):  # the event loop closes a generator that was left
            await asyncio.sleep(0)
        gate.reopen()
        await assert_empty(llm)
        assert gate.steps <= 3  # the last one was in flight

    run(main, directory)


def test_closing_one_that_waits(directory, alone, gate):
    async def main(llm):
        gate.shut()
        first = asyncio.create_task(last(llm.generate("wind", greedily())))
        await gate.arrived()
        second = asyncio.create_task(last(llm.generate(PROMPTS[0], greedily())))
        stats = asyncio.create_task(llm.stats())
        await gate.let(2)
        assert ((await stats)["num_requests_running"], (await stats)["num_requests_waiting"]) == (1, 1)
        second.cancel()
        await asyncio.wait([second])
        stats = asyncio.create_task(llm.stats())
        await gate.let(2)
        assert ((await stats)["num_requests_running"], (await stats)["num_requests_waiting"]) == (1, 0)
        gate.reopen()
        return (await first).token_ids, gate.llm()._num_failed

    assert run(main, directory, max_num_seqs=1) == (alone.generate("wind", greedily())[0].token_ids, 0)


def test_closing_before_the_engine_knows(directory, gate):
    """The command waits while a step is computed, and its generator is closed meanwhile; or never started."""

    async def main(llm):
        llm.generate("never started")
        gate.shut()
        first = asyncio.create_task(last(llm.generate("wind", greedily(4))))
        await gate.arrived()
        tasks = [asyncio.create_task(last(llm.generate(prompt))) for prompt in PROMPTS]
        tasks += [asyncio.create_task(llm.stats())]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        gate.reopen()
        assert len((await first).token_ids) == 4
        await assert_empty(llm)

    run(main, directory, max_num_seqs=1)


def test_what_waits_is_bounded(directory, gate):
    async def main(llm):
        gate.shut()
        tasks = [asyncio.create_task(last(llm.generate(prompt, greedily(6)))) for prompt in PROMPTS * 5]
        await gate.arrived()
        message = r"3 requests are in the engine, max_queue is 3: wait"
        for task in tasks[3:]:
            with pytest.raises(CapacityError, match=message):
                await task
        with pytest.raises(CapacityError, match=message):
            await anext(llm.generate("a"))
        stats = asyncio.create_task(llm.stats())  # which is never refused
        await asyncio.sleep(0)
        await gate.let(1)
        assert (await stats)["num_requests_running"] + (await stats)["num_requests_waiting"] == 3
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        another = asyncio.create_task(last(llm.generate("wind", greedily(6))))  # its place is free at once
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match=message):
            await anext(llm.generate("a"))
        gate.reopen()
        outputs = await asyncio.gather(tasks[0], tasks[2], another)
        assert [len(output.token_ids) for output in outputs] == [6, 6, 6]
        for _ in range(20):  # a place is free when the last output is read
            assert len((await last(llm.generate("wind", greedily(1)))).token_ids) == 1
            await asyncio.gather(*(last(llm.generate("wind", greedily(2))) for _ in range(3)))
        await assert_empty(llm)

    run(main, directory, max_queue=3)
    assert gate.most == 3


async def begun(llm, gate, max_tokens):
    """A generator of which one output was read, while the engine stands before its next step."""
    gate.shut()
    generator = llm.generate("wind", greedily(max_tokens))
    first = asyncio.create_task(anext(generator))
    await gate.arrived()
    await gate.let(1)
    assert len((await first).token_ids) == 1
    return generator


def test_a_slow_reader_gets_the_newest_output_and_the_last(directory, alone, gate):
    async def main(llm):
        generator = await begun(llm, gate, 40)
        await gate.let(3)
        newest = await anext(generator)
        gate.reopen()
        while (await llm.stats())["num_requests_running"]:
            pass
        await last(llm.generate("a", greedily(1)))  # what is only unread takes no place
        return newest, [output async for output in generator]

    newest, (output,) = run(main, directory, max_queue=1)
    assert len(newest.token_ids) == 4 and newest.finish_reason is None and output.finish_reason == "length"
    assert output.token_ids == alone.generate("wind", greedily(40))[0].token_ids


def test_a_loop_that_stands_still_is_sent_one_wake_up(directory, gate):
    async def main(llm):
        gate.shut()
        answer = asyncio.create_task(last(llm.generate("wind", greedily(40))))
        await gate.arrived()
        loop, calls = asyncio.get_running_loop(), []
        original = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args, **keywords: (calls.append(args), original(*args, **keywords))
        gate.reopen()
        while gate.llm().has_unfinished_requests():
            time.sleep(0.001)  # in the event loop
        assert gate.steps == 40 and len(calls) == 1
        loop.call_soon_threadsafe = original
        assert len((await answer).token_ids) == 40

    run(main, directory)


# The engine thread.


def test_only_the_engine_thread_touches_the_llm(directory, gate):
    async def main(llm):
        await asyncio.gather(*(last(llm.generate(prompt, greedily(4))) for prompt in PROMPTS), last(llm.chat(USER)))
        await by_aclose(llm.generate("wind"))
        await assert_empty(llm)

    run(main, directory)
    assert gate.callers == {"isotherm-engine"}


def test_an_idle_engine_waits_for_commands(directory, gate):
    async def main(llm):
        for _ in range(2):
            await last(llm.generate("wind", greedily(4)))
            await asyncio.sleep(0.05)
            turns = gate.turns
            await asyncio.sleep(0.1)
            assert gate.turns - turns <= 1  # a thread that asks again and again does so thousands of times

    run(main, directory)


class Broken(Exception):
    pass


@pytest.mark.parametrize("name", ["step", "abort"])
def test_an_engine_that_fails_tells_all(directory, gate, name):
    async def main(llm):
        unread = await begun(llm, gate, 3)
        gate.reopen()
        while (await llm.stats())["num_requests_running"]:
            pass  # its last output is there
        gate.shut()
        tasks = [asyncio.create_task(last(llm.generate(prompt, greedily()))) for prompt in PROMPTS]
        await gate.arrived()
        tasks += [asyncio.create_task(llm.stats())]
        await gate.let(2)
        gate.failures[name] = failure = Broken("out of order")
        abandoned = llm.generate("wind")
        waits = asyncio.create_task(anext(abandoned))
        if name == "abort":
            tasks.pop(0).cancel()
        await asyncio.sleep(0)
        gate.reopen()
        with pytest.raises(Broken) as caught:
            await waits
        assert caught.value is failure
        for result in await asyncio.gather(*tasks[:-1], return_exceptions=True):
            assert result is failure
        stats = await tasks[-1]
        assert stats["num_requests_running"] + stats["num_requests_waiting"] == len(PROMPTS)
        assert [len(output.token_ids) async for output in unread] == [3]
        for call in (lambda: anext(llm.generate("a")), lambda: anext(llm.chat(USER)), llm.stats):
            with pytest.raises(RuntimeError, match="no engine thread: out of order") as caught:
                await call()
            assert caught.value.__cause__ is failure
        await llm.close()
        assert not llm._engine.thread.is_alive()
        with pytest.raises(RuntimeError, match="was closed"):
            await llm.stats()

    run(main, directory, max_num_seqs=3)


def test_closing_the_engine(directory, gate):
    async def main():
        llm = load(directory)
        unread = llm.generate("wind", greedily(2))
        outputs = [llm.generate(prompt, greedily(400)) for prompt in PROMPTS]
        gate.shut()
        readers = [asyncio.create_task(last(generator)) for generator in (*outputs[1:], unread)]
        first = asyncio.create_task(anext(outputs[0]))
        await gate.arrived()
        for _ in range(12):
            await gate.let(1)
        assert not (await first).finish_reason and len((await readers.pop()).token_ids) == 2
        closing = [asyncio.create_task(llm.close()) for _ in range(2)]
        while llm._engine.commands.qsize() != 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in closing)  # a step is in flight
        gate.reopen()
        await asyncio.gather(*closing)
        for result in await asyncio.gather(*readers, return_exceptions=True):
            assert type(result) is RuntimeError and str(result) == "the AsyncLLM was closed"
            result.__traceback__ = None
        await llm.close()
        for call in (lambda: anext(llm.generate("a")), lambda: anext(llm.chat(USER)), llm.stats):
            with pytest.raises(RuntimeError, match="no engine thread: the AsyncLLM was closed"):
                await call()
        # outputs[0] was not read to its end, and what it will raise must not hold the model.
        gc.collect()
        assert not llm._engine.thread.is_alive() and gate.llm() is None
        with pytest.raises(RuntimeError, match="was closed"):
            await anext(outputs[0])

    asyncio.run(main())


def test_errors_do_not_hold_the_model(directory, gate):
    async def main():
        async with load(directory) as llm:
            with pytest.raises(RequestError):
                await anext(llm.generate([]))
            with contextlib.suppress(RequestError):
                await anext(llm.generate([]))

    gc.collect()
    gc.disable()  # what is left goes with its last reference
    try:
        asyncio.run(main())
        assert gate.llm() is None
    finally:
        gc.enable()


def test_one_that_nobody_holds_ends(directory, gate):
    async def main():
        llm = load(directory)
        await by_aclose(llm.generate("wind"))
        thread = llm._engine.thread
        assert thread.is_alive()
        del llm
        for _ in range(3):  # the event loop's own references to the generator
            await asyncio.sleep(0)
            gc.collect()
        assert not thread.is_alive() and gate.llm() is None

    asyncio.run(main())


# Event loops, threads, processes.


def test_loops_that_are_closed(directory, gate):
    """A request of a loop that went without closing its generators leaves the engine; other loops go on."""
    llm = load(directory)
    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(begun(llm, gate, 400))
    gate.release(2)  # between two runs of the loop the answer grows
    loop.run_until_complete(gate.arrived())
    loop.close()
    gate.reopen()

    async def go_on():
        async with llm:
            assert len((await last(llm.generate("wind", greedily(5)))).token_ids) == 5
            while (await llm.stats())["num_requests_running"]:
                pass
            await assert_empty(llm)
        assert gate.steps <= 12, kept

    asyncio.run(go_on())


def in_threads(number, target, *args):
    """target(i, *args) in so many threads, switching as often as the interpreter can; raises what they raise."""
    errors = []

    def guarded(i):
        try:
            target(i, *args)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(number)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("caching", [False, True])
def test_no_token_of_one_request_reaches_another(directory, alone, gate, caching):
    """Four loops in four threads, places in the batch that are taken again and again, answers left at any token: every
    output is the beginning of what its prompt is answered alone. Then nothing is held."""
    names = [f"{name} {i}" for name in ("cat", "wind", "mouse") for i in range(4)]
    expected = {name: alone.generate(name, greedily(30))[0] for name in names}
    assert len({tuple(output.token_ids) for output in expected.values()}) > len(names) // 2
    llm = load(directory, max_num_seqs=4, max_queue=10, enable_prefix_caching=caching)
    counts = {"ended": 0, "left": 0, "refused": 0, "outputs": 0}

    async def client(seed):
        rng = random.Random(seed)
        for _ in range(12):
            name, leave = rng.choice(names), rng.choice([0, 1, 5, 1000])
            params = greedily(rng.randrange(1, 30))
            try:
                async with contextlib.aclosing(llm.generate(name, params)) as outputs:
                    if leave == 0:
                        waits = asyncio.ensure_future(anext(outputs))
                        await asyncio.sleep(0)
                        waits.cancel()
                        await asyncio.wait([waits])
                        continue
                    async for output in outputs:
                        counts["outputs"] += 1
                        right = expected[name]
                        assert output.prompt_token_ids == right.prompt_token_ids
                        assert output.token_ids == right.token_ids[: len(output.token_ids)]
                        assert output.finish_reason or right.text.startswith(output.text)
                        assert len(output.token_ids) <= params.max_tokens
                        if len(output.token_ids) >= leave:
                            counts["left"] += 1
                            break
                    else:
                        assert len(output.token_ids) == params.max_tokens
                        counts["ended"] += 1
            except CapacityError:
                counts["refused"] += 1
                await llm.stats()

    async def clients(i):
        await asyncio.gather(*(client(5 * i + k) for k in range(5)))

    in_threads(4, lambda i: asyncio.run(clients(i)))
    assert min(counts.values()) > 0 and gate.most <= 10, counts

    async def end():
        async with llm:
            stats = await llm.stats()
            assert stats["num_requests_running"] == stats["num_requests_waiting"] == stats["num_requests_failed"] == 0
            assert not llm._engine.readers and not llm._engine.requests
            assert caching or stats["kv_cache_usage"] == 0
            gate.llm()._cache.check([])

    asyncio.run(end())


class Counting:
    """As much of LLM as AsyncLLM uses: its answers are numbers from 0 on, without a model."""

    def __init__(self, model, **settings):
        self.live, self.added, self.ended, self.most = {}, 0, 0, 0

    def add_request(self, prompt, params, end_ids):
        if params is None:
            raise RequestError("no params")
        self.added += 1
        self.live[self.added] = [prompt, 0, params.max_tokens]
        self.most = max(self.most, len(self.live))
        return self.added

    def step(self):
        outputs = []
        for i, request in list(self.live.items()):
            request[1] += 1
            prompt, count, most = request
            reason = "length" if count == most else None
            outputs.append(RequestOutput(prompt, [*range(count)], "", reason, None, 0, {}, i))
            if reason:
                self.abort(i)
        return outputs

    def abort(self, request_id):
        self.ended += self.live.pop(request_id, None) is not None

    def has_unfinished_requests(self):
        return bool(self.live)

    def stats(self):
        return {"added": self.added, "live": len(self.live), "ended": self.ended, "most": self.most}


def test_many_clients_in_many_threads(monkeypatch):
    """Without a model, to be as quick as the queues and locks are: eight loops in eight threads."""
    monkeypatch.setattr(engine.async_llm, "LLM", Counting)
    llm = AsyncLLM("", max_queue=20)
    counts = dict.fromkeys(["ended", "left", "cancelled", "refused", "wrong"], 0)

    async def client(seed):
        rng = random.Random(seed)
        for number in range(150):
            params, leave, seen = SamplingParams(max_tokens=rng.randrange(1, 40)), rng.choice([0, 1, 3, 100]), 0
            if rng.random() < 0.05:
                with pytest.raises((RequestError, CapacityError)):
                    await anext(llm.generate([seed, number], None))
                counts["wrong"] += 1
            try:
                async with contextlib.aclosing(llm.generate([seed, number], params)) as outputs:
                    if not leave:
                        waits = asyncio.ensure_future(anext(outputs))
                        for _ in range(rng.randrange(3)):
                            await asyncio.sleep(0)
                        waits.cancel()
                        with contextlib.suppress(asyncio.CancelledError):
                            await waits
                        counts["cancelled"] += 1
                        continue
                    async for output in outputs:
                        assert output.prompt_token_ids == [seed, number] and len(output.token_ids) > seen
                        seen = len(output.token_ids)
                        if seen >= leave:
                            counts["left"] += 1
                            break
                    else:
                        assert seen == params.max_tokens
                        counts["ended"] += 1
            except CapacityError:
                counts["refused"] += 1
                await llm.stats()

    async def clients(i):
        await asyncio.gather(*(client(8 * i + k) for k in range(8)))

    in_threads(8, lambda i: asyncio.run(clients(i)))
    assert min(counts.values()) > 20, counts

    async def end():
        async with llm:
            stats = await llm.stats()
            assert (stats["live"], stats["ended"]) == (0, stats["added"]) and stats["most"] == 20
            assert not llm._engine.readers and not llm._engine.requests and llm._engine.commands.empty()

    asyncio.run(end())


def test_engines_that_are_opened_and_closed_in_threads(directory, alone):
    """Each with answers that grow while it is closed: whoever reads gets the answer or the error, nobody waits."""
    right = alone.generate("wind", greedily(20))[0].token_ids

    async def main(seed):
        rng = random.Random(seed)
        for _ in range(4):
            llm = load(directory)
            tasks = [asyncio.create_task(last(llm.generate("wind", greedily(20)))) for _ in range(6)]
            await asyncio.sleep(rng.choice([0, 0.005, 0.02]))
            await llm.close()
            for result in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60):
                if not isinstance(result, RuntimeError):
                    assert result.token_ids == right

    before = threading.enumerate()
    in_threads(2, lambda i: asyncio.run(main(i)))
    assert threading.enumerate() == before


PROGRAM = """
import asyncio, os, sys
from engine import AsyncLLM, SamplingParams

async def main():
    llm = await asyncio.to_thread(AsyncLLM, sys.argv[1], threads=1)
    outputs = llm.generate("wind", SamplingParams(max_tokens=400, ignore_eos=True))
    await anext(outputs)
    {body}

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@contextlib.contextmanager
def running(directory, code):
    """A Python process, which is ended with the block, its forks as well."""
    command = [sys.executable, "-W", "ignore", "-c", code, str(directory)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, text=True, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_program_that_closes_nothing_ends(directory):
    with running(directory, PROGRAM.format(body="globals().update(kept=(llm, outputs)); print('end')")) as process:
        out, err = process.communicate(timeout=120)
    assert (out, err, process.returncode) == ("end\n", "", 0)


def test_ctrl_c_ends_a_program(directory):
    body = "globals().update(kept=llm)\n    print('ready', flush=True)\n    async for _ in outputs: pass\n"
    body += "    await asyncio.sleep(1000)"
    with running(directory, PROGRAM.format(body=body)) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (out, err, process.returncode) == ("interrupted\n", "", 0)


def test_a_fork_has_no_engine(directory):
    code = """
import asyncio, os, sys
from engine import AsyncLLM, SamplingParams

async def answer():
    return [output async for output in llm.generate("wind", SamplingParams(max_tokens=9, ignore_eos=True))][-1]

async def without_engine():
    for call in (llm.stats, answer):
        try:
            await call()
        except RuntimeError as error:
            print(error, flush=True)
    await llm.close()

llm = AsyncLLM(sys.argv[1], threads=1)
asyncio.run(answer())
if os.fork() == 0:
    asyncio.run(without_engine())
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.wait()[1]), len(asyncio.run(answer()).token_ids))
"""
    with running(directory, code) as process:
        out, err = process.communicate(timeout=120)
    assert (out, err) == ("no engine thread: it did not follow a fork\n" * 2 + "7 9\n", "")
    assert process.returncode == 0


def test_the_package_imports_no_asyncio():
    code = "import sys, engine; print({'asyncio', 'torch'} & set(sys.modules), 'AsyncLLM' in engine.__all__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "set() True\n", done.stderr
