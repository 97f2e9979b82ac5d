"""The model as one process trains it: whole, and the same in every process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bert4rec.data.splits import HeldOut
from bert4rec.durable import new_file
from bert4rec.losses import Loss
from bert4rec.models.sequence_model import SequenceModel
from bert4rec.scoring import rank_held_out
from bert4rec.threads import WorkerThreads
from bert4rec.training.batches import Batch
from bert4rec.training.checkpoint import TrainingTensors
from bert4rec.training.gradients import Gradients
from bert4rec.training.hardware import Hardware
from bert4rec.training.optimizer import Optimizer
from bert4rec.training.process_group import ProcessGroup, StepSignals


class StepResult(NamedTuple):
    loss: float  # the mean over all queries
    signals: StepSignals


class Trainee(Protocol):
    """All that the training loop needs of the model that it trains.

    Each method is called by all processes at the same moment.
    """

    group: ProcessGroup

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments: a new stage begins."""
        ...

    def step(self, batch: Batch, seed: int, rate: float, signals: StepSignals) -> StepResult:
        """Learn from everybody's batch."""
        ...

    def rank(self, held_out: HeldOut, *, exclude_seen: bool) -> Tensor:
        """The ranks of all held-out items among all items."""
        ...

    def keep_best(self) -> None:
        """The weights as they are now are the best so far."""
        ...

    def load_best(self) -> None: ...

    def save_best(self, path: Path) -> None:
        """As a file of tensors by name, which the first process writes."""
        ...

    def finish(self, model: SequenceModel) -> None:
        """Put the best weights into the model that was to be trained."""
        ...

    def tensors(self) -> TrainingTensors:
        """The part of a checkpoint that this process writes."""
        ...

    def restore(self, tensors: TrainingTensors) -> None:
        """Continue from a whole checkpoint, whoever wrote it."""
        ...


class Replica:
    def __init__(
        self,
        model: SequenceModel,
        loss: Loss,
        weight_decay: float,
        workers: WorkerThreads,
        hardware: Hardware,
        group: ProcessGroup,
    ) -> None:
        self.model, self.weight_decay, self.group = model, weight_decay, group
        self.is_sparse, self.n_workers = loss.is_sparse, workers.n
        self.gradients = Gradients(model, loss, workers, hardware, rank=group.rank)
        self.reducer = group.gradient_reducer(model)
        self.best = copy_of(model)
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        self.optimizer = Optimizer(self.model, self.weight_decay, is_sparse=self.is_sparse)

    def step(self, batch: Batch, seed: int, rate: float, signals: StepSignals) -> StepResult:
        self.model.train()
        scale = 1 / batch.n_queries if self.group.n == 1 else 1.0
        loss = self.gradients.add(batch, seed, scale=scale)
        loss, signals = self.reducer.reduce(batch.n_queries, loss, signals)
        check_is_number(loss)
        self.optimizer.step(rate)
        return StepResult(loss, signals)

    def rank(self, held_out: HeldOut, *, exclude_seen: bool) -> Tensor:
        """Each process ranks its share of the held-out users."""
        n, rank = self.group.n, self.group.rank
        share = held_out if n == 1 else every_nth(held_out, rank, n)
        found = rank_held_out(self.model, share, exclude_seen=exclude_seen, n_workers=self.n_workers)
        if n == 1:
            return found
        ranks = torch.zeros(len(held_out), dtype=torch.int64)
        ranks[rank::n] = found
        return self.group.all_reduce(ranks)

    def keep_best(self) -> None:
        self.best = copy_of(self.model)

    def load_best(self) -> None:
        self.model.load_state_dict(self.best)

    def save_best(self, path: Path) -> None:
        if self.group.is_first:
            with new_file(path) as part:
                save_file(self.best, part)

    def finish(self, model: SequenceModel) -> None:
        assert model is self.model
        self.load_best()
        for parameter in model.parameters():
            parameter.grad = None
        model.to("cpu").eval()

    def tensors(self) -> TrainingTensors:
        self.group.synchronize([*self.model.parameters(), *self.optimizer.moments()])
        parts = self.model.state_dict(), self.optimizer.tensors(), self.best
        return TrainingTensors(*(share_of(tensors, self.group) for tensors in parts))

    def restore(self, tensors: TrainingTensors) -> None:
        device = next(self.model.parameters()).device
        self.best = {name: tensor.to(device) for name, tensor in tensors.best.items()}
        self.model.load_state_dict(dict(tensors.weights))
        self.optimizer.restore(dict(tensors.optimizer))


def check_is_number(loss: float) -> None:
    if not math.isfinite(loss):
        raise ValueError("the loss is no longer a number: lower the stage's learning_rate and train again")


def every_nth(held_out: HeldOut, first: int, n: int) -> HeldOut:
    rows = np.arange(first, len(held_out), n)
    return HeldOut(held_out.histories.take(rows), held_out.targets[rows])


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def share_of(tensors: Mapping[str, Tensor], group: ProcessGroup) -> dict[str, Tensor]:
    """About the same number of bytes for every process, the largest tensors first."""
    shares: list[dict[str, Tensor]] = [{} for _ in range(group.n)]
    sizes = [0] * group.n
    for name, tensor in sorted(tensors.items(), key=lambda pair: (-pair[1].nbytes, pair[0])):
        smallest = sizes.index(min(sizes))
        shares[smallest][name] = tensor
        sizes[smallest] += tensor.nbytes
    return shares[group.rank]
