"""Search by an index, exact about what is left out, and never short while anything remains.

- Items that alone are allowed are scored themselves, without the index.
- Otherwise as many more candidates are fetched as are left out. If fewer than k remain, or more of
  the lists would have to be searched than an exact search is worth, the row is searched exactly.
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
from bert4rec.retrieval.index import ItemIndex

MOST_FETCHED = 2048  # candidates of a row
MOST_SEARCHED = 1 / 8  # of the lists: beyond it exact search is about as fast
FEW_REMAIN = 1 / 4  # of the catalogue: as many are scored on their own, for everybody


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
    remaining = None if filters.excluded is None else (~filters.excluded).nonzero()[:, 0]
    if remaining is not None and len(remaining) <= FEW_REMAIN * output.n_items:
        _put(best, rows, among_best(h[rows], output, remaining, filters, k))
        return best
    share = 1 if remaining is None else len(remaining) / output.n_items
    is_enough = _search(index, h[rows], output, filters, best, rows, share)
    short = (~is_enough).nonzero()[:, 0]
    if len(short):
        asked = h[rows[short]]
        exact = exact_best(product_blocks(asked, output, k), filters.of_rows(short), k)
        _put(best, rows[short], exact)
    return best


def _search(
    index: ItemIndex,
    h: Tensor,
    output: InBlocks,
    filters: Filters,
    best: Best,
    rows: Tensor,
    share: float,
) -> Tensor:
    """Put what the index finds into `best`; (B,) true where that is as many as were asked for."""
    k = best.items.shape[1]
    n_searched = index.n_searched_for(int(k / share))
    if n_searched > MOST_SEARCHED * index.measured.n_lists:
        return torch.zeros(len(h), dtype=torch.bool)
    n_fetched = int((k + filters.most_left_out(len(h))) / share)
    found = index.candidates(h, min(max(k, MOST_FETCHED), n_fetched, output.n_items), n_searched)
    kept = filters.keeps(found)
    first = (~kept).to(torch.int8).argsort(dim=1, stable=True)[:, :k]  # kept ones, best first
    items, is_kept = found.gather(1, first), kept.gather(1, first)
    scores = output.scores(h, items.clamp(min=0).to(h.device)).cpu()
    scores, order = scores.masked_fill(~is_kept, -torch.inf).sort(dim=1, descending=True)
    _put(best, rows, Best(items.gather(1, order), scores, best.log_total[rows]))
    return kept.sum(1) >= k


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
