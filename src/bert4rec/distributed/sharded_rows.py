"""An embedding whose rows are sharded over the processes; a step fetches the few that it needs.

Row i lives in process i % n, as its row i // n: popular items have small numbers, so that none has
all of them. A process requests rows of the others, and later sends them the rows' gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bert4rec.training.process_group import ProcessGroup


@dataclass(frozen=True)
class RowRequest:
    """Rows that this process needs of the others, and they of it; in the order of the messages."""

    order: Tensor  # (U,) which of our rows come first: those of process 0, then 1, …
    n_ours: list[int]  # rows that we need of each process
    n_theirs: list[int]  # rows that each process needs of us
    theirs: Tensor  # which of our own rows those are


class ShardedRows:
    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def n_own(self, n_rows: int) -> int:
        """How many of `n_rows` live here."""
        return len(range(self.group.rank, n_rows, self.group.n))

    def request(self, rows: Tensor) -> RowRequest:
        """(U,) rows of the whole embedding that this process needs → the request, sent to all."""
        n = self.group.n
        owners = rows % n
        order = owners.argsort(stable=True)
        n_ours = owners.bincount(minlength=n)
        n_theirs = torch.empty_like(n_ours)
        dist.all_to_all_single(n_theirs, n_ours)
        from_each, to_each = n_ours.tolist(), n_theirs.tolist()
        theirs = rows.new_empty(sum(to_each))
        dist.all_to_all_single(theirs, rows[order] // n, to_each, from_each)
        return RowRequest(order, from_each, to_each, theirs)

    def fetch(self, own: Tensor, request: RowRequest) -> Tensor:
        """The requested rows, in the order of the request, of an embedding of own rows."""
        received = own.new_empty(len(request.order), *own.shape[1:])
        sent = own.detach()[request.theirs]
        dist.all_to_all_single(received, sent, request.n_ours, request.n_theirs)
        return torch.empty_like(received).index_copy_(0, request.order, received)

    def send_back(self, values: Tensor, request: RowRequest) -> Tensor:
        """Values for the requested rows → for `request.theirs`, some of them twice."""
        received = values.new_empty(len(request.theirs), *values.shape[1:])
        sent = values[request.order]
        dist.all_to_all_single(received, sent, request.n_theirs, request.n_ours)
        return received
