"""What a training stage asks the model: sequences → inputs, query positions and targets.

- `cloze`: hide a share of the items behind `[MASK]` and predict them from both sides (Section 3.6).
- `last_item`: hide the last item of a random prefix: what the model is asked when it recommends.
- `next_item`: after every item, predict the next. A model with a `[MASK]` gets one after each item,
  which sees the items up to its place.
- `denoising`: hide a share of the items and predict all of them, as an autoencoder does.

Every random choice comes from a generator that the caller seeds by (seed, stage, epoch or step), so
that step 1,000 draws the same numbers whether or not the run was interrupted before it.

Shapes: B batch, L length, T targets of a position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from bert4rec.data.splits import Spans
from bert4rec.settings import Count, Positive, Registry, Settings, Share

PREFIX_SHARE = 0.9  # of the sequences that `last_item` cuts at a random place, not at their end
MaskRatio = Annotated[float, Field(gt=0, lt=1)]
MaxQueries = Annotated[
    Positive | None, Field(description="predict at most this many items per sequence")
]
WindowStride = Annotated[
    Annotated[float, Field(gt=0, le=1)] | None,
    Field(
        description="slide over histories longer than max_len in steps of this share of it; "
        "none reads only the last max_len items"
    ),
]


class ModelShape(NamedTuple):
    """What an objective needs to know of the model."""

    n_items: int
    max_len: int
    has_mask: bool = False  # whether it has a [MASK] to query with
    n_targets: int = 1  # how many following items a query predicts

    @property
    def pad(self) -> int:
        return self.n_items

    @property
    def mask(self) -> int:
        return self.n_items + 1


class StageSettings(Settings):
    """One stage of a training. What all objectives have in common."""

    objective: str = Field(description="what the model is trained to predict")
    epochs: Count = Field(description="most passes over the training sequences; 0 leaves it out")
    learning_rate: Annotated[float, Field(gt=0)] = Field(
        description="the highest one, after the warm-up; it decays linearly to zero"
    )
    patience: Positive | None = Field(
        description="stop after this many validations without a better NDCG@10; none never stops"
    )

    def build(self, train: Spans, model: ModelShape) -> Objective:
        """The objective on these training histories."""
        raise NotImplementedError


class Queries(NamedTuple):
    """What a model sees of a batch, and what it is to predict."""

    inputs: Tensor  # (B, L) tokens
    targets: Tensor  # (B, L, T) items
    is_query: Tensor  # (B, L, T) whether that target is to be predicted


class Objective(NamedTuple):
    """Which sequences an epoch has, and which queries a batch of them."""

    sequences: Callable[[np.random.Generator], Spans]
    queries: Callable[[Tensor, torch.Generator], Queries]  # (B, L) or (B, L + 1) tokens
    # Whether the query is a [MASK] after the position, instead of the position itself.
    is_after: bool = False


class ClozeStage(StageSettings):
    objective: str = "cloze"
    epochs: Count = 200
    learning_rate: float = Field(1e-3, gt=0)
    patience: Positive | None = 15
    mask_ratio: MaskRatio = Field(0.2, description="rho: the share of items that is hidden")
    max_queries: MaxQueries = None
    last_item_share: Share = Field(
        0.1, description="share of the sequences in which only the last item is hidden"
    )
    window_stride: WindowStride = None

    def build(self, train: Spans, model: ModelShape) -> Objective:
        windows = sliding_windows(train, model.max_len, self.window_stride)

        def queries(sequences: Tensor, generator: torch.Generator) -> Queries:
            hidden = self._hidden(sequences, model.pad, generator)
            inputs = sequences.masked_fill(hidden, model.mask)
            return Queries(inputs, sequences[..., None], hidden[..., None])

        return Objective(lambda _: windows, queries)

    def _hidden(self, sequences: Tensor, pad: int, generator: torch.Generator) -> Tensor:
        """Which items to hide, (B, L): each with `mask_ratio`, at least one, never all of several.

        The number to hide is drawn first and clamped; the items with the smallest random keys are
        hidden, so that clamping prefers no position.
        """
        keys = torch.rand(sequences.shape, generator=generator)
        is_real = sequences != pad
        lengths = is_real.sum(1)
        wanted = ((keys < self.mask_ratio) & is_real).sum(1)
        most = (lengths - 1).clamp(min=1)
        if self.max_queries is not None:
            most = most.clamp(max=self.max_queries)
        n_hidden = torch.minimum(wanted.clamp(min=1), most)
        rank = keys.masked_fill(~is_real, 2.0).argsort(1).argsort(1)
        hidden = (rank < n_hidden[:, None]) & is_real
        if self.last_item_share:
            is_last_only = torch.rand(len(sequences), 1, generator=generator) < self.last_item_share
            hidden = torch.where(is_last_only, is_last(sequences, pad), hidden)
        return hidden


class LastItemStage(StageSettings):
    objective: str = "last_item"
    epochs: Count = 60
    learning_rate: float = Field(3e-4, gt=0)
    patience: Positive | None = 10

    def build(self, train: Spans, model: ModelShape) -> Objective:
        train = longer_than_one(train)

        def queries(sequences: Tensor, generator: torch.Generator) -> Queries:
            hidden = is_last(sequences, model.pad)
            inputs = sequences.masked_fill(hidden, model.mask)
            return Queries(inputs, sequences[..., None], hidden[..., None])

        return Objective(
            lambda generator: random_prefixes(train, model.max_len, generator), queries
        )


class NextItemStage(StageSettings):
    objective: str = "next_item"
    epochs: Count = 24
    learning_rate: float = Field(2.5e-3, gt=0)
    patience: Positive | None = 5
    max_queries: MaxQueries = None
    window_stride: WindowStride = 0.5
    bidirectional_prefix: bool = Field(
        False,
        description="for models with a [MASK]: queries start at a random item, and the items up "
        "to it see each other in both directions, as when the model recommends",
    )

    def build(self, train: Spans, model: ModelShape) -> Objective:
        longest = model.max_len + (not model.has_mask)  # the last position is the [MASK]'s
        windows = sliding_windows(longer_than_one(train), longest, self.window_stride)

        def queries(sequences: Tensor, generator: torch.Generator) -> Queries:
            targets = F.pad(sequences[:, 1:], (0, model.n_targets - 1), value=model.pad)
            targets = targets.unfold(1, model.n_targets, 1)  # (B, L, T)
            is_query = targets != model.pad
            first = is_query[:, :, 0]
            if self.bidirectional_prefix:
                first = first & from_random_place(first, generator)
            if self.max_queries is not None:
                first = random_subset(first, self.max_queries, generator)
            return Queries(sequences[:, :-1], targets, is_query & first[:, :, None])

        return Objective(lambda _: windows, queries, is_after=model.has_mask)


class DenoisingStage(StageSettings):
    objective: str = "denoising"
    epochs: Count = 40
    learning_rate: float = Field(1e-3, gt=0)
    patience: Positive | None = 15
    mask_ratio: MaskRatio = Field(0.2, description="the share of items that is hidden")
    max_queries: MaxQueries = None
    window_stride: WindowStride = 1.0

    def build(self, train: Spans, model: ModelShape) -> Objective:
        windows = sliding_windows(train, model.max_len, self.window_stride)

        def queries(sequences: Tensor, generator: torch.Generator) -> Queries:
            is_query = is_real = sequences != model.pad
            hidden = torch.rand(sequences.shape, generator=generator) < self.mask_ratio
            if self.max_queries is not None:
                is_query = random_subset(is_real, self.max_queries, generator)
            inputs = sequences.masked_fill(hidden & is_real, model.mask)
            return Queries(inputs, sequences[..., None], is_query[..., None])

        return Objective(lambda _: windows, queries)


OBJECTIVES: Registry[type[StageSettings]] = Registry(
    "objective",
    {
        "cloze": "bert4rec.objectives:ClozeStage",
        "last_item": "bert4rec.objectives:LastItemStage",
        "next_item": "bert4rec.objectives:NextItemStage",
        "denoising": "bert4rec.objectives:DenoisingStage",
    },
)


def longer_than_one(spans: Spans) -> Spans:
    return spans.take(np.flatnonzero(spans.lengths >= 2))


def sliding_windows(spans: Spans, max_len: int, stride: float | None) -> Spans:
    """Each history whole or, when longer than `max_len`, in overlapping windows from its end."""
    lengths = spans.lengths
    step = max_len if stride is None else max(1, int(max_len * stride))
    excess = np.maximum(lengths - max_len, 0)
    n_windows = 1 + (0 if stride is None else -(-excess // step))
    owner = np.repeat(np.arange(len(spans)), n_windows)
    first = np.cumsum(np.broadcast_to(n_windows, len(spans))) - n_windows
    steps_back = (np.arange(len(owner)) - np.repeat(first, n_windows)) * step
    starts = spans.starts[owner]
    # A window that would reach back before the start is moved up, so that all are full.
    ends = np.maximum(
        spans.ends[owner] - steps_back, np.minimum(starts + max_len, spans.ends[owner])
    )
    return Spans(spans.tokens, np.maximum(ends - max_len, starts), ends, spans.users[owner])


def random_prefixes(spans: Spans, max_len: int, generator: np.random.Generator) -> Spans:
    """Each history cut after a random item (at least two remain), or, for some, at its end."""
    cuts = generator.integers(2, spans.lengths + 1)
    is_cut = generator.random(len(spans)) < PREFIX_SHARE
    ends = np.where(is_cut, spans.starts + cuts, spans.ends)
    return Spans(spans.tokens, np.maximum(ends - max_len, spans.starts), ends, spans.users)


def is_last(sequences: Tensor, pad: int) -> Tensor:
    """(B, L) true at the last item of each row."""
    is_real = sequences != pad
    return torch.arange(sequences.shape[1]) == (is_real.sum(1, keepdim=True) - 1)


def from_random_place(is_query: Tensor, generator: torch.Generator) -> Tensor:
    """(B, L) true from a random one of each row's queries on."""
    n_queries = is_query.sum(1)
    first = (torch.rand(len(is_query), generator=generator) * n_queries).long()
    return torch.arange(is_query.shape[1]) >= first[:, None]


def random_subset(is_query: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """At most `n` of the true places of each row, (B, L), each with the same chance."""
    keys = torch.rand(is_query.shape, generator=generator).masked_fill(~is_query, 2.0)
    return (keys.argsort(1).argsort(1) < n) & is_query
