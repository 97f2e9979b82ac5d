"""A saved model, its data and its users' recommendations, for the tests of scoring in parts."""

import sys
from pathlib import Path
from typing import NamedTuple

import duckdb
from toys import random_histories, untrained_recommender

from bert4rec.data.sequences import Sequences
from bert4rec.distributed.batch_scoring import recommend_users
from bert4rec.recommender import Recommender

N_ITEMS = 30
Row = tuple[str, int, str, float, float, str, bool]


class Saved(NamedTuple):
    model: Path
    data: Path

    @property
    def sequences(self) -> Sequences:
        return Sequences.load(self.data)

    def command(self, out: Path, *options: object) -> list[str]:
        """The command line in a process of its own."""
        program = [sys.executable, "-c", "from bert4rec.cli import main; main()", "recommend"]
        asked = [self.model, "--users", "all", "--data", self.data, "--out", out, *options]
        return [*program, *map(str, asked)]


def save(folder: Path, n_users: int, seed: int = 3) -> Saved:
    """A model with random weights, as if it had been trained on these users."""
    sequences = random_histories(seed, n_users=n_users, n_items=N_ITEMS)
    sequences.save(folder / "data")
    recommender = untrained_recommender(N_ITEMS, seed=seed)
    about = {"data": {"fingerprint": sequences.fingerprint, "directory": None, "source": "a test"}}
    Recommender(recommender.model, sequences.vocabulary, recommender.config, about).save(folder / "model")
    return Saved(folder / "model", folder / "data")


def rows_of(out: Path) -> list[Row]:
    """All rows of a file, or of the parts of a directory in their order."""
    source = str(out) if out.is_file() else str(out / "part-*.parquet")
    with duckdb.connect() as database:
        if not out.is_file():
            return database.execute(
                f"SELECT * EXCLUDE (filename, file_row_number) FROM read_parquet('{source}', "
                "filename = true, file_row_number = true) ORDER BY filename, file_row_number"
            ).fetchall()
        return database.execute(f"SELECT * FROM read_parquet('{source}')").fetchall()


def in_one_file(saved: Saved, folder: Path) -> list[Row]:
    out = folder / "one.parquet"
    recommend_users(Recommender.load(saved.model), saved.sequences, out)
    return rows_of(out)
