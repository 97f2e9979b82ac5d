"""The training loop: stages, learning rate, validation, early stopping, checkpoints.

The same loop trains in one process and in several. Every value that affects the control flow (the
loss, a validation, the clock, a signal) is shared among the processes, so that all take the same
branch. What a step computes is in replica.py; the loss comes from bert4rec.losses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bert4rec.config import TrainingSettings
from bert4rec.data.splits import HeldOut
from bert4rec.evaluation.metrics import METRICS
from bert4rec.interrupts import Interrupted
from bert4rec.objectives import StageSettings
from bert4rec.threads import WorkerThreads
from bert4rec.training.batches import Batch, StageBatches
from bert4rec.training.checkpoint import Checkpoint, Progress, load_checkpoint, save_checkpoint
from bert4rec.training.process_group import StepSignals, differences
from bert4rec.training.replica import StepResult, Trainee
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


@dataclass(frozen=True)
class RunDirectory:
    """Where checkpoints go, and what they belong to."""

    path: Path
    identity: dict[str, Any]  # the configuration and data of the run
    launch: str | None = None  # id of this multi-process launch, if it has one


def _never() -> bool:
    return False


@dataclass(frozen=True)
class LoopOptions:
    """How a run is carried out; none of these changes what is learned."""

    exclude_seen: bool = True  # in validations
    max_minutes: float | None = None  # stop after the epoch in which this is reached
    keep_stages: bool = False  # write the best weights so far at the end of each stage
    should_stop: Callable[[], bool] = _never  # whether to save and stop after this step


class TrainingLoop:
    """Trains to the best validation NDCG@10, or to the end where `validation` is None."""

    def __init__(
        self,
        trainee: Trainee,
        stages: list[Stage],
        validation: HeldOut | None,
        training: TrainingSettings,
        directory: RunDirectory,
        log: RunLog,
        options: LoopOptions = LoopOptions(),  # noqa: B008
    ) -> None:
        self.trainee, self.stages, self.validation = trainee, stages, validation
        self.training, self.directory, self.log = training, directory, log
        self.options = options
        self.progress = Progress()
        self.last_save = time.monotonic()

    def run(self, *, resume: bool = False) -> Progress:
        """All stages that are left; `Interrupted` after a checkpoint when a stop is requested."""
        if resume:
            self._restore()
        else:
            self.log.rewind([])
        with WorkerThreads(1) as preparer:
            while self.progress.stage < len(self.stages):
                stage = self.stages[self.progress.stage]
                self._run_stage(stage, preparer)
                self._end_stage()
        return self.progress

    def _run_stage(self, stage: Stage, preparer: WorkerThreads) -> None:
        progress = self.progress
        if (reason := self._reason_to_skip(stage)) is not None:
            self.log.say(f"{stage.name}: left out, {reason}")
            return
        self.log.begin_stage(stage.name, progress.step, stage.n_steps)
        if progress.stage > 0 and progress.step == 0:
            self.trainee.load_best()  # the best so far, of any stage
        while not self._is_finished(stage):
            self._train_epoch(stage, preparer)
            self._end_epoch(stage)

    def _reason_to_skip(self, stage: Stage) -> str | None:
        """Of a stage that has not begun; the first stage cannot be skipped."""
        is_first, has_begun = self.progress.stage == 0, self.progress.step > 0
        if stage.n_steps == 0 and is_first:
            raise ValueError(
                "no history is long enough to train on: the model needs users with two or more "
                "actions in the training part; use more data or weaker filters"
            )
        if stage.n_steps == 0:
            return "no history is long enough to train on"
        if not is_first and not has_begun and self._is_out_of_time():
            return "the minutes are over"
        return None

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
            result = self._step(stage, batch)
            progress.loss_sum += result.loss
            progress.step += 1
            progress.batch += 1
            progress.sequences += int(result.signals.n_sequences)
            progress.seconds += time.monotonic() - started
            started = time.monotonic()
            self.log.step(progress, int(result.signals.n_sequences))
            if result.signals.wants_stop or result.signals.wants_save:
                self._save()
            if result.signals.wants_stop:
                raise Interrupted

    def _step(self, stage: Stage, batch: Batch) -> StepResult:
        is_due = time.monotonic() - self.last_save > SAVE_EVERY
        wants_save = self.trainee.group.is_first and is_due
        signals = StepSignals(
            wants_stop=self.options.should_stop(), wants_save=wants_save, n_sequences=batch.n_sequences
        )
        seed = stage.batches.seed_of(self.progress.step)
        return self.trainee.step(batch, seed, self._learning_rate(stage), signals)

    def _learning_rate(self, stage: Stage) -> float:
        """Linear decay to zero over the stage, multiplied by a linear warm-up."""
        step = self.progress.step
        warm = min(1.0, (step + 1) / (self.training.warmup_steps + 1))
        return stage.settings.learning_rate * warm * max(0.0, 1 - step / stage.n_steps)

    def _end_epoch(self, stage: Stage) -> None:
        progress = self.progress
        progress.epoch += 1
        is_due = progress.epoch % self.training.validate_every == 0
        if is_due or progress.step == stage.n_steps or self._is_out_of_time():
            if self.validation is None:
                self._keep_last(stage)
            else:
                self._validate(stage, self.validation)
        progress.batch, progress.loss_sum = 0, 0.0  # only now: the event has the epoch's mean loss
        if is_due and not self._is_finished(stage):
            self._save()

    def _end_stage(self) -> None:
        progress = self.progress
        if self.options.keep_stages:
            path = self.directory.path / f"stage-{progress.stage}.safetensors"
            self.trainee.save_best(path)
        progress.stage += 1
        progress.epoch = progress.step = progress.batch = progress.bad_validations = 0
        self.trainee.reset_optimizer()
        self._save()

    def _validate(self, stage: Stage, validation: HeldOut) -> None:
        progress, started = self.progress, time.monotonic()
        ranks = self.trainee.rank(validation, exclude_seen=self.options.exclude_seen)
        ndcg, hit_rate = (float(METRICS[name](ranks, 10).mean()) for name in ("NDCG", "HR"))
        progress.seconds += time.monotonic() - started
        is_best = ndcg > progress.best
        if is_best:
            progress.best, progress.bad_validations = ndcg, 0
            progress.best_stage, progress.best_epoch = progress.stage, progress.epoch
            self.trainee.keep_best()
        else:
            progress.bad_validations += 1
        event = self._event(stage) | {"ndcg@10": ndcg, "hr@10": hit_rate}
        progress.history.append(event)
        self.log.validated(event, is_best)

    def _keep_last(self, stage: Stage) -> None:
        """Without a validation set the latest weights count as best; patience does not apply."""
        progress = self.progress
        progress.best_stage, progress.best_epoch = progress.stage, progress.epoch
        self.trainee.keep_best()
        event = self._event(stage)
        progress.history.append(event)
        self.log.trained(event)

    def _event(self, stage: Stage) -> dict[str, float | int | str]:
        progress = self.progress
        return {
            "stage": stage.name,
            "epoch": progress.epoch,
            "step": progress.step,
            "loss": progress.mean_loss,
            "learning_rate": self._learning_rate(stage),
            "seconds": round(progress.seconds, 3),
            "sequences_per_second": round(progress.sequences / progress.seconds, 1),
        }

    def _is_out_of_time(self) -> bool:
        """By the first process's clock."""
        if self.options.max_minutes is None:
            return False
        is_over = self.progress.seconds >= 60 * self.options.max_minutes
        return bool(self.trainee.group.from_first(is_over))

    def _save(self) -> None:
        checkpoint = Checkpoint(self.progress, self.trainee.tensors(), self.directory.identity, self.directory.launch)
        save_checkpoint(self.directory.path, checkpoint, self.trainee.group)
        self.last_save = time.monotonic()

    def _restore(self) -> None:
        path = self.directory.path
        checkpoint = load_checkpoint(path)
        if checkpoint is None:
            raise ValueError(f"{path} has no checkpoint to resume from: train without --resume")
        if checkpoint.identity != self.directory.identity:
            names = differences(checkpoint.identity, self.directory.identity)
            raise ValueError(
                f"the checkpoint in {path} belongs to another run (different: {names}): "
                "resume with the same data and settings, or train into another directory"
            )
        self.trainee.group.check_same(checkpoint=asdict(checkpoint.progress))
        self.progress = checkpoint.progress
        self.trainee.restore(checkpoint.tensors)
        self.log.rewind(self.progress.history)
        if self.progress.stage < len(self.stages):
            name = self.stages[self.progress.stage].name
            self.log.say(f"resuming from epoch {self.progress.epoch + 1} of {name}")
