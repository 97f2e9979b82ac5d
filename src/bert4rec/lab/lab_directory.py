"""A lab on disk: what is compared on which data, what is done, and what is still to do.

    lab.json                  the data, the models, the seeds, the machine
    runs/NAME/plan.json       a contender's settings and budget
    runs/NAME/epochs.json     the settings that fit the budget, once they are known, for all seeds
    runs/NAME/seed-0/         a trained model, its evaluation, log.jsonl, output.txt and cost.json

`cost.json` is written last: a run is finished when it is there. Finished runs are kept when the
command is given again, and never mixed with runs on other data or with other settings.
"""

from __future__ import annotations

import json
import os
import platform
import re
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
from bert4rec.lab.contenders import DETERMINISTIC, LAB_SECTIONS, Contender, flat_settings, settings_of, table_order

FORMAT_VERSION = 2
LAB_FILE = "lab.json"
STUDY_FILE = "study.json"  # of `bert4rec tune`, whose trials are runs as well


@dataclass(frozen=True)
class LabRun:
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

    def plan(self) -> dict[str, Any] | None:
        return read_json(self.contender / "plan.json")

    def fitted(self) -> dict[str, Any] | None:
        """The settings that fit the budget, once they are known."""
        return read_json(self.contender / "epochs.json")

    def cost(self) -> dict[str, Any] | None:
        """The facts of a finished run, done or failed; None before that."""
        return read_json(self.folder / "cost.json")

    def is_done(self) -> bool:
        cost = self.cost()
        return cost is not None and cost["status"] == "done"

    def is_deterministic(self) -> bool:
        """Whether every seed gives the same model, so that one run is enough."""
        plan = self.plan() or {}
        return plan.get("config", {}).get("model", {}).get("name", self.name) in DETERMINISTIC

    def events(self) -> list[dict[str, Any]]:
        """The whole lines of `log.jsonl`."""
        log = self.folder / "log.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines(True) if log.exists() else ()
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"


@dataclass(frozen=True)
class LabTerms:
    """How the runs of a lab are made."""

    data_name: str
    n_seeds: int = 3
    minutes: float = 20.0  # budget of one training
    overwrite: bool = False
    reproduction: str | None = None  # which one the lab belongs to, if any


def plan_lab(
    directory: Path, sequences: Sequences, contenders: Sequence[Contender], terms: LabTerms
) -> tuple[list[LabRun], list[str]]:
    """Begin a lab or add to one: the runs of this command, finished or not, and notes on those that are kept.

    Runs on other data or settings are refused, or set aside.
    """
    if terms.n_seeds < 1:
        raise ValueError(f"--seeds is {terms.n_seeds}: use one or more")
    known = read_lab(directory)
    config = contenders[0].config.model_dump(mode="json")
    shared = {section: config[section] for section in LAB_SECTIONS}
    if known:
        differing = differing_settings(known["shared"], shared)
        if known["data"]["fingerprint"] != sequences.fingerprint:
            differing = ["the data", *differing]
        if differing and not terms.overwrite:
            raise ValueError(
                f"{directory} is a lab with other data or settings (different: "
                f"{', '.join(differing)}): give another --out, or --overwrite to begin it anew"
            )
        if differing:
            _set_aside(directory / "runs")
            known = None
    notes = _write_plans(directory, contenders, terms)
    before = known["facts"] if known else {"models": [], "seeds": []}
    settings = settings_of(contenders[0].config).items()
    facts = {
        "settings": {name: value for name, value in settings if name.split(".")[0] in LAB_SECTIONS},
        "split": shared["data"]["split"],
        "models": table_order([*before["models"], *(each.name for each in contenders)]),
        "seeds": sorted({*before["seeds"], *range(terms.n_seeds)}),
        "budget_minutes": terms.minutes,
        "machine": machine(),
        "versions": {"bert4rec": __version__, "torch": version("torch"), "python": platform.python_version()},
        "created": before.get("created", datetime.now(UTC).isoformat(timespec="seconds")),
        "reproduction": terms.reproduction,
    }
    data = data_facts(directory, sequences, terms.data_name)
    write_json(directory / LAB_FILE, {"format_version": FORMAT_VERSION, "shared": shared, "facts": facts, "data": data})
    return runs_of(directory, [each.name for each in contenders], range(terms.n_seeds)), notes


def runs_of(lab: Path, names: Sequence[str], seeds: Sequence[int]) -> list[LabRun]:
    """All models with the first seed, then with the second: a whole table is there early."""
    runs = [LabRun(lab, name, seed) for seed in seeds for name in names]
    return [run for run in runs if run.seed == seeds[0] or not run.is_deterministic()]


def read_lab(directory: Path) -> dict[str, Any] | None:
    """`lab.json`, None for an empty directory; a ValueError for a directory of something else."""
    known = read_json(directory / LAB_FILE)
    if known is None:
        there = {path.name for path in directory.glob("*") if not path.name.startswith(f".{LAB_FILE}.")}
        if there - {LOCK, "data", "runs"}:  # all that an interrupted start may leave
            raise ValueError(f"{directory} is not empty and not a lab: give another --out")
    elif known["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{directory} is a lab of format version {known['format_version']}, this program "
            f"reads {FORMAT_VERSION}: give another --out"
        )
    return known


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): delete it and give the command again") from None
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(content, indent=2) + "\n")


def differing_settings(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    one, two = flat_settings(before), flat_settings(now)
    return [key for key in sorted(one.keys() | two.keys()) if one.get(key) != two.get(key)]


def _set_aside(runs: Path) -> None:
    """Runs may have taken days: they are left for the user to delete."""
    if runs.exists():
        names = (f"runs.old{number}" for number in ("", *range(2, 1000)))
        runs.rename(next(p for name in names if not (p := runs.with_name(name)).exists()))


def _write_plans(directory: Path, contenders: Sequence[Contender], terms: LabTerms) -> list[str]:
    """A plan for each contender that has none or an outdated one; notes about those that are kept."""
    outdated, notes, refused = [], [], []
    for contender in contenders:
        name, folder = contender.name, directory / "runs" / contender.name
        plan = read_json(folder / "plan.json")
        if plan is None:
            continue
        differing = differing_settings(plan["config"], contender.config.model_dump(mode="json"))
        results = (*folder.glob("seed-*/manifest.json"), *folder.glob("seed-*/checkpoints/[0-9]*"))
        if terms.overwrite or not results:
            outdated.append(folder)
        elif differing:
            refused.append(f"{name} ({', '.join(differing)})")
        elif (minutes := plan["budget_minutes"]) != terms.minutes:
            notes.append(f"{name} keeps the budget that it was begun with, {minutes:.3g} min")
    if refused:
        raise ValueError(
            f"{directory} holds runs with other settings: {'; '.join(refused)}. Give another "
            "--out, or --overwrite to replace the runs of the models named"
        )
    for folder in outdated:
        shutil.rmtree(folder)
    for contender in contenders:
        path = directory / "runs" / contender.name / "plan.json"
        if not path.exists():
            about = {name: getattr(contender, name) for name in ("title", "source", "overrides")}
            config = contender.config.model_dump(mode="json")
            write_json(path, {**about, "budget_minutes": terms.minutes, "config": config})
    return notes


def data_facts(directory: Path, sequences: Sequences, name: str) -> dict[str, Any]:
    """Where the processes of the runs find the data; data made in memory are saved for them."""
    if sequences.directory is None:
        sequences.save(directory / "data")
        sequences.directory = (directory / "data").resolve()
    return {
        "name": Path(name).name,
        "n_users": sequences.n_users,
        "n_items": sequences.n_items,
        "n_interactions": sequences.n_interactions,
        "fingerprint": sequences.fingerprint,
        "directory": str(sequences.directory),
    }


def machine() -> dict[str, Any]:
    """Which machine this is: times and memory mean nothing without it."""
    cpu, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    memory = None
    if info.is_file():
        named = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE)
        cpu = named[1].strip() if named else cpu
    if "SC_PHYS_PAGES" in os.sysconf_names:
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": cpu, "cores": cores, "memory_gb": memory}
