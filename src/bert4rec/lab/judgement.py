"""The runs of a reproduction judged against what was published.

OUT/lab/                 a lab like any other: resumable, with a report of its own
OUT/reproduction.json    claims with verdicts, settings, seeds, budget, machine
OUT/curve.svg, .png      of reproductions that are curves
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bert4rec.durable import write_file
from bert4rec.evaluation.report import figure
from bert4rec.evaluation.text_tables import TextFormat, TextTable, escape_markdown
from bert4rec.lab.claims import (
    Claim,
    PublishedModel,
    Reproduction,
    TrainingLength,
    Verdict,
    judge_figure,
    judge_order,
    shortfall,
)
from bert4rec.lab.collect import FinishedRun, mean_estimates, mean_over_seeds, read_runs
from bert4rec.lab.lab_directory import LabRun, read_json
from bert4rec.lab.lab_result import LabFacts, MeanEstimate, MissingRun
from bert4rec.lab.report_text import interval, signed
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
    judgement = judge(reproduction, out)
    text = json.dumps(asdict(judgement), indent=1, ensure_ascii=False, allow_nan=False)
    write_file(out / "reproduction.json", text + "\n")
    if reproduction.curve_over is not None and judgement.curve:
        y_label = f"NDCG@10, {judgement.protocol}"
        write_curve(judgement.curve, reproduction.curve_over, y_label, out)
    return judgement


def judge(reproduction: Reproduction, out: Path) -> Judgement:
    runs = read_runs(out / "lab")
    judged = {
        each.name: _JudgedModel(reproduction, each, runs.finished.get(each.name, []), out / "lab", runs.facts)
        for each in reproduction.contenders
    }
    failed = {
        name: reason
        for name, each in judged.items()
        if (reason := _reason([run for run in runs.missing if run.name == name], each.runs))
    }
    points = [
        CurvePoint(each.about.at, each.mean("NDCG@10"), each.about.published.get("NDCG@10"))
        for each in judged.values()
        if each.about.at is not None and each.runs
    ]
    figures = [claim for each in judged.values() for claim in each.figure_claims()]
    return Judgement(
        name=reproduction.name,
        title=reproduction.title,
        source=reproduction.source,
        notes=reproduction.notes.strip(),
        protocol=reproduction.protocol,
        warnings=tuple(_other_data(reproduction, runs.facts.data)),
        claims=(*figures, *_order_claims(reproduction, judged)),
        failed=failed,
        curve=tuple(sorted(points, key=lambda point: point.at)),
        settings={name: found[0].settings for name, found in runs.finished.items()},
        lab=runs.facts,
    )


def _reason(missing: list[MissingRun], done: list[FinishedRun]) -> str | None:
    if errors := [f"seed {run.seed} failed: {run.error}" for run in missing if run.error]:
        return "; ".join(errors)
    return "not finished" if missing and not done else None


def _other_data(reproduction: Reproduction, data: dict[str, Any]) -> list[str]:
    """A warning when the data are not those of the published figures."""
    published = {"users": reproduction.n_users, "items": reproduction.n_items}
    return [
        f"this is not the published data: it has {data[f'n_{what}']:,} {what} instead of {n:,}"
        for what, n in published.items()
        if n is not None and data[f"n_{what}"] != n
    ]


@dataclass(frozen=True)
class _JudgedModel:
    """A contender with the runs that it has."""

    reproduction: Reproduction
    about: PublishedModel
    runs: list[FinishedRun]
    lab: Path
    facts: LabFacts

    def mean(self, metric: str, minus: _JudgedModel | None = None) -> MeanEstimate:
        """Of our runs, or of the paired difference to another contender's."""
        protocol = self.reproduction.protocol
        values = mean_over_seeds(self.runs, metric, protocol)
        if minus is not None:
            values = values - mean_over_seeds(minus.runs, metric, protocol)
        return mean_estimates(values[:, None], n_resamples=N_RESAMPLES)[0][0]

    def figure_claims(self) -> list[Claim]:
        claims = []
        for metric, published in self.about.published.items():
            ours = self.mean(metric) if self.runs else None
            tolerance = self.reproduction.tolerance.of(published)
            verdict = judge_figure(ours.value if ours else None, published, tolerance)
            source = self.about.source or self.reproduction.source
            says, names, notes = self.about.title, (self.about.name,), tuple(self.training_notes())
            claims.append(Claim(says, metric, published, tolerance, ours, verdict, names, source, notes))
        return claims

    def training_notes(self) -> list[str]:
        """About the shortest run, so that nothing looks better trained than it was."""
        if not self.runs:
            return []
        run = min(self.runs, key=lambda run: run.cost.epochs or 0)
        folder = LabRun(self.lab, self.about.name, run.seed)
        about = read_json(folder.folder / "about.json") or {}
        base = self.reproduction.base if self.about.recipe is None else None
        ours = TrainingLength(
            sequences=about.get("training", {}).get("sequences"),
            epochs=run.cost.epochs,
            planned_epochs=_epochs(folder.plan()),
            fitted_epochs=_epochs(folder.fitted()),
            is_stopped_by_clock=any(run.cost.stopped_by_clock for run in self.runs),
        )
        notes = shortfall(self.about.training or (base.training if base else None), ours)
        n_seeds = 1 if run.is_deterministic else len(self.facts.seeds)
        if len(self.runs) < n_seeds:
            notes = [f"{len(self.runs)} of {n_seeds} seeds", *notes]
        return [f"{self.about.title}: {note}" for note in notes]


def _epochs(content: dict[str, Any] | None) -> float | None:
    """Epochs of all stages together, in the settings of a plan."""
    return None if content is None else float(sum(s["epochs"] for s in content["config"]["stages"]))


def _order_claims(reproduction: Reproduction, judged: dict[str, _JudgedModel]) -> list[Claim]:
    claims = []
    for order in reproduction.order:
        for name in order.worse:
            better, worse = judged[order.better], judged[name]
            ours = better.mean(order.metric, worse) if better.runs and worse.runs else None
            above, below = (e.about.published.get(order.metric) for e in (better, worse))
            claims.append(
                Claim(
                    says=f"{better.about.title} > {worse.about.title}",
                    metric=order.metric,
                    published=None if above is None or below is None else above - below,
                    tolerance=None,
                    ours=ours,
                    verdict=judge_order(ours),
                    contenders=(order.better, name),
                    source=order.says,
                    notes=(*better.training_notes(), *worse.training_notes()),
                )
            )
    return claims


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
                claim.verdict + (by if claim.verdict == "miss" else "") + " *" * bool(claim.notes),
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
