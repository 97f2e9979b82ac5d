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

from bert4rec.config import TrainingConfig
from bert4rec.data.splits import Questions
from bert4rec.durable import new_file
from bert4rec.evaluation.evaluate import full_ranks
from bert4rec.models.learned import Learned
from bert4rec.parallel import Workers
from bert4rec.training.batches import Batch
from bert4rec.training.checkpoint import State
from bert4rec.training.distributed import Ranks
from bert4rec.training.exchange import Exchange
from bert4rec.training.gradients import Gradients
from bert4rec.training.hardware import Hardware
from bert4rec.training.losses import Loss
from bert4rec.training.optimizer import Optimizer


class ToldByAll(NamedTuple):
    """What each process knows before a step, and after it the sums over all of them."""

    wants_to_stop: float
    wants_to_save: float
    n_sequences: float


class Stepped(NamedTuple):
    loss: float  # the mean over all that was asked
    told: ToldByAll


class Trainee(Protocol):
    """All that the training loop may ask of the model that it trains. Each is called by all
    processes at the same moment."""

    def start_afresh(self) -> None:
        """Forget the optimiser's moments: a new stage begins."""
        ...

    def step(self, batch: Batch, seed: int, learning_rate: float, told: ToldByAll) -> Stepped:
        """Learn from everybody's batch."""
        ...

    def ranks_of(self, questions: Questions, *, exclude_seen: bool) -> Tensor:
        """The full ranks of all targets, in question order."""
        ...

    def keep_best(self) -> None:
        """The weights as they are now are the best so far."""
        ...

    def use_best(self) -> None: ...

    def save_best(self, path: Path) -> None:
        """As a file of tensors by name, which the first process writes."""
        ...

    def finish(self, model: Learned) -> None:
        """Put the best weights into the model that was to be trained."""
        ...

    def state(self) -> State:
        """The share of a checkpoint that this process writes."""
        ...

    def restore(self, state: State) -> None:
        """Go on from a whole checkpoint, whoever wrote it."""
        ...


class Replica:
    def __init__(
        self,
        model: Learned,
        loss: Loss,
        config: TrainingConfig,
        workers: Workers,
        hardware: Hardware,
        ranks: Ranks,
    ) -> None:
        self.model, self.config, self.ranks = model, config, ranks
        self.is_sparse, self.n_workers = loss.is_sparse, workers.n
        self.gradients = Gradients(
            model, loss, workers, hardware, compiles=config.compile, rank=ranks.rank
        )
        self.exchange = Exchange(model, ranks)
        self.best = copy_of(model)
        self.start_afresh()

    def start_afresh(self) -> None:
        self.optimizer = Optimizer(self.model, self.config, is_sparse=self.is_sparse)

    def step(self, batch: Batch, seed: int, learning_rate: float, told: ToldByAll) -> Stepped:
        self.model.train()
        share = 1 / batch.n_asked if self.ranks.n == 1 else 1.0
        loss = self.gradients.add(batch, seed, share=share)
        loss, *sums = self.exchange.add_up(batch.n_asked, (loss, *told))
        check_is_number(loss)
        self.optimizer.step(learning_rate)
        return Stepped(loss, ToldByAll(*sums))

    def ranks_of(self, questions: Questions, *, exclude_seen: bool) -> Tensor:
        """Each process answers its share of the questions."""
        n, rank = self.ranks.n, self.ranks.rank
        share = questions if n == 1 else every_nth(questions, rank, n)
        found = full_ranks(self.model, share, exclude_seen=exclude_seen, n_workers=self.n_workers)
        if n == 1:
            return found
        ranks = torch.zeros(len(questions), dtype=torch.int64)
        ranks[rank::n] = found
        return self.ranks.total(ranks)

    def keep_best(self) -> None:
        self.best = copy_of(self.model)

    def use_best(self) -> None:
        self.model.load_state_dict(self.best)

    def save_best(self, path: Path) -> None:
        if self.ranks.is_first:
            with new_file(path) as part:
                save_file(self.best, part)

    def finish(self, model: Learned) -> None:
        assert model is self.model
        self.use_best()
        for parameter in model.parameters():
            parameter.grad = None
        model.to("cpu").eval()

    def state(self) -> State:
        self.ranks.alike([*self.model.parameters(), *self.optimizer.moments()])
        parts = self.model.state_dict(), self.optimizer.tensors(), self.best
        return State(*(share_of(tensors, self.ranks) for tensors in parts))

    def restore(self, state: State) -> None:
        self.best = {name: tensor.to(_device(self.model)) for name, tensor in state.best.items()}
        self.model.load_state_dict(dict(state.weights))
        self.optimizer.restore(dict(state.optimizer))


def check_is_number(loss: float) -> None:
    if not math.isfinite(loss):
        raise ValueError(
            "the loss is no longer a number: lower training.learning_rate and train again"
        )


def every_nth(questions: Questions, first: int, n: int) -> Questions:
    rows = np.arange(first, len(questions), n)
    return Questions(questions.histories.take(rows), questions.targets[rows])


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def share_of(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """About the same number of bytes for everybody, the largest tensors first."""
    shares: list[dict[str, Tensor]] = [{} for _ in range(ranks.n)]
    sizes = [0] * ranks.n
    for name, tensor in sorted(tensors.items(), key=lambda pair: (-pair[1].nbytes, pair[0])):
        smallest = sizes.index(min(sizes))
        shares[smallest][name] = tensor
        sizes[smallest] += tensor.nbytes
    return shares[ranks.rank]


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
