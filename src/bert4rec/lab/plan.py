"""A lab on disk: what is compared on which data, what is done, and what is still to do.

    lab.json                  the data, the models, the seeds, the machine
    runs/NAME/plan.json       a contender's settings and budget
    runs/NAME/epochs.json     the settings that fit the budget, once they are known, for all seeds
    runs/NAME/seed-0/         a trained model, its evaluation, log.jsonl, output.txt and cost.json

`cost.json` is written last: a run is over when it is there. What is done is kept when the command
is given again, and it is never mixed with runs on other data or with other settings.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bert4rec import __version__
from bert4rec.data.sequences import Sequences
from bert4rec.durable import LOCK, write_file
from bert4rec.lab.contenders import LAB_SECTIONS, Contender, settings_of, table_order
from bert4rec.lab.machine import machine

FORMAT_VERSION = 1
LAB_FILE = "lab.json"


@dataclass(frozen=True)
class Run:
    """One contender with one seed."""

    lab: Path
    name: str
    seed: int

    @property
    def contender(self) -> Path:
        return self.lab / "runs" / self.name

    @property
    def folder(self) -> Path:
        return self.contender / f"seed-{self.seed}"

    def cost(self) -> dict[str, Any] | None:
        """What is known of a run that is over; None before that."""
        return read_json(self.folder / "cost.json")

    def is_done(self) -> bool:
        cost = self.cost()
        return cost is not None and cost["status"] == "done"

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"


@dataclass(frozen=True)
class Lab:
    directory: Path
    runs: list[Run]  # those that were asked for, done or not
    notes: list[str]  # what a person should know about what was kept


def plan_lab(
    directory: Path,
    sequences: Sequences,
    contenders: Sequence[Contender],
    *,
    data_name: str,
    n_seeds: int = 3,
    minutes: float = 20.0,
    overwrite: bool = False,
    reproduction: str | None = None,
) -> Lab:
    """Begin a lab or add to one; what is there on other terms is refused, or put aside if asked.

    `reproduction` is the one that the lab belongs to, as `bert4rec reproduce` takes it.
    """
    if n_seeds < 1:
        raise ValueError(f"--seeds is {n_seeds}: use one or more")
    _check_models(contenders)
    known = read_lab(directory)
    shared = {s: contenders[0].config.model_dump(mode="json")[s] for s in LAB_SECTIONS}
    if known and (differing := _other_terms(known, sequences, shared)):
        if not overwrite:
            raise ValueError(
                f"{directory} is a lab on other terms (different: {', '.join(differing)}): give "
                "another --out, or --overwrite to begin it anew"
            )
        _put_aside(directory / "runs")
        known = None
    outdated, notes = _outdated(directory, contenders, minutes, overwrite)
    for name in outdated:
        shutil.rmtree(directory / "runs" / name)
    for contender in contenders:
        _write_plan(directory, contender, minutes)
    facts = _facts(directory, sequences, shared, data_name)
    before = known or {"models": [], "seeds": [], "created": facts["created"]}
    facts |= {
        "created": before["created"],
        "models": table_order(
            dict.fromkeys([*before["models"], *(contender.name for contender in contenders)])
        ),
        "seeds": sorted({*before["seeds"], *range(n_seeds)}),
        "budget_minutes": minutes,
        "reproduction": reproduction,
    }
    _write_json(directory / LAB_FILE, facts)
    # All contenders with the first seed, then with the second: a whole table is there early.
    runs = [
        Run(directory, contender.name, seed)
        for seed in range(n_seeds)
        for contender in contenders
        if seed in contender.seeds(n_seeds)
    ]
    return Lab(directory, runs, notes)


def _put_aside(runs: Path) -> None:
    """Runs on other terms may have taken days: they are left to a person to delete."""
    if runs.exists():
        names = (f"runs.old{number}" for number in ("", *range(2, 1000)))
        runs.rename(next(p for name in names if not (p := runs.with_name(name)).exists()))


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(content, indent=2) + "\n")


def _check_models(contenders: Sequence[Contender]) -> None:
    from bert4rec.models import MODELS  # loads torch

    for contender in contenders:
        if contender.config.model.name not in MODELS:
            raise ValueError(
                f"{contender.name}: model.name is {contender.config.model.name!r}: "
                f"choose one of {', '.join(MODELS)}"
            )


def read_lab(directory: Path) -> dict[str, Any] | None:
    """`lab.json`, None where nothing is; a ValueError where something else is."""
    known = read_json(directory / LAB_FILE)
    if known is None:
        there = {path.name for path in directory.iterdir()} if directory.exists() else set()
        there = {name for name in there if not name.startswith(f".{LAB_FILE}.")}
        if there - {LOCK, "data", "runs"}:  # all that a start that was cut short may leave
            raise ValueError(f"{directory} holds something else than a lab: give another --out")
        return None
    if known["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{directory} is a lab of format version {known['format_version']}, this program "
            f"reads {FORMAT_VERSION}: give another --out"
        )
    return known


def _other_terms(known: dict[str, Any], sequences: Sequences, shared: dict[str, Any]) -> list[str]:
    differing = [] if known["data"]["fingerprint"] == sequences.fingerprint else ["the data"]
    return differing + [
        f"{section}.{key}"
        for section, values in shared.items()
        for key, value in values.items()
        if known["settings"][section].get(key, value) != value
    ]


def _outdated(
    directory: Path, contenders: Sequence[Contender], minutes: float, overwrite: bool
) -> tuple[list[str], list[str]]:
    """Contenders whose folders have to go, and notes about those that stay as they were planned."""
    outdated, notes, refused = [], [], []
    for contender in contenders:
        folder = directory / "runs" / contender.name
        plan = read_json(folder / "plan.json")
        if plan is None:
            continue
        before, now = plan["settings"], settings_of(contender.config)
        differing = [
            key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)
        ]
        has_results = any(folder.glob("seed-*/manifest.json")) or any(
            folder.glob("seed-*/checkpoints/[0-9]*")
        )
        if overwrite or not has_results:
            outdated.append(contender.name)
        elif differing:
            refused.append(f"{contender.name} ({', '.join(differing)})")
        elif plan["budget_minutes"] != minutes:
            notes.append(
                f"{contender.name} keeps the budget that it was begun with, "
                f"{plan['budget_minutes']:.3g} min"
            )
    if refused:
        raise ValueError(
            f"{directory} holds runs with other settings: {'; '.join(refused)}. Give another "
            "--out, or --overwrite to replace the runs of the models named"
        )
    return outdated, notes


def _write_plan(directory: Path, contender: Contender, minutes: float) -> None:
    path = directory / "runs" / contender.name / "plan.json"
    if not path.exists():
        plan = {
            "title": contender.title,
            "source": contender.source,
            "overrides": list(contender.overrides),
            "budget_minutes": minutes,
            "settings": settings_of(contender.config),
            "config": contender.config.model_dump(mode="json"),
        }
        _write_json(path, plan)


def _facts(
    directory: Path, sequences: Sequences, shared: dict[str, Any], data_name: str
) -> dict[str, Any]:
    if sequences.directory is None:  # made in memory: the runs are other processes
        sequences.save(directory / "data")
        sequences.directory = (directory / "data").resolve()
    return {
        "format_version": FORMAT_VERSION,
        "data": {
            "name": data_name,
            "n_users": sequences.n_users,
            "n_items": sequences.n_items,
            "n_interactions": sequences.n_interactions,
            "fingerprint": sequences.fingerprint,
            "directory": str(sequences.directory),
        },
        "split": shared["data"]["split"],
        "settings": shared,
        "machine": machine(),
        "versions": {
            "bert4rec": __version__,
            "torch": version("torch"),
            "python": platform.python_version(),
        },
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
