"""compress and decompress against their statement in float64, and against the bytes of the reference."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.compress import compress, decompress
from kernels.ops import CLIPS
from tools import float64

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BITS = pytest.mark.parametrize("bits", [8, 4, 3, 2])
KINDS = pytest.mark.parametrize("is_key", [True, False], ids=["K", "V"])
SHAPES = pytest.mark.parametrize(
    ("page_size", "head_dim"), [(64, 128), (64, 80), (32, 96), (16, 8), (16, 72), (128, 64)], ids=str
)


def pages(n: int, page_size: int, head_dim: int, dtype: torch.dtype, device: str) -> Tensor:
    """Channels of very different sizes, some of one sign; a constant one, zeros, an outlier. A view with gaps."""
    x = torch.randn(n, page_size, head_dim) * torch.logspace(-3, 1.0, head_dim) + 0.3
    x[:, :, 1], x[:, :, 2], x[0, 3, 4], x[:, :, 5] = 7.0, 0.0, 60.0, -3.0
    return torch.nn.functional.pad(x, (0, 8)).to(dtype).to(device)[..., :head_dim]


def check_bytes(x: Tensor, bits: int, is_key: bool) -> tuple[np.ndarray, np.ndarray]:
    """That Triton gives the reference's bytes, but for sums in another order -> (its codes, records)."""
    got = compress(x, bits, is_key)
    for ours, theirs in zip(got, reference.compress(x.cpu(), bits, is_key), strict=True):
        assert ours.shape == theirs.shape
        different = int((ours.cpu() != theirs).sum())
        assert different <= 1 + 0.02 * ours.numel(), f"{different} bytes of {ours.numel()}"
    return got[0].cpu().numpy(), got[1].cpu().numpy()


@SHAPES
@KINDS
@BITS
def test_every_element_is_within_half_a_step(
    bits: int, is_key: bool, page_size: int, head_dim: int, device: str
) -> None:
    """In the rotated basis, of what its scale reaches; and the scale is one that the format asks for."""
    rotation, steps = float64.hadamard(head_dim), 2**bits - 1
    for dtype in DTYPES:
        x = pages(2, page_size, head_dim, dtype, device)
        codes, records = check_bytes(x, bits, is_key)
        kept = [
            float64.decompress(c, r, bits, is_key, page_size, head_dim) for c, r in zip(codes, records, strict=True)
        ]
        for page in range(2):
            want = x[page].double().cpu().numpy() @ rotation
            got, scale_codes = kept[page] @ rotation, records[page, :page_size].astype(np.int64)
            scale = ((1 + scale_codes % 16 / 16) * 2.0 ** (scale_codes // 16 - 8 - bits))[:, None]
            low, high = kept_range(records[page], want, scale, bits, is_key, page_size)
            inside = np.clip(want, low, high)
            assert (abs(got - inside) <= 0.5 * scale + 1e-5 * abs(want).max()).all(), abs(got - inside).max()
            middle = (high + low) / 2
            if is_key:
                size = abs(want.mean(0))
                assert (abs(middle - want.mean(0)) <= np.maximum(size / 15, 1.07 * 2.0**-8)).all()
            reach = abs(want - middle).max(1) if is_key else (want.max(1) - want.min(1)) / 2
            least = reach * (CLIPS[-1] if bits < 4 else 1) * 2 / steps
            assert (scale[:, 0] >= least * (1 - 1 / 16)).all(), "narrower than the narrowest clip"


def kept_range(
    record: np.ndarray, want: np.ndarray, scale: np.ndarray, bits: int, is_key: bool, page_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """What the least and the largest code of a token mean in the rotated basis."""
    if is_key:
        means = record[page_size:].astype(np.int64)
        size = means % 128
        mean = np.where(means > 127, -1, 1) * np.where(size == 0, 0, (1 + size % 8 / 8) * 2.0 ** (size // 8 - 8))
        half = (2**bits - 1) / 2 * scale
        return mean - half, mean + half
    zero = record[page_size:].view(np.int8).astype(np.int64)[:, None] - 2 ** (bits - 1)
    return zero * scale, (zero + 2**bits - 1) * scale


@pytest.mark.parametrize("token", [0.0, 5.0, -5.0])
@BITS
@pytest.mark.parametrize(
    "is_key",
    [True, False],
    ids=["K", "V"],
)
def test_tokens_that_are_constant_when_rotated(is_key: bool, bits: int, token: float, device: str) -> None:
    x = torch.zeros(1, 16, 16, device=device)
    x[:, :, 0] = token
    codes, records = (part.cpu().numpy() for part in compress(x, bits, is_key))
    got = float64.decompress(codes[0], records[0], bits, is_key, 16, 16)
    assert abs(got - x[0].cpu().numpy()).max() <= max(0.05 * abs(token), 2.0**-8)


@SHAPES
@KINDS
@BITS
def test_decompress(bits: int, is_key: bool, page_size: int, head_dim: int, device: str) -> None:
    for dtype in DTYPES:
        x = pages(2, page_size, head_dim, dtype, device)
        codes, records = compress(x, bits, is_key)
        got = decompress(codes, records, bits, is_key, x)
        assert got.dtype == dtype and got.shape == x.shape
        bytes_of = zip(codes.cpu().numpy(), records.cpu().numpy(), strict=True)
        kept = [float64.decompress(c, r, bits, is_key, page_size, head_dim) for c, r in bytes_of]
        # A sum of D terms, of which the largest token's are the size.
        want = torch.from_numpy(np.stack(kept))
        float64.assert_close(got / want.abs().max(), want / want.abs().max(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@KINDS
@BITS
def test_bad_elements(bits: int, is_key: bool, dtype: torch.dtype, device: str) -> None:
    """NaN is 0, an infinity 2^14; other pages keep what they had."""
    x = pages(2, 32, 16, dtype, device)
    plain = compress(x, bits, is_key)
    x[0, 3, 6], x[0, 5, 6], x[0, 3, 9] = torch.inf, torch.nan, -torch.inf
    bad = compress(x, bits, is_key)
    assert torch.isfinite(decompress(*bad, bits, is_key, x)).all()
    x[0, 3, 6], x[0, 5, 6], x[0, 3, 9] = 2.0**14, 0, -(2.0**14)
    for ours, named, before in zip(bad, compress(x, bits, is_key), plain, strict=True):
        assert torch.equal(ours, named) and torch.equal(ours[1], before[1])


def test_no_pages(device: str) -> None:
    codes, records = compress(torch.zeros(0, 16, 8, device=device), 3, True)
    assert codes.shape == (0, 48) and records.shape == (0, 24)
    assert decompress(codes, records, 3, True, torch.zeros(1, 16, 8, device=device)).shape == (0, 16, 8)


def test_wrong_arguments_are_named(device: str) -> None:
    x = torch.zeros(1, 32, 16, device=device)
    with pytest.raises(AssertionError, match="5 bits"):
        compress(x, 5, True)
    with pytest.raises(AssertionError, match="strides"):
        compress(x.transpose(1, 2), 4, True)
    with pytest.raises(AssertionError, match="codes"):
        decompress(*compress(x, 4, True), 3, True, x)
