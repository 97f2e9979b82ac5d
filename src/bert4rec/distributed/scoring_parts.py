"""The parts of a batch: how the users are split into them, and how each is written.

A part is a Parquet file that is complete or absent, and carries the plan that it belongs to.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import duckdb
from pydantic import Field

from bert4rec.cpu_tuning import keep_freed_memory
from bert4rec.data.database import connect, fetch_row, parquet, quoted
from bert4rec.data.sequences import Sequences
from bert4rec.distributed.user_rows import BatchRequest, UserRows, no_report
from bert4rec.durable import MANIFEST, new_file, sha256, write_file
from bert4rec.recommender import Recommender, Retrieval
from bert4rec.settings import Settings

PLAN, COMPLETE = "_scoring.json", "_SUCCESS"
KEY = "bert4rec_scoring"  # in the metadata of a part: the key of its plan, and its number

# Parts are small, so that workers share them evenly and a crash loses little; up to ENOUGH_PARTS.
FEWEST_USERS, MOST_USERS, MOST_ROWS, ENOUGH_PARTS = 1024, 65_536, 2_000_000, 64

SHORT = 20  # letters of a value that fits a message


class ScoringPlan(Settings):
    """What is computed, for whom, and in how many parts; the descriptions are for messages."""

    format_version: Literal[1] = 1
    model: str = Field(description="the model")  # SHA-256 of its manifest, which lists those of its files
    data: str = Field(description="the data")  # fingerprint of the sequences
    users: str = Field(description="the list of user ids")  # a hash of them, in order
    n_users: int = Field(description="the number of users")
    n_parts: int = Field(description="--parts")
    k: int = Field(description="--k")
    exclude_seen: bool = Field(description="whether seen items are excluded")
    allow: list[str] | None = Field(description="--allow")
    block: list[str] | None = Field(description="--block")
    retrieval: Retrieval = Field(description="--retrieval")

    @property
    def request(self) -> BatchRequest:
        return BatchRequest(self.k, self.exclude_seen, self.allow, self.block, self.retrieval)

    @property
    def key(self) -> str:
        """A hash of all of it, which each part carries."""
        return hashlib.sha256(json.dumps(self.model_dump(exclude={"format_version"})).encode()).hexdigest()

    def users_of(self, part: int) -> tuple[int, int]:
        """Rows `first` to `last - 1` of the data; part sizes differ by at most one user."""
        first, last = (n * self.n_users // self.n_parts for n in (part, part + 1))
        return first, last


def default_parts(n_users: int, k: int) -> int:
    """Depends on the data alone, so that a run can be resumed with other workers."""
    most_users = max(1, min(MOST_USERS, MOST_ROWS // k))
    few = min(-(-n_users // FEWEST_USERS), ENOUGH_PARTS)
    return max(few, -(-n_users // most_users))


def make_plan(
    model: Path, sequences: Sequences, request: BatchRequest, n_parts: int | None, before: ScoringPlan | None
) -> ScoringPlan:
    """A resumed run keeps the number of parts that it had `before`, unless `n_parts` is given."""
    n_users = int(sequences.n_users)
    if n_parts is not None and not 1 <= n_parts <= n_users:
        raise ValueError(
            f"parts is {n_parts} and there are {n_users:,} users: every part needs one, so choose 1 to {n_users:,}"
        )
    n_parts = n_parts or (before.n_parts if before else default_parts(n_users, request.k))
    items = {"allow": _sorted_ids(request.allow), "block": _sorted_ids(request.block)}
    return ScoringPlan(n_users=n_users, n_parts=n_parts, **vars(request) | items | _versions(model, sequences))


def _versions(model: Path, sequences: Sequences) -> dict[str, str]:
    """What must stay the same while parts are computed, by its name in the plan."""
    return {"model": sha256(model / MANIFEST), "data": sequences.fingerprint, "users": _hash_of_users(sequences)}


def _hash_of_users(sequences: Sequences) -> str:
    """A hash of the user ids and their rows, which the data's fingerprint leaves out."""
    assert sequences.directory is not None
    users = parquet(sequences.directory / "users.parquet")
    with connect() as database:
        query = f"SELECT bit_xor(md5_number(row || ':' || \"user\"))::VARCHAR FROM {users}"
        return str(fetch_row(database, query)[0])


def _sorted_ids(ids: Iterable[object] | None) -> list[str] | None:
    return None if ids is None else sorted({str(raw) for raw in ids})


def read_plan(out: Path) -> ScoringPlan | None:
    """The plan that is in the directory; None if there is none."""
    path = out / PLAN
    if not path.exists():
        return None
    try:
        return ScoringPlan.model_validate_json(path.read_bytes())
    except ValueError:
        raise ValueError(
            f"{path} is damaged, or of another version of this program: pass --overwrite to begin "
            "again, or choose another directory"
        ) from None


def write_plan(out: Path, plan: ScoringPlan) -> None:
    write_file(out / PLAN, plan.model_dump_json(indent=2) + "\n")


def check_same_plan(out: Path, before: ScoringPlan, now: ScoringPlan) -> None:
    """A ValueError that names the difference: a directory holds the rows of one plan only."""
    for name, field in ScoringPlan.model_fields.items():
        there, here = getattr(before, name), getattr(now, name)
        if there != here:
            values = f" ({there} there, {here} now)" if max(len(str(there)), len(str(here))) < SHORT else ""
            raise ValueError(
                f"{out} was begun with other settings: {field.description} differs{values}; pass --overwrite "
                "to delete what is there and begin again, or choose another directory"
            )


@dataclass(frozen=True)
class ScoringJob:
    """A plan and where its files are: all that a worker must know. Paths are the same on all machines."""

    plan: ScoringPlan
    model: Path
    data: Path
    out: Path

    def n_users_of(self, parts: Iterable[int]) -> int:
        return sum(last - first for first, last in map(self.plan.users_of, parts))

    def part_path(self, part: int) -> Path:
        return self.out / f"part-{part:05d}.parquet"

    def mark(self, part: int) -> str:
        """What is in the metadata of a part under `KEY`."""
        return json.dumps({"plan": self.plan.key, "part": part})

    def finished(self, parts: Iterable[int]) -> dict[int, int]:
        """{part: its number of rows} for those `parts` that are there, undamaged and of this plan."""
        with connect() as database:
            n_rows = {part: _n_rows(database, self.part_path(part), self.mark(part)) for part in parts}
        return {part: n for part, n in n_rows.items() if n is not None}

    def remove_leftovers(self) -> None:
        """Delete what a killed process left unfinished: parts, checksums, the plan or the marker."""
        for pattern in (".part-*.tmp", "..part-*.tmp", "._*.tmp"):
            for path in self.out.glob(pattern):
                path.unlink(missing_ok=True)


def _n_rows(database: duckdb.DuckDBPyConnection, part: Path, mark: str) -> int | None:
    try:
        if sum_path(part).read_text(encoding="utf-8").split() != [sha256(part), part.name]:
            return None
        marks = f"SELECT value FROM parquet_kv_metadata({quoted(part)}) WHERE key = {quoted(KEY)}"
        if database.execute(marks).fetchall() != [(mark.encode(),)]:
            return None
        return int(fetch_row(database, f"SELECT num_rows FROM parquet_file_metadata({quoted(part)})")[0])
    except (OSError, ValueError, duckdb.Error):  # absent, damaged, or another file with a checksum of its own
        return None


class PartWriter:
    """A loaded model and the users' histories, ready to compute any part."""

    def __init__(self, job: ScoringJob) -> None:
        keep_freed_memory()
        recommender = Recommender.load(job.model, job.plan.retrieval)
        sequences = Sequences.load(job.data)
        self._job, self._rows = job, UserRows(recommender, sequences, job.plan.request)
        # The model or the data may have been replaced since the plan was made.
        for name, version in _versions(job.model, sequences).items():
            if version != getattr(job.plan, name):
                changed = job.model if name == "model" else job.data
                raise ValueError(f"{changed} has changed since scoring began: start again")

    def write(self, part: int, on_progress: Callable[[int], object] = no_report) -> None:
        """Compute a part and write it; `on_progress` gets the number of its users done so far."""
        path = self._job.part_path(part)
        options = f"FORMAT parquet, KV_METADATA {{{KEY}: {quoted(self._job.mark(part))}}}"
        with new_file(path) as temporary:
            self._rows.write(temporary, options, self._job.plan.users_of(part), on_progress)
            # First the checksum, then the part: a part that is there has one.
            write_file(sum_path(path), f"{sha256(temporary)}  {path.name}\n")


def sum_path(part: Path) -> Path:
    """The file beside a part with its SHA-256, as `sha256sum --check` reads it."""
    return part.with_name(f".{part.stem}.sha256")


def is_part(path: Path) -> bool:
    """Whether the name is one of ours; parts of other programs have longer names."""
    return re.fullmatch(r"part-\d{5,}\.parquet", path.name) is not None


def remove_parts(out: Path) -> None:
    for path in filter(is_part, out.iterdir()):
        path.unlink()
        sum_path(path).unlink(missing_ok=True)
