"""`bert4rec lab`: compare many models on one data set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bert4rec.cli.console import errors, output, print_next, resumable
from bert4rec.cli.options import (
    DATA_HELP,
    Latex,
    Markdown,
    Overrides,
    OverwriteRuns,
    TableOptions,
    reads_a_table,
    refuse_given,
    text_format,
)

if TYPE_CHECKING:
    from bert4rec.evaluation.text_tables import TextFormat


@reads_a_table
def lab(
    context: typer.Context,
    data: Annotated[str | None, typer.Argument(help=DATA_HELP)] = None,
    models: Annotated[
        list[str] | None, typer.Option(help="Recipes or TOML files, separated by commas. \\[default: all]")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs per model, with different seeds.")] = 3,
    budget: Annotated[str, typer.Option(help="Training time per run, as in 90s, 20m or 1h30m.")] = "20m",
    out: Annotated[Path, typer.Option(help="Directory of the lab.")] = Path("runs/lab"),
    overrides: Overrides = None,
    overwrite: OverwriteRuns = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Train nothing; write the report again.")] = False,
    latex: Latex = False,
    markdown: Markdown = False,
    *,
    table: TableOptions,
) -> None:
    """Compare many models on one data set, with intervals, significance and costs.

    Each run trains one model within the budget, on the same split, in its own process. Repeat the
    command to resume it, or with other --models to add them to the table.
    """
    printed = text_format(latex, markdown)
    if report_only:
        refuse_given(context, "--report-only", but=("report_only", "out", "latex", "markdown"))
        _report(out, printed)
        return
    if data is None:
        raise ValueError("no data is named: pass a table, `demo`, or a name of `bert4rec data list`")
    from bert4rec.lab.budget import parse_budget
    from bert4rec.lab.contenders import choose_contenders, split_names

    minutes = parse_budget(budget)
    contenders = choose_contenders(split_names(models or ["all"]), overrides or ())
    sequences = table.open(data, contenders[0].config.data)
    from bert4rec.lab.lab_directory import LabTerms
    from bert4rec.lab.run_lab import run_lab

    terms = LabTerms(Path(data).name, seeds, minutes, overwrite)
    with resumable(out):
        run_lab(out, sequences, contenders, terms, errors)
    _report(out, printed)


def _report(out: Path, printed: TextFormat | None) -> None:
    from bert4rec.lab.lab_directory import LabRun
    from bert4rec.lab.lab_report import terminal_table, to_text, write_report

    result = write_report(out)
    for run in result.failed:
        failed = LabRun(out, run.name, run.seed)
        line = f"failed: {failed}: {run.error} (see {failed.folder / 'output.txt'})"
        errors.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    if printed is not None:
        typer.echo(to_text(result, printed), nl=False)
        return
    output.print(terminal_table(result))
    output.print("The report:")
    for name in ("report.html", "report.csv", "report.json"):
        output.print(f"  {out / name}", markup=False, highlight=False, soft_wrap=True)
    if result.models:
        model = LabRun(out, result.models[0].name, result.models[0].seeds[0]).folder
        print_next(
            ["evaluate", model],
            ["recommend", model, "--users", "all", "--out", "recs.parquet"],
            ["lab", "--report-only", "--out", out, "--markdown"],
        )
