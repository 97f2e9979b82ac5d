"""The verb `index`: fast retrieval from a large catalogue."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from bert4rec.cli.console import output, say
from bert4rec.cli.options import ModelDirectory, PreparedData, training_data


def index(
    model: ModelDirectory,
    kind: Annotated[
        Literal["auto", "ivf", "none"],
        typer.Option(
            help="`auto`: only if the catalogue is large enough; `ivf`: always; `none`: remove "
            "the index, every search is exact."
        ),
    ] = "auto",
    recall: Annotated[
        float,
        typer.Option(help="Share of the ten best items that the index has to find, from 0 to 1."),
    ] = 0.97,
    data: PreparedData = None,
) -> None:
    """Build an index of a model's items, measure its recall@10 and save it with the model.

    Training does this for large catalogues. A running `serve --watch` loads it.
    """
    from bert4rec.pipeline import split_of
    from bert4rec.recommender import Recommender
    from bert4rec.retrieval.index_builder import LARGE, described

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
