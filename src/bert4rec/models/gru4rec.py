"""GRU4Rec (Hidasi et al., ICLR 2016) and GRU4Rec+ (Hidasi & Karatzoglou, CIKM 2018).

The two differ in the loss alone, which is a setting: `top1` or `bpr` with the targets of the rest
of the mini-batch as negatives, or `bpr-max` and `top1-max` with many drawn ones. With full
cross-entropy it is the strong GRU4Rec of Klenitskiy & Vasilev (RecSys 2023).

Where this differs from the authors' code: it steps through many sessions in parallel, one event a
time, carries the state over and back-propagates through one step; here a batch is whole windows of
histories, and the gradient goes back to their first item. Scores are linear, without a last tanh or
ELU. `model.tied_output` is the code's `constrained_embedding`.

Shapes: B batch, L length, D width, H width of the states, M asked positions of a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bert4rec.config import ModelConfig
from bert4rec.data.pieces import Size
from bert4rec.models.layers import ByteDropout
from bert4rec.models.learned import Learned
from bert4rec.models.output import InBlocks, products
from bert4rec.models.table import Table


class GRU4Rec(Learned):
    """Item vectors, recurrent layers, and an output matrix of its own."""

    task = "next-item"
    # The steps of a GRU follow each other: the more rows take each of them together, the better.
    piece = Size(32_768, 8_000)

    def __init__(self, n_items: int, config: ModelConfig, n_users: int = 0) -> None:
        super().__init__(n_items, config)
        width = config.hidden or config.dim
        if config.tied_output and width != config.dim:
            raise ValueError(
                f"model.hidden = {width} differs from model.dim = {config.dim}, so the output "
                "cannot be tied to the item vectors: leave hidden out or set tied_output = false"
            )
        self.items = Table(n_items + 1, config.dim)  # and a row for PAD
        self.dropout = ByteDropout(config.dropout)
        self.gru = recurrent_layers(config.dim, width, config.layers)
        self.dropout_states = ByteDropout(config.last_dropout)
        self.output_items = None if config.tied_output else Table(n_items, width)
        self.output_bias = nn.Parameter(torch.zeros(n_items))
        for table in (self.items, self.output_items):
            if table is not None:
                nn.init.normal_(table.weight, std=width**-0.5)

    def asked(self, tokens: Tensor, at: Tensor, users: Tensor) -> Tensor:
        # Padding stands at the end: no state before it has read it.
        states, _ = self.gru(self.dropout(self.items(tokens)))
        out: Tensor = self.dropout_states(states.flatten(0, 1).index_select(0, at))
        return out

    def output(self) -> InBlocks:
        table = self.items if self.output_items is None else self.output_items
        return products(table, self.output_bias)


def recurrent_layers(dim: int, width: int, n_layers: int) -> nn.GRU:
    """r, z = σ(W x + U h + b), n = tanh(W x + r ∘ (U h + b)), h = (1 - z) ∘ n + z ∘ h.

    torch's initial values, but orthogonal ones for what is multiplied over and over.
    """
    gru = nn.GRU(dim, width, n_layers, batch_first=True)
    for name, parameter in gru.named_parameters():
        if name.startswith("weight_hh"):
            for gate in parameter.data.chunk(3):
                nn.init.orthogonal_(gate)
    return gru
