"""Kernels run in Triton's interpreter where there is no GPU: decided here, before anything imports Triton."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `interpreter`: importlib mode adds no path
HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]
INTERPRETED = HAS_TRITON and not any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd"))
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402

if INTERPRETED:
    import interpreter

    interpreter.install()


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def meter():
    """Watches every load and store of the test: see interpreter.Meter."""
    if not INTERPRETED:
        pytest.skip("needs the interpreter")
    with interpreter.Meter() as watching:
        yield watching


@pytest.fixture
def int32_checks():
    """An int32 that overflows in a kernel is an error, instead of wrapping around."""
    if not INTERPRETED:
        pytest.skip("needs the interpreter")
    with interpreter.overflow_checks():
        yield
