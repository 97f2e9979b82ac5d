"""The best items for many histories, as arrays; on all cores.

Shapes: `n` histories, `B` of them in a piece, `V` items.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bert4rec.data.pieces import FOR_SCORING, like_lengths
from bert4rec.data.splits import Spans
from bert4rec.models import Model
from bert4rec.parallel import Workers

SCORES_BYTES = 64 * 2**20  # most memory for the scores of a piece
HISTORIES_AT_ONCE = 4096


class Ranking(NamedTuple):
    items: NDArray[np.int64]  # (n, k) best first
    scores: NDArray[np.float32]  # (n, k)
    probabilities: NDArray[np.float32]  # (n, k) over the whole catalogue, before any filter
    n_found: NDArray[np.int64]  # (n,) how many of the k are recommendations: what is left of V


def rank_histories(
    model: Model,
    fallback: Model,
    histories: Spans,
    k: int,
    *,
    exclude_seen: bool = True,
    excluded: Tensor | None = None,
    workers: Workers,
) -> Iterator[Ranking]:
    """The `k` best items of every history, in order, some thousand histories at a time.

    `excluded` (V,) is true for items that nobody gets; `fallback` answers empty histories.
    `histories.users` are rows of the training data, and -1 for strangers.
    """
    most_rows = max(1, SCORES_BYTES // (4 * model.n_items))
    n_best = min(k, model.n_items)

    def rank(rows: NDArray[np.int64]) -> Ranking:
        padded = torch.from_numpy(histories.padded(rows, model.n_items))
        answers = fallback if padded.shape[1] == 0 else model
        scores = answers.score(torch.from_numpy(histories.users[rows]), padded)
        seen = None
        if exclude_seen:
            starts = torch.arange(0, scores.numel(), model.n_items)[:, None]
            seen = (starts + padded)[padded < model.n_items]
        return best_items(scores, seen, n_best, excluded)

    for first in range(0, len(histories), HISTORIES_AT_ONCE):
        rows = np.arange(first, min(first + HISTORIES_AT_ONCE, len(histories)))
        lengths = histories.lengths[rows]
        order = np.argsort(-lengths, kind="stable")
        # Longest first, the empty ones in pieces of their own.
        n_some = int((lengths > 0).sum())
        parts = [
            order[piece] for piece in like_lengths(lengths[order[:n_some]], FOR_SCORING, most_rows)
        ]
        parts += [order[i : i + most_rows] for i in range(n_some, len(order), most_rows)]
        found = workers.map(rank, [rows[part] for part in parts])
        places = np.argsort(np.concatenate(parts))
        yield Ranking(*(np.concatenate(column)[places] for column in zip(*found, strict=True)))


@torch.inference_mode()
def best_items(
    scores: Tensor, seen: Tensor | None, k: int, excluded: Tensor | None = None
) -> Ranking:
    """The `k` best of (B, V) scores, which are written over.

    `seen` are flat places of `scores` that are left out, `excluded` (V,) items for everybody.
    """
    # logsumexp by way of a kernel that does it in one pass
    log_total = scores[:, :1] - scores.log_softmax(1)[:, :1]
    if excluded is not None:
        scores.masked_fill_(excluded, -torch.inf)
    if seen is not None:
        scores.view(-1).index_fill_(0, seen, -torch.inf)
    best = scores.topk(k)
    probabilities = (best.values - log_total).exp_()
    n_found = (best.values > -torch.inf).sum(1)
    columns = best.indices, best.values, probabilities, n_found
    return Ranking(*(column.numpy() for column in columns))
