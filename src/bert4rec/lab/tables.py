"""The result as a table: the columns and rows that every format shows, and CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass

from bert4rec.evaluation.report import figure
from bert4rec.lab.result import FULL, RANKED_BY, REPORTED, LabResult, ModelResult
from bert4rec.lab.words import (
    count,
    duration,
    holm_p,
    interval,
    memory,
    plain,
    protocol_title,
    row_notes,
    signed,
    span,
)


@dataclass(frozen=True)
class Cell:
    text: str
    detail: str = ""  # smaller, beside or below
    number: float | None = None  # what a reader who sorts by this column means


@dataclass(frozen=True)
class Column:
    name: str
    meaning: str


def columns(result: LabResult) -> list[Column]:
    n = result.n_negatives
    sampled = [
        Column(f"NDCG@10 {name[:3]}-{n}", f"among {protocol_title(result, name)}: see the cautions")
        for name in result.protocols
        if name != FULL
    ]
    return [
        Column("model", "with what sets its row apart"),
        Column("HR@10", "share of users whose item is in the first ten of all items"),
        Column("NDCG@10", "over all items, with its 95 % interval over users"),
        *([Column("seeds", "lowest and highest NDCG@10 of a seed")] if has_seeds(result) else []),
        Column("vs best", "NDCG@10 minus that of the best model, with Holm-corrected p-value"),
        *sampled,
        Column("training", "mean over seeds, validation included"),
        Column("epochs", "mean over seeds"),
        Column("parameters", "numbers that were learned"),
        Column("memory", "peak of the training process"),
        Column("users/s", "users that are ranked in a second, ten items each"),
    ]


def has_seeds(result: LabResult) -> bool:
    return any(len(model.seeds) > 1 for model in result.models)


def rows(result: LabResult) -> list[list[Cell]]:
    """A row a model in the order of the result, a cell for each of `columns`."""
    return [_row(result, place, model) for place, model in enumerate(result.models)]


def _row(result: LabResult, place: int, model: ModelResult) -> list[Cell]:
    score, hits = model.score, model.figures[FULL]["HR@10"]
    cells = [
        Cell(plain(model.title), "; ".join(row_notes(result, model)), place),
        Cell(figure(hits.value), "", hits.value),
        Cell(figure(score.value), interval(score), score.value),
    ]
    if has_seeds(result):
        spread = model.seed_range(RANKED_BY)
        text = span(*spread) if spread else "one seed"
        cells.append(Cell(text, "", spread[1] - spread[0] if spread else None))
    difference = model.differences.get(RANKED_BY)
    if difference is None:
        cells.append(Cell("best", "", 0.0))
    else:
        p = holm_p(result, difference)
        cells.append(Cell(signed(difference.value), p, difference.value))
    for protocol in result.protocols:
        if protocol != FULL:
            value = model.figures[protocol][RANKED_BY].value
            cells.append(Cell(figure(value), "", value))
    for name, write in (
        ("training_seconds", duration),
        ("epochs", _epochs),
        ("n_parameters", count),
        ("peak_memory_mb", memory),
        ("scoring_users_per_second", count),
    ):
        cost = model.mean_cost(name)
        cells.append(Cell(write(cost), "", cost))
    return cells


def _epochs(number: float | None) -> str:
    return "–" if number is None else f"{number:.1f}".removesuffix(".0")


def to_csv(result: LabResult) -> str:
    """Long and complete: a line a model, seed (or "mean"), protocol and metric."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("model", "seed", "protocol", "metric", "value", "low", "high"))
    for model in result.models:
        for protocol in result.protocols:
            for metric in REPORTED:
                mean = model.figures[protocol][metric]
                of_seeds = model.seed_figures[protocol][metric]
                seeds = zip(map(str, model.seeds), of_seeds, strict=True)
                for seed, found in (("mean", mean), *seeds):
                    line = (model.name, seed, protocol, metric, found.value, found.low, found.high)
                    writer.writerow(line)
    return text.getvalue()
