"""The two work loads of the speed comparison, written as one `.npz` each.

    python benchmarks/speed/shapes.py ml-1m out.npz

Real histories when `../shared/data` (or `$BERT4REC_SHARED_DATA`) has them, because lengths and
popularity decide how much padding and how much real work a tool does; otherwise generated ones of
the same shape, so that anybody can run the comparison. Needs only numpy: every tool can import it.
"""

import argparse
import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
BENCH = REPOSITORY / ".bench"  # the peers' environments, and the sequences
QUANTILES = (*np.arange(0, 0.96, 0.05), 0.99, 0.999, 1.0)


@dataclass(frozen=True)
class Shape:
    file: str
    max_len: int
    mask_ratio: float
    n_users: int
    n_items: int
    # Of the lengths of the real histories, at QUANTILES.
    length_quantiles: tuple[int, ...]
    # Popularity falls as (rank + shift) ** -slope.
    popularity: tuple[float, float]


SHAPES = {
    "ml-1m": Shape(
        file="ml-1m/ml-1m.txt.gz",
        max_len=200,
        mask_ratio=0.2,
        n_users=6040,
        n_items=3416,
        length_quantiles=(
            *(18, 23, 27, 32, 37, 44, 51, 60, 70, 81, 96),
            *(109, 126, 148, 173, 207, 253, 309, 400, 556, 906, 1341, 2277),
        ),
        popularity=(300.0, 1.7),
    ),
    "beauty": Shape(
        file="beauty/beauty.txt.gz",
        max_len=50,
        mask_ratio=0.6,
        n_users=40_226,
        n_items=54_542,
        length_quantiles=(*(5, 5, 5, 5, 5, 5, 5, 6, 6, 6, 6), *(7, 7, 8, 8, 9, 10, 12, 14, 20, 41, 105, 293)),
        popularity=(40.0, 0.9),
    ),
}


def real_file(shape: Shape) -> Path | None:
    folder = Path(os.environ.get("BERT4REC_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
    return folder / shape.file if (folder / shape.file).is_file() else None


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and offsets from `user item` lines, a user's lines together and in time order."""
    with gzip.open(path, "rt") as file:
        table = np.array(file.read().split(), dtype=np.int64).reshape(-1, 2)
    starts = np.flatnonzero(np.diff(table[:, 0], prepend=-1))
    tokens = np.unique(table[:, 1], return_inverse=True)[1]
    return tokens, np.append(starts, len(tokens))


def generate(shape: Shape, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    uniform = generator.random(shape.n_users)
    lengths = np.interp(uniform, QUANTILES, shape.length_quantiles).astype(int)
    shift, slope = shape.popularity
    weights = (np.arange(shape.n_items) + shift) ** -slope
    tokens = generator.choice(shape.n_items, lengths.sum(), p=weights / weights.sum())
    # Every item occurs at least once, so that all tools see a catalogue of the same size.
    places = generator.choice(len(tokens), shape.n_items, replace=False)
    tokens[places] = np.arange(shape.n_items)
    return tokens, np.append(0, np.cumsum(lengths))


def write(name: str, path: Path, seed: int = 0) -> bool:
    """Write the sequences of one shape; true when they are real."""
    shape = SHAPES[name]
    file = real_file(shape)
    tokens, offsets = read(file) if file else generate(shape, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        tokens=tokens.astype(np.int32),
        offsets=offsets.astype(np.int64),
        n_items=shape.n_items,
        real=file is not None,
    )
    return file is not None


def sequence_file(name: str) -> Path:
    """The sequences of one shape under `.bench`, written first when they are not there."""
    path = BENCH / f"{name}.npz"
    if not path.is_file():
        write(name, path)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    kind = "real" if write(arguments.shape, arguments.out) else "generated"
    print(f"{arguments.out}: {kind} sequences of {arguments.shape}")
