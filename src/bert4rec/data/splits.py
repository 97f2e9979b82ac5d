"""Splits: the interactions that train the model, and the items held out for validation and test.

A split copies nothing. It is ranges of the flat token array (`Spans`), so it costs a few numbers per
user. Training and scoring compute spans in groups of similar length: little padding, and arrays that
stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from bert4rec.data.sequences import Sequences

BLOCK = 1 << 20  # interactions per block: memory does not grow with the data


@dataclass(frozen=True)
class Spans:
    """Ranges `tokens[starts[i]:ends[i]]`, each from the history of user row `users[i]`."""

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    users: NDArray[np.int64]

    @classmethod
    def of_lists(cls, histories: Sequence[list[int]]) -> Self:
        """Of histories of unknown users."""
        ends = np.cumsum([len(history) for history in histories])
        tokens = np.fromiter(chain.from_iterable(histories), np.int32)
        return cls(tokens, np.concatenate([[0], ends[:-1]]), ends, np.full(len(histories), -1))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> NDArray[np.int32]:
        return self.tokens[self.starts[i] : self.ends[i]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.ends - self.starts

    def take(self, rows: NDArray[np.int64]) -> Spans:
        return Spans(self.tokens, self.starts[rows], self.ends[rows], self.users[rows])

    def last(self, n: int) -> Spans:
        """The last `n` items of each."""
        starts = np.maximum(self.starts, self.ends - n)
        return Spans(self.tokens, starts, self.ends, self.users)

    def items(self) -> NDArray[np.int32]:
        """The items of all spans, end to end."""
        lengths = self.lengths
        at = np.repeat(self.starts - (lengths.cumsum() - lengths), lengths)
        at += np.arange(len(at))
        items: NDArray[np.int32] = self.tokens[at]
        return items

    def padded(self, rows: NDArray[np.int64], pad: int) -> NDArray[np.int64]:
        """The spans `rows` as one matrix, padded at the end to the longest of them."""
        starts = self.starts[rows, None]
        lengths = self.ends[rows, None] - starts
        columns = np.arange(int(lengths.max(initial=0)))[None]
        inside = columns < lengths
        padded = np.full(inside.shape, pad, dtype=np.int64)
        padded[inside] = self.tokens[(starts + columns)[inside]]
        return padded


@dataclass(frozen=True)
class HeldOut:
    """Held-out users: the history of each, and the target, the item that came next."""

    histories: Spans
    targets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def users(self) -> NDArray[np.int64]:
        return self.histories.users

    def sample(self, n: int, seed: int) -> HeldOut:
        """At most `n` of the users, the same ones for the same seed."""
        if n >= len(self):
            return self
        rows = np.sort(np.random.default_rng(seed).choice(len(self), n, replace=False))
        return HeldOut(self.histories.take(rows), self.targets[rows])


@dataclass(frozen=True)
class Split:
    train: Spans
    validation: HeldOut
    test: HeldOut
    n_items: int
    train_counts: NDArray[np.int64]  # (n_items,) how often each item occurs in `train`

    def training_on_validation(self) -> Split:
        """Of a leave-one-out split: one that trains on everything except the test items."""
        train, before = self.train, self.test.histories
        ends = train.ends.copy()  # users with few actions have no test item: they train in full
        assert np.isin(before.users, train.users).all()
        ends[np.searchsorted(train.users, before.users)] = before.ends
        train = Spans(train.tokens, train.starts, ends, train.users)
        return replace(self, train=train, train_counts=_item_counts(train, self.n_items))


def leave_one_out(sequences: Sequences) -> Split:
    """The last item of a user is the test target, the one before it the validation target.

    As in the paper, the test history contains the validation item. Users with fewer than three
    actions only train: a held-out user needs a history.
    """
    ends = sequences.offsets[1:]
    is_held_out = sequences.lengths >= 3
    users = np.flatnonzero(is_held_out)
    validation, test = (_held_out(sequences, users, ends - before) for before in (2, 1))
    return _split(sequences, np.where(is_held_out, ends - 2, ends), validation, test)


def global_time(sequences: Sequences, validation_share: float = 0.1, test_share: float = 0.1) -> Split:
    """Train on everything before one moment, and hold out what came after it.

    The moments are quantiles of all interaction times: the last `test_share` of the interactions
    are the test period. A user's target is their first item in the period.
    """
    if sequences.times is None:
        raise ValueError(
            "a global-time split needs times, and this data set has none: "
            "name the time column, or use the leave-one-out split"
        )
    for name, share in (("validation_share", validation_share), ("test_share", test_share)):
        if not 0 < share < 0.5:
            raise ValueError(f"{name} is {share}: choose a share between 0 and 0.5")
    validation_from, test_from = np.quantile(
        sequences.times, [1 - test_share - validation_share, 1 - test_share], method="nearest"
    )
    starts, ends = sequences.offsets[:-1], sequences.offsets[1:]
    validation_at = _first_at_or_after(sequences, sequences.times, int(validation_from))
    test_at = _first_at_or_after(sequences, sequences.times, int(test_from))
    validated = np.flatnonzero((validation_at > starts) & (validation_at < test_at))
    tested = np.flatnonzero((test_at > starts) & (test_at < ends))
    validation = _held_out(sequences, validated, validation_at)
    return _split(sequences, validation_at, validation, _held_out(sequences, tested, test_at))


def _first_at_or_after(sequences: Sequences, times: NDArray[np.int64], moment: int) -> NDArray[np.int64]:
    """Per user, the flat index of the first interaction that is not before `moment`."""
    offsets = sequences.offsets
    at = offsets[:-1].copy()
    for first, last in sequences.user_blocks(BLOCK):
        start, end = offsets[first], offsets[last]
        earlier = np.zeros(end - start + 1, dtype=np.int64)
        np.cumsum(times[start:end] < moment, out=earlier[1:])
        at[first:last] += np.diff(earlier[offsets[first : last + 1] - start])
    return at


def _held_out(sequences: Sequences, users: NDArray[np.int64], target_at: NDArray[np.int64]) -> HeldOut:
    """These users, each with the item at `target_at[user]` as the target."""
    tokens, ends = sequences.tokens, target_at[users]
    histories = Spans(tokens, sequences.offsets[users], ends, users)
    return HeldOut(histories, tokens[ends].astype(np.int64))


def _split(sequences: Sequences, train_ends: NDArray[np.int64], validation: HeldOut, test: HeldOut) -> Split:
    starts = sequences.offsets[:-1]
    users = np.flatnonzero(train_ends > starts)
    train = Spans(sequences.tokens, starts[users], train_ends[users], users)
    n_items = sequences.n_items
    return Split(train, validation, test, n_items, _item_counts(train, n_items))


def _item_counts(spans: Spans, n_items: int) -> NDArray[np.int64]:
    """How often each item occurs in the spans, counted block by block."""
    counts = np.zeros(n_items, dtype=np.int64)
    for rows in np.array_split(np.arange(len(spans)), 1 + int(spans.lengths.sum()) // BLOCK):
        counts += np.bincount(spans.take(rows).items(), minlength=n_items)
    return counts


SPLITS = {"leave-one-out": leave_one_out, "global-time": global_time}


class MicrobatchSize(NamedTuple):
    positions: int  # at most this many positions, padding included
    padding: int  # this many padded positions cost about as much as one more microbatch


# Measured on the lengths of ML-1M and Beauty. For the backward pass, training keeps about thirty
# numbers per position and unit of width; scoring keeps none.
FOR_TRAINING = MicrobatchSize(2048, 300)
FOR_SCORING = MicrobatchSize(8192, 2000)


def group_by_length(lengths: NDArray[np.int64], size: MicrobatchSize, most_rows: int | None = None) -> list[slice]:
    """Slices of `lengths`, which descend: microbatches that waste little and fit `size`."""
    groups, first = [], 0
    while first < len(lengths):
        longest = max(1, int(lengths[first]))
        n_most = max(1, size.positions // longest)
        rest = lengths[first : first + (n_most if most_rows is None else min(n_most, most_rows))]
        padding = np.cumsum(longest - rest)
        n = int(np.searchsorted(padding, size.padding, side="right"))
        groups.append(slice(first, first + n))
        first += n
    return groups
