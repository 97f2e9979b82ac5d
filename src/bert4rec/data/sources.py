"""Prepared sequences from whatever names data: a file, a folder, a frame, `demo`, `ml-1m`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bert4rec.data import demo, public
from bert4rec.data.download import OnDownload
from bert4rec.data.filters import DataSettings, Filters
from bert4rec.data.interactions import Interactions, OnProgress
from bert4rec.data.prepare import prepare
from bert4rec.data.sequences import Sequences
from bert4rec.data.staging import PrepareWorkers
from bert4rec.data.table_file import Reading
from bert4rec.environment import Environment

__all__ = ["Reading", "interactions_of", "open_data"]


def interactions_of(source: Any, reading: Reading, on_download: OnDownload | None = None) -> Interactions:
    """Read a file, a frame, a list of tuples, the demo, or a public data set by its name."""
    if isinstance(source, str) and not Path(source).exists():
        if source == "demo":
            source, items = demo.write_csv(Environment().cache.expanduser() / "demo")
            reading = replace(reading, items=items)
        elif source in public.DATASETS:
            dataset, folder = public.DATASETS[source], public.get(source, progress=on_download)
            source, reading = folder / dataset.table, dataset.reading(folder, reading)
    return Interactions.read(source, reading)


def open_data(
    source: Any,
    config: DataSettings | None = None,
    reading: Reading | None = None,
    *,
    out: Path | None = None,
    memory_limit: str = "512MB",
    threads: int | None = None,
    workers: PrepareWorkers | None = None,
    say: OnProgress | None = None,
    on_download: OnDownload | None = None,
) -> Sequences:
    """Prepared sequences; a directory that is prepared already is opened as it is."""
    filters = config or DataSettings()
    if isinstance(source, str | Path) and (Path(source) / "meta.json").is_file():
        sequences = Sequences.load(source)
        used = sequences.meta["filters"]
        if filters.as_dict() != Filters().as_dict() and not filters.as_dict().items() <= used.items():
            raise ValueError(
                f"{source} was prepared with the filters {used}: filters "
                "cannot be changed afterwards, so prepare the table again or leave them out"
            )
        return sequences
    return prepare(
        interactions_of(source, reading or Reading(), on_download),
        filters,
        out=out,
        memory_limit=memory_limit,
        threads=threads,
        progress=say,
        workers=workers,
    )
