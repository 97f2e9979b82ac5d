"""Exact search, a block of items at a time: no row of scores over all items is ever held.

The best so far and the logarithm of the softmax's sum so far are all that is kept of a block. Many
histories at once are answered faster than by whole rows (`benchmarks/scale/retrieval.py`), as the
scores of a block are still in the cache when they are looked at; few items are one block.

Shapes: B histories, D width, V items, C items of a block, K best.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bert4rec.models import Model
from bert4rec.models.learned import Learned
from bert4rec.models.onednn import without_onednn
from bert4rec.models.output import InBlocks
from bert4rec.retrieval.filters import Filters

BLOCK_SCORES = 2**20  # of a block, all histories together: 4 MB
FEWEST_ITEMS = 2**12  # of a block: below it starting an operation costs more than its work
MOST_ITEMS = 2**17  # of a block: compressed vectors are decoded for it
ITEMS_A_BEST = 16  # and so many for each of the K: finding these must not cost more than scoring

Block = tuple[int, Tensor]  # the first item, and (B, C) scores from it on


class Best(NamedTuple):
    items: Tensor  # (B, K) best first
    scores: Tensor  # (B, K), -inf where nothing is left
    log_total: Tensor  # (B, 1) logsumexp over the whole catalogue, before filters; NaN: not known


def products_of(model: Model) -> InBlocks | None:
    """The output layer of models whose scores are products; others score all items at once."""
    output = model.output() if isinstance(model, Learned) else None
    return output if isinstance(output, InBlocks) else None


@without_onednn()
@torch.inference_mode()
def asked_vectors(model: Model, users: Tensor, history: Tensor) -> Tensor:
    """(B,), (B, L) histories → (B, D) what their scores are products of."""
    assert isinstance(model, Learned)
    model._stop_training()
    device = next(model.parameters()).device
    tokens, at = model.question(history.to(device))
    return model.asked(tokens, at, users.to(device))


def product_blocks(
    h: Tensor, output: InBlocks, k: int = 1, items: Tensor | None = None
) -> Iterator[Block]:
    """(B, D) → the scores of all items, or of `items` alone, in blocks that fit a search for `k`.

    A block may be written over.
    """
    n = max(FEWEST_ITEMS, min(MOST_ITEMS, BLOCK_SCORES // max(1, len(h))), ITEMS_A_BEST * k)
    n_all = output.n_items if items is None else len(items)
    for first in range(0, n_all, n):
        last = min(first + n, n_all)
        if items is None:
            scores = output.block_scores(h, first, last)
        else:
            scores = output.scores(h, items[None, first:last].to(h.device))
        yield first, scores.cpu()


def score_blocks(model: Model, users: Tensor, history: Tensor, k: int = 1) -> Iterator[Block]:
    output = products_of(model)
    if output is None:
        yield 0, model.score(users, history)
    else:
        yield from product_blocks(asked_vectors(model, users, history), output, k)


@without_onednn()
@torch.inference_mode()
def exact_best(blocks: Iterable[Block], filters: Filters, k: int) -> Best:
    """The `k` best of scores that are given block by block, and are written over."""
    items = scores = log_total = None
    for first, block in blocks:
        log_total = _total_with(block, log_total)
        filters.hide(block, first)
        best = block.topk(min(k, block.shape[1]))
        found, found_items = best.values, best.indices + first
        if scores is not None and items is not None:
            found, found_items = torch.cat([scores, found], 1), torch.cat([items, found_items], 1)
            best = found.topk(min(k, found.shape[1]))
            found, found_items = best.values, found_items.gather(1, best.indices)
        items, scores = found_items, found
    assert items is not None
    assert scores is not None
    assert log_total is not None
    return Best(items, scores, log_total)


@without_onednn()
@torch.inference_mode()
def log_probabilities(blocks: Iterable[Block], items: Tensor) -> Tensor:
    """(B, K) of the softmax over the whole catalogue, for the same K items everywhere."""
    log_total, parts, places = None, [], []
    for first, block in blocks:
        log_total = _total_with(block, log_total)
        is_here = (items >= first) & (items < first + block.shape[1])
        parts.append(block[:, items[is_here] - first])
        places.append(is_here.nonzero()[:, 0])
    assert log_total is not None
    return torch.cat(parts, 1)[:, torch.cat(places).argsort()] - log_total


def _total_with(block: Tensor, log_total: Tensor | None) -> Tensor:
    """logsumexp by way of a kernel that does it in one pass."""
    of_block = block[:, :1] - block.log_softmax(1)[:, :1]
    return of_block if log_total is None else torch.logaddexp(log_total, of_block)
