"""Keep oneDNN out of the way of batches whose shapes keep changing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_n_inside = 0  # torch has one switch for all threads: the first turns it off, the last back on
_was_enabled = True


@contextmanager
def without_onednn() -> Iterator[None]:
    """Use torch's own CPU kernels.

    oneDNN caches a compiled kernel with its buffers for each shape it meets. Our batches are cut to
    the length of their histories, so there are hundreds of shapes, and a long training would grow
    to several times its size (`benchmarks/training_memory.py`). Usable as a decorator too, and from
    several threads at once.
    """
    global _n_inside, _was_enabled
    with _lock:
        if _n_inside == 0:
            _was_enabled = bool(torch.backends.mkldnn.enabled)
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        _n_inside += 1
    try:
        yield
    finally:
        with _lock:
            _n_inside -= 1
            if _n_inside == 0:
                torch.backends.mkldnn.enabled = _was_enabled  # type: ignore[assignment]
