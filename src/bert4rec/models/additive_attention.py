"""Attention that adds query and key: vᵀσ(q + k), as NARM and STAMP have it.

Shapes: B batch, L length, Q questions a row, H width, M asked positions of a batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bert4rec.models.layers import Asked

AT_ONCE = 2**20  # sums of query and key that are held at a time: some megabytes, whatever is asked


def mixed_by_addition(
    queries: Tensor, keys: Tensor, v: Tensor, values: Tensor, at: Tensor
) -> Tensor:
    """(M, H), (B, L, H), (H,), (B, L, D), (M,) → (M, D): Σ_j≤t vᵀσ(q_t + k_j) value_j.

    The weights are not normalised. `at` are the flat positions t, in row order.
    """
    B, L, _ = keys.shape
    asked = Asked(at, B, L)
    weights: Tensor = _Weights.apply(asked.to_grid(queries), keys, v)  # type: ignore[no-untyped-call]
    t = asked.to_grid((at % L)[:, None])  # (B, Q, 1)
    weights = weights * (torch.arange(L, device=at.device) <= t)
    return asked.from_grid(weights @ values)


class _Weights(torch.autograd.Function):
    """vᵀσ(q + k) for each pair of a row, (B, Q, H), (B, L, H), (H,) → (B, Q, L).

    The (B, Q, L, H) sums are computed a part at a time and again for the gradient, never kept.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(queries, keys, v)
        weights = queries.new_empty(*queries.shape[:2], keys.shape[1])
        for part, gates in _parts(queries, keys):
            weights[part] = gates @ v
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, v = ctx.saved_tensors
        for_queries, for_keys, for_v = (torch.zeros_like(each) for each in (queries, keys, v))
        for part, gates in _parts(queries, keys):
            g = grad[part]
            for_v += g.reshape(-1) @ gates.view(-1, len(v))
            slopes = torch.addcmul(gates, gates, gates, value=-1).mul_(g[..., None])
            for_queries[part] = slopes.sum(2) * v
            for_keys[part[0]] += slopes.sum(1) * v
        return for_queries, for_keys, for_v


def _parts(queries: Tensor, keys: Tensor) -> Any:
    """((rows, questions), σ(q + k) of these) so that all pairs come once."""
    B, Q, H = queries.shape
    a_question = keys.shape[1] * H
    n_questions = max(1, min(Q, AT_ONCE // a_question))
    n_rows = max(1, AT_ONCE // (a_question * Q))
    for row in range(0, B, n_rows):
        rows = slice(row, row + n_rows)
        for question in range(0, Q, n_questions):
            part = rows, slice(question, question + n_questions)
            yield part, (queries[part][:, :, None] + keys[rows, None]).sigmoid_()
