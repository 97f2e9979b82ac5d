"""The parts of a batch: how the users are split into them, and how each is written.

A part is a Parquet file that is complete or absent, and carries the plan that it belongs to.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import duckdb

from bert4rec.cpu_tuning import keep_freed_memory
from bert4rec.data.database import connect, quoted
from bert4rec.data.sequences import Sequences
from bert4rec.distributed.user_rows import BatchRequest, UserRows
from bert4rec.durable import MANIFEST, new_file, sha256, write_file
from bert4rec.recommender import Recommender, Retrieval

PLAN, COMPLETE = "_scoring.json", "_SUCCESS"
FORMAT_VERSION = 1

# Parts are small, so that workers share them evenly and a crash loses little; up to ENOUGH_PARTS.
FEWEST_USERS, MOST_USERS, MOST_ROWS, ENOUGH_PARTS = 1024, 65_536, 2_000_000, 64

_MEANINGS = {
    "model": "the model",
    "data": "the data",
    "users": "the list of user ids",
    "n_users": "the number of users",
    "n_parts": "--parts",
    "k": "--k",
    "exclude_seen": "whether seen items are excluded",
    "allow": "--allow",
    "block": "--block",
    "retrieval": "--retrieval",
}
_SHORT = ("n_users", "n_parts", "k", "exclude_seen", "retrieval")  # values that fit a message


@dataclass(frozen=True)
class ScoringPlan:
    model: str  # SHA-256 of its manifest, which lists those of its files
    data: str  # fingerprint of the sequences
    users: str  # a hash of the user ids, in order
    n_users: int
    n_parts: int
    k: int
    exclude_seen: bool
    allow: list[str] | None
    block: list[str] | None
    retrieval: Retrieval

    @property
    def key(self) -> str:
        """A hash of all of it, which each part carries."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self)).encode()).hexdigest()

    @property
    def request(self) -> BatchRequest:
        return BatchRequest(self.k, self.exclude_seen, self.allow, self.block, self.retrieval)

    def users_of(self, part: int) -> tuple[int, int]:
        """Rows `first` to `last - 1` of the data; part sizes differ by at most one user."""
        first, last = (n * self.n_users // self.n_parts for n in (part, part + 1))
        return first, last

    def n_users_of(self, part: int) -> int:
        first, last = self.users_of(part)
        return last - first


def default_parts(n_users: int, k: int) -> int:
    """Depends on the data alone, so that a run can be resumed with other workers."""
    most_users = max(1, min(MOST_USERS, MOST_ROWS // k))
    few = min(-(-n_users // FEWEST_USERS), ENOUGH_PARTS)
    return max(few, -(-n_users // most_users))


def make_plan(
    model: Path, sequences: Sequences, request: BatchRequest, *, n_parts: int | None, n_parts_before: int | None
) -> ScoringPlan:
    """A resumed run keeps its number of parts, `n_parts_before`, unless `n_parts` is given."""
    n_users = int(sequences.n_users)
    if n_parts is not None and not 1 <= n_parts <= n_users:
        raise ValueError(
            f"parts is {n_parts} and there are {n_users:,} users: every part needs one, so choose 1 to {n_users:,}"
        )
    if n_parts is None:
        n_parts = n_parts_before or default_parts(n_users, request.k)
    return ScoringPlan(
        model=model_version(model),
        data=sequences.fingerprint,
        users=hash_of_users(sequences),
        n_users=n_users,
        n_parts=n_parts,
        k=request.k,
        exclude_seen=request.exclude_seen,
        allow=_sorted_ids(request.allow),
        block=_sorted_ids(request.block),
        retrieval=request.retrieval,
    )


def model_version(model: Path) -> str:
    return sha256(model / MANIFEST)


def read_plan(out: Path) -> ScoringPlan | None:
    """The plan that is in the directory; None if there is none."""
    path = out / PLAN
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format_version") != FORMAT_VERSION:
            raise ValueError
        return ScoringPlan(**content)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(
            f"{path} is damaged, or of another version of this program: pass --overwrite to begin "
            "again, or choose another directory"
        ) from None


def write_plan(out: Path, plan: ScoringPlan) -> None:
    content = {"format_version": FORMAT_VERSION} | dataclasses.asdict(plan)
    write_file(out / PLAN, json.dumps(content, indent=2) + "\n")


def check_same_plan(out: Path, before: ScoringPlan, now: ScoringPlan) -> None:
    """A ValueError that names the difference: a directory holds the rows of one plan only."""
    were, are = dataclasses.asdict(before), dataclasses.asdict(now)
    for name, meaning in _MEANINGS.items():
        if were[name] != are[name]:
            values = f" ({were[name]} there, {are[name]} now)" if name in _SHORT else ""
            raise ValueError(
                f"{out} was begun with other settings: {meaning} differs{values}; pass --overwrite "
                "to delete what is there and begin again, or choose another directory"
            )


def _sorted_ids(ids: Iterable[object] | None) -> list[str] | None:
    return None if ids is None else sorted({str(raw) for raw in ids})


def hash_of_users(sequences: Sequences) -> str:
    """A hash of the user ids and their rows, which the data's fingerprint leaves out."""
    assert sequences.directory is not None
    path = sequences.directory / "users.parquet"
    with connect() as database:
        found = database.execute(
            f"SELECT bit_xor(md5_number(row || ':' || \"user\"))::VARCHAR FROM read_parquet({quoted(path)})"
        ).fetchone()
    assert found is not None
    return str(found[0])


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
                f"COPY rows TO {quoted(temporary)} (FORMAT parquet, KV_METADATA {{{KEY}: {quoted(mark)}}})"
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
        ((n_rows,),) = database.execute(f"SELECT num_rows FROM parquet_file_metadata({quoted(path)})").fetchall()
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
