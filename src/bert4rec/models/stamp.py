"""STAMP (Liu et al., KDD 2018): attention over the items read, and the last item beside it.

Where this differs from the paper: its scores go through a sigmoid before the softmax (Eq. 6 and the
loss). Scores between 0 and 1 make no item more than e times as likely as another, so the sigmoid is
left out; without it the order of the items is the same. Dropout is ours, of the item vectors.

Shapes: B batch, L length, D width, M asked positions of a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bert4rec.config import ModelConfig
from bert4rec.models.additive_attention import mixed_by_addition
from bert4rec.models.layers import ByteDropout
from bert4rec.models.learned import Learned
from bert4rec.models.output import InBlocks, products
from bert4rec.models.table import Table


class STAMP(Learned):
    """h_s ∘ h_t with h_s = tanh(W_s m_a + b_s) and h_t = tanh(W_t x_t + b_t).

    m_a = Σ α_i x_i with α_i = W₀ σ(W₁ x_i + W₂ x_t + W₃ m_s + b_a), m_s being the mean of the items
    read, x_t the last of them. An item's score is the trilinear product with its vector.
    """

    task = "next-item"

    def __init__(self, n_items: int, config: ModelConfig, n_users: int = 0) -> None:
        super().__init__(n_items, config)
        dim = config.dim
        self.items = Table(n_items + 1, dim)  # and a row for PAD
        self.dropout = ByteDropout(config.dropout)
        self.of_item = nn.Linear(dim, dim, bias=False)  # W₁
        self.of_last = nn.Linear(dim, dim, bias=False)  # W₂
        self.of_mean = nn.Linear(dim, dim)  # W₃, b_a
        self.v = nn.Parameter(torch.empty(dim))  # W₀
        self.session = nn.Linear(dim, dim)  # W_s, b_s
        self.last = nn.Linear(dim, dim)  # W_t, b_t
        nn.init.normal_(self.items.weight, std=dim**-0.5)
        nn.init.normal_(self.v, std=0.05)

    def asked(self, tokens: Tensor, at: Tensor, users: Tensor) -> Tensor:
        x = self.dropout(self.items(tokens))
        n_read = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        means = (x.cumsum(1) / n_read).flatten(0, 1).index_select(0, at)  # m_s
        last = x.flatten(0, 1).index_select(0, at)  # x_t
        question = self.of_last(last) + self.of_mean(means)
        attended = mixed_by_addition(question, self.of_item(x), self.v, x, at)  # m_a
        return torch.tanh(self.session(attended)) * torch.tanh(self.last(last))

    def output(self) -> InBlocks:
        return products(self.items, self.no_bias)
