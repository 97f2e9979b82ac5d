"""How torch and the C library are told to behave on a CPU: memory is kept, oneDNN stays out."""

from __future__ import annotations

import ctypes
import platform
import threading
from contextlib import ContextDecorator
from typing import Any

import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> None:
    """Make glibc's malloc reuse large blocks.

    By default it maps each large tensor anew and returns it when it is freed, so that every step
    pays for page faults on the same memory. Called before the threads are started that compute.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_ARENA_MAX, 1)  # later threads share the heap: those of their own are given back
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(M_TOP_PAD, 64 * 2**20)


class without_onednn(ContextDecorator):
    """Use torch's own CPU kernels.

    oneDNN caches a compiled kernel with its buffers for each shape it meets. Our batches are cut to
    the length of their histories, so there are hundreds of shapes, and a long training would grow
    to several times its size (`benchmarks/training_memory.py`). Usable as a decorator too, and from
    several threads at once: torch has one switch for all, so the first turns it off, the last on.
    """

    _lock = threading.Lock()
    _n_inside = 0
    _was_enabled = True

    def __enter__(self) -> None:
        cls = without_onednn
        with cls._lock:
            if cls._n_inside == 0:
                cls._was_enabled = torch._C._get_mkldnn_enabled()
                torch._C._set_mkldnn_enabled(False)
            cls._n_inside += 1

    def __exit__(self, *exception: Any) -> None:
        cls = without_onednn
        with cls._lock:
            cls._n_inside -= 1
            if cls._n_inside == 0:
                torch._C._set_mkldnn_enabled(cls._was_enabled)
