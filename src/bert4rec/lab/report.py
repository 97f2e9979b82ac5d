"""The report of a lab: one JSON file that holds everything, and three renderings of it.

`report.json` is the source of the others, so documents can be written again from it alone.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from pathlib import Path
from typing import Any

from bert4rec.durable import write_file
from bert4rec.evaluation.report import figure
from bert4rec.lab.again import commands
from bert4rec.lab.collect import collect
from bert4rec.lab.markdown import to_markdown
from bert4rec.lab.result import COMPARED, FULL, REPORTED, LabResult
from bert4rec.lab.tables import columns, rows, to_csv
from bert4rec.lab.terminal import terminal_table
from bert4rec.lab.words import (
    cautions,
    holm_p,
    interval,
    p_value,
    plain,
    protocol_title,
    row_notes,
    setting_lines,
    signed,
    span,
    what_was_run,
)

__all__ = ["render", "terminal_table", "to_html", "write_report"]

REPORT_FILE = "report.json"


def write_report(lab_dir: Path) -> LabResult:
    """Collect a lab and write `report.json`, `.md`, `.csv` and `.html` into its directory."""
    result = collect(lab_dir)
    render(result, lab_dir)
    return result


def render(result: LabResult, directory: Path) -> None:
    """All four files, each whole or as it was before; `result` may come from `report.json`."""
    contents = {
        REPORT_FILE: result.to_json(),
        "report.md": to_markdown(result),
        "report.csv": to_csv(result),
        "report.html": to_html(result),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_file(directory / name, content)


def to_html(result: LabResult) -> str:
    """One page that needs nothing else: no server, no network, no file beside it."""
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup

        from bert4rec.lab.curve_plots import bin_label
        from bert4rec.lab.plots import all_plots

        plots = all_plots(result)
    except ImportError as error:
        raise ValueError(
            f"{error.name} is needed for the page of a lab: pip install 'bert4rec[lab]'"
        ) from None
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {
        "bin_label": bin_label,
        "figure": figure,
        "holm_p": holm_p,
        "interval": interval,
        "p_value": p_value,
        "plain": plain,
        "protocol_title": protocol_title,
        "row_notes": row_notes,
        "setting_lines": setting_lines,
        "signed": signed,
        "span": span,
        "zip": zip,
    }
    source = (resources.files("bert4rec.lab") / "templates" / "report.html").read_text("utf-8")
    page = environment.from_string(source).render(
        result=result,
        title=plain(f"Lab: {result.facts.data.get('name')}"),
        columns=columns(result),
        rows=rows(result),
        facts=[(name, value) for name, value in what_was_run(result) if value],
        commands=commands(result),
        cautions=cautions(result),
        # The SVG comes from an XML writer, which has escaped every text in it.
        plots=[(plot, Markup(plot.svg)) for plot in plots],
        heat_maps=_heat_maps(result),
        full=FULL,
        reported=REPORTED,
        compared=COMPARED,
    )
    return page.replace("SCRIPT-HASH", _script_hash(page), 1)


def _script_hash(page: str) -> str:
    """Only the page's own script may run, whatever a title manages to smuggle in."""
    script = re.search(r"<script>(.*)</script>", page, re.DOTALL)
    assert script is not None
    digest = hashlib.sha256(script[1].encode("utf-8")).digest()
    return "sha256-" + base64.b64encode(digest).decode("ascii")


def _heat_maps(result: LabResult) -> dict[str, dict[str, Any]]:
    """Plot name -> bins and, for each model, (value, share of the best value of the bin)."""
    maps: dict[str, dict[str, Any]] = {}
    for name, bins, values in (
        ("history", result.history_bins, [m.by_history_length for m in result.models]),
        ("popularity", result.popularity_bins, [m.by_popularity for m in result.models]),
    ):
        best = [max(column, default=0.0) for column in zip(*values, strict=True)]
        shares = [
            [(v, v / top if top else 0.0) for v, top in zip(row, best, strict=True)]
            for row in values
        ]
        maps[name] = {"bins": bins, "rows": list(zip(result.models, shares, strict=True))}
    return maps
