"""Losses: each fits every model, since it sees query vectors and an output layer only.

A loss is computed with its gradient in one go: it returns its value and the gradient of the query
vectors, and adds the gradients of the output layer to `weight.grad` and `bias.grad`.

Shapes: M queries, D width, V items.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from bert4rec.models.output import Output
from bert4rec.settings import Registry, Settings

SPARSE_FROM = 20_000  # rows; of fewer a batch touches so many that dense gradients are quicker


class LossSettings(Settings):
    name: str = Field(description="the loss to minimise; docs/reference/settings.md lists them")

    def build(self, train_counts: NDArray[np.int64]) -> Loss:
        """The loss for a catalogue with these training counts."""
        raise NotImplementedError


class AutoLoss(LossSettings):
    """cross-entropy, and from 20,000 items on a sampled softmax."""

    name: Literal["auto"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _has_no_settings(cls, values: Any) -> Any:
        if isinstance(values, dict) and (others := values.keys() - {"name"}):
            raise ValueError(
                f"{', '.join(sorted(others))}: loss.name is auto, which has no settings: choose "
                "one that has them, as in loss.name=sampled-softmax"
            )
        return values


class Loss(Protocol):
    is_sparse: bool  # whether a step touches some items only

    def __call__(
        self, h: Tensor, output: Output, targets: Tensor, *, scale: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """(M, D), …, (M,) → the loss, `scale` times the sum over M, and the gradient (M, D)."""
        ...


def uses_sparse_gradient(n_rows: int) -> bool:
    """Whether a sampled loss touches so few rows that the others should cost nothing."""
    return n_rows >= SPARSE_FROM


LOSSES: Registry[Any] = Registry(  # classes of settings that have `build`
    "loss.name",
    {
        "auto": "bert4rec.losses:AutoLoss",
        "cross-entropy": "bert4rec.losses.cross_entropy:CrossEntropySettings",
        "sampled-softmax": "bert4rec.losses.sampled:SampledSettings",
        "bce": "bert4rec.losses.sampled:SampledSettings",
        "gbce": "bert4rec.losses.sampled:GBCESettings",
        "bpr": "bert4rec.losses.sampled:SampledSettings",
        "top1": "bert4rec.losses.sampled:SampledSettings",
        "top1-max": "bert4rec.losses.sampled:SampledSettings",
        "bpr-max": "bert4rec.losses.sampled:BPRMaxSettings",
    },
)


def differentiate(h: Tensor, value: Callable[..., Tensor], *others: Tensor) -> tuple[Tensor, Tensor]:
    """`value(h, *others)` and its gradient for `h`; those of parameters are added to their `.grad`."""
    leaf = h.detach().requires_grad_()
    with torch.enable_grad():
        loss = value(leaf, *others)
    loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def sum_over_rows(value: Callable[..., Tensor], n_rows: int, h: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of `value(h, *others)` over `n_rows` rows of each at a time, and the gradient of each row."""
    slices = [slice(first, first + n_rows) for first in range(0, len(h), n_rows)]
    parts = [differentiate(h[rows], value, *(other[rows] for other in others)) for rows in slices]
    return torch.stack([loss for loss, _ in parts]).sum(), torch.cat([grad for _, grad in parts])
