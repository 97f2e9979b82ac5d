"""The model as one process trains it: whole, and the same in every process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

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
from bert4rec.training.gradients import Gradients, average_gradients, fair_shares
from bert4rec.training.hardware import Hardware
from bert4rec.training.optimizer import Optimizer
from bert4rec.training.process_group import ProcessGroup


class Replica:
    """All that the training loop needs of the model that it trains.

    Each method is called by all processes at the same moment.
    """

    def __init__(
        self,
        model: SequenceModel,
        loss: Loss,
        weight_decay: float,
        workers: WorkerThreads,
        hardware: Hardware,
        group: ProcessGroup,
        *,
        own: nn.Module | None = None,
    ) -> None:
        """`own` has the parameters that this process updates, where they are not those of the model."""
        self.model, self.weight_decay, self.group = model, weight_decay, group
        self.own = model if own is None else own
        self.n_workers = workers.n
        self.gradients = Gradients(model, loss, workers, hardware, rank=group.rank)
        self.keep_best()
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments: a new stage begins."""
        self.optimizer = Optimizer(self.own, self.weight_decay)

    def step(self, batch: Batch, seed: int, rate: float, signals: Sequence[float]) -> tuple[float, list[float]]:
        """Learn from everybody's batch; returns its mean loss, and the sums of everybody's signals."""
        self.model.train()
        scale = 1 / batch.n_queries if self.group.n == 1 else 1.0
        loss = self.gradients.add(batch, seed, scale=scale)
        loss, totals = average_gradients(self.model, self.group, batch.n_queries, loss, signals)
        self.optimizer.step(rate)
        return loss, totals

    def held_out_ranks(self, held_out: HeldOut, *, exclude_seen: bool) -> Tensor:
        """The ranks of all held-out items among all items; each process ranks its share of the users."""
        share = every_nth(held_out, self.group.rank, self.group.n)
        ranks = torch.zeros(len(held_out), dtype=torch.int64)
        ranks[self.group.rank :: self.group.n] = rank_held_out(
            self.model, share, exclude_seen=exclude_seen, n_workers=self.n_workers
        )
        return self.group.all_reduce(ranks)

    def keep_best(self) -> None:
        """The weights as they are now are the best so far."""
        self.best = copy_of(self.own)

    def load_best(self) -> None:
        self.own.load_state_dict(self.best)

    def save_best(self, path: Path) -> None:
        """As a file of tensors by name, which the first process writes."""
        if self.group.is_first:
            with new_file(path) as part:
                save_file(self.best, part)

    def finish(self) -> SequenceModel:
        """The whole model with the best weights; nothing else can be done afterwards."""
        self.load_best()
        for parameter in self.model.parameters():
            parameter.grad = None
        return self.model.to("cpu").eval()

    def tensors(self) -> TrainingTensors:
        """The part of a checkpoint that this process writes."""
        self.group.synchronize([*self.model.parameters(), *self.optimizer.moments()])
        parts = self.model.state_dict(), self.optimizer.tensors(), self.best
        return TrainingTensors(*(share_of(tensors, self.group) for tensors in parts))

    def restore(self, tensors: TrainingTensors) -> None:
        """Continue from a whole checkpoint, whoever wrote it."""
        device = next(self.model.parameters()).device
        self.best = {name: tensor.to(device) for name, tensor in tensors.best.items()}
        self.model.load_state_dict(dict(tensors.weights))
        self.optimizer.restore(dict(tensors.optimizer))


def every_nth(held_out: HeldOut, first: int, n: int) -> HeldOut:
    rows = np.arange(first, len(held_out), n)
    return HeldOut(held_out.histories.take(rows), held_out.targets[rows])


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def share_of(tensors: Mapping[str, Tensor], group: ProcessGroup) -> dict[str, Tensor]:
    """About the same number of bytes for every process."""
    return dict(fair_shares(sorted(tensors.items()), lambda pair: pair[1].nbytes, group.n)[group.rank])
