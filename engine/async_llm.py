"""`LLM` for asyncio: one engine thread has it; event loops, of any thread, send commands and read what they give.

    event loops        | commands, a queue  |  the engine thread
    generate, chat ----+--> add, abort -----+--> takes all commands there are, waiting only while there is nothing to
    stats -------------+--> a question -----+--> compute; then advances all requests by one LLM.step; and so on
    reader <-----------+--- newest item ----+---

Invariants: only the engine thread touches the LLM. A reader is in `readers` from its command to its last item or its
abort, so that an engine that ends can tell all who wait, and at most max_queue of them are requests: the abort of one
is in the queue before its place is free, so the LLM never holds more. A reader holds one item: outputs are cumulative,
a newer one takes the place of one that was not read.

Rejected: a lock around the LLM (an abort would wait for a step, and the event loop with it); a queue of outputs for
each reader (a slow one grows without bound, or holds up the others).
"""

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from queue import SimpleQueue
from typing import Any

from engine.config import RequestOutput, SamplingParams
from engine.llm import LLM, Prompt
from engine.templates import Message
from memory.errors import CapacityError
from models.errors import require_config

Outputs = AsyncGenerator[RequestOutput, None]


class AsyncLLM(contextlib.AbstractAsyncContextManager["AsyncLLM"]):
    """A model that answers many tasks at once, its `LLM` in a thread of its own. Several may live in one process.

    Its methods may be called in several event loops, but not in a fork, which has no engine thread: they raise
    RuntimeError there. If a step fails, all who wait get its exception, and later calls raise RuntimeError.

    The thread is a daemon, as the interpreter would wait for any other before it runs what ends it. At exit, or when
    nothing holds the AsyncLLM any more, it is told to end and waited for: what remains is the step in flight.
    """

    def __init__(self, model: str | os.PathLike[str], *, max_queue: int = 256, **settings: Any) -> None:
        """Load a model, which blocks: in an event loop `await asyncio.to_thread(AsyncLLM, model)`. Settings and errors
        are those of `LLM`. max_queue: requests that may be in the engine together, waiting ones included."""
        right = type(max_queue) is int and max_queue >= 1
        require_config(right, "max_queue must be an integer from 1 on, got", max_queue)
        self._engine = _Engine(LLM(model, **settings), max_queue)
        weakref.finalize(self, self._engine.stop)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, end_ids: frozenset[int] = frozenset()
    ) -> Outputs:
        """One answer as it grows: each output has the whole text so far, the last one a finish_reason. A slow reader
        gets the newest output, not every one.

        Closing it (`aclose`, cancelling the task that reads it, letting go of it) aborts the request before the next
        step. The first `__anext__` sends the request, and raises RequestError if it can never be served, CapacityError
        if it does not fit the cache or max_queue requests are in the engine. end_ids: as for `LLM.add_request`.
        """
        with self._engine.reader(lambda llm: llm.add_request(prompt, params, end_ids=end_ids), adds=True) as reader:
            ended = False
            while not ended:
                output: RequestOutput = await reader.take()
                ended = output.finish_reason is not None
                yield output

    async def chat(self, messages: list[Message], params: SamplingParams | None = None) -> Outputs:
        """The answer to a conversation as it grows; see `generate`, and `LLM.chat` for messages and errors."""
        template = await self._ask(lambda llm: llm.chat_template)
        # Not in the engine thread, which it would hold up for a tenth of a second; it reads what nobody changes.
        prompt = await asyncio.to_thread(template.encode, messages)
        async with contextlib.aclosing(self.generate(prompt, params, end_ids=template.end_ids)) as outputs:
            async for output in outputs:
                yield output

    async def stats(self) -> dict[str, Any]:
        """`LLM.stats`, after everything that was asked or closed before."""
        return dict(await self._ask(lambda llm: llm.stats()))

    async def close(self) -> None:
        """End the engine after the step in flight and free the model; answers that still grow raise RuntimeError."""
        await asyncio.to_thread(self._engine.stop)

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _ask(self, question: Callable[[LLM], Any]) -> Any:
        with self._engine.reader(question, adds=False) as reader:
            return await reader.take()


class _Reader:
    """Who waits in an event loop, and the newest item for it that was not read."""

    def __init__(self, adds: bool) -> None:
        self.adds = adds  # a request, of which its command gives the id
        self.request_id = -1  # none yet; the engine thread's alone
        self.loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._item: Any = None

    def put(self, item: Any) -> None:
        """From the engine thread. One wake-up for each item that is read: a busy loop is not sent more and more."""
        with self._lock:
            unread, self._item = self._item, item
        if unread is None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._ready.set)

    async def take(self) -> Any:
        """The newest item, once there is one; raises it if it is an exception."""
        await self._ready.wait()
        self._ready.clear()
        with self._lock:
            item, self._item = self._item, None
        if not isinstance(item, BaseException):
            return item
        try:
            raise item
        finally:
            del item  # its traceback has this frame, and would hold the model in a cycle


class _Engine:
    """What event loops share with the engine thread. It knows no AsyncLLM, so that one can be collected."""

    def __init__(self, llm: LLM, max_queue: int) -> None:
        self.max_queue = max_queue
        self.commands: SimpleQueue[Callable[[LLM], None] | None] = SimpleQueue()
        self.lock = threading.Lock()  # for what follows
        self.readers: set[_Reader] = set()
        self.error: BaseException | None = None  # why the engine ended
        self.requests: dict[int, _Reader] = {}  # by id; the engine thread's alone
        self.thread = threading.Thread(target=self._run, args=(llm,), name="isotherm-engine", daemon=True)
        self.thread.start()

    @contextlib.contextmanager
    def reader(self, command: Callable[[LLM], Any], adds: bool) -> Iterator[_Reader]:
        """Send a command, and read what it gives; a request that is not at its end with the block is aborted."""
        reader = _Reader(adds)
        try:
            with self.lock:
                if self.error is not None or not self.thread.is_alive():
                    raise RuntimeError(f"no engine thread: {self.error or 'it did not follow a fork'}") from self.error
                n = sum(other.adds for other in self.readers)
                if adds and n >= self.max_queue:
                    raise CapacityError(f"{n} requests are in the engine, max_queue is {self.max_queue}: wait for one")
                self.readers.add(reader)
                self.commands.put(lambda llm: self._obey(llm, reader, command))
            yield reader
        finally:
            with self.lock:
                if reader in self.readers:
                    self.readers.remove(reader)
                    self.commands.put(lambda llm: self._drop(llm, reader))

    def stop(self) -> None:
        """Let the thread end after the step in flight, and wait for that."""
        self.commands.put(None)
        if self.thread is not threading.current_thread():  # which may be the one that collects garbage
            self.thread.join()
        self.error = RuntimeError("the AsyncLLM was closed")  # another's traceback holds the model

    def _run(self, llm: LLM) -> None:
        try:
            while True:
                for _ in range(max(self.commands.qsize(), not llm.has_unfinished_requests())):
                    command = self.commands.get()
                    if command is None:
                        del llm  # the traceback has this frame
                        raise RuntimeError("the AsyncLLM was closed")
                    command(llm)
                for output in llm.step():
                    reader = self.requests[output.request_id]
                    # A loop that is closed has nobody left to close the generator.
                    if output.finish_reason is not None or reader.loop.is_closed():
                        self._drop(llm, reader, output)
                    else:
                        reader.put(output)
        except BaseException as error:
            with self.lock:
                self.error = error
                for reader in self.readers:
                    reader.put(error)

    def _obey(self, llm: LLM, reader: _Reader, command: Callable[[LLM], Any]) -> None:
        try:
            answer = command(llm)
        except Exception as error:
            self._drop(llm, reader, error)
        else:
            if reader.adds:
                reader.request_id = answer
                self.requests[answer] = reader
            else:
                self._drop(llm, reader, answer)

    def _drop(self, llm: LLM, reader: _Reader, last: Any = None) -> None:
        """The end of its command and of its request, if it has one; the last item is for who has not gone."""
        llm.abort(reader.request_id)  # which does nothing if it ended
        self.requests.pop(reader.request_id, None)
        with self.lock:
            self.readers.discard(reader)
        reader.put(last)
