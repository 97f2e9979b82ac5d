"""What is asked, of which model, for whom, in which parts: `_scoring.json` of the directory.

Runs with the same plan write the same rows, so that one can go on where another stopped. Names that
begin with `_` or `.` are passed over by what reads a directory of Parquet files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert4rec.batch.rows import Asked
from bert4rec.data.database import connect, quoted
from bert4rec.data.sequences import Sequences
from bert4rec.durable import MANIFEST, sha256, write_file
from bert4rec.recommender import Retrieval

PLAN, COMPLETE = "_scoring.json", "_SUCCESS"
FORMAT_VERSION = 1

# The number of parts: small enough to be dealt out evenly and to lose little, then many users each.
FEWEST_USERS, MOST_USERS, MOST_ROWS, ENOUGH_PARTS = 1024, 65_536, 2_000_000, 64

_MEANINGS = {
    "model": "the model",
    "data": "the data",
    "users": "the names of the users",
    "n_users": "the number of users",
    "n_parts": "--parts",
    "k": "--k",
    "exclude_seen": "whether seen items are excluded",
    "allow": "--allow",
    "block": "--block",
    "retrieval": "--retrieval",
}
_IN_WORDS = (
    "n_users",
    "n_parts",
    "k",
    "exclude_seen",
    "retrieval",
)  # values short enough to be told


@dataclass(frozen=True)
class Plan:
    model: str  # SHA-256 of its manifest, which has those of its files
    data: str  # fingerprint of the sequences
    users: str  # a hash of the users' names, in order
    n_users: int
    n_parts: int
    k: int
    exclude_seen: bool
    allow: list[str] | None
    block: list[str] | None
    retrieval: Retrieval

    @property
    def key(self) -> str:
        """One text for all of it, which each part carries."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self)).encode()).hexdigest()

    @property
    def asked(self) -> Asked:
        return Asked(self.k, self.exclude_seen, self.allow, self.block, self.retrieval)

    def users_of(self, part: int) -> tuple[int, int]:
        """Rows of the data, first and behind the last; part sizes differ by one user at most."""
        first, last = (n * self.n_users // self.n_parts for n in (part, part + 1))
        return first, last

    def n_users_of(self, part: int) -> int:
        first, last = self.users_of(part)
        return last - first


def default_parts(n_users: int, k: int) -> int:
    """Follows from the data alone: a run goes on with other workers on the same parts."""
    most_users = max(1, min(MOST_USERS, MOST_ROWS // k))
    few = min(-(-n_users // FEWEST_USERS), ENOUGH_PARTS)
    return max(few, -(-n_users // most_users))


def make_plan(
    model: Path, sequences: Sequences, asked: Asked, *, n_parts: int | None, known_parts: int | None
) -> Plan:
    """`known_parts` is the number of parts of a run that goes on, unless another was asked for."""
    n_users = int(sequences.n_users)
    if n_parts is not None and not 1 <= n_parts <= n_users:
        raise ValueError(
            f"parts is {n_parts} and there are {n_users:,} users: every part needs one, so choose "
            f"1 to {n_users:,}"
        )
    if n_parts is None:
        n_parts = known_parts or default_parts(n_users, asked.k)
    return Plan(
        model=model_version(model),
        data=sequences.fingerprint,
        users=hash_of_users(sequences),
        n_users=n_users,
        n_parts=n_parts,
        k=asked.k,
        exclude_seen=asked.exclude_seen,
        allow=_sorted_ids(asked.allow),
        block=_sorted_ids(asked.block),
        retrieval=asked.retrieval,
    )


def model_version(model: Path) -> str:
    return sha256(model / MANIFEST)


def read_plan(out: Path) -> Plan | None:
    """The plan of a directory that was begun before; None if there is none."""
    path = out / PLAN
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format_version") != FORMAT_VERSION:
            raise ValueError
        return Plan(**content)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(
            f"{path} is damaged, or of another version of this program: pass --overwrite to begin "
            "again, or choose another directory"
        ) from None


def write_plan(out: Path, plan: Plan) -> None:
    content = {"format_version": FORMAT_VERSION} | dataclasses.asdict(plan)
    write_file(out / PLAN, json.dumps(content, indent=2) + "\n")


def check_same(out: Path, before: Plan, now: Plan) -> None:
    """A ValueError that names what differs: rows of two kinds must not lie side by side."""
    were, are = dataclasses.asdict(before), dataclasses.asdict(now)
    for name, meaning in _MEANINGS.items():
        if were[name] != are[name]:
            told = f" ({were[name]} there, {are[name]} now)" if name in _IN_WORDS else ""
            raise ValueError(
                f"{out} was begun with other settings: {meaning} differs{told}; pass --overwrite "
                "to delete what is there and begin again, or choose another directory"
            )


def _sorted_ids(ids: Any) -> list[str] | None:
    return None if ids is None else sorted({str(raw) for raw in ids})


def hash_of_users(sequences: Sequences) -> str:
    """Of names and rows; the data's own fingerprint does not have them."""
    assert sequences.directory is not None
    path = sequences.directory / "users.parquet"
    with connect() as database:
        found = database.execute(
            "SELECT bit_xor(md5_number(row || ':' || \"user\"))::VARCHAR "
            f"FROM read_parquet({quoted(path)})"
        ).fetchone()
    assert found is not None
    return str(found[0])
