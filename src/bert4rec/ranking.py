"""The best items for many histories, as arrays; on all cores.

Shapes: `n` histories, `B` of them in a piece, `V` items.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


class Question(NamedTuple):
    """One history of tokens, and what may be answered; a batch may mix them freely."""

    history: list[int]
    k: int
    excludes_seen: bool = True
    allowed: list[int] | None = None  # only these items
    blocked: list[int] = []  # noqa: RUF012  never these


def rank_questions(model: Model, fallback: Model, questions: Sequence[Question]) -> list[Ranking]:
    """The best items of every question, in order, each a ranking with one row.

    Scored together in pieces of like length; on the calling thread, for answers at once.
    """
    most_rows = max(1, SCORES_BYTES // (4 * model.n_items))
    lengths = np.array([len(question.history) for question in questions], dtype=np.int64)
    answers: list[Ranking | None] = [None] * len(questions)
    for rows in _pieces(lengths, most_rows):
        asked = [questions[row] for row in rows.tolist()]
        n_columns = int(lengths[rows[0]])  # longest first
        padded = torch.tensor(
            [each.history + [model.n_items] * (n_columns - len(each.history)) for each in asked],
            dtype=torch.int64,
        ).reshape(len(asked), n_columns)
        answering = fallback if n_columns == 0 else model
        scores = answering.score(torch.full((len(asked),), -1), padded)
        left_out = [
            row * model.n_items + token
            for row, each in enumerate(asked)
            for tokens in (each.history if each.excludes_seen else (), each.blocked)
            for token in tokens
        ]
        only = {row: each.allowed for row, each in enumerate(asked) if each.allowed is not None}
        n_best = min(max(each.k for each in asked), model.n_items)
        ranking = best_items(scores, torch.tensor(left_out, dtype=torch.int64), n_best, only=only)
        for row, (place, each) in enumerate(zip(rows.tolist(), asked, strict=True)):
            n_found = min(int(ranking.n_found[row]), each.k)
            part = slice(row, row + 1), slice(n_found)
            answers[place] = Ranking(
                ranking.items[part],
                ranking.scores[part],
                ranking.probabilities[part],
                np.array([n_found]),
            )
    return [answer for answer in answers if answer is not None]


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
        parts = _pieces(histories.lengths[rows], most_rows)
        found = workers.map(rank, [rows[part] for part in parts])
        places = np.argsort(np.concatenate(parts))
        yield Ranking(*(np.concatenate(column)[places] for column in zip(*found, strict=True)))


def _pieces(lengths: NDArray[np.int64], most_rows: int) -> list[NDArray[np.int64]]:
    """Rows of like length together, longest first, the empty ones in pieces of their own."""
    order = np.argsort(-lengths, kind="stable")
    n_some = int((lengths > 0).sum())
    some = like_lengths(lengths[order[:n_some]], FOR_SCORING, most_rows)
    empty = [slice(i, i + most_rows) for i in range(n_some, len(order), most_rows)]
    return [order[piece] for piece in (*some, *empty)]


@torch.inference_mode()
def best_items(
    scores: Tensor,
    seen: Tensor | None,
    k: int,
    excluded: Tensor | None = None,
    only: Mapping[int, Sequence[int]] | None = None,
) -> Ranking:
    """The `k` best of (B, V) scores, which are written over.

    `seen` are flat places of `scores` that are left out, `excluded` (V,) items for everybody,
    `only` the items that alone remain for some of the rows.
    """
    # logsumexp by way of a kernel that does it in one pass
    log_total = scores[:, :1] - scores.log_softmax(1)[:, :1]
    for row, items in (only or {}).items():
        remaining = scores[row, items].clone()
        scores[row] = -torch.inf
        scores[row, items] = remaining
    if excluded is not None:
        scores.masked_fill_(excluded, -torch.inf)
    if seen is not None:
        scores.view(-1).index_fill_(0, seen, -torch.inf)
    best = scores.topk(k)
    probabilities = (best.values - log_total).exp_()
    n_found = (best.values > -torch.inf).sum(1)
    columns = best.indices, best.values, probabilities, n_found
    return Ranking(*(column.numpy() for column in columns))
