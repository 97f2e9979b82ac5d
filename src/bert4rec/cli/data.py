"""Verbs about data: audit, prepare, list, get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bert4rec.cli.console import (
    ConfigFile,
    Delimiter,
    Encoding,
    Header,
    ItemColumn,
    Items,
    OnBadRows,
    Overrides,
    RatingColumn,
    Recipe,
    SortMemory,
    TimeColumn,
    UserColumn,
    output,
    progress_bar,
    say,
)

app = typer.Typer(help="Look at, prepare and download data.", no_args_is_help=True)


@app.command()
def audit(
    data: Annotated[str, typer.Argument(help="A table of interactions, as for `train`.")],
    recipe: Recipe = "default",
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a page.")] = False,
    user: UserColumn = None,
    item: ItemColumn = None,
    time: TimeColumn = None,
    rating: RatingColumn = None,
    delimiter: Delimiter = None,
    header: Header = None,
    encoding: Encoding = None,
    on_bad_rows: OnBadRows = "error",
    items: Items = None,
) -> None:
    """What would spoil a result on this data: ties, duplicates, cold items, leakage, …"""
    from bert4rec.config import load_config
    from bert4rec.data.audit import audit as audit_sequences
    from bert4rec.data.sources import Reading, open_data

    settings = load_config(recipe, config, overrides or ())
    reading = Reading(user, item, time, rating, delimiter, header, encoding, on_bad_rows, items)
    report = audit_sequences(open_data(data, settings.data, reading, say=say))
    if as_json:
        output.print_json(json.dumps(report.as_dict()))
    else:
        output.print(report.render())


@app.command()
def prepare(
    data: Annotated[str, typer.Argument(help="A table of interactions, as for `train`.")],
    out: Annotated[Path, typer.Option(help="Folder for the prepared data.")],
    recipe: Recipe = "default",
    config: ConfigFile = None,
    overrides: Overrides = None,
    memory: SortMemory = "512MB",
    user: UserColumn = None,
    item: ItemColumn = None,
    time: TimeColumn = None,
    rating: RatingColumn = None,
    delimiter: Delimiter = None,
    header: Header = None,
    encoding: Encoding = None,
    on_bad_rows: OnBadRows = "error",
    items: Items = None,
) -> None:
    """Read, filter and sort a table once, into a folder that every other command opens at once."""
    from bert4rec.config import load_config
    from bert4rec.data.sources import Reading, open_data

    settings = load_config(recipe, config, overrides or ())
    reading = Reading(user, item, time, rating, delimiter, header, encoding, on_bad_rows, items)
    sequences = open_data(data, settings.data, reading, out=out, memory_limit=memory, say=say)
    output.print(
        f"{sequences.n_users:,} users, {sequences.n_items:,} items, "
        f"{sequences.n_interactions:,} interactions are in {out}"
    )


@app.command("list")
def list_datasets() -> None:
    """The public data sets that `get` and `train` know by name."""
    from rich.table import Table

    from bert4rec.data.public import DATASETS
    from bert4rec.environment import Environment

    table = Table()
    for column in ("name", "what", "interactions", "download", "terms"):
        table.add_column(column)
    table.add_row("demo", "films, made up; comes with bert4rec", "71,862", "–", "free")
    for each in DATASETS.values():
        size = f"{each.size / 2**20:,.0f} MB"
        table.add_row(each.name, each.description, f"{each.n_interactions:,}", size, each.licence)
    output.print(table)
    output.print(f"Downloads go to {Environment().downloads}; BERT4REC_DATA names another folder.")


@app.command()
def get(name: Annotated[str, typer.Argument(help="A name from `bert4rec data list`.")]) -> None:
    """Download a public data set from its publisher."""
    from bert4rec.data.public import get as get_dataset

    with progress_bar(f"downloading {name}") as update:
        folder = get_dataset(name, progress=update)
    output.print(f"{name} is in {folder}; now: bert4rec train {name}")
