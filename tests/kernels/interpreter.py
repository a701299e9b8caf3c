"""Triton 3.9's interpreter, repaired and instrumented.

- bfloat16: the interpreter keeps it as uint16 and computes on those bits. Here every operation decodes to float32,
  computes, and rounds to nearest even.
- speed: see `tools.interpreter`.
- `overflow_checks`: int32 overflow raises.
- `Meter`: every load and store, checked against the tensors that the test declares; races between programs.

The interpreter runs programs one after the other, so a missing barrier inside a program is invisible to all of this.
"""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

from tools.interpreter import hurry, set_options


def install() -> None:
    _repair_bfloat16()
    hurry()


@contextlib.contextmanager
def overflow_checks() -> Iterator[None]:
    set_options(sanitize_overflow=True, debug=True)
    try:
        yield
    finally:
        set_options(sanitize_overflow=False, debug=False)


# bfloat16


def _decode(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _encode(values: np.ndarray) -> np.ndarray:
    """Round to nearest even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _is_bfloat16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16


def _float32(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(_decode(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _repair_bfloat16() -> None:
    builder = InterpreterBuilder
    binary_op, unary_op, create_dot, cast_impl = (
        builder.binary_op, builder.unary_op, builder.create_dot, builder.cast_impl,
    )  # fmt: skip
    reduce_sum, reduce_min_max = ReduceOps.sum, ReduceOps.min_max

    def fixed_binary_op(self, lhs, rhs, op):
        if not _is_bfloat16(lhs):
            return binary_op(self, lhs, rhs, op)
        result = op(_decode(lhs.data), _decode(rhs.data))
        return TensorHandle(result if result.dtype == np.bool_ else _encode(result), lhs.dtype.scalar)

    def fixed_unary_op(self, arg, op):
        if not _is_bfloat16(arg):
            return unary_op(self, arg, op)
        return TensorHandle(_encode(op(_decode(arg.data))), arg.dtype.scalar)

    def fixed_create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        return create_dot(self, _float32(a), _float32(b), d, input_precision, max_num_imprecise_acc)

    def fixed_cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target:
            return TensorHandle(src.data, target)
        if target == tl.bfloat16:
            wide = cast_impl(self, src, tl.float32).data if source != tl.float32 else src.data
            return TensorHandle(_encode(wide), tl.bfloat16)
        return cast_impl(self, _float32(src), dst_type)

    def fixed_create_fp_to_fp(self, src, dst_type, rounding_mode):
        repaired = {tl.float32, tl.float16, tl.bfloat16}
        assert {src.dtype.scalar, dst_type.scalar} <= repaired, f"{src.dtype} to {dst_type} is not repaired"
        return self.cast_impl(src, dst_type)

    def reduce_in_float32(method):
        def fixed(self, value, *args, **kwargs):
            if not (isinstance(value, tl.tensor) and _is_bfloat16(value.handle)):
                return method(self, value, *args, **kwargs)
            wide = method(self, tl.tensor(_float32(value.handle), value.type.with_element_ty(tl.float32)))
            shape = wide.type.with_element_ty(tl.bfloat16) if wide.type.is_block() else tl.bfloat16
            return tl.tensor(TensorHandle(_encode(wide.handle.data), tl.bfloat16), shape)

        return fixed

    builder.binary_op, builder.unary_op, builder.create_dot = fixed_binary_op, fixed_unary_op, fixed_create_dot
    builder.cast_impl, builder.create_fp_to_fp = fixed_cast_impl, fixed_create_fp_to_fp
    ReduceOps.sum, ReduceOps.min_max = reduce_in_float32(reduce_sum), reduce_in_float32(reduce_min_max)


# Memory


class Meter:
    """Checks every access of the kernels launched inside `with Meter() as meter`.

    Before the launch a test declares what may be touched: `meter.watch(name, tensor, write=...)`. Then an access
    outside of all declared elements raises, as does a write to a read-only tensor, two programs of one launch writing
    the same element, and a program reading what another one of the same launch writes. `bytes_asked`
    and `bytes_unique` are the memory traffic.
    """

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int, bool, str]] = []  # first byte, past the last byte, writable, name
        self.bytes_asked = 0
        self.sectors: list[np.ndarray] = []  # 32-byte sectors touched, per access
        self._forget_launch()

    def watch(self, name: str, *tensors: torch.Tensor, write: bool = False) -> None:
        for tensor in tensors:
            span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            start = tensor.data_ptr()
            self.ranges.append((start, start + span * tensor.element_size(), write, name))

    def __enter__(self) -> "Meter":
        self._saved = (
            InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store,
            InterpreterBuilder.set_grid_dim, torch.empty, torch.empty_like, torch.Tensor.new_empty,
        )  # fmt: skip
        load, store, set_grid_dim, empty, empty_like, new_empty = self._saved

        def create_masked_load(builder, ptrs, mask, other, *rest):
            self._access(builder, ptrs, mask, write=False)
            return load(builder, ptrs, mask, other, *rest)

        def create_masked_store(builder, ptrs, value, mask, *rest):
            self._access(builder, ptrs, mask, write=True)
            return store(builder, ptrs, value, mask, *rest)

        def new_launch(builder, *grid):
            self.finish_launch()
            set_grid_dim(builder, *grid)

        def watched(make):
            def made(*args, **kwargs):
                tensor = make(*args, **kwargs)
                if tensor.numel():
                    self.watch("made by the wrapper", tensor, write=True)
                return tensor

            return made

        InterpreterBuilder.create_masked_load = create_masked_load
        InterpreterBuilder.create_masked_store = create_masked_store
        InterpreterBuilder.set_grid_dim = new_launch
        torch.empty, torch.empty_like, torch.Tensor.new_empty = watched(empty), watched(empty_like), watched(new_empty)
        return self

    def __exit__(self, failure, *rest) -> None:
        (
            InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store,
            InterpreterBuilder.set_grid_dim, torch.empty, torch.empty_like, torch.Tensor.new_empty,
        ) = self._saved  # fmt: skip
        if failure is None:
            self.finish_launch()

    def _forget_launch(self) -> None:
        self._reads: list[tuple[int, np.ndarray]] = []  # (program, element addresses)
        self._writes: list[tuple[int, np.ndarray]] = []

    def _access(self, builder: InterpreterBuilder, ptrs: TensorHandle, mask: TensorHandle, write: bool) -> None:
        size = max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
        addresses = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)].ravel().astype(np.int64)
        if addresses.size == 0:
            return
        inside = np.zeros(addresses.size, bool)
        for start, end, writable, _ in self.ranges:
            if writable or not write:
                inside |= (addresses >= start) & (addresses + size <= end)
        if not inside.all():
            raise IndexError(self._describe(int(addresses[~inside][0]), write, builder.grid_idx))
        x, y, z = builder.grid_idx
        program = (x * builder.grid_dim[1] + y) * builder.grid_dim[2] + z
        (self._writes if write else self._reads).append((program, addresses))
        self.bytes_asked += addresses.size * size
        self.sectors.append(np.unique(addresses // 32))

    def _describe(self, address: int, write: bool, program: tuple[int, int, int]) -> str:
        nearest = min(self.ranges, key=lambda r: max(r[0] - address, address - r[1], 0))
        kind = "store to" if write else "load of"
        return f"program {program}: {kind} byte {address - nearest[0]} of {nearest[3]}, {nearest[1] - nearest[0]} bytes"

    def finish_launch(self) -> None:
        """Look for races in the launch that has just ended."""
        if self._writes:
            written, writers = _flatten(self._writes)
            read, readers = _flatten(self._reads)
            self._forget_launch()
            order = np.lexsort((writers, written))
            written, writers = written[order], writers[order]
            clash = (written[1:] == written[:-1]) & (writers[1:] != writers[:-1])
            assert not clash.any(), f"two programs write the same element, {int(clash.sum())} times"
            place = np.minimum(np.searchsorted(written, read), written.size - 1)
            clash = (written[place] == read) & (writers[place] != readers)
            assert not clash.any(), f"a program reads what another one writes, {int(clash.sum())} times"
        self._forget_launch()

    @property
    def bytes_unique(self) -> int:
        """Bytes of memory traffic with an infinite cache: distinct 32-byte sectors."""
        return 32 * len(np.unique(np.concatenate(self.sectors))) if self.sectors else 0


def _flatten(accesses: list[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    if not accesses:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    programs = np.repeat([program for program, _ in accesses], [len(addresses) for _, addresses in accesses])
    return np.concatenate([addresses for _, addresses in accesses]), programs
