"""Verbs that ask a trained model: recommend, similar, explain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bert4rec.cli.console import (
    Delimiter,
    Encoding,
    Header,
    ItemColumn,
    OnBadRows,
    TimeColumn,
    UserColumn,
    output,
    progress_bar,
    say,
    shown,
)
from bert4rec.cli.models import training_data

if TYPE_CHECKING:
    from bert4rec.recommender import Recommendation

ModelDirectory = Annotated[Path, typer.Argument(help="Directory of a trained model.")]
History = Annotated[str | None, typer.Option(help="Item ids, oldest first, separated by commas.")]
Count = Annotated[int, typer.Option("--k", "-k", help="How many items.")]


def recommend(
    model: ModelDirectory,
    history: History = None,
    users: Annotated[
        str | None,
        typer.Option(help="`all` users of the training data, or a table of their interactions."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --users: a .parquet, .csv or .jsonl file.")
    ] = None,
    k: Count = 10,
    keep_seen: Annotated[
        bool, typer.Option("--keep-seen", help="Items of the history may be recommended again.")
    ] = False,
    allow: Annotated[
        str | None, typer.Option(help="Only these items, separated by commas.")
    ] = None,
    block: Annotated[
        str | None, typer.Option(help="Never these items, separated by commas.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Prepared data folder, if it was moved since training.")
    ] = None,
    user: UserColumn = None,
    item: ItemColumn = None,
    time: TimeColumn = None,
    delimiter: Delimiter = None,
    header: Header = None,
    encoding: Encoding = None,
    on_bad_rows: OnBadRows = "error",
) -> None:
    """Recommend the next items for one history, or for many users into a file."""
    import tempfile

    from bert4rec.batch import recommend_users
    from bert4rec.data.prepare import prepare
    from bert4rec.data.sources import Reading, interactions_of
    from bert4rec.recommender import Recommender

    if (history is None) == (users is None):
        raise ValueError("say for whom: either --history a,b,c or --users all|FILE")
    if users is not None and out is None:
        raise ValueError("--users needs --out: a file that ends in .parquet, .csv or .jsonl")
    recommender = Recommender.load(model)
    allowed, blocked = _ids(allow), _ids(block)
    if history is not None:
        found = recommender.recommend(_ids(history) or [], k, not keep_seen, allowed, blocked)
        if found.unknown:
            say(f"unknown to the model, skipped: {', '.join(map(str, found.unknown))}")
        if found.is_fallback:
            say("nothing known in this history: these are the most popular items")
        _print(found.items, "score", has_probability=True)
        return
    assert users is not None
    assert out is not None
    reading = Reading(user, item, time, None, delimiter, header, encoding, on_bad_rows)
    with tempfile.TemporaryDirectory() as folder, progress_bar("recommending") as update:
        if users == "all":
            sequences = training_data(recommender.about, data)
        else:
            interactions = interactions_of(users, reading)
            place = Path(folder) / "users"
            sequences = prepare(interactions, out=place, for_training=False, progress=say)
        n_rows = recommend_users(
            recommender,
            sequences,
            out,
            k=k,
            exclude_seen=not keep_seen,
            allow=allowed,
            block=blocked,
            on_progress=update,
        )
    output.print(f"{n_rows:,} recommendations for {sequences.n_users:,} users are in {out}")


def similar(
    model: ModelDirectory,
    item: Annotated[str, typer.Argument(help="An item id.")],
    k: Count = 10,
) -> None:
    """Items that the model sees as alike (cosine of their vectors)."""
    from bert4rec.recommender import Recommender

    _print(Recommender.load(model).similar(item, k), "cosine", has_probability=False)


def explain(
    model: ModelDirectory,
    history: Annotated[str, typer.Option(help="Item ids, oldest first, separated by commas.")],
    item: Annotated[str, typer.Option(help="The item whose recommendation is to be explained.")],
) -> None:
    """How much each item of a history speaks for an item, and where attention went."""
    from rich.table import Table

    from bert4rec.recommender import Recommender

    found = Recommender.load(model).explain(_ids(history) or [], item)
    title = shown(f"{found.item}  {found.title or ''}  probability {found.probability:.2%}")
    table = Table(title=title, title_justify="left")
    table.add_column("history item")
    table.add_column("title")
    table.add_column("influence", justify="right")
    attention = None if found.attention is None else found.attention[:, :, -1, :]
    for layer in range(0 if attention is None else len(attention)):
        table.add_column(f"attention, layer {layer + 1}", justify="right")
    for place, each in enumerate(found.influences):
        cells = [] if attention is None else [f"{a:.0%}" for a in attention[:, :, place].mean(1)]
        title = shown(each.title or "")
        table.add_row(shown(each.item), title, f"{each.influence:+.3f}", *cells)
    output.print(table)
    output.print(
        "Influence: the log-probability that the item would lose without this one. "
        "Attention: from [MASK], mean of the heads.",
        style="dim",
        markup=False,
    )


def _ids(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _print(found: list[Recommendation], score_name: str, has_probability: bool) -> None:
    from rich.table import Table

    table = Table()
    for column in ("", "item", "title", score_name, *(["probability"] if has_probability else [])):
        table.add_column(column)
    for place, each in enumerate(found, 1):
        cells = [str(place), shown(each.item), shown(each.title or ""), f"{each.score:.3f}"]
        table.add_row(*cells, *([f"{each.probability:.2%}"] if has_probability else []))
    output.print(table)


def add_to(app: typer.Typer) -> None:
    for verb in (recommend, similar, explain):
        app.command()(verb)
