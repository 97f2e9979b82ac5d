"""`.npy` files that are written a range at a time, by one process or by many.

Written by plain file operations: of a memory map, every page that was touched would count as memory
in use. The bytes are those that `numpy.save` writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray


def create_array(path: Path, dtype: DTypeLike, n: int) -> None:
    """A file for `n` values, all zero until they are written."""
    dtype = np.dtype(dtype)
    description = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (n,)}
    with path.open("wb") as file:
        npy.write_array_header_1_0(file, description)
        file.truncate(file.tell() + n * dtype.itemsize)


def write_range(path: Path, start: int, values: NDArray[Any]) -> None:
    """Values `start` and on. Ranges that do not overlap may be written at the same time."""
    with path.open("r+b") as file:
        assert npy.read_magic(file) == (1, 0)
        (n,), _, dtype = npy.read_array_header_1_0(file)
        assert 0 <= start <= start + len(values) <= n
        file.seek(start * dtype.itemsize, 1)
        file.write(np.ascontiguousarray(values, dtype).data)
