"""FPMC (Rendle, Freudenthaler & Schmidt-Thieme, WWW 2010): a factorised personal Markov chain.

    x(u, l, i) = <V_u^{U,I}, V_i^{I,U}> + <V_i^{I,L}, V_l^{L,I}>

The first part is what a user likes, the second what follows the last item (the paper's third
part, of u and l alone, changes no order and is left out there too). A basket holds one item here,
and S-BPR is the loss `bpr` with one uniform negative. An unknown user has the second part only.

Where this differs from the paper: Adam instead of SGD with one learning rate, and dropout of the
user's and the last item's vectors in the place of its L2 terms, which a sparse optimiser has not.

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


class FPMCSettings(SequenceModelSettings):
    name: str = "fpmc"


class FPMC(SequenceModel):
    """The vector of a position is [V_u ; V_l], and that of an item [V_i^{I,U} ; V_i^{I,L}]."""

    settings_class = FPMCSettings
    objectives = ("next_item",)
    microbatch = MicrobatchSize(16384, 4000)  # nothing is computed at positions without a query

    def __init__(self, n_items: int, settings: FPMCSettings, n_users: int = 0) -> None:
        super().__init__(n_items, settings, n_users)
        self.max_history = 1
        self.users = RowEmbedding(n_users, settings.dim)
        self.last_items = RowEmbedding(n_items + 1, settings.dim)  # and a row for PAD, never read
        self.next_items = RowEmbedding(n_items, 2 * settings.dim)
        self.dropout = ByteDropout(settings.dropout)
        nn.init.zeros_(self.users.weight)  # a user who never trains is an unknown user
        for embedding in (self.last_items, self.next_items):
            nn.init.normal_(embedding.weight, std=0.01)

    def encode_queries(self, tokens: Tensor, positions: Tensor, users: Tensor) -> Tensor:
        likes = embed_users(users, self.users).index_select(0, positions // tokens.shape[1])
        last = tokens.flatten().index_select(0, positions)
        follows = self.last_items(last) * (last != self.pad_token)[:, None]  # no item, no chain
        out: Tensor = self.dropout(torch.cat([likes, follows], dim=1))
        return out

    def output_layer(self) -> DotProductOutput:
        return dot_product_output(self.next_items, self.no_bias)
