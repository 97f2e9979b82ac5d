"""What is made of a trained model: `index` for quick answers, `compress` for a smaller copy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bert4rec.cli.console import output, print_next, progress_bar, say
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
    recall: Annotated[float, typer.Option(help="Recall@10 that the index must reach, from 0 to 1.")] = 0.97,
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


def compress(
    model: ModelDirectory,
    out: Annotated[Path, typer.Option(help="Directory for the smaller copy.")],
    code: Annotated[
        Literal["int8", "pq"],
        typer.Option(help="int8: one byte per number; pq, product quantization: one byte for several."),
    ] = "int8",
    numbers_per_byte: Annotated[
        int, typer.Option(help="For pq: how many numbers of an item embedding share a byte.")
    ] = 2,
    data: PreparedData = None,
    users: Annotated[
        int | None, typer.Option(help="Evaluate on this many random users at most. [default: all]")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the model at --out.")] = False,
) -> None:
    """Copy a model with compressed item embeddings, and measure the loss of quality.

    Both are evaluated on the validation items; the difference is printed and saved in about.json.
    The metrics.json of the copy is its own, on the test items.
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
            code=code,
            numbers_per_byte=numbers_per_byte,
            n_users=users,
            overwrite=overwrite,
            on_progress=update,
        )
    output.print("Validation items; A is the model as it was, B the compressed one")
    output.print(comparison_table(made.validation))
    facts = made.recommender.about["compression"]
    output.print(
        f"Item embeddings: {_megabytes(facts['n_bytes_before'])} before, "
        f"{_megabytes(facts['n_bytes'])} now; model.safetensors: "
        f"{_megabytes(made.n_bytes_before)} before, {_megabytes(made.n_bytes)} now\n",
        highlight=False,
    )
    print_next(["compare", model, out], ["serve", out])


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.2f} MB"
