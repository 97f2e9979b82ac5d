"""The verb that compares many models on one data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bert4rec.cli.console import (
    Overrides,
    errors,
    output,
    refuse_given,
    stopped,
)
from bert4rec.cli.shown import next_commands
from bert4rec.cli.table_options import TableOptions, reads_a_table
from bert4rec.cli.train import DATA_HELP


@reads_a_table
def lab(
    context: typer.Context,
    data: Annotated[str | None, typer.Argument(help=DATA_HELP)] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            help="Names of recipes or TOML files of your own, with commas; `all` if not given."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each model; they differ by chance.")] = 3,
    budget: Annotated[
        str, typer.Option(help="Most training time of one run, as in 90s, 20m or 1h30m.")
    ] = "20m",
    out: Annotated[Path, typer.Option(help="Directory of the lab.")] = Path("runs/lab"),
    overrides: Overrides = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace what is there of these models. A lab on other data, or with other "
            "settings of data or evaluation, is begun anew; its runs move to runs.old.",
        ),
    ] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Run nothing; write the report again.")
    ] = False,
    *,
    table: TableOptions,
) -> None:
    """Compare many models on one data set: who wins, by how much, how sure, at what cost.

    Each model is trained within the budget on the same split, in a process of its own. Give the
    same command again to go on after an interruption, or with other --models to add to the table.
    """
    if report_only:
        refuse_given(context, "--report-only", but=("report_only", "out"))
        _report(out)
        return
    if data is None:
        raise ValueError(
            "no data is named: pass a table, `demo`, or a name of `bert4rec data list`"
        )
    from bert4rec.lab.budget import parse_budget
    from bert4rec.lab.contenders import choose_contenders, split_names

    minutes = parse_budget(budget)
    contenders = choose_contenders(split_names(models or ["all"]), overrides or ())
    sequences = table.open(data, contenders[0].config.data)
    from bert4rec.lab.run import Stopped, run_lab

    try:
        run_lab(
            out,
            sequences,
            contenders,
            errors,
            data_name=Path(data).name,
            n_seeds=seeds,
            minutes=minutes,
            overwrite=overwrite,
        )
    except Stopped:
        raise stopped(out) from None
    _report(out)


def _report(out: Path) -> None:
    from bert4rec.lab.report import terminal_table, write_report

    result = write_report(out)
    output.print(terminal_table(result))
    for run in result.failed:
        place = out / "runs" / run.name / f"seed-{run.seed}" / "output.txt"
        line = f"failed: {run.name}, seed {run.seed}: {run.error} (see {place})"
        errors.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    output.print("The report:")
    for name in ("report.html", "report.md", "report.csv"):
        output.print(f"  {out / name}", markup=False, highlight=False, soft_wrap=True)
    if result.models:
        best = result.models[0]
        model = out / "runs" / best.name / f"seed-{best.seeds[0]}"
        next_commands(
            ["evaluate", model],
            ["recommend", model, "--users", "all", "--out", "recs.parquet"],
            ["lab", "--report-only", "--out", out],
        )


def add_to(app: typer.Typer) -> None:
    app.command()(lab)
