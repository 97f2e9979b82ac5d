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

CHECKPOINT_SECONDS = 120.0  # at most, within an epoch; validations and stages save, too


@dataclass(frozen=True)
class TrainingStage:
    name: str  # in the log
    settings: StageSettings
    batches: StageBatches

    @property
    def n_steps(self) -> int:
        return self.settings.epochs * self.batches.steps_per_epoch


class TrainingLoop:
    """Trains the stages in turn, each from the best weights so far: by validation NDCG@10, over all stages.

    The run ends with the best; without a validation set with the last. The authors' code trains one
    stage for a fixed number of steps.
    """

    def __init__(
        self,
        replica: Replica,
        stages: list[TrainingStage],
        validation: HeldOut | None,
        config: RunConfig,
        directory: RunDirectory,
        log: RunLog,
        *,
        max_minutes: float | None = None,  # stop after the epoch that reaches this
        keep_stages: bool = False,  # also write the best weights at the end of each stage
    ) -> None:
        self.replica, self.stages, self.validation = replica, stages, validation
        self.config, self.directory, self.log = config, directory, log
        self.max_minutes, self.keep_stages = max_minutes, keep_stages
        self.progress = Progress()
        self.last_save = time.monotonic()

    def run(self, should_stop: Callable[[], bool], *, resume: bool = False) -> Progress:
        """Train the stages that are left.

        `should_stop` is called after every step. When it is true a checkpoint is saved, and
        `Interrupted` is raised.
        """
        self.should_stop = should_stop
        if resume:
            self._restore()
        else:
            self.log.rewind([])
        with WorkerThreads(1) as batch_thread:
            while self.progress.stage_index < len(self.stages):
                self._train_stage(self.stages[self.progress.stage_index], batch_thread)
                self._end_stage()
        return self.progress

    def _train_stage(self, stage: TrainingStage, batch_thread: WorkerThreads) -> None:
        progress = self.progress
        if stage.n_steps == 0:
            self.log.say(f"{stage.name}: skipped, no history is long enough to train on")
            return
        starts_from_best = progress.stage_index > 0 and progress.step == 0  # the best of the stages before
        if starts_from_best and self._is_out_of_time():
            self.log.say(f"{stage.name}: skipped, --minutes is reached")
            return
        self.log.begin_stage(stage.name, progress, stage.n_steps)
        if starts_from_best:
            self.replica.load_best()
        while not self._is_finished(stage):
            self._train_epoch(stage, batch_thread)
            self._end_epoch(stage)

    def _is_finished(self, stage: TrainingStage) -> bool:
        if self.progress.batch > 0:  # finish an epoch that has begun, and its validation
            return False
        patience = stage.settings.patience
        is_out_of_patience = patience is not None and self.progress.bad_validations >= patience
        return self.progress.step >= stage.n_steps or is_out_of_patience or self._is_out_of_time()

    def _train_epoch(self, stage: TrainingStage, batch_thread: WorkerThreads) -> None:
        """Train on the batches that are left: none, if the run was interrupted after the last one."""
        progress, started = self.progress, time.monotonic()
        for batch in stage.batches.epoch(progress.epoch, progress.batch, batch_thread):
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

    def _step(self, stage: TrainingStage, batch: Batch) -> tuple[float, list[float]]:
        """One step of the optimizer; returns the mean loss over all processes, and sums over them.

        These are of the sequences trained and of who wants to stop or to save: if one does, all do.
        """
        wants_save = self.replica.group.is_first and time.monotonic() - self.last_save > CHECKPOINT_SECONDS
        sums = [batch.n_sequences, self.should_stop(), wants_save]
        seed = stage.batches.seed_of(self.progress.step)
        return self.replica.step(batch, seed, self._learning_rate(stage), sums)

    def _learning_rate(self, stage: TrainingStage) -> float:
        """Linear decay to zero over the epochs of the stage, as in the paper, and a linear warm-up, as in its code."""
        step = self.progress.step
        warm = min(1.0, (step + 1) / (self.config.training.warmup_steps + 1))
        return stage.settings.learning_rate * warm * max(0.0, 1 - step / stage.n_steps)

    def _end_epoch(self, stage: TrainingStage) -> None:
        progress = self.progress
        progress.epoch += 1
        validation_is_due = progress.epoch % self.config.training.validate_every == 0
        if validation_is_due or progress.step == stage.n_steps or self._is_out_of_time():
            self._validate(stage)
        progress.batch, progress.loss_sum = 0, 0.0  # after the event, which has the epoch's mean loss
        if validation_is_due and not self._is_finished(stage):
            self._save()

    def _end_stage(self) -> None:
        progress = self.progress
        if self.keep_stages:
            self.replica.save_best(self.directory.path / f"stage-{progress.stage_index}.safetensors")
        progress.stage_index += 1
        progress.epoch = progress.step = progress.batch = progress.bad_validations = 0
        self.replica.reset_optimizer()
        self._save()

    def _validate(self, stage: TrainingStage) -> None:
        """Keep the weights if they are the best so far. Without a validation set the latest are the best."""
        progress = self.progress
        metrics = {} if self.validation is None else self._metrics(self.validation)
        ndcg = metrics.get("ndcg@10", progress.best_ndcg)
        is_best = self.validation is None or ndcg > progress.best_ndcg
        if is_best:
            progress.best_ndcg, progress.bad_validations = ndcg, 0
            progress.best_stage, progress.best_epoch = progress.stage_index, progress.epoch
            self.replica.keep_best()
        else:
            progress.bad_validations += 1
        event: dict[str, float | int | str] = {
            "stage": stage.name,
            "epoch": progress.epoch,
            "step": progress.step,
            "loss": progress.mean_loss,
            "learning_rate": self._learning_rate(stage),
            "seconds": round(progress.seconds, 3),  # of the run so far, validations included; so is the next
            "sequences_per_second": round(progress.sequences / progress.seconds, 1),
            **metrics,
        }
        progress.events.append(event)
        self.log.epochs_done(event, is_best=is_best)

    def _metrics(self, validation: HeldOut) -> dict[str, float]:
        """HR@10 and NDCG@10 over all items."""
        started = time.monotonic()
        ranks = self.replica.held_out_ranks(validation, exclude_seen=self.config.evaluation.exclude_seen)
        metrics = {f"{name.lower()}@10": float(METRICS[name](ranks, 10).mean()) for name in ("NDCG", "HR")}
        self.progress.seconds += time.monotonic() - started
        return metrics

    def _is_out_of_time(self) -> bool:
        """By the clock of the first process. All processes must call it at the same moment."""
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
        self.log.rewind(self.progress.events)
        if self.progress.stage_index < len(self.stages):
            name = self.stages[self.progress.stage_index].name
            self.log.say(f"resuming from epoch {self.progress.epoch + 1} of {name}")
