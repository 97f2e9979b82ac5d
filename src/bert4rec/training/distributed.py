"""The processes that train one model together: who they are, and what they tell each other.

torchrun or Ray starts them and says so in the environment; this file joins them by
`torch.distributed`, gloo for CPUs and NCCL for GPUs. Alone, all of it costs nothing. What is told
is numbers and JSON, never pickles.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

# One process may prepare data or evaluate for a long time while the others wait for it. One that
# dies is noticed at once by its closed connection, and need not wait for this.
LONGEST_WAIT = timedelta(hours=24)
FURTHEST_APART = 1e-3  # that sums of the same weights may be, as a share of their sizes
NO_ID = ("", "none")  # what torchrun says without --rdzv-id


@dataclass(frozen=True)
class Ranks:
    """All processes of a run, and which of them this one is."""

    n: int = 1
    rank: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def total(self, numbers: Tensor) -> Tensor:
        """The sum of everybody's tensor, in its place."""
        if self.n > 1:
            dist.all_reduce(numbers)
        return numbers

    def sums(self, *numbers: float) -> list[float]:
        if self.n == 1:
            return list(numbers)
        totals: list[float] = self.total(torch.tensor(numbers, dtype=torch.float64)).tolist()
        return totals

    def by_rank(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor, all of one shape."""
        if self.n == 1:
            return [tensor]
        received = [torch.empty_like(tensor) for _ in range(self.n)]
        dist.all_gather(received, tensor.contiguous())
        return received

    def gathered(self, value: Any) -> list[Any]:
        """Everybody's value, by rank; JSON."""
        if self.n == 1:
            return [value]
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.by_rank(torch.tensor([len(content)]))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(content)] = content
        pairs = zip(self.by_rank(padded), sizes, strict=True)
        return [json.loads(bytes(text[: int(size)].tolist())) for text, size in pairs]

    def of_first(self, value: Any) -> Any:
        """The first process's value; JSON."""
        return self.gathered(value if self.is_first else None)[0]

    def wait(self) -> None:
        self.sums(0.0)  # a barrier of torch's own would choose a GPU

    def wait_for_first(self) -> None:
        """Until the first has evaluated and saved: torchrun ends in minutes if others are gone."""
        self.wait()

    def alike(self, tensors: Iterable[Tensor]) -> None:
        """Make tensors the same to the last bit, by the first's, that should be but for rounding.

        Processors of different kinds add in different orders.
        """
        tensors = list(tensors)
        if self.n == 1:
            return
        sums = [float(each.detach().double().sum()) for each in tensors]
        size = sum(float(each.detach().double().abs().sum()) for each in tensors)
        theirs = self.gathered(sums)
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
        theirs = self.gathered({"host": socket.gethostname(), **facts})
        for rank, other in enumerate(theirs[1:], 1):
            if names := differences(theirs[0], other, but=("host",)):
                raise ValueError(
                    f"process {rank} on {other['host']} has another {names} than process 0 on "
                    f"{theirs[0]['host']}: start all with the same command, settings and data"
                )


ALONE = Ranks()


def was_launched() -> bool:
    """Whether torchrun, or Ray, started this process as one of several."""
    is_one_of_several = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    return is_one_of_several or dist.is_initialized()


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks of this run; alone where nobody launched several."""
    if not was_launched():
        yield ALONE
        return
    is_ours = not dist.is_initialized()  # Ray has joined its workers already
    try:
        if is_ours:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = _meeting_place(rank, n)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=n, timeout=LONGEST_WAIT
            )
        yield Ranks(dist.get_world_size(), dist.get_rank())
    except RuntimeError as error:
        is_about_others = any(word in str(error) for word in ("gloo", "NCCL"))
        if not is_about_others and not isinstance(error, dist.DistError):
            raise
        reason = str(error).splitlines()[0][:200]
        raise ConnectionError(f"another process of this training is gone ({reason})") from None
    finally:
        if is_ours and dist.is_initialized():
            dist.destroy_process_group()


def _meeting_place(rank: int, n: int) -> Any:
    """A store that only the processes of this very start write to.

    torchrun keeps one store over restarts, and so the addresses of processes that are dead. The
    first process draws a name that nobody used before, and answers it to whoever asks, until
    all that are alive have it.
    """
    store, _, _ = next(iter(rendezvous("env://", rank, n)))
    if rank > 0:
        me = uuid.uuid4().hex
        store.set(f"bert4rec/asks/{rank}", me)
        name = store.get(f"bert4rec/answer/{me}").decode()
        store.set(f"bert4rec/has/{name}/{rank}", "yes")
        return PrefixStore(name, store)
    name = uuid.uuid4().hex
    waiting = set(range(1, n))
    while waiting:
        for other in sorted(waiting):
            asking = store.get(f"bert4rec/asks/{other}").decode()
            store.set(f"bert4rec/answer/{asking}", name)
            if store.check([f"bert4rec/has/{name}/{other}"]):
                waiting.remove(other)
        time.sleep(0.02)
    return PrefixStore(name, store)


def processes_here() -> int:
    """Processes of the run on this machine, which share its memory and cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def launch_id() -> str | None:
    """A name of this launch, the same after it restarted its processes; None if it has none."""
    name = os.environ.get("BERT4REC_LAUNCH", os.environ.get("TORCHELASTIC_RUN_ID", ""))
    return None if name in NO_ID else name


def is_restart() -> bool:
    """Whether torchrun has started its processes again after one of them died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def differences(
    ours: dict[str, Any], theirs: dict[str, Any], prefix: str = "", but: tuple[str, ...] = ()
) -> str:
    """The names of what differs, those of nested settings with a dot; empty when nothing does."""
    names = []
    for key in sorted((ours.keys() | theirs.keys()) - set(but)):
        a, b = ours.get(key), theirs.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names.append(differences(a, b, f"{prefix}{key}."))
        elif a != b:
            names.append(f"{prefix}{key}")
    return ", ".join(name for name in names if name)
