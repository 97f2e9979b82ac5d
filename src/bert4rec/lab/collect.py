"""From a lab directory to what its report says.

Every column is resampled with the same users, so that differences are paired. With several seeds a
user's metric is averaged over the seeds first: an interval covers the choice of users, not that of
seeds. Runs that failed, did not finish or cannot be read keep their names, so that a report never
looks more complete than the lab was.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter

from bert4rec.evaluation.compare import bootstrap
from bert4rec.evaluation.metrics import per_user
from bert4rec.evaluation.result import Evaluation
from bert4rec.lab.lab_directory import LAB_FILE, LabRun, read_lab, runs_of
from bert4rec.lab.lab_result import (
    COMPARED,
    FULL,
    RANKED_BY,
    REPORTED,
    CurveValidation,
    DifferenceToBest,
    LabFacts,
    LabResult,
    MeanEstimate,
    MissingRun,
    ModelResult,
    PlannedModel,
    RunCost,
    UserBin,
)

N_RESAMPLES = 10_000
N_BINS = 5
LONGEST_LIST = 50  # HR@k is drawn for k = 1..50
BY_THE_LAB = ("training.seed", "training.minutes")  # settings that the lab chooses itself
BROKEN = (ValueError, LookupError, TypeError, AttributeError)  # what a damaged file can raise


@dataclass(frozen=True)
class FinishedRun:
    path: Path
    seed: int
    title: str
    settings: dict[str, Any]
    is_deterministic: bool  # one seed is all there is
    cost: RunCost
    curve: tuple[CurveValidation, ...]
    evaluation: Evaluation  # in the order of users


@dataclass(frozen=True)
class LabRuns:
    facts: LabFacts
    finished: dict[str, list[FinishedRun]] = field(default_factory=dict)  # by model
    missing: list[MissingRun] = field(default_factory=list)


def collect(lab_dir: Path, *, n_resamples: int = N_RESAMPLES) -> LabResult:
    """Read every run of a lab and compute all that a report needs."""
    found = read_runs(lab_dir)
    runs, missing = found.finished, tuple(found.missing)
    if not runs:
        return LabResult(found.facts, (), 0, None, n_resamples, {}, (), missing)
    every = [run.evaluation for of_model in runs.values() for run in of_model]
    first = every[0]
    result = LabResult(
        found.facts,
        protocols=tuple(p for p in first.ranks if all(p in each.ranks for each in every)),
        n_users=len(first.users),
        n_negatives=first.extras.get("settings", {}).get("n_negatives"),
        n_resamples=n_resamples,
        bins={name: quantile_bins(numbers) for name, numbers in _binned_numbers(first).items()},
        models=(),
        missing=missing,
    )
    columns = [(name, protocol, metric) for name in runs for protocol in result.protocols for metric in REPORTED]
    values = np.stack([mean_over_seeds(runs[name], metric, protocol) for name, protocol, metric in columns], axis=1)
    figures = dict(zip(columns, mean_estimates(values, n_resamples=n_resamples)[0], strict=True))
    order = sorted(runs, key=lambda name: (-figures[name, FULL, RANKED_BY].value, name))
    differences = {}
    for metric in COMPARED:
        of_users = {name: mean_over_seeds(runs[name], metric) for name in sorted(runs)}
        differences[metric] = differences_to(order[0], of_users, n_resamples)
    models = (_model(result, name, runs[name], figures, differences) for name in order)
    return replace(result, models=tuple(models))


def mean_over_seeds(runs: Sequence[FinishedRun], metric: str, protocol: str = FULL) -> NDArray[np.float64]:
    """(users,) of a metric, averaged over the runs of one model."""
    ranks = [torch.from_numpy(run.evaluation.ranks[protocol]) for run in runs]
    values: NDArray[np.float64] = torch.stack([per_user(r, metric) for r in ranks]).mean(0).numpy()
    return values


def mean_estimates(values: NDArray[np.float64], *, n_resamples: int) -> tuple[list[MeanEstimate], list[float]]:
    """(users, columns) to the mean of each column with its interval, and its p-value."""
    low, high, p_values = bootstrap(values, n_resamples, seed=0)
    columns = zip(values.mean(axis=0).tolist(), low.tolist(), high.tolist(), strict=True)
    return [MeanEstimate(*column) for column in columns], p_values.tolist()


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (Holm 1979), in the order given.

    The smallest of m p-values is multiplied by m, the next by m - 1, and so on; none may end below
    a smaller one before it, nor above 1. The chance of any false positive among all m comparisons
    stays below the level at which the corrected values are read.
    """
    order = np.argsort(p_values)
    corrected = np.minimum(1.0, np.arange(len(order), 0, -1) * np.array(p_values)[order])
    in_given_order: list[float] = np.maximum.accumulate(corrected)[np.argsort(order)].tolist()
    return in_given_order


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
    inner = np.quantile(numbers, np.arange(1, n_bins) / n_bins, method="inverted_cdf")
    upper = sorted({int(edge) for edge in inner} | {int(numbers.max())})
    bins, low = [], int(numbers.min())
    for high in upper:
        bins.append(UserBin(low, high, int(((numbers >= low) & (numbers <= high)).sum())))
        low = high + 1
    return tuple(bins)


def _binned_numbers(evaluation: Evaluation) -> dict[str, NDArray[np.int64]]:
    """(users,) by which users are binned: how long their history is, how popular their target."""
    return {"history": evaluation.history_lengths, "popularity": evaluation.target_counts}


def means_by_bin(values: NDArray[np.float64], numbers: NDArray[np.int64], bins: Sequence[UserBin]) -> tuple[float, ...]:
    """Mean of the users' values in each bin."""
    return tuple(float(values[(numbers >= each.low) & (numbers <= each.high)].mean()) for each in bins)


def _model(
    result: LabResult,
    name: str,
    runs: list[FinishedRun],
    figures: dict[tuple[str, str, str], MeanEstimate],  # by model, protocol and metric
    differences: dict[str, dict[str, DifferenceToBest]],  # by metric and model
) -> ModelResult:
    binned, quality = _binned_numbers(runs[0].evaluation), mean_over_seeds(runs, RANKED_BY)
    ranks = np.stack([run.evaluation.ranks[FULL] for run in runs])
    places = np.bincount(ranks[ranks <= LONGEST_LIST], minlength=LONGEST_LIST + 1)
    hit_rates = places[1:].cumsum() / ranks.size  # place 0 is UNREACHABLE
    return ModelResult(
        name=name,
        title=runs[0].title,
        settings=runs[0].settings,
        seeds=tuple(run.seed for run in runs),
        is_deterministic=runs[0].is_deterministic,
        figures={p: {metric: figures[name, p, metric] for metric in REPORTED} for p in result.protocols},
        seed_figures={
            p: {metric: tuple(_of_seed(run, metric, p) for run in runs) for metric in REPORTED}
            for p in result.protocols
        },
        costs=tuple(run.cost for run in runs),
        curves=tuple(run.curve for run in runs),
        hit_rates=tuple(hit_rates.tolist()),
        by_bin={by: means_by_bin(quality, numbers, result.bins[by]) for by, numbers in binned.items()},
        differences={metric: found[name] for metric, found in differences.items() if name in found},
    )


def _of_seed(run: FinishedRun, metric: str, protocol: str) -> MeanEstimate:
    """The mean of one seed, with the interval that its own evaluation saved."""
    known = run.evaluation.metrics[protocol].get(metric)
    low, high = (known["low"], known["high"]) if known else (None, None)
    return MeanEstimate(float(mean_over_seeds([run], metric, protocol).mean()), low, high)


def read_runs(lab_dir: Path) -> LabRuns:
    """All runs of a lab; those with a result were evaluated on the same held-out items."""
    runs = LabRuns(_read_facts(lab_dir))
    there = [
        LabRun(lab_dir, path.parent.name, int(seed[1]))
        for path in sorted((lab_dir / "runs").glob("[!.]*/seed-*"))
        if (seed := re.fullmatch(r"seed-(\d+)", path.name))
    ]
    for run in dict.fromkeys([*runs_of(lab_dir, runs.facts.models, runs.facts.seeds), *there]):
        found = _read_run(run)
        if isinstance(found, MissingRun):
            runs.missing.append(found)
        else:
            runs.finished.setdefault(run.name, []).append(found)
    every = [run for of_model in runs.finished.values() for run in of_model]
    for other in every[1:]:
        _check_comparable(every[0], other)
    return runs


def _read_facts(lab_dir: Path) -> LabFacts:
    if not (lab_dir / LAB_FILE).is_file():
        raise ValueError(f"{lab_dir} is not a lab: {LAB_FILE} is missing; start with bert4rec lab")
    try:
        known = read_lab(lab_dir)
        assert known is not None
        # Reports are published, and the directory of the data is private.
        data = {key: value for key, value in known["data"].items() if key != "directory"}
        plans = {name: _planned(LabRun(lab_dir, name, 0)) for name in known["facts"]["models"]}
        return TypeAdapter(LabFacts).validate_python(known["facts"] | {"data": data, "plans": plans})
    except BROKEN as error:
        raise ValueError(f"{lab_dir / LAB_FILE} is damaged ({error!r}): run the lab again") from None


def _planned(run: LabRun) -> PlannedModel:
    plan = run.plan() or {}
    source = Path(plan.get("source", run.name)).name
    return PlannedModel(source, tuple(plan.get("overrides", ())), plan.get("budget_minutes"))


def _read_run(run: LabRun) -> FinishedRun | MissingRun:
    title = (run.plan() or {}).get("title", run.name)
    try:
        content = run.cost()
        if content is None:
            return MissingRun(run.name, title, run.seed, None)
        if content["status"] == "done":
            return FinishedRun(
                run.folder,
                run.seed,
                title,
                {name: value for name, value in content["settings"].items() if name not in BY_THE_LAB},
                run.is_deterministic(),
                TypeAdapter(RunCost).validate_python(content["cost"]),
                tuple(_validation(event) for event in run.events() if "ndcg@10" in event),
                _evaluation(run.folder),
            )
        reason = str(content.get("error") or "no reason is known")
    except BROKEN as error:
        # One run that cannot be read must not hide the others; its row says why it is missing.
        reason = f"its result cannot be read: {error}"
    return MissingRun(run.name, title, run.seed, _without_paths(reason, run.lab))


def _without_paths(error: str, lab_dir: Path) -> str:
    """Only the names of files: their folders are private."""
    for path in (lab_dir.resolve(), lab_dir, Path.home()):  # whole: names may have spaces
        if len(str(path)) > 1:
            error = error.replace(str(path), "…")
    return re.sub(r"(?<![\w./])/(?:[^\s/'\":]+/)+", "…/", error)


def _validation(event: dict[str, Any]) -> CurveValidation:
    minutes = round(event["seconds"] / 60, 4)
    return CurveValidation(
        event["stage"], event["epoch"], minutes, event.get("loss"), event["ndcg@10"], event.get("hr@10")
    )


def _evaluation(path: Path) -> Evaluation:
    found = Evaluation.load(path)
    if FULL not in found.ranks:
        raise ValueError(f"{path} was not evaluated over all items: evaluate it again")
    if len(np.unique(found.users)) != len(found.users):
        raise ValueError(f"{path} has users in more than one row: a lab needs one row per user")
    order = np.argsort(found.users)
    return replace(
        found,
        users=found.users[order],
        targets=found.targets[order],
        history_lengths=found.history_lengths[order],
        target_counts=found.target_counts[order],
        ranks={protocol: ranks[order] for protocol, ranks in found.ranks.items()},
    )


def _check_comparable(run: FinishedRun, other: FinishedRun) -> None:
    """Metrics on different held-out items do not say which model is better."""
    a, b = run.evaluation, other.evaluation
    for what in ("users", "targets"):
        if not np.array_equal(getattr(a, what), getattr(b, what)):
            raise ValueError(
                f"{run.path} and {other.path} were evaluated on different {what}: they used "
                "different data or splits and cannot share a table; run the lab again in a new "
                "directory"
            )
    for what in ("n_items", "exclude_seen", "n_negatives", "seed"):
        first, second = ({**e.extras, **e.extras.get("settings", {})}.get(what) for e in (a, b))
        if first != second:
            raise ValueError(
                f"{what} is {first} in {run.path} and {second} in {other.path}: the targets were "
                "ranked among different items; evaluate both the same way"
            )
