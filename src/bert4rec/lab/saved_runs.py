"""The runs of a lab as they are on disk: each with its result, or why it has none."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from bert4rec.evaluation.result import Evaluation
from bert4rec.lab.lab_directory import LAB_FILE, LabRun, read_lab
from bert4rec.lab.lab_result import FULL, CurveValidation, LabFacts, MissingRun, PlannedModel, RunCost

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


def read_runs(lab_dir: Path) -> LabRuns:
    """All runs of a lab; those with a result were evaluated on the same held-out items."""
    runs = LabRuns(_read_facts(lab_dir))
    expected = [LabRun(lab_dir, name, seed) for name in runs.facts.models for seed in runs.facts.seeds]
    expected = [run for run in expected if run.seed == runs.facts.seeds[0] or not run.is_deterministic()]
    there = [
        LabRun(lab_dir, path.parent.name, int(seed[1]))
        for path in sorted((lab_dir / "runs").glob("[!.]*/seed-*"))
        if (seed := re.fullmatch(r"seed-(\d+)", path.name))
    ]
    for run in dict.fromkeys([*expected, *there]):
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
    known = read_lab(lab_dir)
    if known is None:
        raise ValueError(f"{lab_dir} is not a lab: {LAB_FILE} is missing; start with bert4rec lab")
    try:
        # Reports are published, and the directory of the data is private.
        data = {key: value for key, value in known["data"].items() if key != "directory"}
        facts = TypeAdapter(LabFacts).validate_python(known["facts"] | {"data": data})
        return replace(facts, plans={name: _planned(LabRun(lab_dir, name, 0)) for name in facts.models})
    except BROKEN as error:
        raise ValueError(f"{lab_dir / LAB_FILE} is damaged ({error!r}): run the lab again") from None


def _planned(run: LabRun) -> PlannedModel:
    plan = run.plan() or {}
    source = Path(str(plan.get("source", run.name))).name
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
    loss, ndcg, hit_rate = event.get("loss"), event["ndcg@10"], event.get("hr@10")
    return CurveValidation(str(event["stage"]), event["epoch"], minutes, loss, ndcg, hit_rate)


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
    for what, one, two in (("users", a.users, b.users), ("targets", a.targets, b.targets)):
        if not np.array_equal(one, two):
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
