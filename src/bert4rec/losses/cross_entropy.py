"""Cross-entropy over all items: -log softmax(h Eᵀ + b)[target], Eq. 8 of the paper, exact.

Shapes: M queries, D width, V items.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bert4rec.losses import LossSettings
from bert4rec.losses.by_autograd import sum_over_rows
from bert4rec.losses.full_softmax import add_cross_entropy
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
        self,
        h: Tensor,
        output: Output,
        targets: Tensor,
        *,
        scale: float,
        generator: torch.Generator,
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

    def _plain(
        self, h: Tensor, output: Output, targets: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        def value(h: Tensor, targets: Tensor) -> Tensor:
            logits = output.block_scores(h, 0, output.n_items)
            return scale * F.cross_entropy(logits, targets, reduction="sum")

        return sum_over_rows(value, max(1, self.memory // (4 * output.n_items)), h, targets)
