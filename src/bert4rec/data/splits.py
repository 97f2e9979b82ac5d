"""Which part of each history trains the model and which part asks it questions.

A split copies nothing: it is ranges of the flat token array, so it costs a few numbers a user.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bert4rec.data.sequences import Sequences

BLOCK = 1 << 22  # interactions looked at together: memory does not grow with the data


@dataclass(frozen=True)
class Spans:
    """Ranges `tokens[starts[i]:ends[i]]`, each a piece of the history of user row `users[i]`."""

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    users: NDArray[np.int64]

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
    """Histories of held-out users, and the item that really came next in each."""

    histories: Spans
    targets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def users(self) -> NDArray[np.int64]:
        return self.histories.users

    def sample(self, n: int, seed: int) -> HeldOut:
        """At most `n` of them, the same ones for the same seed."""
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
        """Of a leave-one-out split: one whose training has all but the test items."""
        train, before = self.train, self.test.histories
        ends = train.ends.copy()  # users with few actions have no question, and only train
        assert np.isin(before.users, train.users).all()
        rows = np.searchsorted(train.users, before.users)
        ends[rows] = before.ends
        train = Spans(train.tokens, train.starts, ends, train.users)
        return replace(self, train=train, train_counts=_counts_of(train, self.n_items))


def leave_one_out(sequences: Sequences) -> Split:
    """Last item test, the one before it validation, as in the paper.

    The test history contains the validation item (trap 4). Users with fewer than three actions
    only train: there would be no history left to answer from.
    """
    starts, ends = sequences.offsets[:-1], sequences.offsets[1:]
    asks = np.flatnonzero(ends - starts >= 3)
    train_ends = ends.copy()
    train_ends[asks] -= 2
    return _split(sequences, starts, train_ends, asks, ends - 2, asks, ends - 1)


def global_time(
    sequences: Sequences, validation_share: float = 0.1, test_share: float = 0.1
) -> Split:
    """Train on all that happened before one moment, ask about what came after it.

    The moments are the quantiles of all interaction times, so that the last `test_share` of
    the interactions lie in the test period. A user is asked about their first item in a period.
    """
    if sequences.times is None:
        raise ValueError(
            "a global-time split needs times, and this data set has none: "
            "name the time column, or use the leave-one-out split"
        )
    for name, share in (("validation_share", validation_share), ("test_share", test_share)):
        if not 0 < share < 0.5:
            raise ValueError(f"{name} is {share}: choose a share between 0 and 0.5")
    times = sequences.times
    validation_from, test_from = np.quantile(
        times, [1 - test_share - validation_share, 1 - test_share], method="nearest"
    )
    starts, ends = sequences.offsets[:-1], sequences.offsets[1:]
    validation_at = _first_at_or_after(sequences, times, int(validation_from))
    test_at = _first_at_or_after(sequences, times, int(test_from))
    asks_validation = np.flatnonzero((validation_at > starts) & (validation_at < test_at))
    asks_test = np.flatnonzero((test_at > starts) & (test_at < ends))
    return _split(
        sequences, starts, validation_at, asks_validation, validation_at, asks_test, test_at
    )


def _first_at_or_after(
    sequences: Sequences, times: NDArray[np.int64], moment: int
) -> NDArray[np.int64]:
    """Per user, the flat index of the first interaction that is not before `moment`."""
    offsets = sequences.offsets
    at = offsets[:-1].copy()
    first, n_users = 0, len(offsets) - 1
    while first < n_users:  # blocks of users with about BLOCK interactions
        last = int(np.searchsorted(offsets, offsets[first] + BLOCK, side="right")) - 1
        last = min(max(last, first + 1), n_users)
        start, end = offsets[first], offsets[last]
        earlier = np.zeros(end - start + 1, dtype=np.int64)
        np.cumsum(times[start:end] < moment, out=earlier[1:])
        ends_at, starts_at = offsets[first + 1 : last + 1], offsets[first:last]
        at[first:last] += earlier[ends_at - start] - earlier[starts_at - start]
        first = last
    return at


def _split(
    sequences: Sequences,
    starts: NDArray[np.int64],
    train_ends: NDArray[np.int64],
    asks_validation: NDArray[np.int64],
    validation_at: NDArray[np.int64],
    asks_test: NDArray[np.int64],
    test_at: NDArray[np.int64],
) -> Split:
    tokens = sequences.tokens

    def held_out(rows: NDArray[np.int64], at: NDArray[np.int64]) -> HeldOut:
        histories = Spans(tokens, starts[rows], at[rows], rows)
        return HeldOut(histories, tokens[at[rows]].astype(np.int64))

    trains = np.flatnonzero(train_ends > starts)
    train = Spans(tokens, starts[trains], train_ends[trains], trains)
    return Split(
        train,
        held_out(asks_validation, validation_at),
        held_out(asks_test, test_at),
        sequences.n_items,
        _counts_of(train, sequences.n_items),
    )


def _counts_of(spans: Spans, n_items: int) -> NDArray[np.int64]:
    """How often each item occurs in spans that follow each other, block by block."""
    counts = np.zeros(n_items, dtype=np.int64)
    first = 0
    while first < len(spans):
        start = spans.starts[first]
        reach = int(np.searchsorted(spans.starts, start + BLOCK, side="left"))
        starts, ends = spans.starts[first:reach] - start, spans.ends[first:reach] - start
        steps = np.zeros(int(ends[-1]) + 1, dtype=np.int8)
        np.add.at(steps, starts, 1)  # where a span ends, the next one may begin
        np.add.at(steps, ends, -1)
        is_inside = np.cumsum(steps[:-1], dtype=np.int8).view(bool)
        tokens = spans.tokens[start : start + len(is_inside)]
        counts += np.bincount(tokens[is_inside], minlength=n_items)
        first = reach
    return counts


SPLITS = {"leave-one-out": leave_one_out, "global-time": global_time}
