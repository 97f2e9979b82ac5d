"""Which items a target is ranked among: all of them, or a hundred sampled ones.

`full` is the honest one and comes first; sampled metrics need not keep the order of models
(Krichene & Rendle 2020). `popularity` is what the paper's tables use, `uniform` is what other
tables use. Under all three, ties are placed before the target:

    rank = 1 + #{candidate j, j != target : score_j >= score_target}

so that a constant score earns nothing; `bert4rec.scoring.rank_of` does it for `full`.

Shapes: B held-out users, V items, K negatives.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bert4rec.data.splits import HeldOut

PROTOCOLS = ("full", "popularity", "uniform")
NO_ITEM = -1  # fills the row of a user for whom there are fewer than K eligible negatives

_CELLS_AT_ONCE = 1 << 24  # users times items held in memory together
_TRIES_PER_NEGATIVE = 3  # draws with replacement before the exact race takes over


def sampled_rank(scores: Tensor, targets: Tensor, negatives: Tensor) -> Tensor:
    """Rank among the target and its negatives: (B, V), (B,), (B, K) -> (B,)."""
    before = scores.gather(1, negatives.clamp(min=0)) >= scores.gather(1, targets[:, None])
    return 1 + (before & (negatives != NO_ITEM)).sum(dim=1)


def draw_negatives(held_out: HeldOut, weights: NDArray[np.int64], n_negatives: int, seed: int) -> NDArray[np.int32]:
    """`n_negatives` items per user, without replacement, in proportion to `weights`.

    The user's own items (history and target) are rejected, items of weight 0 are never drawn,
    and where fewer items are eligible all of them are taken and `NO_ITEM` fills the row.

    This is the paper's sampler: draw, reject, go on until there are enough. Draws with
    replacement of which repeats and own items are dropped give exactly the same distribution;
    the few rows that a fixed number of draws leaves short are finished by an exponential race
    (the smallest -log(u) / weight come first), which is that same distribution again
    (Efraimidis & Spirakis 2006) at the cost of a pass over the catalogue.

    The random numbers of a row depend on the seed, its user and its target only: neither
    the model, the batch size nor the other rows change its negatives.
    """
    if n_negatives < 1:
        raise ValueError(f"n_negatives is {n_negatives}: choose 1 or more")
    if weights.sum() <= 0 or weights.min() < 0:
        raise ValueError(
            "the weights of the negatives must be 0 or more and not all 0: pass the item counts of the training data"
        )
    negatives = np.full((len(held_out), n_negatives), NO_ITEM, dtype=np.int32)
    n_draws = _TRIES_PER_NEGATIVE * n_negatives
    # A draw costs about 16 times the memory of a cell of the mask of own items.
    at_once = max(1, _CELLS_AT_ONCE // max(len(weights), 16 * n_draws))
    for first in range(0, len(held_out), at_once):
        rows = np.arange(first, min(first + at_once, len(held_out)))
        keys = _keys(seed, held_out.users[rows], held_out.targets[rows])
        taken = _own_items(held_out, rows, len(weights))
        _draw_and_reject(negatives[first : rows[-1] + 1], taken, weights, keys)
        short = np.flatnonzero(negatives[rows, -1] == NO_ITEM)
        # The race holds float64 keys, eight times the mask's size: fewer rows at once.
        for part in np.array_split(short, max(1, 8 * len(short) // at_once)):
            negatives[rows[part]] = _race(negatives[rows[part]], taken[part], weights, keys[part])
    return negatives


def _own_items(held_out: HeldOut, rows: NDArray[np.int64], n_items: int) -> NDArray[np.bool_]:
    own = np.zeros((len(rows), n_items), dtype=np.bool_)
    for i, row in enumerate(rows):
        own[i, held_out.histories[int(row)]] = True
    own[np.arange(len(rows)), held_out.targets[rows]] = True
    return own


def _draw_and_reject(
    negatives: NDArray[np.int32], taken: NDArray[np.bool_], weights: NDArray[np.int64], keys: NDArray[np.uint64]
) -> None:
    """Fill `negatives` from the left as far as a fixed number of draws goes; mark them `taken`."""
    n_rows, n_negatives = negatives.shape
    n_draws = _TRIES_PER_NEGATIVE * n_negatives
    cumulative = np.cumsum(weights)
    marks = (_uniforms(keys, 0, n_draws) * cumulative[-1]).astype(np.int64)
    draws = np.searchsorted(cumulative, marks, side="right")
    row = np.arange(n_rows)[:, None]
    accepted = ~taken[row, draws] & _first_of_its_kind(draws)
    place = np.cumsum(accepted, axis=1) - 1
    accepted &= place < n_negatives
    in_row, in_draw = np.nonzero(accepted)
    chosen = draws[in_row, in_draw]
    negatives[in_row, place[in_row, in_draw]] = chosen
    taken[in_row, chosen] = True


def _first_of_its_kind(draws: NDArray[np.int64]) -> NDArray[np.bool_]:
    """True where a value occurs for the first time in its row."""
    n_rows, n_draws = draws.shape
    ordered = np.sort(draws * n_draws + np.arange(n_draws), axis=1)  # by value, then by place
    value, place = np.divmod(ordered, max(1, n_draws))
    is_first = np.ones((n_rows, n_draws), dtype=np.bool_)
    is_first[:, 1:] = value[:, 1:] != value[:, :-1]
    by_place = np.empty_like(is_first)
    np.put_along_axis(by_place, place, is_first, axis=1)
    return by_place


def _race(
    negatives: NDArray[np.int32], taken: NDArray[np.bool_], weights: NDArray[np.int64], keys: NDArray[np.uint64]
) -> NDArray[np.int32]:
    """Complete each row with the winners of an exponential race between the items left."""
    n_negatives = negatives.shape[1]
    u = _uniforms(keys, _TRIES_PER_NEGATIVE * n_negatives, len(weights))
    eligible = ~taken & (weights > 0)
    finish = np.where(eligible, -np.log1p(-u) / np.maximum(weights, 1), np.inf)
    order = np.argsort(finish, axis=1)[:, :n_negatives].astype(np.int32)
    order[~np.take_along_axis(eligible, order, axis=1)] = NO_ITEM
    places = np.arange(n_negatives) - (negatives != NO_ITEM).sum(axis=1)[:, None]
    width = order.shape[1]  # the catalogue may be smaller than n_negatives
    winners = np.take_along_axis(order, places.clip(0, width - 1), axis=1)
    winners[places >= width] = NO_ITEM
    return np.where(places < 0, negatives, winners)


def _keys(seed: int, users: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.uint64]:
    start = _mix(np.array([seed], dtype=np.int64).astype(np.uint64))
    return _mix(_mix(start + users.astype(np.uint64)) + targets.astype(np.uint64))


def _uniforms(keys: NDArray[np.uint64], first: int, n: int) -> NDArray[np.float64]:
    """Numbers `first` to `first + n` of each key's own SplitMix64 stream, in [0, 1)."""
    steps = np.arange(first + 1, first + n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = _mix(keys[:, None] + steps) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
