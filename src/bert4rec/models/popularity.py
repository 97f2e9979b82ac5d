"""The most popular items, for everybody: what any model has to beat."""

from __future__ import annotations

from typing import Self

import numpy as np
import torch
from torch import Tensor

from bert4rec.data.splits import Spans
from bert4rec.models import FittedModel
from bert4rec.models.sequence_model import ModelSettings


class PopularitySettings(ModelSettings):
    name: str = "popularity"


class Popularity(FittedModel):
    """An item's score is the log of how often it occurs in training, whatever the history.

    So its softmax is the item's share of all interactions. An item that never occurs counts half.
    """

    settings_class = PopularitySettings
    tensor_names = ("counts",)
    max_history = 0

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts.to(torch.int64)  # (V,)
        self.n_items = len(counts)

    @classmethod
    def fit(cls, train: Spans, n_items: int, settings: PopularitySettings, seed: int = 0) -> Self:
        return cls(torch.from_numpy(np.bincount(train.items(), minlength=n_items)))

    def encode(self, users: Tensor, histories: Tensor) -> Tensor:
        log_counts = self.counts.to(histories.device, torch.float64).clamp(min=0.5).log()
        return log_counts.float().expand(len(histories), -1)
