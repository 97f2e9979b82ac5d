"""From interactions to `Sequences` on disk, out of core: memory stays at about `memory_limit`.

The working database is in a temporary folder next to the result. The result appears by a rename
when it is complete. It is found again by the hash of everything that went into it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any, Protocol

import duckdb

from bert4rec.data.database import connect, first_line, limit_memory
from bert4rec.data.filters import Filters, describe_step
from bert4rec.data.interactions import Interactions, OnProgress
from bert4rec.data.prepared_files import (
    SORTED,
    check_enough_is_left,
    create_arrays,
    number_ids,
    write_names_and_meta,
    write_sorted,
)
from bert4rec.data.sequences import FORMAT_VERSION, Sequences, fingerprint_of
from bert4rec.data.staging import PrepareJob, Staged, stage
from bert4rec.environment import Environment

FILES = {"meta.json", "tokens.npy", "offsets.npy", "times.npy", "items.parquet", "users.parquet"}


class PrepareEngine(Protocol):
    """Where the rows are read, filtered and sorted. Every engine writes the same bytes."""

    def as_files(self, interactions: Interactions, folder: Path, say: OnProgress) -> Interactions: ...

    def content(self, interactions: Interactions, say: OnProgress) -> dict[str, Any]: ...

    def stage(self, job: PrepareJob) -> Staged:
        """Read all rows; leaves counts and names in the job's database."""
        ...

    def write_arrays(self, job: PrepareJob, staged: Staged) -> None:
        """Fill tokens.npy and times.npy."""
        ...


class LocalEngine:
    """This process."""

    def as_files(self, interactions: Interactions, folder: Path, say: OnProgress) -> Interactions:
        return interactions.as_files(folder, say)

    def content(self, interactions: Interactions, say: OnProgress) -> dict[str, Any]:
        return interactions.content(say)

    def stage(self, job: PrepareJob) -> Staged:
        return stage(job)

    def write_arrays(self, job: PrepareJob, staged: Staged) -> None:
        job.connection.execute(f"CREATE TABLE sorted AS {SORTED}")
        write_sorted(job.connection, job.finished, staged.time_unit)
        job.connection.execute("DROP TABLE sorted")


def prepare(
    interactions: Interactions,
    filters: Filters = Filters(),  # noqa: B008 (frozen)
    *,
    out: str | Path | None = None,
    cache: str | Path | None = None,
    memory_limit: str = "512MB",
    threads: int | None = None,
    for_training: bool = True,
    progress: OnProgress | None = None,
    engine: PrepareEngine = LocalEngine(),  # noqa: B008 (without state)
) -> Sequences:
    """Sequences in the directory `out`, or in a folder of `cache` named by their content.

    An intact result of the same bytes and the same settings is reused.
    Unless it is `for_training`, one action and one item are enough.
    `meta["dropped"]` of the result lists what each step dropped.
    An `engine` may work on a cluster, where each worker keeps to `memory_limit`.
    """
    say: OnProgress = progress or (lambda message: None)
    out = None if out is None else Path(out)
    parent = out.parent if out else Path(cache or Environment().prepared)
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".preparing-") as name:
        folder = Path(name).resolve()
        interactions = engine.as_files(interactions, folder, say)
        key = _content_key(engine.content(interactions, say), filters, for_training)
        target = out or parent / key[:32]
        if (prepared := _intact(target, key)) is not None:
            say(f"reused {target}, prepared before from the same data")
            return prepared
        if out is not None:  # a folder of the cache is always ours
            _refuse_to_overwrite(out)
        connection = connect(str(folder / "work.duckdb"))
        try:
            limit_memory(connection, folder, memory_limit, threads)
            job = PrepareJob(interactions, filters, for_training, key, connection, memory_limit, folder, say)
            job.finished.mkdir()
            _fill(job, engine)
        except duckdb.OutOfMemoryException as error:
            raise ValueError(
                f"memory_limit={memory_limit} is too small for this data: raise it ({first_line(error)})"
            ) from None
        finally:
            connection.close()
        if target.exists():  # prepared from other data, or damaged: out of the way, then deleted
            target.rename(folder / "replaced")
        job.finished.rename(target)
    return Sequences.load(target)


def _fill(job: PrepareJob, engine: PrepareEngine) -> None:
    """Write all files of the prepared data set."""
    staged = engine.stage(job)
    for step in staged.dropped:
        job.say(describe_step(step))
    read = staged.events.totals()
    dropped = staged.dropped + job.filters.apply(staged.events, job.say)
    check_enough_is_left(job, read, staged.events.totals(), dropped)
    id_types = number_ids(job.connection)
    job.say("sorting by user and time, and writing the sequences")
    create_arrays(job, staged.time_unit)
    engine.write_arrays(job, staged)
    write_names_and_meta(job, id_types, dropped)


def _content_key(content: dict[str, Any], filters: Filters, for_training: bool) -> str:
    """A hash of all that decides the result, and whether it was checked for training."""
    content = {
        "format": FORMAT_VERSION,
        "interactions": content,
        "filters": filters.as_dict(),
        "for_training": for_training,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _intact(directory: Path, key: str) -> Sequences | None:
    """The prepared data in `directory`, if it has this key and is undamaged."""
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
        raise ValueError(f"{target} holds other files than prepared data: name an empty or a new directory")


def _is_ours(meta: Path) -> bool:
    try:
        content = json.loads(meta.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "content_key" in content
