"""What any recommender must be able to do, and which ones there are."""

from __future__ import annotations

from typing import Protocol, Self

from torch import Tensor

from bert4rec.config import ModelConfig
from bert4rec.data.splits import Spans
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.models.markov import MarkovChain
from bert4rec.models.popularity import Popularity


class Model(Protocol):
    """All that evaluation and serving may ask of any recommender, learned or counted.

    Several threads may call `score` at once.
    """

    n_items: int

    def score(self, users: Tensor, history: Tensor) -> Tensor:
        """(B,) user rows, (B, L) tokens padded with `n_items` → (B, V) scores, higher is better."""
        ...

    def state(self) -> dict[str, Tensor]:
        """All that has to be saved to get the same model back."""
        ...

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], config: ModelConfig, n_items: int) -> Self: ...


class CountedModel(Model, Protocol):
    """A model that is ready after one pass of counting; training has nothing to do."""

    @classmethod
    def fit(cls, train: Spans, n_items: int) -> Self: ...


COUNTED: dict[str, type[CountedModel]] = {"popularity": Popularity, "markov": MarkovChain}
LEARNED: dict[str, type[BERT4Rec]] = {"bert4rec": BERT4Rec}
MODELS: dict[str, type[Model]] = {**COUNTED, **LEARNED}
