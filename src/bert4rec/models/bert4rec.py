"""BERT4Rec (Sun et al., CIKM 2019).

Shapes: B batch, L length, D width, V items, M asked positions of a batch.
"""

from __future__ import annotations

from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert4rec.config import ModelConfig
from bert4rec.models.item_embedding import ItemEmbedding
from bert4rec.models.layers import Asked, Block, ByteDropout
from bert4rec.models.onednn import without_onednn


class BERT4Rec(nn.Module):
    """A bidirectional Transformer over items that fills in what is hidden behind `[MASK]`."""

    def __init__(self, n_items: int, config: ModelConfig) -> None:
        super().__init__()
        self.n_items, self.max_len = n_items, config.max_len
        self.pad, self.mask = n_items, n_items + 1
        self.items = ItemEmbedding(n_items + 2, config.dim)  # E, and a row each for PAD and MASK
        self.positions = nn.Embedding(config.max_len, config.dim)
        self.norm = nn.LayerNorm(
            config.dim
        )  # of the authors' code; the paper's figure leaves it out
        self.dropout = ByteDropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config.dim, config.heads, config.dropout, config.attention_dropout)
            for _ in range(config.layers)
        )
        self.head = nn.Linear(config.dim, config.dim)
        self.head_norm = nn.LayerNorm(config.dim) if config.head_norm else nn.Identity()
        self.output_bias = nn.Parameter(torch.zeros(n_items))
        self.apply(_initialise)

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], config: ModelConfig, n_items: int) -> Self:
        model = cls(n_items, config)
        model.load_state_dict(tensors)
        return model.eval()

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self.state_dict().items()}

    def hidden(self, tokens: Tensor) -> Tensor:
        """(B, L) tokens with padding at the end → (B, L, D) hidden states of the last block."""
        x, visible = self._embed(tokens)
        for block in self.blocks:
            x = block(x, visible)
        return x

    def asked(self, tokens: Tensor, at: Tensor) -> Tensor:
        """The head's output GELU(hW + b) at the flat positions `at` (M,), in row order → (M, D)."""
        x, visible = self._embed(tokens)
        *first, last = self.blocks
        for block in first:
            x = block(x, visible)
        assert isinstance(last, Block)
        h = last.asked(x, visible, Asked(at, *tokens.shape))
        out: Tensor = self.head_norm(F.gelu(self.head(h)))
        return out

    def output(self) -> tuple[Tensor, Tensor]:
        """E and b_o of Eq. 7: the item vectors, which are also the input's, and the bias.

        E is whole, so that a loss can add to its gradient; its rows beyond the bias are no items.
        """
        return self.items.weight, self.output_bias

    def _embed(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        positions = self.positions.weight[: tokens.shape[1]]
        x = self.dropout(self.norm(self.items(tokens) + positions))
        real = tokens != self.pad
        # Where nothing is padded the mask is left out: attention without one is faster.
        return x, None if bool(real.all()) else real[:, None, None, :]

    @without_onednn()
    @torch.inference_mode()
    def score(self, users: Tensor, history: Tensor) -> Tensor:
        """(B, L) histories, padded on either side → (B, V) logits of a `[MASK]` put after each."""
        self._stop_training()
        tokens, at = self._with_mask_at_end(history.to(self.output_bias.device))
        return F.linear(self.asked(tokens, at), self.items.weight[: self.n_items], self.output_bias)

    @torch.inference_mode()
    def attention(self, history: Tensor) -> Tensor:
        """(L,) one history of real items → (layers, heads, n, n) attention over it and `[MASK]`."""
        self._stop_training()
        tokens, _ = self._with_mask_at_end(history[None])
        x, visible = self._embed(tokens)
        weights = []
        for block in self.blocks:
            assert isinstance(block, Block)
            weights.append(block.attention.weights(x, visible)[0])
            x = block(x, visible)
        return torch.stack(weights)

    def _stop_training(self) -> None:
        """`eval()` for several threads: the parts come first, so that none sees it half done."""
        if self.training:
            for module in reversed(list(self.modules())):
                module.training = False

    def item_vectors(self) -> Tensor:
        return self.items.weight[: self.n_items].detach()

    def _with_mask_at_end(self, history: Tensor) -> tuple[Tensor, Tensor]:
        """The last `max_len - 1` real items of each row from position 0, then `[MASK]`."""
        if len(history) == 1:  # the shortest way for one request
            items = [token for token in history[0].tolist() if token != self.pad]
            tokens = torch.from_numpy(np.array([[*items[1 - self.max_len :], self.mask]]))
            at = torch.tensor([tokens.shape[1] - 1], device=history.device)
            return tokens.to(history.device), at
        real = history != self.pad
        lengths = real.sum(1)
        columns = torch.arange(history.shape[1], device=history.device)
        if not bool((real == (columns < lengths[:, None])).all()):  # real items first, in order
            history = history.gather(1, (~real).to(torch.int8).argsort(dim=1, stable=True))
        kept = lengths.clamp(max=self.max_len - 1)
        width = int(kept.max()) + 1 if len(kept) else 1
        columns = torch.arange(width, device=history.device)
        tokens = torch.full((len(history), width), self.pad, device=history.device)
        if history.shape[1]:
            source = (columns + (lengths - kept)[:, None]).clamp_(max=history.shape[1] - 1)
            tokens = torch.where(columns < kept[:, None], history.gather(1, source), tokens)
        tokens.scatter_(1, kept[:, None], self.mask)
        rows = torch.arange(len(history), device=history.device)
        return tokens, rows * width + kept


def _initialise(module: nn.Module) -> None:
    """Truncated normal of 0.02 for weights, zero for biases, as in the paper."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
