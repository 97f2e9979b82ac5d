"""What a sampled loss makes of the target's score and those of its negatives.

A score of -inf is a negative that does not count: it must change neither the value nor a gradient,
and a position without any other must not become NaN.

Shapes: M queries, K negatives.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

LOWEST = -1e30  # in the place of -inf where a softmax may find nothing else

Formula = Callable[[Tensor, Tensor], Tensor]  # (M,), (M, K) → (M,)


def softmax(target: Tensor, negatives: Tensor) -> Tensor:
    return torch.cat([target[:, None], negatives], dim=1).logsumexp(1) - target


def bce(target: Tensor, negatives: Tensor) -> Tensor:
    return -F.logsigmoid(target) + F.softplus(negatives).sum(1)


def gbce(beta: float) -> Formula:
    return lambda target, negatives: -beta * F.logsigmoid(target) + F.softplus(negatives).sum(1)


def bpr(target: Tensor, negatives: Tensor) -> Tensor:
    counts = (negatives > -torch.inf).sum(1).clamp(min=1)
    return F.softplus(negatives - target[:, None]).sum(1) / counts


def top1(target: Tensor, negatives: Tensor) -> Tensor:
    counts = negatives > -torch.inf
    return (_top1_pairs(target, negatives) * counts).sum(1) / counts.sum(1).clamp(min=1)


def top1_max(target: Tensor, negatives: Tensor) -> Tensor:
    counts = negatives > -torch.inf
    weights = negatives.masked_fill(~counts, LOWEST).softmax(1) * counts
    return (_top1_pairs(target, negatives) * weights).sum(1)


def _top1_pairs(target: Tensor, negatives: Tensor) -> Tensor:
    r = negatives.masked_fill(negatives == -torch.inf, 0.0)  # any number: they do not count
    return torch.sigmoid(r - target[:, None]) + torch.sigmoid(r * r)


FORMULAS: dict[str, Formula] = {"sampled-softmax": softmax, "bce": bce, "bpr": bpr, "top1": top1, "top1-max": top1_max}


def bpr_max(penalty: float) -> Formula:
    def formula(target: Tensor, negatives: Tensor) -> Tensor:
        counts = negatives > -torch.inf
        r = negatives.masked_fill(~counts, 0.0)  # any number: their weight is zero
        log_weights = negatives.masked_fill(~counts, LOWEST).log_softmax(1)
        pairs = (log_weights + F.logsigmoid(target[:, None] - r)).logsumexp(1)
        loss = penalty * (log_weights.exp() * r * r).sum(1) - pairs
        return loss.masked_fill(~counts.any(1), 0.0)

    return formula


def gbce_beta(n_negatives: int, n_items: int, calibration: float) -> float:
    """β of gSASRec (Petrov & Macdonald, RecSys 2023): 1 at t = 0, the sampling rate at t = 1."""
    rate = min(1.0, n_negatives / max(1, n_items - 1))
    return rate * (calibration * (1 - 1 / rate) + 1 / rate)
