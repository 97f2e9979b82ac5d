"""CDAE (Wu, DuBois, Zheng & Ester, WSDM 2016): a denoising autoencoder of what a user had.

    h = σ(Σ_j W_j x̃_j / √n + V_u + b),  ŷ_i = W'_i h + b'_i

x is the set of the items that are read: an item counts once, however often it occurs, and their
order is not seen at all. Training hides a share q of them (`mask_ratio` of the objective
`denoising`) and predicts all; the rest is scaled up to make up for it, by 1/(1 - q) in the
paper and by the exact ratio of the row here. An unknown user has no V_u. The loss is the logistic
one of the paper's two, with 5 negatives for each item.

Where this differs from the paper: the sum is divided by the root of its number of items n. Adam
moves all rows by steps of one size, and a plain sum of hundreds of them runs into the flat ends of
σ: on ML-1M such a model was no better than popularity after six epochs. And the items are those
that are read, at most `max_len`, instead of all that a user had. A negative may be another item of
the user's (only the target itself is left out).

Shapes: B batch, L length, D width, V items, M query positions of a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bert4rec.data.splits import MicrobatchSize
from bert4rec.models.kernels.byte_dropout import ByteDropout
from bert4rec.models.kernels.row_embedding import RowEmbedding
from bert4rec.models.output import DotProductOutput, dot_product_output
from bert4rec.models.sequence_model import SequenceModel, SequenceModelSettings, embed_users


class CDAESettings(SequenceModelSettings):
    name: str = "cdae"


class CDAE(SequenceModel):
    """One hidden layer; each row has one vector, whatever its queries."""

    settings_class = CDAESettings
    objectives = ("denoising",)
    microbatch = MicrobatchSize(16384, 4000)  # a position costs no more than a row of an embedding

    def __init__(self, n_items: int, settings: CDAESettings, n_users: int = 0) -> None:
        super().__init__(n_items, settings, n_users)
        self.users = RowEmbedding(n_users, settings.dim)  # V
        self.item_embedding = RowEmbedding(n_items + 1, settings.dim)  # W, and a row for PAD, never read
        self.bias = nn.Parameter(torch.zeros(settings.dim))  # b
        self.output_items = RowEmbedding(n_items, settings.dim)  # W'
        self.output_bias = nn.Parameter(torch.zeros(n_items))  # b'
        self.dropout = ByteDropout(settings.dropout)
        nn.init.zeros_(self.users.weight)  # a user who never trains is an unknown user
        for embedding, std in ((self.item_embedding, 0.02), (self.output_items, 0.1)):
            nn.init.normal_(embedding.weight, std=std)

    def encode_queries(self, tokens: Tensor, positions: Tensor, users: Tensor) -> Tensor:
        rows = positions // tokens.shape[1]
        # Sorted, so that even the rounding of the sum is the same for every order of a history.
        tokens = tokens.sort(dim=1).values
        counts = tokens < self.pad_token
        n_all = (tokens != self.pad_token).sum(1)  # with those that training hides behind [MASK]
        ratio = n_all / counts.sum(1).clamp(min=1)
        counts[:, 1:] &= tokens[:, 1:] != tokens[:, :-1]  # an item counts once
        n = counts.sum(1).clamp(min=1)
        scale = (ratio / n).sqrt()  # ratio / √(n · ratio)
        tokens = tokens.clamp(max=self.pad_token)
        history = (counts.float()[:, None] @ self.item_embedding(tokens))[:, 0]  # (B, D)
        history = history * scale[:, None]
        hidden = torch.sigmoid(history + embed_users(users, self.users) + self.bias)
        out: Tensor = self.dropout(hidden).index_select(0, rows)
        return out

    def output_layer(self) -> DotProductOutput:
        return dot_product_output(self.output_items, self.output_bias)
