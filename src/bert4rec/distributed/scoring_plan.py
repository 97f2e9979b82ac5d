"""What is recommended by which model to which users, in how many parts: `_scoring.json`.

Runs with the same plan write the same rows, so that one resumes another. Programs that read a
directory of Parquet files skip names that begin with `_` or `.`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bert4rec.data.database import connect, quoted
from bert4rec.data.sequences import Sequences
from bert4rec.distributed.user_rows import BatchRequest
from bert4rec.durable import MANIFEST, sha256, write_file
from bert4rec.recommender import Retrieval

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
    model: Path,
    sequences: Sequences,
    request: BatchRequest,
    *,
    n_parts: int | None,
    n_parts_before: int | None,
) -> ScoringPlan:
    """A resumed run keeps its number of parts, `n_parts_before`, unless `n_parts` is given."""
    n_users = int(sequences.n_users)
    if n_parts is not None and not 1 <= n_parts <= n_users:
        raise ValueError(
            f"parts is {n_parts} and there are {n_users:,} users: every part needs one, so choose "
            f"1 to {n_users:,}"
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
            "SELECT bit_xor(md5_number(row || ':' || \"user\"))::VARCHAR "
            f"FROM read_parquet({quoted(path)})"
        ).fetchone()
    assert found is not None
    return str(found[0])
