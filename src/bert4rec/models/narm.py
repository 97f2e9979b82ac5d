"""NARM (Li et al., CIKM 2017): a GRU, and attention over its states with the last one as query.

Where this differs from the authors' code: AdamW with a linear decay; and every query position of
a window has attention of its own, where the code makes a session of every prefix.

Shapes: B batch, L length, D width, H width of the states, M query positions of a batch.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from bert4rec.data.splits import MicrobatchSize
from bert4rec.models.gru4rec import default_to, recurrent_layers
from bert4rec.models.kernels.additive_attention import additive_attention
from bert4rec.models.kernels.byte_dropout import ByteDropout
from bert4rec.models.kernels.row_embedding import RowEmbedding
from bert4rec.models.output import DotProductOutput, dot_product_output
from bert4rec.models.sequence_model import SequenceModel, SequenceModelSettings
from bert4rec.settings import Dropout, Positive


class NARMSettings(SequenceModelSettings):
    name: str = "narm"
    hidden: Positive | None = Field(None, description="width of the recurrent states; defaults to `dim`")
    layers: Positive = Field(1, description="recurrent layers")
    output_dropout: Dropout | None = Field(None, description="dropout before the decoder; defaults to `dropout`")


class NARM(SequenceModel):
    """c_t = [h_t; Σ_j α_tj h_j] with α_tj = vᵀσ(A₁h_t + A₂h_j), and S_i = emb_iᵀ B c_t."""

    settings_class = NARMSettings
    objectives = ("next_item",)
    microbatch = MicrobatchSize(16_384, 4_000)  # many rows: the steps of a GRU follow each other

    def __init__(self, n_items: int, settings: NARMSettings, n_users: int = 0) -> None:
        super().__init__(n_items, settings)
        width = settings.hidden or settings.dim
        self.item_embedding = RowEmbedding(n_items + 1, settings.dim)  # and a row for PAD
        self.dropout = ByteDropout(settings.dropout)
        self.gru = recurrent_layers(settings.dim, width, settings.layers)
        self.query = nn.Linear(width, width, bias=False)  # A₁
        self.key = nn.Linear(width, width, bias=False)  # A₂
        self.v = nn.Parameter(torch.empty(width))
        self.dropout_output = ByteDropout(default_to(settings.dropout, settings.output_dropout))
        self.decoder = nn.Linear(2 * width, settings.dim, bias=False)  # B
        nn.init.normal_(self.item_embedding.weight, std=settings.dim**-0.5)
        nn.init.normal_(self.v, std=width**-0.5)

    def encode_queries(self, tokens: Tensor, positions: Tensor, users: Tensor) -> Tensor:
        states, _ = self.gru(self.dropout(self.item_embedding(tokens)))
        last = states.flatten(0, 1).index_select(0, positions)
        local = additive_attention(self.query(last), self.key(states), self.v, states, positions)
        out: Tensor = self.decoder(self.dropout_output(torch.cat([last, local], -1)))
        return out

    def output_layer(self) -> DotProductOutput:
        return dot_product_output(self.item_embedding, self.no_bias)
