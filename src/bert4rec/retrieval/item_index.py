"""An index of item embeddings, for quick answers from a large catalogue.

It is faiss's IVF by inner product: lists of items that lie in one direction, of which a few are
searched. The output bias is one more number of an item's embedding, and the query's is 1, so that
their product is the whole score. What is stored is plain tensors, from which the index is put
together on loading: faiss's own files are not made to be read from untrusted sources.

An index only finds candidates; it is exact about masks and never short while anything remains:

- Items that alone are allowed are scored themselves, without the index.
- Otherwise as many more candidates are fetched as are masked. A row with many more masked items in
  front of its answer than the index was tuned with is searched once more, in more lists.
- If fewer than k remain, or more lists would have to be searched than an exact search is worth, the
  row is searched exactly.
- The scores of what was found are the model's own products, not the index's.

Shapes: B histories, D width, V items, N lists, K candidates.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bert4rec.item_mask import ItemMask
from bert4rec.models.kernels.onednn import without_onednn
from bert4rec.models.output import ItemProducts
from bert4rec.scoring import Block, TopK, score_blocks, top_k

RECALL_AT = 10  # what is measured; for more the searched lists grow with k
AT_ONCE = 2**17  # items that are copied at a time
MOST_FETCHED = 2048  # candidates of a row
MOST_SEARCHED = 1 / 8  # of the lists: beyond it exact search is about as fast
FEW_REMAIN = 1 / 4  # of the catalogue: as many are scored on their own, for everybody
DEEP = 2  # times the depth that the index was tuned at: recall is noticeably lower from there on
log = logging.getLogger("bert4rec.retrieval")


@dataclass(frozen=True)
class IndexQuality:
    """How good an index is: recall@10 deeperst exact search, seen items left out."""

    n_lists: int
    n_searched: int  # lists that are searched for 10 items
    target: float  # that `n_searched` was raised for
    recall: float  # on other histories than those that it was raised for
    n_tuned: int
    n_measured: int
    seconds: float  # that building took
    depth: float = RECALL_AT  # on average: 10, and the seen items in front of the last of these


@dataclass(frozen=True)
class IndexTensors:
    """All that has to be stored to get the same index back, for the same output layer."""

    centroids: Tensor  # (N, D + 1) float32
    lists: Tensor  # (V,) int32: whose list an item is in

    def check(self, output: ItemProducts) -> None:
        n_lists, width = self.centroids.shape if self.centroids.dim() == 2 else (0, 0)
        is_right = (
            self.lists.shape == (output.n_items,)
            and width == output.block(0, 1)[0].shape[1] + 1
            and (self.centroids.dtype, self.lists.dtype) == (torch.float32, torch.int32)
            and n_lists > 0
            and bool(self.centroids.isfinite().all())
            and int(self.lists.min()) >= 0
            and int(self.lists.max()) < n_lists
        )
        if not is_right:
            raise ValueError("the index does not fit the model: run `bert4rec index` deeper")


class ItemIndex:
    """Several threads may search at once."""

    def __init__(self, tensors: IndexTensors, output: ItemProducts, quality: IndexQuality) -> None:
        faiss = faiss_or_error()
        tensors.check(output)
        self.tensors, self.quality = tensors, quality
        centroids = np.ascontiguousarray(tensors.centroids.numpy())
        n_lists, width = centroids.shape
        self._quantizer = faiss.IndexFlatIP(width)  # kept: faiss only has a pointer to it
        self._quantizer.add(centroids)
        self._lists = faiss.IndexIVFFlat(
            self._quantizer, width, n_lists, faiss.METRIC_INNER_PRODUCT
        )
        self._lists.is_trained = True
        pointer = faiss.swig_ptr
        for first in range(0, output.n_items, AT_ONCE):
            vectors = with_bias(output, first)
            ids = np.arange(first, first + len(vectors))
            lists = tensors.lists[first : first + len(vectors)].numpy().astype(np.int64)
            self._lists.add_core(len(ids), pointer(vectors), pointer(ids), pointer(lists))
        assert self._lists.ntotal == output.n_items

    def top_k(self, h: Tensor, output: ItemProducts, mask: ItemMask, k: int) -> TopK:
        """(B, D) → the best `k`; `log_total` is known only where the search was exact."""
        return search(self, h, output, mask, k)

    def n_searched_for(self, k: int) -> int:
        return min(self.quality.n_lists, -(-self.quality.n_searched * k // RECALL_AT))

    def candidates(self, h: Tensor, n: int, n_searched: int) -> Tensor:
        """(B, D) → (B, n) items, best first, -1 where the lists hold no more."""
        faiss = faiss_or_error()
        # Of the calling thread: faiss has threads of its own, which know nothing of torch's share.
        faiss.omp_set_num_threads(torch.get_num_threads())
        parameters = faiss.SearchParametersIVF(nprobe=n_searched)
        queries = torch.nn.functional.pad(h.detach().float().cpu(), (0, 1), value=1.0)
        _, items = self._lists.search(queries.numpy(), n, params=parameters)
        return torch.from_numpy(items)


def with_bias(output: ItemProducts, first: int, n: int = AT_ONCE) -> NDArray[np.float32]:
    """(n, D + 1): the vectors of some items, each with its bias as the last number."""
    weight, bias = output.block(first, min(first + n, output.n_items))
    columns = weight.detach(), bias.detach()[:, None]
    made: NDArray[np.float32] = torch.cat(columns, 1).float().cpu().contiguous().numpy()
    return made


def faiss_or_error() -> Any:
    try:
        import faiss
    except ModuleNotFoundError:
        raise ValueError("an index of items needs faiss: pip install 'bert4rec[scale]'") from None
    return faiss


def has_faiss() -> bool:
    try:
        faiss_or_error()
    except ValueError:
        return False
    return True


@functools.cache
def note_missing_faiss() -> None:
    log.warning(
        "this model has an index of its items, and faiss is not installed: answers are searched "
        "for exactly, which takes longer (pip install 'bert4rec[scale]')"
    )


@without_onednn()
@torch.inference_mode()
def search(index: ItemIndex, h: Tensor, output: ItemProducts, mask: ItemMask, k: int) -> TopK:
    """(B, D) → the best `k`; `log_total` is known where the search was exact only."""
    n_rows, k = len(h), min(k, output.n_items)
    best = TopK(
        torch.zeros((n_rows, k), dtype=torch.int64),
        torch.full((n_rows, k), -torch.inf),
        torch.full((n_rows, 1), torch.nan),
    )
    for row, items in mask.allowed.items():
        rows = torch.tensor([row])
        _put(best, rows, among_best(h[rows], output, items, mask.of_rows(rows), k))
    is_open = torch.ones(n_rows, dtype=torch.bool)
    is_open[list(mask.allowed)] = False
    rows = is_open.nonzero()[:, 0]
    if not len(rows):
        return best
    mask = mask.of_rows(rows) if mask.allowed else mask
    excluded = mask.excluded
    if excluded is not None and len(excluded.remaining) <= FEW_REMAIN * output.n_items:
        _put(best, rows, among_best(h[rows], output, excluded.remaining, mask, k))
        return best
    is_done = _search(index, h[rows], output, mask, best, rows)
    short = (~is_done).nonzero()[:, 0]
    if len(short):
        left = h[rows[short]]
        exact = top_k(score_blocks(output, left, k), mask.of_rows(short), k)
        _put(best, rows[short], exact)
    return best


def _search(
    index: ItemIndex, h: Tensor, output: ItemProducts, mask: ItemMask, best: TopK, rows: Tensor
) -> Tensor:
    """Put what the index finds into `best`; (B,) false where that is not good enough."""
    k, n_items = best.items.shape[1], output.n_items
    n_excluded = 0 if mask.excluded is None else mask.excluded.n
    share = 1 - n_excluded / n_items
    most = int(MOST_SEARCHED * index.quality.n_lists)
    n_searched = index.n_searched_for(int(k / share))
    is_done = torch.zeros(len(h), dtype=torch.bool)
    if n_searched > most:
        return is_done
    n_hidden = mask.n_hidden(len(h))
    # Those that nobody gets may be just the best ones, of this row or of all.
    n_fetched = min(max(k, MOST_FETCHED), k + int(n_hidden.max()) + n_excluded, n_items)
    found, is_enough, depth = best_of_lists(index, h, output, mask, k, n_fetched, n_searched)
    _put(best, rows, found)
    is_deep = depth > DEEP * index.quality.depth * k / RECALL_AT / share
    is_done = is_enough & ~is_deep
    # Twice, as the first search has missed some of those in front, too.
    depth = torch.minimum(2 * depth, k + n_hidden + n_excluded)
    n_searched_deep = depth * index.quality.n_searched / RECALL_AT
    deeper = (is_enough & is_deep & (n_searched_deep <= most)).nonzero()[:, 0]
    if len(deeper):
        n_searched = int(n_searched_deep[deeper].max().ceil())
        some = mask.of_rows(deeper)
        found, is_done[deeper], _ = best_of_lists(
            index, h[deeper], output, some, k, n_fetched, n_searched
        )
        _put(best, rows[deeper], found)
    return is_done


def best_of_lists(
    index: ItemIndex,
    h: Tensor,
    output: ItemProducts,
    mask: ItemMask,
    k: int,
    n_fetched: int,
    n_searched: int,
) -> tuple[TopK, Tensor, Tensor]:
    """The best of some lists; (B,) whether they held k; (B,) how deep the last of these lies.

    The depth of an answer is k, and one more for each item in front that is left out.
    """
    found = index.candidates(h, n_fetched, n_searched)
    kept = mask.keeps(found)
    n_kept = kept.cumsum(1)
    depth = k + (~kept & (n_kept < k)).sum(1)
    first = (~kept).to(torch.int8).argsort(dim=1, stable=True)[:, :k]  # kept ones, best first
    items, is_kept = found.gather(1, first), kept.gather(1, first)
    scores = output.scores(h, items.clamp(min=0).to(h.device)).cpu()
    scores, order = scores.masked_fill(~is_kept, -torch.inf).sort(dim=1, descending=True)
    not_known = torch.full((len(h), 1), torch.nan)
    return TopK(items.gather(1, order), scores, not_known), n_kept[:, -1] >= k, depth


def among_best(h: Tensor, output: ItemProducts, items: Tensor, mask: ItemMask, k: int) -> TopK:
    """The best of these items alone, each scored exactly."""
    items = torch.unique(items)
    not_known = torch.full((len(h), 1), torch.nan)
    if not len(items):
        nothing = torch.empty((len(h), 0))
        return TopK(nothing.long(), nothing, not_known)
    found = top_k(_blocks_of(h, output, k, items), mask.among(items), k)
    return TopK(items[found.items], found.scores, not_known)


def _blocks_of(h: Tensor, output: ItemProducts, k: int, items: Tensor) -> Iterator[Block]:
    """The scores of these items alone."""
    n = max(AT_ONCE // max(1, len(h)), 16 * k, 4096)
    for first in range(0, len(items), n):
        yield first, output.scores(h, items[None, first : first + n].to(h.device)).cpu()


def _put(best: TopK, rows: Tensor, found: TopK) -> None:
    n = found.items.shape[1]
    best.items[rows, :n], best.scores[rows, :n] = found.items, found.scores
    best.log_total[rows] = found.log_total
