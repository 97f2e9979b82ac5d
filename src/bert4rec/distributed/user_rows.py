"""One row per recommendation: the table that batch scoring writes, into one file or many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from bert4rec.data.database import as_column, connect, quoted
from bert4rec.data.sequences import Sequences, Vocabulary
from bert4rec.data.splits import Spans
from bert4rec.recommender import Recommender, Retrieval
from bert4rec.scoring import HISTORIES_AT_ONCE, Ranking

CHUNK = HISTORIES_AT_ONCE  # users held in memory at a time


@dataclass(frozen=True)
class BatchRequest:
    """What to recommend to every user alike."""

    k: int = 10
    exclude_seen: bool = True
    allow: Sequence[object] | None = None
    block: Sequence[object] | None = None
    retrieval: Retrieval = "auto"


class UserRows:
    """Recommendations for the users of `sequences`, a range of users at a time."""

    def __init__(self, recommender: Recommender, sequences: Sequences, request: BatchRequest) -> None:
        self.recommender, self.sequences, self.request = recommender, sequences, request
        self._users_version = _version_of_users(sequences)
        self._excluded = recommender.excluded(request.allow, request.block)
        self._token_of = _tokens(sequences.vocabulary, recommender.vocabulary)
        # The rows of the training data are the users that the model knows; all others are unknown.
        self._is_known = sequences.fingerprint == recommender.about["data"]["fingerprint"]
        # This computes nothing: it refuses a bad k, and unknown users that the model cannot serve.
        recommender.top_k(self._histories(0, min(1, sequences.n_users)), request.k)

    @property
    def knows_some_item(self) -> bool:
        """Whether the model was trained on any item of the data."""
        return bool((self._token_of >= 0).any())

    def fill(
        self,
        database: duckdb.DuckDBPyConnection,
        first: int,
        last: int,
        on_progress: Callable[[int], None] | None = None,
    ) -> int:
        """Make the table `rows` of the users in rows `first` to `last - 1`; returns its size."""
        user = "BIGINT" if self.sequences.user_id_type == "int" else "VARCHAR"
        item = "BIGINT" if self.recommender.vocabulary.id_type == "int" else "VARCHAR"
        database.execute(
            f'CREATE OR REPLACE TABLE rows ("user" {user}, "rank" INTEGER, item {item}, '
            "score FLOAT, probability FLOAT, title VARCHAR, is_fallback BOOLEAN)"
        )
        n_rows = 0
        for n_done, columns in self._columns_of(first, last):
            database.register("chunk", columns)
            database.execute("INSERT INTO rows SELECT * FROM chunk")
            n_rows += len(columns["rank"])
            if on_progress is not None:
                on_progress(n_done)
        return n_rows

    def _columns_of(self, first: int, last: int) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
        """(users done, columns) for the users in rows `first` to `last - 1`, some at a time."""
        for start in range(first, last, CHUNK):
            end = min(start + CHUNK, last)
            histories = self._histories(start, end)
            users = as_column(self._user_ids(start, end))
            rankings = self.recommender.top_k(
                histories, self.request.k, exclude_seen=self.request.exclude_seen, excluded=self._excluded
            )
            done = 0
            for ranking in rankings:
                rows = slice(done, done + len(ranking.n_found))
                is_fallback = histories.lengths[rows] == 0
                done = rows.stop
                columns = _columns(users[rows], ranking, is_fallback, self.recommender.vocabulary)
                yield start + done - first, columns

    def _user_ids(self, first: int, last: int) -> list[str] | list[int]:
        """Raw ids of some rows; all ids of a large table would not fit into memory."""
        directory = self.sequences.directory
        if directory is None or "user_ids" in vars(self.sequences):
            return self.sequences.user_ids[first:last]
        found = self._database.execute(
            f'SELECT "user" FROM read_parquet({quoted(directory / "users.parquet")}) '
            f"WHERE row >= {first} AND row < {last} ORDER BY row"
        ).fetchall()
        # Checked after the read: what was read is what was there at the start.
        if _version_of_users(self.sequences) != self._users_version:
            raise ValueError(f"{directory} has changed since scoring began: start again")
        assert len(found) == last - first
        is_int = self.sequences.user_id_type == "int"
        return [int(user) for (user,) in found] if is_int else [user for (user,) in found]

    @cached_property
    def _database(self) -> duckdb.DuckDBPyConnection:
        return connect()

    def _histories(self, first: int, last: int) -> Spans:
        """Histories in the model's tokens, without the items that it does not know."""
        rows = np.arange(first, last) if self._is_known else np.full(last - first, -1)
        offsets = self.sequences.offsets[first : last + 1]
        tokens = self._token_of[self.sequences.tokens[offsets[0] : offsets[-1]]]
        n_before = np.concatenate([[0], np.cumsum(tokens >= 0)])
        offsets = n_before[offsets - offsets[0]]
        return Spans(tokens[tokens >= 0], offsets[:-1], offsets[1:], rows)


def _version_of_users(sequences: Sequences) -> tuple[int, int, int] | None:
    """Changes when the file of user ids, which is read a range at a time, was replaced."""
    if sequences.directory is None:
        return None
    try:
        facts = (sequences.directory / "users.parquet").stat()
    except FileNotFoundError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _columns(
    users: NDArray[Any], ranking: Ranking, is_fallback: NDArray[np.bool_], vocabulary: Vocabulary
) -> dict[str, NDArray[Any]]:
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
        "is_fallback": is_fallback[owners],
    }


def _tokens(theirs: Vocabulary, ours: Vocabulary) -> NDArray[np.int32]:
    """(their items,) the model's token of each item of the data, -1 for unknown items."""
    known = [ours.token(raw) for raw in theirs.ids]
    return np.array([-1 if token is None else token for token in known], dtype=np.int32)
