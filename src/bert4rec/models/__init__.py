"""What any recommender must be able to do, and which ones there are."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self, TypeGuard

import torch
from torch import Tensor

from bert4rec.data.splits import Spans
from bert4rec.models.output import Output, ScoreRows
from bert4rec.models.sequence_model import SequenceModel
from bert4rec.settings import Registry, Settings


class Model(Protocol):
    """All that scoring needs of a recommender, trained or fitted.

    Several threads may call `encode` at once.
    """

    n_items: int
    settings_class: ClassVar[type[Settings]]
    objectives: ClassVar[tuple[str, ...]]  # that can train it; none for models that are fitted
    needs_known_user: ClassVar[bool]  # whether a history alone, of user -1, says nothing to it
    max_history: int | None  # how many of a history's last items are read; None is all

    def encode(self, users: Tensor, histories: Tensor) -> Tensor:
        """(B,) user rows, (B, L) tokens padded with `n_items` at the end → (B, D) vectors."""
        ...

    def output_layer(self) -> Output:
        """How such a vector becomes scores."""
        ...

    def state(self) -> dict[str, Tensor]:
        """All that has to be saved to get the same model back."""
        ...

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], settings: Any, n_items: int) -> Self: ...


class FittedModel:
    """A model that is fitted in one call: there is nothing to do for the training loop.

    It computes the scores of all items at once, and its tensors are all that is saved of it.
    """

    n_items: int
    settings_class: ClassVar[type[Settings]]
    objectives: ClassVar[tuple[str, ...]] = ()
    needs_known_user: ClassVar[bool] = False
    max_history: int | None = None
    tensor_names: ClassVar[tuple[str, ...]]  # attributes, which `__init__` takes in this order

    @classmethod
    def fit(cls, train: Spans, n_items: int, settings: Any, seed: int = 0) -> Self:
        raise NotImplementedError

    def encode(self, users: Tensor, histories: Tensor) -> Tensor:
        """(B,), (B, L) → (B, V) scores"""
        raise NotImplementedError

    def output_layer(self) -> ScoreRows:
        return ScoreRows(self.n_items)

    def state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.tensor_names}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], settings: Any, n_items: int) -> Self:
        return cls(*(tensors[name] for name in cls.tensor_names))


def sparse_entries(offsets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of a sparse matrix by rows (CSR): which of `rows` each of their entries is in, and its place."""
    n_entries = offsets[rows + 1] - offsets[rows]
    which = torch.repeat_interleave(n_entries)
    shifts = offsets[rows] - (n_entries.cumsum(0) - n_entries)
    return which, shifts[which] + torch.arange(len(which), device=rows.device)


MODELS: Registry[type[Model]] = Registry(
    "model.name",
    {
        "bert4rec": "bert4rec.models.bert4rec:BERT4Rec",
        "bert4rec-causal": "bert4rec.models.bert4rec:CausalBERT4Rec",
        "sasrec": "bert4rec.models.sasrec:SASRec",
        "gru4rec": "bert4rec.models.gru4rec:GRU4Rec",
        "narm": "bert4rec.models.narm:NARM",
        "stamp": "bert4rec.models.stamp:STAMP",
        "caser": "bert4rec.models.caser:Caser",
        "fpmc": "bert4rec.models.fpmc:FPMC",
        "neumf": "bert4rec.models.neumf:NeuMF",
        "cdae": "bert4rec.models.cdae:CDAE",
        "popularity": "bert4rec.models.popularity:Popularity",
        "markov": "bert4rec.models.markov:MarkovChain",
        "item-knn": "bert4rec.models.item_knn:ItemKNN",
        "bpr-mf": "bert4rec.models.bpr_mf:BPRMF",
    },
)


def is_trained(model: type[Model]) -> TypeGuard[type[SequenceModel]]:
    """Whether the training loop trains it; all others are fitted."""
    return issubclass(model, SequenceModel)
