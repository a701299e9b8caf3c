"""Greedy summaries of long documents with the full and with the compressed cache, compared by ROUGE-L.

Two summaries that differ in a word go separate ways from there, and a rounding is enough for that: the full cache is
asked a second time, in chunks of half the size, and what its two summaries have in common is as much as the tiered one
can be expected to have. ROUGE beside the reference says how good the model is.
"""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

from engine import LLM, RequestError, RequestOutput, SamplingParams
from engine.progress import Progress
from tools.evaluate_quality import rounded_otherwise


def read_documents(path: str, count: int) -> list[dict[str, str]]:
    """The first `count` of the JSON lines in a file or a directory: {id, text, question, reference}.

    Raises RequestError for what cannot be read, or is not of the form {transcript, queries: [{query, answer}]}.
    """
    place = Path(path)
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    documents: list[dict[str, str]] = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise RequestError(f"{file}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise RequestError(f"{file}: not UTF-8 text: byte {error.start}") from None
        documents += [_document(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not documents:
        raise RequestError(f"{path}: no documents: a .jsonl file with lines is wanted")
    return documents[:count]


def _document(line: str, where: str) -> dict[str, str]:
    try:
        entry = json.loads(line)
        query = entry["queries"][0]
        texts = {"text": entry["transcript"], "question": query["query"], "reference": query["answer"]}
        if not all(isinstance(text, str) for text in texts.values()):
            raise TypeError
    except (ValueError, LookupError, TypeError):
        raise RequestError(f'{where}: wanted {{"transcript", "queries": [{{"query", "answer"}}]}}') from None
    return {"id": str(entry.get("id", where)), **texts}


def report(
    base: LLM, settings: dict[str, Any], documents: list[dict[str, str]], context: int, max_tokens: int
) -> dict[str, Any]:
    """A row for each document, and their means; rouge_full_full is of the full cache's two summaries. Documents are cut
    to what `context` holds beside the answer."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=True)

    def rouge(reference: str, text: str) -> float:
        return float(scorer.score(reference, text)["rougeL"].fmeasure)

    twin, other = base.twin(**settings), rounded_otherwise(base)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    rows = []
    for document in Progress(documents, desc="Summarising", unit="document", shown=True):
        prompt, kept = prompt_for(base, document, context - max_tokens)
        full, _ = _answer(base, prompt, params)
        again, _ = _answer(other, prompt, params)
        before = twin._cache.reads.counts["read"]
        tiered, ratio = _answer(twin, prompt, params)
        pairs = zip(full.token_ids, tiered.token_ids, strict=False)
        rows.append(
            {
                "document": document["id"],
                "prompt_tokens": len(prompt),
                "document_kept": kept,
                "rouge_tiered_full": rouge(full.text, tiered.text),
                "rouge_full_full": rouge(full.text, again.text),
                "rouge_full_reference": rouge(document["reference"], full.text),
                "rouge_tiered_reference": rouge(document["reference"], tiered.text),
                "same_tokens": sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)),
                "tokens": len(tiered.token_ids),
                "resident_ratio": ratio,
                "cold_reads": twin._cache.reads.counts["read"] - before,  # tokens, of each KV head in each layer
                "full_text": full.text,
                "tiered_text": tiered.text,
            }
        )
    names = ("rouge_tiered_full", "rouge_full_full", "rouge_full_reference", "rouge_tiered_reference")
    means = {name: sum(row[name] for row in rows) / len(rows) for name in names}
    return {"settings": settings, "max_tokens": max_tokens, **means, "rows": rows}


def prompt_for(llm: LLM, document: dict[str, str], longest: int) -> tuple[list[int], float]:
    """The prompt of at most `longest` tokens through the chat template, and the share of the document that is in it."""

    def encode(text: str) -> list[int]:
        content = f"{text}\n\n{document['question']}"
        return llm.chat_template.encode([{"role": "user", "content": content}])

    text = document["text"]
    prompt = encode(text)
    while len(prompt) > longest:
        if not text:
            raise RequestError(f"{len(prompt)} tokens of question and template do not fit in {longest}")
        # A little less than its share, so that few rounds are needed.
        text = text[: int(len(text) * min(longest / len(prompt), 0.995))]
        prompt = encode(text)
    return prompt, len(text) / max(len(document["text"]), 1)


def _answer(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[RequestOutput, float]:
    """The answer, and the largest resident ratio of the steps that generate it."""
    cache = llm._cache
    ratio = 0.0
    output = None
    for output in llm.stream_chat(prompt, params):
        for request in llm._scheduler.running:
            if output.token_ids:
                ratio = max(ratio, cache.resident_bytes / (request.sequence.length * cache.config.token_bytes))
    assert output is not None
    return output, ratio
