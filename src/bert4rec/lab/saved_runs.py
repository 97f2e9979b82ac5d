"""The runs of a lab directory as they lie on disk, each whole or with why it is not there.

A run is finished when it has a `cost.json`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert4rec.config import Config
from bert4rec.evaluation.result import Evaluation
from bert4rec.lab.again import planned
from bert4rec.lab.contenders import WITHOUT_CHANCE
from bert4rec.lab.plan import FORMAT_VERSION, LAB_FILE
from bert4rec.lab.result import FULL, Cost, Facts, MissingRun, Validation

COST_FILE, LOG_FILE, RUNS = "cost.json", "log.jsonl", "runs"


@dataclass(frozen=True)
class FinishedRun:
    path: Path
    seed: int
    title: str
    settings: dict[str, Any]
    is_without_chance: bool  # one seed is all there is
    cost: Cost
    curve: tuple[Validation, ...]
    evaluation: Evaluation  # in the order of users


def read_facts(lab_dir: Path) -> Facts:
    path = lab_dir / LAB_FILE
    if not path.is_file():
        raise ValueError(f"{lab_dir} is not a lab: {LAB_FILE} is missing; start with bert4rec lab")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["format_version"]
        settings = _unusual(content.get("settings") or {})
        facts = Facts(
            data=_data_facts(content["data"]),
            settings=settings,
            split=str(content["split"]),
            models=tuple(map(str, content["models"])),
            seeds=tuple(map(int, content["seeds"])),
            budget_minutes=_number(content["budget_minutes"]),
            machine=dict(content["machine"]),
            versions={str(name): str(v) for name, v in content["versions"].items()},
            created=str(content["created"]),
            plans={
                name: planned(lab_dir / RUNS / name, settings)
                for name in map(str, content["models"])
            },
            reproduction=content.get("reproduction"),
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): run the lab again") from None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version}, this program reads {FORMAT_VERSION}: "
            "run the lab again"
        )
    return facts


def _data_facts(content: dict[str, Any]) -> dict[str, Any]:
    """Without where the data lie: a path is about one person's machine."""
    named = {key: content.get(key) for key in ("n_users", "n_items", "n_interactions")}
    return (
        {"name": Path(str(content["name"])).name}
        | named
        | {"fingerprint": str(content["fingerprint"])}
    )


def _unusual(settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`section.key` -> value of what all models share and what differs from the defaults."""
    usual = Config().model_dump(mode="json")
    return {
        f"{section}.{key}": value
        for section, values in settings.items()
        for key, value in values.items()
        if usual.get(section, {}).get(key, ...) != value
    }


def expected_runs(lab_dir: Path, facts: Facts) -> list[tuple[str, int]]:
    """What `lab.json` names, and whatever else is there.

    Further seeds of a model without chance would be copies of the first: none is expected.
    """
    expected: dict[tuple[str, int], None] = {}
    for name in facts.models:
        first = lab_dir / RUNS / name / f"seed-{min(facts.seeds, default=0)}"
        n_seeds = 1 if _is_without_chance(first, name) else len(facts.seeds)
        expected |= dict.fromkeys((name, seed) for seed in sorted(facts.seeds)[:n_seeds])
    found = []
    for path in (lab_dir / RUNS).glob("*/seed-*"):
        seed = re.fullmatch(r"seed-(\d+)", path.name)
        if seed and not path.parent.name.startswith("."):
            found.append((path.parent.name, int(seed[1])))
    return list(expected | dict.fromkeys(sorted(found)))


def _is_without_chance(path: Path, name: str) -> bool:
    """By the run's own settings, or by the contender's name while there are none."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        name = config["model"]["name"]
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return name in WITHOUT_CHANCE


def read_run(lab_dir: Path, name: str, seed: int) -> FinishedRun | MissingRun:
    path = lab_dir / RUNS / name / f"seed-{seed}"
    title = _planned_title(path.parent, name)
    if not (path / COST_FILE).is_file():
        return MissingRun(name, title, seed, None)
    try:
        content = json.loads((path / COST_FILE).read_text(encoding="utf-8"))
        title = str(content.get("title") or title)
        if content["status"] != "done":
            error = str(content.get("error") or "no reason is known")
            return MissingRun(name, title, seed, _without_paths(error, lab_dir))
        n_parameters = _number(content.get("n_parameters"))
        cost = Cost(
            training_seconds=_number(content.get("training_seconds")),
            epochs=_number(content.get("epochs")),
            budget_minutes=_number(content.get("budget_minutes")),
            n_parameters=None if n_parameters is None else int(n_parameters),
            peak_memory_mb=_number(content.get("peak_memory_mb")),
            scoring_users_per_second=_number(content.get("scoring_users_per_second")),
            stopped_by_clock=content.get("stopped_by_clock"),  # None: an older lab
        )
        settings = dict(content.get("settings") or {})
        for own in ("training.seed", "training.minutes"):  # the lab's: its seeds, its clock
            settings.pop(own, None)
        is_alone = _is_without_chance(path, name)
        curve, evaluation = _curve(path), _evaluation(path)
        return FinishedRun(path, seed, title, settings, is_alone, cost, curve, evaluation)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        # One run that cannot be read must not hide the others; its place says why it is not there.
        reason = _without_paths(f"its result cannot be read: {error}", lab_dir)
        return MissingRun(name, title, seed, reason)


def _planned_title(folder: Path, name: str) -> str:
    """The title of a model that has no result to say it."""
    try:
        return str(json.loads((folder / "plan.json").read_text(encoding="utf-8"))["title"])
    except (OSError, ValueError, LookupError, TypeError):
        return name


def _without_paths(error: str, lab_dir: Path) -> str:
    """Where files lie is about one person's machine: only their names are told."""
    for path in (lab_dir.resolve(), lab_dir, Path.home()):  # whole: names may have spaces
        if len(str(path)) > 1:
            error = error.replace(str(path), "…")
    return re.sub(r"(?<![\w./])/(?:[^\s/'\":]+/)+", "…/", error)


def _number(value: Any) -> float | None:
    """JSON has no NaN or infinity: what is not finite is not known."""
    if value is None or not math.isfinite(value):
        return None
    return float(value)


def _curve(path: Path) -> tuple[Validation, ...]:
    if not (path / LOG_FILE).is_file():
        return ()
    points = []
    for line in (path / LOG_FILE).read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if _number(event.get("ndcg@10")) is None:
            continue  # something else worth a line in a log
        minutes = round(event["seconds"] / 60, 4)
        loss, hit_rate = (_number(event.get(key)) for key in ("loss", "hr@10"))
        stage, epoch = str(event.get("stage", "")), int(event.get("epoch", 0))
        points.append(Validation(stage, epoch, minutes, loss, event["ndcg@10"], hit_rate))
    return tuple(points)


def _evaluation(path: Path) -> Evaluation:
    found = Evaluation.load(path)
    if FULL not in found.ranks:
        raise ValueError(f"{path} was not evaluated over all items: evaluate it again")
    if len(np.unique(found.users)) != len(found.users):
        raise ValueError(f"{path} has users in more than one row: a lab needs one question a user")
    order = np.argsort(found.users)
    return Evaluation(
        found.users[order],
        found.targets[order],
        found.history_lengths[order],
        found.target_counts[order],
        {protocol: ranks[order] for protocol, ranks in found.ranks.items()},
        found.metrics,
        found.extras,
    )


def check_same_questions(run: FinishedRun, other: FinishedRun) -> None:
    """Figures from different questions say nothing about which model is better."""
    a, b = run.evaluation, other.evaluation
    for what, mine, yours in (("users", a.users, b.users), ("targets", a.targets, b.targets)):
        if not np.array_equal(mine, yours):
            raise ValueError(
                f"{run.path} and {other.path} answered for different {what}: they used different "
                "data or splits and cannot stand in one table; run the lab again in a new directory"
            )
    one, two = _candidates(a), _candidates(b)
    for what in one:
        if one[what] != two[what]:
            raise ValueError(
                f"{what} is {one[what]} in {run.path} and {two[what]} in {other.path}: the "
                "targets were ranked among different items; evaluate both the same way"
            )


def _candidates(evaluation: Evaluation) -> dict[str, Any]:
    """Whatever decides which items a target was ranked among."""
    known = evaluation.extras.get("settings", {}) | {"n_items": evaluation.extras.get("n_items")}
    return {name: known.get(name) for name in ("n_items", "exclude_seen", "n_negatives", "seed")}
