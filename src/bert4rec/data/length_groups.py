"""Sequences cut into pieces of like length: little padding, and arrays that stay in the cache.

Training, evaluation and batch scoring all compute in such pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class MicrobatchSize(NamedTuple):
    positions: int  # most positions of a piece, padding included
    padding: int  # positions of padding that cost about as much as starting another piece


# By measurement on the lengths of ML-1M and Beauty (`benchmarks/pieces.py`). Training keeps some
# thirty numbers a position and unit of width until the backward pass; scoring keeps none.
FOR_TRAINING = MicrobatchSize(2048, 300)
FOR_SCORING = MicrobatchSize(16384, 2000)


def group_by_length(
    lengths: NDArray[np.int64], size: MicrobatchSize, most_rows: int | None = None
) -> list[slice]:
    """Cut sequences, longest first, into pieces that waste little and are not too large."""
    pieces, first = [], 0
    while first < len(lengths):
        longest = max(1, int(lengths[first]))
        n_most = max(1, size.positions // longest)
        rest = lengths[first : first + (n_most if most_rows is None else min(n_most, most_rows))]
        padding = np.cumsum(longest - rest)
        n = int(np.searchsorted(padding, size.padding, side="right"))
        pieces.append(slice(first, first + n))
        first += n
    return pieces
