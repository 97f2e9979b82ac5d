"""FPMC (Rendle, Freudenthaler & Schmidt-Thieme, WWW 2010): a factorised personal Markov chain.

    x(u, l, i) = <V_u^{U,I}, V_i^{I,U}> + <V_i^{I,L}, V_l^{L,I}>

The first part is what a user likes, the second what follows the last item (the paper's third
part, of u and l alone, changes no order and is left out there too). A basket holds one item here,
and S-BPR is the loss `bpr` with one uniform negative. A stranger has the second part only.

Where this differs from the paper: Adam instead of SGD with one learning rate, and dropout of the
user's and the last item's vectors in the place of its L2 terms, which a sparse optimiser has not.

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


class FPMC(Learned):
    """The vector of a position is [V_u ; V_l], and that of an item [V_i^{I,U} ; V_i^{I,L}]."""

    task = "next-item"
    piece = Size(16384, 4000)  # nothing is computed at the positions that are not asked

    def __init__(self, n_items: int, config: ModelConfig, n_users: int = 0) -> None:
        super().__init__(n_items, config, n_users)
        self.n_read = 1
        self.users = Table(n_users, config.dim)
        self.last_items = Table(n_items + 1, config.dim)  # and a row for PAD, never read
        self.next_items = Table(n_items, 2 * config.dim)
        self.dropout = ByteDropout(config.dropout)
        nn.init.zeros_(self.users.weight)  # a user who never trains is a stranger
        for table in (self.last_items, self.next_items):
            nn.init.normal_(table.weight, std=0.01)

    def asked(self, tokens: Tensor, at: Tensor, users: Tensor) -> Tensor:
        likes = known_users(self.users, users).index_select(0, at // tokens.shape[1])
        last = tokens.flatten().index_select(0, at)
        follows = self.last_items(last) * (last != self.pad)[:, None]  # no item, no chain
        out: Tensor = self.dropout(torch.cat([likes, follows], dim=1))
        return out

    def output(self) -> InBlocks:
        return products(self.next_items, self.no_bias)
