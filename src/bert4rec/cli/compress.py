"""The verb that makes a smaller copy of a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bert4rec.cli.console import output, progress_bar
from bert4rec.cli.models import training_data
from bert4rec.cli.shown import next_commands


def compress(
    model: Annotated[Path, typer.Argument(help="Directory of a trained model.")],
    out: Annotated[Path, typer.Option(help="Directory for the smaller copy.")],
    item_vectors: Annotated[
        Literal["int8", "pq"],
        typer.Option(help="A byte a number, or product quantisation: a byte for several."),
    ] = "int8",
    numbers_per_byte: Annotated[
        int, typer.Option(help="For pq: how many numbers of an item's vector share a byte.")
    ] = 2,
    data: Annotated[
        str | None, typer.Option(help="Prepared data folder, if it was moved since training.")
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(help="Ask so many users at most, drawn at random. [default: everybody]"),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a model that is at --out.")] = False,
) -> None:
    """Make a copy of a model with compressed item vectors, and measure what it loses by that.

    Both are asked about the validation items; the difference is printed and kept in about.json.
    The copy's metrics.json is its own, of the test items.
    """
    from bert4rec.compression import compress as compress_model
    from bert4rec.evaluation.report import comparison_table
    from bert4rec.recommender import Recommender

    sequences = training_data(Recommender.load(model, retrieval="exact").about, data)
    with progress_bar("evaluating") as update:
        made = compress_model(
            model,
            out,
            sequences,
            code=item_vectors,
            numbers_per_byte=numbers_per_byte,
            n_users=users,
            overwrite=overwrite,
            on_progress=update,
        )
    output.print("Validation items, A is the model as it was, B the compressed one")
    output.print(comparison_table(made.validation))
    facts = made.recommender.about["compression"]
    output.print(
        f"Item vectors: {_megabytes(facts['n_bytes_before'])} before, "
        f"{_megabytes(facts['n_bytes'])} now; model.safetensors: "
        f"{_megabytes(made.n_bytes_before)} before, {_megabytes(made.n_bytes)} now\n",
        highlight=False,
    )
    next_commands(["compare", model, out], ["serve", out])


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.2f} MB"


def add_to(app: typer.Typer) -> None:
    app.command()(compress)
