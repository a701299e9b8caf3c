"""The weights of a checkpoint, read into memory.

The bytes are read with plain file reads: a memory map of a file that shrinks kills the process, and one that is
overwritten changes weights in use.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from kernels.ops import Weight
from kernels.reference_linear import quantize, weight_of
from models.checkpoint import TensorInfo, some
from models.errors import require
from models.files import opened, stamp

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_READ = {**DTYPES, "I8": torch.int8, "U8": torch.uint8}
_SPELLED = {dtype: name for name, dtype in _READ.items()}
_SUFFIXES = ("", "_scale", "_zero")  # of the names under which the parts of a quantised weight are


def load_weights(
    weights: dict[str, Weight], tensors: dict[str, TensorInfo], dtype: torch.dtype, device: torch.device,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter, check_tensors: bool = False, stored: bool = False,
) -> None:  # fmt: skip
    """Put the tensors in place of those on the meta device; at no time more than the weights and one tensor are held.

    What is a QuantizedWeight is quantised as it is read, or, `stored`, in the checkpoint as its parts.
    check_tensors: refuse NaN and infinities, also those that the conversion to `dtype` makes. Raises ModelFormatError
    for what `check_fit` finds, before a byte is read, and for the tensors that are not finite (all listed).
    """
    check_fit(weights, tensors, stored)
    order = sorted(weights, key=lambda name: (str(tensors[name].file), tensors[name].offset))
    not_finite = []
    for name in progress(order):
        parts = {part: read_tensor(tensors[part]) for part in parts_of(name, weights[name], stored)}
        weights[name] = _placed(list(parts.values()), weights[name], dtype, device)
        if check_tensors:
            ours = weights[name]
            made = isinstance(ours, Tensor) and not _finite(ours) and _finite(parts[name])
            hint = f" (finite in {tensors[name].dtype}, not in {str(dtype).removeprefix('torch.')})"
            not_finite += [name + hint] if made else [part for part, tensor in parts.items() if not _finite(tensor)]
        del parts  # before the next one is read
    require(not not_finite, f"{_place(tensors)}: tensors with NaN or infinite values: {some(not_finite)}")


def _placed(parts: list[Tensor], place: Weight, dtype: torch.dtype, device: torch.device) -> Weight:
    """What was read for a place of the model, as it is held."""
    if isinstance(place, Tensor):
        return parts[0].to(device=device, dtype=dtype)
    if len(parts) == 1:
        return quantize(parts[0].to(device), place.bits, place.group)
    return weight_of([part.to(device) for part in parts], place.group)


def parts_of(name: str, weight: Weight, stored: bool) -> dict[str, tuple[tuple[int, ...], list[str]]]:
    """The tensors of a checkpoint that a weight is made of, by name: their shapes and which dtypes they may have."""
    if isinstance(weight, Tensor) or not stored:
        return {name: (weight.shape, list(DTYPES))}
    parts = [(name + suffix, part) for suffix, part in zip(_SUFFIXES, weight[:3], strict=True) if part is not None]
    return {name: (part.shape, [_SPELLED[part.dtype]]) for name, part in parts}


def check_fit(weights: Mapping[str, Weight], tensors: dict[str, TensorInfo], stored: bool = False) -> None:
    """That the tensors are those that the model wants, from their headers.

    Tensors that the model has no place for are ignored where checkpoints are known to carry them (rotary tables, a
    copy of a tied head). Raises ModelFormatError for missing or surplus tensors (all listed), wrong shapes and dtypes.
    """
    parts = {name: part for key, weight in weights.items() for name, part in parts_of(key, weight, stored).items()}
    missing = sorted(parts.keys() - tensors.keys())
    hint = "; an untied model needs a head: is tie_word_embeddings wrong?" if "lm_head.weight" in missing else ""
    require(not missing, f"{_place(tensors)}: tensors are missing: {some(missing)}{hint}")
    others = tensors.keys() - parts.keys() - {f"lm_head.weight{suffix}" for suffix in _SUFFIXES[: 3 if stored else 1]}
    surplus = sorted(name for name in others if not name.endswith("rotary_emb.inv_freq"))
    require(not surplus, f"{_place(tensors)}: tensors that this model has no place for: {some(surplus)}")
    for name, (shape, dtypes) in parts.items():
        info = tensors[name]
        what = f"{info.file}: tensor {name!r}"
        require(info.shape == shape, f"{what} has shape {info.shape}, config.json says {tuple(shape)}")
        require(info.dtype in dtypes, f"{what} is {info.dtype}, supported: {', '.join(dtypes)}")


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
    return data.view(_READ[info.dtype]).view(info.shape)


def _place(tensors: dict[str, TensorInfo]) -> Path:
    return next((info.file.parent for info in tensors.values()), Path("checkpoint"))
