"""`bert4rec tune`: search for better settings of one model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bert4rec.cli.console import errors, output, print_lines, print_next, resumable
from bert4rec.cli.options import DATA_HELP, ConfigFile, Recipe, TableOptions, reads_a_table

if TYPE_CHECKING:
    from bert4rec.lab.tuning import TuningResult


@reads_a_table
def tune(
    data: Annotated[str, typer.Argument(help=DATA_HELP)],
    trials: Annotated[int, typer.Option(min=1, help="Number of trials in all.")] = 30,
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
    timeout: Annotated[str | None, typer.Option(help="Start no new trial after this time, as in 2h.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
    *,
    table: TableOptions,
) -> None:
    """Search for better settings of a model on your data, and save them as a recipe.

    Trials are compared by validation NDCG@10; the test items are not used. Repeat the command to
    resume it, or with more --trials to search on.
    """
    from bert4rec.config import load_config, resolve
    from bert4rec.lab.budget import parse_budget
    from bert4rec.lab.contenders import refuse_overrides

    one_seed = "all trials train with the recipe's seed, so that they differ by their settings"
    refuse_overrides(overrides or (), {"seed": one_seed})
    start = load_config(recipe, config, overrides or ())
    minutes = parse_budget(budget)
    timeout_minutes = math.inf if timeout is None else parse_budget(timeout, "--timeout")
    sequences = table.open(data, start.data)
    try:
        from bert4rec.lab import tuning
        from bert4rec.lab.search_space import space_for
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'bert4rec[lab]'") from None
    run = resolve(start, sequences.n_items)
    searched = space_for(run, overrides or (), space)
    options = tuning.TuningOptions(Path(data).name, trials, minutes, timeout_minutes, seed)
    with resumable(out):
        result = tuning.tune(sequences, run, searched, out, options, errors)
    _show(result, out)
    print_next(["train", data, "--config", out / "best.toml", "--out", "runs/tuned", *table.as_words()])


def _show(result: TuningResult, out: Path) -> None:
    from bert4rec.evaluation.text_tables import TextTable
    from bert4rec.lab.tuning import value_text

    columns = ["setting", "at the start", "best"]
    rows = [[name, value_text(before), value_text(after)] for name, (before, after) in result.settings.items()]
    incomplete = f", {result.n_incomplete} of them pruned or failed" if result.n_incomplete else ""
    lines = [
        f"Validation NDCG@10 {result.best:.4f}, against {result.start:.4f} of the recipe at the start, "
        f"in {result.n_trials} trials{incomplete}.",
        "No trial was better than the recipe itself: try more --trials."
        if result.best == result.start
        else "The best of many trials is partly luck: train it to see its test metrics.",
    ]
    if result.importance:
        columns.append("importance")
        rows = [[*row, f"{result.importance.get(row[0], 0):.0%}"] for row in rows]
        lines.append("Importance: how well a setting separates the good trials from the others (PED-ANOVA).")
    output.print(TextTable(columns, rows).to_terminal("The best settings"))
    print_lines(*lines, f"The recipe: {out / 'best.toml'}", f"All trials: {out / 'trials.csv'}", "")
