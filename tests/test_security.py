"""No security check is an assert: the tests that feed damaged and hostile files pass under `python -O` as well."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "loader": ("tests/test_loader.py", "not holds and not measur and not snapshot_is"),
    "config": ("tests/test_config.py", ""),
    "gguf": ("tests/test_gguf.py", ""),
    "tokenizer": (
        "tests/test_tokenizer.py",
        "damaged or flipped or special_text or vocabulary or surrogate or past_the",
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_the_checks_hold_without_assert(part):
    """pytest rewrites the asserts of the tests into code that -O keeps; those of the engine are gone."""
    file, chosen = PARTS[part]
    # In the same process as the tests: what proves that it is optimised.
    proof = "import sys, pytest; assert False; assert sys.flags.optimize; sys.flags.optimize or sys.exit(9);"
    run = f"sys.exit(pytest.main(['-q', '-x', '-W', 'ignore', {file!r}, '-k', {chosen!r}]))"
    done = subprocess.run(
        [sys.executable, "-O", "-c", proof + run], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and "no tests ran" not in done.stdout


def test_a_failing_test_fails_without_assert_too(tmp_path):
    (tmp_path / "test_x.py").write_text("def test():\n    assert 1 == 2\n")
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-W", "ignore", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "1 failed" in done.stdout


def test_ruffs_security_rules_are_on():
    text = (ROOT / "pyproject.toml").read_text()
    select = next(line for line in text.splitlines() if line.startswith("select = "))
    assert '"S"' in select
    for line in text.splitlines():  # every exception says why
        if line.strip().startswith('"S') and line.strip().endswith(","):
            raise AssertionError(f"no reason: {line}")
