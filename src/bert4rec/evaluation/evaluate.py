"""Ask a model every question once and rank the right answers under every protocol.

Shapes: `B` questions in a batch, `L` the longest history in it, `V` items, `K` negatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from bert4rec.data.pieces import FOR_SCORING, like_lengths
from bert4rec.data.splits import Questions
from bert4rec.evaluation.metrics import UNREACHABLE, estimates, metric_names
from bert4rec.evaluation.protocols import (
    NO_ITEM,
    PROTOCOLS,
    check_scores,
    draw_negatives,
    full_rank,
    sampled_rank,
)
from bert4rec.evaluation.result import Evaluation
from bert4rec.parallel import Workers
from bert4rec.ranking import SCORES_BYTES

if TYPE_CHECKING:
    from bert4rec.models import Model

BIAS_CUT_OFF = 10  # popularity bias looks at the ten items a user would be shown


class Batch(NamedTuple):
    rows: NDArray[np.int64]  # (B,) which questions these are
    users: Tensor  # (B,)
    history: Tensor  # (B, L) int64, right-padded with PAD = V
    targets: Tensor  # (B,)


def question_batches(questions: Questions, n_items: int, batch_size: int) -> Iterator[Batch]:
    """Every question once, longest histories first, in pieces of at most `batch_size`.

    Histories of like length share a piece, so little is padding; and one that is too large for the
    machine is met at the start, not after an hour.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: choose 1 or more")
    order = np.argsort(-questions.histories.lengths, kind="stable")
    most_rows = max(1, min(batch_size, SCORES_BYTES // (4 * n_items)))
    for piece in like_lengths(questions.histories.lengths[order], FOR_SCORING, most_rows):
        rows = order[piece]
        history = questions.histories.padded(rows, n_items)
        yield Batch(
            rows,
            torch.from_numpy(questions.users[rows]),
            torch.from_numpy(history),
            torch.from_numpy(questions.targets[rows]),
        )


def full_ranks(
    model: Model,
    questions: Questions,
    *,
    exclude_seen: bool = True,
    batch_size: int = 256,
    n_workers: int | None = None,
) -> Tensor:
    """Ranks among all items and nothing else, in question order: what validation needs."""
    ranks = torch.empty(len(questions), dtype=torch.int64)

    def answer(batch: Batch) -> None:
        scores, targets, excluded = _answers(model, batch, exclude_seen)
        ranks[torch.from_numpy(batch.rows)] = full_rank(scores, targets, excluded).cpu()

    with Workers(n_workers) as workers:
        for _ in workers.stream(answer, question_batches(questions, model.n_items, batch_size)):
            pass
    return ranks


def evaluate(
    model: Model,
    questions: Questions,
    *,
    train_counts: NDArray[np.int64],
    ks: Sequence[int] = (1, 5, 10, 20),
    exclude_seen: bool = True,
    protocols: Sequence[str] = PROTOCOLS,
    n_negatives: int = 100,
    seed: int = 0,
    batch_size: int = 256,
    bootstrap: int = 1000,
    n_workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """All metrics under all protocols, from one call of `model.score` a batch.

    `exclude_seen` concerns `full` and the lists behind coverage and bias; sampled negatives never
    contain a user's own items. `progress(done, total)` counts questions.
    """
    n_items = model.n_items
    _check(questions, train_counts, n_items, ks, protocols)
    weights = {"popularity": train_counts, "uniform": np.ones(n_items, dtype=np.int64)}
    negatives = {
        name: torch.from_numpy(draw_negatives(questions, weights[name], n_negatives, seed))
        for name in protocols
        if name != "full"
    }
    ranks = {name: torch.empty(len(questions), dtype=torch.int64) for name in protocols}
    lists = _Lists(train_counts, ks)

    def answer(batch: Batch) -> tuple[int, Tensor, Tensor]:
        scores, targets, excluded = _answers(model, batch, exclude_seen)
        rows = torch.from_numpy(batch.rows)
        for name in protocols:
            if name == "full":
                found = full_rank(scores, targets, excluded)
            else:
                drawn = negatives[name][rows].to(scores.device, torch.int64)
                found = sampled_rank(scores, targets, drawn)
            ranks[name][rows] = found.cpu()
        return len(rows), *lists.best(scores, excluded)

    n_done = 0
    with Workers(n_workers) as workers:
        pieces = question_batches(questions, n_items, batch_size)
        for n, best, items in workers.stream(answer, pieces):
            lists.add(best, items)
            n_done += n
            if progress is not None:
                progress(n_done, len(questions))
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
        "n_users": len(questions),
        "n_items": n_items,
        "n_short_of_negatives": max(
            (int((drawn[:, -1] == NO_ITEM).sum()) for drawn in negatives.values()), default=0
        ),
        "n_unreachable": int(unreachable.sum()),
        "n_cold_targets": int((train_counts[questions.targets] == 0).sum()),
        "coverage": lists.coverage(),
        "popularity_bias": lists.popularity_bias(questions.targets),
        "settings": settings,
    }
    return Evaluation(
        users=questions.users,
        targets=questions.targets,
        history_lengths=questions.histories.lengths,
        target_counts=train_counts[questions.targets],
        ranks={name: found.numpy() for name, found in ranks.items()},
        metrics=estimates(ranks, metric_names(ks), n_resamples=bootstrap, seed=seed),
        extras=extras,
    )


def _answers(
    model: Model, batch: Batch, exclude_seen: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Checked scores, and targets and history on the device where the model left the scores."""
    scores = model.score(batch.users, batch.history)
    check_scores(scores, len(batch.rows), model.n_items)
    excluded = batch.history.to(scores.device) if exclude_seen else None
    return scores, batch.targets.to(scores.device), excluded


def _check(
    questions: Questions,
    train_counts: NDArray[np.int64],
    n_items: int,
    ks: Sequence[int],
    protocols: Sequence[str],
) -> None:
    if len(questions) == 0:
        raise ValueError("there are no questions to evaluate on: the split left no user with one")
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


class _Lists:
    """What the recommended lists look like as a whole: how much of the catalogue, how popular."""

    def __init__(self, train_counts: NDArray[np.int64], ks: Sequence[int]) -> None:
        self.ks = sorted(set(ks))
        self.counts = train_counts.astype(np.float64)
        # Share of the catalogue that is less popular, ties counted half: .5 is the average item.
        ordered = np.sort(train_counts)
        below = np.searchsorted(ordered, train_counts, side="left")
        up_to = np.searchsorted(ordered, train_counts, side="right")
        self.percentiles = (below + up_to) / (2 * len(train_counts))
        self.first_place = np.full(len(train_counts), np.iinfo(np.int64).max)
        self.n_shown = np.zeros(len(train_counts), dtype=np.int64)  # within BIAS_CUT_OFF

    def best(self, scores: Tensor, excluded: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scores and items of the longest list that is looked at."""
        length = min(max(*self.ks, BIAS_CUT_OFF), scores.shape[1])
        if excluded is not None:
            scores = pad(scores, (0, 1))  # a copy, with a column for PAD to fall into
            scores.scatter_(1, excluded, -torch.inf)[:, -1] = -torch.inf
        best = scores.topk(length, dim=1)
        return best.values, best.indices

    def add(self, best: Tensor, items: Tensor) -> None:
        # A user who has seen nearly everything gets a short list, not a list of seen items.
        is_shown = best.cpu().numpy() > -np.inf
        shown = items.cpu().numpy()[is_shown]
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
