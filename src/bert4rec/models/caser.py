"""Caser (Tang & Wang, WSDM 2018): convolutions over the last few items as over an image.

E holds the embeddings of the last `window` items, zeros where a history is shorter.

    o = max-pooled ReLU of horizontal filters, which see h successive items whole
    õ = vertical filters: weighted sums over the items, dimension by dimension
    z = ReLU(W [o ; õ] + b),  y_i = W'_i [z ; P_u] + b'_i

A query has the next three items as targets (`n_targets`, T of the paper), each against
three negatives, by `bce`. An unknown user has no P_u.

Where this differs from the paper: P_u starts at zero; and a negative may be another item of the
user's history (only the target itself is left out).

Shapes: B batch, L length, W window, D width, V items, M query positions, N different ones of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from bert4rec.data.splits import MicrobatchSize
from bert4rec.models.kernels.byte_dropout import ByteDropout
from bert4rec.models.kernels.row_embedding import RowEmbedding
from bert4rec.models.output import DotProductOutput, dot_product_output
from bert4rec.models.sequence_model import SequenceModel, SequenceModelSettings, embed_users
from bert4rec.settings import Positive


class CaserSettings(SequenceModelSettings):
    name: str = "caser"
    window: Positive = Field(
        5, description="how many of the last items the convolutions see; max_len limits the training sequences only"
    )
    horizontal_filters: Positive = Field(16, description="filters of each height")
    vertical_filters: Positive = Field(4, description="number of vertical filters: weighted sums over the window")
    n_targets: Positive = Field(3, description="how many following items a query predicts")


class Caser(SequenceModel):
    """Only the windows of query positions are convolved, as matrix products."""

    settings_class = CaserSettings
    objectives = ("next_item",)
    microbatch = MicrobatchSize(8192, 2000)

    def __init__(self, n_items: int, settings: CaserSettings, n_users: int = 0) -> None:
        super().__init__(n_items, settings, n_users)
        self.max_history = settings.window
        dim, self.window = settings.dim, settings.window
        n_horizontal, n_vertical = settings.horizontal_filters, settings.vertical_filters
        self.users = RowEmbedding(n_users, dim)  # P
        self.item_embedding = RowEmbedding(n_items + 1, dim)  # Q, and a row for PAD, never read
        self.horizontal = nn.ModuleList(  # a filter of height h sees h vectors as one long one
            nn.Linear(height * dim, n_horizontal) for height in range(1, self.window + 1)
        )
        self.vertical = nn.Linear(self.window, n_vertical)
        self.mixed = nn.Linear(n_horizontal * self.window + n_vertical * dim, dim)
        self.dropout = ByteDropout(settings.dropout)
        self.output_items = RowEmbedding(n_items, 2 * dim)  # W'
        self.output_bias = nn.Parameter(torch.zeros(n_items))  # b'
        nn.init.zeros_(self.users.weight)  # a user who never trains is an unknown user
        for embedding in (self.item_embedding, self.output_items):
            nn.init.normal_(embedding.weight, std=1 / embedding.embedding_dim)  # as in the authors' code

    def encode_queries(self, tokens: Tensor, positions: Tensor, users: Tensor) -> Tensor:
        positions, which = torch.unique_consecutive(positions, return_inverse=True)  # T targets each
        z = self._convolved(self._windows(tokens, positions))
        p = embed_users(users, self.users).index_select(0, positions // tokens.shape[1])
        return torch.cat([z, p], dim=1).index_select(0, which)

    def _windows(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """(B, L), (N,) → (N, W, D): the embeddings up to each query position, zeros before them."""
        before = self.window - 1
        padded = F.pad(tokens, (before, 0), value=self.pad_token).flatten()
        first = positions + positions // tokens.shape[1] * before  # each row is so much longer now
        places = first[:, None] + torch.arange(self.window, device=positions.device)
        read = padded[places]
        windows: Tensor = self.item_embedding(read) * (read != self.pad_token)[:, :, None]
        return windows

    def _convolved(self, windows: Tensor) -> Tensor:  # (N, W, D) → (N, D)
        dim = windows.shape[2]
        rows = windows.flatten(1)
        pooled = [
            F.relu(layer(rows.unfold(1, height * dim, dim))).amax(1)  # (N, W - h + 1, …) → (N, …)
            for height, layer in enumerate(self.horizontal, 1)
        ]
        sums = self.vertical(windows.transpose(1, 2)).flatten(1)
        out: Tensor = F.relu(self.mixed(self.dropout(torch.cat([*pooled, sums], dim=1))))
        return out

    def output_layer(self) -> DotProductOutput:
        return dot_product_output(self.output_items, self.output_bias)
