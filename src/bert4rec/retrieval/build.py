"""Building an index: lists by k-means, and as many of them searched as the wanted recall takes.

Items are put together by direction (spherical k-means), and a list is searched before others for
the largest score that its farthest item could have: its direction times how far that one reaches.
With directions alone, lists of popular items with long vectors were found too late.

Shapes: B queries, D width, V items, N lists.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bert4rec.data.pieces import FOR_SCORING, like_lengths
from bert4rec.data.splits import Spans
from bert4rec.models import Model
from bert4rec.models.output import InBlocks
from bert4rec.retrieval.exact import asked_vectors, exact_best, product_blocks
from bert4rec.retrieval.filters import Filters
from bert4rec.retrieval.index import (
    AT_ONCE,
    RECALL_AT,
    ItemIndex,
    Measured,
    Tables,
    faiss_or_error,
    with_bias,
)
from bert4rec.retrieval.indexed import MOST_FETCHED, MOST_SEARCHED, best_of_lists, indexed_best

# Exact search of one history took about 10 ms a core at this size and grows with it
# (`benchmarks/scale/retrieval.py`); below it an index would save nothing that is noticed.
LARGE = 300_000  # items
RECALL = 0.97  # on the histories that the index is tuned on, so that .95 holds on others
MOST_QUERIES = 2_000  # half to tune on, half to measure on
FEWEST_QUERIES = 20
ROUNDS, TRAINED_A_LIST = 8, 64  # of k-means: more changed the recall by less than its noise
FEWEST_A_LIST = 39  # items: what faiss asks for


@dataclass(frozen=True)
class Queries:
    """Histories as an index meets them: the vectors asked with, and what has been seen."""

    h: Tensor  # (B, D)
    filters: Filters

    def rows(self, first: int, last: int) -> Queries:
        return Queries(self.h[first:last], self.filters.of_rows(torch.arange(first, last)))

    def __len__(self) -> int:
        return len(self.h)


def too_few(histories: Spans) -> str | None:
    """Why no index can be built with these, if so."""
    n = int((histories.lengths > 0).sum())
    if n >= FEWEST_QUERIES:
        return None
    return (
        f"an index is tuned and measured on real histories, and there are {n}: "
        f"give {FEWEST_QUERIES} or more"
    )


def queries_of(model: Model, histories: Spans, seed: int = 0) -> Queries:
    """At most `MOST_QUERIES` of the histories, in random order."""
    if (reason := too_few(histories)) is not None:
        raise ValueError(reason)
    some = np.flatnonzero(histories.lengths > 0)
    rows = np.random.default_rng(seed).permutation(some)[:MOST_QUERIES]
    longest_first = np.argsort(-histories.lengths[rows], kind="stable")
    h: list[Tensor] = []
    left_out: list[Tensor] = []
    for piece in like_lengths(histories.lengths[rows[longest_first]], FOR_SCORING):
        places = longest_first[piece]
        padded = torch.from_numpy(histories.padded(rows[places], model.n_items))
        h.append(asked_vectors(model, torch.from_numpy(histories.users[rows[places]]), padded))
        flat = torch.from_numpy(places)[:, None] * model.n_items + padded
        left_out.append(flat[padded < model.n_items])
    order = torch.from_numpy(np.argsort(longest_first))
    return Queries(torch.cat(h)[order], Filters(model.n_items, torch.cat(left_out)))


def build_index(
    output: InBlocks, queries: Queries, target: float = RECALL, seed: int = 0
) -> ItemIndex | None:
    """An index with a recall@10 of `target`, or None if no index has it that is worth having."""
    if not 0 < target <= 1:
        raise ValueError(f"recall is {target}: choose a share above 0, at most 1")
    started = time.monotonic()
    tables = _tables(output, n_lists_for(output.n_items), seed)
    half = len(queries) // 2
    tuning, others = queries.rows(0, half), queries.rows(half, len(queries))
    nothing_known = Measured(
        len(tables.centroids), 1, target, math.nan, half, len(others), 0.0, math.inf
    )
    index = ItemIndex(tables, output, nothing_known)
    wanted = _exact(output, tuning)
    for n_searched in _numbers(int(MOST_SEARCHED * len(tables.centroids))):
        index.measured = replace(nothing_known, n_searched=n_searched)
        if _recall(index, output, tuning, wanted) >= target:
            index.measured = replace(index.measured, depth=_depth(index, output, tuning))
            recall = _recall(index, output, others, _exact(output, others))
            seconds = round(time.monotonic() - started, 1)
            index.measured = replace(index.measured, recall=round(recall, 4), seconds=seconds)
            return index
    return None


def described(measured: Measured | None) -> str:
    """What became of building an index, in a sentence."""
    if measured is None:
        return (
            "no index has the wanted recall and is faster than exact search: answers are searched "
            "for exactly"
        )
    return (
        f"index of {measured.n_lists:,} lists built in {measured.seconds:.0f} s: recall@10 "
        f"{measured.recall:.3f} on {measured.n_measured:,} other histories"
    )


def n_lists_for(n_items: int) -> int:
    """Four times the root: a list is then about as long as the lists are many, times 1/16."""
    return max(1, min(round(4 * math.sqrt(n_items)), n_items // FEWEST_A_LIST))


def _tables(output: InBlocks, n_lists: int, seed: int) -> Tables:
    faiss = faiss_or_error()
    faiss.omp_set_num_threads(torch.get_num_threads())
    is_drawn = np.random.default_rng(seed).permutation(output.n_items) < TRAINED_A_LIST * n_lists
    starts = range(0, output.n_items, AT_ONCE)
    sample = np.concatenate(
        [with_bias(output, first)[is_drawn[first : first + AT_ONCE]] for first in starts]
    )
    means = faiss.Kmeans(
        sample.shape[1],
        n_lists,
        niter=ROUNDS,
        spherical=True,
        seed=seed,
        max_points_per_centroid=TRAINED_A_LIST,
        min_points_per_centroid=1,
    )
    means.train(sample)
    directions: NDArray[np.float32] = means.centroids
    lists = np.empty(output.n_items, dtype=np.int32)
    reach = np.zeros(n_lists, dtype=np.float32)
    for first in starts:
        products, nearest = means.index.search(with_bias(output, first), 1)
        lists[first : first + AT_ONCE] = nearest[:, 0]
        np.maximum.at(reach, nearest[:, 0], products[:, 0])
    return Tables(torch.from_numpy(directions * reach[:, None]), torch.from_numpy(lists))


def _numbers(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, …"""
    numbers = itertools.chain.from_iterable((2**i, 3 * 2**i // 2) for i in itertools.count())
    return sorted(set(itertools.takewhile(lambda n: n <= max(1, most), numbers)))


def _exact(output: InBlocks, queries: Queries) -> Tensor:
    blocks = product_blocks(queries.h, output, RECALL_AT)
    return exact_best(blocks, queries.filters, RECALL_AT).items


def _recall(index: ItemIndex, output: InBlocks, queries: Queries, wanted: Tensor) -> float:
    """The share of the exact search's ten best that is among the index's ten."""
    found = indexed_best(index, queries.h, output, queries.filters, RECALL_AT).items
    is_found = (wanted[:, :, None] == found[:, None, :]).any(2)
    return float(is_found.float().mean())


def _depth(index: ItemIndex, output: InBlocks, queries: Queries) -> float:
    """How far down the tenth answer lies on average, with the seen items in front of it."""
    n_fetched = RECALL_AT + int(queries.filters.n_left_out(len(queries)).max())
    n_fetched, n_searched = min(MOST_FETCHED, n_fetched), index.measured.n_searched
    _, _, depth = best_of_lists(
        index, queries.h, output, queries.filters, RECALL_AT, n_fetched, n_searched
    )
    return round(float(depth.double().mean()), 1)
