"""What a training stage predicts: sequences → inputs, queries and targets.

A *history* is everything that a user did. A *sequence* is the part of a history that a model reads in
one pass: a window or a prefix. A *query position* is one at which the model predicts: the item at that
position, or with `next_item` the items after it.

- `cloze`: mask a share of the items and predict them from both sides, as in the paper (Section 3.6).
- `last_item`: mask the last item of a random prefix, as when the model recommends. The paper adds such
  samples to those of `cloze`.
- `next_item`: at every position predict the next item, as SASRec and GRU4Rec do. A model with a `[MASK]`
  gets one after each item, which sees only itself and the items up to there.
- `denoising`: mask a share of the items and predict every item, masked or not: for autoencoders.

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

RANDOM_CUT_SHARE = 0.9  # share of the histories that `last_item` cuts at a random item
MaskRatio = Annotated[float, Field(gt=0, lt=1)]
MaxQueries = Annotated[Positive | None, Field(description="predict at most this many items per sequence")]
WindowStride = Annotated[
    Annotated[float, Field(gt=0, le=1)] | None,
    Field(
        description="histories longer than max_len become windows that start this share of max_len apart; "
        "none keeps only the last max_len items"
    ),
]


class ModelSpec(NamedTuple):
    """What an objective needs to know of the model."""

    n_items: int
    max_len: int
    has_mask: bool = False  # whether it has a [MASK] token
    n_targets: int = 1  # how many of the following items a query predicts (Caser: three)

    @property
    def pad_token(self) -> int:
        return self.n_items

    @property
    def mask_token(self) -> int:
        return self.n_items + 1


class StageSettings(Settings):
    """Settings of a stage of training: those that all objectives share. Each subclass is of one objective."""

    objective: str = Field(description="what the model is trained to predict")
    epochs: Count = Field(description="maximum number of epochs; 0 skips the stage")
    learning_rate: Annotated[float, Field(gt=0)] = Field(
        description="peak learning rate: it is reached by a linear warm-up and decays linearly to zero"
    )
    patience: Positive | None = Field(
        description="stop after this many validations in a row without a better NDCG@10; none never stops early"
    )

    def build(self, train: Spans, spec: ModelSpec) -> Objective:
        """The objective on these training histories."""
        raise NotImplementedError


class Examples(NamedTuple):
    """A batch as the model sees it: the inputs, and what to predict at which positions."""

    inputs: Tensor  # (B, L) tokens
    targets: Tensor  # (B, L, T) items
    is_target: Tensor  # (B, L, T) whether the target counts in the loss; the others are padding or unused


class Objective(NamedTuple):
    """How to draw the sequences of an epoch, and how to make examples of a batch of them."""

    draw_sequences: Callable[[np.random.Generator], Spans]
    make_examples: Callable[[Tensor, torch.Generator], Examples]  # of (B, L) tokens
    # Whether `inputs` hold no [MASK] and the model inserts one after every query position. The items up to
    # the first query of a row then see each other in both directions, later ones only those before them.
    inserts_masks: bool = False


class ClozeStage(StageSettings):
    objective: str = "cloze"
    epochs: Count = 200
    learning_rate: float = Field(1e-3, gt=0)
    patience: Positive | None = 15
    mask_ratio: MaskRatio = Field(0.2, description="rho: the share of items that is masked")
    max_queries: MaxQueries = None
    last_item_share: Share = Field(
        0.1, description="share of the sequences in which only the last item is masked; the paper adds such samples"
    )
    window_stride: WindowStride = None

    def build(self, train: Spans, spec: ModelSpec) -> Objective:
        windows = sliding_windows(train, spec.max_len, self.window_stride)

        def examples(sequences: Tensor, generator: torch.Generator) -> Examples:
            is_masked = self._mask(sequences, spec.pad_token, generator)
            inputs = sequences.masked_fill(is_masked, spec.mask_token)
            return Examples(inputs, sequences[..., None], is_masked[..., None])

        return Objective(lambda _: windows, examples)

    def _mask(self, sequences: Tensor, pad: int, generator: torch.Generator) -> Tensor:
        """(B, L) true where an item is masked.

        The number of masked items of a row is binomial(length, mask_ratio), clamped to 1 … max(1,
        length - 1) and to `max_queries`; the authors' code rounds mask_ratio · length. The items with the smallest
        random keys are masked, so that every position has the same chance, clamped or not. In a share
        `last_item_share` of the rows only the last item is masked.
        """
        keys = torch.rand(sequences.shape, generator=generator)
        is_real = sequences != pad
        lengths = is_real.sum(1)
        n_drawn = ((keys < self.mask_ratio) & is_real).sum(1)
        n_most = (lengths - 1).clamp(min=1)
        if self.max_queries is not None:
            n_most = n_most.clamp(max=self.max_queries)
        n_masked = torch.minimum(n_drawn.clamp(min=1), n_most)
        rank = keys.masked_fill(~is_real, 2.0).argsort(1).argsort(1)
        is_masked = (rank < n_masked[:, None]) & is_real
        if self.last_item_share:
            masks_only_last = torch.rand(len(sequences), 1, generator=generator) < self.last_item_share
            is_masked = torch.where(masks_only_last, is_last_item(sequences, pad), is_masked)
        return is_masked


class LastItemStage(StageSettings):
    objective: str = "last_item"
    epochs: Count = 60
    learning_rate: float = Field(3e-4, gt=0)
    patience: Positive | None = 10

    def build(self, train: Spans, spec: ModelSpec) -> Objective:
        train = with_two_or_more_items(train)

        def examples(sequences: Tensor, generator: torch.Generator) -> Examples:
            is_masked = is_last_item(sequences, spec.pad_token)
            inputs = sequences.masked_fill(is_masked, spec.mask_token)
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
        description="for bert4rec: queries start at a random item, and the items up to the first query "
        "see each other in both directions, as when the model recommends",
    )

    def build(self, train: Spans, spec: ModelSpec) -> Objective:
        # The last item is only a target. A [MASK] takes its place; without one, windows can have one item more.
        window_length = spec.max_len if spec.has_mask else spec.max_len + 1
        windows = sliding_windows(with_two_or_more_items(train), window_length, self.window_stride)

        def examples(sequences: Tensor, generator: torch.Generator) -> Examples:
            targets = F.pad(sequences[:, 1:], (0, spec.n_targets - 1), value=spec.pad_token)
            targets = targets.unfold(1, spec.n_targets, 1)  # (B, L, T)
            is_target = targets != spec.pad_token
            is_query = is_target[:, :, 0]  # (B, L)
            if self.bidirectional_prefix:
                torch.rand(len(sequences), generator=generator)  # unused: keeps the random numbers of the runs in docs/
                is_query = is_query & from_random_query_on(is_query, generator)
            if self.max_queries is not None:
                is_query = random_subset(is_query, self.max_queries, generator)
            return Examples(sequences[:, :-1], targets, is_target & is_query[:, :, None])

        return Objective(lambda _: windows, examples, inserts_masks=spec.has_mask)


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
            is_query = is_real = sequences != spec.pad_token
            is_masked = torch.rand(sequences.shape, generator=generator) < self.mask_ratio
            if self.max_queries is not None:
                is_query = random_subset(is_real, self.max_queries, generator)
            inputs = sequences.masked_fill(is_masked & is_real, spec.mask_token)
            return Examples(inputs, sequences[..., None], is_query[..., None])

        return Objective(lambda _: windows, examples)


# Name → the settings class of a stage with this objective; its `build` makes the `Objective`.
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
    """Histories longer than `max_len` in windows, the latest first; the others whole.

    Windows end `stride · max_len` items apart, counted back from the end; None keeps only the latest.
    """
    lengths = spans.lengths
    step = max_len if stride is None else max(1, int(max_len * stride))
    n_beyond = np.maximum(lengths - max_len, 0)
    n_windows = 1 + (0 if stride is None else -(-n_beyond // step))
    history = np.repeat(np.arange(len(spans)), n_windows)
    first_window = np.cumsum(np.broadcast_to(n_windows, len(spans))) - n_windows
    from_end = (np.arange(len(history)) - np.repeat(first_window, n_windows)) * step
    starts = spans.starts[history]
    # The earliest window is moved right to where the history starts, so that it is full, too.
    ends = np.maximum(spans.ends[history] - from_end, np.minimum(starts + max_len, spans.ends[history]))
    return Spans(spans.tokens, np.maximum(ends - max_len, starts), ends, spans.users[history])


def random_prefixes(spans: Spans, max_len: int, generator: np.random.Generator) -> Spans:
    """Each history up to a random item, the second at least, or whole; of these the last `max_len` items."""
    cuts = generator.integers(2, spans.lengths + 1)
    is_cut = generator.random(len(spans)) < RANDOM_CUT_SHARE
    ends = np.where(is_cut, spans.starts + cuts, spans.ends)
    return Spans(spans.tokens, np.maximum(ends - max_len, spans.starts), ends, spans.users)


def is_last_item(sequences: Tensor, pad: int) -> Tensor:
    """(B, L) true at the last item of each row."""
    is_real = sequences != pad
    return torch.arange(sequences.shape[1]) == (is_real.sum(1, keepdim=True) - 1)


def from_random_query_on(is_query: Tensor, generator: torch.Generator) -> Tensor:
    """(B, L) true from a random query of each row on; the queries of a row are its first positions."""
    n_queries = is_query.sum(1)
    start = (torch.rand(len(is_query), generator=generator) * n_queries).long()
    return torch.arange(is_query.shape[1]) >= start[:, None]


def random_subset(is_query: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """At most `n` of the true places of each row, (B, L), each with the same chance."""
    keys = torch.rand(is_query.shape, generator=generator).masked_fill(~is_query, 2.0)
    return (keys.argsort(1).argsort(1) < n) & is_query
