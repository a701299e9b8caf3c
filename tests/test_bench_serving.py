"""tools.bench prefix, chat and offline on a tiny model: what they count, against plain computations. No time is
asserted."""

import contextlib
import gzip
import io
import itertools
import json
import random
from pathlib import Path

import pytest
from oracle.checkpoint import make_checkpoint, train_tokenizer, write_json

from engine import LLM, ConfigError, SamplingParams
from tools import bench, bench_prefix, bench_serving

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
YAML = """doc_to_text: 'Q: {{question}}

  A:'
fewshot_config:
  sampler: first_n
  samples:
"""
SHOT = """  - question: There are {0} cats near the
      stove. How many
      tails?
    target: Each cat has 1 tail. The answer is
      {0}.
"""
SOLUTION = "    for i in range({0}):\n        print(i, a)\n    return a\n"
EDITOR_REQUESTS = 4 * 6  # a request for each task as it is given, and one for each of three lines


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, seed=1, vocab_size=354, max_position_embeddings=4096)
    (directory / "tokenizer.model").write_bytes(train_tokenizer(352))
    flags = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {str(352 + i): {"content": f"<|im_{end}|>", **flags} for i, end in enumerate(("start", "end"))}
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML, "added_tokens_decoder": added}
    write_json(directory / "tokenizer_config.json", tokens)
    return directory


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, threads=1, dtype="float32", page_size=16)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Small files in the forms of lm-evaluation-harness, GSM8K and HumanEval."""
    root = tmp_path_factory.mktemp("data")
    (root / "code").mkdir()
    (root / "gsm8k-cot.yaml").write_text(YAML + "".join(SHOT.format(i) for i in range(8)) + "task: gsm8k_cot\n")
    questions = [f"The {word} had {i} children. How many?" for i, word in enumerate(("wind", "mouse", "wind", "cat"))]
    questions.append(questions[1])
    lines = [json.dumps({"question": question, "answer": "0"}) + "\n" for question in questions]
    (root / "gsm8k_test.jsonl").write_text("".join(lines))
    tasks = [{"prompt": f'def f{i}(a):\n    """Add {i} to a."""\n', "canonical_solution": SOLUTION.format(i)}
             for i in range(6)]  # fmt: skip
    with gzip.open(root / "code" / "HumanEval.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(task) + "\n" for task in tasks)
    return root


def report(*args):
    """The JSON object that a subcommand prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert bench.main([*map(str, args), "--dtype", "float32", "--json"]) == 0
    return json.loads(printed.getvalue())


def common(a, b):
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


def pairwise_shares(sequences, lengths):
    """The longest common beginning with each earlier sequence, one after another."""
    return [
        min(max((common(sequence, earlier) for earlier in sequences[:i]), default=0), length - 1)
        for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True))
    ]


# prefix


def test_ideal_shares_are_those_of_all_pairs():
    draw = random.Random(0)
    for _ in range(100):
        sequences = [draw.choices(range(2), k=draw.randint(1, 12)) for _ in range(draw.randint(1, 12))]
        lengths = [draw.randint(1, len(sequence)) for sequence in sequences]
        assert bench_prefix.ideal_shares(sequences, lengths) == pairwise_shares(sequences, lengths)


@pytest.mark.parametrize("name", bench_prefix.WORKLOADS)
@pytest.mark.parametrize("max_tokens", [None, 20])
def test_prefix_counts_what_is_requested_stored_and_shared(llm, data, name, max_tokens):
    workload = bench_prefix.WORKLOADS[name](data, max_tokens, 3)
    measured = bench_prefix.measure(llm, workload, None)
    # The same answers without any cache: so these are the sequences.
    outputs = llm.twin(enable_prefix_caching=False).generate(
        [llm.tokenizer.encode(text) for text in workload.prompts], workload.params
    )
    sequences = [output.prompt_token_ids + output.token_ids[:-1] for output in outputs]
    ideal = sum(pairwise_shares(sequences, [len(output.prompt_token_ids) for output in outputs]))
    requested = sum(map(len, sequences))
    assert measured["requested_tokens"] == requested and measured["requests"] == len(outputs)
    assert measured["ideal_fraction"] == round(ideal / requested, 5)
    shared = requested - measured["stored_tokens"]
    assert measured["shared_fraction"] == round(shared / requested, 5)
    # Requests that are under way together may miss of each other what does not fill a page.
    together = 0 if workload.one_by_one else 16 * len(outputs)
    assert ideal - together <= shared <= ideal and shared > 0.3 * requested
    assert measured["lost_tokens"] == measured["preemptions"] == 0
    assert measured["stored_bytes"] < measured["pool_bytes"]
    factors = [measured[f"{part}_factor"] for part in ("sharing", "page", "compression")]
    product = factors[0] * factors[1] * factors[2]
    assert product == pytest.approx(measured["full_bytes"] / measured["stored_bytes"], rel=0.01)
    assert factors[1] <= 1 and 0.5 < factors[2] <= 1  # of pages as small as these the table of frames is a large part


def test_workloads_send_what_they_say(data):
    gsm8k = bench_prefix.gsm8k(data, None, 0)
    assert len(gsm8k.prompts) == 5 and gsm8k.params.max_tokens == 1
    one = "Q: There are 0 cats near the stove. How many tails?\nA: Each cat has 1 tail. The answer is 0.\n\n"
    assert gsm8k.prompts[0].startswith(one) and gsm8k.prompts[0].count("A:") == 9
    assert gsm8k.prompts[0].endswith("The answer is 7.\n\nQ: The wind had 0 children. How many?\nA:")
    editor = bench_prefix.humaneval_editor(data, None, 0)
    assert len(editor.prompts) == EDITOR_REQUESTS and editor.one_by_one
    given = 'def f0(a):\n    """Add 0 to a."""\n'
    assert editor.prompts[:3] == [given, given + "    for i in range(0):\n", given + SOLUTION.format(0)[:-13]]
    samples = bench_prefix.humaneval_samples(data, None, 0)
    assert len(samples.prompts) == 3 and samples.params.n == 10
    assert samples.prompts[1].startswith(given + SOLUTION.format(0) + "\ndef f1")
    assert samples.prompts[1].endswith('    return a\n\ndef f4(a):\n    """Add 4 to a."""\n')


def test_the_examples_of_gsm8k_are_read_as_yaml_is():
    if not (DATA / "prefix-fewshot").is_dir():
        pytest.skip("no ../shared/data/prefix-fewshot")
    config = pytest.importorskip("yaml").safe_load((DATA / "prefix-fewshot" / "gsm8k-cot.yaml").read_text())
    template = config["doc_to_text"]
    shots = config["fewshot_config"]["samples"]
    header = "\n\n".join(template.replace("{{question}}", s["question"]) + " " + s["target"] for s in shots)
    workload = bench_prefix.gsm8k(DATA, None, 0)
    lines = (DATA / "prefix-fewshot" / "gsm8k_test.jsonl").read_text().splitlines()
    assert workload.prompts == [
        header + "\n\n" + template.replace("{{question}}", json.loads(line)["question"]) for line in lines
    ]
    assert len(workload.prompts) == 1319


def test_prefix_says_what_a_pool_that_is_too_small_lost(llm, data):
    workload = bench_prefix.humaneval_editor(data, None, 0)
    measured = bench_prefix.measure(llm, workload, None, 8 * llm._cache.config.page_bytes)
    assert measured["lost_tokens"] > 0 and measured["stored_bytes"] <= measured["pool_bytes"]
    assert measured["requests"] == EDITOR_REQUESTS
    assert measured["stored_tokens"] >= bench_prefix.measure(llm, workload, None)["stored_tokens"]


def test_prefix_under_a_budget_says_what_compression_saved(llm, data):
    workload = bench_prefix.gsm8k(data, 40, 0)
    budgeted = bench_prefix.measure(llm.twin(kv_budget=0.31), workload, 3)
    assert budgeted["requests"] == 3 and budgeted["compression_factor"] > 1.5


def test_prefix_on_the_command_line(model, data):
    args = ("prefix", "--model", model, "--data", data, "--page-size", 16)
    printed = report(*args, "--workload", "humaneval-editor", "--requests", 7)
    assert printed["requests"] == 7 and printed["page_size"] == 16 and printed["workload"] == "humaneval-editor"
    assert {"requested_tokens", "stored_tokens", "shared_fraction", "ideal_fraction", "commit"} <= printed.keys()
    printed = report(*args, "--workload", "humaneval-samples", "--requests", 20, "--max-tokens", 3)
    assert (printed["requests"], printed["answer_tokens"]) == (20, 60)


def test_data_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no HumanEval\.jsonl\.gz there"):
        bench_prefix.humaneval_samples(tmp_path, None, 0)
    (tmp_path / "gsm8k-cot.yaml").write_text(YAML + SHOT.format(1))
    with pytest.raises(ConfigError, match="8 examples are wanted, 1 are there"):
        bench_prefix.gsm8k(tmp_path, None, 0)


# chat


def test_chat_prefills_what_is_new(llm):
    measured = bench_serving.chat(llm, turns=6, max_tokens=5, repeats=2, seed=0)
    rows = measured["rows"]
    assert [row["turn"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[0]["prefilled_tokens"] == rows[0]["new_tokens"] == rows[0]["prompt_tokens"] > 600
    for before, row in itertools.pairwise(rows):
        assert row["prefilled_tokens"] == row["new_tokens"]
        # What is cached is the prompt before, but perhaps for where its last text ends, and the answer to it.
        cached = row["prompt_tokens"] - row["prefilled_tokens"]
        assert before["prompt_tokens"] - 2 <= cached < before["prompt_tokens"] + 5
    assert all(row["ttft_ms"] > 0 and row["ttft_uncached_ms"] > 0 for row in rows)
    settled = [row["resident_bytes"] for row in rows[4:]]
    assert measured["resident_swing"] == round(max(settled) / min(settled), 3)
    slower = rows[0]["ttft_ms"] - rows[0]["ttft_uncached_ms"]
    assert measured["first_turn_slower_ms"] == pytest.approx(slower, abs=0.11)
    faster = rows[-1]["ttft_uncached_ms"] / rows[-1]["ttft_ms"]
    assert measured["last_turn_times_faster"] == pytest.approx(faster, rel=0.05)


def test_chat_is_the_same_dialogue_each_time(llm):
    script = bench_serving._script(7)
    said = list(itertools.islice(script, 200))
    assert said == list(itertools.islice(bench_serving._script(7), 200))
    assert said != list(itertools.islice(bench_serving._script(8), 200))
    assert len(said[0]) > 1500 and all(10 < len(text) < 60 for text in said[1:]) and len(set(said[:60])) == 60


def test_chat_under_a_fixed_budget(model):
    memory = 64 * 2 * 16 * 2 * 2 * 4 * 12  # 12 pages of 64 tokens: the text of the first turn takes ten
    printed = report("chat", "--model", model, "--turns", 3, "--max-tokens", 3, "--kv-cache-memory", memory)
    assert printed["kv_cache_memory"] == memory and printed["resident_swing"] is None
    assert len(printed["rows"]) == 3 and printed["first_turn_slower_percent"] is not None
    assert all(row["resident_bytes"] <= printed["capacity_bytes"] for row in printed["rows"])
    assert printed["capacity_bytes"] < 1.01 * memory


# offline


def test_offline_runs_the_same_work_together_and_alone(llm, monkeypatch):
    done = []

    def record(self, groups, seconds=bench_serving._seconds):
        assert self.config.max_num_seqs == 4 and not self.config.enable_prefix_caching
        done.append(groups)
        return seconds(self, groups)

    monkeypatch.setattr(bench_serving, "_seconds", record)
    measured = bench_serving.offline(llm, batch=4, requests=6, repeats=2, seed=5)
    together, alone = done[0], done[1]
    assert len(together) == 1 and len(alone) == 6 and together[0] == [group[0] for group in alone]
    assert done == [together, alone, together, alone]
    assert measured["answer_tokens"] == sum(length for _, length in together[0])
    assert measured["prompt_tokens"] == sum(len(prompt) for prompt, _ in together[0])
    assert len({tuple(prompt) for prompt, _ in together[0]}) == 6
    assert all(16 <= len(prompt) < 256 and 16 <= length < 128 for prompt, length in together[0])
    ratio = measured["tokens_per_s"] / measured["one_by_one_tokens_per_s"]
    assert measured["ratio"] == pytest.approx(ratio, rel=0.01)
    assert measured["cpu_ratio"] > 0 and measured["spread"] >= 0 and measured["preemptions"] == 0


def test_offline_computes_every_answer_to_its_length(llm):
    llm = llm.twin(enable_prefix_caching=False)
    prompts = [[5, 6, 7], [8, 9]]
    wanted = llm.generate(prompts, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    steps = []
    step = llm.step
    llm.step = lambda: steps.append(step()) or steps[-1]
    assert all(seconds > 0 for seconds in bench_serving._seconds(llm, [[(prompt, 9) for prompt in prompts]]))
    ended = [output for outputs in steps for output in outputs if output.finish_reason]
    assert sorted(output.token_ids for output in ended) == sorted(output.token_ids for output in wanted)
    assert len(steps) == 9  # together: a step for all prompts, then one for each further token


def test_offline_on_the_command_line(model):
    printed = report("serve-offline", "--model", model, "--batch", 2, "--repeats", 1)
    assert printed["batch"] == 2 and printed["requests"] == 4 and printed["tokens_per_s"] > 0
    assert {"one_by_one_tokens_per_s", "ratio", "machine", "command"} <= printed.keys()
