"""Parts of a batch: each is a Parquet file that is complete or absent, and carries its plan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import duckdb

from bert4rec.cpu_tuning import keep_freed_memory
from bert4rec.data.database import connect, quoted
from bert4rec.data.sequences import Sequences
from bert4rec.distributed.scoring_plan import ScoringPlan, hash_of_users, model_version
from bert4rec.distributed.user_rows import UserRows
from bert4rec.durable import new_file, sha256, write_file
from bert4rec.recommender import Recommender

KEY = "bert4rec_scoring"  # in the metadata of a part: the key of its plan, and its number


@dataclass(frozen=True)
class ScoringJob:
    """All that a worker must know; paths are the same on all machines."""

    plan: ScoringPlan
    model: Path
    data: Path
    out: Path

    def n_users_of(self, parts: Iterable[int]) -> int:
        return sum(map(self.plan.n_users_of, parts))

    def is_finished(self, part: int) -> bool:
        return bool(finished_parts(self.out, self.plan, [part]))


class PartWriter:
    """A loaded model and the users' histories, ready to compute any part."""

    def __init__(self, job: ScoringJob) -> None:
        keep_freed_memory()
        recommender = Recommender.load(job.model, job.plan.retrieval)
        sequences = Sequences.load(job.data)
        self._job, self._rows = job, UserRows(recommender, sequences, job.plan.request)
        # The model or the data may have been replaced since the plan was made.
        for name, is_same in (
            (job.model, model_version(job.model) == job.plan.model),
            (job.data, sequences.fingerprint == job.plan.data),
            (job.data, hash_of_users(sequences) == job.plan.users),
        ):
            if not is_same:
                raise ValueError(f"{name} has changed since scoring began: start again")
        self._database = connect()

    def write(self, part: int, on_progress: Callable[[int], None] | None = None) -> None:
        """Compute a part and write it; `on_progress` gets the number of its users done so far."""
        mark = json.dumps({"plan": self._job.plan.key, "part": part})
        path = part_path(self._job.out, part)
        self._rows.fill(self._database, *self._job.plan.users_of(part), on_progress)
        with new_file(path) as temporary:
            self._database.execute(
                f"COPY rows TO {quoted(temporary)} "
                f"(FORMAT parquet, KV_METADATA {{{KEY}: {quoted(mark)}}})"
            )
            # First the checksum, then the part: a part that is there has one.
            write_file(sum_path(path), f"{sha256(temporary)}  {path.name}\n")


def part_path(out: Path, part: int) -> Path:
    return out / f"part-{part:05d}.parquet"


def sum_path(part: Path) -> Path:
    """The file beside a part with its SHA-256, as `sha256sum --check` reads it."""
    return part.with_name(f".{part.stem}.sha256")


def is_part(path: Path) -> bool:
    """Whether the name is one of ours; parts of other programs have longer names."""
    return re.fullmatch(r"part-\d{5,}\.parquet", path.name) is not None


def remove_parts(out: Path) -> None:
    for path in out.iterdir():
        if is_part(path):
            path.unlink()
            sum_path(path).unlink(missing_ok=True)


def finished_parts(out: Path, plan: ScoringPlan, parts: Iterable[int]) -> dict[int, int]:
    """{part: its number of rows} for those `parts` that are there, undamaged and of this plan."""
    found = {}
    with connect() as database:
        for part in parts:
            n_rows = _n_rows(database, part_path(out, part), {"plan": plan.key, "part": part})
            if n_rows is not None:
                found[part] = n_rows
    return found


def _n_rows(database: duckdb.DuckDBPyConnection, path: Path, mark: dict[str, object]) -> int | None:
    if not _is_undamaged(path):
        return None
    try:
        marks = database.execute(
            f"SELECT value FROM parquet_kv_metadata({quoted(path)}) WHERE key = {quoted(KEY)}"
        ).fetchall()
        ((n_rows,),) = database.execute(
            f"SELECT num_rows FROM parquet_file_metadata({quoted(path)})"
        ).fetchall()
    except duckdb.Error:
        return None  # another file, with a checksum of its own
    return int(n_rows) if [json.loads(text) for (text,) in marks] == [mark] else None


def _is_undamaged(path: Path) -> bool:
    try:
        return sum_path(path).read_text(encoding="utf-8").split() == [sha256(path), path.name]
    except (OSError, ValueError):
        return False


def remove_leftovers(out: Path) -> None:
    """Delete what a killed process left unfinished: parts, checksums, the plan or the marker."""
    for pattern in (".part-*.tmp", "..part-*.tmp", "._*.tmp"):
        for path in out.glob(pattern):
            path.unlink(missing_ok=True)
