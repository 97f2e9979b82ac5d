"""From a lab directory to what its report says.

Runs that failed, were not finished or cannot be read are kept by name, so that a report never
looks more complete than the lab was.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bert4rec.lab.result import (
    COMPARED,
    FULL,
    RANKED_BY,
    REPORTED,
    Difference,
    Figure,
    LabResult,
    MissingRun,
    ModelResult,
)
from bert4rec.lab.saved_runs import (
    FinishedRun,
    check_same_questions,
    expected_runs,
    read_facts,
    read_run,
)
from bert4rec.lab.statistics import (
    N_RESAMPLES,
    bootstrap,
    differences_to,
    mean_over_seeds,
    means_by_bin,
    quantile_bins,
)

LONGEST_LIST = 50  # HR@k is drawn for k = 1..50


def collect(lab_dir: Path, *, n_resamples: int = N_RESAMPLES) -> LabResult:
    """Read every run of a lab and compute all that a report needs."""
    facts = read_facts(lab_dir)
    runs: dict[str, list[FinishedRun]] = {}
    missing: list[MissingRun] = []
    for name, seed in expected_runs(lab_dir, facts):
        run = read_run(lab_dir, name, seed)
        if isinstance(run, MissingRun):
            missing.append(run)
        else:
            runs.setdefault(name, []).append(run)
    result = LabResult(facts, (), 0, None, n_resamples, (), (), (), tuple(missing))
    if not runs:
        return result
    all_runs = [run for of_model in runs.values() for run in of_model]
    for run in all_runs[1:]:
        check_same_questions(all_runs[0], run)
    first = all_runs[0].evaluation
    result = replace(
        result,
        protocols=tuple(p for p in first.ranks if all(p in r.evaluation.ranks for r in all_runs)),
        n_users=len(first.users),
        n_negatives=first.extras.get("settings", {}).get("n_negatives"),
        history_bins=quantile_bins(first.history_lengths),
        popularity_bins=quantile_bins(first.target_counts),
    )
    figures = _figures(result, runs)
    order = sorted(runs, key=lambda name: (-figures[name][FULL][RANKED_BY].value, name))
    differences = _differences(runs, order[0], n_resamples)
    models = [_model(result, name, runs[name], figures[name], differences[name]) for name in order]
    return replace(result, models=tuple(models))


def _values(runs: list[FinishedRun], metric: str, protocol: str = FULL) -> NDArray[np.float64]:
    return mean_over_seeds([run.evaluation.ranks[protocol] for run in runs], metric)


def _figures(
    result: LabResult, runs: dict[str, list[FinishedRun]]
) -> dict[str, dict[str, dict[str, Figure]]]:
    """model -> protocol -> metric, all from one set of resampled users."""
    columns = [(name, p, metric) for name in runs for p in result.protocols for metric in REPORTED]
    values = np.stack([_values(runs[name], metric, p) for name, p, metric in columns], axis=1)
    found, _ = bootstrap(values, n_resamples=result.n_resamples, seed=0)
    figures: dict[str, dict[str, dict[str, Figure]]] = {}
    for (name, protocol, metric), figure in zip(columns, found, strict=True):
        figures.setdefault(name, {}).setdefault(protocol, {})[metric] = figure
    return figures


def _differences(
    runs: dict[str, list[FinishedRun]], best: str, n_resamples: int
) -> dict[str, dict[str, Difference]]:
    names = sorted(runs)
    differences: dict[str, dict[str, Difference]] = {name: {} for name in names}
    for metric in COMPARED:
        values = np.stack([_values(runs[name], metric) for name in names], axis=1)
        found = differences_to(names.index(best), values, n_resamples=n_resamples)
        for name, difference in zip(names, found, strict=True):
            if difference is not None:
                differences[name][metric] = difference
    return differences


def _model(
    result: LabResult,
    name: str,
    runs: list[FinishedRun],
    figures: dict[str, dict[str, Figure]],
    differences: dict[str, Difference],
) -> ModelResult:
    questions = runs[0].evaluation
    quality = _values(runs, RANKED_BY)
    ranks = np.stack([run.evaluation.ranks[FULL] for run in runs])
    places = np.bincount(ranks[ranks <= LONGEST_LIST], minlength=LONGEST_LIST + 1)
    hit_rates = places[1:].cumsum() / ranks.size  # place 0 is UNREACHABLE
    return ModelResult(
        name=name,
        title=runs[0].title,
        settings=runs[0].settings,
        seeds=tuple(run.seed for run in runs),
        is_without_chance=runs[0].is_without_chance,
        figures=figures,
        seed_figures={
            protocol: {
                metric: tuple(_of_seed(run, metric, protocol) for run in runs)
                for metric in REPORTED
            }
            for protocol in result.protocols
        },
        costs=tuple(run.cost for run in runs),
        curves=tuple(run.curve for run in runs),
        hit_rates=tuple(hit_rates.tolist()),
        by_history_length=means_by_bin(quality, questions.history_lengths, result.history_bins),
        by_popularity=means_by_bin(quality, questions.target_counts, result.popularity_bins),
        differences=differences,
    )


def _of_seed(run: FinishedRun, metric: str, protocol: str) -> Figure:
    """The mean of one seed, with the interval that its own evaluation saved."""
    known = run.evaluation.metrics[protocol].get(metric)
    low, high = (known["low"], known["high"]) if known else (None, None)
    return Figure(float(_values([run], metric, protocol).mean()), low, high)
