"""Score every held-out user once, and rank the target under every protocol.

Shapes: B users of a batch, V items, K negatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bert4rec.data.splits import HeldOut
from bert4rec.evaluation.metrics import estimates, metric_names
from bert4rec.evaluation.protocols import NO_ITEM, PROTOCOLS, draw_negatives, sampled_rank
from bert4rec.evaluation.result import Evaluation
from bert4rec.scoring import UNREACHABLE, HeldOutBatch, map_held_out, rank_of
from bert4rec.threads import WorkerThreads

if TYPE_CHECKING:
    from bert4rec.models import Model

BIAS_CUT_OFF = 10  # popularity bias looks at the ten items that a user would be shown
N_NEGATIVES = 100  # of the two sampled protocols, as in the paper
N_RESAMPLES = 1000  # behind the 95 % intervals
SEED = 0  # of the sampled negatives and the bootstrap


def evaluate(
    model: Model,
    held_out: HeldOut,
    *,
    train_counts: NDArray[np.int64],
    ks: Sequence[int] = (1, 5, 10, 20),
    exclude_seen: bool = True,
    protocols: Sequence[str] = PROTOCOLS,
    n_negatives: int = N_NEGATIVES,
    seed: int = SEED,
    bootstrap: int = N_RESAMPLES,
    n_workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """All metrics under all protocols, from one pass over the held-out users.

    `exclude_seen` concerns `full` and the lists behind coverage and bias; sampled negatives never
    contain a user's own items. `progress(done, total)` counts users.
    """
    n_items = model.n_items
    _check(held_out, train_counts, n_items, ks, protocols)
    weights = {"popularity": train_counts, "uniform": np.ones(n_items, dtype=np.int64)}
    negatives = {
        name: torch.from_numpy(draw_negatives(held_out, weights[name], n_negatives, seed))
        for name in protocols
        if name != "full"
    }
    ranks = {name: torch.empty(len(held_out), dtype=torch.int64) for name in protocols}
    lists = _ListStatistics(train_counts, ks)

    def measure(batch: HeldOutBatch) -> tuple[int, Tensor, Tensor]:
        for name, drawn in negatives.items():  # before the mask: a seen target has a score, too
            found = sampled_rank(batch.scores, batch.targets, drawn[batch.rows].long())
            ranks[name][batch.rows] = found
        batch.mask.hide(batch.scores)
        if "full" in ranks:
            ranks["full"][batch.rows] = rank_of(batch.scores, batch.targets)
        best = batch.scores.topk(min(lists.length, n_items), dim=1)
        return len(batch.rows), best.values, best.indices

    n_done = 0
    with WorkerThreads(n_workers) as workers:
        found = map_held_out(measure, model, held_out, workers, exclude_seen=exclude_seen)
        for n, best, items in found:
            lists.add(best, items)
            n_done += n
            if progress is not None:
                progress(n_done, len(held_out))
    settings = {
        "ks": list(ks),
        "exclude_seen": exclude_seen,
        "protocols": list(protocols),
        "n_negatives": n_negatives,
        "seed": seed,
        "bootstrap": bootstrap,
    }
    unreachable = ranks["full"] == UNREACHABLE if "full" in ranks else torch.zeros(0)
    extras: dict[str, Any] = {
        "n_users": len(held_out),
        "n_items": n_items,
        "n_short_of_negatives": max((int((drawn[:, -1] == NO_ITEM).sum()) for drawn in negatives.values()), default=0),
        "n_unreachable": int(unreachable.sum()),
        "n_cold_targets": int((train_counts[held_out.targets] == 0).sum()),
        "coverage": lists.coverage(),
        "popularity_bias": lists.popularity_bias(held_out.targets),
        "settings": settings,
    }
    return Evaluation(
        users=held_out.users,
        targets=held_out.targets,
        history_lengths=held_out.histories.lengths,
        target_counts=train_counts[held_out.targets],
        ranks={name: found.numpy() for name, found in ranks.items()},
        metrics=estimates(ranks, metric_names(ks), n_resamples=bootstrap, seed=seed),
        extras=extras,
    )


def _check(
    held_out: HeldOut, train_counts: NDArray[np.int64], n_items: int, ks: Sequence[int], protocols: Sequence[str]
) -> None:
    if len(held_out) == 0:
        raise ValueError("there is nobody to evaluate on: the split holds out no user")
    if len(train_counts) != n_items:
        raise ValueError(
            f"train_counts has {len(train_counts)} entries and the model knows {n_items} items: "
            "evaluate on the data that the model was trained on"
        )
    if not ks:
        raise ValueError("ks is empty: name at least one cut-off, such as 10")
    for name in protocols:
        if name not in PROTOCOLS:
            raise ValueError(f"unknown protocol {name!r}: use some of {', '.join(PROTOCOLS)}")
    if not protocols:
        raise ValueError(f"protocols is empty: use some of {', '.join(PROTOCOLS)}")


class _ListStatistics:
    """What the recommended lists look like as a whole: how much of the catalogue, how popular."""

    def __init__(self, train_counts: NDArray[np.int64], ks: Sequence[int]) -> None:
        self.ks = sorted(set(ks))
        self.length = max(*self.ks, BIAS_CUT_OFF)  # of the longest list that is looked at
        self.counts = train_counts.astype(np.float64)
        # Share of the catalogue that is less popular, ties counted half: .5 is the average item.
        ordered = np.sort(train_counts)
        below = np.searchsorted(ordered, train_counts, side="left")
        up_to = np.searchsorted(ordered, train_counts, side="right")
        self.percentiles = (below + up_to) / (2 * len(train_counts))
        self.first_place = np.full(len(train_counts), np.iinfo(np.int64).max)
        self.n_shown = np.zeros(len(train_counts), dtype=np.int64)  # within BIAS_CUT_OFF

    def add(self, best: Tensor, items: Tensor) -> None:
        # A user who has seen nearly everything gets a short list, not a list of seen items.
        is_shown = best.numpy() > -np.inf
        shown = items.numpy()[is_shown]
        places = np.broadcast_to(np.arange(is_shown.shape[1]), is_shown.shape)[is_shown]
        np.minimum.at(self.first_place, shown, places)
        self.n_shown += np.bincount(shown[places < BIAS_CUT_OFF], minlength=len(self.n_shown))

    def coverage(self) -> dict[str, float]:
        """Share of the catalogue that is in somebody's first k."""
        return {str(k): float((self.first_place < k).mean()) for k in self.ks}

    def popularity_bias(self, targets: NDArray[np.int64]) -> dict[str, float]:
        """How popular the recommended items are against those that users really chose."""
        n_shown = max(1, int(self.n_shown.sum()))
        return {
            "k": BIAS_CUT_OFF,
            "recommended_mean_count": float(self.n_shown @ self.counts / n_shown),
            "target_mean_count": float(self.counts[targets].mean()),
            "recommended_mean_percentile": float(self.n_shown @ self.percentiles / n_shown),
            "target_mean_percentile": float(self.percentiles[targets].mean()),
        }
