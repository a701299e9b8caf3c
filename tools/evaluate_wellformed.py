"""Whether code written behind a long prompt still parses when the cache is tight.

    prompt       | solved tasks ................. | task |  answer, greedy
    full         | exact                                 |
    score, ...   | 8, 4, 3, 2 bits by importance         |     at most the bytes of `kv_budget`
    dropped                              | exact         |     the prompt cut to its newest tokens, as the engine
                                                               drops none: as many as have 16 bits an element in the
                                                               same bytes when the answer ends

An answer ends where a line begins at the margin: the function is over then, and all of it has to parse (`ast.parse`).
One that is cut by `max_tokens` is judged by its whole lines, of which the end may be missing: an open bracket there is
no failure, anything else is.
"""

from __future__ import annotations

import ast
import codeop
import gzip
import json
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine import LLM, RequestOutput, SamplingParams
from engine.errors import RequestError
from engine.progress import Progress

# Where a line begins at the margin; `stop` takes 16 at most.
_STOPS = (
    "\ndef ", "\nclass ", "\nif ", "\nfor ", "\nwhile ", "\nprint", "\nassert", "\n@", "\nfrom ", "\nimport ", "\n#",
    '\n"""', "\n'''", "\ntry", "\n```", "\nwith ",
)  # fmt: skip
_TOGETHER = 8  # requests at once


def read_tasks(data: str, wanted: int) -> list[dict[str, str]]:
    """HumanEval's tasks, from a directory with HumanEval.jsonl.gz or the file. Raises RequestError."""
    path = Path(data) / "HumanEval.jsonl.gz" if Path(data).is_dir() else Path(data)
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            tasks = [json.loads(line) for line in lines]
            for task in tasks:
                task["prompt"], task["canonical_solution"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"--data {path}: not HumanEval's tasks: {error}") from None
    if len(tasks) < 2 * wanted:
        raise RequestError(f"--samples {wanted}: {path} has {len(tasks)} tasks, of which half are to be shown solved")
    return tasks


def prompts(llm: LLM, tasks: Sequence[dict[str, str]], samples: int, header_tokens: int) -> list[list[int]]:
    """The first tasks, each behind the same header of solved ones from the end of the list: token ids."""
    assert llm.tokenizer is not None
    header, length = "", 0
    for task in reversed(tasks[samples:]):
        if length >= header_tokens:
            break
        header = f"{task['prompt']}{task['canonical_solution']}\n\n{header}"
        length = len(llm.tokenizer.encode(header))
    if length < header_tokens:
        raise RequestError(f"--header {header_tokens}: the other tasks have {length} tokens together")
    return [llm.tokenizer.encode(header + _asked(task)) for task in tasks[:samples]]


def _asked(task: dict[str, str]) -> str:
    """The prompt of a task without the newline at its end: tokens hold it together with the spaces behind it, and a
    model that reads it alone ends the function there."""
    return task["prompt"].rstrip("\n")


def is_wellformed(prompt: str, completion: str, cut: bool) -> bool:
    """Whether the function parses; of one that was cut, whether its whole lines can be continued to one that does."""
    lines = (prompt + completion).splitlines(keepends=True)
    source = "".join(lines[:-1] if cut else lines)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what the text does, as invalid escapes
            ast.parse(source)
        return True
    except SyntaxError:
        return cut and _can_go_on(source)
    except (ValueError, RecursionError, MemoryError):  # null bytes; too deep for the parser
        return False


def _can_go_on(source: str) -> bool:
    """Whether nothing but an end is missing."""
    try:
        return codeop.compile_command(source, symbol="exec") is None
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return False


def rows(
    base: LLM, settings: list[dict[str, Any]], tasks: Sequence[dict[str, str]], samples: int, header: int,
    max_tokens: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for the full cache, each of the settings, and the prompt cut to the bytes of their kv_budget."""
    asked = prompts(base, tasks, samples, header)
    exact = base.twin(max_num_seqs=_TOGETHER)  # shares the header, which changes nothing where all is exact
    token_bytes = exact._cache.config.token_bytes
    narrow = exact._cache.config.itemsize // 2  # how much smaller elements of 16 bits are
    budget = settings[0]["kv_budget"] * narrow
    bos = [] if base.tokenizer is None or base.tokenizer.bos_id is None else [base.tokenizer.bos_id]
    dropped = []
    for tokens in asked:
        kept = int(budget * (len(tokens) + max_tokens)) - max_tokens - len(bos)
        if kept < 1:
            raise RequestError(
                f"--max-tokens {max_tokens}: nothing of a prompt of {len(tokens)} tokens is left beside them at "
                f"{budget:g} of them; use a longer --header"
            )
        dropped.append(tokens if kept + len(bos) >= len(tokens) else bos + tokens[-kept:])
    runs = [("full cache", exact, asked, token_bytes)]
    runs.append(("dropped: newest tokens, 16 bits", exact, dropped, token_bytes * narrow))
    for changes in settings:  # a header that several share would cost each of them less
        llm = base.twin(max_num_seqs=_TOGETHER, enable_prefix_caching=False, **changes)
        runs.append((f"importance {changes['importance']}", llm, asked, token_bytes))
    found = []
    with Progress(total=len(runs) * samples, desc="Completing", shown=True) as bar:
        for name, llm, given, full_bytes in runs:
            outputs: list[RequestOutput] = []
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=_STOPS)
            for first in range(0, samples, _TOGETHER):
                outputs += llm.generate(given[first : first + _TOGETHER], params, use_tqdm=False)
                bar.update(len(outputs) - first)
            found.append(row := _row(name, outputs, tasks, asked, full_bytes))
            said = f"{name}: {row['failures']} of {samples} do not parse, {row['empty']} are empty"
            print(said, file=sys.stderr)  # the next one takes minutes
    return found


def _row(
    name: str, outputs: list[RequestOutput], tasks: Sequence[dict[str, str]], asked: list[list[int]], token_bytes: int
) -> dict[str, Any]:
    ratios, failed = [], []
    for output, task, prompt in zip(outputs, tasks, asked, strict=False):
        # The answer's last token is never computed.
        ratios.append(output.cache_report["resident_bytes"] / ((len(prompt) + len(output.token_ids) - 1) * token_bytes))
        if not is_wellformed(_asked(task), output.text, output.finish_reason == "length"):
            failed.append(task["task_id"])
    rate = len(failed) / len(outputs)
    return {
        "setting": name,
        "resident_ratio": sum(ratios) / len(ratios),
        "completions": len(outputs),
        "failures": len(failed),
        "rate": rate,
        "se": math.sqrt(rate * (1 - rate) / len(outputs)),
        "empty": sum(not output.text.strip() for output in outputs),  # these parse, and say nothing
        "cut": sum(output.finish_reason == "length" for output in outputs),
        "failed": failed,
        "texts": [output.text for output in outputs],
    }
