"""The parts of the Transformer.

Shapes: B batch, L length, D width, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert4rec.models.prefix_attention import of_prefixes


class ByteDropout(nn.Module):
    """Dropout that draws one random byte an element instead of one random float.

    A CPU spends much of a training step on `bernoulli_`; here one 64-bit draw serves eight
    elements. The probability is rounded to 1/256 and the scale is exact for the rounded one.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.dropped_of_256 = min(round(probability * 256), 255)
        self._reused: _ReusedMask | None = None

    def reuse_masks(self, generator: torch.Generator | None) -> None:
        """Draw one mask from `generator` and use it for every batch until this is called again.

        With None every batch gets a fresh mask again, from torch's default generator. A step that
        is computed in pieces draws its masks once. Each sequence still sees a
        mask of the right distribution, so the expected gradient is the same; sequences of
        different pieces share theirs. The mask differs from layer to layer.
        """
        self._reused = None if generator is None else _ReusedMask(generator)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.keeps_all else x * self._mask(x)

    def added(self, x: Tensor, change: Tensor) -> Tensor:
        """x + Dropout(change), in one pass."""
        return x + change if self.keeps_all else torch.addcmul(x, change, self._mask(change))

    @property
    def keeps_all(self) -> bool:
        return not self.training or self.dropped_of_256 == 0

    def _mask(self, x: Tensor) -> Tensor:
        """0 or the scale that makes up for the zeros, in the shape of `x`."""
        if self._reused is None:
            return self._draw(x.numel(), x.device, None).view(x.shape)
        mask = self._reused.mask
        if mask is None or mask.numel() < x.numel():
            mask = self._draw(x.numel(), x.device, self._reused.generator)
            self._reused.mask = mask
        return mask[: x.numel()].view(x.shape)

    def _draw(self, n: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
        draws = torch.empty((n + 7) // 8, dtype=torch.int64, device=device)
        draws.random_(-(2**63), None, generator=generator)  # all 64 bits, the sign too
        kept = draws.view(torch.uint8)[:n] >= self.dropped_of_256
        return kept.float().mul_(256 / (256 - self.dropped_of_256))


class _ReusedMask:
    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.mask: Tensor | None = None


class Asked:
    """The positions of a batch that are read, so that the last block computes no others.

    `at` (M,) are flat positions in row order. Attention wants the same number of questions in each
    row: they are put into a grid (B, Q), Q being the most that any row asks.
    """

    def __init__(self, at: Tensor, n_rows: int, length: int) -> None:
        if n_rows == 1:
            self.at, self.n_rows, self.width, self.is_full = at, 1, len(at), True
            return
        rows = at // length
        counts = torch.bincount(rows, minlength=n_rows)
        column = torch.arange(len(at), device=at.device) - (counts.cumsum(0) - counts)[rows]
        self.at, self.n_rows, self.width = at, n_rows, int(counts.max())
        self.is_full = self.width * n_rows == len(at)
        self.place = rows * self.width + column  # (M,) where each stands in the grid

    def to_grid(self, x: Tensor) -> Tensor:  # (M, D) → (B, Q, D)
        if not self.is_full:
            x = x.new_zeros(self.n_rows * self.width, x.shape[1]).index_copy(0, self.place, x)
        return x.view(self.n_rows, self.width, -1)

    def from_grid(self, grid: Tensor) -> Tensor:  # (B, Q, D) → (M, D)
        x = grid.flatten(0, 1)
        return x if self.is_full else x.index_select(0, self.place)


class Attention(nn.Module):
    """Multi-head self-attention (Eq. 1–2); `visible` says what is hidden, as padding is."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, ByteDropout(dropout)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:  # (B, L, D), (B, 1, 1, L)
        q, k, v = self._heads(self.query_key_value(x), 3)
        out: Tensor = self.output(self._mix(q, k, v, visible))
        return out

    def asked(self, x: Tensor, read: Tensor, visible: Tensor | None, asked: Asked) -> Tensor:
        """The same at the asked positions only, whose rows of `x` are `read` (M, D) → (M, D)."""
        if asked.is_full and asked.width == 1 and self.dropout.keeps_all:
            return self._one_a_row(x, read, visible)
        dim = x.shape[-1]
        weight, bias = self.query_key_value.weight, self.query_key_value.bias
        (q,) = self._heads(asked.to_grid(F.linear(read, weight[:dim], bias[:dim])), 1)
        k, v = self._heads(F.linear(x, weight[dim:], bias[dim:]), 2)
        out: Tensor = self.output(asked.from_grid(self._mix(q, k, v, visible)))
        return out

    def prefixes(
        self, x: Tensor, asks: Tensor, between: Tensor | None, *, is_last: bool
    ) -> tuple[Tensor | None, Tensor]:
        """(B, L, D) items, and as many questions: the i-th sees the items 0..i and itself.

        `between` is added to the scores of items for items; None hides all later ones.
        """
        q, k, v = self._heads(self.query_key_value(x), 3)
        asking, key, value = self._heads(self.query_key_value(asks), 3)
        answers = of_prefixes(asking, k, v, key, value).transpose(1, 2).flatten(2)
        items = None
        if not is_last:
            seen = F.scaled_dot_product_attention(q, k, v, between, is_causal=between is None)
            items = self.output(seen.transpose(1, 2).flatten(2))
        return items, self.output(answers)

    def _one_a_row(self, x: Tensor, read: Tensor, visible: Tensor | None) -> Tensor:
        """Attention of one position a row, (B, D), without the keys and values of all the others.

        q·(W x + b) = (Wᵀq)·x + q·b, where q·b is the same for every x and falls out of the softmax;
        and a mixture of W x + b is W times the mixture of x, plus b. So W meets one vector a row
        and head instead of one a position.
        """
        dim = read.shape[1]
        weight, bias = self.query_key_value.weight, self.query_key_value.bias
        _, keys, values = weight.view(3, self.heads, -1, dim).unbind(0)  # (H, D/H, D)
        q = F.linear(read, weight[:dim], bias[:dim]).view(len(read), self.heads, -1).transpose(0, 1)
        asks = torch.bmm(q, keys).transpose(0, 1)  # (B, H, D)
        scores = torch.bmm(asks, x.transpose(1, 2)) * q.shape[-1] ** -0.5  # (B, H, L)
        if visible is not None:
            scores = scores.masked_fill(~visible[:, 0], float("-inf"))
        mixture = torch.bmm(scores.softmax(-1), x).transpose(0, 1)  # (H, B, D)
        mixed = torch.bmm(mixture, values.transpose(1, 2)).transpose(0, 1).flatten(1)
        out: Tensor = self.output(mixed + bias[2 * dim :])
        return out

    def weights(self, x: Tensor, visible: Tensor | None) -> Tensor:
        """The attention probabilities themselves, (B, H, L, L), to be looked at."""
        q, k, _ = self._heads(self.query_key_value(x), 3)
        return self._probabilities(q, k, visible)

    def _heads(self, projected: Tensor, n: int) -> tuple[Tensor, ...]:  # n times (B, H, L, D/H)
        parts = projected.view(*projected.shape[:-1], n, self.heads, -1).unbind(2)
        return tuple(part.transpose(1, 2) for part in parts)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        if self.dropout.keeps_all:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        else:  # torch's fused kernel has no dropout on a CPU
            mixed = self.dropout(self._probabilities(q, k, visible)) @ v
        return mixed.transpose(1, 2).flatten(2)

    def _probabilities(self, q: Tensor, k: Tensor, visible: Tensor | None) -> Tensor:
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
    """LN(x + Dropout(Attention(x))), then the same around the feed-forward net (Eq. 5).

    The norms, the sums and the feed-forward net can each be left out, for the paper's Table 5;
    without the net the block ends after its first half.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        dropout: float,
        attention_dropout: float,
        *,
        has_feed_forward: bool = True,
        has_norm: bool = True,
        has_residual: bool = True,
    ) -> None:
        super().__init__()
        self.has_residual = has_residual
        self.is_whole = has_feed_forward and has_norm and has_residual
        self.attention = Attention(dim, heads, attention_dropout)
        self.feed_forward = FeedForward(dim) if has_feed_forward else None
        self.norm_1 = nn.LayerNorm(dim) if has_norm else nn.Identity()
        self.norm_2 = nn.LayerNorm(dim) if has_norm and has_feed_forward else nn.Identity()
        self.dropout_1, self.dropout_2 = ByteDropout(dropout), ByteDropout(dropout)

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:  # (B, L, D), (B, 1, 1, L)
        is_watched = self.training or torch.is_grad_enabled()
        if len(x) == 1 and visible is None and self.is_whole and not is_watched:
            return self._one(x)
        return self._rest(x, self.attention(x, visible))

    def _one(self, x: Tensor) -> Tensor:
        """The same for one history in one call: most of its time goes into calling operations."""
        attention, inner = self.attention, self.feed_forward
        norm_1, norm_2 = self.norm_1, self.norm_2
        assert inner is not None
        assert isinstance(norm_1, nn.LayerNorm)
        assert isinstance(norm_2, nn.LayerNorm)
        return torch._transformer_encoder_layer_fwd(  # what nn.TransformerEncoderLayer calls
            x,
            x.shape[-1],
            attention.heads,
            attention.query_key_value.weight,
            attention.query_key_value.bias,
            attention.output.weight,
            attention.output.bias,
            True,  # GELU
            False,  # the norm comes after
            norm_1.eps,
            norm_1.weight,
            norm_1.bias,
            norm_2.weight,
            norm_2.bias,
            inner.inner.weight,
            inner.inner.bias,
            inner.output.weight,
            inner.output.bias,
        )

    def asked(self, x: Tensor, visible: Tensor | None, asked: Asked) -> Tensor:
        """The same at the asked positions only → (M, D)."""
        read = x.flatten(0, 1).index_select(0, asked.at)
        return self._rest(read, self.attention.asked(x, read, visible, asked))

    def prefixes(
        self, x: Tensor, asks: Tensor, between: Tensor | None, *, is_last: bool
    ) -> tuple[Tensor, Tensor]:
        """The same for items and a question after each; nobody reads the last block's items."""
        of_items, of_asks = self.attention.prefixes(x, asks, between, is_last=is_last)
        x = x if of_items is None else self._rest(x, of_items)
        return x, self._rest(asks, of_asks)

    def _rest(self, x: Tensor, attended: Tensor) -> Tensor:
        a: Tensor = self.norm_1(self._joined(x, attended, self.dropout_1))
        if self.feed_forward is None:
            return a
        out: Tensor = self.norm_2(self._joined(a, self.feed_forward(a), self.dropout_2))
        return out

    def _joined(self, x: Tensor, change: Tensor, dropout: ByteDropout) -> Tensor:
        return dropout.added(x, change) if self.has_residual else dropout(change)
