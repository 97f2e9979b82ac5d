"""What one evaluation found, and the two files that keep it.

`metrics.json` holds the means, their intervals and the settings; `per_user.parquet` holds a rank
per user and protocol, from which any metric can be computed again and any two runs compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import duckdb
import numpy as np
from numpy.typing import NDArray

from bert4rec.data.database import read_parquet, write_parquet
from bert4rec.durable import new_file, write_file

if TYPE_CHECKING:  # metrics imports torch, and a saved result can be read without it
    from bert4rec.evaluation.metrics import Estimate

FORMAT_VERSION = 1
METRICS_FILE = "metrics.json"
PER_USER_FILE = "per_user.parquet"


@dataclass(frozen=True)
class Evaluation:
    """One row per held-out user: the user's row, the target, and its rank under each protocol."""

    users: NDArray[np.int64]
    targets: NDArray[np.int64]
    history_lengths: NDArray[np.int64]
    target_counts: NDArray[np.int64]  # how often the target occurs in training
    ranks: dict[str, NDArray[np.int64]]  # by protocol; 0 (UNREACHABLE) earns nothing
    metrics: dict[str, dict[str, Estimate]]  # by protocol, then by name such as NDCG@10
    extras: dict[str, Any]  # coverage, popularity bias, counts of users, settings with the seed

    def value(self, metric: str, protocol: str = "full") -> float:
        return self.metrics[protocol][metric]["value"]

    def save(
        self,
        directory: str | Path,
        *,
        user_ids: Sequence[str | int] | None = None,
        item_ids: Sequence[str | int] | None = None,
    ) -> None:
        """Write both files, each whole or not at all.

        `user_ids` names user rows and `item_ids` tokens; without them the numbers stand in, and
        two runs can then be compared only if they were prepared from the same data.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        columns: dict[str, NDArray[Any] | Sequence[Any]] = {
            "user": _raw_ids(self.users, user_ids),
            "user_row": self.users,
            "target": _raw_ids(self.targets, item_ids),
            "target_token": self.targets,
            "history_length": self.history_lengths,
            "target_count": self.target_counts,
        }
        columns |= {f"rank_{protocol}": ranks for protocol, ranks in self.ranks.items()}
        # No metrics stand beside ranks that they do not belong to, whenever we are stopped.
        (directory / METRICS_FILE).unlink(missing_ok=True)
        with new_file(directory / PER_USER_FILE) as path:
            write_parquet(path, columns)
        content = {"format_version": FORMAT_VERSION, "metrics": self.metrics} | self.extras
        text = json.dumps(content, indent=2, allow_nan=False)
        write_file(directory / METRICS_FILE, text + "\n")

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        directory = Path(directory)
        content = load_metrics(directory)
        metrics = content.pop("metrics")
        content.pop("format_version")
        with undamaged(directory / PER_USER_FILE):
            columns = read_parquet(directory / PER_USER_FILE)
            return cls(
                users=_integers(columns["user_row"]),
                targets=_integers(columns["target_token"]),
                history_lengths=_integers(columns["history_length"]),
                target_counts=_integers(columns["target_count"]),
                ranks={protocol: _integers(columns[f"rank_{protocol}"]) for protocol in metrics},
                metrics=metrics,
                extras=content,
            )


def load_metrics(directory: Path) -> dict[str, Any]:
    """The content of `metrics.json`, of a directory that holds a whole evaluation."""
    for name in (METRICS_FILE, PER_USER_FILE):
        if not (directory / name).is_file():
            raise ValueError(f"{directory} holds no evaluation: {name} is missing; evaluate first")
    path = directory / METRICS_FILE
    with undamaged(path):
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = content.get("format_version")
        is_whole = isinstance(content.get("metrics"), dict)
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version}, this program reads {FORMAT_VERSION}: evaluate the model again"
        )
    if not is_whole:
        raise ValueError(f"{path} is damaged (no metrics): evaluate the model again")
    return content


@contextmanager
def undamaged(path: Path) -> Iterator[None]:
    """Whatever is wrong inside a saved file becomes one sentence that names it."""
    try:
        yield
    except (duckdb.Error, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is damaged ({reason}): evaluate the model again") from None


def _raw_ids(numbers: NDArray[np.int64], ids: Sequence[str | int] | None) -> NDArray[Any] | Sequence[Any]:
    if ids is None:
        return numbers
    raws = [ids[number] for number in numbers.tolist()]
    if all(isinstance(raw, int) for raw in raws):
        return np.array(raws, dtype=np.int64)
    return [str(raw) for raw in raws]


def _integers(column: list[Any]) -> NDArray[np.int64]:
    return np.array(column, dtype=np.int64)
