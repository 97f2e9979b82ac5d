"""Keep oneDNN out of the way of batches whose shapes keep changing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_onednn() -> Iterator[None]:
    """Use torch's own CPU kernels.

    oneDNN caches a compiled kernel with its buffers for each shape it meets. Our batches are cut to
    the length of their histories, so there are hundreds of shapes, and a long training would grow
    to several times its size (`benchmarks/training_memory.py`). Usable as a decorator too.
    """
    was_enabled = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = was_enabled
