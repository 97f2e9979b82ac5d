"""The runs of a reproduction held against what was published."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert4rec.lab.claims import (
    FigureClaim,
    OrderClaim,
    Published,
    Reproduction,
    Verdict,
    judge_figure,
    judge_order,
    shortfall,
)
from bert4rec.lab.plan import Run, read_json
from bert4rec.lab.result import Facts, Figure, MissingRun
from bert4rec.lab.saved_runs import (
    FinishedRun,
    check_same_questions,
    expected_runs,
    read_facts,
    read_run,
)
from bert4rec.lab.statistics import bootstrap, mean_over_seeds
from bert4rec.models import LEARNED

FORMAT_VERSION = 1
N_RESAMPLES = 2000


@dataclass(frozen=True)
class CurvePoint:
    """NDCG@10 of a contender at a place on a curve."""

    at: float
    ours: Figure
    published: float | None


@dataclass(frozen=True)
class Judgement:
    """All that `reproduction.json` holds; aggregates only, nothing about one user or item."""

    name: str
    title: str
    source: str
    notes: str
    warnings: tuple[str, ...]
    figures: tuple[FigureClaim, ...]
    orders: tuple[OrderClaim, ...]
    failed: dict[str, str]  # contender → why it, or a seed of it, has no result
    curve: tuple[CurvePoint, ...]
    curve_over: str | None
    protocol: str
    settings: dict[str, dict[str, Any]]  # contender → what differs from the defaults
    data: dict[str, Any]
    seeds: tuple[int, ...]
    budget_minutes: float | None
    machine: dict[str, Any]
    versions: dict[str, str]
    created: str
    format_version: int = FORMAT_VERSION

    @property
    def verdicts(self) -> list[Verdict]:
        return [claim.verdict for claim in self.figures] + [claim.verdict for claim in self.orders]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def judge(reproduction: Reproduction, out: Path) -> Judgement:
    """Hold all runs that are there against what was published."""
    facts = read_facts(out / "lab")
    runs: dict[str, list[FinishedRun]] = {}
    failed: dict[str, str] = {}
    expected = expected_runs(out / "lab", facts)
    for name in (each.name for each in reproduction.contenders if each.name in facts.models):
        found = [read_run(out / "lab", name, seed) for of, seed in expected if of == name]
        missing = [run for run in found if isinstance(run, MissingRun)]
        if done := [run for run in found if isinstance(run, FinishedRun)]:
            runs[name] = done
        if errors := [f"seed {run.seed} failed: {run.error}" for run in missing if run.error]:
            failed[name] = "; ".join(errors)
        elif missing and not done:
            failed[name] = "not finished"
    all_runs = [run for of_contender in runs.values() for run in of_contender]
    for run in all_runs[1:]:
        check_same_questions(all_runs[0], run)
    notes = {
        each.name: _training_notes(reproduction, each, runs[each.name], out / "lab", facts)
        for each in reproduction.contenders
        if each.name in runs
    }
    figures = [
        claim
        for each in reproduction.contenders
        for claim in _figure_claims(reproduction, each, runs.get(each.name), notes)
    ]
    return Judgement(
        name=reproduction.name,
        title=reproduction.title,
        source=reproduction.source,
        notes=reproduction.notes.strip(),
        warnings=tuple(_other_data(reproduction, facts.data)),
        figures=tuple(figures),
        orders=tuple(_order_claims(reproduction, runs, notes)),
        failed=failed,
        curve=tuple(_curve(reproduction, runs)),
        curve_over=reproduction.curve_over,
        protocol=reproduction.protocol,
        settings={name: of_contender[0].settings for name, of_contender in runs.items()},
        data=facts.data,
        seeds=facts.seeds,
        budget_minutes=facts.budget_minutes,
        machine=facts.machine,
        versions=facts.versions,
        created=facts.created,
    )


def _other_data(reproduction: Reproduction, data: dict[str, Any]) -> list[str]:
    """Figures of other data compare with nothing: say so."""
    return [
        f"this is not the published data: it has {data[key]:,} {what} instead of {wanted:,}"
        for key, what, wanted in (
            ("n_users", "users", reproduction.n_users),
            ("n_items", "items", reproduction.n_items),
        )
        if wanted is not None and data[key] is not None and data[key] != wanted
    ]


def _figure_claims(
    reproduction: Reproduction,
    each: Published,
    runs: list[FinishedRun] | None,
    notes: dict[str, list[str]],
) -> list[FigureClaim]:
    protocol = reproduction.protocol
    claims = []
    for metric, published in each.published.items():
        figure = _mean(_values(runs, metric, protocol)) if runs else None
        tolerance = reproduction.tolerance.of(published)
        value = None if figure is None else figure.value
        verdict, missed_by = judge_figure(value, published, tolerance)
        claims.append(
            FigureClaim(
                contender=each.name,
                title=each.title,
                metric=metric,
                protocol=protocol,
                source=each.source or reproduction.source,
                published=published,
                tolerance=tolerance,
                ours=figure,
                difference=None if value is None else value - published,
                verdict=verdict,
                missed_by=missed_by,
                notes=tuple(notes.get(each.name, ())),
            )
        )
    return claims


def _order_claims(
    reproduction: Reproduction, runs: dict[str, list[FinishedRun]], notes: dict[str, list[str]]
) -> list[OrderClaim]:
    known = {each.name: each for each in reproduction.contenders}
    claims = []
    for order in reproduction.order:
        for worse in order.worse:
            both = (order.better, worse)
            difference = None
            if all(name in runs for name in both):
                better, other = (
                    _values(runs[name], order.metric, reproduction.protocol) for name in both
                )
                difference = _mean(better - other)
            of_both = [
                f"{known[name].title}: {note}" for name in both for note in notes.get(name, ())
            ]
            above, below = (known[name].published.get(order.metric) for name in both)
            published = None if above is None or below is None else above - below
            claims.append(
                OrderClaim(
                    says=order.says,
                    better=known[order.better].title,
                    worse=known[worse].title,
                    metric=order.metric,
                    protocol=reproduction.protocol,
                    published=published,
                    difference=difference,
                    verdict=judge_order(difference),
                    notes=tuple(of_both),
                )
            )
    return claims


def _curve(reproduction: Reproduction, runs: dict[str, list[FinishedRun]]) -> list[CurvePoint]:
    points = [
        CurvePoint(
            each.at,
            _mean(_values(runs[each.name], "NDCG@10", reproduction.protocol)),
            each.published.get("NDCG@10"),
        )
        for each in reproduction.contenders
        if each.at is not None and each.name in runs
    ]
    return sorted(points, key=lambda point: point.at)


def _mean(values: NDArray[np.float64]) -> Figure:
    (figure,), _ = bootstrap(values[:, None], n_resamples=N_RESAMPLES, seed=0)
    return figure


def _values(runs: list[FinishedRun], metric: str, protocol: str) -> NDArray[np.float64]:
    return mean_over_seeds([run.evaluation.ranks[protocol] for run in runs], metric)


def _training_notes(
    reproduction: Reproduction, each: Published, runs: list[FinishedRun], lab: Path, facts: Facts
) -> list[str]:
    """By the shortest run of a contender, so that nothing looks better trained than it was."""
    run = min(runs, key=lambda run: run.cost.epochs or 0)
    folder = Run(lab, each.name, run.seed)
    about = read_json(folder.folder / "about.json") or {}
    base = reproduction.base if each.recipe is None else None
    n_seeds = 1 if run.is_without_chance else len(facts.seeds)
    too_few = [f"{len(runs)} of {n_seeds} seeds"] if len(runs) < n_seeds else []
    return too_few + shortfall(
        each.training or (base.training if base else None),
        sequences=about.get("training", {}).get("sequences"),
        epochs=run.cost.epochs,
        planned_epochs=_epochs(folder.contender / "plan.json"),
        fitted_epochs=_epochs(folder.contender / "epochs.json"),
        is_stopped_by_clock=any(run.cost.stopped_by_clock for run in runs),
    )


def _epochs(path: Path) -> float | None:
    """Of all stages together, by the settings in this file."""
    content = read_json(path)
    if content is None:
        return None
    config = content["config"]
    model = LEARNED.get(config["model"]["name"])
    has_second = model is not None and model.task == "cloze"
    epochs = config["training"]["epochs"] + (config["second_stage"]["epochs"] if has_second else 0)
    return float(epochs)
