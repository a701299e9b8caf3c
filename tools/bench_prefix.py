"""How much of real request streams the engine computes and stores, beside what sharing could save at best.

A request's sequence is its prompt and its answer without the last token, whose K and V are never computed:

    requested   tokens of all sequences: what an engine that shares nothing computes and stores
    stored      requested - `num_cached_tokens`: what this engine computed
    ideal       of each prompt the tokens, from the first on, that some earlier request's sequence begins with too, but
                never the prompt's last token, which is computed for its logits: no token-exact cache can share more

The tokens are those of each prompt as its text is encoded, so an ideal share ends where two texts encode differently.
"""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine import LLM, ConfigError, RequestOutput, SamplingParams

SAMPLES = 10  # answers to each task of humaneval-samples
_SAMPLED_TASKS = 20  # unless --requests says otherwise; answers are what takes the time
_SHOTS = 3  # solved tasks before each task of humaneval-samples
_SAMPLE_TOKENS = 64  # of an answer: the tasks' own solutions have 59 on average (tokenizer of SmolLM2)


class Workload(NamedTuple):
    """Prompts in the order in which they arrive; `params.n` answers to each."""

    prompts: list[str]
    params: SamplingParams
    one_by_one: bool  # each is sent when the one before it was answered


def gsm8k(data: Path, max_tokens: int | None, seed: int) -> Workload:
    """Every question of the test set behind the eight worked examples of lm-evaluation-harness, in its form."""
    # One line for each scalar of the YAML, which goes on where a line is indented deeper than its key.
    folded = re.sub(r"\n {6,}(?! )", " ", _find(data, "gsm8k-cot.yaml").read_text(encoding="utf-8"))
    shots = re.findall(r"^  - question: (.*)\n    target: (.*)$", folded, re.MULTILINE)
    if len(shots) != 8:
        raise ConfigError(f"gsm8k-cot.yaml: 8 examples are wanted, {len(shots)} are there")
    header = "".join(f"Q: {question}\nA: {answer}\n\n" for question, answer in shots)
    lines = _find(data, "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [f"{header}Q: {json.loads(line)['question']}\nA:" for line in lines]
    return Workload(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens or 1), False)


def humaneval_editor(data: Path, max_tokens: int | None, seed: int) -> Workload:
    """Of each task the text that is given, then with one more line of its solution each time: a completion is asked for
    after every line, as an editor does."""
    prompts = []
    for task in _humaneval(data):
        lines = task["canonical_solution"].splitlines(keepends=True)
        prompts += [task["prompt"] + "".join(lines[:count]) for count in range(len(lines) + 1)]
    return Workload(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens or 1), True)


def humaneval_samples(data: Path, max_tokens: int | None, seed: int) -> Workload:
    """Ten sampled answers to each task, behind three solved ones. The answers are stored too, and share nothing, so
    their length decides what part is shared: it is the same for all, whatever the model would stop at."""
    tasks = _humaneval(data)
    header = "".join(f"{task['prompt']}{task['canonical_solution']}\n" for task in tasks[:_SHOTS])
    prompts = [header + task["prompt"] for task in tasks[_SHOTS:]]
    length = max_tokens or _SAMPLE_TOKENS
    params = SamplingParams(max_tokens=length, temperature=0.8, top_p=0.95, ignore_eos=True, seed=seed, n=SAMPLES)
    return Workload(prompts, params, False)


WORKLOADS = {"gsm8k": gsm8k, "humaneval-editor": humaneval_editor, "humaneval-samples": humaneval_samples}


def _humaneval(data: Path) -> list[dict[str, str]]:
    with gzip.open(_find(data, "HumanEval.jsonl.gz"), "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _find(data: Path, name: str) -> Path:
    """The file of this name in the directory, or in one directly below it."""
    found = [path for path in (data / name, *sorted(data.glob(f"*/{name}"))) if path.is_file()]
    if not found:
        raise ConfigError(f"--data {data}: no {name} there, nor in a directory in it")
    return found[0]


def ideal_shares(sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> list[int]:
    """Tokens of each prompt that token-exact sharing could find: see the module. Brute force, by a tree of dicts with
    a node a token; O(all tokens)."""
    root: dict[int, Any] = {}
    shares = []
    for sequence, length in zip(sequences, prompt_lengths, strict=True):
        node, shared = root, 0
        for position, token in enumerate(sequence):
            if token not in node:
                node[token] = {}
            elif shared == position:
                shared += 1
            node = node[token]
        shares.append(min(shared, length - 1))
    return shares


def measure(
    llm: LLM, workload: Workload, num_requests: int | None, kv_cache_memory: int | None = None
) -> dict[str, Any]:
    """Run the first requests of a workload through a twin of `llm` with an empty cache.

    kv_cache_memory: bytes of the pool; None: so many that nothing has to go. If something went, `lost_tokens` or
    `preemptions` say so, and `stored_tokens` leaves out what was computed again after a preemption.
    """
    samples = workload.params.n
    if num_requests is None:
        num_requests = _SAMPLED_TASKS * samples if samples > 1 else len(workload.prompts)
    assert llm.tokenizer is not None
    prompts = [llm.tokenizer.encode(text) for text in workload.prompts[: -(-num_requests // samples)]]
    llm = llm.twin(kv_cache_memory=kv_cache_memory or _pool_bytes(llm, prompts, workload.params))
    begin = time.perf_counter()
    outputs: list[RequestOutput] = []
    for batch in [[prompt] for prompt in prompts] if workload.one_by_one else [prompts]:
        outputs += llm.generate(batch, workload.params)
    seconds = time.perf_counter() - begin
    sequences = [output.prompt_token_ids + output.token_ids[:-1] for output in outputs]
    lengths = [len(output.prompt_token_ids) for output in outputs]
    requested = sum(map(len, sequences))
    shared = sum(output.num_cached_tokens for output in outputs)
    stats, cache = llm.stats(), llm._cache
    token_bytes = stats["kv_bytes_per_token"]
    page_tokens = int(np.count_nonzero(cache.prefixes._kept)) * cache.config.page_size
    stored_bytes = stats["kv_resident_bytes"]
    return {
        "requests": len(outputs),
        "answer_tokens": sum(len(output.token_ids) for output in outputs),
        "requested_tokens": requested,
        "stored_tokens": requested - shared,
        "shared_fraction": round(shared / requested, 5),
        "ideal_fraction": round(sum(ideal_shares(sequences, lengths)) / requested, 5),
        # full_bytes / stored_bytes = sharing_factor * page_factor * compression_factor
        "sharing_factor": round(requested / (requested - shared), 3),
        "page_factor": round((requested - shared) / page_tokens, 3),  # below 1: pages that are filled in part
        "compression_factor": round(page_tokens * token_bytes / stored_bytes, 3),
        "full_bytes": requested * token_bytes,
        "stored_bytes": stored_bytes,
        "pool_bytes": stats["kv_capacity_bytes"],
        "lost_tokens": sum(len(tokens) - cache.cached_tokens(tokens)[0] for tokens in sequences),
        "preemptions": stats["num_preemptions"],
        "seconds": round(seconds, 1),
    }


def _pool_bytes(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> int:
    """A pool for all that the prompts and their answers may leave."""
    cache = llm._cache.config
    every = [prompt for prompt in prompts for _ in range(params.n)]
    shares = ideal_shares(every, list(map(len, every)))
    # A page more for each: two that run together may not find of each other what the ideal says.
    pages = [
        cache.pages_for(len(prompt) + params.max_tokens) - share // cache.page_size + 1
        for prompt, share in zip(every, shares, strict=True)
    ]
    return (sum(pages) + max(pages)) * cache.page_bytes
