"""The processes that train one model together; of one alone, every sum is its own.

What they exchange is numbers and JSON, never pickles. `bert4rec.distributed.launch` joins them.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FURTHEST_APART = 1e-3  # that sums of the same weights may be, as a share of their sizes


class ProcessGroup:
    """`n` processes that `torch.distributed` has joined, and which of them this one is."""

    def __init__(self, n: int = 1, rank: int = 0) -> None:
        self.n, self.rank = n, rank

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of everybody's tensor, in its place."""
        if self.n > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum(self, *numbers: float) -> list[float]:
        totals: list[float] = self.all_reduce(torch.tensor(numbers, dtype=torch.float64)).tolist()
        return totals

    def all_gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor, by rank; all of one shape."""
        if self.n == 1:
            return [tensor]
        received = [torch.empty_like(tensor) for _ in range(self.n)]
        dist.all_gather(received, tensor.contiguous())
        return received

    def all_gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank; JSON."""
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.all_gather_tensor(torch.tensor([len(content)]))
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(content)] = content
        pairs = zip(self.all_gather_tensor(padded), sizes, strict=True)
        return [json.loads(bytes(text[: int(size)].tolist())) for text, size in pairs]

    def from_first(self, value: Any) -> Any:
        """The first process's value; JSON."""
        return self.all_gather(value if self.is_first else None)[0]

    def barrier(self) -> None:
        """Wait until all are here."""
        self.sum(0.0)  # a barrier of torch's own would choose a GPU

    def synchronize(self, tensors: Iterable[Tensor]) -> None:
        """Make tensors bit-identical everywhere that should be so but for rounding.

        The first process's are taken: processors of different kinds add in different orders.
        """
        if self.n == 1:
            return
        tensors = list(tensors)
        sums = [float(each.detach().double().sum()) for each in tensors]
        size = sum(float(each.detach().double().abs().sum()) for each in tensors)
        theirs = self.all_gather(sums)
        if all(each == theirs[0] for each in theirs):
            return
        furthest = max(abs(a - b) for each in theirs for a, b in zip(each, theirs[0], strict=True))
        if not furthest <= FURTHEST_APART * size:
            raise ValueError(
                f"the processes have drifted apart (by {furthest:.2g} of {size:.2g}): their "
                "machines compute different things; resume on machines of one kind"
            )
        for each in tensors:
            dist.broadcast(each.detach(), 0)

    def check_same(self, **facts: Any) -> None:
        """A ValueError on every process when one of `facts` is not the same for all."""
        theirs = self.all_gather({"host": socket.gethostname(), **facts})
        for rank, other in enumerate(theirs[1:], 1):
            if names := differences(theirs[0], other | {"host": theirs[0]["host"]}):
                raise ValueError(
                    f"process {rank} on {other['host']} has another {names} than process 0 on "
                    f"{theirs[0]['host']}: start all with the same command, settings and data"
                )


SINGLE_PROCESS = ProcessGroup()


def differences(ours: dict[str, Any], theirs: dict[str, Any], prefix: str = "") -> str:
    """The names of what differs, those of nested settings with a dot; empty when nothing does."""
    names = []
    for key in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(key), theirs.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names.append(differences(a, b, f"{prefix}{key}."))
        elif a != b:
            names.append(f"{prefix}{key}")
    return ", ".join(name for name in names if name)
