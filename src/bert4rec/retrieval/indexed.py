"""Search by an index, exact about what is left out, and never short while anything remains.

- Items that alone are allowed are scored themselves, without the index.
- Otherwise as many more candidates are fetched as are left out. A row with many more of these in
  front of its answer than the index was tuned with is searched once more, in more lists: its answer
  lies as deep as if more had been asked for.
- If fewer than k remain, or more of the lists would have to be searched than an exact search is
  worth, the row is searched exactly.
- The scores of what was found are the model's own products, not the index's.

Shapes: B histories, D width, V items, K best.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bert4rec.models.onednn import without_onednn
from bert4rec.models.output import InBlocks
from bert4rec.retrieval.exact import Best, exact_best, product_blocks
from bert4rec.retrieval.filters import Filters
from bert4rec.retrieval.index import RECALL_AT, ItemIndex

MOST_FETCHED = 2048  # candidates of a row
MOST_SEARCHED = 1 / 8  # of the lists: beyond it exact search is about as fast
FEW_REMAIN = 1 / 4  # of the catalogue: as many are scored on their own, for everybody
DEEP = 2  # times the depth that the index was tuned at: recall is noticeably lower from there on


@without_onednn()
@torch.inference_mode()
def indexed_best(index: ItemIndex, h: Tensor, output: InBlocks, filters: Filters, k: int) -> Best:
    """(B, D) → the best `k`; `log_total` is known where the search was exact only."""
    n_rows, k = len(h), min(k, output.n_items)
    best = Best(
        torch.zeros((n_rows, k), dtype=torch.int64),
        torch.full((n_rows, k), -torch.inf),
        torch.full((n_rows, 1), torch.nan),
    )
    for row, items in filters.allowed.items():
        rows = torch.tensor([row])
        _put(best, rows, among_best(h[rows], output, items, filters.of_rows(rows), k))
    is_open = torch.ones(n_rows, dtype=torch.bool)
    is_open[list(filters.allowed)] = False
    rows = is_open.nonzero()[:, 0]
    if not len(rows):
        return best
    filters = filters.of_rows(rows) if filters.allowed else filters
    excluded = filters.excluded
    if excluded is not None and len(excluded.remaining) <= FEW_REMAIN * output.n_items:
        _put(best, rows, among_best(h[rows], output, excluded.remaining, filters, k))
        return best
    is_done = _search(index, h[rows], output, filters, best, rows)
    short = (~is_done).nonzero()[:, 0]
    if len(short):
        asked = h[rows[short]]
        exact = exact_best(product_blocks(asked, output, k), filters.of_rows(short), k)
        _put(best, rows[short], exact)
    return best


def _search(
    index: ItemIndex, h: Tensor, output: InBlocks, filters: Filters, best: Best, rows: Tensor
) -> Tensor:
    """Put what the index finds into `best`; (B,) false where that is not good enough."""
    k, n_items = best.items.shape[1], output.n_items
    n_excluded = 0 if filters.excluded is None else filters.excluded.n
    share = 1 - n_excluded / n_items
    most = int(MOST_SEARCHED * index.measured.n_lists)
    n_searched = index.n_searched_for(int(k / share))
    is_done = torch.zeros(len(h), dtype=torch.bool)
    if n_searched > most:
        return is_done
    n_left_out = filters.n_left_out(len(h))
    # Those that nobody gets may be just the best ones, of this row or of all.
    n_fetched = min(max(k, MOST_FETCHED), k + int(n_left_out.max()) + n_excluded, n_items)
    found, is_enough, depth = best_of_lists(index, h, output, filters, k, n_fetched, n_searched)
    _put(best, rows, found)
    is_deep = depth > DEEP * index.measured.depth * k / RECALL_AT / share
    is_done = is_enough & ~is_deep
    # Twice, as the first search has missed some of those in front, too.
    depth = torch.minimum(2 * depth, k + n_left_out + n_excluded)
    n_searched_deep = depth * index.measured.n_searched / RECALL_AT
    again = (is_enough & is_deep & (n_searched_deep <= most)).nonzero()[:, 0]
    if len(again):
        n_searched = int(n_searched_deep[again].max().ceil())
        some = filters.of_rows(again)
        found, is_done[again], _ = best_of_lists(
            index, h[again], output, some, k, n_fetched, n_searched
        )
        _put(best, rows[again], found)
    return is_done


def best_of_lists(
    index: ItemIndex,
    h: Tensor,
    output: InBlocks,
    filters: Filters,
    k: int,
    n_fetched: int,
    n_searched: int,
) -> tuple[Best, Tensor, Tensor]:
    """The best of some lists; (B,) whether they held k; (B,) how deep the last of these lies.

    The depth of an answer is k, and one more for each item in front that is left out.
    """
    found = index.candidates(h, n_fetched, n_searched)
    kept = filters.keeps(found)
    n_kept = kept.cumsum(1)
    depth = k + (~kept & (n_kept < k)).sum(1)
    first = (~kept).to(torch.int8).argsort(dim=1, stable=True)[:, :k]  # kept ones, best first
    items, is_kept = found.gather(1, first), kept.gather(1, first)
    scores = output.scores(h, items.clamp(min=0).to(h.device)).cpu()
    scores, order = scores.masked_fill(~is_kept, -torch.inf).sort(dim=1, descending=True)
    not_known = torch.full((len(h), 1), torch.nan)
    return Best(items.gather(1, order), scores, not_known), n_kept[:, -1] >= k, depth


def among_best(h: Tensor, output: InBlocks, items: Tensor, filters: Filters, k: int) -> Best:
    """The best of these items alone, each scored exactly."""
    items = torch.unique(items)
    not_known = torch.full((len(h), 1), torch.nan)
    if not len(items):
        nothing = torch.empty((len(h), 0))
        return Best(nothing.long(), nothing, not_known)
    found = exact_best(product_blocks(h, output, k, items), filters.among(items), k)
    return Best(items[found.items], found.scores, not_known)


def _put(best: Best, rows: Tensor, found: Best) -> None:
    n = found.items.shape[1]
    best.items[rows, :n], best.scores[rows, :n] = found.items, found.scores
    best.log_total[rows] = found.log_total
