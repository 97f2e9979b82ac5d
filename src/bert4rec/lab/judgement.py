"""The runs of a reproduction judged against what was published.

OUT/lab/                 a lab like any other: resumable, with a report of its own
OUT/reproduction.json    claims with verdicts, settings, seeds, budget, machine
OUT/curve.svg, .png      of reproductions that are curves
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from bert4rec.durable import write_file
from bert4rec.evaluation.report import figure
from bert4rec.evaluation.text_tables import TextFormat, TextTable, escape_markdown
from bert4rec.lab.claims import Claim, PublishedModel, Reproduction, Verdict, judge, published_claims, shortfall
from bert4rec.lab.collect import LabRuns, mean_estimates, mean_over_seeds, read_runs
from bert4rec.lab.lab_directory import LabRun, read_json
from bert4rec.lab.lab_result import LabFacts, MeanEstimate
from bert4rec.lab.report_text import STOPPED_BY_CLOCK, interval, signed
from bert4rec.lab.reproduction_figures import CurvePoint, write_curve

FORMAT_VERSION = 2
N_RESAMPLES = 2000
VERDICTS: tuple[Verdict, ...] = ("pass", "miss", "unclear", "not run")
COLUMNS = ("claim", "metric", "published", "ours", "difference", "tolerance", "verdict")


@dataclass(frozen=True)
class Judgement:
    """The content of `reproduction.json`; aggregates only, nothing about one user or item."""

    name: str
    title: str
    source: str
    notes: str
    protocol: str
    warnings: tuple[str, ...]
    claims: tuple[Claim, ...]
    failed: dict[str, str]  # contender → why it, or a seed of it, has no result
    curve: tuple[CurvePoint, ...]
    settings: dict[str, dict[str, Any]]  # contender → those that differ from the defaults
    lab: LabFacts
    format_version: int = FORMAT_VERSION

    @property
    def is_missed(self) -> bool:
        return bool(self.failed) or any(claim.verdict == "miss" for claim in self.claims)

    @property
    def summary(self) -> str:
        found = [claim.verdict for claim in self.claims]
        counted = [f"{found.count(each)} {each}" for each in VERDICTS if each in found]
        return f"Claims ({len(found)}): {', '.join(counted)}" if found else "No claims to judge"


def write_judgement(reproduction: Reproduction, out: Path) -> Judgement:
    """Judge the runs that are there, and write `reproduction.json` and the curve."""
    judgement = judge_runs(reproduction, out / "lab")
    text = json.dumps(asdict(judgement), indent=1, ensure_ascii=False, allow_nan=False)
    write_file(out / "reproduction.json", text + "\n")
    if reproduction.curve_over is not None and judgement.curve:
        write_curve(judgement.curve, reproduction.curve_over, f"NDCG@10, {judgement.protocol}", out)
    return judgement


def judge_runs(reproduction: Reproduction, lab: Path) -> Judgement:
    found, models = read_runs(lab), reproduction.contenders
    notes = {model.name: _training_notes(model, lab, found) for model in models if model.name in found.finished}

    def mean(metric: str, *names: str) -> MeanEstimate | None:
        """Of our runs of a contender, or of the paired difference of two; None if one was not run."""
        if not found.finished.keys() >= set(names):
            return None
        first, *others = (mean_over_seeds(found.finished[name], metric, reproduction.protocol) for name in names)
        return mean_estimates((first - sum(others))[:, None], n_resamples=N_RESAMPLES)[0][0]

    points = [
        CurvePoint(model.at, ours, model.published.get("NDCG@10"))
        for model in models
        if model.at is not None and (ours := mean("NDCG@10", model.name)) is not None
    ]
    return Judgement(
        name=reproduction.name,
        title=reproduction.title,
        source=reproduction.source,
        notes=reproduction.notes.strip(),
        protocol=reproduction.protocol,
        warnings=tuple(_other_data(reproduction, found.facts.data)),
        claims=tuple(
            judge(
                claim,
                mean(claim.metric, *claim.contenders),
                chain.from_iterable(notes.get(name, ()) for name in claim.contenders),
            )
            for claim in published_claims(reproduction)
        ),
        failed={model.name: reason for model in models if (reason := _why_missing(model.name, found))},
        curve=tuple(sorted(points, key=lambda point: point.at)),
        settings={name: runs[0].settings for name, runs in found.finished.items()},
        lab=found.facts,
    )


def _why_missing(name: str, found: LabRuns) -> str:
    missing = [run for run in found.missing if run.name == name]
    errors = "; ".join(f"seed {run.seed} failed: {run.error}" for run in missing if run.error)
    return errors or "not finished" * (bool(missing) and name not in found.finished)


def _other_data(reproduction: Reproduction, data: dict[str, Any]) -> list[str]:
    """A warning when the data are not those of the published figures."""
    published = {"users": reproduction.n_users, "items": reproduction.n_items}
    return [
        f"this is not the published data: it has {data[f'n_{what}']:,} {what} instead of {n:,}"
        for what, n in published.items()
        if n is not None and data[f"n_{what}"] != n
    ]


def _training_notes(model: PublishedModel, lab: Path, found: LabRuns) -> list[str]:
    """About the shortest run, so that nothing looks better trained than it was."""
    runs = found.finished[model.name]
    run = min(runs, key=lambda run: run.cost.epochs or 0)
    folder = LabRun(lab, model.name, run.seed)
    about = read_json(folder.folder / "about.json") or {}
    planned, fitted = (
        sum(stage["epochs"] for stage in content["config"]["stages"]) if content else 0
        for content in (folder.plan(), folder.fitted())
    )
    n_seeds = 1 if run.is_deterministic else len(found.facts.seeds)
    notes = [f"{len(runs)} of {n_seeds} seeds"] if len(runs) < n_seeds else []
    notes += shortfall(model.training, about.get("training", {}).get("sequences"), run.cost.epochs, planned, fitted)
    notes += [STOPPED_BY_CLOCK] if any(run.cost.stopped_by_clock for run in runs) else []
    return [f"{model.title}: {note}" for note in notes]


def verdict_table(judgement: Judgement) -> TextTable:
    """Published figures and orders beside ours; a star points to the remarks."""
    rows = []
    for claim in judgement.claims:
        if claim.ours is None:
            continue
        write = figure if claim.tolerance is not None else signed
        by = f", {figure(claim.missed_by)} outside" if claim.missed_by else ""
        rows.append(
            (
                claim.says,
                claim.metric,
                "–" if claim.published is None else write(claim.published),
                f"{write(claim.ours.value)}\n{interval(claim.ours)}",
                "–" if claim.published is None else signed(claim.ours.value - claim.published),
                "–" if claim.tolerance is None else figure(claim.tolerance),
                claim.verdict + by + " *" * bool(claim.notes),
            )
        )
    return TextTable(COLUMNS, rows)


def remarks(judgement: Judgement) -> list[str]:
    """What to know beside the table: other data, short trainings, missing runs."""
    lines = [f"Warning: {warning}." for warning in judgement.warnings]
    lines += [f"{note}." for note in dict.fromkeys(n for c in judgement.claims for n in c.notes)]
    lines += [f"{name}: {why}." for name, why in judgement.failed.items()]
    names = {name for claim in judgement.claims for name in claim.contenders}
    if missing := sorted(names - judgement.settings.keys()):
        lines.append(f"Not run, so that their claims are open: {', '.join(missing)}.")
    if len(judgement.lab.seeds) == 1:
        lines.append(
            "One seed: every figure and interval describes a single training. A difference "
            "smaller than that between two seeds may be chance; --seeds 3 shows it."
        )
    return lines


def to_text(judgement: Judgement, text_format: TextFormat) -> str:
    """The verdicts as a table and, in Markdown, the title and remarks around it."""
    table = verdict_table(judgement).to_text(text_format)
    if text_format == "latex":
        return table
    about = [f"Published: {judgement.source}.", *judgement.notes.split("\n\n"), judgement.summary]
    lines = "\n".join(f"- {escape_markdown(line)}" for line in remarks(judgement))
    title = f"# {escape_markdown(judgement.title)}"
    return "\n\n".join([title, *map(escape_markdown, about), table + "\n" + lines]) + "\n"
