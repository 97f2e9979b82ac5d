"""Caser (Tang & Wang, WSDM 2018): convolutions over the last few items as over an image.

E holds the vectors of the last `window` items, zeros where a history is shorter.

    o = max-pooled ReLU of horizontal filters, which see h successive items whole
    õ = vertical filters: weighted sums over the items, dimension by dimension
    z = ReLU(W [o ; õ] + b),  y_i = W'_i [z ; P_u] + b'_i

A position is asked about the next three items (`training.n_targets`, T of the paper), each against
three negatives, by `bce`. A stranger has no P_u.

Where this differs from the paper: P_u starts at zero; and a negative may be another item of the
user's history (only the target itself is left out).

Shapes: B batch, L length, W window, D width, V items, M asked positions, N different ones of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert4rec.config import ModelConfig
from bert4rec.data.pieces import Size
from bert4rec.models.layers import ByteDropout
from bert4rec.models.learned import Learned, known_users
from bert4rec.models.output import InBlocks, products
from bert4rec.models.table import Table


class Caser(Learned):
    """Only the windows that are asked are convolved, as matrix products."""

    task = "next-item"
    piece = Size(8192, 2000)

    def __init__(self, n_items: int, config: ModelConfig, n_users: int = 0) -> None:
        super().__init__(n_items, config, n_users)
        self.n_read = config.window
        dim, self.window = config.dim, config.window
        n_horizontal, n_vertical = config.horizontal_filters, config.vertical_filters
        self.users = Table(n_users, dim)  # P
        self.items = Table(n_items + 1, dim)  # Q, and a row for PAD, never read
        self.horizontal = nn.ModuleList(  # a filter of height h sees h vectors as one long one
            nn.Linear(height * dim, n_horizontal) for height in range(1, self.window + 1)
        )
        self.vertical = nn.Linear(self.window, n_vertical)
        self.mixed = nn.Linear(n_horizontal * self.window + n_vertical * dim, dim)
        self.dropout = ByteDropout(config.dropout)
        self.output_items = Table(n_items, 2 * dim)  # W'
        self.output_bias = nn.Parameter(torch.zeros(n_items))  # b'
        nn.init.zeros_(self.users.weight)  # a user who never trains is a stranger
        for table in (self.items, self.output_items):
            nn.init.normal_(table.weight, std=1 / table.embedding_dim)  # as in the authors' code

    def asked(self, tokens: Tensor, at: Tensor, users: Tensor) -> Tensor:
        at, which = torch.unique_consecutive(at, return_inverse=True)  # T targets ask one place
        z = self._convolved(self._windows(tokens, at))
        p = known_users(self.users, users).index_select(0, at // tokens.shape[1])
        return torch.cat([z, p], dim=1).index_select(0, which)

    def _windows(self, tokens: Tensor, at: Tensor) -> Tensor:
        """(B, L), (N,) → (N, W, D): the vectors up to each asked position, zeros before them."""
        before = self.window - 1
        padded = F.pad(tokens, (before, 0), value=self.pad).flatten()
        first = at + at // tokens.shape[1] * before  # each row is so much longer now
        places = first[:, None] + torch.arange(self.window, device=at.device)
        read = padded[places]
        windows: Tensor = self.items(read) * (read != self.pad)[:, :, None]
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

    def output(self) -> InBlocks:
        return products(self.output_items, self.output_bias)
