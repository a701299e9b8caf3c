"""Speed of the whole engine, beside Transformers on the same checkpoint in the same run."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import LLM, ConfigError, SamplingParams
from models.resolve import resolve

# Tokens of one timed run of decode. Both sides go on from run to run, so that no run computes a prompt.
DECODE_TOKENS = 16


class Peer:
    """A process of `bench_peer.py`; answers one request at a time and is idle in between."""

    def __init__(self, python: str, model: str, dtype: str, threads: int) -> None:
        script = Path(__file__).with_name("bench_peer.py").resolve()
        command = [python, str(script), str(resolve(model).resolve()), dtype, str(threads)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tempfile.gettempdir()
            )
        except OSError as error:
            raise ConfigError(f"--peer-python {python}: cannot be run: {error.strerror}") from None
        self.version: str = self._answer()["version"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise ConfigError(f"--peer-python: the peer ended with exit code {code}; its message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def seconds(self, **request: Any) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


class FullCache:
    """The peer of a budget where no other is named: the same weights with the full cache, in this process."""

    version = "the same engine with the full cache"

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._request: int | None = None

    def seconds(self, prefill: list[int] | None = None, decode: int = 0) -> float:
        begin = time.perf_counter()
        if prefill is not None:
            self.close()
            forever = SamplingParams(max_tokens=self._llm.max_model_len, temperature=0, ignore_eos=True)
            self._request = self._llm.add_request(prefill, forever)
            while not self._llm.step():
                pass
        for _ in range(decode):
            self._llm.step()
        return time.perf_counter() - begin

    def close(self) -> None:
        if self._request is not None:
            self._llm.abort(self._request)


def decode(
    llm: LLM, peer: Peer | FullCache | None, contexts: list[int], repeats: int, seed: int
) -> list[dict[str, Any]]:
    """Tokens a second of one sequence at each context, medians of interleaved runs."""
    rows = []
    for context in contexts:
        prompt = _prompt(llm, context, seed)
        total = DECODE_TOKENS * (repeats + 1)
        request = llm.add_request(prompt, SamplingParams(max_tokens=total + 1, temperature=0, ignore_eos=True))
        while not llm.step():
            pass
        if peer:
            peer.seconds(prefill=prompt)
        ours, theirs = _interleaved(
            lambda: _steps(llm), None if peer is None else lambda: peer.seconds(decode=DECODE_TOKENS), repeats
        )
        llm.abort(request)
        rows.append(_row(context, DECODE_TOKENS, ours, theirs))
        _say(rows[-1])
    return rows


def prefill(
    llm: LLM, peer: Peer | FullCache | None, contexts: list[int], repeats: int, seed: int
) -> list[dict[str, Any]]:
    """Prompt tokens a second up to the first token of the answer, medians of interleaved runs."""
    rows = []
    for context in contexts:
        prompt = _prompt(llm, context, seed)

        def ours_once(prompt: list[int] = prompt) -> float:
            begin = time.perf_counter()
            llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
            return time.perf_counter() - begin

        def theirs_once(prompt: list[int] = prompt) -> float:
            assert peer is not None
            return peer.seconds(prefill=prompt)

        ours, theirs = _interleaved(ours_once, theirs_once if peer else None, repeats)
        rows.append(_row(context, context, ours, theirs))
        _say(rows[-1])
    return rows


def _prompt(llm: LLM, length: int, seed: int) -> list[int]:
    vocabulary = range(llm.vocab_size // 4, llm.vocab_size)  # past the control and byte tokens
    return random.Random(seed).choices(vocabulary, k=length)


def _steps(llm: LLM) -> float:
    begin = time.perf_counter()
    for _ in range(DECODE_TOKENS):
        llm.step()
    return time.perf_counter() - begin


def _interleaved(
    ours: Callable[[], float], theirs: Callable[[], float] | None, repeats: int
) -> tuple[list[float], list[float]]:
    """Seconds of `repeats` runs of each, in turns, after one run of each that does not count."""
    pairs = [(ours(), theirs() if theirs else 0.0) for _ in range(repeats + 1)][1:]
    return [a for a, _ in pairs], [b for _, b in pairs] if theirs else []


def _row(context: int, tokens: int, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """spread: (slowest - fastest) / median of our runs; peer_spread the same of the peer's."""
    row: dict[str, Any] = {"context": context, "ours_tok_s": round(tokens / statistics.median(ours), 1)}
    row["peer_tok_s"] = round(tokens / statistics.median(theirs), 1) if theirs else None
    row["ratio"] = round(statistics.median(theirs) / statistics.median(ours), 2) if theirs else None
    row["spread"] = _spread(ours)
    row["peer_spread"] = _spread(theirs) if theirs else None
    return row


def _spread(seconds: list[float]) -> float:
    return round((max(seconds) - min(seconds)) / statistics.median(seconds), 2)


def _say(row: dict[str, Any]) -> None:
    print(row, file=sys.stderr, flush=True)
