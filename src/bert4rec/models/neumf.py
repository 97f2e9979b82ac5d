"""NeuMF of "Neural Collaborative Filtering" (He et al., WWW 2017): a user and an item, no history.

    GMF = p_u ⊙ q_i,  MLP = ReLU(W_2 ReLU(W_1 [p'_u ; q'_i] + b_1) + b_2)
    ŷ_ui = hᵀ [GMF ; MLP] + c                                                      (Eq. 12)

With D predictive factors, p and q are D wide, p' and q' 2D, and the tower is 4D → 2D → D. The loss
is `bce` with 4 uniform negatives. An unknown user has no embedding: only known users get answers.

Where this differs from the paper: both paths are trained together from the start, without being
pre-trained apart; dropout of the user embeddings is there for those who want it; and a negative may
be another item of the user's (only the target itself is left out).

Shapes: B batch, L length, D predictive factors, V items, M vectors, K items each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bert4rec.data.splits import MicrobatchSize
from bert4rec.models.kernels.byte_dropout import ByteDropout
from bert4rec.models.kernels.row_embedding import RowEmbedding, embed
from bert4rec.models.sequence_model import SequenceModel, SequenceModelSettings

MOST_HIDDEN = 2**22  # numbers of the tower's widest layer that are held at a time


class NeuMFSettings(SequenceModelSettings):
    name: str = "neumf"


class NeuMF(SequenceModel):
    """A position's vector is its user's: [p_u ; the user's part of the tower's first layer]."""

    settings_class = NeuMFSettings
    objectives = ("denoising",)
    needs_known_user = True
    microbatch = MicrobatchSize(16384, 4000)  # nothing is computed at a position

    def __init__(self, n_items: int, settings: NeuMFSettings, n_users: int = 0) -> None:
        super().__init__(n_items, settings, n_users)
        self.max_history = 1
        self.dim = dim = settings.dim
        self.users = RowEmbedding(n_users, 3 * dim)  # p and p'
        self.item_embedding = RowEmbedding(n_items, 3 * dim)  # q and q'
        # W_1 [p' ; q'] is a part of the user and a part of the item, each computed once.
        self.user_layer = nn.Linear(2 * dim, 2 * dim)
        self.item_layer = nn.Linear(2 * dim, 2 * dim, bias=False)
        self.tower = nn.Linear(2 * dim, dim)
        self.final = nn.Linear(2 * dim, 1)
        self.dropout = ByteDropout(settings.dropout)
        for embedding in (self.users, self.item_embedding):
            nn.init.normal_(embedding.weight, std=0.01)  # the paper's

    def encode_queries(self, tokens: Tensor, positions: Tensor, users: Tensor) -> Tensor:
        if bool((users < 0).any()):
            raise ValueError(
                "neumf knows users, not histories, and cannot answer for a user it was not trained "
                "on: ask for a known user, or use a model that reads histories, such as sasrec"
            )
        p, p_tower = self.dropout(self.users(users)).split([self.dim, 2 * self.dim], dim=1)
        vectors = torch.cat([p, self.user_layer(p_tower)], dim=1)
        return vectors.index_select(0, positions // tokens.shape[1])

    def output_layer(self) -> TwoPaths:
        return TwoPaths(self.item_embedding.weight, self.item_layer, self.tower, self.final)

    def item_vectors(self) -> Tensor:
        return self.item_embedding.weight.detach()


class TwoPaths(NamedTuple):
    """hᵀ [GMF ; MLP] of vectors of users and items; the tower is computed for each pair of them."""

    items: Tensor  # (V, 3D)
    item_layer: nn.Linear
    tower: nn.Linear
    final: nn.Linear

    @property
    def n_items(self) -> int:
        return len(self.items)

    def scores(self, h: Tensor, items: Tensor) -> Tensor:
        vectors = embed(self.items, items, is_sparse=True)  # (1 or M, K, 3D)
        return self._in_blocks(h, vectors)

    def block_scores(self, h: Tensor, first: int, last: int) -> Tensor:
        return self._in_blocks(h, self.items[None, first:last])

    def _in_blocks(self, h: Tensor, vectors: Tensor) -> Tensor:
        """(M, 3D), (1 or M, K, 3D) → (M, K), some of the M at a time.

        In training the tower of a block is computed again for the backward pass, where the towers
        of all pairs would be too many to keep.
        """
        dim = self.tower.out_features
        q, q_tower = vectors[..., :dim], self.item_layer(vectors[..., dim:])
        n_rows = max(1, MOST_HIDDEN // (vectors.shape[1] * 2 * dim))
        if len(h) <= n_rows:
            return self._block(h, q, q_tower)
        parts = []
        for first in range(0, len(h), n_rows):
            rows = slice(first, first + n_rows)
            block = (h[rows], q, q_tower) if len(q) == 1 else (h[rows], q[rows], q_tower[rows])
            if torch.is_grad_enabled():
                part = checkpoint(self._block, *block, use_reentrant=False, preserve_rng_state=False)
                assert isinstance(part, Tensor)
                parts.append(part)
            else:
                parts.append(self._block(*block))
        return torch.cat(parts)

    def _block(self, h: Tensor, q: Tensor, q_tower: Tensor) -> Tensor:
        dim = q.shape[2]
        of_gmf, of_mlp = self.final.weight[0, :dim], self.final.weight[0, dim:]
        p = (h[:, :dim] * of_gmf)[:, :, None]
        gmf = (q @ p)[:, :, 0]  # hᵀ (p ⊙ q)
        mlp = F.relu(self.tower(F.relu(h[:, None, dim:] + q_tower)))  # (M, K, D)
        out: Tensor = gmf + mlp @ of_mlp + self.final.bias
        return out
