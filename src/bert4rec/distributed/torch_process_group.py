"""The processes that train one model together.

torchrun or Ray starts them and says so in the environment; this file joins them by
`torch.distributed`, gloo for CPUs and NCCL for GPUs. What they exchange is numbers and JSON, never
pickles.

Gradients are all-reduced so that every process makes the same step: small ones together in one
tensor, large ones in their own place, and of an embedding of which a step touches few rows, those
rows only. torch's DistributedDataParallel hooks into autograd's backward pass; ours adds gradients up
on several threads, and the largest of them, the output layer's, outside of autograd. So this is done
after it instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from bert4rec.models.kernels.row_embedding import RowEmbedding
from bert4rec.training.process_group import SINGLE_PROCESS, GradientReducer, ProcessGroup, StepSignals

# One process may prepare data or evaluate for a long time while the others wait for it. One that
# dies is noticed at once by its closed connection, and need not wait for this.
LONGEST_WAIT = timedelta(hours=24)
FURTHEST_APART = 1e-3  # that sums of the same weights may be, as a share of their sizes
NO_ID = ("", "none")  # what torchrun says without --rdzv-id


class TorchProcessGroup(ProcessGroup):
    """Several processes, joined by `torch.distributed`, and which of them this one is."""

    def __init__(self, n: int, rank: int) -> None:
        self.n, self.rank = n, rank

    def all_reduce(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def sum(self, *numbers: float) -> list[float]:
        totals: list[float] = self.all_reduce(torch.tensor(numbers, dtype=torch.float64)).tolist()
        return totals

    def all_gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        received = [torch.empty_like(tensor) for _ in range(self.n)]
        dist.all_gather(received, tensor.contiguous())
        return received

    def all_gather(self, value: Any) -> list[Any]:
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.all_gather_tensor(torch.tensor([len(content)]))
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(content)] = content
        pairs = zip(self.all_gather_tensor(padded), sizes, strict=True)
        return [json.loads(bytes(text[: int(size)].tolist())) for text, size in pairs]

    def barrier(self) -> None:
        self.sum(0.0)  # a barrier of torch's own would choose a GPU

    def synchronize(self, tensors: Iterable[Tensor]) -> None:
        """By the first's tensors. Processors of different kinds add in different orders."""
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

    def gradient_reducer(self, model: nn.Module) -> GradientReducer:
        return GradientAllReduce(model, self)


def was_launched() -> bool:
    """Whether torchrun, or Ray, started this process as one of several."""
    is_one_of_several = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    return is_one_of_several or dist.is_initialized()


@contextlib.contextmanager
def joined() -> Iterator[ProcessGroup]:
    """The processes of this run; a single one where nobody launched several."""
    if not was_launched():
        yield SINGLE_PROCESS
        return
    is_ours = not dist.is_initialized()  # Ray has joined its workers already
    try:
        if is_ours:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = _meeting_place(rank, n)
            dist.init_process_group(backend, store=store, rank=rank, world_size=n, timeout=LONGEST_WAIT)
        yield TorchProcessGroup(dist.get_world_size(), dist.get_rank())
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


LARGE = 2**18  # numbers; a copy of fewer costs less than another message


class GradientAllReduce:
    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        self.group = group
        tables = [m for m in model.modules() if isinstance(m, RowEmbedding) and m.sparse]
        self.rows = [table.weight for table in tables]
        dense = [p for p in model.parameters() if not any(p is row for row in self.rows)]
        self.small = [p for p in dense if p.numel() < LARGE]
        self.large = [p for p in dense if p.numel() >= LARGE]
        n_small = sum(p.numel() for p in self.small)
        # Behind the gradients: who has any, of how many queries, the loss and the signals.
        device = next(model.parameters()).device
        self.together = torch.zeros(n_small + len(dense) + 2 + len(StepSignals._fields), device=device)

    def reduce(self, n_queries: float, loss: float, signals: StepSignals) -> tuple[float, StepSignals]:
        parameters = self.small + self.large
        has_gradient = [float(p.grad is not None) for p in parameters]
        gradients = [_gradient(p).flatten() for p in self.small]
        tail = torch.tensor([*has_gradient, n_queries, loss, *signals], device=self.together.device)
        torch.cat([*gradients, tail], out=self.together)
        self.group.all_reduce(self.together)
        *counts, n_all, loss, stop, save, n_sequences = self.together[-len(tail) :].tolist()
        share = 1 / n_all
        for parameter in self.large:
            parameter.grad = self.group.all_reduce(_gradient(parameter)).mul_(share)
        first = 0
        for parameter in self.small:
            part = self.together[first : first + parameter.numel()]
            place = _gradient(parameter)
            parameter.grad = torch.mul(part.view_as(parameter), share, out=place)
            first += parameter.numel()
        for parameter, n_having in zip(parameters, counts, strict=True):
            if not n_having:
                parameter.grad = None  # as alone: nobody's batch needed it
        for weight in self.rows:
            weight.grad = self._rows_of_all(weight, share)
        return loss * share, StepSignals(stop, save, n_sequences)

    def _rows_of_all(self, weight: Tensor, share: float) -> Tensor:
        """The touched rows of all processes, as one sparse gradient."""
        width, device = weight.shape[1], weight.device
        indices = torch.zeros(0, dtype=torch.int64, device=device)
        values = torch.zeros(0, width, device=device)
        if weight.grad is not None:
            own = weight.grad.coalesce()
            indices, values = own.indices()[0], own.values() * share
        counts = [int(n) for n in self.group.all_gather(len(indices))]
        parts = []
        for part in (indices, values):
            padded = part.new_zeros(max(counts), *part.shape[1:])
            padded[: len(part)] = part
            received = self.group.all_gather_tensor(padded)
            parts.append(torch.cat([r[:n] for r, n in zip(received, counts, strict=True)]))
        return torch.sparse_coo_tensor(parts[0][None], parts[1], tuple(weight.shape), check_invariants=False)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
