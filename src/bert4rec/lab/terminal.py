"""The report as a table for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from bert4rec.lab.result import LabResult
from bert4rec.lab.tables import columns, rows
from bert4rec.lab.words import plain

LEFT_OUT_FIRST = ("parameters", "memory", "epochs", "users/s", "seeds", "training")
NARROWEST_TITLE = 14  # characters: a longer model title can be folded without harm


def terminal_table(result: LabResult, width: int | None = None) -> Table:
    """Sorted by full-ranking NDCG@10, best first.

    On a narrow terminal (`width`, by default that of standard output) columns are left out, and
    the caption says so: numbers folded into three lines cannot be compared.
    """
    width = Console().width if width is None else width
    wide = Console(width=10_000)
    widest_title = max(
        (len(t) for row in rows(result) for t in (row[0].text, row[0].detail)), default=0
    )
    can_be_folded = max(0, widest_title - NARROWEST_TITLE)
    for n_left_out in range(len(LEFT_OUT_FIRST) + 1):
        table = _table(result, LEFT_OUT_FIRST[:n_left_out])
        if Measurement.get(wide, wide.options, table).maximum <= width + can_be_folded:
            break
    return table


def _table(result: LabResult, left_out: tuple[str, ...]) -> Table:
    table = Table(
        title=escape(plain(f"{result.facts.data.get('name')}, {result.facts.split}")),
        caption="\n".join(_notes(result, left_out)),
        caption_justify="left",
    )
    shown = []
    for place, column in enumerate(columns(result)):
        if column.name not in left_out:
            shown.append(place)
            heading = column.name.replace(" ", "\n")
            table.add_column(heading, justify="right" if place else "left", overflow="fold")
    for row in rows(result):
        cells = [row[place] for place in shown]
        table.add_row(
            *(
                escape(cell.text) + (f"\n[dim]{escape(cell.detail)}[/dim]" if cell.detail else "")
                for cell in cells
            )
        )
    return table


def _notes(result: LabResult, left_out: tuple[str, ...]) -> list[str]:
    notes = [
        f"{result.n_users:,} users; intervals cover the choice of users, not training randomness.",
        "p-values: paired bootstrap against the best, two-sided, corrected by Holm.",
    ]
    n_failed, n_unfinished = len(result.failed), len(result.unfinished)
    if n_failed or n_unfinished:
        notes.append(f"Not in the table: {n_failed} failed and {n_unfinished} unfinished runs.")
    there = [column.name for column in columns(result) if column.name in left_out]
    if there:
        notes.append(f"Left out for want of width: {', '.join(there)} (all in report.md).")
    return notes
