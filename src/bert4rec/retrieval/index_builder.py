"""Building an index: lists by k-means, and as many of them searched as the wanted recall needs.

Items are grouped by direction (spherical k-means). Lists are searched in the order of the largest
score that their farthest item could have: the centroid is the direction times the length of that
item along it. With directions alone, lists of popular items with long vectors were found too late.

Shapes: B queries, D width, V items, N lists.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bert4rec.data.splits import Spans
from bert4rec.item_mask import ItemMask
from bert4rec.models import Model
from bert4rec.models.output import DotProductOutput
from bert4rec.retrieval.item_index import (
    AT_ONCE,
    MOST_SEARCHED,
    RECALL_AT,
    IndexQuality,
    ItemIndex,
    faiss_or_error,
    with_bias,
)
from bert4rec.scoring import encode_histories, score_blocks, top_k

# Exact search of one history took about 10 ms on a core at this size, and grows with it
# (`benchmarks/scale/retrieval.py`); below it an index would save nothing that anybody notices.
LARGE = 300_000  # items
RECALL = 0.97  # on the histories that the index is tuned on, so that .95 holds on others
MOST_QUERIES = 2_000  # half to tune on, half to measure on
FEWEST_QUERIES = 20
ROUNDS, TRAINED_PER_LIST = 8, 64  # of k-means: more changed the recall by less than its noise
FEWEST_PER_LIST = 39  # items: what faiss asks for


@dataclass(frozen=True)
class SearchSample:
    """Encoded histories to tune and measure an index on, and a mask of what they have seen."""

    h: Tensor  # (B, D)
    mask: ItemMask

    def rows(self, first: int, last: int) -> SearchSample:
        return SearchSample(self.h[first:last], self.mask.of_rows(torch.arange(first, last)))

    def __len__(self) -> int:
        return len(self.h)


def encode_sample(model: Model, histories: Spans, seed: int = 0) -> SearchSample:
    """At most `MOST_QUERIES` of the histories, in random order, without the empty ones."""
    some = np.flatnonzero(histories.lengths > 0)
    if len(some) < FEWEST_QUERIES:
        raise ValueError(
            f"an index is tuned on real histories, and there are {len(some)}: give {FEWEST_QUERIES} or more"
        )
    rows = np.random.default_rng(seed).permutation(some)[:MOST_QUERIES]
    return SearchSample(*encode_histories(model, histories.take(rows)))


def build_index(
    output: DotProductOutput, sample: SearchSample, target: float = RECALL, seed: int = 0
) -> ItemIndex | None:
    """An index with a recall@10 of `target`; None if exact search is as fast as any that has it."""
    if not 0 < target <= 1:
        raise ValueError(f"recall is {target}: choose a share above 0, at most 1")
    started = time.monotonic()
    centroids, lists = _cluster(output, n_lists_for(output.n_items), seed)
    half = len(sample) // 2
    tuning, others = sample.rows(0, half), sample.rows(half, len(sample))
    untuned = IndexQuality(len(centroids), 1, target, math.nan, half, len(others), 0.0, math.inf)
    index = ItemIndex(centroids, lists, output, untuned)
    wanted = _exact(output, tuning)
    for n_searched in _numbers(int(MOST_SEARCHED * len(centroids))):
        index.quality = replace(untuned, n_searched=n_searched)
        if _recall(index, output, tuning, wanted) >= target:
            index.quality = replace(index.quality, depth=_depth(index, output, tuning))
            recall = _recall(index, output, others, _exact(output, others))
            seconds = round(time.monotonic() - started, 1)
            index.quality = replace(index.quality, recall=round(recall, 4), seconds=seconds)
            return index
    return None


def described(quality: IndexQuality | None) -> str:
    """What became of building an index, in a sentence."""
    if quality is None:
        return "no index has the wanted recall and is faster than exact search: every search is exact"
    return (
        f"index of {quality.n_lists:,} lists built in {quality.seconds:.0f} s: recall@10 "
        f"{quality.recall:.3f} on {quality.n_measured:,} other histories"
    )


def n_lists_for(n_items: int) -> int:
    """Four times the root: a list is then about as long as the lists are many, times 1/16."""
    return max(1, min(round(4 * math.sqrt(n_items)), n_items // FEWEST_PER_LIST))


def _cluster(output: DotProductOutput, n_lists: int, seed: int) -> tuple[Tensor, Tensor]:
    """The tensors of an `ItemIndex`."""
    faiss = faiss_or_error()
    faiss.omp_set_num_threads(torch.get_num_threads())
    is_drawn = np.random.default_rng(seed).permutation(output.n_items) < TRAINED_PER_LIST * n_lists
    starts = range(0, output.n_items, AT_ONCE)
    drawn = np.concatenate([with_bias(output, first)[is_drawn[first : first + AT_ONCE]] for first in starts])
    kmeans = faiss.Kmeans(
        drawn.shape[1],
        n_lists,
        niter=ROUNDS,
        spherical=True,
        seed=seed,
        max_points_per_centroid=TRAINED_PER_LIST,
        min_points_per_centroid=1,
    )
    kmeans.train(drawn)
    directions: NDArray[np.float32] = kmeans.centroids
    lists = np.empty(output.n_items, dtype=np.int32)
    reach = np.zeros(n_lists, dtype=np.float32)
    for first in starts:
        products, nearest = kmeans.index.search(with_bias(output, first), 1)
        lists[first : first + AT_ONCE] = nearest[:, 0]
        np.maximum.at(reach, nearest[:, 0], products[:, 0])
    return torch.from_numpy(directions * reach[:, None]), torch.from_numpy(lists)


def _numbers(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, …"""
    most = max(1, most)
    return sorted({n for i in range(most.bit_length()) for n in (2**i, 3 * 2**i // 2) if n <= most})


def _exact(output: DotProductOutput, sample: SearchSample) -> Tensor:
    blocks = score_blocks(output, sample.h, RECALL_AT)
    return top_k(blocks, sample.mask, RECALL_AT).items


def _recall(index: ItemIndex, output: DotProductOutput, sample: SearchSample, wanted: Tensor) -> float:
    """The share of the exact search's ten best that is among the index's ten."""
    found = index.top_k(sample.h, output, sample.mask, RECALL_AT).items
    is_found = (wanted[:, :, None] == found[:, None, :]).any(2)
    return float(is_found.float().mean())


def _depth(index: ItemIndex, output: DotProductOutput, sample: SearchSample) -> float:
    """How far down the tenth recommendation lies on average, with the seen items in front of it."""
    _, _, depth = index.search_lists(sample.h, output, sample.mask, RECALL_AT, index.quality.n_searched)
    return round(float(depth.double().mean()), 1)
