"""What the wrappers check of the tensors that they hand to a kernel."""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check(name: str, x: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...],
          strides: tuple[int, ...] = (1,)) -> None:
    """That x has the shape, one of the dtypes, and these as its last strides."""
    assert x.shape == shape and x.dtype in dtypes and x.stride()[-len(strides) :] == strides, (
        f"{name}: {x.dtype}, {tuple(x.shape)}, strides {x.stride()}; "
        f"wanted: {dtypes}, {tuple(shape)}, last strides {strides}"
    )
