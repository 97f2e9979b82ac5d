"""The verb `histories`: import, list and compact the histories that `serve` uses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from bert4rec.cli.console import output, printable, progress_bar, say
from bert4rec.cli.options import HistoryTableOptions, reads_histories

if TYPE_CHECKING:
    from bert4rec.data.sequences import Sequences
    from bert4rec.serving.store import HistoryStore

app = typer.Typer(help="Import, list and compact the stored histories of a service.", no_args_is_help=True)

StoreUrl = Annotated[
    str, typer.Option("--store", envvar="BERT4REC_STORE", help="sqlite:PATH or redis://HOST:PORT/DB, as for `serve`.")
]
T = TypeVar("T")


@app.command("import")
@reads_histories
def import_table(
    data: Annotated[str, typer.Argument(help="A table of interactions, a prepared directory, or `demo`.")],
    store: StoreUrl,
    *,
    table: HistoryTableOptions,
) -> None:
    """Import the histories of a table into a store; importing again adds only what is new."""
    import tempfile

    from bert4rec.serving.store import SHOWN_EVENTS
    from bert4rec.serving.store.history_import import import_histories

    with tempfile.TemporaryDirectory() as folder:
        sequences = _sequences(data, table, Path(folder))
        n_old = int((sequences.lengths - SHOWN_EVENTS).clip(min=0).sum())
        if n_old:
            say(f"leaving out {n_old:,} events: only the newest {SHOWN_EVENTS:,} per user are used")
        if sequences.times is None:
            say("no times: the position of an event in the table is its time")
        with progress_bar("importing") as update:
            added = _with_store(store, lambda opened: import_histories(opened, sequences, update))
    output.print(
        f"{added.stored:,} events of {sequences.n_users:,} users are new in the store, "
        f"{added.duplicates:,} were there already"
    )


@app.command("list")
def list_users(
    store: StoreUrl,
    query: Annotated[str, typer.Option(help="Only users whose id begins with this.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many users.")] = 20,
) -> None:
    """List the users of a store, the last active first."""
    from rich.table import Table

    users = _with_store(store, lambda opened: opened.users(query, limit), may_create=False)
    table = Table()
    for column in ("user", "events", "last active (UTC)"):
        table.add_column(column, justify="right" if column == "events" else "left")
    for each in users:
        table.add_row(printable(each.user), f"{each.n_events:,}", _moment(each.last_time))
    output.print(table)
    if len(users) == limit:
        say(f"the first {limit}; --limit shows more, --query searches")


@app.command()
def compact(store: StoreUrl) -> None:
    """Rewrite a SQLite store: smaller, and without traces of erased users."""
    from bert4rec.serving.store.sqlite_file import compact as compact_file

    if not store.startswith("sqlite:"):
        raise ValueError("only a store in a SQLite file can be compacted: pass sqlite:PATH")
    path = Path(store.removeprefix("sqlite:")).expanduser()
    compact_file(path)
    output.print(f"{path} has {path.stat().st_size:,} bytes now", markup=False, highlight=False)


def _sequences(data: str, table: HistoryTableOptions, folder: Path) -> Sequences:
    from bert4rec.data.sequences import Sequences

    if (Path(data) / "meta.json").is_file():
        return Sequences.load(data)
    return table.prepare(data, folder / "histories")


def _with_store(url: str, query: Callable[[HistoryStore], Awaitable[T]], *, may_create: bool = True) -> T:
    import asyncio

    from bert4rec.serving.store import StoreUnavailable, open_store

    async def run() -> T:
        store = await open_store(url, may_create=may_create)
        try:
            return await query(store)
        finally:
            await store.close()

    try:
        return asyncio.run(run())
    except StoreUnavailable as error:
        raise ValueError(f"{error}; try again later") from None


def _moment(seconds: float) -> str:
    from datetime import UTC, datetime

    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g} s"
