"""`bert4rec tune`: search for better settings of one model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bert4rec.cli.console import errors, exit_interrupted, output, print_next
from bert4rec.cli.options import DATA_HELP, ConfigFile, Recipe, TableOptions, reads_a_table

if TYPE_CHECKING:
    from bert4rec.lab.tuning import TuningResult


@reads_a_table
def tune(
    data: Annotated[str, typer.Argument(help=DATA_HELP)],
    trials: Annotated[int, typer.Option(help="Number of trials in all.")] = 30,
    budget: Annotated[str, typer.Option(help="Training time per trial, as in 90s, 5m or 1h30m.")] = "5m",
    out: Annotated[Path, typer.Option(help="Directory of the study.")] = Path("runs/tune"),
    recipe: Recipe = "default",
    config: ConfigFile = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Fix a setting, as in model.dim=64: it is not tuned. May be repeated."),
    ] = None,
    space: Annotated[
        Path | None, typer.Option(help="TOML file with a search space of your own; see docs/how-to/tuning.md.")
    ] = None,
    timeout: Annotated[str | None, typer.Option(help="Begin no trial after this time, as in 2h.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
    *,
    table: TableOptions,
) -> None:
    """Search for better settings of a model on your data, and save them as a recipe.

    Trials are judged by the validation items; the test items are not read. Repeat the command to
    resume it, or with more --trials to search on.
    """
    from bert4rec.config import load_config, resolve
    from bert4rec.lab.budget import parse_budget
    from bert4rec.lab.contenders import refuse_overrides

    one_seed = "all trials train with the recipe's seed, so that they differ by their settings"
    refuse_overrides(overrides or (), {"seed": one_seed})
    start = load_config(recipe, config, overrides or ())
    minutes = parse_budget(budget)
    timeout_minutes = None if timeout is None else parse_budget(timeout, "--timeout")
    sequences = table.open(data, start.data)
    from bert4rec.interrupts import Interrupted

    try:
        from bert4rec.lab import tuning
        from bert4rec.lab.search_space import space_for
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'bert4rec[lab]'") from None
    run = resolve(start, sequences.n_items)
    searched = space_for(run, overrides or (), space)
    options = tuning.TuningOptions(Path(data).name, trials, minutes, timeout_minutes, seed)
    try:
        result = tuning.tune(sequences, run, searched, out, options, errors)
    except Interrupted:
        raise exit_interrupted(out) from None
    _show(result, out)
    best = out / "best.toml"
    print_next(["train", data, "--config", best, "--out", "runs/tuned", *table.as_words()])


def _show(result: TuningResult, out: Path) -> None:
    from rich.table import Table

    table = Table(title="The best settings", title_justify="left")
    table.add_column("setting", no_wrap=True)
    for column in ("at the start", "best"):
        table.add_column(column, justify="right")
    if result.importance:
        table.add_column("importance", justify="right")
    for name, (before, after) in result.settings.items():
        row = [name, _value(before), _value(after)]
        row += [f"{result.importance.get(name, 0):.0%}"] if result.importance else []
        table.add_row(*row)
    output.print(table)
    n_incomplete = result.n_incomplete
    incomplete = f", {n_incomplete} of them pruned or failed" if n_incomplete else ""
    output.print(
        f"Validation NDCG@10 {result.best:.4f}, against {result.start:.4f} of the recipe at the "
        f"start, in {result.n_trials} trials{incomplete}.",
        highlight=False,
        soft_wrap=True,
    )
    if result.best == result.start:
        output.print("No trial was better than the recipe itself: try more --trials.")
    else:
        output.print("The best of many trials is partly luck: train it to see its test metrics.", highlight=False)
    if result.importance:
        output.print(
            "Importance: how well a setting separates the good trials from the others (PED-ANOVA).",
            highlight=False,
            soft_wrap=True,
        )
    for what, name in (("The recipe", "best.toml"), ("All trials", "trials.csv")):
        output.print(f"{what}: {out / name}", markup=False, highlight=False, soft_wrap=True)
    output.print()


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def add_to(app: typer.Typer) -> None:
    app.command()(tune)
