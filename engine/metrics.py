"""What the process and the machine have: memory used and memory left."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


def peak_rss_bytes() -> int:
    """The most memory this process had resident so far."""
    # On Linux getrusage starts from the peak of the process that started this one.
    peak = _kib("/proc/self/status", "VmHWM:")
    if peak is not None:
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes


def free_memory_bytes(device: torch.device) -> int | None:
    """Memory that can still be allocated on the device; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [value for value in (_kib("/proc/meminfo", "MemAvailable:"), _cgroup_free()) if value is not None]
    return min(free, default=None)


def _kib(file: str, key: str) -> int | None:
    """Bytes of a line "key  1234 kB" in one of Linux's status files."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), None)


def _cgroup_free() -> int | None:
    """What a container's limit leaves (cgroup v2)."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))
