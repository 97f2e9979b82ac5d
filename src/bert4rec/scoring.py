"""The one scoring path: histories → vectors → blocks of scores → mask → ranks, or the best k.

Validation, evaluation, recommending, batch files, the service and the index all come through here.
Cutting histories to what the model reads, grouping them by length and hiding seen items happen
here and nowhere else.

Scores come in blocks of items, so that no row over a large catalogue is ever held: all that is kept
of a block are the best so far and the logsumexp so far. For many histories this is also faster than
whole rows (`benchmarks/scale/retrieval.py`), as a block is still in the cache when it is read.

Shapes: B histories, L length, D width, V items, C items of a block, K best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bert4rec.cpu_tuning import without_onednn
from bert4rec.data.splits import FOR_SCORING, HeldOut, Spans, group_by_length
from bert4rec.item_mask import ExcludedItems, ItemMask
from bert4rec.models import Model
from bert4rec.models.output import DotProductOutput, Output
from bert4rec.threads import WorkerThreads

UNREACHABLE = 0  # the rank of a target that is masked: it can never be recommended
SCORES_BYTES = 64 * 2**20  # most memory for whole rows of scores
ROWS_OF_BLOCKS = 256  # histories that are scored together in blocks of items
HISTORIES_AT_ONCE = 4096
MANY_BLOCKED = 256  # items of a request: with fewer, fetching as many more is hardly noticed
BLOCK_SCORES = 2**20  # of a block, all histories together: 4 MB
FEWEST_ITEMS = 2**12  # of a block: below it starting an operation costs more than its work
MOST_ITEMS = 2**17  # of a block: quantized embeddings are decoded for it
ITEMS_PER_BEST = 16  # and so many for each of the K: finding these must not cost more than scoring

T = TypeVar("T")
Block = tuple[int, Tensor]  # the first item, and (B, C) scores from it on


class TopK(NamedTuple):
    items: Tensor  # (B, K) best first
    scores: Tensor  # (B, K), -inf where nothing is left
    log_total: Tensor  # (B, 1) logsumexp over all items, before the mask; NaN: not known


class Ranking(NamedTuple):
    """The best items of n histories, as arrays."""

    items: NDArray[np.int64]  # (n, k) best first
    scores: NDArray[np.float32]  # (n, k)
    # (n, k) over the whole catalogue, before any mask; NaN where an index was asked instead
    probabilities: NDArray[np.float32]
    n_found: NDArray[np.int64]  # (n,) how many of the k are recommendations: what is left of V

    def row(self, row: int, k: int) -> Ranking:
        """The best `k` of one history, as many as there are."""
        n = min(int(self.n_found[row]), k)
        part = slice(row, row + 1), slice(n)
        return Ranking(self.items[part], self.scores[part], self.probabilities[part], np.array([n]))


class Request(NamedTuple):
    """One history of tokens, and what may be recommended; a batch may mix them freely."""

    history: list[int]
    k: int
    exclude_seen: bool = True
    allowed: list[int] | None = None  # only these items
    blocked: list[int] = []  # noqa: RUF012  never these


class CandidateIndex(Protocol):
    """What finds the best items without scoring all of them, such as retrieval.ItemIndex."""

    def top_k(self, h: Tensor, output: DotProductOutput, mask: ItemMask, k: int) -> TopK: ...


def items_per_block(n_histories: int, k: int) -> int:
    """How many items are scored at a time, in a search for `k`."""
    n = min(MOST_ITEMS, BLOCK_SCORES // max(1, n_histories))
    return max(FEWEST_ITEMS, n, ITEMS_PER_BEST * k)


def score_blocks(output: Output, h: Tensor, k: int = 1) -> Iterator[Block]:
    """(B, D) → the scores of all items, in blocks for a search for `k`, to be written over."""
    n = items_per_block(len(h), k)
    for first in range(0, output.n_items, n):
        yield first, output.block_scores(h, first, min(first + n, output.n_items)).cpu()


@without_onednn()
@torch.inference_mode()
def score_rows(model: Model, users: Tensor, histories: Tensor) -> Tensor:
    """(B,), (B, L) histories that are cut already → (B, V) scores of all items."""
    return model.output_layer().block_scores(model.encode(users, histories), 0, model.n_items)


def rank_of(scores: Tensor, targets: Tensor) -> Tensor:
    """(B, V) masked scores, (B,) → (B,) places of the targets, from 1; ties come before them.

    A target that is masked could never be recommended: it is `UNREACHABLE`.
    """
    wanted = scores.gather(1, targets[:, None])
    ranks = (scores >= wanted).sum(dim=1, dtype=torch.int32).long()  # the target counts itself
    return ranks.masked_fill(wanted[:, 0] == -torch.inf, UNREACHABLE)


@without_onednn()
@torch.inference_mode()
def top_k(blocks: Iterable[Block], mask: ItemMask, k: int) -> TopK:
    """The `k` best of scores that come block by block, and are written over."""
    best: TopK | None = None
    for first, block in blocks:
        log_total = _add_to_total(block, None if best is None else best.log_total)
        mask.hide(block, first)
        found = block.topk(min(k, block.shape[1]))
        items, scores = found.indices + first, found.values
        if best is not None:
            items, scores = torch.cat([best.items, items], 1), torch.cat([best.scores, scores], 1)
            found = scores.topk(min(k, scores.shape[1]))
            items, scores = items.gather(1, found.indices), found.values
        best = TopK(items, scores, log_total)
    assert best is not None
    return best


@without_onednn()
@torch.inference_mode()
def log_probabilities(blocks: Iterable[Block], items: Tensor) -> Tensor:
    """(B, K) of the softmax over the whole catalogue, for the same K items in every row."""
    log_total, parts, places = None, [], []
    for first, block in blocks:
        log_total = _add_to_total(block, log_total)
        is_here = (items >= first) & (items < first + block.shape[1])
        parts.append(block[:, items[is_here] - first])
        places.append(is_here.nonzero()[:, 0])
    assert log_total is not None
    return torch.cat(parts, 1)[:, torch.cat(places).argsort()] - log_total


def _add_to_total(block: Tensor, log_total: Tensor | None) -> Tensor:
    """logsumexp by way of a kernel that does it in one pass."""
    of_block = block[:, :1] - block.log_softmax(1)[:, :1]
    return of_block if log_total is None else torch.logaddexp(log_total, of_block)


class HeldOutBatch(NamedTuple):
    """Some held-out users with their scores, on the CPU."""

    rows: Tensor  # (B,) which of the held-out users these are
    targets: Tensor  # (B,)
    scores: Tensor  # (B, V), before the mask
    mask: ItemMask  # hides what was seen, or nothing


def map_held_out(
    measure: Callable[[HeldOutBatch], T],
    model: Model,
    held_out: HeldOut,
    workers: WorkerThreads,
    *,
    exclude_seen: bool,
    batch_size: int = ROWS_OF_BLOCKS,
) -> Iterator[T]:
    """What `measure` finds in the scores of every held-out user, each once, longest first.

    A batch that is too large for the machine is met at the start, not after an hour.
    """
    n_items = model.n_items
    most = max(1, min(batch_size, SCORES_BYTES // (4 * n_items)))

    @torch.inference_mode()
    def score(rows: NDArray[np.int64]) -> T:
        histories = held_out.histories.take(rows)
        scores = score_rows(model, *_read(histories, model)).cpu()
        check_scores(scores, len(rows), n_items)
        targets = torch.from_numpy(held_out.targets[rows])
        mask = ItemMask.of_histories(histories, n_items, exclude_seen=exclude_seen)
        return measure(HeldOutBatch(torch.from_numpy(rows), targets, scores, mask))

    return workers.stream(score, group_histories(_lengths_read(held_out.histories, model), most))


def rank_held_out(model: Model, held_out: HeldOut, *, exclude_seen: bool, n_workers: int | None = None) -> Tensor:
    """(n,) ranks of the held-out items among all items: what validation needs."""
    ranks = torch.empty(len(held_out), dtype=torch.int64)

    def rank(batch: HeldOutBatch) -> None:
        batch.mask.hide(batch.scores)
        ranks[batch.rows] = rank_of(batch.scores, batch.targets)

    with WorkerThreads(n_workers) as workers:
        for _ in map_held_out(rank, model, held_out, workers, exclude_seen=exclude_seen):
            pass
    return ranks


def check_scores(scores: Tensor, n_histories: int, n_items: int) -> None:
    """A NaN compares as smaller than everything and would earn rank 1: refuse it."""
    if scores.shape != (n_histories, n_items):
        raise ValueError(
            f"the model's scores have shape {tuple(scores.shape)}, expected "
            f"{(n_histories, n_items)}: one row per history, one column per item"
        )
    n_broken = int(scores.amax(dim=1).isnan().sum())  # the maximum of a row with a NaN is NaN
    if n_broken:
        raise ValueError(
            f"the model's scores are NaN for {n_broken} of {n_histories} histories: its weights "
            "are broken; train again with a lower learning rate or load an earlier checkpoint"
        )


def answer_requests(
    model: Model, fallback: Model, requests: Sequence[Request], index: CandidateIndex | None = None
) -> list[Ranking]:
    """The best items of every request, in order, each a ranking with one row; on this thread."""
    n_items = model.n_items
    histories = Spans.of_lists([request.history for request in requests])
    answers: list[Ranking | None] = [None] * len(requests)
    for rows in _request_groups(requests, histories, model, fallback, index):
        group = [requests[row] for row in rows.tolist()]
        hidden = [
            row * n_items + token
            for row, each in enumerate(group)
            for tokens in (each.history if each.exclude_seen else (), each.blocked)
            for token in tokens
        ]
        allowed = {
            row: torch.tensor(each.allowed, dtype=torch.int64)
            for row, each in enumerate(group)
            if each.allowed is not None
        }
        mask = ItemMask(n_items, torch.tensor(hidden, dtype=torch.int64), None, allowed)
        answering = model if group[0].history else fallback
        ranking = _rank(answering, histories.take(rows), mask, max(each.k for each in group), index)
        for row, (place, each) in enumerate(zip(rows.tolist(), group, strict=True)):
            answers[place] = ranking.row(row, each.k)
    return [answer for answer in answers if answer is not None]


def rank_histories(
    model: Model,
    fallback: Model,
    histories: Spans,
    k: int,
    *,
    exclude_seen: bool = True,
    excluded: Tensor | None = None,
    index: CandidateIndex | None = None,
    n_workers: int | None = None,
) -> Iterator[Ranking]:
    """The `k` best items of every history, in order, some thousand histories at a time.

    `excluded` (V,) is true for items that nobody gets; `fallback` answers empty histories.
    `histories.users` are rows of the training data, and -1 for unknown users.
    """
    n_items = model.n_items
    common = None if excluded is None else ExcludedItems(excluded)
    is_empty, lengths = histories.lengths == 0, _lengths_read(histories, model)

    def rank(rows: NDArray[np.int64]) -> Ranking:
        some = histories.take(rows)
        mask = ItemMask.of_histories(some, n_items, exclude_seen=exclude_seen, excluded=common)
        return _rank(fallback if is_empty[rows[0]] else model, some, mask, k, index)

    with WorkerThreads(n_workers) as workers:
        for first in range(0, len(histories), HISTORIES_AT_ONCE):
            rows = np.arange(first, min(first + HISTORIES_AT_ONCE, len(histories)))
            some, empty = rows[~is_empty[rows]], rows[is_empty[rows]]
            groups = [some[part] for part in group_histories(lengths[some], most_rows(model))]
            groups += [empty[part] for part in group_histories(lengths[empty], most_rows(fallback))]
            found = workers.map(rank, groups)
            places = np.argsort(np.concatenate(groups))
            yield Ranking(*(np.concatenate(column)[places] for column in zip(*found, strict=True)))


def encode_histories(model: Model, histories: Spans) -> tuple[Tensor, ItemMask]:
    """(n, D) vectors of all histories, and the mask of what they have seen."""
    groups = group_histories(_lengths_read(histories, model), len(histories))
    h = []
    for rows in groups:
        h.append(_encode(model, histories.take(rows)))
    order = torch.from_numpy(np.argsort(np.concatenate(groups)))
    mask = ItemMask.of_histories(histories, model.n_items, exclude_seen=True)
    return torch.cat(h)[order], mask


def log_probabilities_of(model: Model, fallback: Model, histories: Sequence[list[int]], items: list[int]) -> Tensor:
    """(n, items): what the softmax over the whole catalogue gives some items; unknown users."""
    chosen = torch.tensor(items, dtype=torch.int64)
    spans, requests = Spans.of_lists(histories), [Request(each, 1) for each in histories]
    found = torch.empty(len(histories), len(items))
    for rows in _request_groups(requests, spans, model, fallback, None):
        answering = model if spans.lengths[rows[0]] else fallback
        h = _encode(answering, spans.take(rows))
        found[torch.from_numpy(rows)] = log_probabilities(score_blocks(answering.output_layer(), h), chosen)
    return found


def dot_product_of(model: Model) -> DotProductOutput | None:
    """The output layer of models whose scores are products; others score all items at once."""
    output = model.output_layer()
    return output if isinstance(output, DotProductOutput) else None


def most_rows(model: Model) -> int:
    """Histories that are scored together: in blocks of items, else as many as bounded memory holds the scores of."""
    return max(1, SCORES_BYTES // (4 * model.n_items)) if dot_product_of(model) is None else ROWS_OF_BLOCKS


def group_histories(lengths: NDArray[np.int64], most: int) -> list[NDArray[np.int64]]:
    """Rows of like length together, longest first."""
    order = np.argsort(-lengths, kind="stable")
    return [order[group] for group in group_by_length(lengths[order], FOR_SCORING, most)]


def _rank(model: Model, histories: Spans, mask: ItemMask, k: int, index: CandidateIndex | None) -> Ranking:
    """By the index if there is one for this model."""
    k = min(k, model.n_items)
    h, output = _encode(model, histories), model.output_layer()
    if index is not None and isinstance(output, DotProductOutput):
        best = index.top_k(h, output, mask, k)
    else:
        best = top_k(score_blocks(output, h, k), mask, k)
    probabilities = (best.scores - best.log_total).exp()
    n_found = (best.scores > -torch.inf).sum(1)
    columns = best.items, best.scores, probabilities, n_found
    return Ranking(*(column.numpy() for column in columns))


def _request_groups(
    requests: Sequence[Request], histories: Spans, model: Model, fallback: Model, index: CandidateIndex | None
) -> Iterator[NDArray[np.int64]]:
    """Requests of like length together, the empty ones apart.

    With an index also those that want and block alike many: one who wants many, or blocks many,
    would make all others wait.
    """
    if len(requests) == 1:
        yield np.zeros(1, dtype=np.int64)
        return
    work = np.zeros((len(requests), 3), dtype=np.int64)
    work[:, 0] = histories.lengths == 0
    if index is not None:
        work[:, 1] = [request.k for request in requests]
        work[:, 2] = [(len(each.blocked) // MANY_BLOCKED).bit_length() for each in requests]
    lengths = _lengths_read(histories, model)
    for alike in np.unique(work, axis=0):
        group = np.flatnonzero((work == alike).all(1))
        most = most_rows(fallback if alike[0] else model)
        yield from (group[part] for part in group_histories(lengths[group], most))


def part_read(history: list[int], model: Model) -> list[int]:
    """The last items of a history, as many as the model reads."""
    n = model.max_history
    return history if n is None else history[max(0, len(history) - n) :]


def _lengths_read(histories: Spans, model: Model) -> NDArray[np.int64]:
    n = model.max_history
    return histories.lengths if n is None else np.minimum(histories.lengths, n)


def _read(histories: Spans, model: Model) -> tuple[Tensor, Tensor]:
    """(B,) users, and (B, L) the part of each history that the model reads."""
    read = histories if model.max_history is None else histories.last(model.max_history)
    tokens = read.padded(np.arange(len(read)), model.n_items)
    return torch.from_numpy(histories.users), torch.from_numpy(tokens)


def _encode(model: Model, histories: Spans) -> Tensor:
    return model.encode(*_read(histories, model))
