"""The report of a lab: one JSON file that holds everything, and renderings of it.

`report.json` is the source of the others, so a report can be written again from it alone.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from bert4rec.durable import write_file
from bert4rec.evaluation.report import figure
from bert4rec.evaluation.text_tables import TextFormat, TextTable, one_line
from bert4rec.lab import report_text
from bert4rec.lab.collect import collect
from bert4rec.lab.lab_result import COMPARED, FULL, RANKED_BY, REPORTED, LabResult
from bert4rec.lab.report_text import holm_p, interval, row_notes, signed, span

WIDE = 130  # characters of a terminal for all columns
COSTS: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("training", "mean over seeds, validation included", "training_seconds", report_text.duration),
    ("epochs", "mean over seeds", "epochs", lambda number: f"{number:.1f}".removesuffix(".0")),
    ("parameters", "number of learned parameters", "n_parameters", report_text.count),
    ("memory", "peak of the training process", "peak_memory_mb", report_text.memory),
    ("users/s", "users ranked per second, ten items each", "scoring_users_per_second", report_text.count),
)
LEFT_OUT = ("seeds", *(name for name, *_ in COSTS))  # on a narrower one


def write_report(lab_dir: Path) -> LabResult:
    """Collect a lab and write `report.json`, `.csv` and `.html` into its directory."""
    result = collect(lab_dir)
    render(result, lab_dir)
    return result


def render(result: LabResult, directory: Path) -> None:
    """All three files, each whole or as it was before; `result` may come from `report.json`."""
    contents = {"report.json": result.to_json(), "report.csv": to_csv(result), "report.html": to_html(result)}
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_file(directory / name, content)


class ReportCell(NamedTuple):
    text: str
    number: float | None  # to sort by
    detail: str = ""  # smaller, beside or below


class ReportColumn(NamedTuple):
    name: str
    meaning: str
    cells: list[ReportCell]  # of the models, in the order of the result


def columns(result: LabResult) -> list[ReportColumn]:
    """The table of all models, best first."""
    models = result.models
    titles = [ReportCell(one_line(m.title), i, "; ".join(row_notes(result, m))) for i, m in enumerate(models)]
    hits = [model.figures[FULL]["HR@10"].value for model in models]
    scores = [ReportCell(figure(m.score.value), m.score.value, interval(m.score)) for m in models]
    ranges = [model.seed_range(RANKED_BY) for model in models]
    seeds = [ReportCell(span(*ends), ends[1] - ends[0]) if ends else ReportCell("one seed", None) for ends in ranges]
    to_best = [model.differences.get(RANKED_BY) for model in models]
    differences = [
        ReportCell(signed(d.value), d.value, holm_p(result, d)) if d else ReportCell("best", 0.0) for d in to_best
    ]
    found = [
        ReportColumn("model", "and what is different in its row", titles),
        ReportColumn("HR@10", "share of users whose item is in the top ten of all items", _cells(hits, figure)),
        ReportColumn("NDCG@10", "over all items, with its 95 % interval over users", scores),
        *([ReportColumn("seeds", "lowest and highest NDCG@10 of a seed", seeds)] if any(ranges) else []),
        ReportColumn("vs best", "NDCG@10 minus that of the best model, Holm-corrected p-value", differences),
    ]
    for protocol in result.protocols:
        if protocol != FULL:
            sampled = [model.figures[protocol][RANKED_BY].value for model in models]
            meaning = f"among {report_text.protocol_title(result, protocol)}: see the cautions"
            name = f"NDCG@10 {protocol[:3]}-{result.n_negatives}"
            found.append(ReportColumn(name, meaning, _cells(sampled, figure)))
    for name, meaning, of_run, write in COSTS:
        found.append(ReportColumn(name, meaning, _cells([model.mean_cost(of_run) for model in models], write)))
    return found


def _cells(values: Sequence[float | None], write: Callable[[float], str]) -> list[ReportCell]:
    return [ReportCell("–" if value is None else write(value), value) for value in values]


def text_table(result: LabResult, left_out: tuple[str, ...] = ()) -> TextTable:
    shown = [column for column in columns(result) if column.name not in left_out]
    lines = ([f"{cell.text}\n{cell.detail}".strip() for cell in column.cells] for column in shown)
    return TextTable([column.name for column in shown], list(zip(*lines, strict=True)))


def terminal_table(result: LabResult, width: int | None = None) -> Table:
    """For a terminal of this width, by default that of standard output."""
    left_out = LEFT_OUT if (width or Console().width) < WIDE else ()
    notes = [
        f"{result.n_users:,} users; intervals cover the choice of users, not training randomness.",
        "p-values: paired bootstrap against the best, two-sided, corrected by Holm.",
    ]
    if result.missing:
        n_failed, n_unfinished = len(result.failed), len(result.unfinished)
        notes.append(f"Not in the table: {n_failed} failed and {n_unfinished} unfinished runs.")
    if left_out:
        notes.append(f"Too wide to show here: {', '.join(left_out)} (all in report.html).")
    title = f"{result.facts.data['name']}, {result.facts.split}"
    return text_table(result, left_out).to_terminal(title, notes)


def to_text(result: LabResult, text_format: TextFormat) -> str:
    """The table of all models and the differences to the best, as Markdown or LaTeX."""
    names = [f"{m} {what}" for m in COMPARED for what in ("difference", "p, Holm")]
    others = []
    for model in result.models[1:]:
        found = [model.differences[metric] for metric in COMPARED]
        pairs = ([f"{signed(d.value)}\n{interval(d)}", holm_p(result, d)] for d in found)
        others.append([model.title, *(cell for pair in pairs for cell in pair)])
    tables = [text_table(result), TextTable(["model", *names], others)]
    return "\n".join(table.to_text(text_format) for table in tables if table.rows)


def to_csv(result: LabResult) -> str:
    """Long and complete: one line per model, seed (or "mean"), protocol and metric."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("model", "seed", "protocol", "metric", "value", "low", "high"))
    for model in result.models:
        for protocol in result.protocols:
            for metric in REPORTED:
                found = (model.figures[protocol][metric], *model.seed_figures[protocol][metric])
                for seed, each in zip(("mean", *model.seeds), found, strict=True):
                    line = (model.name, seed, protocol, metric, each.value, each.low, each.high)
                    writer.writerow(line)
    return text.getvalue()


def to_html(result: LabResult) -> str:
    """One page that needs nothing else: no server, no network, no file beside it."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined

        from bert4rec.lab.charts import SHORTEST_MINUTES, all_charts
    except ImportError as error:
        raise ValueError(f"{error.name} is needed for the HTML report: pip install 'bert4rec[lab]'") from None
    loader = PackageLoader("bert4rec.lab")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    best_of_bins = {
        name: [max(values) or 1.0 for values in zip(*(model.by_bin[name] for model in result.models), strict=True)]
        for name in result.bins
    }
    page = environment.get_template("report.html").render(
        result=result,
        title=one_line(f"Lab: {result.facts.data['name']}"),
        columns=columns(result),
        charts=all_charts(result),
        best_of_bins=best_of_bins,
        shortest_minutes=SHORTEST_MINUTES,
        reported=REPORTED,
        compared=COMPARED,
        text=report_text,
        figure=figure,
        one_line=one_line,
    )
    # Only the page's own script may run, whatever a title contains.
    script = re.search(r"<script>(.*)</script>", page, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode("utf-8")).digest()).decode("ascii")
    return page.replace("SCRIPT-HASH", f"sha256-{digest}", 1)
