"""What the process and the machine have: memory used and memory left."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


def peak_rss_bytes() -> int:
    """The most memory this process had resident so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def free_memory_bytes(device: torch.device) -> int | None:
    """Memory that can still be allocated on the device; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [value for value in (_meminfo_available(), _cgroup_free()) if value is not None]
    return min(free, default=None)


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup_free() -> int | None:
    """What a container's limit leaves (cgroup v2)."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))
