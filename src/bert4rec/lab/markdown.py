"""The report as Markdown, for a repository or an issue."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from bert4rec.lab.again import commands
from bert4rec.lab.result import COMPARED, LabResult, ModelResult
from bert4rec.lab.tables import columns, rows
from bert4rec.lab.words import (
    cautions,
    holm_p,
    interval,
    plain,
    setting_lines,
    signed,
    what_was_run,
)


def to_markdown(result: LabResult) -> str:
    return "\n".join(_markdown_lines(result)) + "\n"


def _markdown_lines(result: LabResult) -> Iterator[str]:
    facts = result.facts
    yield f"# Lab: {escaped(str(facts.data.get('name')))}"
    yield ""
    yield (
        escaped("; ".join(f"{name}: {value}" for name, value in what_was_run(result) if value))
        + "."
    )
    yield ""
    if result.models:
        yield from _markdown_table(
            [column.name for column in columns(result)],
            [
                [escaped(c.text) + (f" ({escaped(c.detail)})" if c.detail else "") for c in row]
                for row in rows(result)
            ],
        )
        yield ""
        yield "## Differences to the best model"
        yield ""
        yield from _markdown_table(
            ["model", *(f"{m} {what}" for m in COMPARED for what in ("difference", "p, Holm"))],
            [
                [escaped(plain(model.title)), *_difference_cells(result, model)]
                for model in result.models[1:]
            ],
        )
    else:
        yield "No run is finished."
    for title, missing in (("Failed runs", result.failed), ("Unfinished runs", result.unfinished)):
        if missing:
            yield from ("", f"## {title}", "")
            for run in missing:
                error = f": {escaped(plain(run.error))}" if run.error is not None else ""
                yield f"- {escaped(plain(run.title))}, seed {run.seed}{error}"
    yield from ("", "## Cautions", "")
    yield from (f"- {escaped(line)}" for line in cautions(result))
    yield from ("", "## Settings that differ from the defaults", "")
    for model in result.models:
        lines = ", ".join(setting_lines(model)) or "none"
        yield f"- {escaped(plain(model.title))}: {escaped(lines)}"
    yield from ("", "## To run it again", "", "```", *commands(result), "```")


def _difference_cells(result: LabResult, model: ModelResult) -> list[str]:
    cells = []
    for metric in COMPARED:
        found = model.differences[metric]
        cells += [f"{signed(found.value)} ({interval(found)})", holm_p(result, found)]
    return cells


def _markdown_table(names: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(names) + " |"
    yield "|" + "|".join(["---", *["---:"] * (len(names) - 1)]) + "|"
    for line in lines:
        yield "| " + " | ".join(line) + " |"


def escaped(text: str) -> str:
    """Text that Markdown shows as it is: no markup, no link, no new cell."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", text)
