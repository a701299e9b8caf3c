"""Quantised linear maps: both backends against float64, of weights that are read by the layout's own description."""

import interpreter
import pytest
import torch

from kernels import fused, reference
from kernels.ops import QuantizedWeight
from kernels.reference_linear import dequantize, quantize

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 64, 640), (3, 33, 100), (17, 96, 576), (40, 130, 172), (130, 130, 172)]  # rows, outputs, inputs


def random_weight(outputs: int, inputs: int, bits: int, group: int, device: str = "cpu") -> QuantizedWeight:
    """Any codes; scales and zeros of either sign."""
    if bits == 8:
        codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        return QuantizedWeight(codes.to(device), torch.rand(outputs, 1).bfloat16().to(device), None, inputs)
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    scales, zeros = torch.randn(2, outputs, -(-inputs // group)).bfloat16()
    return QuantizedWeight(codes.to(device), scales.to(device), zeros.to(device), group)


def weight64(weight: QuantizedWeight) -> torch.Tensor:
    """[out, in] float64, one element after the other, as `kernels.ops` describes it."""
    codes, scales, zeros, group = (x.cpu() if isinstance(x, torch.Tensor) else x for x in weight)
    if zeros is None:
        return codes.double() * scales.double()
    outputs, inputs = weight.shape
    found = torch.empty(outputs, inputs, dtype=torch.float64)
    for g, start in enumerate(range(0, inputs, group)):
        size = min(group, inputs - start)
        for i in range(size):
            byte = codes[:, start // 2 + i % (size // 2)].long()
            code = byte % 16 if i < size // 2 else byte // 16
            found[:, start + i] = (code - 8).double() * scales[:, g].double() + zeros[:, g].double()
    return found


def strided(rows: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(rows, width + 24).to(dtype).to(device)[:, 8 : 8 + width]


def layouts(shapes: list[tuple[int, int, int]]) -> list[tuple[int, int, int, int, int]]:
    return [(*shape, bits, group) for shape in shapes for bits, group in ((8, 0), (4, 32), (4, 128))]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten is NaN."""
    new_empty = torch.Tensor.new_empty

    def nan(self: torch.Tensor, *size: int, **options: torch.dtype) -> torch.Tensor:
        made = new_empty(self, *size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", nan)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, outputs, inputs, bits, group", layouts(SHAPES))
def test_triton(
    rows: int, outputs: int, inputs: int, bits: int, group: int, dtype: torch.dtype, device: str, poisoned: None
) -> None:
    x, weight = strided(rows, inputs, dtype, device), random_weight(outputs, inputs, bits, group, device)
    exact = x.cpu().double() @ weight64(weight).T
    bias = torch.randn(outputs).to(dtype).to(device)
    got = fused.linear(x, weight, bias)
    assert got.dtype == dtype and got.is_contiguous()
    assert_near(got, exact + bias.cpu().double(), dtype)
    wide = fused.linear_float32(x, weight)
    assert wide.dtype == torch.float32
    assert_near(wide, exact, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rows, outputs, inputs, bits, group", layouts([*SHAPES, (5, 192, 544), (1, 32, 40), (2, 64, 66)])
)
def test_torch(rows: int, outputs: int, inputs: int, bits: int, group: int, dtype: torch.dtype) -> None:
    x, weight = strided(rows, inputs, dtype, "cpu"), random_weight(outputs, inputs, bits, group)
    exact = x.double() @ weight64(weight).T
    torch.testing.assert_close(dequantize(weight).double(), weight64(weight), rtol=1e-6, atol=1e-6)
    packed, bias = reference.pack_linear(weight), torch.randn(outputs).to(dtype)
    got = reference.linear(x, packed, bias)
    assert got.dtype == dtype
    assert_near(got, exact + bias.double(), dtype)
    wide = reference.linear_float32(x, packed)
    assert wide.dtype == torch.float32
    assert_near(wide, exact, torch.float32)


def test_what_a_program_touches(meter: interpreter.Meter) -> None:
    """Nothing outside of its tensors, at shapes that fill no block; and no two programs write the same."""
    for bits, rows, outputs, inputs in ((8, 3, 70, 99), (4, 3, 70, 100), (4, 1, 70, 1172)):
        x, weight = strided(rows, inputs, torch.float16, "cpu"), random_weight(outputs, inputs, bits, 64)
        meter.watch("x", x)
        meter.watch("weight", *(part for part in weight[:3] if part is not None))
        assert fused.linear(x, weight).shape == (rows, outputs)


def test_quantize_gives_the_nearest_codes() -> None:
    """Each weight is within half a step of what it is read as; a code more or less would be further away."""
    weight = torch.randn(40, 300) * torch.rand(40, 1)
    weight[3], weight[5, 64:128] = 0, 1.5
    for bits, group in ((8, 0), (4, 32), (4, 128)):
        made = quantize(weight, bits, group)
        steps = made.scales.double()
        steps = steps.expand(40, 300) if bits == 8 else steps.repeat_interleave(group, 1)[:, :300]
        error = (weight64(made) - weight.double()).abs()
        ends = torch.zeros(40, 300, dtype=torch.bool)
        if bits == 4:  # the ends may be clipped
            codes = torch.round((weight64(made) - made.zeros.double().repeat_interleave(group, 1)[:, :300]) / steps)
            ends = (codes <= -8) | (codes >= 7)
        assert (error <= steps.abs() * 0.501 + 1e-9)[~ends].all()
        assert error.pow(2).mean() < (1e-4 if bits == 8 else 1e-2) * weight.pow(2).mean()
        again = quantize(weight, bits, group)
        assert all(torch.equal(a, b) for a, b in zip(made[:3], again[:3], strict=True) if a is not None)


def assert_near(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Of the size of all outputs: the largest is a few times that, and is rounded twice."""
    steps = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    error = (got.cpu().double() - exact).abs().max() / exact.pow(2).mean().sqrt()
    assert error < 6 * steps, float(error)
