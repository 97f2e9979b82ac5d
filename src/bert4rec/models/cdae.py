"""CDAE (Wu, DuBois, Zheng & Ester, WSDM 2016): a denoising autoencoder of what a user had.

    h = σ(Σ_j W_j x̃_j / √n + V_u + b),  ŷ_i = W'_i h + b'_i

x is the set of the items that are read: an item counts once, however often it occurs, and their
order is not seen at all. Training hides a share q of them (`training.mask_ratio`, the task
`reconstruction`) and asks about all; the rest is scaled up to make up for it, by 1/(1 - q) in the
paper and by the exact ratio of the row here. A stranger has no V_u. The loss is the logistic one of
the paper's two, with 5 negatives for each item.

Where this differs from the paper: the sum is divided by the root of its number of items n. Adam
moves all rows by steps of one size, and a plain sum of hundreds of them runs into the flat ends of
σ: on ML-1M such a model was no better than popularity after six epochs. And the items are those
that are read, at most `max_len`, instead of all that a user had. A negative may be another item of
the user's (only the target itself is left out).

Shapes: B batch, L length, D width, V items, M asked positions of a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bert4rec.config import ModelConfig
from bert4rec.data.pieces import Size
from bert4rec.models.layers import ByteDropout
from bert4rec.models.learned import Learned, known_users
from bert4rec.models.output import InBlocks, products
from bert4rec.models.table import Table


class CDAE(Learned):
    """One hidden layer; each row has one vector, whatever is asked about it."""

    task = "reconstruction"
    piece = Size(16384, 4000)  # a position costs no more than a row of a table

    def __init__(self, n_items: int, config: ModelConfig, n_users: int = 0) -> None:
        super().__init__(n_items, config, n_users)
        self.users = Table(n_users, config.dim)  # V
        self.items = Table(n_items + 1, config.dim)  # W, and a row for PAD, never read
        self.bias = nn.Parameter(torch.zeros(config.dim))  # b
        self.output_items = Table(n_items, config.dim)  # W'
        self.output_bias = nn.Parameter(torch.zeros(n_items))  # b'
        self.dropout = ByteDropout(config.dropout)
        nn.init.zeros_(self.users.weight)  # a user who never trains is a stranger
        for table, std in ((self.items, 0.02), (self.output_items, 0.1)):
            nn.init.normal_(table.weight, std=std)

    def asked(self, tokens: Tensor, at: Tensor, users: Tensor) -> Tensor:
        rows = at // tokens.shape[1]
        # Sorted, so that even the rounding of the sum is the same for every order of a history.
        tokens = tokens.sort(dim=1).values
        counts = tokens < self.pad
        n_all = (tokens != self.pad).sum(1)  # with those that training hides behind [MASK]
        ratio = n_all / counts.sum(1).clamp(min=1)
        counts[:, 1:] &= tokens[:, 1:] != tokens[:, :-1]  # an item counts once
        n = counts.sum(1).clamp(min=1)
        scale = (ratio / n).sqrt()  # ratio / √(n · ratio)
        tokens = tokens.clamp(max=self.pad)
        history = (counts.float()[:, None] @ self.items(tokens))[:, 0]  # (B, D)
        history = history * scale[:, None]
        hidden = torch.sigmoid(history + known_users(self.users, users) + self.bias)
        out: Tensor = self.dropout(hidden).index_select(0, rows)
        return out

    def output(self) -> InBlocks:
        return products(self.output_items, self.output_bias)
