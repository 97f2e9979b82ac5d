"""One row per recommendation: the table that batch scoring writes, into one file or many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from bert4rec.data.database import as_column, connect, parquet, quoted
from bert4rec.data.sequences import Sequences
from bert4rec.data.splits import Spans
from bert4rec.recommender import Recommender, Retrieval
from bert4rec.scoring import HISTORIES_AT_ONCE

CHUNK = HISTORIES_AT_ONCE  # users held in memory at a time


@dataclass(frozen=True)
class BatchRequest:
    """What to recommend to every user alike."""

    k: int = 10
    exclude_seen: bool = True
    allow: Sequence[object] | None = None
    block: Sequence[object] | None = None
    retrieval: Retrieval = "auto"


def no_report(*facts: object) -> None:
    """For those who want to hear nothing while they wait."""


class UserRows:
    """Recommendations for the users of `sequences`, a range of users at a time."""

    def __init__(self, recommender: Recommender, sequences: Sequences, request: BatchRequest) -> None:
        self.recommender, self.sequences, self.request = recommender, sequences, request
        # All ids of a large table would not fit into memory: they are read a range at a time.
        directory = None if "user_ids" in vars(sequences) else sequences.directory
        self._users = None if directory is None else directory / "users.parquet"
        self._users_version = None if self._users is None else _version_of(self._users)
        self._excluded = recommender.excluded(request.allow, request.block)
        # (their items,) the model's token of each item of the data, -1 for unknown items
        tokens = map(recommender.vocabulary.token, sequences.vocabulary.ids)
        self._token_of = np.array([-1 if token is None else token for token in tokens], dtype=np.int32)
        # The rows of the training data are the users that the model knows; all others are unknown.
        self._is_known = sequences.fingerprint == recommender.about["data"]["fingerprint"]
        # This computes nothing: it refuses a bad k, and unknown users that the model cannot serve.
        recommender.top_k(self._histories(0, min(1, sequences.n_users)), request.k)

    @property
    def knows_some_item(self) -> bool:
        """Whether the model was trained on any item of the data."""
        return bool((self._token_of >= 0).any())

    def write(
        self,
        path: Path,
        options: str,
        users: tuple[int, int],
        on_progress: Callable[[int], object],
        database: str = ":memory:",
    ) -> int:
        """Write the rows of the users from `first` to `last - 1`, as the options of DuckDB's COPY say.

        `on_progress` gets the number of users done; `database` is where DuckDB keeps the rows until
        all are there. Returns the number of rows.
        """
        user = "BIGINT" if self.sequences.user_id_type == "int" else "VARCHAR"
        item = "BIGINT" if self.recommender.vocabulary.id_type == "int" else "VARCHAR"
        (first, last), n_rows = users, 0
        with connect(database) as connection:
            connection.execute(
                f'CREATE TABLE rows ("user" {user}, "rank" INTEGER, item {item}, '
                "score FLOAT, probability FLOAT, title VARCHAR, is_fallback BOOLEAN)"
            )
            for start in range(first, last, CHUNK):
                end = min(start + CHUNK, last)
                columns = self._columns(connection, start, end)
                connection.register("chunk", columns)
                connection.execute("INSERT INTO rows SELECT * FROM chunk")
                n_rows += len(columns["rank"])
                on_progress(end - first)
            connection.execute(f"COPY rows TO {quoted(path)} ({options})")
        return n_rows

    def _columns(self, database: duckdb.DuckDBPyConnection, first: int, last: int) -> dict[str, NDArray[Any]]:
        """The rows of a chunk of users."""
        request, vocabulary = self.request, self.recommender.vocabulary
        histories, users = self._histories(first, last), as_column(self._user_ids(database, first, last))
        [ranking] = self.recommender.top_k(
            histories, request.k, exclude_seen=request.exclude_seen, excluded=self._excluded
        )
        places = np.arange(ranking.items.shape[1])[None]
        is_found = places < ranking.n_found[:, None]
        owners = np.repeat(np.arange(len(users)), ranking.n_found)
        items = ranking.items[is_found].tolist()
        return {
            "user": users[owners],
            "rank": np.broadcast_to(places + 1, is_found.shape)[is_found],
            "item": as_column([vocabulary.raw(token) for token in items]),
            "score": ranking.scores[is_found],
            "probability": ranking.probabilities[is_found],
            "title": as_column([vocabulary.title(token) for token in items]),
            "is_fallback": (histories.lengths == 0)[owners],
        }

    def _user_ids(self, database: duckdb.DuckDBPyConnection, first: int, last: int) -> list[str] | list[int]:
        if self._users is None:
            return self.sequences.user_ids[first:last]
        found = database.execute(
            f'SELECT "user" FROM {parquet(self._users)} WHERE row >= {first} AND row < {last} ORDER BY row'
        ).fetchall()
        # Checked after the read: what was read is what was there at the start.
        if _version_of(self._users) != self._users_version:
            raise ValueError(f"{self._users.parent} has changed since scoring began: start again")
        assert len(found) == last - first
        is_int = self.sequences.user_id_type == "int"
        return [int(user) for (user,) in found] if is_int else [user for (user,) in found]

    def _histories(self, first: int, last: int) -> Spans:
        """Histories in the model's tokens, without the items that it does not know."""
        rows = np.arange(first, last) if self._is_known else np.full(last - first, -1)
        offsets = self.sequences.offsets[first : last + 1]
        tokens = self._token_of[self.sequences.tokens[offsets[0] : offsets[-1]]]
        n_before = np.concatenate([[0], np.cumsum(tokens >= 0)])
        offsets = n_before[offsets - offsets[0]]
        return Spans(tokens[tokens >= 0], offsets[:-1], offsets[1:], rows)


def _version_of(path: Path) -> tuple[int, int, int]:
    """Changes when the file was replaced."""
    facts = path.stat()
    return facts.st_ino, facts.st_size, facts.st_mtime_ns
