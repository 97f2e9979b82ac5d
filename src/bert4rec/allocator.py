"""Keep freed memory for the next step instead of giving it back to the system."""

from __future__ import annotations

import ctypes
import platform

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
