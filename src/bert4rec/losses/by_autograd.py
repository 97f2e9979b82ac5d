"""The value and gradient of a loss that autograd differentiates, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


def differentiate(h: Tensor, value: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The value and its gradient for `h`; those of parameters are added to their `.grad`."""
    leaf = h.detach().requires_grad_()
    with torch.enable_grad():
        loss = value(leaf)
    loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def sum_over_rows(
    value: Callable[[Tensor, Tensor], Tensor], n_rows: int, h: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """The sum of `value(h, targets)` over `n_rows` at a time, and the gradient of each row."""
    parts = []
    for first in range(0, len(h), n_rows):
        rows = slice(first, first + n_rows)
        parts.append(differentiate(h[rows], partial(_swap, value, targets[rows])))
    return torch.stack([loss for loss, _ in parts]).sum(), torch.cat([grad for _, grad in parts])


def _swap(value: Callable[[Tensor, Tensor], Tensor], targets: Tensor, h: Tensor) -> Tensor:
    return value(h, targets)
