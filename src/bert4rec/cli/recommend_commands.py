"""Verbs that use a trained model: recommend, similar, explain."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bert4rec.cli.console import output, printable, progress_bar, resumable, say
from bert4rec.cli.options import (
    RAY_ADDRESS_HELP,
    Count,
    HistoryTableOptions,
    ModelDirectory,
    PreparedData,
    is_given,
    reads_histories,
    split_ids,
    training_data,
)

if TYPE_CHECKING:
    from bert4rec.data.sequences import Sequences
    from bert4rec.distributed.user_rows import BatchRequest
    from bert4rec.recommender import Recommendation, Recommender

HISTORY_HELP = "Item ids, oldest first, separated by commas."
PARTS = "Writing a directory"


@reads_histories
def recommend(
    context: typer.Context,
    model: ModelDirectory,
    history: Annotated[str | None, typer.Option(help=HISTORY_HELP)] = None,
    users: Annotated[
        str | None, typer.Option(help="`all` users of the training data, or a table of their interactions.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="With --users: a .parquet, .csv or .jsonl file, or a directory of Parquet files "
            "(no suffix, or / at the end). The same command resumes an interrupted directory."
        ),
    ] = None,
    k: Count = 10,
    keep_seen: Annotated[
        bool, typer.Option("--keep-seen", help="Also recommend items that are in the history.")
    ] = False,
    allow: Annotated[str | None, typer.Option(help="Only these items, separated by commas.")] = None,
    block: Annotated[str | None, typer.Option(help="Never these items, separated by commas.")] = None,
    retrieval: Annotated[
        Literal["auto", "exact"],
        typer.Option(help="auto uses the model's index, if it has one; exact scores all items."),
    ] = "auto",
    data: PreparedData = None,
    parts: Annotated[
        int | None,
        typer.Option(help="Number of files; by default it follows from the number of users.", rich_help_panel=PARTS),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that share the cores, 1 by default; with --launcher ray, actors with "
            "one CPU each, all CPUs by default.",
            rich_help_panel=PARTS,
        ),
    ] = None,
    launcher: Annotated[
        Literal["local", "ray"], typer.Option(help="Where the workers run.", rich_help_panel=PARTS)
    ] = "local",
    ray_address: Annotated[str | None, typer.Option(help=RAY_ADDRESS_HELP, rich_help_panel=PARTS)] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the parts that are there.", rich_help_panel=PARTS)
    ] = False,
    *,
    table: HistoryTableOptions,
) -> None:
    """Recommend the next items for one history, or for many users into a file or a directory."""
    if (history is None) == (users is None):
        raise ValueError("say for whom: either --history a,b,c or --users all|FILE")
    if users is not None and out is None:
        raise ValueError("--users needs --out: a file that ends in .parquet, .csv or .jsonl, or a directory")
    is_directory = out is not None and _is_directory(out)
    if not is_directory:
        _refuse_for_parts(context, "--history" if history is not None else f"the file {out}")
    if ray_address is not None and launcher != "ray":
        raise ValueError("--ray-address does nothing without --launcher ray: add it")
    from bert4rec.distributed.batch_scoring import WorkerOptions, recommend_in_parts, recommend_users
    from bert4rec.distributed.user_rows import BatchRequest
    from bert4rec.recommender import Recommender

    request = BatchRequest(k, not keep_seen, split_ids(allow), split_ids(block), retrieval)
    if history is not None:
        _print_for_history(Recommender.load(model, retrieval), split_ids(history) or [], request)
        return
    assert users is not None
    assert out is not None

    def prepare_users(place: Path, about: dict[str, Any]) -> Sequences:
        """The users of the training data, or those of a table, which is prepared at `place`."""
        return training_data(about, data) if users == "all" else table.prepare(users, place)

    if is_directory:
        with resumable(Path(out)), progress_bar("recommending") as update:
            done = recommend_in_parts(
                model,
                prepare_users,
                out,
                request,
                n_parts=parts,
                workers=WorkerOptions(workers, launcher, ray_address),
                overwrite=overwrite,
                on_progress=update,
                say=say,
            )
        n_rows, n_users = done.n_rows, done.n_users
        before = f" ({done.n_parts_before:,} were there)" if done.n_parts_before else ""
        where = f"{out}, in {done.n_parts:,} part{'s' * (done.n_parts > 1)}{before}"
    else:
        with tempfile.TemporaryDirectory() as folder, progress_bar("recommending") as update:
            recommender = Recommender.load(model, retrieval)
            sequences = prepare_users(Path(folder) / "users", recommender.about)
            n_rows = recommend_users(recommender, sequences, out, request, on_progress=update)
        n_users, where = sequences.n_users, out
    output.print(f"{n_rows:,} recommendations for {n_users:,} users are in {where}", markup=False)


def similar(model: ModelDirectory, item: Annotated[str, typer.Argument(help="An item id.")], k: Count = 10) -> None:
    """List the items with the most similar embeddings (cosine)."""
    from bert4rec.recommender import Recommender

    _print_items(Recommender.load(model).similar(item, k), "cosine", has_probability=False)


def explain(
    model: ModelDirectory,
    item: Annotated[str, typer.Argument(help="The id of the item to explain.")],
    history: Annotated[str, typer.Option(help=HISTORY_HELP)],
) -> None:
    """Show how much each item of a history raises or lowers the score of an item, and the attention weights."""
    from rich.table import Table

    from bert4rec.recommender import Recommender

    found = Recommender.load(model).explain(split_ids(history) or [], item)
    title = printable(f"{found.item}  {found.title or ''}  probability {found.probability:.2%}")
    table = Table(title=title, title_justify="left")
    table.add_column("history item")
    table.add_column("title")
    table.add_column("influence", justify="right")
    layers: list[Any] = [] if found.attention is None else list(found.attention[:, :, -1, :].mean(1))
    for number in range(len(layers)):
        table.add_column(f"attention, layer {number + 1}", justify="right")
    for place, each in enumerate(found.influences):
        cells = [f"{attention[place]:.0%}" for attention in layers]
        table.add_row(printable(each.item), printable(each.title or ""), f"{each.influence:+.3f}", *cells)
    output.print(table)
    output.print(
        "Influence: how much lower the log-probability of the item is without this history item. "
        "Attention: from [MASK], mean of the heads.",
        style="dim",
        markup=False,
    )


def _print_for_history(recommender: Recommender, history: list[str], request: BatchRequest) -> None:
    found = recommender.recommend(history, request.k, request.exclude_seen, request.allow, request.block)
    if found.unknown:
        say(f"unknown to the model, skipped: {', '.join(map(str, found.unknown))}")
    if found.is_fallback:
        say("no known item in this history: these are the most popular items")
    _print_items(found.items, "score", has_probability=True)


def _is_directory(out: str) -> bool:
    return out.endswith("/") or Path(out).suffix == "" or Path(out).is_dir()


def _refuse_for_parts(context: typer.Context, because: str) -> None:
    for name in ("parts", "workers", "launcher", "ray_address", "overwrite"):
        if is_given(context, name):
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is for a directory of parts, and does nothing with {because}")


def _print_items(found: list[Recommendation], score_name: str, has_probability: bool) -> None:
    from rich.table import Table

    table = Table()
    for column in ("", "item", "title", score_name, *(["probability"] if has_probability else [])):
        table.add_column(column)
    for place, each in enumerate(found, 1):
        cells = [str(place), printable(each.item), printable(each.title or ""), f"{each.score:.3f}"]
        # An index gives no probability: that takes the scores of all items.
        chance = "–" if math.isnan(each.probability) else f"{each.probability:.2%}"
        table.add_row(*cells, *([chance] if has_probability else []))
    output.print(table)
