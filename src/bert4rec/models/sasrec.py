"""SASRec (Kang & McAuley, ICDM 2018): the left-to-right Transformer.

Its loss is a setting, and makes the variants of the literature: `bce` with one negative is the
paper's, full cross-entropy or `bce` with 3,000 negatives is SASRec+ (Klenitskiy & Vasilev, RecSys
2023), `gbce` is gSASRec (Petrov & Macdonald, RecSys 2023).

Where this differs from the authors' code: positions count from the first item that is read, not
from the padding, so that padding changes no score; a negative may be another item of the user's
history (only the target itself is left out); and the heads are mixed by one more matrix, as in the
Transformer.

Shapes: B batch, L length, D width, V items, M asked positions of a batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert4rec.config import ModelConfig
from bert4rec.models.layers import ByteDropout
from bert4rec.models.learned import Learned, initialise
from bert4rec.models.output import InBlocks, products
from bert4rec.models.table import Table


class SASRec(Learned):
    """Embedding, blocks of causal attention and a point-wise net, a last norm; tied output."""

    task = "next-item"

    def __init__(self, n_items: int, config: ModelConfig, n_users: int = 0) -> None:
        super().__init__(n_items, config)
        self.items = Table(n_items + 1, config.dim)  # M of the paper, and a row for PAD
        self.positions = nn.Embedding(config.max_len, config.dim)
        self.dropout = ByteDropout(config.dropout)
        self.blocks = nn.ModuleList(
            CausalBlock(config.dim, config.heads, config.dropout, config.attention_dropout)
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.dim)
        self.apply(initialise)

    def asked(self, tokens: Tensor, at: Tensor, users: Tensor) -> Tensor:
        scale = self.items.embedding_dim**0.5  # of the authors' code; the paper leaves it out
        x = self.items(tokens) * scale + self.positions.weight[: tokens.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        # Padding stands at the end, where no earlier position looks: it needs no mask.
        out: Tensor = self.norm(x.flatten(0, 1).index_select(0, at))
        return out

    def output(self) -> InBlocks:
        return products(self.items, self.no_bias)


class CausalBlock(nn.Module):
    """x = Q + Attention(Q, x, x) with Q = LN(x), then y = LN(x) + Dropout(FFN(LN(x))) (Eq. 2–5).

    Only the query is normalised, and the normalised one is what the residual adds, as in the
    authors' code; their dropout of attention probabilities is a setting. The net's inner width is
    D, its activation ReLU.
    """

    def __init__(self, dim: int, heads: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.heads, self.attention_dropout = heads, ByteDropout(attention_dropout)
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key_value = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.inner, self.outer = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)
        self.dropout_inner, self.dropout_outer = ByteDropout(dropout), ByteDropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, L, D)
        q = self.norm_1(x)
        x = q + self.output(self._attention(self.query(q), self.key_value(x)))
        x = self.norm_2(x)
        inner = self.dropout_inner(F.relu(self.inner(x)))
        return self.dropout_outer.added(x, self.outer(inner))

    def _attention(self, query: Tensor, key_value: Tensor) -> Tensor:
        B, L, D = query.shape
        q = query.view(B, L, self.heads, -1).transpose(1, 2)
        k, v = key_value.view(B, L, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.attention_dropout.keeps_all:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # torch's fused kernel has no dropout on a CPU
            later = torch.ones(L, L, dtype=torch.bool, device=q.device).triu(1)
            scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
            mixed = self.attention_dropout(scores.softmax(-1)) @ v
        return mixed.transpose(1, 2).reshape(B, L, D)
