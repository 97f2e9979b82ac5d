"""Ranks in, metrics out, with bootstrap intervals.

A rank is the place of the one right item in a list, counted from 1; `UNREACHABLE` stands for a
target that the list could never show, and earns 0 in every metric at every cut-off.

There is one right item per user, which makes some metrics equal, and we say so rather than
leave one out: Recall@k is HR@k (the one item is found or not), and MAP@k is MRR@k (the precision
at the one hit is 1 / rank). The ideal DCG is 1, so NDCG@k is 1 / log2(rank + 1) within k.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bert4rec.scoring import UNREACHABLE

CONFIDENCE = 0.95
_RESAMPLED_AT_ONCE = 1 << 22  # users times resamples held in memory together: 32 MB of counts


class Estimate(TypedDict):
    """A mean over users and its 95 % interval; no interval when no resamples were asked for."""

    value: float
    low: float | None
    high: float | None


def hit(ranks: Tensor, k: int | None) -> Tensor:
    """1 where the target is among the first `k` (anywhere in the list if `k` is None)."""
    found = ranks != UNREACHABLE
    return (found if k is None else found & (ranks <= k)).double()


def discounted_gain(ranks: Tensor, k: int | None) -> Tensor:
    # The clamp only keeps log2 away from 0 where `hit` is 0 already.
    return hit(ranks, k) / torch.log2(ranks.clamp(min=1).double() + 1)


def reciprocal_rank(ranks: Tensor, k: int | None) -> Tensor:
    return hit(ranks, k) / ranks.clamp(min=1).double()


METRICS: dict[str, Callable[[Tensor, int | None], Tensor]] = {
    "HR": hit,
    "NDCG": discounted_gain,
    "MRR": reciprocal_rank,
    "Recall": hit,
    "MAP": reciprocal_rank,
}


def metric_names(ks: Sequence[int]) -> list[str]:
    """Every metric at every cut-off, and MRR over the whole list as the paper reports it."""
    for k in ks:
        if k < 1:
            raise ValueError(f"cut-off k is {k}: choose whole numbers from 1 upwards")
    return [f"{name}@{k}" for name in METRICS for k in ks] + ["MRR"]


def per_user(ranks: Tensor, metric: str) -> Tensor:
    """(N,) ranks to (N,) values of a metric such as `NDCG@10` or `MRR` (no cut-off)."""
    assert not ranks.is_floating_point()
    parts = re.fullmatch(r"([A-Za-z]+)(?:@([1-9][0-9]*))?", metric)
    if parts is None or parts[1] not in METRICS:
        raise ValueError(f"unknown metric {metric!r}: use one of {', '.join(METRICS)}, with a cut-off such as NDCG@10")
    return METRICS[parts[1]](ranks, int(parts[2]) if parts[2] else None)


def resampled_means(
    values: NDArray[np.float64], n_resamples: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Means of `values` (users, columns) over users drawn with replacement: (resamples, columns).

    All columns see the same resamples, which is what makes a difference of columns paired.
    """
    n_users = len(values)
    at_once = max(1, _RESAMPLED_AT_ONCE // n_users)
    means = np.empty((n_resamples, values.shape[1]))
    for first in range(0, n_resamples, at_once):
        n = min(at_once, n_resamples - first)
        drawn = generator.integers(0, n_users, size=(n, n_users))
        drawn += np.arange(n)[:, None] * n_users
        times_drawn = np.bincount(drawn.ravel(), minlength=n * n_users).reshape(n, n_users)
        means[first : first + n] = times_drawn.astype(np.float64) @ values / n_users
    return means


def interval(means: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Percentile interval of resampled means, a column each."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return low, high


def estimates(
    ranks: dict[str, Tensor], metrics: Sequence[str], *, n_resamples: int, seed: int
) -> dict[str, dict[str, Estimate]]:
    """protocol -> metric -> estimate, all from one set of resampled users."""
    if n_resamples < 0:
        raise ValueError(f"bootstrap is {n_resamples}: choose 0 (no intervals) or more resamples")
    columns = [(protocol, metric) for protocol in ranks for metric in metrics]
    values = torch.stack([per_user(ranks[p], m) for p, m in columns], dim=1).cpu().numpy()
    bounds: list[tuple[float | None, float | None]] = [(None, None)] * len(columns)
    if n_resamples:
        means = resampled_means(values, n_resamples, np.random.default_rng(seed))
        low, high = interval(means)
        bounds = list(zip(low.tolist(), high.tolist(), strict=True))
    table: dict[str, dict[str, Estimate]] = {protocol: {} for protocol in ranks}
    for (protocol, metric), value, (low_, high_) in zip(columns, values.mean(axis=0).tolist(), bounds, strict=True):
        table[protocol][metric] = {"value": value, "low": low_, "high": high_}
    return table
