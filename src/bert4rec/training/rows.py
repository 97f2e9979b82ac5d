"""A table whose rows are dealt out over the processes, and how a step gets the few that it needs.

Row i lives in process i % n, as its row i // n: popular items have small numbers, so that none has
all of them. Process p asks the others for rows, and later gives them the gradients of those rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bert4rec.training.distributed import Ranks


@dataclass(frozen=True)
class Asked:
    """What this process asked of the others, and they of it; in the order of the messages."""

    order: Tensor  # (U,) which of our rows come first: those of process 0, then 1, …
    n_ours: list[int]  # rows that we asked of each process
    n_theirs: list[int]  # rows that each process asked of us
    theirs: Tensor  # which of our own rows those are


class DealtRows:
    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def n_own(self, n_rows: int) -> int:
        """How many of `n_rows` live here."""
        return len(range(self.ranks.rank, n_rows, self.ranks.n))

    def ask(self, rows: Tensor) -> Asked:
        """(U,) rows of the whole table that this process needs."""
        n = self.ranks.n
        owners = rows % n
        order = owners.argsort(stable=True)
        n_ours = owners.bincount(minlength=n)
        n_theirs = torch.empty_like(n_ours)
        dist.all_to_all_single(n_theirs, n_ours)
        asked = Asked(order, n_ours.tolist(), n_theirs.tolist(), n_theirs)
        received = rows.new_empty(sum(asked.n_theirs))
        dist.all_to_all_single(received, rows[order] // n, asked.n_theirs, asked.n_ours)
        return Asked(order, asked.n_ours, asked.n_theirs, received)

    def fetch(self, own: Tensor, asked: Asked) -> Tensor:
        """The asked rows, in the order in which they were asked for, of a table of own rows."""
        received = own.new_empty(len(asked.order), *own.shape[1:])
        sent = own.detach()[asked.theirs]
        dist.all_to_all_single(received, sent, asked.n_ours, asked.n_theirs)
        return torch.empty_like(received).index_copy_(0, asked.order, received)

    def give(self, values: Tensor, asked: Asked) -> Tensor:
        """Values for the rows that were asked for → for `asked.theirs`, some of them twice."""
        received = values.new_empty(len(asked.theirs), *values.shape[1:])
        sent = values[asked.order]
        dist.all_to_all_single(received, sent, asked.n_theirs, asked.n_ours)
        return received
