"""What any recommender must be able to do, and which ones there are."""

from __future__ import annotations

from typing import ClassVar, Protocol, Self

from torch import Tensor

from bert4rec.config import Config, ModelConfig
from bert4rec.data.splits import Spans
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.models.bpr_mf import BPRMF
from bert4rec.models.caser import Caser
from bert4rec.models.cdae import CDAE
from bert4rec.models.fpmc import FPMC
from bert4rec.models.gru4rec import GRU4Rec
from bert4rec.models.item_knn import ItemKNN
from bert4rec.models.learned import Learned
from bert4rec.models.markov import MarkovChain
from bert4rec.models.narm import NARM
from bert4rec.models.neumf import NeuMF
from bert4rec.models.popularity import Popularity
from bert4rec.models.sasrec import SASRec
from bert4rec.models.stamp import STAMP


class Model(Protocol):
    """All that evaluation and serving may ask of any recommender, learned or counted.

    Several threads may call `score` at once.
    """

    n_items: int
    needs_known_user: ClassVar[bool]  # whether a history alone, of user -1, tells it nothing
    n_read: int | None  # how many of a history's last items have a say; None is all

    def score(self, users: Tensor, history: Tensor) -> Tensor:
        """(B,) user rows, (B, L) tokens padded with `n_items` → (B, V) scores, higher is better."""
        ...

    def state(self) -> dict[str, Tensor]:
        """All that has to be saved to get the same model back."""
        ...

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], config: ModelConfig, n_items: int) -> Self: ...


class FittedModel(Model, Protocol):
    """A model that fits itself in one call; the training loop has nothing to do."""

    @classmethod
    def fit(cls, train: Spans, n_items: int, config: Config) -> Self: ...


FITTED: dict[str, type[FittedModel]] = {
    "popularity": Popularity,
    "markov": MarkovChain,
    "item-knn": ItemKNN,
    "bpr-mf": BPRMF,
}
LEARNED: dict[str, type[Learned]] = {
    "bert4rec": BERT4Rec,
    "sasrec": SASRec,
    "fpmc": FPMC,
    "neumf": NeuMF,
    "caser": Caser,
    "cdae": CDAE,
    "gru4rec": GRU4Rec,
    "narm": NARM,
    "stamp": STAMP,
}
MODELS: dict[str, type[Model]] = {**FITTED, **LEARNED}
