"""SASRec (Kang & McAuley, ICDM 2018): the left-to-right Transformer.

Its loss is a setting, and makes the variants of the literature: `bce` with one negative is the
paper's, full cross-entropy or `bce` with 3,000 negatives is SASRec+ (Klenitskiy & Vasilev, RecSys
2023), `gbce` is gSASRec (Petrov & Macdonald, RecSys 2023).

Where this differs from the authors' code: positions count from the first item that is read, not
from the padding, so that padding changes no score; a negative may be another item of the user's
history (only the target itself is left out); and the heads are mixed by one more matrix, as in the
Transformer.

Shapes: B batch, L length, D width, V items, M query positions of a batch.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from bert4rec.models.initialization import init_truncated_normal
from bert4rec.models.kernels.byte_dropout import ByteDropout
from bert4rec.models.kernels.row_embedding import RowEmbedding
from bert4rec.models.output import DotProductOutput, dot_product_output
from bert4rec.models.sequence_model import SequenceModel, SequenceModelSettings
from bert4rec.settings import Dropout, Positive


class SASRecSettings(SequenceModelSettings):
    name: str = "sasrec"
    heads: Positive = Field(1, description="attention heads per block; must divide dim")
    layers: Positive = Field(2, description="blocks")
    attention_dropout: Dropout = Field(
        0.0, description="dropout of attention probabilities; rules out the fused kernel on a CPU"
    )

    @model_validator(mode="after")
    def _heads_divide_dim(self) -> Self:
        if self.dim % self.heads:
            raise ValueError(f"heads = {self.heads} does not divide dim = {self.dim}")
        return self


class SASRec(SequenceModel):
    """Embedding, blocks of causal attention and a point-wise net, a last norm; tied output."""

    settings_class = SASRecSettings
    objectives = ("next_item",)

    def __init__(self, n_items: int, settings: SASRecSettings, n_users: int = 0) -> None:
        super().__init__(n_items, settings)
        self.item_embedding = RowEmbedding(n_items + 1, settings.dim)  # M of the paper, and a row for PAD
        self.position_embedding = nn.Embedding(settings.max_len, settings.dim)
        self.dropout = ByteDropout(settings.dropout)
        self.blocks = nn.ModuleList(
            CausalBlock(settings.dim, settings.heads, settings.dropout, settings.attention_dropout)
            for _ in range(settings.layers)
        )
        self.norm = nn.LayerNorm(settings.dim)
        self.apply(init_truncated_normal)

    def encode_queries(self, tokens: Tensor, positions: Tensor, users: Tensor) -> Tensor:
        scale = self.item_embedding.embedding_dim**0.5  # of the authors' code; the paper leaves it out
        x = self.item_embedding(tokens) * scale + self.position_embedding.weight[: tokens.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        # Padding stands at the end, where no earlier position looks: it needs no mask.
        out: Tensor = self.norm(x.flatten(0, 1).index_select(0, positions))
        return out

    def output_layer(self) -> DotProductOutput:
        return dot_product_output(self.item_embedding, self.no_bias)


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
        return self.dropout_outer.add(x, self.outer(inner))

    def _attention(self, query: Tensor, key_value: Tensor) -> Tensor:
        B, L, D = query.shape
        q = query.view(B, L, self.heads, -1).transpose(1, 2)
        k, v = key_value.view(B, L, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.attention_dropout.is_identity:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # torch's fused kernel has no dropout on a CPU
            later = torch.ones(L, L, dtype=torch.bool, device=q.device).triu(1)
            scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
            mixed = self.attention_dropout(scores.softmax(-1)) @ v
        return mixed.transpose(1, 2).reshape(B, L, D)
