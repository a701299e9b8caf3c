"""Facts in a long context, asked for at its end: does the compressed cache still find what the full one finds?

    sentence   text ... The secret number of Oakvale is 7481. ... text ... The secret number of Oakvale is
               One fact; the greedy answer is generated, and is right if it contains the number.
    lines      text ... key Oakvale: 7481 ... text ... key Norwick: 2209 ... text ... key Norwick: 2209
               Some 20 lines, as many at each depth, then all of them again in another order; one pass, in which an
               answer is right if each of its tokens is the most probable one after those before it.

Both go on with a pattern, because a model of 135M parameters answers no question about 4096 tokens: formats that it
fails with a full cache (keys that are numbers, more than some 20 lines, repeated answers) would measure nothing.
"""

from __future__ import annotations

import random
from typing import Any

from engine import LLM, RequestError, SamplingParams
from engine.progress import Progress

TOWNS = (
    "Oakvale", "Norwick", "Brindle", "Farholm", "Estmere", "Quillby", "Dunmore", "Ashford", "Larkhill", "Wexley",
    "Tarrow", "Myrefield", "Ottersby", "Penhallow", "Rusham", "Stonely", "Umberton", "Vellmar", "Yarwood", "Zennick",
)  # fmt: skip
ANSWER_TOKENS = 8


class _Text:
    """Tokens of texts, and of the filler from its beginning."""

    def __init__(self, llm: LLM, filler: str) -> None:
        assert llm.tokenizer is not None
        self._tokenizer = llm.tokenizer
        self.bos = [] if llm.tokenizer.bos_id is None else [llm.tokenizer.bos_id]
        self._filler = self.encode(filler)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)[len(self.bos) :]

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    def filled(
        self, facts: list[tuple[float, list[int]]], end: list[int], context: int, answer_tokens: int = 0
    ) -> list[int]:
        """A prompt of `context` tokens less those of the answer: filler with facts at their depths, which ascend, and
        the end."""
        room = context - len(self.bos) - len(end) - sum(len(ids) for _, ids in facts) - answer_tokens
        if not 0 < room <= len(self._filler):
            raise RequestError(
                f"--context {context}: {context - room} tokens of facts, questions and answers leave {room} for the "
                f"text, which has {len(self._filler)}"
            )
        prompt, begin = list(self.bos), 0
        for depth, ids in facts:
            prompt += self._filler[begin : int(room * depth)] + ids
            begin = int(room * depth)
        return prompt + self._filler[begin:room] + end


def rows(
    base: LLM,
    settings: list[dict[str, Any]],
    filler: str,
    contexts: list[int],
    depths: list[float],
    kind: str,
    seed: int,
) -> list[dict[str, Any]]:
    """A row for each kind, context and setting: how many answers are right with each cache, and how many are the
    same."""
    depths = sorted(set(depths))
    text = _Text(base, filler)
    llms = [base, *(base.twin(**changes) for changes in settings)]
    found = []
    kinds = ("sentence", "lines") if kind == "both" else (kind,)
    total = sum(context for _ in kinds for context in contexts)
    with Progress(total=total, desc="Asking", unit="token", shown=True) as bar:
        for name in kinds:
            for context in contexts:
                ask = _sentences if name == "sentence" else _lines
                wanted, answers = ask(llms, text, context, depths, random.Random(seed))
                for changes, tiered in zip(settings, answers[1:], strict=True):
                    found.append(_row(name, context, changes, wanted, answers[0], tiered))
                bar.update(context)
    return found


def _row(
    kind: str,
    context: int,
    changes: dict[str, Any],
    wanted: list[tuple[float, str]],
    full: list[tuple[bool, str]],
    tiered: list[tuple[bool, str]],
) -> dict[str, Any]:
    count = len(wanted)
    return {
        "kind": kind,
        "context": context,
        "kv_budget": changes["kv_budget"],
        "questions": count,
        "full_accuracy": sum(right for right, _ in full) / count,
        "tiered_accuracy": sum(right for right, _ in tiered) / count,
        "agreement": sum(a == b for a, b in zip(full, tiered, strict=True)) / count,
        "answers": [
            {"depth": depth, "wanted": answer, "full": a[1], "tiered": b[1]}
            for (depth, answer), a, b in zip(wanted, full, tiered, strict=True)
        ],
    }


def _sentences(
    llms: list[LLM], text: _Text, context: int, depths: list[float], rng: random.Random
) -> tuple[list[tuple[float, str]], list[list[tuple[bool, str]]]]:
    """(depth and answer) of each question, and for each LLM (right, answer)."""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0)
    wanted: list[tuple[float, str]] = []
    answers: list[list[tuple[bool, str]]] = [[] for _ in llms]
    for i, depth in enumerate(depths):
        town, number = TOWNS[i % len(TOWNS)], str(rng.randrange(1000, 10_000))
        beginning = f"\n\nThe secret number of {town} is"
        fact = text.encode(f"{beginning} {number}.\n\n")
        prompt = text.filled([(depth, fact)], text.encode(beginning), context, ANSWER_TOKENS)
        wanted.append((depth, number))
        for llm, given in zip(llms, answers, strict=True):
            answer = llm.generate([prompt], params, use_tqdm=False)[0].text
            given.append((number in answer, answer))
    return wanted, answers


def _lines(
    llms: list[LLM], text: _Text, context: int, depths: list[float], rng: random.Random
) -> tuple[list[tuple[float, str]], list[list[tuple[bool, str]]]]:
    """As `_sentences`."""
    each = max(1, len(TOWNS) // len(depths))
    numbers = rng.sample(range(1000, 10_000), each * len(depths))
    lines = [(town, number) for town, number in zip(TOWNS, numbers, strict=False)]
    asked = [(depths[i // each], town, number) for i, (town, number) in enumerate(lines)]
    facts = []
    for depth in depths:
        parts = [_line(text, town, number) for at, town, number in asked if at == depth]
        facts.append((depth, [token for key, answer in parts for token in key + answer]))
    rng.shuffle(asked)
    end: list[int] = text.encode("\n")
    spans = []  # of the answers, in `end`
    for _, town, number in asked:
        key, answer = _line(text, town, number)
        spans.append((len(end) + len(key), len(end) + len(key) + len(answer)))
        end += key + answer
    prompt = text.filled(facts, end, context)
    start = context - len(end)
    answers = []
    for llm in llms:
        # The token at i is predicted by the logits of the one before it.
        guessed = [0] + [token for logits in llm.logits(prompt) for token in logits.argmax(-1).tolist()]
        given = [(guessed[start + a : start + b], prompt[start + a : start + b]) for a, b in spans]
        answers.append([(guess == right, text.decode(guess)) for guess, right in given])
    return [(depth, str(number)) for depth, _, number in asked], answers


def _line(text: _Text, town: str, number: int) -> tuple[list[int], list[int]]:
    """(key, answer), as separate tokens."""
    return text.encode(f"\nkey {town}:"), text.encode(f" {number}")
