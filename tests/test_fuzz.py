"""A short run of every fuzzer, and that they see what they look for. The long run: docs/fuzzing.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import fuzz, fuzz_targets

ROOT = Path(__file__).resolve().parent.parent
TYPED = {"ConfigError", "ModelFormatError", "TokenizerError"}


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_damaged_files_are_loaded_rightly_or_refused_by_name(target):
    report = fuzz.fuzz(target, inputs=300, seed=7)
    assert report["bad"] == {}, report
    assert report["inputs"] == sum(report["outcomes"].values()) == 300
    assert set(report["outcomes"]) <= TYPED | {"equal", "different"}
    assert report["outcomes"]["equal"] and TYPED & set(report["outcomes"]), "it damages too much, or nothing"


def test_an_input_is_the_same_every_time(tmp_path):
    import random

    for name in fuzz.TARGETS:
        found = []
        for i in range(2):
            directory = tmp_path / f"{name}{i}"
            directory.mkdir()
            fuzz_targets.make(name, directory).damage(random.Random("1/5"))
            found.append({file.name: file.read_bytes() for file in directory.iterdir()})
        assert found[0] == found[1]


# Loaders that do wrong, in the worker's place of ours: each must be seen.
FAULTS = {
    "silent": "targets._load = lambda d, c: {k: v + 1 for k, v in targets._tensors().items()}",
    "untyped KeyError": "targets._load = lambda d, c: {}['x']",
    "slow": "import time; targets._load = lambda d, c: time.sleep(1.1) or targets._tensors()",
    "crash -11": "import ctypes; targets._load = lambda d, c: ctypes.string_at(0)",
    "crash 7": "import os; targets._load = lambda d, c: os._exit(7)",
    "hang": "import time; here.HANG_S = 0.5; here.START_S = 15; targets._load = lambda d, c: time.sleep(60)",
}


@pytest.mark.parametrize("outcome", FAULTS)
def test_the_fuzzer_sees(tmp_path, outcome):
    """A package `tools` of the test's own, whose fuzz module is ours with a fault put into what it drives."""
    inputs = "1" if outcome == "hang" else "2"
    (tmp_path / "tools").mkdir()
    for file in (ROOT / "tools").glob("*.py"):
        (tmp_path / "tools" / file.name).symlink_to(file)
    (tmp_path / "tools" / "fuzz.py").unlink()
    source = (ROOT / "tools" / "fuzz.py").read_text()
    fault = "from tools import fuzz_targets as targets\nimport sys as fuzz_sys\nhere = fuzz_sys.modules[__name__]\n"
    (tmp_path / "tools" / "fuzz.py").write_text(
        source.replace('if __name__ == "__main__":', f'{fault}{FAULTS[outcome]}\nif __name__ == "__main__":')
    )
    done = subprocess.run(
        [sys.executable, "-m", "tools.fuzz", "header", "--inputs", inputs, "--json"], cwd=tmp_path, capture_output=True,
        text=True, timeout=200, env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["bad"] == {outcome: list(range(int(inputs)))}, report


def test_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tools.fuzz", "config", "--inputs", "20", "--seed", "3", "--workers", "2"], cwd=ROOT,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("config: 20 inputs of seed 3 in ")
