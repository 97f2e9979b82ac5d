"""Losses over items that never hold all the logits of a batch.

Shapes: M asked positions, D width, V items.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Logits are made in blocks of this many bytes, to stay within a CPU's cache and off the page-fault
# path.
BLOCK_BYTES = 8 * 2**20


class _FullCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of `softmax(h Eᵀ + b)`; loss and gradient in one pass, block by block."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        n_asked, n_items = h.shape[0], weight.shape[0]
        rows = max(16, BLOCK_BYTES // (4 * n_items))
        grad_h, grad_weight, grad_bias = (
            torch.empty_like(h),
            torch.zeros_like(weight),
            torch.zeros_like(bias),
        )
        loss = h.new_zeros(())
        for start in range(0, n_asked, rows):
            part, wanted = h[start : start + rows], targets[start : start + rows, None]
            logits = torch.addmm(bias, part, weight.T)
            log_total = logits.logsumexp(1, keepdim=True)
            loss += (log_total - logits.gather(1, wanted)).sum()
            p = logits.sub_(log_total).exp_()  # softmax, in the logits' own memory
            p.scatter_add_(1, wanted, p.new_full(wanted.shape, -1.0))
            grad_h[start : start + rows] = p @ weight
            grad_weight.addmm_(p.T, part)
            grad_bias += p.sum(0)
        ctx.save_for_backward(grad_h, grad_weight, grad_bias)
        ctx.n_asked = n_asked
        return loss / n_asked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        grad_h, grad_weight, grad_bias = ctx.saved_tensors
        scale = grad / ctx.n_asked
        return grad_h * scale, grad_weight * scale, grad_bias * scale, None


def cross_entropy(h: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """(M, D), (V, D), (V,), (M,) → the mean negative log-probability of the targets (Eq. 8)."""
    if h.device.type != "cpu":
        return F.cross_entropy(F.linear(h, weight, bias), targets)
    loss: Tensor = _FullCrossEntropy.apply(h, weight, bias, targets)  # type: ignore[no-untyped-call]
    return loss
