"""The processes that train one model together, as the training loop sees them.

Here there is one. `bert4rec.distributed.torch_process_group` has the same for several.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn


class StepSignals(NamedTuple):
    """What each process knows before a step, and after it the sums over all of them."""

    wants_stop: float
    wants_save: float
    n_sequences: float


class GradientReducer(Protocol):
    def reduce(self, n_queries: float, loss: float, signals: StepSignals) -> tuple[float, StepSignals]:
        """Everybody's gradients into everybody's model, as a mean over all queries.

        The loss and the signals travel along with them; their sums are returned.
        """
        ...


class ProcessGroup:
    """A single process: every sum is its own."""

    n: int = 1
    rank: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of everybody's tensor, in its place."""
        return tensor

    def sum(self, *numbers: float) -> list[float]:
        return list(numbers)

    def all_gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank; JSON."""
        return [value]

    def all_gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor, by rank; all of one shape."""
        return [tensor]

    def from_first(self, value: Any) -> Any:
        """The first process's value; JSON."""
        return self.all_gather(value if self.is_first else None)[0]

    def barrier(self) -> None:
        """Wait until all are here."""

    def synchronize(self, tensors: Iterable[Tensor]) -> None:
        """Make tensors bit-identical everywhere that should be so but for rounding."""

    def gradient_reducer(self, model: nn.Module) -> GradientReducer:
        return _NothingToReduce()

    def check_same(self, **facts: Any) -> None:
        """A ValueError on every process when one of `facts` is not the same for all."""
        theirs = self.all_gather({"host": socket.gethostname(), **facts})
        for rank, other in enumerate(theirs[1:], 1):
            if names := differences(theirs[0], other, ignore=("host",)):
                raise ValueError(
                    f"process {rank} on {other['host']} has another {names} than process 0 on "
                    f"{theirs[0]['host']}: start all with the same command, settings and data"
                )


class _NothingToReduce:
    def reduce(self, n_queries: float, loss: float, signals: StepSignals) -> tuple[float, StepSignals]:
        return loss, signals


SINGLE_PROCESS = ProcessGroup()


def differences(ours: dict[str, Any], theirs: dict[str, Any], prefix: str = "", ignore: tuple[str, ...] = ()) -> str:
    """The names of what differs, those of nested settings with a dot; empty when nothing does."""
    names = []
    for key in sorted((ours.keys() | theirs.keys()) - set(ignore)):
        a, b = ours.get(key), theirs.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names.append(differences(a, b, f"{prefix}{key}."))
        elif a != b:
            names.append(f"{prefix}{key}")
    return ", ".join(name for name in names if name)
