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

Negatives are drawn with replacement from all items, in proportion to popularity or uniformly, and a
negative that is the target does not count. Fewer than 64 are drawn for each asked position; from 64
on the positions of a piece share one draw, so that scoring them is a matrix product: each position
still sees k independent items.

Shapes: M asked positions, K negatives, D width, V items.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bert4rec.config import TrainingConfig
from bert4rec.models.output import Output, Products
from bert4rec.training.full_softmax import add_cross_entropy

SHARED_FROM = 64
GATHERED = 2**22  # numbers gathered at a time for negatives that each position has of its own


class Loss(Protocol):
    is_sparse: bool  # whether it leaves most rows of `weight` alone: their gradient is sparse then

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
            return _by_autograd(
                h,
                lambda h: share * F.cross_entropy(output.all_scores(h), targets, reduction="sum"),
            )
        weight, bias = output
        for parameter in (weight, bias):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        assert weight.grad is not None
        assert bias.grad is not None
        return add_cross_entropy(
            h,
            weight.detach()[: len(bias)],
            bias.detach(),
            targets,
            weight.grad[: len(bias)],
            bias.grad,
            share=share,
            memory=self.memory,
        )


class Sampled:
    """A loss of the target's score, (M,), and those of its negatives, (M, K)."""

    is_sparse = True

    def __init__(
        self,
        formula: Callable[[Tensor, Tensor], Tensor],  # (M,), (M, K) → (M,)
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
        at_once = len(h) if is_shared else max(1, GATHERED // (self.n_negatives * h.shape[1]))
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
        correction = self.negatives.log_expected(targets, max(1, len(targets) - 1))
        is_own = targets[None] == targets[:, None]

        def value(h: Tensor) -> Tensor:
            scores = output.scores(h, targets[None])
            target_scores = scores.diagonal()
            scores = (scores - correction).masked_fill(is_own, -torch.inf)
            return share * _softmax(target_scores, scores).sum()

        return _by_autograd(h, value)


class Negatives:
    """Items drawn with replacement, in proportion to `weights` (V,)."""

    def __init__(self, weights: NDArray[np.floating[Any]]) -> None:
        shares = weights / weights.sum()
        self.log_shares: Tensor = torch.from_numpy(
            np.log(np.maximum(shares, 1e-30)).astype(np.float32)
        )
        self.upper = torch.from_numpy(np.cumsum(shares))

    def draw(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        where = torch.rand(shape, dtype=torch.float64, generator=generator, device=generator.device)
        drawn = torch.searchsorted(self.upper.to(where.device), where)
        return drawn.clamp_(max=len(self.upper) - 1)

    def log_expected(self, items: Tensor, n: int) -> Tensor:
        """log of how often each of `items` is expected among `n` draws."""
        return self.log_shares.to(items.device)[items] + math.log(n)


def _softmax(target: Tensor, negatives: Tensor) -> Tensor:
    return torch.cat([target[:, None], negatives], dim=1).logsumexp(1) - target


def _bce(target: Tensor, negatives: Tensor) -> Tensor:
    return -F.logsigmoid(target) + F.softplus(negatives).sum(1)


def _gbce(beta: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda target, negatives: -beta * F.logsigmoid(target) + F.softplus(negatives).sum(1)


def _bpr(target: Tensor, negatives: Tensor) -> Tensor:
    counts = (negatives > -torch.inf).sum(1).clamp(min=1)
    return F.softplus(negatives - target[:, None]).sum(1) / counts


def gbce_beta(n_negatives: int, n_items: int, calibration: float) -> float:
    """β of gSASRec (Petrov & Macdonald, RecSys 2023): 1 at t = 0, the sampling rate at t = 1."""
    rate = min(1.0, n_negatives / max(1, n_items - 1))
    return rate * (calibration * (1 - 1 / rate) + 1 / rate)


def make_loss(config: TrainingConfig, train_counts: NDArray[np.int64]) -> Loss:
    """The loss that the settings name, for a catalogue with these training counts."""
    if config.loss == "cross-entropy":
        return CrossEntropy(config.loss_memory_mb * 2**20)
    uniform = np.ones(len(train_counts))
    by_popularity = Negatives(train_counts + 1e-3)  # items that were never trained on, hardly ever
    if config.loss == "in-batch":
        return InBatch(by_popularity)
    negatives = by_popularity if config.negatives == "popularity" else Negatives(uniform)
    k = config.n_negatives
    beta = gbce_beta(k, len(train_counts), config.gbce_calibration)
    formulas: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "sampled-softmax": _softmax,
        "bce": _bce,
        "gbce": _gbce(beta),
        "bpr": _bpr,
    }
    return Sampled(formulas[config.loss], negatives, k, log_q=config.loss == "sampled-softmax")


def _by_autograd(h: Tensor, value: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The value and its gradient for `h`; those of the parameters are added to their `.grad`."""
    leaf = h.detach().requires_grad_()
    with torch.enable_grad():
        loss = value(leaf)
    loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return loss.detach(), leaf.grad
