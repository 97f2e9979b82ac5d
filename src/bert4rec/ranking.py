"""The best items for many histories, as arrays; on all cores.

Shapes: `n` histories, `B` of them in a piece, `V` items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bert4rec.data.pieces import FOR_SCORING, like_lengths
from bert4rec.data.splits import Spans
from bert4rec.models import Model
from bert4rec.parallel import Workers
from bert4rec.retrieval.exact import (
    asked_vectors,
    exact_best,
    log_probabilities,
    products_of,
    score_blocks,
)
from bert4rec.retrieval.filters import Excluded, Filters
from bert4rec.retrieval.index import ItemIndex
from bert4rec.retrieval.indexed import indexed_best

SCORES_BYTES = 64 * 2**20  # most memory for the scores of a piece
ROWS_OF_BLOCKS = 256  # histories of a piece whose scores are computed in blocks of items
HISTORIES_AT_ONCE = 4096
MANY_BLOCKED = 256  # items of a question: with fewer, fetching as many more is hardly noticed


class Ranking(NamedTuple):
    items: NDArray[np.int64]  # (n, k) best first
    scores: NDArray[np.float32]  # (n, k)
    # (n, k) over the whole catalogue, before any filter; NaN where an index was asked instead
    probabilities: NDArray[np.float32]
    n_found: NDArray[np.int64]  # (n,) how many of the k are recommendations: what is left of V


class Question(NamedTuple):
    """One history of tokens, and what may be answered; a batch may mix them freely."""

    history: list[int]
    k: int
    excludes_seen: bool = True
    allowed: list[int] | None = None  # only these items
    blocked: list[int] = []  # noqa: RUF012  never these


def rank_questions(
    model: Model, fallback: Model, questions: Sequence[Question], index: ItemIndex | None = None
) -> list[Ranking]:
    """The best items of every question, in order, each a ranking with one row.

    Scored together in pieces of like length; on the calling thread, for answers at once.
    """
    n_items = model.n_items
    lengths = np.array([len(question.history) for question in questions], dtype=np.int64)
    answers: list[Ranking | None] = [None] * len(questions)
    for rows in _question_pieces(questions, lengths, model, fallback, index):
        asked = [questions[row] for row in rows.tolist()]
        n_columns = int(lengths[rows[0]])  # longest first
        padded = _padded([each.history for each in asked], n_columns, n_items)
        left_out = [
            row * n_items + token
            for row, each in enumerate(asked)
            for tokens in (each.history if each.excludes_seen else (), each.blocked)
            for token in tokens
        ]
        allowed = {
            row: torch.tensor(each.allowed, dtype=torch.int64)
            for row, each in enumerate(asked)
            if each.allowed is not None
        }
        filters = Filters(n_items, torch.tensor(left_out, dtype=torch.int64), None, allowed)
        strangers = torch.full((len(asked),), -1)
        k = max(each.k for each in asked)
        ranking = _rank(model, fallback, strangers, padded, filters, k, index)
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
    index: ItemIndex | None = None,
    workers: Workers,
) -> Iterator[Ranking]:
    """The `k` best items of every history, in order, some thousand histories at a time.

    `excluded` (V,) is true for items that nobody gets; `fallback` answers empty histories.
    `histories.users` are rows of the training data, and -1 for strangers.
    """
    n_items = model.n_items
    common = None if excluded is None else Excluded(excluded)

    def rank(rows: NDArray[np.int64]) -> Ranking:
        padded = torch.from_numpy(histories.padded(rows, n_items))
        seen = torch.empty(0, dtype=torch.int64)
        if exclude_seen:
            starts = torch.arange(0, len(rows) * n_items, n_items)[:, None]
            seen = (starts + padded)[padded < n_items]
        users, filters = torch.from_numpy(histories.users[rows]), Filters(n_items, seen, common)
        return _rank(model, fallback, users, padded, filters, k, index)

    for first in range(0, len(histories), HISTORIES_AT_ONCE):
        rows = np.arange(first, min(first + HISTORIES_AT_ONCE, len(histories)))
        parts = _pieces(histories.lengths[rows], model, fallback)
        found = workers.map(rank, [rows[part] for part in parts])
        places = np.argsort(np.concatenate(parts))
        yield Ranking(*(np.concatenate(column)[places] for column in zip(*found, strict=True)))


def log_probabilities_of(
    model: Model, fallback: Model, histories: Sequence[list[int]], items: list[int]
) -> Tensor:
    """(n, items): what the softmax over the whole catalogue gives some items; for strangers."""
    chosen = torch.tensor(items, dtype=torch.int64)
    kept = torch.empty(len(histories), len(items))
    lengths = np.array([len(history) for history in histories], dtype=np.int64)
    for rows in _pieces(lengths, model, fallback):
        n_columns = int(lengths[rows[0]])  # longest first
        padded = _padded([histories[row] for row in rows.tolist()], n_columns, model.n_items)
        answering = fallback if n_columns == 0 else model
        blocks = score_blocks(answering, torch.full((len(rows),), -1), padded)
        kept[torch.from_numpy(rows)] = log_probabilities(blocks, chosen)
    return kept


def most_rows(model: Model) -> int:
    """Histories that are scored at a time: as many as bounded memory holds the scores of."""
    n = max(1, SCORES_BYTES // (4 * model.n_items))
    return n if products_of(model) is None else max(n, ROWS_OF_BLOCKS)


def _rank(
    model: Model,
    fallback: Model,
    users: Tensor,
    padded: Tensor,
    filters: Filters,
    k: int,
    index: ItemIndex | None,
) -> Ranking:
    """Of (B, L) histories, all empty or none; by the index if there is one."""
    k = min(k, model.n_items)
    output = products_of(model)
    if padded.shape[1] == 0:
        best = exact_best(score_blocks(fallback, users, padded), filters, k)
    elif index is None or output is None:
        best = exact_best(score_blocks(model, users, padded, k), filters, k)
    else:
        best = indexed_best(index, asked_vectors(model, users, padded), output, filters, k)
    probabilities = (best.scores - best.log_total).exp()
    n_found = (best.scores > -torch.inf).sum(1)
    columns = best.items, best.scores, probabilities, n_found
    return Ranking(*(column.numpy() for column in columns))


def _question_pieces(
    questions: Sequence[Question],
    lengths: NDArray[np.int64],
    model: Model,
    fallback: Model,
    index: ItemIndex | None,
) -> Iterator[NDArray[np.int64]]:
    """With an index those together that want alike many, and leave out alike many.

    One who wants many, or blocks many, would make all others wait.
    """
    work = np.zeros((len(questions), 2), dtype=np.int64)
    if index is not None:
        work[:] = [(each.k, (len(each.blocked) // MANY_BLOCKED).bit_length()) for each in questions]
    for alike in np.unique(work, axis=0):
        group = np.flatnonzero((work == alike).all(1))
        yield from (group[piece] for piece in _pieces(lengths[group], model, fallback))


def _padded(histories: Sequence[list[int]], n_columns: int, pad: int) -> Tensor:
    rows = [history + [pad] * (n_columns - len(history)) for history in histories]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), n_columns)


def _pieces(lengths: NDArray[np.int64], model: Model, fallback: Model) -> list[NDArray[np.int64]]:
    """Rows of like length together, longest first, the empty ones in pieces of their own."""
    n_some_rows, n_empty = most_rows(model), most_rows(fallback)
    order = np.argsort(-lengths, kind="stable")
    n_some = int((lengths > 0).sum())
    some = like_lengths(lengths[order[:n_some]], FOR_SCORING, n_some_rows)
    empty = [slice(i, i + n_empty) for i in range(n_some, len(order), n_empty)]
    return [order[piece] for piece in (*some, *empty)]
