"""Microbatches of sequences of similar length: little padding, and arrays that stay in the cache.

Training, evaluation and batch scoring all compute in such microbatches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class MicrobatchSize(NamedTuple):
    positions: int  # at most this many positions, padding included
    padding: int  # this many padded positions cost about as much as one more microbatch


# Measured on the lengths of ML-1M and Beauty. For the backward pass, training keeps about thirty
# numbers per position and unit of width; scoring keeps none.
FOR_TRAINING = MicrobatchSize(2048, 300)
FOR_SCORING = MicrobatchSize(16384, 2000)


def group_by_length(
    lengths: NDArray[np.int64], size: MicrobatchSize, most_rows: int | None = None
) -> list[slice]:
    """Slices of `lengths`, which descend: microbatches that waste little and fit `size`."""
    groups, first = [], 0
    while first < len(lengths):
        longest = max(1, int(lengths[first]))
        n_most = max(1, size.positions // longest)
        rest = lengths[first : first + (n_most if most_rows is None else min(n_most, most_rows))]
        padding = np.cumsum(longest - rest)
        n = int(np.searchsorted(padding, size.padding, side="right"))
        groups.append(slice(first, first + n))
        first += n
    return groups
