"""Many requests, one engine: a dialogue turn by turn, and a batch beside the same work one by one."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from engine import LLM, ConfigError, RequestOutput, SamplingParams

# A dialogue about a text that every Python brings along, an essay on heaps.
_TEXT = heapq.__about__[:1500]
_QUESTIONS = ("What is {}?", "Why does {} matter here?", "Give an example of {}.", "Who needs {}?", "Explain {} again.")
_SUBJECTS = ("a heap", "sorting", "a priority queue", "a tournament", "the cell 0", "memory", "a disk", "a tape",
             "a simulation", "a tree", "the invariant", "an array", "a scheduler")  # fmt: skip
_SETTLED = 5  # turns after which resident bytes are compared


def chat(llm: LLM, turns: int, max_tokens: int, repeats: int, seed: int) -> dict[str, Any]:
    """A dialogue whose every turn is asked of two engines in turn, one that keeps prefixes and one that does not.

    The answers, and so the history, are the first one's. Times are from the call to the first token, templates and
    tokenizer included; that of the first turn is the median of so many new dialogues, interleaved like all turns.
    new_tokens: tokens of the prompt behind the longest beginning that it has in common with what earlier turns left.
    """
    kept, uncached = llm.twin(enable_prefix_caching=True), llm.twin(enable_prefix_caching=False)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    script = _script(seed)
    for engine in (kept, uncached):  # what is slow once in a process: not a matter of prefixes
        _first_token(engine, [{"role": "user", "content": "Hello"}], params)
    messages: list[dict[str, str]] = []
    rows: list[dict[str, Any]] = []
    left: list[int] = []
    for turn in range(1, turns + 1):
        messages.append({"role": "user", "content": next(script)})
        times: dict[LLM, list[tuple[float, float]]] = {kept: [], uncached: []}
        for repeat in range(repeats if turn == 1 else 1):
            if turn == 1:
                kept._cache.forget()
            # In turns, so that neither always follows the other.
            for engine in (kept, uncached) if (turn + repeat) % 2 else (uncached, kept):
                taken, output = _first_token(engine, messages, params, answer=engine is kept)
                times[engine].append(taken)
                if engine is kept:
                    answer = output
        # Milliseconds, of the wall and of the process.
        (ours, ours_cpu), (theirs, theirs_cpu) = (
            [1e3 * statistics.median(kind) for kind in zip(*times[engine], strict=True)] for engine in (kept, uncached)
        )
        if turn == 1:
            slower, slower_cpu, slower_percent = ours - theirs, ours_cpu - theirs_cpu, 100 * (ours / theirs - 1)
        prompt = answer.prompt_token_ids
        rows.append({
            "turn": turn,
            "prompt_tokens": len(prompt),
            "prefilled_tokens": len(prompt) - answer.num_cached_tokens,
            "new_tokens": len(prompt) - _common(prompt[:-1], left),
            "ttft_ms": round(ours, 1),
            "ttft_uncached_ms": round(theirs, 1),
            "resident_bytes": kept.stats()["kv_resident_bytes"],
        })  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
        left = prompt + answer.token_ids[:-1]
        messages.append({"role": "assistant", "content": answer.text})
    settled = [row["resident_bytes"] for row in rows[_SETTLED - 1 :]]
    return {
        "first_turn_slower_ms": round(slower, 1),
        "first_turn_slower_percent": round(slower_percent, 1),
        "first_turn_slower_cpu_ms": round(slower_cpu, 1),  # whatever else the machine does
        "last_turn_times_faster": round(theirs / ours, 2),
        # Largest / smallest from turn 5 on; None in a shorter dialogue.
        "resident_swing": round(max(settled) / min(settled), 3) if settled else None,
        "capacity_bytes": kept.stats()["kv_capacity_bytes"],
        "rows": rows,
    }


def _script(seed: int) -> Iterator[str]:
    """What the user says, without end: the text and a question, then questions."""
    every = [question.format(subject) for question in _QUESTIONS for subject in _SUBJECTS]
    random.Random(seed).shuffle(every)
    every[0] = f"{_TEXT}\n\n{every[0]}"
    return itertools.chain(every, itertools.cycle(every[1:]))


def _first_token(
    llm: LLM, messages: list[dict[str, str]], params: SamplingParams, answer: bool = False
) -> tuple[tuple[float, float], RequestOutput]:
    """Seconds (wall, CPU) to the first token, and what there is of the answer by then, or all of it."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    outputs = llm.stream_chat(messages, params)
    output = next(output for output in outputs if output.token_ids or output.finish_reason)
    taken = time.perf_counter() - begin, time.process_time() - begin_cpu
    for later in outputs if answer else ():
        output = later
    outputs.close()
    return taken, output


def _common(a: list[int], b: list[int]) -> int:
    """How many tokens they begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def offline(llm: LLM, batch: int, requests: int, repeats: int, seed: int) -> dict[str, Any]:
    """Tokens a second of answers, of a mix of requests that run together, `batch` at most, and one after another.

    Wall time from the first prompt to the last answer, prompts included; medians of interleaved runs. Both are one
    engine that keeps no prefixes. Prompts of 16 to 256 random tokens, answers of 16 to 128, log-uniform; less where
    the model's context is short.
    """
    llm = llm.twin(enable_prefix_caching=False, max_num_seqs=batch)
    draw = random.Random(seed)
    vocabulary = range(llm.vocab_size // 4, llm.vocab_size)  # past the control and byte tokens
    longest = llm.max_model_len // 4
    work = [
        (draw.choices(vocabulary, k=_length(draw, 16, min(256, longest))), _length(draw, 16, min(128, longest)))
        for _ in range(requests)
    ]
    runs = []
    for _ in range(repeats):
        runs.append([*_seconds(llm, [work]), *_seconds(llm, [[one] for one in work])])
        print("together {:.2f} s ({:.2f} s CPU), one by one {:.2f} s ({:.2f} s CPU)".format(*runs[-1]), file=sys.stderr)
    together, together_cpu, alone, alone_cpu = map(statistics.median, zip(*runs, strict=True))
    answers = sum(length for _, length in work)
    return {
        "batch": batch,
        "requests": requests,
        "prompt_tokens": sum(len(prompt) for prompt, _ in work),
        "answer_tokens": answers,
        "tokens_per_s": round(answers / together, 2),
        "one_by_one_tokens_per_s": round(answers / alone, 2),
        "ratio": round(alone / together, 3),
        "cpu_ratio": round(alone_cpu / together_cpu, 3),  # of the process's CPU times, whatever else the machine does
        "spread": round((max(run[0] for run in runs) - min(run[0] for run in runs)) / together, 3),
        "preemptions": llm.stats()["num_preemptions"],
    }


def _length(draw: random.Random, least: int, most: int) -> int:
    return int(least * (most / least) ** draw.random())


def _seconds(llm: LLM, groups: list[list[tuple[list[int], int]]]) -> tuple[float, float]:
    """Wall and CPU time to answer all of a group together, group after group."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for group in groups:
        for prompt, length in group:
            llm.add_request(prompt, SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True))
        while llm.has_unfinished_requests():
            for output in llm.step():
                if output.finish_reason == "error":
                    raise ConfigError("a request failed: the model computes logits that are no numbers")
    return time.perf_counter() - begin, time.process_time() - begin_cpu
