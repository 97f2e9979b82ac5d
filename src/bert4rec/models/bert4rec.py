"""BERT4Rec (Sun et al., CIKM 2019): the bidirectional Transformer that fills in what is hidden.

Where its weights start is a setting of ours (`init`). At the paper's 0.02, and widths
such as 64, so little of the items comes through attention and head that training stands still at
popularity for a long time. With `init = "identity"` values, their mixture and the head start as the
identity, `[MASK]` and positions as nothing: what is put out for a `[MASK]` begins as a mean of the
item vectors that it is compared with. With `init = "near"` near items weigh more in that mean, see
near_start.py. `head_gain` starts with a sharper softmax, `bias_init` with popularity, see
first_bias.py. The network is the paper's in all of these; with `sees = "before"`, where an item
sees those before it only, it is not.

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
from bert4rec.models.near_start import NearStart
from bert4rec.models.onednn import without_onednn
from bert4rec.models.output import InBlocks, products
from bert4rec.models.table import Table

WHERE_GELU_IS_STRAIGHT = 3.0  # GELU(x + 3) is x + 3 to within .05 for all x > -1


class BERT4Rec(Learned):
    """A bidirectional Transformer over items that fills in what is hidden behind `[MASK]`."""

    task = "cloze"

    def __init__(self, n_items: int, config: ModelConfig, n_users: int = 0) -> None:
        super().__init__(n_items, config)
        self.n_read: int | None = config.max_len - 1  # and [MASK] after them
        self.mask = n_items + 1
        width = config.dim // config.heads
        is_near = config.init == "near"
        self._near = NearStart(config.heads, width, config.max_len) if is_near else None
        self.sees_before_only = config.sees == "before"
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
        if isinstance(self.head_norm, nn.LayerNorm):
            nn.init.constant_(self.head_norm.weight, config.head_gain)
        if config.init != "paper":
            self._start_from_the_items()
        if self._near is not None:
            self._start_with_near_ones(self._near)

    def _start_from_the_items(self) -> None:
        for block in self.blocks:
            assert isinstance(block, Block)
            attention, dim = block.attention, self.head.in_features
            with torch.no_grad():
                nn.init.eye_(attention.query_key_value.weight[2 * dim :])
            nn.init.eye_(attention.output.weight)
        nn.init.eye_(self.head.weight)
        if isinstance(self.head_norm, nn.LayerNorm):  # which takes the constant off again
            nn.init.constant_(self.head.bias, WHERE_GELU_IS_STRAIGHT)
        with torch.no_grad():
            self.items.weight[self.mask].zero_()
        if self.positions is not None:
            nn.init.zeros_(self.positions.weight)

    def _start_with_near_ones(self, near: NearStart) -> None:
        assert self.positions is not None
        self.prepare_item_vectors(self.items.weight)
        with torch.no_grad():
            self.items.weight[self.mask] = near.mask_vector()
            self.positions.weight.copy_(near.positions())
            for block in self.blocks:
                assert isinstance(block, Block)
                near.set_attention(block.attention)
            self.head.weight.copy_(near.items_only())

    def prepare_item_vectors(self, vectors: Tensor) -> None:
        if self._near is not None:
            with torch.no_grad():
                self._near.leave_free(vectors)

    def hidden(self, tokens: Tensor) -> Tensor:
        """(B, L) tokens with padding at the end → (B, L, D) hidden states of the last block."""
        x, real = self._embed(tokens)
        visible = self._between_items(real, tokens.shape[1])
        for block in self.blocks:
            x = block(x, visible)
        return x

    def asked(self, tokens: Tensor, at: Tensor, users: Tensor) -> Tensor:
        """The head's output GELU(hW + b) at the flat positions `at` (M,), in row order → (M, D).

        A model that sees before only is asked at the end of each row, which all others are before.
        """
        x, real = self._embed(tokens)
        visible = self._between_items(real, tokens.shape[1])
        *first, last = self.blocks
        for block in first:
            x = block(x, visible)
        assert isinstance(last, Block)
        return self._headed(last.asked(x, real, Asked(at, *tokens.shape)))

    def asked_after(self, tokens: Tensor, at: Tensor, users: Tensor) -> Tensor:
        """The same for a `[MASK]` put after each of the positions `at`: many prefixes in one pass.

        Each `[MASK]` sees the items up to its place and itself. The items of a row up to its first
        question see each other in both directions, as when the model recommends; later ones see
        those before them, or they would tell a question what it asks for.
        """
        L = tokens.shape[1]
        x, asks = self.items(tokens), self.items(torch.full_like(tokens[:1], self.mask))
        if self.positions is not None:
            x = x + self.positions.weight[:L]
            asks = asks + self.positions.weight[1 : L + 1]
        x = self.dropout(self.norm(x))
        asks = self.dropout(self.norm(asks).expand_as(x))
        between = None if self.sees_before_only else _both_sides_until(at, *tokens.shape)
        for block in self.blocks:
            assert isinstance(block, Block)
            x, asks = block.prefixes(x, asks, between, is_last=block is self.blocks[-1])
        return self._headed(asks.flatten(0, 1).index_select(0, at))

    def _headed(self, h: Tensor) -> Tensor:
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

    def _between_items(self, real: Tensor | None, length: int) -> Tensor | None:
        """What the items see of each other. Padding comes last, so no item sees it from before."""
        if not self.sees_before_only:
            return real
        device = self.output_bias.device
        return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]

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
        x, real = self._embed(tokens)
        visible = self._between_items(real, tokens.shape[1])
        weights = []
        for block in self.blocks:
            assert isinstance(block, Block)
            weights.append(block.attention.weights(x, visible))
            x = block(x, visible)
        return torch.stack(weights)


def _both_sides_until(at: Tensor, n_rows: int, length: int) -> Tensor | None:
    """(B, 1, L, L) to add to attention scores: before each row's first question all see all.

    None where every row is asked from its first item on: then nobody sees what comes later.
    """
    first = torch.full((n_rows,), length, device=at.device)
    first = first.scatter_reduce(0, at // length, at % length, "amin")
    if not bool(first.any()):
        return None
    places = torch.arange(length, device=at.device)
    last_seen = torch.maximum(places, first[:, None])  # (B, L)
    hidden = places > last_seen[:, :, None]
    return torch.zeros(hidden.shape, device=at.device).masked_fill_(hidden, -torch.inf)[:, None]
