"""Cross-entropy over all items: -log softmax(h Eᵀ + b)[target], Eq. 8 of the paper, exact.

Loss and gradients are computed in one go, without ever holding all the logits. The work is cut into
tiles of some hundred rows by some thousand items that stay in the cache. Which of two orders is used
depends on the number of items and the memory allowed:

- a block of rows goes over all the items once and keeps its exponentials until its totals are
  known, which takes `rows x V x 4` bytes: the fastest where enough rows fit;
- a large catalogue is gone over twice, first for the totals, then for the gradients: a third more
  arithmetic, and the memory of one tile.

Every choice here is by measurement (`benchmarks/losses.py`). What was tried and is slower on a CPU:
the plain form, `F.linear_cross_entropy`, and `exp` (torch's `exp2` takes half its time).

Shapes: M queries, D width, V items.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bert4rec.losses import LossSettings, sum_over_rows
from bert4rec.models.output import DotProduct, Output

LOGITS_BYTES = 64 * 2**20  # most memory that a worker takes for logits


class CrossEntropySettings(LossSettings):
    name: str = "cross-entropy"

    def build(self, train_counts: NDArray[np.int64]) -> CrossEntropy:
        return CrossEntropy()


class CrossEntropy:
    is_sparse = False

    def __init__(self, memory: int = LOGITS_BYTES) -> None:
        self.memory = memory

    def __call__(
        self, h: Tensor, output: Output, targets: Tensor, *, scale: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        if h.device.type != "cpu" or not isinstance(output, DotProduct):
            return self._plain(h, output, targets, scale)
        weight, bias = output
        for parameter in (weight, bias):
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        assert weight.grad is not None
        return add_cross_entropy(
            h,
            weight.detach()[: len(bias)],
            bias.detach(),
            targets,
            weight.grad[: len(bias)],
            torch.zeros_like(bias) if bias.grad is None else bias.grad,
            scale=scale,
            memory=self.memory,
        )

    def _plain(self, h: Tensor, output: Output, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        def value(h: Tensor, targets: Tensor) -> Tensor:
            logits = output.block_scores(h, 0, output.n_items)
            return scale * F.cross_entropy(logits, targets, reduction="sum")

        return sum_over_rows(value, max(1, self.memory // (4 * output.n_items)), h, targets)


TILE_ITEMS = 1024
TILE_ROWS = 512
FEWEST_ROWS = 64  # with fewer in a block, going over the catalogue twice is faster
# Totals within these bounds came from exponentials that neither overflowed nor vanished.
SMALLEST_TOTAL, LARGEST_TOTAL = 1e-20, 1e30
LOG2_E = 1 / math.log(2)


@torch.no_grad()
def add_cross_entropy(
    h: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    *,
    scale: float,
    memory: int,
) -> tuple[Tensor, Tensor]:
    """(M, D), (V, D), (V,), (M,) → the loss of Eq. 8 and its gradient for `h`.

    The loss is the sum of `-log softmax(h Eᵀ + b)[target]`, times `scale`, which is one over the
    queries of the whole batch. The gradients of E and b are added to `grad_*`.
    """
    softmax = _Softmax(h, weight, bias, scale)
    rows = memory // (4 * len(weight))
    if rows >= min(FEWEST_ROWS, len(h)):
        softmax.once(grad_weight, grad_bias, min(rows, TILE_ROWS))
    else:
        softmax.twice(grad_weight, grad_bias)
    wanted = weight.index_select(0, targets)
    target_logits = (h * wanted).sum(1) + bias.index_select(0, targets)
    grad_weight.index_add_(0, targets, h, alpha=-scale)
    grad_bias.index_add_(0, targets, bias.new_ones(1).expand(len(h)), alpha=-scale)
    loss = (softmax.log_totals() - target_logits).sum() * scale
    return loss, softmax.grad_h.sub_(wanted, alpha=scale)


class _Softmax:
    """The part of the gradients that comes from the probabilities."""

    def __init__(self, h: Tensor, weight: Tensor, bias: Tensor, scale: float) -> None:
        self.h, self.weight, self.scale = h, weight, scale
        self.h2, self.bias2 = h * LOG2_E, bias * LOG2_E  # exp(x) = exp2(x / ln 2)
        self.shift2 = h.new_zeros(len(h))  # subtracted from a row's logits where they are extreme
        self.is_shifted = False
        self.grad_h = torch.empty_like(h)
        self.totals = h.new_empty(len(h), dtype=torch.float64)

    def once(self, grad_weight: Tensor, grad_bias: Tensor, n_rows: int) -> None:
        memory = self.h.new_empty(min(n_rows, len(self.h)) * len(self.weight))
        for rows in _slices(len(self.h), n_rows):
            tiles = self._tiles(rows, memory)
            if not self._are_safe(rows):
                self._shift(rows)
                tiles = self._tiles(rows, memory)
            scale, scaled_h = self._scale(rows)
            for items, tile in tiles:
                grad_weight[items].addmm_(tile.T, scaled_h)
                grad_bias[items].addmv_(tile.T, scale)
            self.grad_h[rows] *= scale[:, None]

    def twice(self, grad_weight: Tensor, grad_bias: Tensor) -> None:
        memory = self.h.new_empty(min(TILE_ROWS, len(self.h)) * min(TILE_ITEMS, len(self.weight)))
        all_rows = slice(0, len(self.h))
        self._total(memory)
        if not self._are_safe(all_rows):
            self._shift(all_rows)
            self._total(memory)
        scales = [(rows, *self._scale(rows)) for rows in _slices(len(self.h), TILE_ROWS)]
        self.grad_h.zero_()
        for items in _slices(len(self.weight), TILE_ITEMS):
            for rows, scale, scaled_h in scales:
                tile = self._exponentials(rows, items, _shaped(memory, rows, items))
                self.grad_h[rows].addmm_(tile, self.weight[items])
                grad_weight[items].addmm_(tile.T, scaled_h)
                grad_bias[items].addmv_(tile.T, scale)
        for rows, scale, _ in scales:
            self.grad_h[rows] *= scale[:, None]

    def log_totals(self) -> Tensor:
        return self.totals.log().to(self.h.dtype) + self.shift2 / LOG2_E

    def _tiles(self, rows: slice, memory: Tensor) -> list[tuple[slice, Tensor]]:
        """All exponentials of `rows`, their totals, and what they add to the gradient of h."""
        height = rows.stop - rows.start
        totals, grad_h = self.totals[rows].zero_(), self.grad_h[rows].zero_()
        tiles = []
        for items in _slices(len(self.weight), TILE_ITEMS):
            place = memory[height * items.start : height * items.stop]
            tile = self._exponentials(rows, items, place.view(height, -1))
            totals += tile.sum(1)
            grad_h.addmm_(tile, self.weight[items])
            tiles.append((items, tile))
        return tiles

    def _total(self, memory: Tensor) -> None:
        self.totals.zero_()
        for items in _slices(len(self.weight), TILE_ITEMS):
            for rows in _slices(len(self.h), TILE_ROWS):
                tile = self._exponentials(rows, items, _shaped(memory, rows, items))
                self.totals[rows] += tile.sum(1)

    def _exponentials(self, rows: slice, items: slice, out: Tensor) -> Tensor:
        """exp(logit), less the row's shift, in the memory of `out`."""
        torch.addmm(self.bias2[items], self.h2[rows], self.weight[items].T, out=out)
        if self.is_shifted:
            out.sub_(self.shift2[rows, None])
        return out.exp2_()

    def _scale(self, rows: slice) -> tuple[Tensor, Tensor]:
        scale = (self.scale / self.totals[rows]).to(self.h.dtype)
        return scale, self.h[rows] * scale[:, None]

    def _are_safe(self, rows: slice) -> bool:
        low, high = torch.aminmax(self.totals[rows])
        return bool(low > SMALLEST_TOTAL) and bool(high < LARGEST_TOTAL)  # false for nan too

    def _shift(self, rows: slice) -> None:
        """Subtract each row's highest logit from now on, so that its exponentials are in range."""
        self.is_shifted = True
        for part in _slices(rows.stop - rows.start, TILE_ROWS):
            some = slice(rows.start + part.start, rows.start + part.stop)
            highest = self.shift2[some].fill_(-torch.inf)
            for items in _slices(len(self.weight), TILE_ITEMS):
                logits = torch.addmm(self.bias2[items], self.h2[some], self.weight[items].T)
                torch.maximum(highest, logits.amax(1), out=highest)


def _slices(n: int, size: int) -> Iterator[slice]:
    """Nearly equal slices of at most `size`."""
    n_slices = -(-n // size)
    for i in range(n_slices):
        yield slice(i * n // n_slices, (i + 1) * n // n_slices)


def _shaped(memory: Tensor, rows: slice, items: slice) -> Tensor:
    height, width = rows.stop - rows.start, items.stop - items.start
    return memory[: height * width].view(height, width)
