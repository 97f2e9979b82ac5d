"""What a batch is trained to minimise; each fits every model that has `asked` and `output`.

A loss gets the vectors of the asked positions and gives back its value and their gradient; the
gradients of the output layer are added to `weight.grad` and `bias.grad`.

- `cross-entropy`: -log softmax over all items (Eq. 8 of the paper); exact to rounding.
- `sampled-softmax`: the same, with the total over the other items estimated from k of them. The
  estimate of the total is unbiased (logQ correction); its logarithm, and so the loss, is too low
  on average, by less as k grows.
- `in-batch`: sampled-softmax whose negatives are the other targets of the same piece of the batch.
  Popular items come more often, which logQ corrects for.
- `bce`: -log σ(target) - Σ log σ(-negative) over k negatives, as in SASRec. Another aim: the scores
  become no probabilities over items, and are overconfident.
- `gbce`: bce with σ(target)^β, which makes up for the share of items drawn, as in gSASRec.
- `bpr`: the mean over k negatives of -log σ(target - negative): the order of pairs.
- `top1`: the mean of σ(negative - target) + σ(negative²), as in GRU4Rec (Hidasi et al., 2016).
- `top1-max`, `bpr-max`: the same and `bpr` for the hardest negatives, of GRU4Rec+ (Hidasi &
  Karatzoglou, 2018): with s = softmax of the negatives' scores, Σ s (σ(negative - target) +
  σ(negative²)), and -log Σ s σ(target - negative) + penalty · Σ s negative².

Negatives are drawn with replacement from all items, in proportion to a power of popularity or
uniformly. Fewer than 64 are drawn for each asked position; from 64 on the positions of a piece
share one draw, so that scoring them is a matrix product: each still sees k independent items. With
`negatives = "in-batch"` nothing is drawn: the positions of a piece are dealt into groups of k + 1,
and the negatives of each are the targets of the others: close to GRU4Rec's mini-batches, though
some come from the same sequence. A negative that is the target does not count.

Shapes: M asked positions, K negatives, D width, V items.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bert4rec.config import TrainingConfig
from bert4rec.models.output import Output, Products
from bert4rec.models.table import rows_of
from bert4rec.training import formulas
from bert4rec.training.formulas import Formula
from bert4rec.training.full_softmax import add_cross_entropy
from bert4rec.training.negatives import Negatives, as_they_occur, by_popularity, random_groups

SHARED_FROM = 64
SPARSE_FROM = 20_000  # rows; of fewer a batch touches so many that whole gradients are quicker
AT_ONCE = 2**22  # numbers that are held at a time: scores, or vectors of a position's own negatives


def leaves_most_alone(n_rows: int) -> bool:
    """Whether a sampled loss touches so few rows of a table that the others should cost nothing."""
    return n_rows >= SPARSE_FROM


class Loss(Protocol):
    is_sparse: bool  # whether a step touches some items only

    def __call__(
        self,
        h: Tensor,
        output: Output,
        targets: Tensor,
        *,
        share: float,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        """(M, D), …, (M,) → the loss, `share` times the sum over M, and the gradient (M, D)."""
        ...


class CrossEntropy:
    is_sparse = False

    def __init__(self, memory: int = 64 * 2**20) -> None:
        self.memory = memory

    def __call__(
        self,
        h: Tensor,
        output: Output,
        targets: Tensor,
        *,
        share: float,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        if h.device.type != "cpu" or not isinstance(output, Products):
            return self._in_parts(h, output, targets, share)
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
            share=share,
            memory=self.memory,
        )

    def _in_parts(
        self, h: Tensor, output: Output, targets: Tensor, share: float
    ) -> tuple[Tensor, Tensor]:
        def value(h: Tensor, targets: Tensor) -> Tensor:
            return share * F.cross_entropy(output.all_scores(h), targets, reduction="sum")

        return _over_parts(value, max(1, self.memory // (4 * output.n_items)), h, targets)


class Sampled:
    """A loss of the target's score, (M,), and those of its negatives, (M, K)."""

    is_sparse = True

    def __init__(
        self,
        formula: Formula,
        negatives: Negatives,
        n_negatives: int,
        *,
        log_q: bool,
    ) -> None:
        self.formula, self.negatives = formula, negatives
        self.n_negatives, self.log_q = n_negatives, log_q

    def __call__(
        self,
        h: Tensor,
        output: Output,
        targets: Tensor,
        *,
        share: float,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        is_shared = self.n_negatives >= SHARED_FROM
        rows = 1 if is_shared else len(h)
        drawn = self.negatives.draw((rows, self.n_negatives), generator).to(h.device)
        a_position = self.n_negatives * (1 if is_shared else h.shape[1])
        at_once = max(1, AT_ONCE // a_position)
        losses, gradients = [], []
        for first in range(0, len(h), at_once):
            part = slice(first, first + at_once)
            loss, gradient = self._part(
                h[part], output, targets[part], drawn if is_shared else drawn[part], share
            )
            losses.append(loss)
            gradients.append(gradient)
        return torch.stack(losses).sum(), torch.cat(gradients)

    def _part(
        self, h: Tensor, output: Output, targets: Tensor, drawn: Tensor, share: float
    ) -> tuple[Tensor, Tensor]:
        correction = self.negatives.log_expected(drawn, self.n_negatives) if self.log_q else 0.0

        def value(h: Tensor) -> Tensor:
            scores = output.scores(h, drawn) - correction
            scores = scores.masked_fill(drawn == targets[:, None], -torch.inf)
            return share * self.formula(output.scores(h, targets[:, None])[:, 0], scores).sum()

        return _by_autograd(h, value)


class InBatch:
    is_sparse = True

    def __init__(self, negatives: Negatives) -> None:
        self.negatives = negatives

    def __call__(
        self,
        h: Tensor,
        output: Output,
        targets: Tensor,
        *,
        share: float,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        negatives = targets
        correction = self.negatives.log_expected(negatives, max(1, len(negatives) - 1))

        def value(h: Tensor, targets: Tensor) -> Tensor:
            scores = output.scores(h, negatives[None]) - correction
            scores = scores.masked_fill(negatives == targets[:, None], -torch.inf)
            own = output.scores(h, targets[:, None])[:, 0]
            return share * formulas.softmax(own, scores).sum()

        return _over_parts(value, max(1, AT_ONCE // len(targets)), h, targets)


class AmongTargets:
    """A sampled loss whose negatives are the targets of k other positions."""

    is_sparse = True

    def __init__(
        self, formula: Formula, popularity: Negatives, n_negatives: int, *, log_q: bool
    ) -> None:
        self.formula, self.popularity = formula, popularity
        self.n_negatives, self.log_q = n_negatives, log_q

    def __call__(
        self,
        h: Tensor,
        output: Output,
        targets: Tensor,
        *,
        share: float,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        groups = random_groups(len(h), self.n_negatives, generator).to(h.device)
        size = groups.shape[1]
        at_once = max(1, AT_ONCE // (size * max(size, h.shape[1])))
        losses, gradient = [], torch.zeros_like(h)
        for first in range(0, len(groups), at_once):
            order = groups[first : first + at_once].flatten()
            n_counted = len(h) - first * size  # beyond these are those that fill the last group
            part = slice(0, min(n_counted, len(order)))
            loss, grad = self._groups(h[order], output, targets[order], size, part, share)
            losses.append(loss)
            gradient.index_add_(0, order, grad)
        return torch.stack(losses).sum(), gradient

    def _groups(
        self, h: Tensor, output: Output, targets: Tensor, size: int, counted: slice, share: float
    ) -> tuple[Tensor, Tensor]:
        items = targets.view(-1, size)
        correction = self.popularity.log_expected(items, max(1, size - 1)) if self.log_q else None
        is_own = (items[:, None] == items[:, :, None]).flatten(0, 1)  # (M, K + 1)

        def value(h: Tensor) -> Tensor:
            scores = _scores_in_groups(output, h, items)
            wanted = scores.view(-1, size, size).diagonal(dim1=1, dim2=2).flatten()
            if correction is not None:
                scores = scores - correction.repeat_interleave(size, 0)
            scores = scores.masked_fill(is_own, -torch.inf)
            return share * self.formula(wanted[counted], scores[counted]).sum()

        return _by_autograd(h, value)


def _scores_in_groups(output: Output, h: Tensor, items: Tensor) -> Tensor:
    """(G·n, D), (G, K): the first n vectors with the first K items, and so on → (G·n, K)."""
    n = len(h) // len(items)
    if not isinstance(output, Products):
        return output.scores(h, items.repeat_interleave(n, 0))
    vectors = rows_of(output.weight, items, is_sparse=True)
    products = h.view(len(items), n, -1) @ vectors.transpose(1, 2)
    return (products + output.bias[items][:, None]).flatten(0, 1)


def make_loss(config: TrainingConfig, train_counts: NDArray[np.int64]) -> Loss:
    """The loss that the settings name, for a catalogue with these training counts."""
    assert config.loss != "auto", "settle it first"
    if config.loss == "cross-entropy":
        return CrossEntropy(config.loss_memory_mb * 2**20)
    if config.loss == "in-batch":
        return InBatch(as_they_occur(train_counts))
    k = config.n_negatives
    known: dict[str, Formula] = {
        "sampled-softmax": formulas.softmax,
        "bce": formulas.bce,
        "gbce": formulas.gbce(formulas.gbce_beta(k, len(train_counts), config.gbce_calibration)),
        "bpr": formulas.bpr,
        "top1": formulas.top1,
        "top1-max": formulas.top1_max,
        "bpr-max": formulas.bpr_max(config.bpr_max_penalty),
    }
    formula, log_q = known[config.loss], config.loss == "sampled-softmax"
    if config.negatives == "in-batch":
        return AmongTargets(formula, as_they_occur(train_counts), k, log_q=log_q)
    power = config.negatives_power if config.negatives == "popularity" else 0.0
    return Sampled(formula, by_popularity(train_counts, power), k, log_q=log_q)


def _over_parts(
    value: Callable[[Tensor, Tensor], Tensor], n_rows: int, h: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """The sum of `value` over some rows at a time, and the gradient of each row."""
    parts = []
    for first in range(0, len(h), n_rows):
        rows = slice(first, first + n_rows)
        parts.append(_by_autograd(h[rows], partial(_with_targets, value, targets[rows])))
    return torch.stack([loss for loss, _ in parts]).sum(), torch.cat([grad for _, grad in parts])


def _with_targets(value: Callable[[Tensor, Tensor], Tensor], targets: Tensor, h: Tensor) -> Tensor:
    return value(h, targets)


def _by_autograd(h: Tensor, value: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The value and its gradient for `h`; those of the parameters are added to their `.grad`."""
    leaf = h.detach().requires_grad_()
    with torch.enable_grad():
        loss = value(leaf)
    loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return loss.detach(), leaf.grad
