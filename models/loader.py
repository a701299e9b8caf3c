"""The weights of a checkpoint, read into memory.

The bytes are read with plain file reads: a memory map of a file that shrinks kills the process, and one that is
overwritten changes weights in use.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint import TensorInfo, some
from models.errors import require
from models.files import opened, stamp

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def load_weights(
    weights: dict[str, Tensor], tensors: dict[str, TensorInfo], dtype: torch.dtype, device: torch.device,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter, check_tensors: bool = False,
) -> None:  # fmt: skip
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
    require(not not_finite, f"{_place(tensors)}: tensors with NaN or infinite values: {some(not_finite)}")


def check_fit(weights: Mapping[str, Tensor], tensors: dict[str, TensorInfo]) -> None:
    """That the tensors are those that the model wants, from their headers.

    Tensors that the model has no place for are ignored where checkpoints are known to carry them (rotary tables, a
    copy of a tied head). Raises ModelFormatError for missing or surplus tensors (all listed), wrong shapes and dtypes.
    """
    missing = sorted(weights.keys() - tensors.keys())
    hint = "; an untied model needs a head: is tie_word_embeddings wrong?" if "lm_head.weight" in missing else ""
    require(not missing, f"{_place(tensors)}: tensors are missing: {some(missing)}{hint}")
    others = tensors.keys() - weights.keys() - {"lm_head.weight"}
    surplus = sorted(name for name in others if not name.endswith("rotary_emb.inv_freq"))
    require(not surplus, f"{_place(tensors)}: tensors that this model has no place for: {some(surplus)}")
    for name, weight in weights.items():
        info = tensors[name]
        what = f"{info.file}: tensor {name!r}"
        require(info.shape == weight.shape, f"{what} has shape {info.shape}, config.json says {tuple(weight.shape)}")
        require(info.dtype in DTYPES, f"{what} is {info.dtype}, supported: {', '.join(DTYPES)}")


def _finite(tensor: Tensor) -> bool:
    """Whether every value is; in one pass, without memory of its own."""
    return not tensor.numel() or all(map(math.isfinite, tensor.aminmax()))  # both are NaN if one value is


def read_tensor(info: TensorInfo) -> Tensor:
    """One tensor, in memory of its own. Raises ModelFormatError if the file changed since its header was read."""
    data = torch.empty(info.nbytes, dtype=torch.uint8)
    with opened(info.file) as file:
        before = stamp(file)
        file.seek(info.offset)
        unchanged = file.readinto(data.numpy().data) == info.nbytes and info.stamp == before == stamp(file)
    require(unchanged, f"{info.file}: the file changed while it was read")
    return data.view(DTYPES[info.dtype]).view(info.shape)


def _place(tensors: dict[str, TensorInfo]) -> Path:
    return next((info.file.parent for info in tensors.values()), Path("checkpoint"))
