"""STAMP (Liu et al., KDD 2018): attention over the items read, and the last item beside it.

Where this differs from the paper: its scores go through a sigmoid before the softmax (Eq. 6 and the
loss). Scores between 0 and 1 make no item more than e times as likely as another, so the sigmoid is
left out; without it the order of the items is the same. Dropout is ours, of the item embeddings.

Shapes: B batch, L length, D width, M query positions of a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bert4rec.models.kernels.additive_attention import additive_attention
from bert4rec.models.kernels.byte_dropout import ByteDropout
from bert4rec.models.kernels.row_embedding import RowEmbedding
from bert4rec.models.output import DotProductOutput, dot_product_output
from bert4rec.models.sequence_model import SequenceModel, SequenceModelSettings


class STAMPSettings(SequenceModelSettings):
    name: str = "stamp"


class STAMP(SequenceModel):
    """h_s ∘ h_t with h_s = tanh(W_s m_a + b_s) and h_t = tanh(W_t x_t + b_t).

    m_a = Σ α_i x_i with α_i = W₀ σ(W₁ x_i + W₂ x_t + W₃ m_s + b_a), m_s being the mean of the items
    read, x_t the last of them. An item's score is the trilinear product with its vector.
    """

    settings_class = STAMPSettings
    objectives = ("next_item",)

    def __init__(self, n_items: int, settings: STAMPSettings, n_users: int = 0) -> None:
        super().__init__(n_items, settings)
        dim = settings.dim
        self.item_embedding = RowEmbedding(n_items + 1, dim)  # and a row for PAD
        self.dropout = ByteDropout(settings.dropout)
        self.of_item = nn.Linear(dim, dim, bias=False)  # W₁
        self.of_last = nn.Linear(dim, dim, bias=False)  # W₂
        self.of_mean = nn.Linear(dim, dim)  # W₃, b_a
        self.v = nn.Parameter(torch.empty(dim))  # W₀
        self.session = nn.Linear(dim, dim)  # W_s, b_s
        self.last = nn.Linear(dim, dim)  # W_t, b_t
        nn.init.normal_(self.item_embedding.weight, std=dim**-0.5)
        nn.init.normal_(self.v, std=0.05)

    def encode_queries(self, tokens: Tensor, positions: Tensor, users: Tensor) -> Tensor:
        x = self.dropout(self.item_embedding(tokens))
        n_read = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        means = (x.cumsum(1) / n_read).flatten(0, 1).index_select(0, positions)  # m_s
        last = x.flatten(0, 1).index_select(0, positions)  # x_t
        query = self.of_last(last) + self.of_mean(means)
        attended = additive_attention(query, self.of_item(x), self.v, x, positions)  # m_a
        return torch.tanh(self.session(attended)) * torch.tanh(self.last(last))

    def output_layer(self) -> DotProductOutput:
        return dot_product_output(self.item_embedding, self.no_bias)
