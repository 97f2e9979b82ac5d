"""The verb that looks for better settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bert4rec.cli.console import (
    ConfigFile,
    Recipe,
    errors,
    output,
    stopped,
)
from bert4rec.cli.shown import next_commands
from bert4rec.cli.table_options import TableOptions, reads_a_table
from bert4rec.cli.train import DATA_HELP

if TYPE_CHECKING:
    from bert4rec.lab.tuned import Tuned


@reads_a_table
def tune(
    data: Annotated[str, typer.Argument(help=DATA_HELP)],
    trials: Annotated[int, typer.Option(help="How many settings to try in all.")] = 30,
    budget: Annotated[
        str, typer.Option(help="Most training time of one trial, as in 90s, 5m or 1h30m.")
    ] = "5m",
    out: Annotated[Path, typer.Option(help="Directory of the study.")] = Path("runs/tune"),
    recipe: Recipe = "default",
    config: ConfigFile = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Fix one setting, as in model.dim=64: it is not tuned. May be repeated."
        ),
    ] = None,
    space: Annotated[
        Path | None,
        typer.Option(help="TOML file with a search space of your own; see docs/tuning.md."),
    ] = None,
    timeout: Annotated[
        str | None, typer.Option(help="Begin no trial after this time, as in 2h.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Fixes which settings are drawn.")] = 0,
    *,
    table: TableOptions,
) -> None:
    """Look for better settings of a model on your data, and save them as a recipe.

    Only the validation items are looked at, so the test items stay an honest judge. Give the same
    command again to go on after an interruption, or with more --trials to search on.
    """
    from bert4rec.config import load_config
    from bert4rec.lab.budget import parse_budget
    from bert4rec.lab.contenders import refuse_overrides

    one_seed = "all trials train with the recipe's seed, so that they differ by their settings"
    refuse_overrides(overrides or (), {"seed": one_seed})
    start = load_config(recipe, config, overrides or ())
    minutes = parse_budget(budget)
    timeout_minutes = None if timeout is None else parse_budget(timeout, "--timeout")
    sequences = table.open(data, start.data)
    from bert4rec.lab import tune as lab_tune
    from bert4rec.lab.search_space import full_names, space_for
    from bert4rec.training.settled import settled

    start = settled(start, sequences.n_items)
    searched = space_for(start, full_names(overrides or ()), space)

    try:
        tuned = lab_tune.tune(
            sequences,
            start,
            out,
            errors,
            data_name=Path(data).name,
            space=searched,
            n_trials=trials,
            minutes=minutes,
            timeout_minutes=timeout_minutes,
            seed=seed,
        )
    except lab_tune.Stopped:
        raise stopped(out) from None
    _show(tuned, out)
    best = out / "best.toml"
    next_commands(["train", data, "--config", best, "--out", "runs/tuned", *table.as_words()])


def _show(tuned: Tuned, out: Path) -> None:
    from rich.table import Table

    table = Table(title="The best settings", title_justify="left")
    table.add_column("setting", no_wrap=True)
    for column in ("at the start", "best"):
        table.add_column(column, justify="right")
    if tuned.importance:
        table.add_column("importance", justify="right")
    for name, (before, after) in tuned.settings.items():
        row = [name, _value(before), _value(after)]
        row += [f"{tuned.importance.get(name, 0):.0%}"] if tuned.importance else []
        table.add_row(*row)
    output.print(table)
    n_given_up = tuned.n_given_up
    given_up = f", {n_given_up} of them not trained to the end" if n_given_up else ""
    output.print(
        f"Validation NDCG@10 {tuned.best:.4f}, against {tuned.start:.4f} of the recipe at the "
        f"start, in {tuned.n_trials} trials{given_up}.",
        highlight=False,
        soft_wrap=True,
    )
    if tuned.best == tuned.start:
        output.print("No trial was better than the recipe itself: try more --trials.")
    else:
        output.print(
            "The best of many trials is partly luck: train it to see the test items.",
            highlight=False,
        )
    if tuned.importance:
        output.print(
            "Importance: how much each setting tells the good trials from the others (PED-ANOVA).",
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
