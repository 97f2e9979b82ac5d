"""Verbs that ask a trained model: recommend (in its own file), similar, explain."""

from __future__ import annotations

from typing import Annotated

import typer

from bert4rec.cli.console import output, shown
from bert4rec.cli.recommend import Count, ModelDirectory, print_items, recommend, split_ids


def similar(
    model: ModelDirectory,
    item: Annotated[str, typer.Argument(help="An item id.")],
    k: Count = 10,
) -> None:
    """Items that the model sees as alike (cosine of their vectors)."""
    from bert4rec.recommender import Recommender

    print_items(Recommender.load(model).similar(item, k), "cosine", has_probability=False)


def explain(
    model: ModelDirectory,
    history: Annotated[str, typer.Option(help="Item ids, oldest first, separated by commas.")],
    item: Annotated[str, typer.Option(help="The item whose recommendation is to be explained.")],
) -> None:
    """How much each item of a history speaks for an item, and where attention went."""
    from rich.table import Table

    from bert4rec.recommender import Recommender

    found = Recommender.load(model).explain(split_ids(history) or [], item)
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


def add_to(app: typer.Typer) -> None:
    for verb in (recommend, similar, explain):
        app.command()(verb)
