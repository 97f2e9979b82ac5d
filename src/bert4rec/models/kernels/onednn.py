"""Keep oneDNN out of the way of batches whose shapes keep changing."""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from typing import Any

import torch


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
