"""BPR-MF: matrix factorisation that ranks what a user had before what they did not have.

Rendle et al., "BPR: Bayesian Personalized Ranking from Implicit Feedback" (UAI 2009), fitted by
the `implicit` library. Shapes: `B` users, `U` user rows, `V` items, `D` factors.
"""

from __future__ import annotations

from typing import Annotated, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from bert4rec.data.splits import Spans
from bert4rec.models import FittedModel
from bert4rec.models.item_knn import require_implicit, user_item_matrix
from bert4rec.models.sequence_model import ModelSettings
from bert4rec.settings import Positive


class BPRMFSettings(ModelSettings):
    name: str = "bpr-mf"
    dim: Positive = Field(128, description="number of factors")
    epochs: Positive = Field(100, description="passes over the interactions")
    learning_rate: Annotated[float, Field(gt=0)] = Field(0.05, description="of plain SGD")
    regularization: Annotated[float, Field(ge=0)] = Field(0.01, description="λ of the paper")


class BPRMF(FittedModel):
    """x_ui = <w_u, h_i> + b_i (section 4.3.1); maximises Σ ln σ(x_ui - x_uj) - λ |Θ|² (BPR-Opt).

    The bias is the last column of the item factors, and every user has a 1 there. A history is
    not read at all: a user is what was learned of them in training.

    Where `implicit` differs from the paper: the item j that the user did not have is drawn by
    popularity instead of uniformly, and a draw that the user did have is skipped.
    """

    settings_class = BPRMFSettings
    tensor_names = ("user_factors", "item_factors", "is_known")
    needs_known_user = True
    max_history = 0

    def __init__(self, user_factors: Tensor, item_factors: Tensor, is_known: Tensor) -> None:
        assert user_factors.shape[1] == item_factors.shape[1]
        assert len(is_known) == len(user_factors)
        self.n_items = len(item_factors)
        self.user_factors = user_factors  # (U, D + 1) float32
        self.item_factors = item_factors  # (V, D + 1) float32
        self.is_known = is_known  # (U,) bool: the rows that training saw

    @classmethod
    def fit(cls, train: Spans, n_items: int, settings: BPRMFSettings, seed: int = 0) -> Self:
        require_implicit("bpr-mf")
        from implicit.cpu.bpr import BayesianPersonalizedRanking
        from implicit.recommender_base import ModelFitError

        user_items = user_item_matrix(train, n_items)
        factorisation = BayesianPersonalizedRanking(
            factors=settings.dim,
            learning_rate=settings.learning_rate,
            regularization=settings.regularization,
            iterations=settings.epochs,
            random_state=seed,
            # More threads write over each other's steps: the same seed would give another model
            # every time (benfred/implicit#710).
            num_threads=1,
        )
        try:
            factorisation.fit(user_items, show_progress=False)
        except ModelFitError as error:
            raise ValueError(
                f"BPR-MF diverged with model.learning_rate = {settings.learning_rate} "
                f"and model.regularization = {settings.regularization}: "
                "choose a lower learning rate"
            ) from error
        return cls(
            torch.from_numpy(factorisation.user_factors),
            torch.from_numpy(factorisation.item_factors),
            torch.from_numpy(np.diff(user_items.indptr) > 0),
        )

    def encode(self, users: Tensor, histories: Tensor) -> Tensor:
        rows = users.to(self.user_factors.device)
        is_row = (rows >= 0) & (rows < len(self.user_factors))
        if not bool((is_row & self.is_known[rows.where(is_row, 0)]).all()):
            raise ValueError(
                "BPR-MF knows only the users it was trained on, and cannot answer from a history: "
                "ask for one of those users, or train a model that reads histories, "
                "such as bert4rec"
            )
        return (self.user_factors[rows] @ self.item_factors.T).to(histories.device)
