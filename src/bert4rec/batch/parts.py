"""Parts of the users, each a Parquet file that is whole or not there, and knows whose it is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import duckdb

from bert4rec.allocator import keep_freed_memory
from bert4rec.batch.plan import Plan, model_version
from bert4rec.batch.rows import UserRows
from bert4rec.data.database import connect, quoted
from bert4rec.data.sequences import Sequences
from bert4rec.durable import new_file
from bert4rec.recommender import Recommender

KEY = "bert4rec_scoring"  # in a part's metadata: the key of the plan and the number of the part


@dataclass(frozen=True)
class Job:
    """All that a worker must know, as text between processes and machines."""

    plan: Plan
    model: Path
    data: Path
    out: Path

    def as_json(self) -> str:
        places = {name: str(getattr(self, name)) for name in ("model", "data", "out")}
        return json.dumps({"plan": dataclasses.asdict(self.plan), **places})

    @classmethod
    def from_json(cls, text: str) -> Self:
        content = json.loads(text)
        places = {name: Path(content[name]) for name in ("model", "data", "out")}
        return cls(plan=Plan(**content["plan"]), **places)


class PartWriter:
    """A model and the users' histories, ready to compute any part."""

    def __init__(self, job: Job) -> None:
        keep_freed_memory()
        recommender = Recommender.load(job.model, job.plan.retrieval)
        sequences = Sequences.load(job.data)
        # Somebody may have trained or prepared again, there, since the plan was made.
        for name, is_same in (
            (job.model, model_version(job.model) == job.plan.model),
            (job.data, sequences.fingerprint == job.plan.data),
        ):
            if not is_same:
                raise ValueError(f"{name} has changed since scoring began: start again")
        self._job, self._rows = job, UserRows(recommender, sequences, job.plan.asked)
        self._database = connect()

    def write(self, part: int, on_progress: Callable[[int], None] | None = None) -> None:
        """Compute a part and put it in its place; `on_progress` hears of users done in it."""
        mark = json.dumps({"plan": self._job.plan.key, "part": part})
        database = self._database
        database.execute(self._rows.table)
        with new_file(part_path(self._job.out, part)) as temporary:
            for n_done, columns in self._rows.of(*self._job.plan.users_of(part)):
                database.register("chunk", columns)
                database.execute("INSERT INTO rows SELECT * FROM chunk")
                if on_progress is not None:
                    on_progress(n_done)
            database.execute(
                f"COPY rows TO {quoted(temporary)} "
                f"(FORMAT parquet, KV_METADATA {{{KEY}: {quoted(mark)}}})"
            )


def part_path(out: Path, part: int) -> Path:
    return out / f"part-{part:05d}.parquet"


def finished_parts(out: Path, plan: Plan, parts: Iterable[int]) -> dict[int, int]:
    """Those of `parts` that are there, whole and of this plan, and their numbers of rows."""
    found = {}
    with connect() as database:
        for part in parts:
            n_rows = _n_rows(database, part_path(out, part), {"plan": plan.key, "part": part})
            if n_rows is not None:
                found[part] = n_rows
    return found


def _n_rows(database: duckdb.DuckDBPyConnection, path: Path, mark: dict[str, object]) -> int | None:
    if not path.is_file():
        return None
    try:
        marks = database.execute(
            f"SELECT value FROM parquet_kv_metadata({quoted(path)}) WHERE key = {quoted(KEY)}"
        ).fetchall()
        ((n_rows,),) = database.execute(
            f"SELECT num_rows FROM parquet_file_metadata({quoted(path)})"
        ).fetchall()
    except duckdb.Error:
        return None  # cut short or overwritten by something else
    return int(n_rows) if [json.loads(text) for (text,) in marks] == [mark] else None


def remove_leftovers(out: Path) -> None:
    """Files that a killed worker did not finish."""
    for path in out.glob(".part-*.tmp"):
        path.unlink(missing_ok=True)
