"""Recommendations for many users into one file, a batch at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert4rec.allocator import keep_freed_memory
from bert4rec.data.database import as_column, connect, quoted
from bert4rec.data.sequences import Sequences, Vocabulary
from bert4rec.data.splits import Spans
from bert4rec.ranking import HISTORIES_AT_ONCE, Ranking
from bert4rec.recommender import Recommender

CHUNK = HISTORIES_AT_ONCE  # users held in memory at a time
FORMATS = {".parquet": "FORMAT parquet", ".csv": "FORMAT csv, HEADER", ".jsonl": "FORMAT json"}


def recommend_users(
    recommender: Recommender,
    sequences: Sequences,
    out: str | Path,
    *,
    k: int = 10,
    exclude_seen: bool = True,
    allow: Iterable[object] | None = None,
    block: Iterable[object] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> int:
    """One row a recommendation, users in the order of `sequences`; returns the number of rows.

    The file appears under its name when it is complete.
    """
    out = Path(out)
    if out.suffix not in FORMATS:
        raise ValueError(f"{out}: end the name in one of {', '.join(FORMATS)} to choose a format")
    if not out.parent.is_dir():
        raise ValueError(f"{out}: the folder {out.parent} does not exist")
    keep_freed_memory()
    excluded = recommender.excluded(allow, block)
    token_of = _tokens(sequences.vocabulary, recommender.vocabulary)
    # Users of the data that the model was trained on are in the same rows, others are strangers.
    is_known = sequences.fingerprint == recommender.about["data"]["fingerprint"]
    n_rows = 0
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".recommending-") as folder:
        with connect(str(Path(folder) / "rows.duckdb")) as database:
            database.execute(_table(sequences, recommender))
            for first in range(0, sequences.n_users, CHUNK):
                last = min(first + CHUNK, sequences.n_users)
                rows = np.arange(first, last) if is_known else np.full(last - first, -1)
                histories = _histories(sequences, rows, first, token_of)
                users = as_column(sequences.user_ids[first:last])
                for ranking in recommender.rank(
                    histories, k, exclude_seen=exclude_seen, excluded=excluded
                ):
                    is_fallback = histories.lengths == 0
                    columns = _columns(users, ranking, is_fallback, recommender.vocabulary)
                    database.register("chunk", columns)
                    database.execute("INSERT INTO rows SELECT * FROM chunk")
                    n_rows += len(columns["rank"])
                if on_progress is not None:
                    on_progress(last, sequences.n_users)
            finished = Path(folder) / out.name
            database.execute(f"COPY rows TO {quoted(finished)} ({FORMATS[out.suffix]})")
        finished.replace(out)
    return n_rows


def _table(sequences: Sequences, recommender: Recommender) -> str:
    user = "BIGINT" if sequences.user_id_type == "int" else "VARCHAR"
    item = "BIGINT" if recommender.vocabulary.id_type == "int" else "VARCHAR"
    return (
        f'CREATE TABLE rows ("user" {user}, rank INTEGER, item {item}, score FLOAT, '
        "probability FLOAT, title VARCHAR, is_fallback BOOLEAN)"
    )


def _columns(
    users: NDArray[Any], ranking: Ranking, is_fallback: NDArray[np.bool_], vocabulary: Vocabulary
) -> dict[str, NDArray[Any]]:
    """One row a recommendation."""
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
    """Our token of each of their items, -1 where we do not know it."""
    known = [ours.token(raw) for raw in theirs.ids]
    return np.array([-1 if token is None else token for token in known], dtype=np.int32)


def _histories(
    sequences: Sequences, users: NDArray[np.int64], first: int, token_of: NDArray[np.int32]
) -> Spans:
    """The histories of `users`, from row `first` on, in the model's tokens; what it does not know
    is left out."""
    offsets = sequences.offsets[first : first + len(users) + 1]
    tokens = token_of[sequences.tokens[offsets[0] : offsets[-1]]]
    n_before = np.concatenate([[0], np.cumsum(tokens >= 0)])
    offsets = n_before[offsets - offsets[0]]
    return Spans(tokens[tokens >= 0], offsets[:-1], offsets[1:], users)
