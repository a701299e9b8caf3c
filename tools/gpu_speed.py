"""How fast the kernels are on a GPU: medians of CUDA events, beside what the device can do at most."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tools import profile_kernels

_REPEATS = 25
_L2_BYTES = 64 << 20  # of a device that does not say it
_MOST_COPIES = 32  # of a kernel's arguments
TINY = profile_kernels.Model("tiny", 4, 2, 64, 128, 192, "float16")  # for the interpreter, with so many tokens:
_TINY_TOKENS = 256


class Timer(Protocol):
    """What calls take: tests pass one that knows no device."""

    def seconds(self, calls: Sequence[Callable[[], Any]]) -> float | None:
        """The median time of a call. All do the same on data of their own, and each is made at least once; None where
        times would mean nothing."""


class CudaTimer:
    """CUDA events around each call, in the order of the calls, again and again."""

    def __init__(self) -> None:
        # Writing it empties the second-level cache, and keeps the device busy until the call is queued.
        self._filler = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")

    def seconds(self, calls: Sequence[Callable[[], Any]]) -> float | None:
        for call in calls:
            call()  # the first one compiles
        times = []
        for i in range(max(_REPEATS, len(calls))):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
            self._filler.zero_()
            begin.record()
            calls[i % len(calls)]()
            end.record()
            times.append((begin, end))
        torch.cuda.synchronize()
        return float(statistics.median(1e-3 * begin.elapsed_time(end) for begin, end in times))


class NoTimer:
    """Makes each call once: where there is no GPU, so that all that is timed is known to run."""

    def seconds(self, calls: Sequence[Callable[[], Any]]) -> float | None:
        with np.errstate(all="ignore"):  # random codes of a compressed page mean numbers of any size
            for call in calls:
                call()
        return None


def peaks() -> tuple[float, float] | None:
    """(bytes, 16-bit flops) a second of this GPU by its vendor, if it is a known one."""
    name = torch.cuda.get_device_name()
    known = {gpu: figures for gpus in profile_kernels.GPUS.values() for gpu, figures in gpus.items()}
    return next(((bandwidth, flops) for gpu, (bandwidth, _, _, flops) in known.items() if gpu in name), None)


def copy_speed(timer: Timer, device: str) -> float | None:
    """Bytes a second, read and written, of the device's own copy: a roof for GPUs that are not known."""
    source = torch.empty(1 << 30 if device == "cuda" else 1 << 10, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = timer.seconds([lambda: target.copy_(source)])
    return None if seconds is None else 2 * source.numel() / seconds


def kernel_rows(device: str, timer: Timer, roof: tuple[float, float] | None = None) -> Iterator[dict[str, Any]]:
    """Each kernel of tools.profile_kernels: time, and its least bytes a second, as it would be launched at real shapes;
    on a CPU, in the interpreter, each once at a tiny one. roof: see `peaks`.

    of_peak: the time that the least bytes and flops take at the roof, over the time measured; of decode, whose partial
    results another kernel merges, of this kernel alone.
    """
    real = device == "cuda"
    if real:
        l2_bytes = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or _L2_BYTES
        roof = roof or peaks()
    entries = profile_kernels.manifest() if real else [(name, op, TINY) for name, op in profile_kernels.OPS.items()]
    for name, op, model in entries:
        tokens = op.tokens if real else min(op.traffic_tokens or _TINY_TOKENS, _TINY_TOKENS)
        function, args, options, grid = profile_kernels.record_launch(op, model, device, tokens)
        copies = min(max(2, -(-3 * l2_bytes // _nbytes(args))), _MOST_COPIES) if real else 1
        calls = [functools.partial(function[grid], *_fresh(args), **options) for _ in range(copies)]
        seconds = timer.seconds(calls)
        cost = op.cost(model, tokens)
        speed = (cost.bytes + cost.link) / seconds if seconds else None
        least = max(cost.bytes / roof[0], cost.flops / roof[1]) if roof else None
        yield {
            "kernel": f"{name}[{model.name}]",
            "measured_us": None if seconds is None else round(1e6 * seconds, 1),
            "achieved_gb_s": None if speed is None else round(speed / 1e9),
            "of_peak": None if least is None or seconds is None else round(least / seconds, 3),
        }


def _tensors(args: Any) -> Iterator[Tensor]:
    if isinstance(args, Tensor):
        yield args
    elif isinstance(args, tuple):
        for arg in args:
            yield from _tensors(arg)


def _nbytes(args: Any) -> int:
    return sum(x.nbytes for x in _tensors(args))


def _fresh(args: Any) -> Any:
    """The arguments with random numbers in memory of their own; integers wider than a byte, which are places, as they
    are, and so what lies in the host's memory."""
    if isinstance(args, tuple):
        return tuple(map(_fresh, args))
    if not isinstance(args, Tensor) or args.is_pinned():
        return args
    new = torch.empty_strided(args.shape, args.stride(), dtype=args.dtype, device=args.device)
    if new.is_floating_point():
        return new.normal_()
    return new.random_(0, 256) if new.dtype == torch.uint8 else new.copy_(args)
