"""The training loop: stages, schedule, validation, early stopping, checkpoints.

The same loop trains in one process and in several. Whatever decides how it goes on (the loss, a
validation, the clock, a signal) is told to all processes, so that all do the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert4rec.allocator import keep_freed_memory
from bert4rec.config import Config, SecondStageConfig, TrainingConfig
from bert4rec.data.splits import Questions, Spans, Split
from bert4rec.evaluation.metrics import METRICS
from bert4rec.models.first_bias import first_bias
from bert4rec.models.learned import Learned, TaskName
from bert4rec.parallel import Workers
from bert4rec.training.batches import (
    TASKS,
    Batch,
    Task,
    epoch_order,
    joined,
    last_item_task,
    make_batch,
)
from bert4rec.training.checkpoint import (
    Checkpoint,
    Progress,
    load_checkpoint,
    save_checkpoint,
)
from bert4rec.training.distributed import ALONE, Ranks, differences, launch_id
from bert4rec.training.hardware import Hardware
from bert4rec.training.losses import make_loss
from bert4rec.training.progress import TrainingDisplay
from bert4rec.training.replica import Replica, Stepped, ToldByAll, Trainee
from bert4rec.training.settled import settled
from bert4rec.training.sharded import ShardedItems, room_for
from bert4rec.training.shards import WHOLE, Shards, share_of_batch

MakeTask = Callable[[Spans, int, Config], Task]


@dataclass(frozen=True)
class Stage:
    name: str
    tasks: tuple[Task, ...]  # one for each shard of this process
    epochs: int
    learning_rate: float
    warmup_steps: int
    patience: int | None
    steps: int | None = None  # at most


class Interrupted(Exception):
    """Training was asked to stop; the checkpoint is saved and `--resume` goes on from it."""


def stages_of(
    split: Split, config: Config, name: TaskName = "cloze", shards: Shards = WHOLE
) -> list[Stage]:
    """The model's own task, and for the Cloze task the last-item stage after it."""
    first, second = config.training, config.second_stage
    users = [shards.part(split.train, shard) for shard in shards.mine]

    def stage(name: str, make: MakeTask, settings: TrainingConfig | SecondStageConfig) -> Stage:
        tasks = tuple(make(part, split.n_items, config) for part in users)
        rate, warmup = settings.learning_rate, settings.warmup_steps
        steps = settings.steps if isinstance(settings, TrainingConfig) else None
        return Stage(name, tasks, settings.epochs, rate, warmup, settings.patience, steps)

    names = stage_names(config, name)
    stages = [stage(names[0], TASKS[name], first)]
    if len(names) == 2:
        stages.append(stage(names[1], last_item_task, second))
    return stages


def stage_names(config: Config, name: TaskName) -> list[str]:
    """As they are called in the log."""
    is_cloze = name == "cloze"
    asks_next_only = is_cloze and config.training.next_item_share == 1
    second = ["last-item"] if is_cloze and config.second_stage.epochs else []
    return ["next-item" if asks_next_only else name, *second]


def share_of_steps(stage: Stage, ranks: Ranks, config: Config) -> tuple[list[int], int]:
    """How many windows a step takes of each shard of this process, and the steps of an epoch."""
    n_windows = [len(task.windows(np.random.default_rng(0))) for task in stage.tasks]
    n_all = int(ranks.sums(sum(n_windows))[0])
    batch_size = config.training.batch_size
    sizes = [max(1, share_of_batch(n, n_all, batch_size)) if n else 1 for n in n_windows]
    longest = max(-(-n // size) for n, size in zip(n_windows, sizes, strict=True))
    return sizes, max(ranks.gathered(longest))


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
    ranks: Ranks = ALONE,
    shards: Shards = WHOLE,
) -> Progress:
    """Train `model` in place to its best validation NDCG@10; checkpoints go to `run`.

    Of several `ranks` each calls it at the same time, with its own `shards` of the users.
    """
    keep_freed_memory()
    config = settled(config, split.n_items)
    if config.training.on_validation:
        split = split.training_on_validation()
    n_workers = config.training.workers if hardware.device.type == "cpu" else 1
    with Workers(n_workers) as workers, Workers(1) as preparer:
        loss = make_loss(config.training, split.train_counts)
        stages = stages_of(split, config, model.task, shards)
        bias = first_bias(config.model.bias_init, split.train_counts)
        trainee: Trainee
        if config.training.shard_items:
            sizes = [sum(share_of_steps(each, ranks, config)[0]) for each in stages]
            room = room_for(config, split.n_items, max(sizes))
            small = type(model)(room, config.model)
            trainee = ShardedItems(small, bias, loss, config, workers, hardware, ranks)
        else:
            model.start_with_bias(bias)
            model.to(hardware.device)
            trainee = Replica(model, loss, config.training, workers, hardware, ranks)
        trainer = _Trainer(
            trainee,
            stages,
            validation_sample(split, config),
            config,
            run,
            display,
            identity,
            should_stop,
            ranks,
            shards,
            _BatchMaker(model, config.training.seed, workers.n, preparer),
        )
        threads = f"{workers.n} worker{'s' * (workers.n > 1)}"
        if ranks.n > 1:
            threads = f"{ranks.n} processes with {threads} each"
        display.say(f"training on {hardware}, {threads}, {config.training.loss}")
        if resume:
            trainer.restore()
        else:
            display.rewind_log([])
        if config.training.on_validation:
            display.say("the validation items are trained on: nothing is validated")
        elif note := unreachable_note(trainer.questions, config.evaluation.exclude_seen):
            display.say(note)
        for number, stage in enumerate(trainer.stages):
            if number == trainer.progress.stage:
                trainer.run_stage(stage)
        trainee.finish(model)
    return trainer.progress


@dataclass(frozen=True)
class _BatchMaker:
    """Makes this process's part of every batch, in the background."""

    model: Learned
    seed: int
    n_workers: int
    preparer: Workers

    def rest_of_epoch(
        self, stage: Stage, shards: Shards, progress: Progress, sizes: list[int], n_steps: int
    ) -> Iterator[Batch]:
        """The batches that are left of an epoch, while the steps before them are computed."""
        place = [self.seed, progress.stage, progress.epoch]
        dealt = []
        for shard, task, size in zip(shards.mine, stage.tasks, sizes, strict=True):
            generator = np.random.default_rng([*place, shard])
            windows = task.windows(generator)
            dealt.append((shard, task, windows, epoch_order(len(windows), size, generator)))
        first_step = progress.step - progress.batch
        number_of_stage = progress.stage

        def make(number: int) -> Batch:
            parts = []
            for shard, task, windows, order in dealt:
                if number < len(order):
                    seed = self.seed_of(number_of_stage, first_step + number, shard)
                    masks = torch.Generator().manual_seed(seed)
                    size = self.model.piece
                    parts.append(
                        make_batch(
                            task,
                            windows,
                            order[number],
                            self.model.pad,
                            masks,
                            size,
                            self.n_workers,
                        )
                    )
            return joined(parts)

        return self.preparer.stream(make, range(progress.batch, n_steps), ahead=2)

    def seed_of(self, stage: int, step: int, shard: int = 0) -> int:
        """What is random in a step follows from the run's seed and the step's place alone."""
        place = [self.seed, stage, step, shard]
        return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> 1)


class _Trainer:
    """The state that the steps of one run share."""

    def __init__(
        self,
        trainee: Trainee,
        stages: list[Stage],
        questions: Questions,
        config: Config,
        run: Path,
        display: TrainingDisplay,
        identity: dict[str, Any],
        should_stop: Callable[[], bool],
        ranks: Ranks,
        shards: Shards,
        batches: _BatchMaker,
    ) -> None:
        self.trainee, self.stages, self.questions, self.config = trainee, stages, questions, config
        self.run, self.display, self.identity = run, display, identity
        self.should_stop, self.ranks, self.shards, self.batches = (
            should_stop,
            ranks,
            shards,
            batches,
        )
        self.progress = Progress()
        self.last_save = time.monotonic()

    def restore(self) -> None:
        checkpoint = load_checkpoint(self.run)
        if checkpoint is None:
            raise ValueError(f"{self.run} has no checkpoint to resume from: train without --resume")
        if checkpoint.identity != self.identity:
            differing = differences(checkpoint.identity, self.identity)
            raise ValueError(
                f"the checkpoint in {self.run} belongs to another run (different: {differing}): "
                "resume with the same data and settings, or train into another directory"
            )
        self.ranks.check_same(checkpoint=asdict(checkpoint.progress))
        self.progress = checkpoint.progress
        self.trainee.restore(checkpoint.state)
        self.display.rewind_log(self.progress.history)
        name = self.stages[min(self.progress.stage, len(self.stages) - 1)].name
        self.display.say(f"going on from epoch {self.progress.epoch + 1} of {name}")

    def save(self) -> None:
        state = Checkpoint(self.progress, self.trainee.state(), self.identity, launch_id())
        save_checkpoint(self.run, state, self.ranks)
        self.last_save = time.monotonic()

    def run_stage(self, stage: Stage) -> None:
        progress = self.progress
        sizes, steps_an_epoch = share_of_steps(stage, self.ranks, self.config)
        total = stage.epochs * steps_an_epoch
        total = total if stage.steps is None else min(total, stage.steps)
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
            self.trainee.use_best()  # from the best of the stage before, not its last
        has_patience_left = True
        while progress.step < total and has_patience_left:
            if progress.batch == 0 and self._is_out_of_time():  # an epoch that has begun is ended
                break
            started = time.monotonic()
            n_steps = min(steps_an_epoch, total - progress.step + progress.batch)
            for batch in self.batches.rest_of_epoch(stage, self.shards, progress, sizes, n_steps):
                learning_rate = _learning_rate(stage, progress.step, total)
                loss, told = self._step(batch, learning_rate)
                progress.loss_sum += loss
                progress.step += 1
                progress.batch += 1
                n_sequences = int(told.n_sequences)
                progress.sequences += n_sequences
                progress.seconds += time.monotonic() - started
                started = time.monotonic()
                self.display.step(
                    progress.step, progress.epoch + 1, progress.mean_loss, n_sequences
                )
                if told.wants_to_stop or told.wants_to_save:
                    self.save()
                if told.wants_to_stop:
                    raise Interrupted
            progress.epoch += 1
            every = self.config.training.validate_every
            is_last = progress.step == total or self._is_out_of_time()
            if progress.epoch % every == 0 or is_last:
                learning_rate = _learning_rate(stage, progress.step, total)
                if self.config.training.on_validation:
                    self._take(stage, learning_rate)
                else:
                    self._validate(stage, learning_rate)
                patience = stage.patience
                has_patience_left = patience is None or progress.bad_validations < patience
            progress.batch, progress.loss_sum = 0, 0.0
            if progress.epoch % every == 0 and has_patience_left:
                self.save()
        if self.config.training.keep_stages:
            self.trainee.save_best(self.run / f"{stage.name}.safetensors")
        progress.stage += 1
        progress.epoch = progress.step = progress.batch = progress.bad_validations = 0
        self.trainee.start_afresh()
        self.save()

    def _step(self, batch: Batch, learning_rate: float) -> Stepped:
        """With what all have to agree on: who was asked to stop, and whether it is time to save."""
        seed = self.batches.seed_of(self.progress.stage, self.progress.step)
        minutes = self.config.training.checkpoint_minutes
        is_due = self.ranks.is_first and time.monotonic() - self.last_save > 60 * minutes
        told = ToldByAll(self.should_stop(), is_due, batch.n_sequences)
        return self.trainee.step(batch, seed, learning_rate, told)

    def _validate(self, stage: Stage, learning_rate: float) -> None:
        progress, started = self.progress, time.monotonic()
        exclude_seen = self.config.evaluation.exclude_seen
        ranks = self.trainee.ranks_of(self.questions, exclude_seen=exclude_seen)
        ndcg, hit_rate = (float(METRICS[name](ranks, 10).mean()) for name in ("NDCG", "HR"))
        progress.seconds += time.monotonic() - started
        is_best = ndcg > progress.best
        if is_best:
            progress.best, progress.bad_validations = ndcg, 0
            progress.best_stage, progress.best_epoch = progress.stage, progress.epoch
            self.trainee.keep_best()
        else:
            progress.bad_validations += 1
        event = self._event(stage, learning_rate) | {"ndcg@10": ndcg, "hr@10": hit_rate}
        progress.history.append(event)
        self.display.validated(event, is_best)

    def _take(self, stage: Stage, learning_rate: float) -> None:
        """The last weights are the best where the validation items are trained on."""
        progress = self.progress
        progress.best_stage, progress.best_epoch = progress.stage, progress.epoch
        self.trainee.keep_best()
        event = self._event(stage, learning_rate)
        progress.history.append(event)
        self.display.trained(event)

    def _event(self, stage: Stage, learning_rate: float) -> dict[str, float | int | str]:
        progress = self.progress
        return {
            "stage": stage.name,
            "epoch": progress.epoch,
            "step": progress.step,
            "loss": progress.mean_loss,
            "learning_rate": learning_rate,
            "seconds": round(progress.seconds, 3),
            "sequences_per_second": round(progress.sequences / progress.seconds, 1),
        }

    def _is_out_of_time(self) -> bool:
        """By the first process's clock."""
        minutes = self.config.training.minutes
        if minutes is None:
            return False
        is_over: bool = self.ranks.of_first(self.progress.seconds >= 60 * minutes)
        return is_over


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
