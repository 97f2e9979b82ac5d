"""How sure a table of models is: intervals over users, and differences to the best model.

Every column is resampled with the same users (`resampled_means`), so differences are paired. With
several seeds a user's metric is averaged over the seeds first: the interval then tells how much
other users would have changed the figure, and not how much other seeds would have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from bert4rec.evaluation.metrics import interval, per_user, resampled_means
from bert4rec.lab.result import Bin, Difference, Figure

N_RESAMPLES = 10_000
N_BINS = 5


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (Holm 1979), in the order given.

    The smallest of m p-values is multiplied by m, the next by m - 1, and so on; none may come
    out below a smaller one before it, nor above 1. The chance of any false alarm among all m
    comparisons stays below the level that the corrected values are read at.
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for n_done, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - n_done) * p_values[place]))
        corrected[place] = largest
    return corrected


def mean_over_seeds(ranks: Sequence[NDArray[np.int64]], metric: str) -> NDArray[np.float64]:
    """(users,) of a metric, from the ranks that each seed gave the users' targets."""
    by_seed = [per_user(torch.from_numpy(of_seed), metric) for of_seed in ranks]
    values: NDArray[np.float64] = torch.stack(by_seed).mean(dim=0).numpy()
    return values


def bootstrap(
    values: NDArray[np.float64], *, n_resamples: int, seed: int
) -> tuple[list[Figure], NDArray[np.float64]]:
    """(users, columns) -> a figure a column, and two-sided p-values of a mean of 0."""
    means = resampled_means(values, n_resamples, np.random.default_rng(seed))
    low, high = interval(means)
    # As in evaluation.compare: adding one counts the data themselves as a resample.
    not_above = (1 + (means <= 0).sum(axis=0)) / (1 + n_resamples)
    not_below = (1 + (means >= 0).sum(axis=0)) / (1 + n_resamples)
    p_values = np.minimum(1.0, 2 * np.minimum(not_above, not_below))
    columns = zip(values.mean(axis=0).tolist(), low.tolist(), high.tolist(), strict=True)
    return [Figure(*column) for column in columns], p_values


def differences_to(
    best: int, values: NDArray[np.float64], *, n_resamples: int = N_RESAMPLES, seed: int = 0
) -> list[Difference | None]:
    """(users, models) of one metric -> each model minus model `best`; None for `best` itself.

    Holm's correction is for the number of models compared under this metric.
    """
    others = [model for model in range(values.shape[1]) if model != best]
    found: list[Difference | None] = [None] * values.shape[1]
    if others:
        # Differences of users, not of resampled means: equal models then differ by exactly 0.
        paired = values[:, others] - values[:, [best]]
        figures, p_values = bootstrap(paired, n_resamples=n_resamples, seed=seed)
        for model, figure, p_value, holm_p in zip(
            others, figures, p_values.tolist(), holm(p_values.tolist()), strict=True
        ):
            assert figure.low is not None
            assert figure.high is not None
            found[model] = Difference(figure.value, figure.low, figure.high, p_value, holm_p)
    return found


def quantile_bins(numbers: NDArray[np.int64], n_bins: int = N_BINS) -> tuple[Bin, ...]:
    """About equally many users a bin; fewer bins where many users share a number."""
    if len(numbers) == 0:
        return ()
    inner = np.quantile(numbers, np.arange(1, n_bins) / n_bins, method="inverted_cdf")
    upper = sorted({int(edge) for edge in inner} | {int(numbers.max())})
    bins, low = [], int(numbers.min())
    for high in upper:
        n_users = int(((numbers >= low) & (numbers <= high)).sum())
        bins.append(Bin(low, high, n_users))
        low = high + 1
    return tuple(bins)


def means_by_bin(
    values: NDArray[np.float64], numbers: NDArray[np.int64], bins: Sequence[Bin]
) -> tuple[float, ...]:
    """Mean of the users' values in each bin."""
    return tuple(
        float(values[(numbers >= each.low) & (numbers <= each.high)].mean()) for each in bins
    )
