"""Ranks among all items, when every process has some of the items.

Shapes: B questions of one process, n·B of all, R items of one process, L length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bert4rec.evaluation.metrics import UNREACHABLE
from bert4rec.training.distributed import Ranks

SCORES = 1 << 24  # that are held at a time


def ranks_among_all(
    ranks: Ranks,
    h: Tensor,
    wanted: Tensor,
    targets: Tensor,
    seen: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> Tensor:
    """(B, D) vectors, (B,) scores of the (B,) targets, (B, L) items that are left out → (B,).

    Every process has questions of its own and answers for its items in all of them. Ties are placed
    before the target, as everywhere.
    """
    n_rows, length = (int(max(sizes)) for sizes in zip(*ranks.gathered(seen.shape), strict=True))
    widened = torch.nn.functional.pad(seen, (0, length - seen.shape[1]), value=-1)
    given = ((h, 0.0), (wanted, torch.inf), (targets, -1), (widened, -1))
    all_h, all_wanted, all_targets, all_seen = (
        torch.cat(ranks.by_rank(_padded(tensor, n_rows, filler))) for tensor, filler in given
    )
    # The target and the seen items that live here do not count.
    left_out = torch.cat([all_seen, all_targets[:, None]], 1)
    n_own = len(weight)
    n_items = int(ranks.sums(n_own)[0])
    is_here = (left_out >= 0) & (left_out < n_items) & (left_out % ranks.n == ranks.rank)
    question, place = is_here.nonzero(as_tuple=True)
    own = left_out[question, place] // ranks.n
    n_before = torch.zeros(len(all_h), dtype=torch.int64)
    step = max(1, SCORES // max(1, len(all_h)))
    for first in range(0, n_own, step):
        some = slice(first, min(first + step, n_own))
        scores = torch.addmm(bias[some], all_h, weight[some].T)
        is_inside = (own >= some.start) & (own < some.stop)
        scores[question[is_inside], own[is_inside] - first] = -torch.inf
        n_before += (scores >= all_wanted[:, None]).sum(1)
    ranks.total(n_before)
    found = 1 + n_before[ranks.rank * n_rows :][: len(h)]
    return found.masked_fill((seen == targets[:, None]).any(1), UNREACHABLE)


def _padded(tensor: Tensor, n_rows: int, value: float) -> Tensor:
    padded = tensor.new_full((n_rows, *tensor.shape[1:]), value)
    padded[: len(tensor)] = tensor
    return padded
