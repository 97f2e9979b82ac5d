"""Verbs about models and settings: demo, evaluate, compare, recipes, models, settings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from bert4rec.cli.console import describe, errors, output, print_next, print_outcome, progress_bar, resumable, say
from bert4rec.cli.options import (
    ConfigFile,
    Latex,
    Markdown,
    ModelDirectory,
    Overrides,
    PreparedData,
    Recipe,
    text_format,
    training_data,
)


def demo(out: Annotated[Path, typer.Option(help="Directory of the model.")] = Path("runs/demo")) -> None:
    """Train, evaluate and recommend on the embedded data set, in about a minute."""
    from rich.table import Table

    from bert4rec.config import load_config
    from bert4rec.data.demo import best_possible
    from bert4rec.data.sources import open_data
    from bert4rec.pipeline import RunOptions, train_recommender

    sequences = open_data("demo", say=say)
    describe(sequences)
    again = ["bert4rec", "train", "demo", "--recipe", "demo", "--out", str(out), "--resume"]
    with resumable(out, again), progress_bar("evaluating") as on_evaluation:
        outcome = train_recommender(
            sequences, load_config("demo"), out, RunOptions(overwrite=True), console=errors, on_evaluation=on_evaluation
        )
    print_outcome(outcome, out)
    best = best_possible()
    output.print(
        f"The best possible on this data, knowing how it was made: "
        f"HR@10 {best['HR@10']:.4f}, NDCG@10 {best['NDCG@10']:.4f}.\n"
    )
    vocabulary, history = sequences.vocabulary, sequences[0].tolist()
    watched = [vocabulary.raw(token) for token in history]
    table = Table(title="Ten recommendations for one person", title_justify="left")
    for column in ("", "title", "probability"):
        table.add_column(column)
    for token in history[-6:]:
        table.add_row("[dim]watched[/dim]", f"[dim]{vocabulary.title(token)}[/dim]", "")
    found = outcome.recommender.recommend(watched, 10).items
    for place, each in enumerate(found, 1):
        table.add_row(str(place), each.title, f"{each.probability:.1%}")
    output.print(table)
    ids = ",".join(str(raw) for raw in watched)
    print_next(
        ["recommend", out, "--history", ids],
        ["explain", out, found[0].item, "--history", ids],
        ["compare", out / "baselines" / "markov", out],
        ["serve", out, "--compare", out / "baselines" / "markov", "--open"],
        ["train", "your_clicks.csv"],
    )


def evaluate(
    model: ModelDirectory,
    data: PreparedData = None,
    held_out: Annotated[
        Literal["test", "validation"], typer.Option("--on", help="Which held-out items to rank.")
    ] = "test",
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Save metrics.json and per_user.parquet here.")] = None,
) -> None:
    """Evaluate a trained model again, also with other evaluation settings.

    For example --set evaluation.exclude_seen=false --set evaluation.ks=[10,50]
    """
    from bert4rec.config import override_config
    from bert4rec.evaluation.report import metric_table
    from bert4rec.pipeline import evaluate_held_out, save_evaluation, split_of
    from bert4rec.recommender import Recommender

    recommender = Recommender.load(model)
    settings = override_config(recommender.config, overrides or ())
    if settings != recommender.config.model_copy(update={"evaluation": settings.evaluation}):
        raise ValueError("--set: only settings of the section `evaluation` can change here")
    sequences = training_data(recommender.about, data)
    split = split_of(recommender, sequences)
    if held_out == "validation" and recommender.config.training.on_validation:
        say("this model was trained on the validation items: these figures say nothing about it")
    with progress_bar("evaluating") as update:
        chosen = split.test if held_out == "test" else split.validation
        result = evaluate_held_out(recommender.model, chosen, split, settings, update)
    output.print(metric_table(result, f"{model}, {held_out} items"))
    if out is not None:
        save_evaluation(result, sequences, out)
        say(f"saved to {out}")


def compare(
    run_a: Annotated[Path, typer.Argument(help="Directory of an evaluated model.")],
    run_b: Annotated[Path, typer.Argument(help="Directory of another one.")],
    metrics: Annotated[
        list[str] | None, typer.Option("--metric", help="May be repeated. [default: HR@10, NDCG@10, MRR]")
    ] = None,
    protocol: Annotated[
        Literal["full", "popularity", "uniform"], typer.Option(help="Which ranks to compare.")
    ] = "full",
    latex: Latex = False,
    markdown: Markdown = False,
) -> None:
    """Is run B better than run A? Paired bootstrap over the users that both were evaluated on."""
    from bert4rec.evaluation.compare import compare as compare_runs
    from bert4rec.evaluation.report import comparison_table, comparison_text

    printed = text_format(latex, markdown)
    comparison = compare_runs(run_a, run_b, metrics or ("HR@10", "NDCG@10", "MRR"), protocol)
    if printed is None:
        output.print(comparison_table(comparison))
    else:
        typer.echo(comparison_text(comparison).to_text(printed), nl=False)


def recipes(name: Annotated[str | None, typer.Argument(help="Show this recipe.")] = None) -> None:
    """List the recipes, or show one as TOML, to start your own --config file from."""
    from bert4rec.settings import recipe_names, recipe_text

    if name is None:
        for each in recipe_names():
            first_line = recipe_text(each).splitlines()[0].removeprefix("# ")
            output.print(f"[bold]{each:<18}[/bold]{first_line}", highlight=False)
    else:
        output.print(recipe_text(name), markup=False, highlight=False, end="")


def models() -> None:
    """List the models, for model.name in a --config file."""
    from rich.markup import escape
    from rich.table import Table

    from bert4rec.models import MODELS

    table = Table("model", "what it is", "objectives", "unknown users", box=None)
    for name in MODELS:
        model = MODELS[name]
        objectives = ", ".join(model.objectives) or "fitted in one pass"
        about = (sys.modules[model.__module__].__doc__ or "").strip().splitlines()[0]
        unknown_users = "no" if model.needs_known_user else "yes"
        table.add_row(name, escape(about), objectives, unknown_users)
    output.print(table)


def settings(recipe: Recipe = "default", config: ConfigFile = None, overrides: Overrides = None) -> None:
    """List every setting of a run with its value and meaning, for --set and --config."""
    from rich.table import Table

    from bert4rec.config import load_config, setting_descriptions

    table = Table("setting", "value", "meaning", box=None)
    for name, value, meaning in setting_descriptions(load_config(recipe, config, overrides or ())):
        table.add_row(name, value, meaning)
    output.print(table)
