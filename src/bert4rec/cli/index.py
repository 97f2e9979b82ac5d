"""The verb `index`: quick answers from a large catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bert4rec.cli.console import output, say


def index(
    model: Annotated[Path, typer.Argument(help="Directory of a trained model.")],
    kind: Annotated[
        Literal["auto", "ivf", "none"],
        typer.Option(
            help="`auto`: only for a catalogue that is large enough; `ivf`: in any case; "
            "`none`: take the index away, every search is exact."
        ),
    ] = "auto",
    recall: Annotated[
        float,
        typer.Option(help="Share of the ten best items that the index has to find, from 0 to 1."),
    ] = 0.97,
    data: Annotated[
        str | None, typer.Option(help="Prepared data folder, if it was moved since training.")
    ] = None,
) -> None:
    """Build an index of a model's items, measure its recall@10 and keep it with the model.

    Training does it by itself for large catalogues. A running `serve --watch` takes it over.
    """
    from bert4rec.cli.models import training_data
    from bert4rec.pipeline import split_of
    from bert4rec.recommender import Recommender
    from bert4rec.retrieval.build import LARGE, described

    recommender = Recommender.load(model, retrieval="exact")
    if kind == "none":
        recommender.save_index(model)
        output.print(f"{model} is searched exactly", markup=False)
        return
    n_items = len(recommender.vocabulary)
    if kind == "auto" and n_items < LARGE:
        output.print(
            f"{n_items:,} items are searched exactly at once; an index pays from {LARGE:,} on "
            "(--kind ivf builds one all the same)",
            markup=False,
        )
        return
    histories = split_of(recommender, training_data(recommender.about, data)).validation.histories
    say(f"building an index of {n_items:,} items")
    measured = recommender.build_index(histories, recall=recall)
    recommender.save_index(model)
    output.print(described(measured), markup=False, highlight=False)


def add_to(app: typer.Typer) -> None:
    app.command()(index)
