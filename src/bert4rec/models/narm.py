"""NARM (Li et al., CIKM 2017): a GRU, and attention over its states with the last one as question.

Where this differs from the authors' code: AdamW with a linear decay; and every asked position of a
window is a question of its own, where the code makes a session of every prefix.

Shapes: B batch, L length, D width, H width of the states, M asked positions of a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bert4rec.config import ModelConfig
from bert4rec.data.pieces import Size
from bert4rec.models.additive_attention import mixed_by_addition
from bert4rec.models.gru4rec import recurrent_layers
from bert4rec.models.layers import ByteDropout
from bert4rec.models.learned import Learned
from bert4rec.models.output import InBlocks, products
from bert4rec.models.table import Table


class NARM(Learned):
    """c_t = [h_t; Σ_j α_tj h_j] with α_tj = vᵀσ(A₁h_t + A₂h_j), and S_i = emb_iᵀ B c_t."""

    task = "next-item"
    piece = Size(16_384, 4_000)  # many rows: the steps of a GRU follow each other

    def __init__(self, n_items: int, config: ModelConfig, n_users: int = 0) -> None:
        super().__init__(n_items, config)
        width = config.hidden or config.dim
        self.items = Table(n_items + 1, config.dim)  # and a row for PAD
        self.dropout = ByteDropout(config.dropout)
        self.gru = recurrent_layers(config.dim, width, config.layers)
        self.query = nn.Linear(width, width, bias=False)  # A₁
        self.key = nn.Linear(width, width, bias=False)  # A₂
        self.v = nn.Parameter(torch.empty(width))
        self.dropout_output = ByteDropout(config.last_dropout)
        self.decoder = nn.Linear(2 * width, config.dim, bias=False)  # B
        nn.init.normal_(self.items.weight, std=config.dim**-0.5)
        nn.init.normal_(self.v, std=width**-0.5)

    def asked(self, tokens: Tensor, at: Tensor, users: Tensor) -> Tensor:
        states, _ = self.gru(self.dropout(self.items(tokens)))
        last = states.flatten(0, 1).index_select(0, at)
        local = mixed_by_addition(self.query(last), self.key(states), self.v, states, at)
        out: Tensor = self.decoder(self.dropout_output(torch.cat([last, local], -1)))
        return out

    def output(self) -> InBlocks:
        return products(self.items, self.no_bias)
