"""How long a training takes on this machine, from some steps of a throw-away model."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bert4rec.config import RunConfig
from bert4rec.data.splits import HeldOut, Split
from bert4rec.threads import WorkerThreads
from bert4rec.training.hardware import choose_hardware
from bert4rec.training.loop import TrainingStage
from bert4rec.training.process_group import SINGLE_PROCESS
from bert4rec.training.replica import Replica
from bert4rec.training.setup import build_model, build_stages, training_split, validation_users

WARM_UP_STEPS, FEWEST_STEPS, MOST_STEPS = 2, 8, 100
TIMING_RATE = 1e-6  # so small that the model stays one
VALIDATION_USERS = 256


@dataclass(frozen=True)
class StageTime:
    seconds_per_step: float
    steps_per_epoch: int
    seconds_per_validation: float

    @property
    def seconds_per_epoch(self) -> float:
        return self.seconds_per_step * self.steps_per_epoch


def time_stages(split: Split, config: RunConfig, seconds: float) -> list[StageTime]:
    """One entry per stage, each from about `seconds` of training steps."""
    split = training_split(split, config)
    n_users = 1 + max(int(users.max()) for users in (split.train.users, split.validation.users))
    model = build_model(config, split.n_items, n_users)
    hardware = choose_hardware(config.training)
    model.to(hardware.device)
    with hardware.workers(config.training) as workers:
        decay, loss = config.training.weight_decay, config.loss.build(split.train_counts)
        replica = Replica(model, loss, decay, workers, hardware, SINGLE_PROCESS)
        stages = build_stages(config, split, workers.n)
        per_step = [_seconds_per_step(replica, stage, seconds) for stage in stages]
        validation = _seconds_of_validation(replica, validation_users(split, config), config)
    return [
        StageTime(found, stage.batches.steps_per_epoch, validation)
        for found, stage in zip(per_step, stages, strict=True)
    ]


def _seconds_per_step(replica: Replica, stage: TrainingStage, seconds: float) -> float:
    """Of steps that change nothing but the throw-away model; the first ones do not count."""
    ends: list[float] = []
    with WorkerThreads(1) as batch_thread:
        while stage.n_steps and len(ends) < MOST_STEPS:
            for number, batch in enumerate(stage.batches.epoch(0, 0, batch_thread)):
                replica.step(batch, stage.batches.seed_of(number), TIMING_RATE, [])
                ends.append(time.monotonic())
                timed = ends[WARM_UP_STEPS:]
                if len(timed) > FEWEST_STEPS and timed[-1] - timed[0] > seconds:
                    return (timed[-1] - timed[0]) / (len(timed) - 1)
    return (ends[-1] - ends[0]) / max(1, len(ends) - 1) if ends else 0.0


def _seconds_of_validation(replica: Replica, validation: HeldOut | None, config: RunConfig) -> float:
    if validation is None:
        return 0.0
    few = validation.sample(VALIDATION_USERS, config.training.seed)

    def seconds() -> float:
        started = time.monotonic()
        replica.held_out_ranks(few, exclude_seen=config.evaluation.exclude_seen)
        return time.monotonic() - started

    seconds()  # the first time is slower
    return seconds() * len(validation) / len(few)
