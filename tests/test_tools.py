"""The tools that measure: what they print, on tiny inputs. No figure is asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from oracle.checkpoint import make_checkpoint

from tools.report import code_lines

ROOT = Path(__file__).parent.parent
# As much of Transformers as tools/bench_peer.py uses: a model that answers at once.
FAKE_TRANSFORMERS = """
import types, torch
__version__ = "0"
DynamicCache = lambda config: None
def _call(ids, past_key_values, use_cache, logits_to_keep):
    return types.SimpleNamespace(logits=torch.zeros(1, 1, 8))
_call.config = None
_call.eval = lambda: _call
class AutoModelForCausalLM:
    from_pretrained = staticmethod(lambda path, dtype: _call)
"""


def run(*args, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.parametrize("measurement", ["decode", "prefill"])
def test_bench_beside_a_peer(tmp_path, measurement):
    make_checkpoint(tmp_path / "model", seed=1)
    (tmp_path / "transformers.py").write_text(FAKE_TRANSFORMERS)
    options = ["--model", tmp_path / "model", "--context", "8,40", "--dtype", "float32", "--repeats", "2", "--json"]
    done = run("tools.bench", measurement, *options, "--peer-python", sys.executable, PYTHONPATH=str(tmp_path))
    report = json.loads(done.stdout)
    assert [row["context"] for row in report["rows"]] == [8, 40], done.stderr
    for row in report["rows"]:
        assert row.keys() == {"context", "ours_tok_s", "peer_tok_s", "ratio", "spread", "peer_spread"}
        assert row["ours_tok_s"] > 0 and row["peer_tok_s"] > 0 and row["spread"] >= 0
    assert report["peer"].startswith("transformers 0") and report["commit"] and report["machine"]


def test_bench_without_a_peer(tmp_path):
    make_checkpoint(tmp_path, seed=1)
    done = run("tools.bench", "decode", "--model", tmp_path, "--context", "8", "--repeats", "1", "--dtype", "float32")
    assert "| context | ours_tok_s |" in done.stdout and "peer: None" in done.stdout, done.stderr


def test_bench_says_what_does_not_fit(tmp_path):
    make_checkpoint(tmp_path, seed=1)
    done = run("tools.bench", "decode", "--model", tmp_path, "--context", "9000")
    assert done.returncode == 3 and "512" in done.stderr and "Traceback" not in done.stderr


def test_bench_buddy():
    done = run("tools.bench", "buddy", "--repeats", "3", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert rows and all(row["alloc_ns"] > 0 and row["free_ns"] > 0 and row["mops"] > 0 for row in rows)


def test_code_lines_are_neither_comments_nor_docstrings():
    source = '"""Doc\n\nstring."""\n\n# comment\nx = (\n    1,  # one\n)\n'
    source += '\n\ndef f():\n    """Doc."""\n    return """a\nb"""\n'
    assert code_lines(source) == 6  # x = ( ... ) is three, f two, and the string's second line one


def test_report_size_fails_above_its_limit(monkeypatch, capsys):
    from tools import report

    assert report.main(["--size"]) == 0
    assert "of at most 6000 code lines" in capsys.readouterr().out
    monkeypatch.setattr(report, "LIMIT", 10)
    assert report.main(["--size"]) == 1
