"""The training loop: stages, schedule, validation, early stopping, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bert4rec.allocator import keep_freed_memory
from bert4rec.config import Config
from bert4rec.data.splits import Questions, Spans, Split
from bert4rec.evaluation.evaluate import full_ranks
from bert4rec.evaluation.metrics import METRICS
from bert4rec.models.learned import Learned, TaskName
from bert4rec.parallel import Workers
from bert4rec.training.batches import (
    TASKS,
    Batch,
    Task,
    epoch_order,
    last_item_task,
    make_batch,
)
from bert4rec.training.checkpoint import (
    Checkpoint,
    Progress,
    load_checkpoint,
    save_checkpoint,
)
from bert4rec.training.gradients import Gradients
from bert4rec.training.hardware import Hardware
from bert4rec.training.losses import make_loss
from bert4rec.training.optimizer import Optimizer
from bert4rec.training.progress import TrainingDisplay


@dataclass(frozen=True)
class Stage:
    name: str
    task: Task
    epochs: int
    learning_rate: float
    warmup_steps: int
    patience: int | None


class Interrupted(Exception):
    """Training was asked to stop; the checkpoint is saved and `--resume` goes on from it."""


def stages_of(split: Split, config: Config, name: TaskName = "cloze") -> list[Stage]:
    """The model's own task, and for the Cloze task the last-item stage after it."""
    first, second = config.training, config.second_stage
    task = TASKS[name](split.train, split.n_items, config)
    stages = [
        Stage(name, task, first.epochs, first.learning_rate, first.warmup_steps, first.patience)
    ]
    if name == "cloze" and second.epochs:
        task = last_item_task(split.train, split.n_items, config)
        stages.append(
            Stage(
                "last-item",
                task,
                second.epochs,
                second.learning_rate,
                second.warmup_steps,
                second.patience,
            )
        )
    return stages


def train(
    model: Learned,
    split: Split,
    config: Config,
    run: Path,
    display: TrainingDisplay,
    *,
    identity: dict[str, Any],
    hardware: Hardware,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train `model` in place to its best validation NDCG@10; checkpoints go to `run`."""
    keep_freed_memory()
    n_workers = config.training.workers if hardware.device.type == "cpu" else 1
    model.to(hardware.device)
    with Workers(n_workers) as workers, Workers(1) as preparer:
        trainer = _Trainer(
            model, split, config, run, display, identity, should_stop, workers, preparer, hardware
        )
        threads = f"{workers.n} worker{'s' * (workers.n > 1)}"
        display.say(f"training on {hardware}, {threads}, {config.training.loss}")
        if resume:
            trainer.restore()
        else:
            display.rewind_log([])
        if note := unreachable_note(trainer.questions, config.evaluation.exclude_seen):
            display.say(note)
        for number, stage in enumerate(trainer.stages):
            if number == trainer.progress.stage:
                trainer.run_stage(stage)
    model.load_state_dict(trainer.best)
    for parameter in model.parameters():
        parameter.grad = None
    model.to("cpu")
    model.eval()
    return trainer.progress


class _Trainer:
    """The state that the steps of one run share."""

    def __init__(
        self,
        model: Learned,
        split: Split,
        config: Config,
        run: Path,
        display: TrainingDisplay,
        identity: dict[str, Any],
        should_stop: Callable[[], bool],
        workers: Workers,
        preparer: Workers,
        hardware: Hardware,
    ) -> None:
        self.model, self.split, self.config = model, split, config
        self.run, self.display, self.identity = run, display, identity
        self.should_stop, self.workers, self.preparer = should_stop, workers, preparer
        self.stages = stages_of(split, config, model.task)
        self.questions = validation_sample(split, config)
        self.progress = Progress()
        self.best = _copy(model)
        self.loss = make_loss(config.training, split.train_counts)
        self.gradients = Gradients(
            model, self.loss, workers, hardware, compiles=config.training.compile
        )
        self.optimizer = self._new_optimizer()
        self.last_save = time.monotonic()

    def restore(self) -> None:
        checkpoint = load_checkpoint(self.run)
        if checkpoint is None:
            raise ValueError(f"{self.run} has no checkpoint to resume from: train without --resume")
        if checkpoint.identity != self.identity:
            differing = _differences(checkpoint.identity, self.identity)
            raise ValueError(
                f"the checkpoint in {self.run} belongs to another run (different: {differing}): "
                "resume with the same data and settings, or train into another directory"
            )
        self.progress, self.best = checkpoint.progress, checkpoint.best
        self.model.load_state_dict(checkpoint.weights)
        self.optimizer.restore(checkpoint.optimizer)
        self.display.rewind_log(self.progress.history)

    def save(self) -> None:
        weights, moments = self.model.state_dict(), self.optimizer.tensors()
        state = Checkpoint(self.progress, weights, moments, self.best, self.identity)
        save_checkpoint(self.run, state)
        self.last_save = time.monotonic()

    def run_stage(self, stage: Stage) -> None:
        progress = self.progress
        seed = self.config.training.seed
        n_windows = len(stage.task.windows(np.random.default_rng(0)))
        steps_an_epoch = -(-n_windows // self.config.training.batch_size)
        total = stage.epochs * steps_an_epoch
        if total == 0 and progress.stage == 0:
            raise ValueError(
                "no history is long enough to train on: the model needs users with two or more "
                "actions in the training part; use more data or weaker filters"
            )
        if total == 0:
            self.display.say(f"{stage.name}: left out, no history is long enough to train on")
        elif progress.stage > 0 and self._is_out_of_time():
            self.display.say(f"{stage.name}: left out, training.minutes are over")
        self.display.stage(stage.name, progress.step, total)
        if progress.stage > 0 and progress.step == 0:
            self.model.load_state_dict(self.best)  # from the best of the stage before, not its last
        has_patience_left = True
        while progress.step < total and has_patience_left:
            if progress.batch == 0 and self._is_out_of_time():  # an epoch that has begun is ended
                break
            generator = np.random.default_rng([seed, progress.stage, progress.epoch])
            windows = stage.task.windows(generator)
            started = time.monotonic()
            for batch in self._batches(stage.task, windows, generator):
                learning_rate = _learning_rate(stage, progress.step, total)
                progress.loss_sum += self._step(batch, learning_rate)
                progress.step += 1
                progress.batch += 1
                progress.sequences += batch.n_sequences
                progress.seconds += time.monotonic() - started
                started = time.monotonic()
                self.display.step(
                    progress.step, progress.epoch + 1, progress.mean_loss, batch.n_sequences
                )
                self._stop_or_save()
            progress.epoch += 1
            every = self.config.training.validate_every
            is_last = progress.epoch == stage.epochs or self._is_out_of_time()
            if progress.epoch % every == 0 or is_last:
                self._validate(stage, _learning_rate(stage, progress.step, total))
                patience = stage.patience
                has_patience_left = patience is None or progress.bad_validations < patience
            progress.batch, progress.loss_sum = 0, 0.0
            if progress.epoch % every == 0 and has_patience_left:
                self.save()
        progress.stage += 1
        progress.epoch = progress.step = progress.batch = progress.bad_validations = 0
        self.optimizer = self._new_optimizer()  # the next stage starts afresh
        self.save()

    def _batches(
        self, task: Task, windows: Spans, generator: np.random.Generator
    ) -> Iterator[Batch]:
        """The rest of the epoch, made in the background while the steps before are computed."""
        order = epoch_order(len(windows), self.config.training.batch_size, generator)

        def make(numbered: tuple[int, NDArray[np.int64]]) -> Batch:
            step, rows = numbered
            masks = torch.Generator().manual_seed(self._seed(step))
            size, n_workers = self.model.piece, self.workers.n
            return make_batch(task, windows, rows, self.model.pad, masks, size, n_workers)

        rest = enumerate(order[self.progress.batch :], self.progress.step)
        return self.preparer.stream(make, rest, ahead=2)

    def _step(self, batch: Batch, learning_rate: float) -> float:
        self.model.train()
        loss = self.gradients.add(batch, self._seed(self.progress.step))
        if not math.isfinite(loss):
            raise ValueError(
                "the loss is no longer a number: lower training.learning_rate and train again"
            )
        self.optimizer.step(learning_rate)
        return loss

    def _seed(self, step: int) -> int:
        """What is random in a step follows from the run's seed and the step's place alone."""
        place = [self.config.training.seed, self.progress.stage, step]
        return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> 1)

    def _new_optimizer(self) -> Optimizer:
        return Optimizer(self.model, self.config.training, is_sparse=self.loss.is_sparse)

    def _validate(self, stage: Stage, learning_rate: float) -> None:
        progress, started = self.progress, time.monotonic()
        exclude_seen = self.config.evaluation.exclude_seen
        ranks = full_ranks(
            self.model, self.questions, exclude_seen=exclude_seen, n_workers=self.workers.n
        )
        ndcg, hit_rate = (float(METRICS[name](ranks, 10).mean()) for name in ("NDCG", "HR"))
        progress.seconds += time.monotonic() - started
        is_best = ndcg > progress.best
        if is_best:
            progress.best, progress.bad_validations = ndcg, 0
            progress.best_stage, progress.best_epoch = progress.stage, progress.epoch
            self.best = _copy(self.model)
        else:
            progress.bad_validations += 1
        event: dict[str, float | int | str] = {
            "stage": stage.name,
            "epoch": progress.epoch,
            "step": progress.step,
            "loss": progress.mean_loss,
            "ndcg@10": ndcg,
            "hr@10": hit_rate,
            "learning_rate": learning_rate,
            "seconds": round(progress.seconds, 3),
            "sequences_per_second": round(progress.sequences / progress.seconds, 1),
        }
        progress.history.append(event)
        self.display.validated(event, is_best)

    def _is_out_of_time(self) -> bool:
        minutes = self.config.training.minutes
        return minutes is not None and self.progress.seconds >= 60 * minutes

    def _stop_or_save(self) -> None:
        if self.should_stop():
            self.save()
            raise Interrupted
        if time.monotonic() - self.last_save > 60 * self.config.training.checkpoint_minutes:
            self.save()


def validation_sample(split: Split, config: Config) -> Questions:
    n = config.training.validation_users
    return split.validation if n is None else split.validation.sample(n, config.training.seed)


def unreachable_note(questions: Questions, exclude_seen: bool) -> str | None:
    """A warning when many targets were seen before by their user and so cannot be recommended."""
    if not exclude_seen:
        return None
    histories = questions.histories
    n = sum(target in histories[i] for i, target in enumerate(questions.targets.tolist()))
    if n < 0.1 * len(questions):
        return None
    return (
        f"note: {n / len(questions):.0%} of the validation targets are items that the user had "
        "before. They count as missed, because seen items are not recommended; if people repeat "
        "items in your data, train with --set evaluation.exclude_seen=false"
    )


def _learning_rate(stage: Stage, step: int, total: int) -> float:
    """Linear warm-up, then linear decay to zero at the end of the stage."""
    warm = min(1.0, (step + 1) / (stage.warmup_steps + 1))
    return stage.learning_rate * warm * max(0.0, 1 - step / total)


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _differences(ours: dict[str, Any], theirs: dict[str, Any], prefix: str = "") -> str:
    names = []
    for key in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(key), theirs.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names.append(_differences(a, b, f"{prefix}{key}."))
        elif a != b:
            names.append(f"{prefix}{key}")
    return ", ".join(name for name in names if name)
