"""GRU4Rec (Hidasi et al., ICLR 2016) and GRU4Rec+ (Hidasi & Karatzoglou, CIKM 2018).

The two differ in the loss alone, which is a setting: `top1` or `bpr` with the targets of the rest
of the mini-batch as negatives, or `bpr-max` and `top1-max` with many drawn ones. With full
cross-entropy it is the strong GRU4Rec of Klenitskiy & Vasilev (RecSys 2023).

Where this differs from the authors' code: it steps through many sessions in parallel, one event a
time, carries the state over and back-propagates through one step; here a batch is whole windows of
histories, and the gradient goes back to their first item. Scores are linear, without a last tanh or
ELU.

Shapes: B batch, L length, D width, M query positions of a batch.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from bert4rec.data.splits import MicrobatchSize
from bert4rec.models.kernels.byte_dropout import ByteDropout
from bert4rec.models.kernels.row_embedding import RowEmbedding
from bert4rec.models.output import DotProductOutput, dot_product_output
from bert4rec.models.sequence_model import SequenceModel, SequenceModelSettings
from bert4rec.settings import Dropout, Positive


class GRU4RecSettings(SequenceModelSettings):
    name: str = "gru4rec"
    layers: Positive = Field(1, description="recurrent layers")
    output_dropout: Dropout | None = Field(None, description="dropout of the states; defaults to `dropout`")


class GRU4Rec(SequenceModel):
    """Item embeddings, recurrent layers, and an output matrix of its own."""

    settings_class = GRU4RecSettings
    objectives = ("next_item",)
    # The steps of a GRU follow each other: the more rows take each of them together, the better.
    microbatch = MicrobatchSize(32_768, 8_000)

    def __init__(self, n_items: int, settings: GRU4RecSettings, n_users: int = 0) -> None:
        super().__init__(n_items, settings)
        self.item_embedding = RowEmbedding(n_items + 1, settings.dim)  # and a row for PAD
        self.dropout = ByteDropout(settings.dropout)
        self.gru = recurrent_layers(settings.dim, settings.dim, settings.layers)
        self.dropout_states = ByteDropout(default_to(settings.dropout, settings.output_dropout))
        self.output_items = RowEmbedding(n_items, settings.dim)
        self.output_bias = nn.Parameter(torch.zeros(n_items))
        for embedding in (self.item_embedding, self.output_items):
            nn.init.normal_(embedding.weight, std=settings.dim**-0.5)

    def encode_queries(self, tokens: Tensor, positions: Tensor, users: Tensor) -> Tensor:
        # Padding stands at the end: no state before it has read it.
        states, _ = self.gru(self.dropout(self.item_embedding(tokens)))
        out: Tensor = self.dropout_states(states.flatten(0, 1).index_select(0, positions))
        return out

    def output_layer(self) -> DotProductOutput:
        return dot_product_output(self.output_items, self.output_bias)


def default_to(default: float, value: float | None) -> float:
    return default if value is None else value


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
