"""What a person may name as data (a file, a folder, `demo`, `ml-1m`) as prepared sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bert4rec.data import demo, public
from bert4rec.data.filters import DataSettings, Filters
from bert4rec.data.in_parts import Workers
from bert4rec.data.interactions import Interactions, OnBadRows
from bert4rec.data.prepare import prepare
from bert4rec.data.sequences import Sequences
from bert4rec.environment import Environment


@dataclass(frozen=True)
class Reading:
    """How to read a table where its own names and format do not say; None finds out."""

    user: str | None = None
    item: str | None = None
    time: str | None = None
    rating: str | None = None
    delimiter: str | None = None
    header: bool | None = None
    encoding: str | None = None
    on_bad_rows: OnBadRows = "error"
    items: str | None = None  # a table of titles and other facts about the items
    allow_remote: bool = False  # may the table be in object storage?


def interactions_of(
    source: Any,
    reading: Reading,
    on_download: Callable[[int, int | None], None] | None = None,
) -> Interactions:
    """A file path, a frame, a list of tuples, or the name of the demo or of a public data set."""
    arguments = asdict(reading)
    if isinstance(source, str) and not Path(source).exists():
        if source == "demo":
            table, items = demo.write_csv(Environment().cache.expanduser() / "demo")
            return Interactions.read(table, **(arguments | {"items": items}))
        if source in public.DATASETS:
            folder = public.get(source, progress=on_download)
            arguments |= public.DATASETS[source].read_arguments(folder)
            return Interactions.read(arguments.pop("source"), **arguments)
    return Interactions.read(source, **arguments)


def open_data(
    source: Any,
    config: DataSettings | None = None,
    reading: Reading | None = None,
    *,
    out: Path | None = None,
    memory_limit: str = "512MB",
    threads: int | None = None,
    workers: Workers | None = None,
    say: Callable[[str], None] | None = None,
    on_download: Callable[[int, int | None], None] | None = None,
) -> Sequences:
    """Prepared sequences; a directory that was prepared before is opened as it is."""
    filters = Filters(**(config or DataSettings()).model_dump(exclude={"split"}))
    if isinstance(source, str | Path) and (Path(source) / "meta.json").is_file():
        sequences = Sequences.load(source)
        if filters not in (Filters(), Filters(**sequences.meta["filters"])):
            raise ValueError(
                f"{source} was prepared with the filters {sequences.meta['filters']}: filters "
                "cannot be changed afterwards, so prepare the table again or leave them out"
            )
        return sequences
    interactions = interactions_of(source, reading or Reading(), on_download)
    return prepare(
        interactions,
        filters,
        out=out,
        memory_limit=memory_limit,
        threads=threads,
        progress=say,
        workers=workers,
    )
