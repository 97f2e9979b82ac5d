"""The training loop: stages, learning rate, validation, early stopping, checkpoints.

The same loop trains in one process and in several. Every value that affects the control flow (the
loss, a validation, the clock, a signal) is shared among the processes, so that all take the same
branch. What a step computes is in replica.py; the loss comes from bert4rec.losses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from bert4rec.config import RunConfig
from bert4rec.data.splits import HeldOut
from bert4rec.evaluation.metrics import METRICS
from bert4rec.interrupts import Interrupted
from bert4rec.objectives import StageSettings
from bert4rec.threads import WorkerThreads
from bert4rec.training.batches import Batch, StageBatches
from bert4rec.training.checkpoint import Progress, RunDirectory, load_checkpoint, save_checkpoint
from bert4rec.training.replica import Replica
from bert4rec.training.run_log import RunLog

SAVE_EVERY = 120.0  # seconds between two checkpoints, apart from those after validations


@dataclass(frozen=True)
class Stage:
    name: str  # in the log
    settings: StageSettings
    batches: StageBatches

    @property
    def n_steps(self) -> int:
        return self.settings.epochs * self.batches.steps_per_epoch


class TrainingLoop:
    """Trains to the best validation NDCG@10, or to the end where `validation` is None."""

    def __init__(
        self,
        replica: Replica,
        stages: list[Stage],
        validation: HeldOut | None,
        config: RunConfig,
        directory: RunDirectory,
        log: RunLog,
        *,
        max_minutes: float | None = None,  # stop after the epoch in which this is reached
        keep_stages: bool = False,  # write the best weights so far at the end of each stage
    ) -> None:
        self.replica, self.stages, self.validation = replica, stages, validation
        self.config, self.directory, self.log = config, directory, log
        self.max_minutes, self.keep_stages = max_minutes, keep_stages
        self.progress = Progress()
        self.last_save = time.monotonic()

    def run(self, should_stop: Callable[[], bool], *, resume: bool = False) -> Progress:
        """All stages that are left.

        `should_stop` is asked in every step; when it says yes the run is saved and `Interrupted`.
        """
        self.should_stop = should_stop
        if resume:
            self._restore()
        else:
            self.log.rewind([])
        with WorkerThreads(1) as preparer:
            while self.progress.stage < len(self.stages):
                self._train_stage(self.stages[self.progress.stage], preparer)
                self._end_stage()
        return self.progress

    def _train_stage(self, stage: Stage, preparer: WorkerThreads) -> None:
        progress = self.progress
        if stage.n_steps == 0:
            self.log.say(f"{stage.name}: left out, no history is long enough to train on")
            return
        begins_from_best = progress.stage > 0 and progress.step == 0  # the best so far, of any stage
        if begins_from_best and self._is_out_of_time():
            self.log.say(f"{stage.name}: left out, the minutes are over")
            return
        self.log.begin_stage(stage.name, progress, stage.n_steps)
        if begins_from_best:
            self.replica.load_best()
        while not self._is_finished(stage):
            self._train_epoch(stage, preparer)
            self._end_epoch(stage)

    def _is_finished(self, stage: Stage) -> bool:
        if self.progress.batch > 0:  # an epoch that has begun is ended, with its validation
            return False
        patience = stage.settings.patience
        is_out_of_patience = patience is not None and self.progress.bad_validations >= patience
        return self.progress.step >= stage.n_steps or is_out_of_patience or self._is_out_of_time()

    def _train_epoch(self, stage: Stage, preparer: WorkerThreads) -> None:
        """All batches that are left of it: none, if the run was interrupted after the last one."""
        progress, started = self.progress, time.monotonic()
        for batch in stage.batches.epoch(progress.epoch, progress.batch, preparer):
            loss, (n_sequences, wants_stop, wants_save) = self._step(stage, batch)
            if not math.isfinite(loss):
                raise ValueError("the loss is no longer a number: lower the stage's learning_rate and train again")
            progress.loss_sum += loss
            progress.step += 1
            progress.batch += 1
            progress.sequences += int(n_sequences)
            progress.seconds += time.monotonic() - started
            started = time.monotonic()
            self.log.step(progress)
            if wants_stop or wants_save:
                self._save()
            if wants_stop:
                raise Interrupted

    def _step(self, stage: Stage, batch: Batch) -> tuple[float, list[float]]:
        """The mean loss of all processes, and the sums of their signals: what any of them wants, all do."""
        wants_save = self.replica.group.is_first and time.monotonic() - self.last_save > SAVE_EVERY
        signals = [batch.n_sequences, self.should_stop(), wants_save]
        seed = stage.batches.seed_of(self.progress.step)
        return self.replica.step(batch, seed, self._learning_rate(stage), signals)

    def _learning_rate(self, stage: Stage) -> float:
        """Linear decay to zero over the stage, multiplied by a linear warm-up."""
        step = self.progress.step
        warm = min(1.0, (step + 1) / (self.config.training.warmup_steps + 1))
        return stage.settings.learning_rate * warm * max(0.0, 1 - step / stage.n_steps)

    def _end_epoch(self, stage: Stage) -> None:
        progress = self.progress
        progress.epoch += 1
        is_due = progress.epoch % self.config.training.validate_every == 0
        if is_due or progress.step == stage.n_steps or self._is_out_of_time():
            self._validate(stage)
        progress.batch, progress.loss_sum = 0, 0.0  # only now: the event has the epoch's mean loss
        if is_due and not self._is_finished(stage):
            self._save()

    def _end_stage(self) -> None:
        progress = self.progress
        if self.keep_stages:
            self.replica.save_best(self.directory.path / f"stage-{progress.stage}.safetensors")
        progress.stage += 1
        progress.epoch = progress.step = progress.batch = progress.bad_validations = 0
        self.replica.reset_optimizer()
        self._save()

    def _validate(self, stage: Stage) -> None:
        """Keep the weights if they are the best so far; without a validation set the latest are."""
        progress = self.progress
        metrics = {} if self.validation is None else self._metrics(self.validation)
        ndcg = metrics.get("ndcg@10", progress.best)
        is_best = self.validation is None or ndcg > progress.best
        if is_best:
            progress.best, progress.bad_validations = ndcg, 0
            progress.best_stage, progress.best_epoch = progress.stage, progress.epoch
            self.replica.keep_best()
        else:
            progress.bad_validations += 1
        event: dict[str, float | int | str] = {
            "stage": stage.name,
            "epoch": progress.epoch,
            "step": progress.step,
            "loss": progress.mean_loss,
            "learning_rate": self._learning_rate(stage),
            "seconds": round(progress.seconds, 3),
            "sequences_per_second": round(progress.sequences / progress.seconds, 1),
            **metrics,
        }
        progress.history.append(event)
        self.log.epochs_done(event, is_best=is_best)

    def _metrics(self, validation: HeldOut) -> dict[str, float]:
        started = time.monotonic()
        ranks = self.replica.rank(validation, exclude_seen=self.config.evaluation.exclude_seen)
        metrics = {f"{name.lower()}@10": float(METRICS[name](ranks, 10).mean()) for name in ("NDCG", "HR")}
        self.progress.seconds += time.monotonic() - started
        return metrics

    def _is_out_of_time(self) -> bool:
        """By the first process's clock."""
        if self.max_minutes is None:
            return False
        return bool(self.replica.group.from_first(self.progress.seconds >= 60 * self.max_minutes))

    def _save(self) -> None:
        save_checkpoint(self.directory, self.progress, self.replica.tensors(), self.replica.group)
        self.last_save = time.monotonic()

    def _restore(self) -> None:
        self.progress, tensors = load_checkpoint(self.directory)
        self.replica.group.check_same(checkpoint=asdict(self.progress))
        self.replica.restore(tensors)
        self.log.rewind(self.progress.history)
        if self.progress.stage < len(self.stages):
            name = self.stages[self.progress.stage].name
            self.log.say(f"resuming from epoch {self.progress.epoch + 1} of {name}")
