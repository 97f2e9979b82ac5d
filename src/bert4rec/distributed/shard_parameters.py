"""Sharded item embeddings: the rows that a process owns, and how a step fetches those of others.

Row i of the whole belongs to process i % n, as its row i // n: popular items have small numbers, so
that none has all of them. A process updates its own rows and the rest of the model, which is the
same everywhere. A checkpoint holds the rows under names that say whose they are (`item_embedding.weight@1/4`),
so that any number of processes can resume from it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert4rec.models.initialization import clear_reserved
from bert4rec.models.kernels.row_embedding import RowEmbedding
from bert4rec.models.sequence_model import SequenceModel
from bert4rec.training.process_group import ProcessGroup
from bert4rec.training.replica import share_of

SHARDED = ("item_embedding.weight", "output_bias")  # all models have the first
BLOCK = 1 << 16  # rows that travel at a time


class RowRequest:
    """Rows of a sharded embedding that this process needs of the others, and they of it.

    Made and used by all processes at the same moment.
    """

    def __init__(self, rows: Tensor, group: ProcessGroup) -> None:
        """(U,) rows of the whole embedding."""
        owners = rows % group.n
        self.order = owners.argsort(stable=True)  # the rows of process 0 travel first, then those of 1, …
        n_ours = owners.bincount(minlength=group.n)
        n_theirs = torch.empty_like(n_ours)
        dist.all_to_all_single(n_theirs, n_ours)
        self.n_ours, self.n_theirs = n_ours.tolist(), n_theirs.tolist()  # of each process, of us by each
        self.theirs = rows.new_empty(sum(self.n_theirs))  # which of our own rows the others need
        dist.all_to_all_single(self.theirs, rows[self.order] // group.n, self.n_theirs, self.n_ours)

    def fetch(self, own: Tensor) -> Tensor:
        """The requested rows, in the order of the request, of an embedding of own rows."""
        received = own.new_empty(len(self.order), *own.shape[1:])
        dist.all_to_all_single(received, own.detach()[self.theirs], self.n_ours, self.n_theirs)
        return torch.empty_like(received).index_copy_(0, self.order, received)

    def send_back(self, values: Tensor) -> Tensor:
        """Values for the requested rows → for `theirs`, some of them twice."""
        received = values.new_empty(len(self.theirs), *values.shape[1:])
        dist.all_to_all_single(received, values[self.order], self.n_theirs, self.n_ours)
        return received


class ShardParameters(nn.Module):
    """Initialized as those of `small`, for as many items as `bias` has entries."""

    output_bias: nn.Parameter | None

    @torch.no_grad()
    def __init__(self, small: SequenceModel, group: ProcessGroup, bias: Tensor, seed: int) -> None:
        super().__init__()
        self.group = group
        special = small.get_parameter("item_embedding.weight")[small.n_items :]  # PAD and, of some, MASK
        self.n_all = {"item_embedding.weight": len(bias) + len(special), "output_bias": len(bias)}
        rows = torch.arange(group.rank, self.n_all["item_embedding.weight"], group.n)
        self.item_embedding = RowEmbedding(len(rows), small.settings.dim, sparse=True)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + group.rank)
        nn.init.trunc_normal_(self.item_embedding.weight, std=0.02, a=-0.04, b=0.04, generator=generator)
        if getattr(small.settings, "initialization", None) == "local":
            clear_reserved(self.item_embedding.weight, small.settings.heads)
        is_special = rows >= len(bias)
        self.item_embedding.weight[is_special] = special[rows[is_special] - len(bias)]
        self.n_items = int((~is_special).sum())
        has_bias = hasattr(small, "output_bias")
        self.output_bias = nn.Parameter(bias[group.rank :: group.n].clone()) if has_bias else None
        for name, child in small.named_children():
            if name != "item_embedding":
                self.add_module(name, child)

    @property
    def rest(self) -> nn.Module:
        """What is not sharded."""
        rest = nn.Module()
        for name, child in self.named_children():
            if name != "item_embedding":
                rest.add_module(name, child)
        return rest

    def output_layer(self) -> tuple[Tensor, Tensor]:
        """Embeddings and biases of own items, without PAD and MASK, which come last."""
        weight = self.item_embedding.weight[: self.n_items]
        bias = self.output_bias
        return weight, weight.new_zeros(self.n_items) if bias is None else bias

    def to_checkpoint(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this process writes: its own rows, and a share of what all processes have.

        `tensors` are parameters, or moments of the optimizer under `moment/parameter`.
        """
        owner = f"@{self.group.rank}/{self.group.n}"
        own = {f"{name}{owner}": t for name, t in tensors.items() if _is_sharded(name, t)}
        rest = {name: t for name, t in tensors.items() if not _is_sharded(name, t)}
        return own | share_of(rest, self.group)

    def from_checkpoint(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this process needs of a checkpoint, however many processes wrote it."""
        n, rank = self.group.n, self.group.rank
        part: dict[str, Tensor] = {}
        for key in tensors:
            name, _, owner = key.partition("@")
            if not owner and not _is_sharded(name, tensors[key]):
                part[name] = tensors[key]
                continue
            # A training that was not sharded is one whose first process owns all.
            other, n_others = map(int, (owner or "0/1").split("/"))
            if (other, n_others) == (rank, n):
                part[name] = tensors[key]
            elif f"{name}@{rank}/{n}" not in tensors:
                (n_all,) = (size for end, size in self.n_all.items() if name.endswith(end))
                rows, theirs = torch.arange(rank, n_all, n), tensors[key]
                if name not in part:
                    part[name] = theirs.new_empty(len(rows), *theirs.shape[1:])
                is_theirs = rows % n_others == other
                part[name][is_theirs] = theirs[rows[is_theirs] // n_others]
        return part

    def assemble(self, model: SequenceModel) -> None:
        """Put all rows of all processes into the model of the first one, a block at a time.

        Only the first process needs memory for them; the model of the others stays on `meta`.
        """
        own, is_first = self.state_dict(), self.group.is_first
        if is_first:
            model.to_empty(device="cpu")
            model.no_bias.zero_()
            rest = {name: tensor for name, tensor in own.items() if name not in SHARDED}
            model.load_state_dict(rest, strict=False)
        for name in SHARDED:
            if name in own:
                for block in torch.split(torch.arange(self.n_all[name]), BLOCK):
                    rows = block if is_first else block[:0]
                    received = RowRequest(rows, self.group).fetch(own[name])
                    if is_first:
                        model.get_parameter(name).detach()[rows] = received


def _is_sharded(name: str, tensor: Tensor) -> bool:
    return name.endswith(SHARDED) and tensor.ndim > 0  # the optimizer's step count has no rows
