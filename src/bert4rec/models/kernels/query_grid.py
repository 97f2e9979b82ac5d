"""The query positions of a batch as a rectangle, which attention wants."""

from __future__ import annotations

import torch
from torch import Tensor


class QueryGrid:
    """(M,) flat positions in row order ↔ a grid (B, Q), Q being the most that any row has."""

    def __init__(self, positions: Tensor, n_rows: int, length: int) -> None:
        self.positions, self.n_rows = positions, n_rows
        if n_rows == 1:
            self.width, self.is_full = len(positions), True
            return
        rows = positions // length
        counts = torch.bincount(rows, minlength=n_rows)
        columns = torch.arange(len(positions), device=positions.device)
        columns -= (counts.cumsum(0) - counts)[rows]
        self.width = int(counts.max())
        self.is_full = self.width * n_rows == len(positions)
        self.cells = rows * self.width + columns  # (M,) where each stands in the grid

    def to_grid(self, x: Tensor) -> Tensor:  # (M, D) → (B, Q, D)
        if not self.is_full:
            x = x.new_zeros(self.n_rows * self.width, x.shape[1]).index_copy(0, self.cells, x)
        return x.view(self.n_rows, self.width, -1)

    def from_grid(self, grid: Tensor) -> Tensor:  # (B, Q, D) → (M, D)
        x = grid.flatten(0, 1)
        return x if self.is_full else x.index_select(0, self.cells)
