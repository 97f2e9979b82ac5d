"""Losses that compare the target with some negatives.

- `sampled-softmax`: cross-entropy with the sum over the other items estimated from k of them (logQ
  correction). The estimate of the sum is unbiased; its logarithm, and so the loss, is too low on
  average, by less as k grows.
- `bce`: -log σ(target) - Σ log σ(-negative), as in SASRec. Its scores are overconfident and no
  probabilities over items.
- `gbce`: bce with σ(target)^β, which makes up for the share of items drawn, as in gSASRec.
- `bpr`: the mean of -log σ(target - negative): the order of pairs.
- `top1`: the mean of σ(negative - target) + σ(negative²), as in GRU4Rec (Hidasi et al., 2016).
- `top1-max`, `bpr-max`: `top1` and `bpr` weighted by the softmax of the negatives' scores, as in
  GRU4Rec+ (Hidasi & Karatzoglou, 2018).

Negatives are drawn with replacement from all items, in proportion to a power of popularity or
uniformly. Fewer than 64 are drawn for each query; from 64 on the queries of a microbatch share one
draw, so that scoring them is a matrix product: each still sees k independent items. With `negatives
= "in-batch"` nothing is drawn: the queries of a microbatch form random groups of k + 1, and the
negatives of each are the targets of the others, close to GRU4Rec's mini-batches. A negative that is
the target does not count.

Shapes: M queries, K negatives, D width, V items.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from bert4rec.losses import LossSettings, differentiate, formulas, sum_over_rows
from bert4rec.losses.formulas import FORMULAS, Formula
from bert4rec.losses.negatives import Negatives, as_they_occur, by_popularity, random_groups
from bert4rec.models.kernels.row_embedding import embed
from bert4rec.models.output import DotProduct, Output
from bert4rec.settings import Positive, Share

SHARED_FROM = 64
AT_ONCE = 2**22  # numbers that are held at a time: scores, or embeddings of a query's negatives


class SampledSettings(LossSettings):
    """A loss by a formula of the target's score and those of its negatives; `name` says which."""

    n_negatives: Positive = Field(1024, description="negatives of a query; from 64 on, shared by a microbatch")
    negatives: Literal["uniform", "popularity", "in-batch"] = Field(
        "uniform", description="how they are drawn; in-batch takes the targets of other queries of the batch"
    )
    power: Share = Field(1.0, description="popularity negatives are drawn in proportion to (count + 1) ** power")

    def formula(self, n_items: int) -> Formula:
        return FORMULAS[self.name]

    def build(self, train_counts: NDArray[np.int64]) -> Sampled | AmongTargets:
        formula, log_q = self.formula(len(train_counts)), self.name == "sampled-softmax"
        if self.negatives == "in-batch":
            negatives = as_they_occur(train_counts)
            return AmongTargets(formula, negatives, self.n_negatives, log_q=log_q)
        negatives = by_popularity(train_counts, self.power if self.negatives == "popularity" else 0.0)
        return Sampled(formula, negatives, self.n_negatives, log_q=log_q)


class GBCESettings(SampledSettings):
    name: str = "gbce"
    calibration: Share = Field(0.75, description="t of gSASRec: 0 is bce, 1 fully calibrated")

    def formula(self, n_items: int) -> Formula:
        return formulas.gbce(formulas.gbce_beta(self.n_negatives, n_items, self.calibration))


class BPRMaxSettings(SampledSettings):
    name: str = "bpr-max"
    penalty: Annotated[float, Field(ge=0)] = Field(1.0, description="weight of the squared scores of negatives")

    def formula(self, n_items: int) -> Formula:
        return formulas.bpr_max(self.penalty)


class Sampled:
    """A loss of the target's score, (M,), and those of its negatives, (M, K)."""

    is_sparse = True

    def __init__(self, formula: Formula, negatives: Negatives, n_negatives: int, *, log_q: bool) -> None:
        self.formula, self.negatives = formula, negatives
        self.n_negatives, self.log_q = n_negatives, log_q

    def __call__(
        self, h: Tensor, output: Output, targets: Tensor, *, scale: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        is_shared = self.n_negatives >= SHARED_FROM
        shared = self.negatives.draw((1 if is_shared else len(h), self.n_negatives), generator).to(h.device)
        per_query = self.n_negatives * (1 if is_shared else h.shape[1])

        def value(h: Tensor, targets: Tensor, drawn: Tensor = shared) -> Tensor:
            scores = output.scores(h, drawn)
            if self.log_q:
                scores = scores - self.negatives.log_expected(drawn, self.n_negatives)
            scores = scores.masked_fill(drawn == targets[:, None], -torch.inf)
            return scale * self.formula(output.scores(h, targets[:, None])[:, 0], scores).sum()

        of_rows = (targets,) if is_shared else (targets, shared)
        return sum_over_rows(value, max(1, AT_ONCE // per_query), h, *of_rows)


class AmongTargets:
    """A sampled loss whose negatives are the targets of k other queries."""

    is_sparse = True

    def __init__(self, formula: Formula, negatives: Negatives, n_negatives: int, *, log_q: bool) -> None:
        self.formula, self.negatives = formula, negatives
        self.n_negatives, self.log_q = n_negatives, log_q

    def __call__(
        self, h: Tensor, output: Output, targets: Tensor, *, scale: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        groups = random_groups(len(h), self.n_negatives, generator).to(h.device)
        size = groups.shape[1]
        at_once = max(1, AT_ONCE // (size * max(size, h.shape[1])))
        losses, gradient = [], torch.zeros_like(h)
        for first in range(0, len(groups), at_once):
            order = groups[first : first + at_once].flatten()
            n_counted = len(h) - first * size  # beyond these are those that fill the last group
            part = slice(0, min(n_counted, len(order)))
            loss, grad = self._groups(h[order], output, targets[order], size, part, scale)
            losses.append(loss)
            gradient.index_add_(0, order, grad)
        return torch.stack(losses).sum(), gradient

    def _groups(
        self, h: Tensor, output: Output, targets: Tensor, size: int, counted: slice, scale: float
    ) -> tuple[Tensor, Tensor]:
        items = targets.view(-1, size)
        correction = self.negatives.log_expected(items, max(1, size - 1)) if self.log_q else None
        is_own = (items[:, None] == items[:, :, None]).flatten(0, 1)  # (M, K + 1)

        def value(h: Tensor) -> Tensor:
            scores = _scores_in_groups(output, h, items)
            wanted = scores.view(-1, size, size).diagonal(dim1=1, dim2=2).flatten()
            if correction is not None:
                scores = scores - correction.repeat_interleave(size, 0)
            scores = scores.masked_fill(is_own, -torch.inf)
            return scale * self.formula(wanted[counted], scores[counted]).sum()

        return differentiate(h, value)


def _scores_in_groups(output: Output, h: Tensor, items: Tensor) -> Tensor:
    """(G·n, D), (G, K): the first n vectors with the first K items, and so on → (G·n, K)."""
    n = len(h) // len(items)
    if not isinstance(output, DotProduct):
        return output.scores(h, items.repeat_interleave(n, 0))
    vectors = embed(output.weight, items, is_sparse=True)
    products = h.view(len(items), n, -1) @ vectors.transpose(1, 2)
    return (products + output.bias[items][:, None]).flatten(0, 1)
