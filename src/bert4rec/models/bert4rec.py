"""BERT4Rec (Sun et al., CIKM 2019): a bidirectional Transformer that fills in masked items.

`forward` computes Eq. 1 to 7 of the paper, with two additions of the authors' code: LayerNorm and
dropout after the embedding, and LayerNorm in the output head. The defaults start differently:
`initialization = "paper"`, `output_bias = "zero"` and `output_gain = 1` start as the authors' code
does, and the recipe `bert4rec` sets all three.

Training and scoring need the predictions at a few *query positions* only ("query" is not the Q of
attention). `encode_queries` returns the vectors there that `forward` multiplies by Eᵀ; a test checks
that both agree. `encode_prefixes` is for training with `next_item`: it inserts a `[MASK]` after each
given position, which sees itself and the items up to there. Unlike in `forward`, no item sees a
`[MASK]`, and items after the first query of a row see only those before them. Both are in
models/kernels/.

models/initialization.py sets the initial weights, and training/setup.py the initial output bias, from
item counts. `config.resolve` replaces `auto` by a number before the model is built.

Shapes: B batch, L length, D width, V items, M query positions of a batch.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from bert4rec.models import initialization
from bert4rec.models.kernels import query_positions
from bert4rec.models.kernels.byte_dropout import ByteDropout
from bert4rec.models.kernels.row_embedding import RowEmbedding
from bert4rec.models.output import DotProductOutput, dot_product_output
from bert4rec.models.sequence_model import SequenceModel, SequenceModelSettings
from bert4rec.models.transformer import Block, causal_mask
from bert4rec.settings import Dropout, Positive

Ablation = Literal["positions", "feed_forward", "layer_norm", "residual"]


class BERT4RecSettings(SequenceModelSettings):
    name: str = "bert4rec"
    heads: Positive = Field(2, description="attention heads per block; must divide dim")
    layers: Positive = Field(2, description="Transformer blocks")
    attention_dropout: Dropout = Field(
        0.0, description="dropout of attention probabilities; rules out the fused kernel on a CPU"
    )
    initialization: Literal["local", "paper"] = Field(
        "local",
        description="paper: truncated normal with standard deviation 0.02, cut at ±0.04 as in the authors' code; "
        "local: at the start of training attention is highest on the preceding item",
    )
    output_bias: Literal["popularity", "zero"] = Field(
        "popularity", description="initial output bias: the items' log popularity, or zero"
    )
    output_gain: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="initial gain of the output head's LayerNorm; a larger one makes the initial softmax sharper. "
        "auto is 4 from 10,000 items on, else 1",
    )
    ablation: tuple[Ablation, ...] = Field(
        (),
        description="parts of the network that are left out, as in Table 5; layer_norm leaves out those of the "
        "blocks, not those of the embedding and the output head",
    )

    @model_validator(mode="after")
    def _settings_are_compatible(self) -> Self:
        if self.dim % self.heads:
            raise ValueError(f"heads = {self.heads} does not divide dim = {self.dim}")
        if self.initialization == "local" and "positions" in self.ablation:
            raise ValueError("initialization = local needs positions: use initialization = paper")
        if self.initialization == "local" and self.dim < 4 * self.heads:
            raise ValueError(
                "initialization = local needs heads of 4 dimensions or more: "
                f"dim = {self.dim} is less than 4 times heads = {self.heads}"
            )
        return self


class BERT4Rec(SequenceModel):
    settings_class = BERT4RecSettings
    objectives: ClassVar[tuple[str, ...]] = ("cloze", "last_item", "next_item")  # the paper's is cloze
    has_mask = True
    is_causal: ClassVar[bool] = False  # whether a position sees only itself and earlier ones

    def __init__(self, n_items: int, settings: BERT4RecSettings, n_users: int = 0) -> None:
        super().__init__(n_items, settings)
        self.max_history = settings.max_len - 1  # the [MASK] takes one position
        self.mask_token = n_items + 1  # the token after `pad_token`
        dim, without = settings.dim, settings.ablation
        self.item_embedding = RowEmbedding(n_items + 2, dim)  # E, then a row each for PAD and MASK
        has_positions = "positions" not in without
        self.position_embedding = nn.Embedding(settings.max_len, dim) if has_positions else None
        self.norm = nn.LayerNorm(dim)  # this and the dropout are of the embedding; blocks have their own
        self.dropout = ByteDropout(settings.dropout)
        self.blocks = nn.ModuleList(
            Block(dim, settings.heads, settings.dropout, settings.attention_dropout, without)
            for _ in range(settings.layers)
        )
        self.output_projection = nn.Linear(dim, dim)
        self.output_norm = nn.LayerNorm(dim)
        self.output_bias = nn.Parameter(torch.zeros(n_items))
        self.apply(initialization.init_truncated_normal)
        nn.init.constant_(self.output_norm.weight, float(settings.output_gain))
        if settings.initialization == "local":
            initialization.init_local(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, L) tokens padded at the end → (B, L, V) logits of every item at every position."""
        x = self.embed(tokens)
        visible = (tokens != self.pad_token)[:, None, None, :]
        if self.is_causal:
            visible = visible & causal_mask(tokens)
        for block in self.blocks:
            x = block(x, visible)
        return F.linear(self.output_transform(x), self.item_embedding.weight[: self.n_items], self.output_bias)  # Eq. 7

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, L) → (B, L, D): item + position embedding (Section 3.4)."""
        x = self.item_embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[: tokens.shape[1]]
        out: Tensor = self.dropout(self.norm(x))
        return out

    def output_transform(self, h: Tensor) -> Tensor:
        """LN(GELU(h W + b)): Eq. 7 up to the product with Eᵀ; the LayerNorm is of the authors' code."""
        out: Tensor = self.output_norm(F.gelu(self.output_projection(h)))
        return out

    def output_layer(self) -> DotProductOutput:
        """Eᵀ and b_o of Eq. 7: the item embeddings, which are tied to the input's, and the bias."""
        return dot_product_output(self.item_embedding, self.output_bias)

    def next_item_query(self, histories: Tensor) -> tuple[Tensor, Tensor]:
        """(B, L) histories of at most `max_history` items → (B, L + 1) tokens with a `[MASK]` after each.

        And (B,) the places of the `[MASK]`s in the flattened tokens.
        """
        n_rows, length = histories.shape
        mask = histories.new_full((n_rows, 1), self.mask_token)
        if n_rows == 1:  # one history has no padding: a fast path for single requests
            return torch.cat([histories, mask], 1), torch.tensor([length], device=mask.device)
        lengths = (histories != self.pad_token).sum(1, keepdim=True)
        tokens = F.pad(histories, (0, 1), value=self.pad_token).scatter_(1, lengths, mask)
        rows = torch.arange(n_rows, device=mask.device) * (length + 1)
        return tokens, rows + lengths[:, 0]

    def encode_queries(self, tokens: Tensor, positions: Tensor, users: Tensor) -> Tensor:
        """As of `SequenceModel`; `users` are not used, since the model has no user embeddings."""
        return query_positions.encode_queries(self, tokens, positions)

    def encode_prefixes(self, tokens: Tensor, positions: Tensor, users: Tensor) -> Tensor:
        """As of `SequenceModel`, for training; attention is not that of `forward`, see above."""
        return query_positions.encode_prefixes(self, tokens, positions)


class CausalBERT4RecSettings(BERT4RecSettings):
    name: str = "bert4rec-causal"


class CausalBERT4Rec(BERT4Rec):
    """BERT4Rec in which a position sees only itself and earlier ones: ours, not the paper's."""

    settings_class = CausalBERT4RecSettings
    objectives = ("next_item",)
    is_causal = True
