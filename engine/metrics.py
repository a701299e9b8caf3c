"""What the process and the machine have: memory used and memory left."""

import re
import resource
import sys
from pathlib import Path

import torch


def peak_rss_bytes() -> int:
    """The most memory this process had resident so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    # On Linux getrusage starts from the peak of the process that started this one.
    return _kib("/proc/self/status", "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_memory_bytes(device: torch.device) -> int | None:
    """Memory that can still be allocated on the device; None where the system does not say."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # it gives them out again
        return torch.cuda.mem_get_info(device)[0] + unused
    free = (_kib("/proc/meminfo", "MemAvailable"), _cgroup_free())
    return min((value for value in free if value is not None), default=None)


def _kib(file: str, key: str) -> int | None:
    """Bytes of a line "key:  1234 kB" in one of Linux's status files."""
    line = re.search(rf"^{key}:\s*(\d+) kB$", _text(file), re.MULTILINE)
    return int(line[1]) * 1024 if line else None


def _cgroup_free() -> int | None:
    """What a container's limit, if it has one, leaves (cgroup v2)."""
    limit, used = _text("/sys/fs/cgroup/memory.max").strip(), _text("/sys/fs/cgroup/memory.current").strip()
    return max(0, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else None


def _text(file: str) -> str:
    """What the file says; nothing where there is none."""
    try:
        return Path(file).read_text()
    except OSError:
        return ""
