"""How many epochs fit into a time budget, found out before training.

A run that stopped when a clock says so could not be repeated to the bit, and its learning rate
would be cut off in mid-decay. So a throw-away copy of the model is trained for a few seconds, and
the time of its steps becomes a number of epochs: an ordinary setting that a resumed or repeated run
reads. The learning rate then reaches zero at the end of what fits.

As a machine may become slower than it was in the rehearsal, `training.minutes` also stops a run at
`HARD_STOP` times its budget. Models that fit themselves have no epochs: the budget does not apply
to them, and they are left as they are.
"""

from __future__ import annotations

import dataclasses
import io
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from bert4rec.config import Config, Settings
from bert4rec.data.splits import Split
from bert4rec.evaluation.evaluate import full_ranks
from bert4rec.models import LEARNED, Model
from bert4rec.training.hardware import choose_hardware
from bert4rec.training.loop import Interrupted, stages_of, train, validation_sample
from bert4rec.training.plan import available_memory, check_memory
from bert4rec.training.progress import TrainingDisplay
from bert4rec.training.settled import settled

HARD_STOP = 1.3  # times the budget
MARGIN = 1.05  # the estimate is taken to be this much too low
SECOND_STAGE_SHARE = 0.3  # of the budget
MOST_VALIDATING = 0.15  # share of the time
WANTED_VALIDATIONS = 8  # in a run, when they can be afforded
WARM_UP_STEPS, TIMED_STEPS, ENOUGH_STEPS = 2, 8, 100
LONGEST = 5.0  # seconds to time a stage, once there are enough steps
REHEARSAL_SHARE = 0.025  # of the budget for each stage; a few steps are timed in any case
VALIDATION_USERS = 256
ENDLESS = 10**6  # epochs


@dataclasses.dataclass(frozen=True)
class Pace:
    """How long things take, in seconds."""

    epoch: float
    validation: float
    second_stage_epoch: float | None = None  # None without a second stage


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    config: Config
    seconds: float  # that it is expected to take; 0 where the budget does not apply


def epochs_within(split: Split, config: Config, minutes: float) -> Config:
    """`config` with as many epochs as fit into `minutes`, and at most those that it had."""
    return rehearse(split, config, minutes).config


def rehearse(split: Split, config: Config, minutes: float) -> Rehearsed:
    """The same, with the time that it is expected to take."""
    if config.model.name not in LEARNED:
        return Rehearsed(config, 0.0)
    pace = measure_pace(split, config, minutes)
    return fit_into(config, pace, minutes)


def fit_into(config: Config, pace: Pace, minutes: float) -> Rehearsed:
    """The numbers of epochs and validations that fill `minutes` at this pace."""
    budget = 60 * minutes / MARGIN
    shortest = pace.epoch + pace.validation
    if shortest > HARD_STOP * 60 * minutes:
        raise ValueError(
            f"the budget is {minutes:.3g} minutes, and one pass over the training data takes about "
            f"{shortest / 60:.2g}: give it more time with --budget, or train on less data"
        )
    has_second = pace.second_stage_epoch is not None
    first_budget = budget * (1 - SECOND_STAGE_SHARE) if has_second else budget
    at_most = min(config.training.epochs, max(1, int(first_budget / pace.epoch)))
    every = min(config.training.validate_every, max(1, at_most // WANTED_VALIDATIONS))
    affordable = pace.validation * (1 - MOST_VALIDATING) / (MOST_VALIDATING * pace.epoch)
    every = min(max(every, math.ceil(affordable)), at_most)

    def that_fit(seconds: float, epoch: float) -> int:
        """A last validation may come after fewer than `every` epochs, hence the one put aside."""
        return max(1, int((seconds - pace.validation) / (epoch + pace.validation / every)))

    def taken_by(epochs: int, epoch: float) -> float:
        return epochs * epoch + math.ceil(epochs / every) * pace.validation

    epochs = min(config.training.epochs, that_fit(first_budget, pace.epoch))
    seconds = taken_by(epochs, pace.epoch)
    first = {"epochs": epochs, "validate_every": every, "minutes": HARD_STOP * minutes}
    update: dict[str, Settings] = {"training": config.training.model_copy(update=first)}
    if pace.second_stage_epoch is not None:
        left = max(budget - seconds, budget * SECOND_STAGE_SHARE)
        epochs = min(config.second_stage.epochs, that_fit(left, pace.second_stage_epoch))
        seconds += taken_by(epochs, pace.second_stage_epoch)
        update["second_stage"] = config.second_stage.model_copy(update={"epochs": epochs})
    return Rehearsed(config.model_copy(update=update), seconds)


def measure_pace(split: Split, config: Config, minutes: float) -> Pace:
    """Train a throw-away copy for a few seconds, by the same loop as the real one."""
    config = settled(config, split.n_items)
    check_memory(config, split.n_items, int(split.train.lengths.max()), available_memory())
    limit = min(LONGEST, REHEARSAL_SHARE * 60 * minutes)
    endless = _endless(config)
    model, epoch = _rehearse(split, endless, stage=0, limit=limit)
    validation = _validation_seconds(model, split, config)
    if len(stages_of(split, config, LEARNED[config.model.name].task)) == 1:
        return Pace(epoch, validation)
    # The first stage has to be passed to get to the second, so both get a few of the users only.
    n = min(len(split.train), 4 * config.training.batch_size)
    rows = np.random.default_rng(config.training.seed).choice(len(split.train), n, replace=False)
    few = dataclasses.replace(split, train=split.train.take(np.sort(rows)))
    first = endless.training.model_copy(update={"epochs": 1})
    brief = endless.model_copy(update={"training": first})
    _, second = _rehearse(few, brief, stage=1, limit=limit)
    return Pace(epoch, validation, second * len(split.train) / n)


def _endless(config: Config) -> Config:
    """Nothing but steps until it is stopped: no validations, which are timed apart."""
    first = {
        "epochs": ENDLESS,
        "validate_every": ENDLESS,
        "validation_users": 1,
        "patience": None,
        "checkpoint_minutes": ENDLESS,
        "minutes": None,
    }
    second = {"epochs": ENDLESS if config.second_stage.epochs else 0, "patience": None}
    return config.model_copy(
        update={
            "training": config.training.model_copy(update=first),
            "second_stage": config.second_stage.model_copy(update=second),
        }
    )


def _rehearse(split: Split, config: Config, *, stage: int, limit: float) -> tuple[Model, float]:
    """A model after some steps of that stage, and the seconds of an epoch of it."""
    torch.manual_seed(config.training.seed)
    n_users = 1 + max(int(users.max()) for users in (split.train.users, split.validation.users))
    model = LEARNED[config.model.name](split.n_items, config.model, n_users)
    with tempfile.TemporaryDirectory() as folder:
        watch = _Stopwatch(Path(folder), stage, limit)
        try:
            train(
                model,
                split,
                config,
                Path(folder),
                watch,
                identity={},
                hardware=choose_hardware(config.training),
                should_stop=watch.has_seen_enough,
            )
        except Interrupted:
            pass
        else:
            raise AssertionError("an endless training came to its end")
    return model.to("cpu").eval(), watch.seconds_a_step() * watch.total / ENDLESS


class _Stopwatch(TrainingDisplay):
    """Stands where the view of a run stands, and times the steps of one stage."""

    def __init__(self, run: Path, wanted_stage: int, limit: float) -> None:
        super().__init__(run, Console(file=io.StringIO()))
        self.wanted_stage, self.limit = wanted_stage, limit
        self.stages_begun, self.total = 0, 0
        self.ends: list[float] = []  # moments when steps of the wanted stage ended

    def stage(self, name: str, done: int, total: int) -> None:
        self.stages_begun, self.total = self.stages_begun + 1, total

    def step(self, done: int, epoch: int, loss: float, n_sequences: int) -> None:
        if self.stages_begun == self.wanted_stage + 1:
            self.ends.append(time.monotonic())

    def validated(self, event: dict[str, Any], is_best: bool) -> None:
        """The first stage ends with one, on a single user."""

    def has_seen_enough(self) -> bool:
        n_timed = len(self.ends) - WARM_UP_STEPS
        if n_timed < 2:
            return False
        seconds = self.ends[-1] - self.ends[0]
        if n_timed >= TIMED_STEPS:
            return seconds > self.limit or n_timed >= ENOUGH_STEPS
        return seconds > 2 * self.limit

    def seconds_a_step(self) -> float:
        ends = self.ends[WARM_UP_STEPS - 1 :]
        return (ends[-1] - ends[0]) / (len(ends) - 1)


def _validation_seconds(model: Model, split: Split, config: Config) -> float:
    questions = validation_sample(split, config)
    few = questions.sample(VALIDATION_USERS, config.training.seed)

    def seconds() -> float:
        started = time.monotonic()
        full_ranks(
            model,
            few,
            exclude_seen=config.evaluation.exclude_seen,
            n_workers=config.training.workers,
        )
        return time.monotonic() - started

    seconds()  # the first time is slower
    return seconds() * len(questions) / len(few)
