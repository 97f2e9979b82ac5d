"""BERT4Rec (Sun et al., CIKM 2019): the bidirectional Transformer that fills in what is hidden.

Shapes: B batch, L length, D width, V items, M asked positions of a batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert4rec.config import ModelConfig
from bert4rec.models.histories import last_items
from bert4rec.models.layers import Asked, Block, ByteDropout
from bert4rec.models.learned import Learned, initialise
from bert4rec.models.onednn import without_onednn
from bert4rec.models.output import InBlocks, products
from bert4rec.models.table import Table


class BERT4Rec(Learned):
    """A bidirectional Transformer over items that fills in what is hidden behind `[MASK]`."""

    task = "cloze"

    def __init__(self, n_items: int, config: ModelConfig, n_users: int = 0) -> None:
        super().__init__(n_items, config)
        self.n_read: int | None = config.max_len - 1  # and [MASK] after them
        self.mask = n_items + 1
        self.items = Table(n_items + 2, config.dim)  # E, and a row each for PAD and MASK
        self.positions = nn.Embedding(config.max_len, config.dim) if config.positions else None
        self.norm = nn.LayerNorm(config.dim)  # of the authors' code; the paper leaves it out
        self.dropout = ByteDropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(
                config.dim,
                config.heads,
                config.dropout,
                config.attention_dropout,
                has_feed_forward=config.feed_forward,
                has_norm=config.layer_norm,
                has_residual=config.residual,
            )
            for _ in range(config.layers)
        )
        self.head = nn.Linear(config.dim, config.dim)
        self.head_norm = nn.LayerNorm(config.dim) if config.head_norm else nn.Identity()
        self.output_bias = nn.Parameter(torch.zeros(n_items))
        self.apply(initialise)

    def hidden(self, tokens: Tensor) -> Tensor:
        """(B, L) tokens with padding at the end → (B, L, D) hidden states of the last block."""
        x, visible = self._embed(tokens)
        for block in self.blocks:
            x = block(x, visible)
        return x

    def asked(self, tokens: Tensor, at: Tensor, users: Tensor) -> Tensor:
        """The head's output GELU(hW + b) at the flat positions `at` (M,), in row order → (M, D)."""
        x, visible = self._embed(tokens)
        *first, last = self.blocks
        for block in first:
            x = block(x, visible)
        assert isinstance(last, Block)
        h = last.asked(x, visible, Asked(at, *tokens.shape))
        out: Tensor = self.head_norm(F.gelu(self.head(h)))
        return out

    def output(self) -> InBlocks:
        """E and b_o of Eq. 7: the item vectors, which are also the input's, and the bias."""
        return products(self.items, self.output_bias)

    def _embed(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.items(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        x = self.dropout(self.norm(x))
        real = tokens != self.pad
        # Where nothing is padded the mask is left out: attention without one is faster.
        return x, None if bool(real.all()) else real[:, None, None, :]

    def question(self, history: Tensor) -> tuple[Tensor, Tensor]:
        """The last `max_len - 1` items of each history, and a `[MASK]` put after them."""
        return last_items(history, pad=self.pad, n=self.max_len - 1, then=self.mask)

    def attention(self, history: Tensor) -> Tensor:
        """(L,) one history of real items → (layers, heads, n, n) attention over it and `[MASK]`."""
        return self.attentions(history[None])[:, 0]

    @without_onednn()
    @torch.inference_mode()
    def attentions(self, histories: Tensor) -> Tensor:
        """The same for (B, L) histories without padding → (layers, B, heads, n, n)."""
        self._stop_training()
        tokens, _ = self.question(histories)
        x, visible = self._embed(tokens)
        weights = []
        for block in self.blocks:
            assert isinstance(block, Block)
            weights.append(block.attention.weights(x, visible))
            x = block(x, visible)
        return torch.stack(weights)
