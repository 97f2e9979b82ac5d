"""Recommendations for many users into one file, a batch at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from bert4rec.allocator import keep_freed_memory
from bert4rec.batch.rows import Asked, UserRows
from bert4rec.data.database import connect, quoted
from bert4rec.data.sequences import Sequences
from bert4rec.recommender import Recommender

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
        raise ValueError(
            f"{out}: end the name in one of {', '.join(FORMATS)} to choose a format, or in / for "
            "a directory of Parquet files"
        )
    if not out.parent.is_dir():
        raise ValueError(f"{out}: the folder {out.parent} does not exist")
    keep_freed_memory()
    allow = None if allow is None else list(allow)
    block = None if block is None else list(block)
    rows = UserRows(recommender, sequences, Asked(k, exclude_seen, allow, block))
    n_rows = 0
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".recommending-") as folder:
        with connect(str(Path(folder) / "rows.duckdb")) as database:
            database.execute(rows.table)
            for n_done, columns in rows.of(0, sequences.n_users):
                database.register("chunk", columns)
                database.execute("INSERT INTO rows SELECT * FROM chunk")
                n_rows += len(columns["rank"])
                if on_progress is not None:
                    on_progress(n_done, sequences.n_users)
            finished = Path(folder) / out.name
            database.execute(f"COPY rows TO {quoted(finished)} ({FORMATS[out.suffix]})")
        finished.replace(out)
    return n_rows
