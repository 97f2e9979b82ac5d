"""The Transformer of BERT4Rec, as in the paper's equations; models/kernels/ computes it faster.

Shapes: B batch, L length, D width, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert4rec.models.kernels.byte_dropout import ByteDropout


class Attention(nn.Module):
    """Multi-head self-attention (Eq. 1–2). `visible` is false where a key must not be seen."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, ByteDropout(dropout)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:  # (B, L, D), (B, 1, 1, L)
        q, k, v = self.split_heads(self.query_key_value(x), 3)
        mixed = self.dropout(probabilities(q, k, visible)) @ v
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out

    def weights(self, x: Tensor, visible: Tensor | None) -> Tensor:
        """The attention probabilities, (B, H, L, L), for a person to look at."""
        q, k, _ = self.split_heads(self.query_key_value(x), 3)
        return probabilities(q, k, visible)

    def split_heads(self, projected: Tensor, n: int) -> tuple[Tensor, ...]:
        """(B, L, n·D) → n times (B, H, L, D / H)."""
        parts = projected.view(*projected.shape[:-1], n, self.heads, -1).unbind(2)
        return tuple(part.transpose(1, 2) for part in parts)


def probabilities(q: Tensor, k: Tensor, visible: Tensor | None) -> Tensor:
    """softmax(q kᵀ / √(D / H)) over the visible keys."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    shares: Tensor = scores.softmax(-1)
    return shares


def causal_mask(tokens: Tensor) -> Tensor:
    """(B, L) → (1, 1, L, L), true where a key is not behind the query."""
    length = tokens.shape[1]
    return torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()[None, None]


class FeedForward(nn.Module):
    """GELU(x W₁ + b₁) W₂ + b₂ at every position (Eq. 3–4)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, 4 * dim)
        self.output = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(F.gelu(self.inner(x)))
        return out


class Block(nn.Module):
    """LN(x + Dropout(Attention(x))), then the same around the feed-forward net (Eq. 5).

    Table 5 of the paper leaves out one part at a time: `without` names the feed-forward net (the
    block then ends after its first half), the layer norms or the residual connections.
    """

    def __init__(
        self, dim: int, heads: int, dropout: float, attention_dropout: float, without: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.attention = Attention(dim, heads, attention_dropout)
        self.feed_forward = None if "feed_forward" in without else FeedForward(dim)
        has_norm = "layer_norm" not in without
        self.norm_1: nn.Module = nn.LayerNorm(dim) if has_norm else nn.Identity()
        has_norm_2 = has_norm and self.feed_forward is not None
        self.norm_2: nn.Module = nn.LayerNorm(dim) if has_norm_2 else nn.Identity()
        self.has_residual = "residual" not in without
        self.dropout_1, self.dropout_2 = ByteDropout(dropout), ByteDropout(dropout)

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:  # (B, L, D), (B, 1, 1, L)
        a: Tensor = self.norm_1(self.residual(x) + self.dropout_1(self.attention(x, visible)))
        if self.feed_forward is None:
            return a
        out: Tensor = self.norm_2(self.residual(a) + self.dropout_2(self.feed_forward(a)))
        return out

    def residual(self, x: Tensor) -> Tensor:
        return x if self.has_residual else 0 * x
