"""The parts of the Transformer.

Shapes: B batch, L length, D width, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ByteDropout(nn.Module):
    """Dropout that draws one random byte an element instead of one random float.

    A CPU spends much of a training step on `bernoulli_`; here one 64-bit draw serves eight
    elements. The probability is rounded to 1/256 and the scale is exact for the rounded one.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.dropped_of_256 = min(round(probability * 256), 255)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.dropped_of_256 == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.dropped_of_256 / 256)
        draws = torch.empty((x.numel() + 7) // 8, dtype=torch.int64)
        draws.random_(-(2**63), None)  # all 64 bits; the default leaves the sign bit out
        kept = (draws.view(torch.uint8)[: x.numel()] >= self.dropped_of_256).view(x.shape)
        return x * kept * (256 / (256 - self.dropped_of_256))


class Attention(nn.Module):
    """Multi-head self-attention in both directions (Eq. 1–2); only padding is hidden."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.output = nn.Linear(dim, dim)

    def _split_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, L, D/H)

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:  # (B, L, D), (B, 1, 1, L)
        q, k, v = self._split_heads(x)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=dropout)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out

    def weights(self, x: Tensor, visible: Tensor | None) -> Tensor:
        """The attention probabilities themselves, (B, H, L, L), to be looked at."""
        q, k, _ = self._split_heads(x)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        probabilities: Tensor = scores.softmax(-1)
        return probabilities


class FeedForward(nn.Module):
    """GELU(xW₁+b₁)W₂+b₂ at every position (Eq. 3–4)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, 4 * dim)
        self.output = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(F.gelu(self.inner(x)))
        return out


class Block(nn.Module):
    """LN(x + Dropout(Attention(x))), then the same around the feed-forward net (Eq. 5)."""

    def __init__(self, dim: int, heads: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.attention = Attention(dim, heads, attention_dropout)
        self.feed_forward = FeedForward(dim)
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.dropout = ByteDropout(dropout)

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:  # (B, L, D), (B, 1, 1, L)
        a = self.norm_1(x + self.dropout(self.attention(x, visible)))
        out: Tensor = self.norm_2(a + self.dropout(self.feed_forward(a)))
        return out
