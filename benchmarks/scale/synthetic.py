"""Interactions of any number, made up on the fly, that a model can learn from.

    python benchmarks/scale/synthetic.py OUT --users 1000000 --items 1000000 \
        --interactions 100000000 --files 100

Items come in clusters of neighbours in a ring, the earlier clusters being the more popular ones.
A user has two clusters that they like. Each next item is, by chance: the item that follows the
last one in its cluster's ring (60 %), a popular item of one of the user's clusters (30 %), or any
item by its popularity (10 %). So what comes next depends on the last item and on the user, and a
model that reads histories beats popularity.

Rows are in the order of time, not of users: preparing has to sort. A file is one period, made
from the seed and its number alone with one number a user carried over, so memory is a few arrays
of the number of users and of the rows of a file. The same arguments give the same rows.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

CLUSTER = 50  # items that follow each other
FOLLOWS, LIKES = 0.6, 0.3
START = 1_600_000_000  # seconds
PERIOD = 86_400  # of one file


@dataclass(frozen=True)
class Size:
    users: int = 1_000_000
    items: int = 1_000_000
    interactions: int = 100_000_000
    files: int = 100
    seed: int = 0
    text_ids: bool = False

    def __post_init__(self) -> None:
        if self.items < 2 * CLUSTER:
            raise ValueError(f"items is {self.items}: choose at least {2 * CLUSTER}")
        if not 1 <= self.files <= self.interactions:
            raise ValueError(f"files is {self.files}: choose 1 to {self.interactions}")


def skewed(n: int, size: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Numbers below `n` with chances that fall about as 1/(rank + n/200): Zipf with a flat top."""
    shift = max(n / 200, 1.0)
    uniform = generator.random(size)
    drawn = shift * ((n + shift) / shift) ** uniform - shift
    return np.minimum(drawn.astype(np.int64), n - 1)


def write(size: Size, folder: Path) -> None:
    """`size.files` Parquet files with the columns user, item and timestamp."""
    folder.mkdir(parents=True, exist_ok=True)
    n_clusters = size.items // CLUSTER
    of_users = np.random.default_rng([size.seed, 0])
    liked = np.stack([skewed(n_clusters, size.users, of_users) for _ in range(2)], 1)
    last = liked[:, 0] * CLUSTER  # the item each user had last
    # A token must not follow from an id's size: ids are a fixed shuffle of the items.
    id_of = np.random.default_rng([size.seed, 1]).permutation(size.items)
    bounds = np.linspace(0, size.interactions, size.files + 1).astype(np.int64)
    for number in range(size.files):
        n_rows = int(bounds[number + 1] - bounds[number])
        generator = np.random.default_rng([size.seed, 2, number])
        users = skewed(size.users * 4, n_rows, generator) % size.users
        items = _next_items(users, liked, last, n_clusters, size.items, generator)
        seconds = START + PERIOD * number + np.sort(generator.integers(0, PERIOD, n_rows))
        _write_file(folder / f"part-{number:05d}.parquet", users, id_of[items], seconds, size)


def _next_items(
    users: NDArray[np.int64],
    liked: NDArray[np.int64],
    last: NDArray[np.int64],
    n_clusters: int,
    n_items: int,
    generator: np.random.Generator,
) -> NDArray[np.int64]:
    """An item for each row, and `last` brought up to date.

    A user's rows in a file are drawn in rounds: first everybody's first row, then the second …
    """
    n_rows = len(users)
    chance = generator.random(n_rows)
    own_cluster = liked[users, generator.integers(0, 2, n_rows)]
    own = own_cluster * CLUSTER + skewed(CLUSTER, n_rows, generator)
    anything = skewed(n_items, n_rows, generator)
    items = np.where(chance < FOLLOWS + LIKES, own, anything)
    follows = chance < FOLLOWS
    order = np.argsort(users, kind="stable")
    in_order = users[order]
    is_first = np.append(True, in_order[1:] != in_order[:-1])
    first_at = np.maximum.accumulate(np.where(is_first, np.arange(n_rows), 0))
    round_of = np.arange(n_rows) - first_at
    by_round = order[np.argsort(round_of, kind="stable")]
    ends = np.cumsum(np.bincount(round_of))
    for start, end in zip(np.append(0, ends[:-1]), ends, strict=True):
        rows = by_round[start:end]
        followers = rows[follows[rows]]
        before = last[users[followers]]
        ring = np.minimum(before // CLUSTER, n_clusters - 1) * CLUSTER
        items[followers] = ring + (before - ring + 1) % CLUSTER
        last[users[rows]] = items[rows]
    return items


def _write_file(
    path: Path, users: NDArray[np.int64], items: NDArray[np.int64], seconds: NDArray[np.int64], size: Size
) -> None:
    columns: dict[str, pa.Array] = {"user": pa.array(users), "item": pa.array(items)}
    if size.text_ids:
        columns = {
            name: pc.binary_join_element_wise(pa.scalar(f"{name}-"), column.cast(pa.string()), "")
            for name, column in columns.items()
        }
    columns["timestamp"] = pa.array(seconds)
    pq.write_table(pa.table(columns), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("out", type=Path)
    for name, default in asdict(Size()).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=int, default=default)
    given = vars(parser.parse_args())
    folder = given.pop("out")
    started = time.perf_counter()
    write(Size(**given), folder)
    n_bytes = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    seconds = round(time.perf_counter() - started, 1)
    print(json.dumps(given | {"bytes": n_bytes, "seconds": seconds}))


if __name__ == "__main__":
    main()
