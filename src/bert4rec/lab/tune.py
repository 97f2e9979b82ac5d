"""The search for better settings of one model, judged by the validation items alone.

A trial is a training within the budget. What counts is the best validation NDCG@10 of it, and
trials that lag behind the median of the others are given up half-way (Optuna's median pruner).
The test items are taken out of the split before anything begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console

from bert4rec.config import Config
from bert4rec.data.sequences import Sequences
from bert4rec.data.splits import SPLITS, Questions, Split
from bert4rec.evaluation.evaluate import full_ranks
from bert4rec.evaluation.metrics import METRICS
from bert4rec.lab.search_space import Space, space_for, with_settings
from bert4rec.lab.study import (
    REPORT_EVERY_PERCENT,
    ask,
    best_of,
    finished,
    open_study,
    require_optuna,
    stop,
    terms_of,
)
from bert4rec.lab.tuned import Tuned, save_tuned, summary
from bert4rec.lab.tuning_view import TrialView, TuningView
from bert4rec.models import FITTED, LEARNED, MODELS
from bert4rec.training.hardware import choose_hardware
from bert4rec.training.loop import train, validation_sample
from bert4rec.training.plan import available_memory, check_memory
from bert4rec.training.rehearsal import epochs_within
from bert4rec.training.settled import settled

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

STARTUP_TRIALS = 5  # complete ones before any is given up
RUNNING = "running"  # folder of the checkpoints of the trial at work


class Pruned(Exception):
    """This trial is behind the others; its training is not worth going on with."""


class Stopped(Exception):
    """Ctrl-C or SIGTERM came; the trial at work is tried again when the study goes on."""


@dataclass(frozen=True)
class Trained:
    config: Config  # with the epochs that fitted into the budget
    ndcg: float


def tune(
    sequences: Sequences,
    start: Config,
    out: Path,
    console: Console,
    *,
    data_name: str,
    space: Space | None = None,
    n_trials: int = 30,
    minutes: float = 5.0,
    timeout_minutes: float | None = None,
    seed: int = 0,
    startup_trials: int = STARTUP_TRIALS,
) -> Tuned:
    """Run the trials that are missing of `n_trials`, and save the best settings as a recipe."""
    if start.model.name not in MODELS:
        raise ValueError(f"model.name is {start.model.name!r}: choose one of {', '.join(MODELS)}")
    if start.training.on_validation:
        raise ValueError(
            "training.on_validation leaves nothing to choose settings by: add "
            "--set training.on_validation=false"
        )
    if n_trials < 1:
        raise ValueError(f"--trials is {n_trials}: use one or more")
    start = settled(start, sequences.n_items)
    space = space_for(start) if space is None else space
    split = _without_test(SPLITS[start.data.split](sequences))
    terms = terms_of(sequences.fingerprint, start, space, minutes)
    n_users = sequences.n_users
    with (
        _terminated_as_by_ctrl_c(),
        open_study(out, terms, start, space, startup_trials=max(1, startup_trials)) as study,
    ):
        ends_at = np.inf if timeout_minutes is None else time.monotonic() + 60 * timeout_minutes
        budget = minutes if start.model.name in LEARNED else None  # the others have no epochs
        with TuningView(console, space, n_trials, budget, ends_at) as view:
            view.begin(study)
            while len(finished(study)) < n_trials and time.monotonic() < ends_at:
                trial = ask(study, space, seed)
                view.begin_trial()
                try:
                    _run(study, trial, split, start, space, out, view, n_users, minutes)
                except KeyboardInterrupt:
                    stop(study, trial, is_to_blame=False)
                    raise Stopped from None
                except ValueError:  # of the recipe itself: what to change is in the message
                    stop(study, trial, is_to_blame=False)
                    raise
                except BaseException as error:  # out of memory, say: not to be tried for ever
                    trial.set_user_attr("error", f"{type(error).__name__}: {error}")
                    stop(study, trial, is_to_blame=True)
                    save_tuned(out, study, space, data_name)
                    raise
                finally:
                    shutil.rmtree(out / RUNNING, ignore_errors=True)
                view.end_trial(study, trial.number)
                save_tuned(out, study, space, data_name)
        if best_of(study) is None:
            raise ValueError("no trial came to its end: give a longer --timeout")
        return summary(study, start, space)


def _run(
    study: Study,
    trial: Trial,
    split: Split,
    start: Config,
    space: Space,
    out: Path,
    view: TuningView,
    n_users: int,
    minutes: float,
) -> None:
    """One trial, told to the study. Settings with which nothing can be trained are no failure."""
    states = require_optuna().trial.TrialState
    began = time.monotonic()
    is_start = bool(trial.user_attrs.get("is_start"))
    rounded = {name: tried.rounded(trial.params[name]) for name, tried in space.items()}

    def report(percent: int, ndcg: float) -> None:
        trial.report(ndcg, percent)
        if not is_start and trial.should_prune():
            raise Pruned

    def keep(config: Config) -> None:
        trial.set_user_attr("config", config.model_dump(mode="json"))

    trained: Trained | None = None
    try:
        config = start if is_start else with_settings(start, rounded)
        keep(config)
        view_of_trial = view.trial_view(out / RUNNING)
        trained = run_trial(split, config, n_users, minutes, view_of_trial, keep, report)
    except Pruned:
        pass
    except ValueError as error:  # a loss that diverged, or a model that does not fit into memory
        if is_start:
            raise
        trial.set_user_attr("error", str(error))
    trial.set_user_attr("seconds", round(time.monotonic() - began, 1))
    if trained is None:
        study.tell(trial, state=states.PRUNED)
    else:
        study.tell(trial, trained.ndcg)


def run_trial(
    split: Split,
    config: Config,
    n_users: int,
    minutes: float,
    view: TrialView,
    keep: Callable[[Config], None],
    report: Callable[[int, float], None],
) -> Trained:
    """Train once. `keep` is told the settings in full, `report` the curve: percent, NDCG@10."""
    if config.model.name in FITTED:
        model = FITTED[config.model.name].fit(split.train, split.n_items, config)
        ranks = full_ranks(
            model,
            validation_sample(split, config),
            exclude_seen=config.evaluation.exclude_seen,
            n_workers=config.training.workers,
        )
        return Trained(config, float(METRICS["NDCG"](ranks, 10).mean()))
    check_memory(config, split.n_items, int(split.train.lengths.max()), available_memory())
    budgeted = epochs_within(split, config, minutes)
    # A recipe has the epochs, and not the clock of the machine that they were chosen on.
    lasting = budgeted.training.model_copy(update={"minutes": config.training.minutes})
    config = budgeted.model_copy(update={"training": lasting})
    keep(config)
    curve = Curve(stage_epochs(config), report)
    view.watch(curve)
    torch.manual_seed(config.training.seed)
    learned = LEARNED[config.model.name](split.n_items, config.model, n_users)
    progress = train(
        learned,
        split,
        budgeted,
        view.run,
        view,
        identity={},
        hardware=choose_hardware(config.training),
    )
    return Trained(config, progress.best)


def stage_epochs(config: Config) -> list[int]:
    """The epochs of each stage, as the training loop has them."""
    has_second = LEARNED[config.model.name].task == "cloze" and config.second_stage.epochs > 0
    return [config.training.epochs, *([config.second_stage.epochs] if has_second else [])]


class Curve:
    """The best NDCG@10 so far against the share of the training that is done.

    Trials validate at different moments and have different numbers of epochs, and the pruner
    compares values at equal ones. So the curve is read off at every tenth of the trial's own
    schedule, on straight lines between its validations.
    """

    def __init__(self, epochs: list[int], report: Callable[[int, float], None]) -> None:
        self.epochs, self.report = epochs, report
        self.stage = 0
        self.percent, self.best = 0.0, 0.0  # at the validation before
        self.reported = 0

    def percent_of(self, epochs_of_stage: float) -> float:
        return 100 * (sum(self.epochs[: self.stage]) + epochs_of_stage) / sum(self.epochs)

    def validated(self, event: dict[str, Any]) -> None:
        percent = self.percent_of(float(event["epoch"]))
        best = max(self.best, float(event["ndcg@10"]))
        first = self.reported + REPORT_EVERY_PERCENT
        for mark in range(first, int(percent + 1e-9) + 1, REPORT_EVERY_PERCENT):
            value = float(np.interp(mark, [self.percent, percent], [self.best, best]))
            self.reported = mark
            self.report(mark, value)
        self.percent, self.best = percent, best


@contextlib.contextmanager
def _terminated_as_by_ctrl_c() -> Iterator[None]:
    """A machine that shuts down sends SIGTERM; only the main thread may catch it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _without_test(split: Split) -> Split:
    """A split whose test items nobody can look at, because they are not there."""
    none = np.zeros(0, dtype=np.int64)
    nothing = Questions(split.train.take(none), none)
    for what, size in (("train on", len(split.train)), ("validate on", len(split.validation))):
        if not size:
            raise ValueError(
                f"nothing is left to {what}: use more data or weaker filters (leave-one-out needs "
                "users with three or more actions)"
            )
    return dataclasses.replace(split, test=nothing)
