"""The most popular items, for everybody: what any model has to beat."""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from bert4rec.config import Config, ModelConfig
from bert4rec.data.splits import Spans


class Popularity:
    """An item's score is the log of how often it occurs in training, whatever the history.

    So its softmax is the item's share of all interactions. An item that never occurs counts half.
    """

    needs_known_user: ClassVar[bool] = False
    n_read: int | None = 0

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts.to(torch.int64)  # (V,)
        self.n_items = len(counts)

    @classmethod
    def fit(cls, train: Spans, n_items: int, config: Config) -> Self:
        tokens = np.concatenate([train[i] for i in range(len(train))])
        return cls(torch.from_numpy(np.bincount(tokens, minlength=n_items)))

    def score(self, users: Tensor, history: Tensor) -> Tensor:
        """(B,), (B, L) -> (B, V)"""
        # A copy a row, not an expanded view: callers may write -inf over what a user has seen.
        log_counts = self.counts.to(history.device, torch.float64).clamp(min=0.5).log()
        return log_counts.float().repeat(len(history), 1)

    def state(self) -> dict[str, Tensor]:
        return {"counts": self.counts}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], config: ModelConfig, n_items: int) -> Self:
        return cls(tensors["counts"])
