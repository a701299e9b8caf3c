"""`tools.gpu_check` without a GPU: all of it at tiny size, and what it makes of times that are made up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracle.checkpoint import make_checkpoint

from tools import gpu_check, gpu_engine, gpu_speed, profile_kernels

ROOT = Path(__file__).parents[2]
TINY = gpu_engine.Scale("tiny", "float32", (40,), (9, 40), 2)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is about what runs without a GPU")


class FakeTimer:
    """Makes each call, and says that each took the same."""

    def __init__(self, seconds):
        self.taken, self.calls = seconds, 0

    def seconds(self, calls):
        for call in calls:
            call()
            self.calls += 1
        return self.taken


class Clock:
    """A second later whenever it is asked."""

    now = 0

    def __call__(self):
        self.now += 1
        return self.now


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    make_checkpoint(tmp_path, tokenizer=False, eos_token_id=None)
    return gpu_engine.Scale(str(tmp_path), *list(vars(TINY).values())[1:])


@pytest.mark.timeout(1200)  # the interpreter, on a machine that does other work
def test_the_command_agrees(tmp_path):
    command = [sys.executable, "-m", "tools.gpu_check", "--output", str(tmp_path / "report.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] and report["end_to_end"]["equal"] and report["skipped"] == []
    assert {row["kernel"] for row in report["rows"]} >= {"rms_norm", "rope_store", "prefill_attention"}
    assert {row["kernel"] for row in report["speed"]} == {f"{name}[tiny]" for name in profile_kernels.OPS}
    assert not [row for row in report["speed"] if row["measured_us"] is not None]
    speeds = {(row["weights"], row["kv"]): row["tok_s"] for row in report["engine"] if row["what"] == "decode"}
    assert {("exact", "exact"), ("exact", "0.33"), ("exact", "0.25, recall 0.05")} <= speeds.keys()
    notes = {(row["weights"], row["kv"]): row["note"] for row in report["engine"]}
    for case in (("exact", "exact, CUDA graphs"), ("int4", "0.33, CUDA graphs")):
        assert notes[case].startswith("skipped: cuda_graphs on needs a GPU") and case not in speeds
    assert "| part | what |" in done.stdout and "everything agrees" in done.stdout and "no GPU here" in done.stderr


def test_times_become_speeds_and_shares_of_the_peak(monkeypatch):
    chosen = ("rms_norm", "decode_attention", "decode_merge")
    monkeypatch.setattr(profile_kernels, "OPS", {name: profile_kernels.OPS[name] for name in chosen})
    timer = FakeTimer(1e-3)
    rows = {row["kernel"]: row for row in gpu_speed.kernel_rows("cpu", timer, (1e9, 1e12))}
    assert timer.calls == 3 and {row["measured_us"] for row in rows.values()} == {1000.0}
    tokens = profile_kernels.OPS["rms_norm"].traffic_tokens
    least = profile_kernels.OPS["rms_norm"].cost(gpu_speed.TINY, tokens).bytes
    assert rows["rms_norm[tiny]"]["of_peak"] == round(least / 1e9 / 1e-3, 3)
    assert rows["decode_attention[tiny]"]["achieved_gb_s"] is not None
    merge = profile_kernels.OPS["decode_merge"].cost(gpu_speed.TINY, 256)
    assert rows["decode_merge[tiny]"]["of_peak"] == round(merge.bytes / 1e9 / 1e-3, 3) > 0
    assert gpu_speed.copy_speed(FakeTimer(2.0), "cpu") == 1024


def test_arguments_are_made_anew():
    """In memory of their own and at random, but for what says where things are."""
    q, places, codes = torch.zeros(4, 8)[:, :6], torch.arange(5), torch.zeros(3, dtype=torch.uint8)
    new_q, (new_places, new_codes), number = gpu_speed._fresh((q, (places, codes), 7))
    assert new_q.stride() == q.stride() and new_q.abs().max() > 0 and q.abs().max() == 0
    assert new_places.tolist() == places.tolist() and new_places.data_ptr() != places.data_ptr()
    assert new_codes.dtype == torch.uint8 and number == 7


def test_the_engine_is_timed(tiny):
    rows = list(gpu_engine.engine_rows(tiny, gpu_engine.CASES[:2], gpu_engine.Budget(600), 1e9))
    assert [(row["kv"], row["what"], row["context"]) for row in rows] == [
        (kv, what, length)
        for kv in ("exact", "0.33")
        for what, length in (("decode", 9), ("prefill", 40), ("decode", 40))
    ]
    assert all(row["tok_s"] > 0 and (row["of_peak"] is not None) == (row["what"] == "decode") for row in rows)


def test_what_is_refused_is_skipped_with_the_reason(tiny):
    case = gpu_engine.Case("exact", "too small", {"kv_budget": 0.01})
    (row,) = gpu_engine.engine_rows(tiny, [case], gpu_engine.Budget(600), None)
    assert row["tok_s"] is None and row["note"].startswith("skipped: kv_budget 0.01 is less than")


def test_graphs_are_off_where_nothing_is_said_of_them(tiny, monkeypatch):
    asked = []
    monkeypatch.setattr(gpu_engine, "random_llm", lambda model, **settings: asked.append(settings["cuda_graphs"]))
    for case in gpu_engine.CASES:
        gpu_engine._Engines(tiny).of(case)
    assert asked == ["on" if "CUDA graphs" in case.kv else "off" for case in gpu_engine.CASES]
    assert asked.count("on") == 6


def test_when_the_time_is_over(tiny):
    """Each case says so, and the peer; the kernels that follow are named once."""
    over = gpu_engine.Budget(3, Clock())
    rows = list(gpu_engine.engine_rows(tiny, gpu_engine.CASES[:2], over, None))
    assert {row["note"] for row in rows} == {gpu_engine.OUT_OF_TIME}
    assert gpu_engine.peer_rows(tiny, over, "cpu")[0]["note"] == gpu_engine.OUT_OF_TIME
    report = gpu_check.check("cpu", gpu_speed.NoTimer(), tiny, over, sys.executable, None)
    assert [line.split(":")[0] for line in report["skipped"]] == ["correct", "speed"]
    assert len(report["rows"]) == len(report["speed"]) == 1 and report["ok"]


def test_a_peer_that_cannot_be_imported_is_skipped(tiny, tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('none here')")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    (row,) = gpu_engine.peer_rows(tiny, gpu_engine.Budget(600), "cpu", str(script))
    assert row["note"] == "skipped: ImportError: none here" and row["kv"] == "Transformers"


def test_one_table():
    row = {"kernel": "k", "dtype": "float16", "shape": "1/1x8", "error": 0.5, "ok": True}
    engine = {"what": "decode", "weights": "int4", "kv": "exact", "context": 9, "tok_s": None, "of_peak": None}
    report = {
        "rows": [row, {**row, "ok": False}],
        "end_to_end": {"tokens": 3, "equal": False},
        "speed": [{"kernel": "k", "measured_us": 2.5, "achieved_gb_s": 700, "of_peak": 0.8}],
        "engine": [{**engine, "note": "skipped: why"}],
        "peer": [],
    }
    table = gpu_check.table(report)
    assert [tuple(row) for row in table] == [gpu_check.COLUMNS] * 5
    assert [row["note"] for row in table] == ["ok", "WRONG", "DIFFERENT", "700 GB/s", "skipped: why"]
    assert table[3]["value"] == 2.5 and table[4]["setting"] == "int4, exact, 9"
