"""Attention that adds query and key: vᵀσ(q + k), as NARM and STAMP have it.

Shapes: B batch, L length, Q queries per row, H width, M query positions of a batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bert4rec.models.kernels.blocks import QueryGrid

AT_ONCE = 2**20  # sums of query and key that are held at a time: some megabytes


def additive_attention(queries: Tensor, keys: Tensor, v: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """(M, H), (B, L, H), (H,), (B, L, D), (M,) → (M, D): Σ_j≤t vᵀσ(q_t + k_j) value_j.

    The weights are not normalised. `positions` are the flat query positions t, in row order.
    """
    B, L, _ = keys.shape
    grid = QueryGrid(positions, B, L)
    weights: Tensor = _AdditiveWeights.apply(grid.to_grid(queries), keys, v)  # type: ignore[no-untyped-call]
    t = grid.to_grid((positions % L)[:, None])  # (B, Q, 1)
    weights = weights * (torch.arange(L, device=positions.device) <= t)
    return grid.from_grid(weights @ values)


class _AdditiveWeights(torch.autograd.Function):
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
    """((rows, queries), σ(q + k) of these): all pairs, each once."""
    B, Q, H = queries.shape
    per_query = keys.shape[1] * H
    n_queries = max(1, min(Q, AT_ONCE // per_query))
    n_rows = max(1, AT_ONCE // (per_query * Q))
    for row in range(0, B, n_rows):
        rows = slice(row, row + n_rows)
        for query in range(0, Q, n_queries):
            part = rows, slice(query, query + n_queries)
            yield part, (queries[part][:, :, None] + keys[rows, None]).sigmoid_()
