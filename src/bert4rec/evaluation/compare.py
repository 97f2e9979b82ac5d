"""Is run B really better than run A? A paired bootstrap over the users that both have.

Pairing takes out what makes a user easy or hard, so the interval of the difference is far
narrower than the two runs' own intervals suggest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bert4rec.data.database import read_parquet
from bert4rec.evaluation.metrics import interval, per_user, resampled_means
from bert4rec.evaluation.result import METRICS_FILE, PER_USER_FILE, load_metrics, undamaged


@dataclass(frozen=True)
class PairedDifference:
    """One metric: both means, and `difference` = b - a with its 95 % interval."""

    metric: str
    a: float
    b: float
    difference: float
    low: float
    high: float
    p_value: float  # two-sided
    n_better: int  # users for whom b is better
    n_equal: int
    n_worse: int


@dataclass(frozen=True)
class Comparison:
    run_a: Path
    run_b: Path
    protocol: str
    differences: list[PairedDifference]
    n_users: int  # in both runs
    n_only_a: int  # left out
    n_only_b: int  # left out
    n_boot: int
    seed: int


def compare(
    run_a: str | Path,
    run_b: str | Path,
    metric: str | Sequence[str] = "NDCG@10",
    protocol: str = "full",
    n_boot: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Difference b - a of one metric, or of several from the same resamples."""
    run_a, run_b = Path(run_a), Path(run_b)
    metrics = [metric] if isinstance(metric, str) else list(metric)
    if n_boot < 1:
        raise ValueError(f"n_boot is {n_boot}: choose 1 or more resamples, 10000 are usual")
    if not metrics:
        raise ValueError("no metric to compare: name at least one, such as NDCG@10")
    _check_same_task(run_a, run_b, protocol)
    a, b = _per_user(run_a, protocol), _per_user(run_b, protocol)
    shared = [user for user in a if user in b]
    if not shared:
        raise ValueError(f"{run_a} and {run_b} have no user in common: they used different data")
    n_other = sum(a[user][0] != b[user][0] for user in shared)
    if n_other:
        raise ValueError(
            f"{run_a} and {run_b} have different targets for {n_other} of "
            f"{len(shared)} shared users: they used different data or splits and cannot be "
            "compared; evaluate both on the same data and split"
        )
    values_a = _values([a[user][1] for user in shared], metrics)
    values_b = _values([b[user][1] for user in shared], metrics)
    return Comparison(
        run_a,
        run_b,
        protocol,
        _differences(metrics, values_a, values_b, n_boot, seed),
        n_users=len(shared),
        n_only_a=len(a) - len(shared),
        n_only_b=len(b) - len(shared),
        n_boot=n_boot,
        seed=seed,
    )


def bootstrap(
    values: NDArray[np.float64], n_resamples: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """(users, columns) to the 95 % interval of each mean, low and high, and its p-value.

    The p-value is two-sided, for a true mean of 0. All columns use the same resamples.
    """
    means = resampled_means(values, n_resamples, np.random.default_rng(seed))
    low, high = interval(means)
    # Adding one counts the data themselves as a resample: no p-value of exactly 0.
    not_above = (1 + (means <= 0).sum(axis=0)) / (1 + n_resamples)
    not_below = (1 + (means >= 0).sum(axis=0)) / (1 + n_resamples)
    return low, high, np.minimum(1.0, 2 * np.minimum(not_above, not_below))


def _check_same_task(run_a: Path, run_b: Path, protocol: str) -> None:
    """Ranks among different candidates say nothing about the models."""
    decisive = ["n_items"]
    decisive += ["exclude_seen"] if protocol == "full" else ["n_negatives", "seed"]
    settings: list[dict[str, Any]] = []
    for run in (run_a, run_b):
        content = load_metrics(run)
        if protocol not in content["metrics"]:
            raise ValueError(
                f"{run} was not evaluated under protocol {protocol!r}: it has {', '.join(content['metrics'])}"
            )
        with undamaged(run / METRICS_FILE):
            known = content["settings"] | {"n_items": content["n_items"]}
            settings.append({name: known[name] for name in decisive})
    for name in decisive:
        if settings[0][name] != settings[1][name]:
            raise ValueError(
                f"{name} is {settings[0][name]} in {run_a} and {settings[1][name]} in {run_b}: "
                "the targets were ranked among different items; evaluate both the same way"
            )


def _per_user(run: Path, protocol: str) -> dict[str, tuple[str, int]]:
    """user -> (target, rank); ids as text, since one run may have read them as numbers."""
    with undamaged(run / PER_USER_FILE):
        columns = read_parquet(run / PER_USER_FILE)
        answers = {
            str(user): (str(target), int(rank))
            for user, target, rank in zip(columns["user"], columns["target"], columns[f"rank_{protocol}"], strict=True)
        }
    if len(answers) != len(columns["user"]):
        raise ValueError(
            f"{run / PER_USER_FILE} has users in more than one row: a paired comparison needs one target per user"
        )
    return answers


def _values(ranks: list[int], metrics: list[str]) -> NDArray[np.float64]:
    """(users, metrics)"""
    tensor = torch.tensor(ranks, dtype=torch.int64)
    values: NDArray[np.float64] = torch.stack([per_user(tensor, m) for m in metrics], 1).numpy()
    return values


def _differences(
    metrics: list[str], values_a: NDArray[np.float64], values_b: NDArray[np.float64], n_boot: int, seed: int
) -> list[PairedDifference]:
    difference = values_b - values_a
    low, high, p_values = bootstrap(difference, n_boot, seed)
    return [
        PairedDifference(
            metric=metric,
            a=float(values_a[:, i].mean()),
            b=float(values_b[:, i].mean()),
            difference=float(difference[:, i].mean()),
            low=float(low[i]),
            high=float(high[i]),
            p_value=float(p_values[i]),
            n_better=int((difference[:, i] > 0).sum()),
            n_equal=int((difference[:, i] == 0).sum()),
            n_worse=int((difference[:, i] < 0).sum()),
        )
        for i, metric in enumerate(metrics)
    ]
