"""The weights of a checkpoint, read into memory.

The bytes are read with plain file reads: a memory map of a file that shrinks kills the process, and one that is
overwritten changes weights in use.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint import TensorInfo, some
from models.errors import ModelFormatError
from models.files import opened, stamp

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def load_weights(
    weights: dict[str, Tensor],
    tensors: dict[str, TensorInfo],
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
    check_tensors: bool = False,
) -> None:
    """Put the tensors in place of those on the meta device; at no time more than the weights and one tensor are held.

    check_tensors: refuse NaN and infinities, also those that the conversion to `dtype` makes. Raises ModelFormatError
    for what `check_fit` finds, before a byte is read, and for the tensors that are not finite (all listed).
    """
    check_fit(weights, tensors)
    order = sorted(weights, key=lambda name: (str(tensors[name].file), tensors[name].offset))
    not_finite = []
    for name in progress(order):
        tensor = read_tensor(tensors[name])
        weights[name] = tensor.to(device=device, dtype=dtype)
        if check_tensors and not _finite(weights[name]):
            made = f" (finite in {tensors[name].dtype}, not in {str(dtype).removeprefix('torch.')})"
            not_finite.append(name + (made if _finite(tensor) else ""))
    if not_finite:
        raise ModelFormatError(f"{_place(tensors)}: tensors with NaN or infinite values: {some(not_finite)}")


def check_fit(weights: Mapping[str, Tensor], tensors: dict[str, TensorInfo]) -> None:
    """That the tensors are those that the model wants, from their headers.

    Tensors that the model has no place for are ignored where checkpoints are known to carry them (rotary tables, a
    copy of a tied head). Raises ModelFormatError for missing or surplus tensors (all listed), wrong shapes and dtypes.
    """
    wanted = {name: tuple(weight.shape) for name, weight in weights.items()}
    missing = sorted(wanted.keys() - tensors.keys())
    if missing:
        hint = (
            "; an untied model needs its own head: is tie_word_embeddings wrong?" if "lm_head.weight" in missing else ""
        )
        raise ModelFormatError(f"{_place(tensors)}: tensors are missing: {some(missing)}{hint}")
    others = tensors.keys() - wanted.keys() - {"lm_head.weight"}
    surplus = sorted(name for name in others if not name.endswith("rotary_emb.inv_freq"))
    if surplus:
        raise ModelFormatError(f"{_place(tensors)}: tensors that this model has no place for: {some(surplus)}")
    for name, shape in wanted.items():
        info = tensors[name]
        if info.shape != shape:
            raise ModelFormatError(f"{info.file}: tensor {name!r} has shape {info.shape}, config.json says {shape}")
        if info.dtype not in DTYPES:
            raise ModelFormatError(f"{info.file}: tensor {name!r} is {info.dtype}, supported: {', '.join(DTYPES)}")


def _finite(tensor: Tensor) -> bool:
    """Whether every value is; in one pass, without memory of its own."""
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()  # both are NaN if one value is
    return math.isfinite(low) and math.isfinite(high)


def read_tensor(info: TensorInfo) -> Tensor:
    """One tensor, in memory of its own. Raises ModelFormatError if the file changed since its header was read."""
    data = torch.empty(info.nbytes, dtype=torch.uint8)
    with opened(info.file) as file:
        before = stamp(os.fstat(file.fileno()))
        file.seek(info.offset)
        view = memoryview(data.numpy().data)
        done = 0
        while done < info.nbytes and (count := file.readinto(view[done:])):  # type: ignore[attr-defined]
            done += count
        after = stamp(os.fstat(file.fileno()))
    if done < info.nbytes or not info.stamp == before == after:
        raise ModelFormatError(f"{info.file}: the file changed while it was read")
    return data.view(DTYPES[info.dtype]).view(info.shape)


def _place(tensors: dict[str, TensorInfo]) -> Path:
    return next((info.file.parent for info in tensors.values()), Path("checkpoint"))
