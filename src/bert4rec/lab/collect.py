"""From a lab directory to what its report says.

Every column is resampled with the same users, so that differences are paired. With several seeds a
user's metric is averaged over the seeds first: an interval covers the choice of users, not that of
seeds. Runs that failed, did not finish or cannot be read keep their names, so that a report never
looks more complete than the lab was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bert4rec.evaluation.compare import bootstrap
from bert4rec.evaluation.metrics import per_user
from bert4rec.lab.lab_result import (
    COMPARED,
    FULL,
    RANKED_BY,
    REPORTED,
    DifferenceToBest,
    LabResult,
    MeanEstimate,
    ModelResult,
    UserBin,
)
from bert4rec.lab.saved_runs import FinishedRun, read_runs

N_RESAMPLES = 10_000
N_BINS = 5
LONGEST_LIST = 50  # HR@k is drawn for k = 1..50


def collect(lab_dir: Path, *, n_resamples: int = N_RESAMPLES) -> LabResult:
    """Read every run of a lab and compute all that a report needs."""
    found = read_runs(lab_dir)
    runs, missing = found.finished, tuple(found.missing)
    if not runs:
        return LabResult(found.facts, (), 0, None, n_resamples, (), (), (), missing)
    every = [run.evaluation for of_model in runs.values() for run in of_model]
    first = every[0]
    result = LabResult(
        found.facts,
        protocols=tuple(p for p in first.ranks if all(p in each.ranks for each in every)),
        n_users=len(first.users),
        n_negatives=first.extras.get("settings", {}).get("n_negatives"),
        n_resamples=n_resamples,
        history_bins=quantile_bins(first.history_lengths),
        popularity_bins=quantile_bins(first.target_counts),
        models=(),
        missing=missing,
    )
    figures = _figures(result, runs)
    order = sorted(runs, key=lambda name: (-figures[name][FULL][RANKED_BY].value, name))
    differences = {
        metric: differences_to(
            order[0], {name: mean_over_seeds(runs[name], metric) for name in sorted(runs)}, n_resamples
        )
        for metric in COMPARED
    }
    models = []
    for name in order:
        to_best = {metric: found[name] for metric, found in differences.items() if name in found}
        models.append(_model(result, name, runs[name], figures[name], to_best))
    return replace(result, models=tuple(models))


def mean_over_seeds(runs: Sequence[FinishedRun], metric: str, protocol: str = FULL) -> NDArray[np.float64]:
    """(users,) of a metric, averaged over the runs of one model."""
    ranks = [torch.from_numpy(run.evaluation.ranks[protocol]) for run in runs]
    values: NDArray[np.float64] = torch.stack([per_user(r, metric) for r in ranks]).mean(0).numpy()
    return values


def mean_estimates(
    values: NDArray[np.float64], *, n_resamples: int, seed: int = 0
) -> tuple[list[MeanEstimate], list[float]]:
    """(users, columns) to the mean of each column with its interval, and its p-value."""
    low, high, p_values = bootstrap(values, n_resamples, seed)
    columns = zip(values.mean(axis=0).tolist(), low.tolist(), high.tolist(), strict=True)
    return [MeanEstimate(*column) for column in columns], p_values.tolist()


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (Holm 1979), in the order given.

    The smallest of m p-values is multiplied by m, the next by m - 1, and so on; none may end below
    a smaller one before it, nor above 1. The chance of any false positive among all m comparisons
    stays below the level at which the corrected values are read.
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for n_done, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - n_done) * p_values[place]))
        corrected[place] = largest
    return corrected


def differences_to(best: str, values: dict[str, NDArray[np.float64]], n_resamples: int) -> dict[str, DifferenceToBest]:
    """Each other model minus the best one; `values` (users,) of each model are those of one metric.

    Holm's correction is for the number of models compared under this metric.
    """
    others = [name for name in values if name != best]
    if not others:
        return {}
    # Differences of users, not of resampled means: equal models then differ by exactly 0.
    paired = np.stack([values[name] - values[best] for name in others]).T
    found, p_values = mean_estimates(paired, n_resamples=n_resamples)
    columns = zip(others, found, p_values, holm(p_values), strict=True)
    return {name: DifferenceToBest(each.value, each.low, each.high, p, holm_p) for name, each, p, holm_p in columns}


def quantile_bins(numbers: NDArray[np.int64], n_bins: int = N_BINS) -> tuple[UserBin, ...]:
    """Bins of about equally many users; fewer bins where many users share a number."""
    if len(numbers) == 0:
        return ()
    inner = np.quantile(numbers, np.arange(1, n_bins) / n_bins, method="inverted_cdf")
    upper = sorted({int(edge) for edge in inner} | {int(numbers.max())})
    bins, low = [], int(numbers.min())
    for high in upper:
        bins.append(UserBin(low, high, int(((numbers >= low) & (numbers <= high)).sum())))
        low = high + 1
    return tuple(bins)


def means_by_bin(values: NDArray[np.float64], numbers: NDArray[np.int64], bins: Sequence[UserBin]) -> tuple[float, ...]:
    """Mean of the users' values in each bin."""
    return tuple(float(values[(numbers >= each.low) & (numbers <= each.high)].mean()) for each in bins)


def _figures(result: LabResult, runs: dict[str, list[FinishedRun]]) -> dict[str, dict[str, dict[str, MeanEstimate]]]:
    """model -> protocol -> metric, all from one set of resampled users."""
    columns = [(name, p, metric) for name in runs for p in result.protocols for metric in REPORTED]
    values = np.stack([mean_over_seeds(runs[n], metric, p) for n, p, metric in columns], axis=1)
    found, _ = mean_estimates(values, n_resamples=result.n_resamples)
    figures: dict[str, dict[str, dict[str, MeanEstimate]]] = {}
    for (name, protocol, metric), figure in zip(columns, found, strict=True):
        figures.setdefault(name, {}).setdefault(protocol, {})[metric] = figure
    return figures


def _model(
    result: LabResult,
    name: str,
    runs: list[FinishedRun],
    figures: dict[str, dict[str, MeanEstimate]],
    differences: dict[str, DifferenceToBest],
) -> ModelResult:
    held_out, quality = runs[0].evaluation, mean_over_seeds(runs, RANKED_BY)
    ranks = np.stack([run.evaluation.ranks[FULL] for run in runs])
    places = np.bincount(ranks[ranks <= LONGEST_LIST], minlength=LONGEST_LIST + 1)
    hit_rates = places[1:].cumsum() / ranks.size  # place 0 is UNREACHABLE
    return ModelResult(
        name=name,
        title=runs[0].title,
        settings=runs[0].settings,
        seeds=tuple(run.seed for run in runs),
        is_deterministic=runs[0].is_deterministic,
        figures=figures,
        seed_figures={
            protocol: {metric: tuple(_of_seed(run, metric, protocol) for run in runs) for metric in REPORTED}
            for protocol in result.protocols
        },
        costs=tuple(run.cost for run in runs),
        curves=tuple(run.curve for run in runs),
        hit_rates=tuple(hit_rates.tolist()),
        by_history_length=means_by_bin(quality, held_out.history_lengths, result.history_bins),
        by_popularity=means_by_bin(quality, held_out.target_counts, result.popularity_bins),
        differences=differences,
    )


def _of_seed(run: FinishedRun, metric: str, protocol: str) -> MeanEstimate:
    """The mean of one seed, with the interval that its own evaluation saved."""
    known = run.evaluation.metrics[protocol].get(metric)
    low, high = (known["low"], known["high"]) if known else (None, None)
    return MeanEstimate(float(mean_over_seeds([run], metric, protocol).mean()), low, high)
