"""rms_norm, add_rms_norm and silu_mul against float64."""

import pytest
import torch

from kernels.tokens import add_rms_norm, rms_norm, silu_mul
from tools import float64

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def strided(tokens: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Rows with a gap between them, as in a view of a fused projection."""
    return torch.randn(tokens, width + 24).to(dtype).to(device)[:, 8 : 8 + width]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens, width", [(1, 64), (3, 100), (2, 576), (2, 4096)])
def test_rms_norm(tokens: int, width: int, dtype: torch.dtype, device: str) -> None:
    x, weight = strided(tokens, width, dtype, device), torch.randn(width).to(dtype).to(device)
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype and got.is_contiguous()
    float64.assert_close(got, float64.rms_norm(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens, width", [(1, 64), (3, 100), (2, 2048)])
def test_add_rms_norm(tokens: int, width: int, dtype: torch.dtype, device: str) -> None:
    x, residual = strided(tokens, width, dtype, device), strided(tokens, width, dtype, device)
    weight = torch.randn(width).to(dtype).to(device)
    total = (x.double() + residual.double()).to(dtype)
    got = add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(residual, total, rtol=0, atol=0)
    float64.assert_close(got, float64.rms_norm(total, weight, 1e-6), dtype)


def test_rms_norm_of_large_values(device: str) -> None:
    """The square of a float16 above 256 is beyond float16."""
    x = torch.full((1, 128), 3e4, dtype=torch.float16, device=device)
    got = rms_norm(x, torch.ones(128, dtype=torch.float16, device=device), 1e-5)
    float64.assert_close(got, torch.ones(1, 128), torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens, width", [(1, 64), (3, 1027), (2, 1536)])
def test_silu_mul(tokens: int, width: int, dtype: torch.dtype, device: str) -> None:
    fused = (4 * torch.randn(tokens, 2 * width)).to(dtype).to(device)
    gate, up = fused[:, :width], fused[:, width:]
    got = silu_mul(gate, up)
    assert got.dtype == dtype and got.is_contiguous()
    float64.assert_close(got, gate.double() * torch.sigmoid(gate.double()) * up.double(), dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's: exp(300) is infinite, as meant
def test_silu_of_extreme_values(device: str) -> None:
    gate = torch.tensor([[-300.0, -90.0, 0.0, 90.0, 300.0]], device=device)
    got = silu_mul(gate, torch.ones_like(gate))
    float64.assert_close(got, torch.tensor([[0.0, 0.0, 0.0, 90.0, 300.0]]), torch.float32)


def test_no_tokens(device: str) -> None:
    empty = torch.empty(0, 64, device=device)
    assert rms_norm(empty, torch.ones(64, device=device), 1e-5).shape == (0, 64)
    assert add_rms_norm(empty, empty.clone(), torch.ones(64, device=device), 1e-5).shape == (0, 64)
    assert silu_mul(empty, empty).shape == (0, 64)


def test_wrong_arguments_are_named(device: str) -> None:
    x = torch.zeros(2, 64, device=device)
    with pytest.raises(AssertionError, match=r"weight: .*\(32,\).*wanted: .*\(64,\)"):
        rms_norm(x, torch.ones(32, device=device), 1e-5)
    with pytest.raises(AssertionError, match="strides"):
        silu_mul(x.T, x.T)
    with pytest.raises(AssertionError, match="float64"):
        rms_norm(x.double(), torch.ones(64, device=device), 1e-5)
