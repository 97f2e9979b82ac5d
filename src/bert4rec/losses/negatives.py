"""Where the negatives of a sampled loss come from.

Shapes: M queries, K negatives, G groups of positions, V items.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Negatives:
    """Items drawn with replacement, in proportion to `weights` (V,)."""

    def __init__(self, weights: NDArray[np.number[Any]]) -> None:
        shares = weights / weights.sum()
        self.log_shares: Tensor = torch.from_numpy(np.log(np.maximum(shares, 1e-30)).astype(np.float32))
        self.upper = torch.from_numpy(np.cumsum(shares))
        self.n_items = len(shares)

    def draw(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        where = torch.rand(shape, dtype=torch.float64, generator=generator, device=generator.device)
        drawn = torch.searchsorted(self.upper.to(where.device), where)
        return drawn.clamp_(max=len(self.upper) - 1)

    def log_expected(self, items: Tensor, n: int) -> Tensor:
        """log of how often each of `items` is expected among `n` draws."""
        return self.log_shares.to(items.device)[items] + math.log(n)


def by_popularity(counts: NDArray[np.int64], power: float = 1.0) -> Negatives:
    """To be drawn, in proportion to (popularity + 1) ** power.

    The one is for items that were never trained on. If they were never drawn either, nothing would
    tell the model that they are unlikely.
    """
    return Negatives((counts + 1.0) ** power)


def as_they_occur(counts: NDArray[np.int64]) -> Negatives:
    """Not to be drawn: targets of a batch, which come in proportion to popularity."""
    return Negatives(counts)


def random_groups(n_queries: int, n_negatives: int, generator: torch.Generator) -> Tensor:
    """(G, K + 1) numbers of positions: each occurs once in the first M places, in random order.

    The last group is filled up with positions that came before, so that all are of one size; no
    group has a position twice. K is smaller where there are too few positions.
    """
    size = min(n_negatives + 1, n_queries)
    n_groups = -(-n_queries // size)
    order = torch.randperm(n_queries, generator=generator)
    return torch.cat([order, order[: n_groups * size - n_queries]]).view(n_groups, size)
