"""From interactions to `Sequences` on disk, out of core: memory stays at about `memory_limit`.

The working database lies in a temporary folder next to the result, which appears by a rename when
it is complete. A result is found again by the hash of everything that went into it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb

from bert4rec.data.database import connect, out_of_core
from bert4rec.data.filters import Filters, LocalEvents, describe_step
from bert4rec.data.in_parts import Workers, check_can_be_shared, contents, fill_in_parts
from bert4rec.data.interactions import Interactions
from bert4rec.data.sequences import FORMAT_VERSION, Sequences, fingerprint_of
from bert4rec.data.staging import stage
from bert4rec.data.writing import (
    SORTED,
    check_enough_is_left,
    create_arrays,
    number_ids,
    write_names_and_meta,
    write_sorted,
)
from bert4rec.environment import Environment

FILES = {"meta.json", "tokens.npy", "offsets.npy", "times.npy", "items.parquet", "users.parquet"}

Progress = Callable[[str], None]


def prepare(
    interactions: Interactions,
    filters: Filters = Filters(),  # noqa: B008 (frozen)
    *,
    out: str | Path | None = None,
    cache: str | Path | None = None,
    memory_limit: str = "512MB",
    threads: int | None = None,
    for_training: bool = True,
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> Sequences:
    """Sequences in the directory `out`, or in a folder of `cache` named by what they come from.

    Prepared before from the same bytes with the same settings, and intact: reused.
    Unless it is `for_training`, single actions and single items are enough.
    `meta["dropped"]` of the result lists what each step left out.
    With `workers` they do the work, each within `memory_limit`; the result is the same.
    """
    say: Progress = progress or (lambda message: None)
    out = None if out is None else Path(out)
    parent = out.parent if out else Path(cache or Environment().prepared)
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".preparing-") as name:
        folder = Path(name)
        on_all = None if workers is None else workers.map
        interactions = interactions.as_files(folder.resolve(), say, on_all)
        of_tables = None
        if workers is not None:
            check_can_be_shared(interactions)
            of_tables = contents(interactions, workers, say)
        content = interactions.content(say, of_tables)
        key = _content_key(content, filters, for_training)
        target = out or parent / key[:32]
        if (prepared := _intact(target, key)) is not None:
            say(f"reused {target}, prepared before from the same data")
            return prepared
        if out is not None:  # a folder of the cache is always ours
            _refuse_to_overwrite(out)
        connection = connect(str(folder / "work.duckdb"))
        try:
            out_of_core(connection, folder, memory_limit, threads)
            finished = folder / "finished"
            finished.mkdir()
            work = (connection, interactions, filters, folder, finished, key, for_training, say)
            if workers is None:
                _fill(*work)
            else:
                fill_in_parts(*work, workers, memory_limit)
        except duckdb.OutOfMemoryException as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"memory_limit={memory_limit} is too small for this data: raise it ({reason})"
            ) from None
        finally:
            connection.close()
        if target.exists():  # prepared from other data, or damaged: out of the way, then gone
            target.rename(folder / "replaced")
        finished.rename(target)
    return Sequences.load(target)


def _content_key(content: dict[str, Any], filters: Filters, for_training: bool) -> str:
    """A hash of all that decides the result, and whether it was found fit for training."""
    content = {
        "format": FORMAT_VERSION,
        "interactions": content,
        "filters": filters.as_dict(),
        "for_training": for_training,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _intact(directory: Path, key: str) -> Sequences | None:
    """The prepared data in `directory` if it is the wanted one and undamaged."""
    try:
        sequences = Sequences.load(directory)
        if sequences.meta.get("content_key") != key:
            return None
        found = fingerprint_of(sequences.tokens, sequences.offsets, sequences.vocabulary.ids)
        n_times = sequences.n_interactions if sequences.times is None else len(sequences.times)
    except (ValueError, OSError, EOFError, LookupError, TypeError, AssertionError, duckdb.Error):
        return None
    is_whole = (directory / "users.parquet").is_file() and n_times == sequences.n_interactions
    return sequences if is_whole and found == sequences.meta["fingerprint"] else None


def _refuse_to_overwrite(target: Path) -> None:
    if target.is_file():
        raise ValueError(f"{target} is a file: name a directory for the prepared data")
    found = {path.name for path in target.iterdir()} if target.is_dir() else set()
    if found and not (found <= FILES and _is_ours(target / "meta.json")):
        raise ValueError(
            f"{target} holds other files than prepared data: name an empty or a new directory"
        )


def _is_ours(meta: Path) -> bool:
    try:
        content = json.loads(meta.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "content_key" in content


def _fill(
    connection: duckdb.DuckDBPyConnection,
    interactions: Interactions,
    filters: Filters,
    folder: Path,
    finished: Path,
    key: str,
    for_training: bool,
    say: Progress,
) -> None:
    """All files of the prepared data set, in the folder `finished`."""
    staged = stage(
        connection,
        interactions,
        folder,
        needs_rating=filters.min_rating is not None,
        progress=say,
    )
    for step in staged.dropped:
        say(describe_step(step))
    events = LocalEvents(connection)
    read = events.totals()
    dropped = staged.dropped + filters.apply(events, say)
    check_enough_is_left(interactions, read, events.totals(), dropped, for_training)
    id_types = number_ids(connection)
    say("sorting by user and time")
    connection.execute(f"CREATE TABLE sorted AS {SORTED}")
    say("writing the sequences")
    create_arrays(connection, finished, staged.time_unit)
    write_sorted(connection, finished, staged.time_unit)
    connection.execute("DROP TABLE sorted")
    write_names_and_meta(
        connection, interactions, filters, id_types, dropped, key, folder, finished, say
    )
