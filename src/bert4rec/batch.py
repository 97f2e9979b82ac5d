"""Recommendations for many users into one file, a batch at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bert4rec.data.database import as_column, connect, quoted
from bert4rec.data.sequences import Sequences
from bert4rec.recommender import Recommendations, Recommender

FORMATS = {".parquet": "FORMAT parquet", ".csv": "FORMAT csv, HEADER", ".jsonl": "FORMAT json"}
CHUNK = 256  # users held in memory at a time


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
    allowed = None if allow is None else list(allow)
    blocked = None if block is None else list(block)
    histories = (_raw_history(sequences, row) for row in range(sequences.n_users))
    answers = recommender.recommend_many(histories, k, exclude_seen, allowed, blocked)
    n_rows = 0
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".recommending-") as folder:
        with connect(str(Path(folder) / "rows.duckdb")) as database:
            database.execute(_table(sequences, recommender))
            for first in range(0, sequences.n_users, CHUNK):
                users = sequences.user_ids[first : first + CHUNK]
                columns = _columns(users, islice(answers, len(users)))
                database.register("chunk", columns)
                database.execute("INSERT INTO rows SELECT * FROM chunk")
                n_rows += len(columns["rank"])
                if on_progress is not None:
                    on_progress(first + len(users), sequences.n_users)
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
    users: Sequence[str | int], answers: Iterable[Recommendations]
) -> dict[str, NDArray[Any]]:
    rows = [
        (user, rank, found.item, found.score, found.probability, found.title, answer.is_fallback)
        for user, answer in zip(users, answers, strict=True)
        for rank, found in enumerate(answer, 1)
    ]
    names = ("user", "rank", "item", "score", "probability", "title", "is_fallback")
    return {name: as_column([row[i] for row in rows]) for i, name in enumerate(names)}


def _raw_history(sequences: Sequences, row: int) -> list[str | int]:
    return [sequences.vocabulary.raw(token) for token in sequences[row].tolist()]
