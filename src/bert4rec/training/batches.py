"""Batches of training questions: windows of histories, and the items that are asked about.

Every random choice comes from a generator that the caller seeds by (seed, stage, epoch or step), so
that step 1,000 draws the same numbers whether or not the run was interrupted before it.

Shapes: B batch, L length, T targets of a position, M questions of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bert4rec.config import Config
from bert4rec.data.pieces import FOR_TRAINING, Size, like_lengths
from bert4rec.data.splits import Spans
from bert4rec.models.learned import TaskName

IGNORE = -100  # in the place of a target: nothing is asked here


class Piece(NamedTuple):
    tokens: Tensor  # (B, L) what the model sees, padded at the end
    at: Tensor  # (M,) flat positions of `tokens` that are asked, in order
    users: Tensor  # (B,) rows
    targets: Tensor  # (M,) the items that are the right answers
    is_after: bool = False  # whether a [MASK] after these positions is asked, not they themselves


@dataclass(frozen=True)
class Batch:
    pieces: list[Piece]
    n_sequences: int
    n_asked: int


def joined(batches: list[Batch]) -> Batch:
    """Several batches as one."""
    return Batch(
        [piece for batch in batches for piece in batch.pieces],
        sum(batch.n_sequences for batch in batches),
        sum(batch.n_asked for batch in batches),
    )


# (B, L + 1 or L) → inputs (B, L), and targets (B, L, T) that are IGNORE where nothing is asked
Ask = Callable[[Tensor, torch.Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Task:
    """What a stage asks: which windows an epoch has, and which questions a window."""

    windows: Callable[[np.random.Generator], Spans]
    ask: Ask
    ask_after: Ask | None = None  # instead, by a [MASK] after each asked position
    share_after: float = 0.0  # of the windows that are asked so


def cloze_task(train: Spans, n_items: int, config: Config) -> Task:
    """Fill in what is hidden behind `[MASK]`, from both sides."""
    settings = config.training
    windows = sliding_windows(train, config.model.max_len, settings.window_step)

    def ask(sequences: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        hidden = cloze(
            sequences,
            pad=n_items,
            probability=settings.mask_ratio,
            max_masked=settings.max_masked,
            last_item_share=settings.last_item_share,
            generator=generator,
        )
        inputs = sequences.masked_fill(hidden, n_items + 1)
        if settings.replacement == "80/10/10":
            inputs = mixed_replacement(inputs, sequences, hidden, n_items, generator)
        return inputs, sequences.masked_fill(~hidden, IGNORE)[:, :, None]

    def ask_after(sequences: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        targets = at_most(next_items(sequences, n_items), settings.max_masked, generator)
        return sequences[:, :-1], targets[:, :, None]

    return Task(lambda _: windows, ask, ask_after, settings.next_item_share)


def next_item_task(train: Spans, n_items: int, config: Config) -> Task:
    """After each item of a window: what comes next, or which items do, up to `n_targets`."""
    settings = config.training
    long_enough = train.take(np.flatnonzero(train.lengths >= 2))
    windows = sliding_windows(long_enough, config.model.max_len + 1, settings.window_step)

    def ask(sequences: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs = sequences[:, :-1]
        targets = F.pad(sequences[:, 1:], (0, settings.n_targets - 1), value=n_items)
        targets = targets.unfold(1, settings.n_targets, 1)  # (B, L, T)
        targets = targets.masked_fill(targets == n_items, IGNORE)
        first = at_most(targets[:, :, 0], settings.max_masked, generator)
        return inputs, targets.masked_fill((first == IGNORE)[:, :, None], IGNORE)

    return Task(lambda _: windows, ask)


def reconstruction_task(train: Spans, n_items: int, config: Config) -> Task:
    """Any item of a window, from the window with some hidden (a denoising autoencoder)."""
    settings = config.training
    windows = sliding_windows(train, config.model.max_len, settings.window_step)

    def ask(sequences: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        asked = real = sequences != n_items
        hidden = (torch.rand(sequences.shape, generator=generator) < settings.mask_ratio) & real
        if settings.max_masked is not None:
            asked = some_of(real, settings.max_masked, generator)
        inputs = sequences.masked_fill(hidden, n_items + 1)
        return inputs, sequences.masked_fill(~asked, IGNORE)[:, :, None]

    return Task(lambda _: windows, ask)


TASKS: dict[TaskName, Callable[[Spans, int, Config], Task]] = {
    "cloze": cloze_task,
    "next-item": next_item_task,
    "reconstruction": reconstruction_task,
}


def last_item_task(train: Spans, n_items: int, config: Config) -> Task:
    """What comes after a random prefix: what the model is asked when it recommends."""
    settings = config.second_stage
    long_enough = train.take(np.flatnonzero(train.lengths >= 2))

    def some_prefixes(generator: np.random.Generator) -> Spans:
        return prefixes(long_enough, config.model.max_len, settings.prefix_share, generator)

    def ask(sequences: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        hidden = last_item(sequences, pad=n_items)
        inputs = sequences.masked_fill(hidden, n_items + 1)
        return inputs, sequences.masked_fill(~hidden, IGNORE)[:, :, None]

    def ask_after(sequences: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        targets = next_items(sequences, n_items)
        n_prefixes = (targets != IGNORE).sum(1)
        first = (torch.rand(len(targets), generator=generator) * n_prefixes).long()
        before = torch.arange(targets.shape[1]) < first[:, None]
        targets = targets.masked_fill(before, IGNORE)
        return sequences[:, :-1], at_most(targets, config.training.max_masked, generator)[..., None]

    if settings.asks == "every-item":
        windows = sliding_windows(long_enough, config.model.max_len, config.training.window_step)
        return Task(lambda _: windows, ask, ask_after, 1.0)
    return Task(some_prefixes, ask)


def next_items(sequences: Tensor, pad: int) -> Tensor:
    """(B, L + 1) → (B, L): what comes after each item, IGNORE where nothing does."""
    return sequences[:, 1:].masked_fill(sequences[:, 1:] == pad, IGNORE)


def sliding_windows(spans: Spans, max_len: int, step_share: float | None) -> Spans:
    """Each history whole or, when longer than `max_len`, in overlapping windows from its end."""
    lengths = spans.lengths
    step = max_len if step_share is None else max(1, int(max_len * step_share))
    too_long = np.maximum(lengths - max_len, 0)
    n_windows = 1 + (0 if step_share is None else -(-too_long // step))
    owner = np.repeat(np.arange(len(spans)), n_windows)
    first = np.cumsum(np.broadcast_to(n_windows, len(spans))) - n_windows
    steps_back = (np.arange(len(owner)) - np.repeat(first, n_windows)) * step
    starts = spans.starts[owner]
    # A window that would reach back before the start is moved up, so that all are full.
    ends = np.maximum(
        spans.ends[owner] - steps_back, np.minimum(starts + max_len, spans.ends[owner])
    )
    return Spans(spans.tokens, np.maximum(ends - max_len, starts), ends, spans.users[owner])


def prefixes(spans: Spans, max_len: int, share: float, generator: np.random.Generator) -> Spans:
    """Each history cut after a random item (at least two remain), or, for the rest, at its end."""
    cuts = generator.integers(2, spans.lengths + 1)
    is_cut = generator.random(len(spans)) < share
    ends = np.where(is_cut, spans.starts + cuts, spans.ends)
    return Spans(spans.tokens, np.maximum(ends - max_len, spans.starts), ends, spans.users)


def cloze(
    sequences: Tensor,
    *,
    pad: int,
    probability: float,
    max_masked: int | None,
    last_item_share: float,
    generator: torch.Generator,
) -> Tensor:
    """Which items to hide, (B, L): each with `probability`, at least one, never all of several.

    The number to hide is drawn first and clamped; the items with the smallest random keys are
    hidden, so that clamping prefers no position.
    """
    keys = torch.rand(sequences.shape, generator=generator)
    real = sequences != pad
    lengths = real.sum(1)
    wanted = ((keys < probability) & real).sum(1)
    most = (lengths - 1).clamp(min=1)
    if max_masked is not None:
        most = most.clamp(max=max_masked)
    n_hidden = torch.minimum(wanted.clamp(min=1), most)
    rank = keys.masked_fill(~real, 2.0).argsort(1).argsort(1)
    hidden = (rank < n_hidden[:, None]) & real
    if last_item_share:
        asks_last = torch.rand(len(sequences), 1, generator=generator) < last_item_share
        hidden = torch.where(asks_last, last_item(sequences, pad=pad), hidden)
    return hidden


def some_of(asked: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """At most `n` of the true places of each row, (B, L), drawn without preference."""
    keys = torch.rand(asked.shape, generator=generator).masked_fill(~asked, 2.0)
    return (keys.argsort(1).argsort(1) < n) & asked


def at_most(targets: Tensor, n: int | None, generator: torch.Generator) -> Tensor:
    """(B, L) targets, of which no row keeps more than `n`: the others are IGNORE."""
    if n is None:
        return targets
    return targets.masked_fill(~some_of(targets != IGNORE, n, generator), IGNORE)


def last_item(sequences: Tensor, *, pad: int) -> Tensor:
    """Hide the end only, (B, L): what the model is asked when it recommends."""
    real = sequences != pad
    return torch.arange(sequences.shape[1]) == (real.sum(1, keepdim=True) - 1)


def mixed_replacement(
    inputs: Tensor, sequences: Tensor, hidden: Tensor, n_items: int, generator: torch.Generator
) -> Tensor:
    """BERT's 80 % `[MASK]`, 10 % a random item, 10 % the item (the paper: always `[MASK]`)."""
    draw = torch.rand(sequences.shape, generator=generator)
    randoms = torch.randint(0, n_items, sequences.shape, generator=generator)
    inputs = torch.where(hidden & (draw < 0.2), randoms, inputs)
    return torch.where(hidden & (draw < 0.1), sequences, inputs)


def epoch_order(
    n_windows: int, batch_size: int, generator: np.random.Generator
) -> list[NDArray[np.int64]]:
    """The epoch's batches as window numbers: every window exactly once, in random order.

    Lengths play no part in it. They are sorted within a batch only, where the order of a sum does
    not matter, so the gradient is that of plain random batches.
    """
    order = generator.permutation(n_windows)
    return [order[i : i + batch_size] for i in range(0, n_windows, batch_size)]


def make_batch(
    task: Task,
    windows: Spans,
    rows: NDArray[np.int64],
    pad: int,
    generator: torch.Generator,
    size: Size = FOR_TRAINING,
    n_workers: int = 1,
) -> Batch:
    """The questions of the windows `rows`, in pieces of at most `size`, so that no worker idles."""
    n_positions = int(windows.lengths[rows].sum())
    fair = max(FOR_TRAINING.positions, -(-n_positions // n_workers))
    size = Size(min(size.positions, fair), size.padding)
    parts = [(rows, task.ask, False)]
    if task.ask_after is not None and task.share_after:
        draws = torch.rand(len(rows), generator=generator).numpy()
        is_after = (draws < task.share_after) & (windows.lengths[rows] >= 2)
        parts = [(rows[~is_after], task.ask, False), (rows[is_after], task.ask_after, True)]
    pieces = [
        piece
        for part, ask, is_after in parts
        if len(part)
        for piece in _pieces(ask, windows, part, pad, generator, size, is_after=is_after)
    ]
    return Batch(pieces, len(rows), sum(len(piece.at) for piece in pieces))


def _pieces(
    ask: Ask,
    windows: Spans,
    rows: NDArray[np.int64],
    pad: int,
    generator: torch.Generator,
    size: Size,
    *,
    is_after: bool,
) -> Iterator[Piece]:
    rows = rows[np.argsort(-windows.lengths[rows], kind="stable")]
    sequences = torch.from_numpy(windows.padded(rows, pad))
    inputs, targets = ask(sequences, generator)
    lengths = windows.lengths[rows] - (sequences.shape[1] - inputs.shape[1])
    users = torch.from_numpy(windows.users[rows])
    for piece in like_lengths(lengths, size):
        part = (piece, slice(0, int(lengths[piece.start])))
        answers = targets[part].flatten()
        asked = (answers != IGNORE).nonzero()[:, 0]
        at = asked // targets.shape[2]
        yield Piece(inputs[part].contiguous(), at, users[piece], answers[asked], is_after)
