"""What a training stage predicts: sequences → inputs, queries and targets.

A *history* is all that a user did. A *sequence* is the window or prefix of it that a model reads at
a time, and a *query* a position of it whose item is to be predicted.

- `cloze`: mask a share of the items and predict them from both sides (Section 3.6).
- `last_item`: mask the last item of a random prefix, as when the model recommends.
- `next_item`: after every item, predict the next. A model with a `[MASK]` gets one after each item,
  which sees the items up to its place.
- `denoising`: mask a share of the items and predict every item, masked or not, as an autoencoder.

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

RANDOM_CUT_SHARE = 0.9  # of the histories, in `last_item`; the others end where they end
MaskRatio = Annotated[float, Field(gt=0, lt=1)]
MaxQueries = Annotated[Positive | None, Field(description="predict at most this many items per sequence")]
WindowStride = Annotated[
    Annotated[float, Field(gt=0, le=1)] | None,
    Field(
        description="slide over histories longer than max_len in steps of this share of it; "
        "none reads only the last max_len items"
    ),
]


class ModelSpec(NamedTuple):
    """What an objective needs to know of the model."""

    n_items: int
    max_len: int
    has_mask: bool = False  # whether it has a [MASK] to query with
    n_targets: int = 1  # how many following items a query predicts (Caser: three)

    @property
    def pad(self) -> int:
        return self.n_items

    @property
    def mask(self) -> int:
        return self.n_items + 1


class StageSettings(Settings):
    """One stage of training: the settings that all objectives share."""

    objective: str = Field(description="what the model is trained to predict")
    epochs: Count = Field(description="most passes over the training sequences; 0 leaves it out")
    learning_rate: Annotated[float, Field(gt=0)] = Field(
        description="before the warm-up and the linear decay to zero are applied"
    )
    patience: Positive | None = Field(
        description="stop after this many validations without a better NDCG@10; none never stops"
    )

    def build(self, train: Spans, spec: ModelSpec) -> Objective:
        """The objective on these training histories."""
        raise NotImplementedError


class Examples(NamedTuple):
    """What a model sees of a batch of sequences, and what it is to predict."""

    inputs: Tensor  # (B, L) tokens
    targets: Tensor  # (B, L, T) items
    is_query: Tensor  # (B, L, T) whether that target is to be predicted


class Objective(NamedTuple):
    """Which sequences an epoch has, and which examples a batch of them."""

    sequences: Callable[[np.random.Generator], Spans]
    examples: Callable[[Tensor, torch.Generator], Examples]  # (B, L) or (B, L + 1) tokens
    # Whether `inputs` hold no [MASK], and the model puts one after each query position.
    appends_mask: bool = False


class ClozeStage(StageSettings):
    objective: str = "cloze"
    epochs: Count = 200
    learning_rate: float = Field(1e-3, gt=0)
    patience: Positive | None = 15
    mask_ratio: MaskRatio = Field(0.2, description="rho: the share of items that is masked")
    max_queries: MaxQueries = None
    last_item_share: Share = Field(0.1, description="share of the sequences in which only the last item is masked")
    window_stride: WindowStride = None

    def build(self, train: Spans, spec: ModelSpec) -> Objective:
        windows = sliding_windows(train, spec.max_len, self.window_stride)

        def examples(sequences: Tensor, generator: torch.Generator) -> Examples:
            is_masked = self._mask(sequences, spec.pad, generator)
            inputs = sequences.masked_fill(is_masked, spec.mask)
            return Examples(inputs, sequences[..., None], is_masked[..., None])

        return Objective(lambda _: windows, examples)

    def _mask(self, sequences: Tensor, pad: int, generator: torch.Generator) -> Tensor:
        """(B, L) true where an item is masked: each with probability `mask_ratio`.

        At least one per row is masked, and at least one stays visible where there are two. The
        number is drawn first and clamped; the items with the smallest random keys are masked, so that
        clamping prefers no position. In some rows only the last item is masked.
        """
        keys = torch.rand(sequences.shape, generator=generator)
        is_real = sequences != pad
        lengths = is_real.sum(1)
        wanted = ((keys < self.mask_ratio) & is_real).sum(1)
        most = (lengths - 1).clamp(min=1)
        if self.max_queries is not None:
            most = most.clamp(max=self.max_queries)
        n_masked = torch.minimum(wanted.clamp(min=1), most)
        rank = keys.masked_fill(~is_real, 2.0).argsort(1).argsort(1)
        is_masked = (rank < n_masked[:, None]) & is_real
        if self.last_item_share:
            is_last_only = torch.rand(len(sequences), 1, generator=generator) < self.last_item_share
            is_masked = torch.where(is_last_only, is_last(sequences, pad), is_masked)
        return is_masked


class LastItemStage(StageSettings):
    objective: str = "last_item"
    epochs: Count = 60
    learning_rate: float = Field(3e-4, gt=0)
    patience: Positive | None = 10

    def build(self, train: Spans, spec: ModelSpec) -> Objective:
        train = with_two_or_more_items(train)

        def examples(sequences: Tensor, generator: torch.Generator) -> Examples:
            is_masked = is_last(sequences, spec.pad)
            inputs = sequences.masked_fill(is_masked, spec.mask)
            return Examples(inputs, sequences[..., None], is_masked[..., None])

        return Objective(lambda generator: random_prefixes(train, spec.max_len, generator), examples)


class NextItemStage(StageSettings):
    objective: str = "next_item"
    epochs: Count = 24
    learning_rate: float = Field(2.5e-3, gt=0)
    patience: Positive | None = 5
    max_queries: MaxQueries = None
    window_stride: WindowStride = 0.5
    bidirectional_prefix: bool = Field(
        False,
        description="for models with a [MASK]: queries start at a random item, and the model lets "
        "the items up to it see each other in both directions, as when it recommends",
    )

    def build(self, train: Spans, spec: ModelSpec) -> Objective:
        # Inputs are without the last item, so that a model without a [MASK] has room for one more.
        longest = spec.max_len if spec.has_mask else spec.max_len + 1
        windows = sliding_windows(with_two_or_more_items(train), longest, self.window_stride)

        def examples(sequences: Tensor, generator: torch.Generator) -> Examples:
            targets = F.pad(sequences[:, 1:], (0, spec.n_targets - 1), value=spec.pad)
            targets = targets.unfold(1, spec.n_targets, 1)  # (B, L, T)
            is_query = targets != spec.pad
            at = is_query[:, :, 0]  # (B, L) query positions
            if self.bidirectional_prefix:
                torch.rand(len(sequences), generator=generator)  # unused; so committed results stay bit-identical
                at = at & from_random_query_on(at, generator)
            if self.max_queries is not None:
                at = random_subset(at, self.max_queries, generator)
            return Examples(sequences[:, :-1], targets, is_query & at[:, :, None])

        return Objective(lambda _: windows, examples, appends_mask=spec.has_mask)


class DenoisingStage(StageSettings):
    objective: str = "denoising"
    epochs: Count = 40
    learning_rate: float = Field(1e-3, gt=0)
    patience: Positive | None = 15
    mask_ratio: MaskRatio = Field(0.2, description="the share of items that is masked")
    max_queries: MaxQueries = None
    window_stride: WindowStride = 1.0

    def build(self, train: Spans, spec: ModelSpec) -> Objective:
        windows = sliding_windows(train, spec.max_len, self.window_stride)

        def examples(sequences: Tensor, generator: torch.Generator) -> Examples:
            is_query = is_real = sequences != spec.pad
            is_masked = torch.rand(sequences.shape, generator=generator) < self.mask_ratio
            if self.max_queries is not None:
                is_query = random_subset(is_real, self.max_queries, generator)
            inputs = sequences.masked_fill(is_masked & is_real, spec.mask)
            return Examples(inputs, sequences[..., None], is_query[..., None])

        return Objective(lambda _: windows, examples)


OBJECTIVES: Registry[type[StageSettings]] = Registry(
    "objective",
    {
        "cloze": "bert4rec.objectives:ClozeStage",
        "last_item": "bert4rec.objectives:LastItemStage",
        "next_item": "bert4rec.objectives:NextItemStage",
        "denoising": "bert4rec.objectives:DenoisingStage",
    },
)


def with_two_or_more_items(spans: Spans) -> Spans:
    return spans.take(np.flatnonzero(spans.lengths >= 2))


def sliding_windows(spans: Spans, max_len: int, stride: float | None) -> Spans:
    """Each history whole or, when longer than `max_len`, in windows of it, the latest first.

    Each window begins `stride · max_len` items before the one after it; None keeps the latest only.
    """
    lengths = spans.lengths
    step = max_len if stride is None else max(1, int(max_len * stride))
    excess = np.maximum(lengths - max_len, 0)
    n_windows = 1 + (0 if stride is None else -(-excess // step))
    owner = np.repeat(np.arange(len(spans)), n_windows)
    first_window = np.cumsum(np.broadcast_to(n_windows, len(spans))) - n_windows
    steps_back = (np.arange(len(owner)) - np.repeat(first_window, n_windows)) * step
    starts = spans.starts[owner]
    # A window that would reach back before the start is shifted right, so that all are full.
    ends = np.maximum(spans.ends[owner] - steps_back, np.minimum(starts + max_len, spans.ends[owner]))
    return Spans(spans.tokens, np.maximum(ends - max_len, starts), ends, spans.users[owner])


def random_prefixes(spans: Spans, max_len: int, generator: np.random.Generator) -> Spans:
    """Each history cut after a random item (at least two remain), or, for some, at its end."""
    cuts = generator.integers(2, spans.lengths + 1)
    is_cut = generator.random(len(spans)) < RANDOM_CUT_SHARE
    ends = np.where(is_cut, spans.starts + cuts, spans.ends)
    return Spans(spans.tokens, np.maximum(ends - max_len, spans.starts), ends, spans.users)


def is_last(sequences: Tensor, pad: int) -> Tensor:
    """(B, L) true at the last item of each row."""
    is_real = sequences != pad
    return torch.arange(sequences.shape[1]) == (is_real.sum(1, keepdim=True) - 1)


def from_random_query_on(is_query: Tensor, generator: torch.Generator) -> Tensor:
    """(B, L) true from a random query of each row on; queries fill a row from its start."""
    n_queries = is_query.sum(1)
    start = (torch.rand(len(is_query), generator=generator) * n_queries).long()
    return torch.arange(is_query.shape[1]) >= start[:, None]


def random_subset(is_query: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """At most `n` of the true places of each row, (B, L), each with the same chance."""
    keys = torch.rand(is_query.shape, generator=generator).masked_fill(~is_query, 2.0)
    return (keys.argsort(1).argsort(1) < n) & is_query
