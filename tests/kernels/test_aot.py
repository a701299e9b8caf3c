"""What the kernels compile to, for GPUs that are not here: no worse than tools/kernel_baseline.json, and more.

After a change that is meant to move the figures:
python -m tools.profile_kernels --write-baseline tools/kernel_baseline.json
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import kernel_report

ROOT = Path(__file__).parents[2]
TARGETS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100"]
pytestmark = pytest.mark.timeout(1200)  # the first test compiles for minutes; for one when Triton's cache has it all


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    # A process of its own: this one may be interpreting, and Triton cannot do both.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tools.profile_kernels", "--json", "--targets", ",".join(TARGETS)]
    result = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(result.stdout)["rows"]


def test_every_target_compiles(rows: list[dict[str, Any]]) -> None:
    kernels = {row["kernel"] for row in rows}
    assert len(kernels) >= 20
    assert {(row["kernel"], row["target"]) for row in rows} == {(k, target) for k in kernels for target in TARGETS}


def test_no_worse_than_the_baseline(rows: list[dict[str, Any]]) -> None:
    """Spills, shared memory, instructions per token, and traffic."""
    assert list(kernel_report.complaints(rows, kernel_report.read_baseline(kernel_report.BASELINE))) == []


def test_no_spills(rows: list[dict[str, Any]]) -> None:
    """None at all, but for attention with a second loop: it may park what the other loop needs."""
    assert not [row for row in rows if row["loop_spills" if "attention" in row["kernel"] else "spills"]]
    assert not [row for row in rows if row["spills"] and "bits" not in row["kernel"]]


def test_loads_are_128_bits_wide(rows: list[dict[str, Any]]) -> None:
    """Those of codes at least 64, where tokens, or a network's weights, are read one by one 32."""
    for row in rows:
        least = 32 if re.match("recall swap|importance", row["kernel"]) else 64 if "bits" in row["kernel"] else 128
        assert row["load_bits"] >= least, row


def test_attention_uses_tensor_cores(rows: list[dict[str, Any]]) -> None:
    attention = [row for row in rows if "_attention" in row["kernel"]]
    assert attention and not [row for row in attention if not row["tensor_core"]]
    assert {row["tensor_core"] for row in attention if row["target"] == "sm_90"} == {"HMMA", "HGMMA"}


def test_decode_reads_nothing_twice(rows: list[dict[str, Any]]) -> None:
    """Beside compressed pages, each program reads the matrix that rotates."""
    exact = [row for row in rows if row["kernel"].startswith("decode_attention") and "bits" not in row["kernel"]]
    assert exact and not [row for row in exact if row["traffic_ratio"] > 1.05]
