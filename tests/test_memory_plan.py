"""`tools.memory_plan`: known sizes to the byte, its own cache beside a running engine's, and what it refuses."""

import itertools
import json
import math
import random
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle.checkpoint import make_checkpoint

import engine.graphs
import engine.loading
import kernels.ops
import kernels.reference
import memory.frames
from engine import LLM, ConfigError, SamplingParams
from engine.config import EngineConfig
from models.llama.model import Llama, LlamaWeights
from tools import memory_plan, memory_table

ROOT = Path(__file__).parent.parent
KEYS = {  # of ../shared/notes/interfaces.md, and what else there is
    "weights_bytes", "kv_bytes", "activation_bytes", "workspace_bytes", "total_bytes", "host_bytes",
    "cold_read_bytes_per_token", "max_context", "read_ms_per_token", "kv_full_bytes", "kv_in_flight_bytes",
    "resident_ratio", "total_ratio", "pages_by_bits", "overlay_bytes",
    "model", "context", "batch", "chunk", "dtype", "device", "quantization", "kv_budget", "recall", "cold_format",
    "notes",
}  # fmt: skip


def plan(name="llama2-7b", context=4096, batch=1, dtype="float16", quantization=None, memory=None, **settings):
    settings = EngineConfig(model=name, dtype=dtype, max_model_len=context, max_num_seqs=batch, **settings)
    return memory_plan.plan(memory_plan.shape(str(name)), settings, quantization, memory)


def printed(capsys, *args):
    assert memory_plan.main([str(arg) for arg in (*args, "--json")]) == 0
    return json.loads(capsys.readouterr().out)


# Known figures.


@pytest.mark.parametrize(
    ("name", "parameters", "kv"),
    [  # as the checkpoints of these names have them
        ("llama2-7b", 6_738_415_616, 524_288),
        ("llama2-13b", 13_015_864_320, 819_200),
        ("llama2-70b", 68_976_648_192, 327_680),
    ],
)
def test_the_sizes_of_llama_2(name, parameters, kv):
    found = plan(name)
    assert found["weights_bytes"] == 2 * parameters
    assert found["kv_full_bytes"] == 4096 * kv
    assert found["kv_bytes"] == {"hot": 4096 * kv, "warm": 0, "cold": 0} and found["resident_ratio"] == 1
    assert found["kv_in_flight_bytes"] == found["host_bytes"] == found["cold_read_bytes_per_token"] == 0
    assert plan(name, dtype="float32")["weights_bytes"] == 4 * parameters


def test_7b_beside_its_checkpoint():
    """Its index says 13,476,839,424: with 32 tables of 64 rotations in float32, which are not loaded."""
    assert plan()["weights_bytes"] == 13_476_839_424 - 32 * 64 * 4


def test_quantised_weights(tmp_path):
    make_checkpoint(
        tmp_path, vocab_size=400, hidden_size=160, intermediate_size=200, num_attention_heads=5, num_key_value_heads=1,
        num_hidden_layers=3, tie_word_embeddings=True, attention_bias=True,
    )  # fmt: skip
    linears = [(160, 160), (32, 160), (32, 160), (160, 160), (200, 160), (200, 160), (160, 200)]  # [outputs, inputs]
    exact = 2 * (160 + 3 * (2 * 160 + 160 + 32 + 32 + 160))  # norms and biases
    embedding = 400 * (160 + 2)  # and head
    eight = sum(outputs * (inputs + 2) for outputs, inputs in linears)
    four = sum(outputs * (inputs // 2 + -(-inputs // 32) * (2 + 2)) for outputs, inputs in linears)
    assert plan(tmp_path, 100, quantization="int8")["weights_bytes"] == exact + embedding + 3 * eight
    assert plan(tmp_path, 100, quantization="int4")["weights_bytes"] == exact + embedding + 3 * four


def test_the_group_of_int4():
    """A scale and a zero of 16 bits each for a group of a row, of 7B's linear maps."""
    rows = 32 * 4096 * (4 * 4096 + 3 * 11008)  # elements
    sizes = {group: memory_plan.weights_bytes(memory_plan.shape("llama2-7b"), 2, "int4", group) for group in (32, 128)}
    assert sizes[32] - sizes[128] == 4 * rows // 32 - 4 * rows // 128


@pytest.mark.parametrize(("cold_format", "row"), [("exact", 128 * 2), ("int8", 128 + 2)])
def test_what_recall_reads(cold_format, row):
    """K and V of ceil(f N) tokens, of each KV head and layer, for every token."""
    found = plan(context=5001, kv_budget=0.3, recall=0.07, cold_format=cold_format)
    reads = math.ceil(0.07 * 5001) * 32 * 32 * 2 * row
    assert found["cold_read_bytes_per_token"] == reads
    assert found["read_ms_per_token"]["pcie4"] == pytest.approx(reads / 25e9 * 1e3)
    assert found["read_ms_per_token"].keys() == {"pcie4", "pcie5", "unified", "nvme"}
    compressed = 64 * sum(pages for bits, pages in found["pages_by_bits"].items() if bits < 16)
    assert found["kv_bytes"]["cold"] == found["host_bytes"] == compressed * 32 * 32 * 2 * row
    assert plan(context=5001, kv_budget=0.3, recall=0.0)["cold_read_bytes_per_token"] == 0


def test_an_overlay_is_on_the_device_and_resident():
    beside = {"context": 16384, "kv_budget": 0.25, "recall": 0.05, "cold_format": "exact"}
    less, more = plan(**beside), plan(**beside, overlay_size=429_496_730)
    assert more["overlay_bytes"] == pytest.approx(429_496_730, rel=0.04) and less["overlay_bytes"] == 0
    assert more["total_bytes"] - less["total_bytes"] == more["overlay_bytes"]
    for ratio in ("resident_ratio", "total_ratio"):
        assert more[ratio] - less[ratio] == pytest.approx(more["overlay_bytes"] / less["kv_full_bytes"])
    assert more["kv_in_flight_bytes"] == less["kv_in_flight_bytes"]
    with pytest.raises(ConfigError, match="overlay_size is of exact copies, and cold_format is int8"):
        plan(**{**beside, "cold_format": "int8"}, overlay_size=1 << 20)


# Beside what runs.


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint(path, max_position_embeddings=1024)
    return path


@pytest.mark.parametrize("settings", [
    {}, {"kv_budget": 0.5}, {"kv_budget": 0.8, "page_size": 16}, {"kv_budget": 0.2, "page_size": 16},
    {"kv_budget": 0.31, "recall": 0.1, "cold_format": "exact"},
    {"kv_budget": 0.31, "page_size": 16, "recall": 0.0, "cold_format": "int8"},
])  # fmt: skip
@pytest.mark.parametrize("context", [40, 300, 700])
def test_beside_the_engine(directory, context, settings):
    """Hot and warm bytes within a page of what a request of this length has in the end, and the pool to the byte."""
    fixed = {"max_num_batched_tokens": 64, "cold_format": "none", **settings}
    llm = LLM(directory, threads=1, dtype="float32", max_model_len=context, **fixed)
    prompt = random.Random(0).choices(range(3, 350), k=context - 16)
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    report = llm.generate([prompt], params, use_tqdm=False)[0].cache_report
    found = plan(directory, context - 1, dtype="float32", **fixed)  # the last token is never computed
    config = llm._cache.config
    kv = found["kv_bytes"]
    assert found["kv_full_bytes"] == report["full_bytes"]
    assert abs(kv["hot"] + kv["warm"] - report["resident_bytes"]) <= config.page_bytes
    assert abs(kv["cold"] - report["cold_bytes"]) <= config.copy_bytes
    pool = plan(directory, context, dtype="float32", **fixed)
    held = pool["kv_bytes"]["hot"] + pool["kv_bytes"]["warm"]
    assert held + pool["kv_in_flight_bytes"] == config.num_pages * config.page_bytes
    assert found["weights_bytes"] == llm._model.nbytes


@pytest.mark.parametrize(
    "shape",
    [  # that of Llama 2, one with few KV heads, and ones in which another part of the layer is the largest
        {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 4, "num_key_value_heads": 4},
        {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 8, "num_key_value_heads": 2},
        {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4},
        {
            "hidden_size": 256,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 8,
        },
    ],
)
def test_activations_are_what_forward_holds(tmp_path, shape):
    """Against the arrays that are alive, in float32, while `Llama.forward` runs over stand-ins for its operations."""
    make_checkpoint(tmp_path, num_hidden_layers=4, tokenizer=False, **shape)
    config = memory_plan.shape(str(tmp_path))
    live = Live()
    weights = LlamaWeights(config)
    weights.update({name: torch.zeros(weight.shape) for name, weight in weights.items()})
    model = Llama(config, weights, live, 128)
    ids = torch.zeros(96, dtype=torch.int64)

    def attention(layer, q, k, v, cos_sin):
        live.empty(q.shape)  # its largest temporary
        spare, out = live.empty(q.shape), live.empty(q.shape)
        del spare
        return out

    with torch.inference_mode():
        model.forward(ids, ids, attention)
    # The stand-ins do not make the residual stream, rotations, ids and positions.
    throughout = 96 * (4 * config.hidden_size + 4 * config.head_dim + 16)
    assert memory_plan.activation_bytes(config, 4, 96, 1) == live.peak + throughout


class Live:
    """Operations that only allocate, and count what is alive."""

    def __init__(self):
        self.now = self.peak = 0

    def empty(self, shape):
        array = np.zeros(tuple(shape), dtype=np.float32)
        self.now += array.nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(array, self.freed, array.nbytes)
        return torch.from_numpy(array)

    def freed(self, nbytes):
        self.now -= nbytes

    def pack_linear(self, weight):
        return weight

    def linear(self, x, weight, bias=None):
        return self.empty((len(x), len(weight)))

    def rms_norm(self, x, weight, eps):
        return self.empty(x.shape)

    def add_rms_norm(self, x, residual, weight, eps):
        return self.empty(x.shape)

    def silu_mul(self, gate, up):
        return self.empty(gate.shape)


def test_the_numbers_of_others():
    """Those that stand in the tool because their modules need torch or triton."""
    assert engine.loading._RECALL == memory_plan.RECALL
    attention, recall = (pytest.importorskip(f"kernels.{name}") for name in ("attention", "recall"))
    assert attention.MAX_SLICES == memory_plan.MAX_SLICES
    assert memory_plan.TILE_ROWS[2] == recall.MOST_ROWS
    assert memory_plan.SPREAD == kernels.ops.SPREAD
    assert memory_plan.MOVE_ELEMENTS == memory.frames._MOVE_ELEMENTS
    assert memory_plan.CHUNK_ELEMENTS == kernels.reference._CHUNK_ELEMENTS
    assert memory_plan.GRAPH_BYTES == engine.graphs.GRAPH_BYTES
    model = memory_plan.shape("llama2-7b")
    for batch in (1, 2, 7, 64):
        for tokens in ([300], [64, 4096], [128, 30_000, 2_000], [64, 500, 500, 90_000, 64]):
            slices = sum(attention.count_slices(batch * 32, tokens, 64, 132))
            partial = 4 * batch * 32 * slices * (128 + 1)
            settings = EngineConfig(model="llama2-7b", max_model_len=sum(tokens), max_num_seqs=batch, dtype="float16")
            config = memory_plan.cache_config(model, settings)
            planned = memory_plan.workspace_bytes(model, config, sum(tokens), 512, batch)
            assert partial + 4 * sum(tokens) * 128 <= planned


# What must hold for any shape.


@pytest.mark.parametrize("name", ["llama2-7b", "llama2-70b"])
@pytest.mark.parametrize("settings", [{}, {"kv_budget": 0.31}, {"kv_budget": 0.16, "recall": 0.1}])
def test_more_context_takes_more(name, settings):
    rows = [plan(name, context, **settings) for context in (1, 64, 65, 200, 640, 1000, 4096, 30_000)]
    for less, more in itertools.pairwise(rows):
        assert less["total_bytes"] <= more["total_bytes"] and less["host_bytes"] <= more["host_bytes"]
    for row in rows:
        kv = row["kv_bytes"]
        parts = ("weights_bytes", "kv_in_flight_bytes", "activation_bytes", "workspace_bytes")
        assert row["total_bytes"] == kv["hot"] + kv["warm"] + sum(row[part] for part in parts)
        assert row["kv_in_flight_bytes"] >= 0 and row["host_bytes"] == kv["cold"]
    if "kv_budget" in settings:
        assert all(row["resident_ratio"] <= settings["kv_budget"] for row in rows[-2:])
        assert rows[-1]["resident_ratio"] > 0.98 * settings["kv_budget"]


def test_a_larger_budget_takes_more():
    rows = [plan(context=9000, kv_budget=budget) for budget in (0.142, 0.16, 0.2, 0.31, 0.5, 0.75, 0.9, 1.0)]
    held = [row["kv_bytes"]["hot"] + row["kv_bytes"]["warm"] for row in rows]
    assert held == sorted(held) and len(set(held)) == len(held)
    assert [row["total_bytes"] for row in rows] == sorted(row["total_bytes"] for row in rows)
    assert rows[-1]["kv_bytes"] == plan(context=9000)["kv_bytes"]


def test_more_sequences_take_more():
    rows = [plan(context=2000, batch=batch, kv_budget=0.31) for batch in (1, 2, 3, 16)]
    assert [row["total_bytes"] for row in rows] == sorted({row["total_bytes"] for row in rows})
    assert [row["kv_bytes"]["warm"] for row in rows] == [rows[0]["kv_bytes"]["warm"] * n for n in (1, 2, 3, 16)]
    assert {row["resident_ratio"] for row in rows} == {rows[0]["resident_ratio"]}
    assert {row["cold_read_bytes_per_token"] for row in rows} == {rows[0]["cold_read_bytes_per_token"]}


@pytest.mark.parametrize("settings", [{}, {"kv_budget": 0.2}])
def test_the_longest_context_is_the_longest(settings):
    memory = 16_000_000_000
    longest = plan(memory=memory, **settings)["max_context"]
    assert plan(context=longest, **settings)["total_bytes"] <= memory
    assert plan(context=longest + 1, **settings)["total_bytes"] > memory
    assert plan(memory=10_000_000_000, **settings)["max_context"] == 0
    assert plan(**settings)["max_context"] is None


# The command.


def test_json_and_table(directory, capsys):
    options = ["--model", directory, "--context", "300", "--kv-budget", "0.31", "--recall", "0.1", "--batch", "2"]
    found = printed(capsys, *options, "--chunk", "32", "--dtype", "auto", "--device-memory", "1MB")
    assert found.keys() == KEYS
    assert found["kv_bytes"].keys() == {"hot", "warm", "cold"}
    assert (found["dtype"], found["recall"], found["cold_format"]) == ("float32", 0.1, "exact")
    assert "planned, not measured" in found["notes"]
    assert memory_plan.main([str(option) for option in options]) == 0
    table = capsys.readouterr().out
    assert "| planned | GB |" in table and "note: planned, not measured" in table and "nvme" in table


def test_a_cpu_needs_more_beside_the_weights(capsys):
    """What torch's operations hold of compressed pages, and nothing else that differs."""
    settings = ["--model", "llama2-7b", "--context", "9000", "--kv-budget", "0.25", "--cold-format", "none"]
    gpu, cpu = (printed(capsys, *settings, "--device", device) for device in ("cuda", "cpu"))
    assert cpu["workspace_bytes"] > gpu["workspace_bytes"]
    differ = {key for key in gpu if gpu[key] != cpu[key]}
    assert differ == {"device", "workspace_bytes", "total_bytes", "notes"}


def test_the_table_of_the_readme(capsys, monkeypatch):
    monkeypatch.setattr(memory_table, "CONTEXTS", (16384,))
    monkeypatch.setattr(memory_table, "DEVICES", {"16 GB": 16e9})
    assert memory_plan.main(["--table"]) == 0
    table = capsys.readouterr().out
    assert "Planned, not measured" in table and "A model, not a measurement" in table
    exact = plan(context=16384)["total_bytes"]
    assert f"| llama2-7b | 16384 | 16 bits | {exact / 1e9:.2f} |" in table
    assert "| llama2-13b | 16384 | int4 | 1/3 | 512 |" in table and "holds" in table


def test_the_longest_context_of_the_table():
    planner, memory = memory_table.Planner(128), 12_000_000_000
    longest = planner.longest("llama2-7b", "int4", "1/3", 512, memory)
    totals = [planner.plan("llama2-7b", n, "int4", "1/3", 512)["total_bytes"] for n in (longest, longest + 1)]
    assert totals[0] <= memory < totals[1]


def test_the_speed_is_that_of_what_is_read():
    """13.5 GB less an embedding of 0.26, and 2.1 GB of cache, at 2,039 GB/s."""
    found = plan()
    speed = memory_table.tokens_per_second("llama2-7b", found, None, 128, "A100")
    assert speed == pytest.approx(2039e9 / (2 * 6_738_415_616 - 2 * 32000 * 4096 + 4096 * 524_288), rel=1e-4)
    with_recall = plan(kv_budget=0.25, recall=0.05)
    slower = memory_table.tokens_per_second("llama2-7b", with_recall, None, 128, "A100")
    assert slower < 1 / (with_recall["read_ms_per_token"]["pcie4"] / 1e3 + 0.006)


def test_a_longer_context_than_the_models_is_said(capsys):
    found = printed(capsys, "--model", "llama2-7b", "--context", "32768", "--quantization", "int8")
    assert any("4096" in note and "--rope-scaling" in note for note in found["notes"])
    assert 6.7e9 < found["weights_bytes"] < 6.8e9


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "llama9"], "llama2-7b, llama2-13b, llama2-70b"),
        (["--context", "0"], "context must be at least 1, got 0"),
        (["--batch", "-1"], "batch must be at least 1, got -1"),
        (["--chunk", "0"], "chunk must be at least 1, got 0"),
        (["--context", "999999999"], "max_model_len"),
        (["--kv-budget", "0.05"], "less than 0.141"),
        (["--kv-budget", "1.5"], "kv_budget must be a number above 0 up to 1, got 1.5"),
        (["--kv-budget", "nan"], "kv_budget must be"),
        (["--kv-budget", "0.3", "--recall", "2"], "recall must be"),
        (["--kv-budget", "0.3", "--recall", "0.1", "--cold-format", "none"], "cold_format is none"),
        (["--dtype", "int3"], "dtype must be"),
        (["--device-memory", "much"], "a size is a number with a unit"),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        memory_plan.main(["--model", "llama2-7b", "--context", "100", *options])


def test_a_head_that_cannot_be_compressed_is_refused(tmp_path):
    make_checkpoint(tmp_path, head_dim=20, tokenizer=False)
    with pytest.raises(ConfigError, match="head_dim that is a multiple of 8"):
        memory_plan.main(["--model", str(tmp_path), "--context", "100", "--kv-budget", "0.5"])


def test_refusals_need_no_torch_and_end_with_code_3():
    code = """
import sys
from engine.cli import run
from tools import memory_plan, memory_table
try:
    run(memory_plan.main, ["--model", "llama2-7b", "--context", "100", "--kv-budget", "0.1"])
finally:
    print(*{"torch", "numpy"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3 and done.stdout.strip() == ""
    assert done.stderr.startswith("error: kv_budget 0.1 is less than") and "Traceback" not in done.stderr
