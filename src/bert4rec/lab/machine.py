"""Which machine this is: times and memory mean nothing without it."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    memory = None
    if Path("/proc/cpuinfo").is_file():
        named = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = named[1].strip() if named else cpu
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": cpu, "cores": cores, "memory_gb": memory}


def peak_memory_mb() -> float | None:
    """The most memory that this process ever had in use.

    Not `ru_maxrss` where it can be helped: on Linux it begins with the size of the parent.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        peak = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        assert peak is not None
        return round(int(peak[1]) / 1024, 1)
    try:
        import resource
    except ImportError:  # Windows
        return None
    return in_megabytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def in_megabytes(ru_maxrss: int) -> float:
    return round(ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**20, 1)
