"""The search for better settings of one model, judged by the validation items alone.

A trial is a run in a process of its own, trained within the budget. Its value is its best
validation NDCG@10; trials below the median of the others are pruned half-way (Optuna's median
pruner). The test items are removed from the split before a trial begins.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState
from rich.console import Console

from bert4rec.config import Config, RunConfig
from bert4rec.data.sequences import Sequences
from bert4rec.interrupts import Interrupted, StopRequest, stop_requested
from bert4rec.lab.contenders import flat_settings
from bert4rec.lab.lab_directory import STUDY_FILE, LabRun, data_facts, write_json
from bert4rec.lab.run_lab import describe_progress
from bert4rec.lab.run_process import run_in_process
from bert4rec.lab.search_space import Space, rounded, with_settings
from bert4rec.lab.study import (
    REPORT_EVERY_PERCENT,
    StudyTerms,
    ask,
    completed,
    config_of,
    finished,
    importance,
    open_study,
    requeue,
    save_best,
    settings_of_trial,
    start_value,
)
from bert4rec.progress import ProgressView


class TrialPruned(Exception):
    """This trial is behind the others: its training is not worth its time."""


@dataclass(frozen=True)
class TuningOptions:
    data_name: str
    n_trials: int = 30
    minutes: float = 5.0  # budget of one trial
    timeout_minutes: float | None = None  # no trial begins after this
    seed: int = 0
    startup_trials: int = 5  # complete ones before any is pruned


@dataclass(frozen=True)
class TuningResult:
    config: Config  # of the best trial
    best: float  # its validation NDCG@10
    start: float  # that of the recipe at the start
    settings: dict[str, tuple[Any, Any]]  # section.key → (at the start, in the best trial)
    n_trials: int
    n_incomplete: int  # pruned or failed
    importance: dict[str, float]  # shares that add up to 1; empty with few trials


def tune(
    sequences: Sequences, start: RunConfig, space: Space, out: Path, options: TuningOptions, console: Console
) -> TuningResult:
    """Run the trials that are missing of `n_trials`, and save the best settings as a recipe."""
    if start.training.on_validation:
        raise ValueError(
            "training.on_validation leaves nothing to choose settings by: add --set training.on_validation=false"
        )
    if options.n_trials < 1:
        raise ValueError(f"--trials is {options.n_trials}: use one or more")
    terms = StudyTerms(sequences.fingerprint, start, space, options.minutes, options.startup_trials)
    limit = options.timeout_minutes
    ends_at = np.inf if limit is None else time.monotonic() + 60 * limit
    with stop_requested() as is_stopped, open_study(out, terms) as (study, lock), ProgressView(console=console) as view:
        write_json(out / STUDY_FILE, {"data": data_facts(out, sequences, options.data_name)})
        view.say(_plan_line(study, space, options))
        view.begin("trials", len(finished(study)), options.n_trials)
        while (n_done := len(finished(study))) < options.n_trials and time.monotonic() < ends_at:
            is_stopped.raise_if_stopped()
            trial = ask(study, space, options.seed)
            try:
                _run(study, trial, terms, RunningTrial(out, lock, is_stopped, view, n_done))
            except Interrupted:
                requeue(study, trial.number, is_suspect=False)
                raise
            view.say(_trial_line(study, trial.number, space, options.n_trials))
            save_best(study, space, out, options.data_name)
        if not completed(study):
            raise ValueError("no trial was completed: give a longer --timeout")
        before, config = flat_settings(start.model_dump()), config_of(study.best_trial)
        after, n_trials = flat_settings(config.model_dump()), len(finished(study))
        return TuningResult(
            config,
            study.best_value,
            start_value(study),
            {name: (before[name], after[name]) for name in space},
            n_trials,
            n_trials - len(completed(study)),
            importance(study),
        )


@dataclass(frozen=True)
class RunningTrial:
    """What a trial needs beside its settings."""

    out: Path
    lock: int
    is_stopped: StopRequest
    view: ProgressView
    n_done: int  # trials before it


def _run(study: Study, trial: Trial, terms: StudyTerms, running: RunningTrial) -> None:
    """One trial, told to the study. Settings that cannot be trained are a bad trial, no error."""
    began = time.monotonic()
    is_start = bool(trial.user_attrs.get("is_start"))
    values = {name: rounded(tried, trial.params[name]) for name, tried in terms.space.items()}
    ndcg = None

    def report(percent: int, ndcg: float) -> None:
        trial.report(ndcg, percent)
        if not is_start and trial.should_prune():
            raise TrialPruned

    try:
        config = terms.start if is_start else with_settings(terms.start, values)
        trial.set_user_attr("config", config.model_dump(mode="json"))
        run = LabRun(running.out, f"trial-{trial.number}", config.training.seed)
        config, ndcg = run_trial(run, config, terms.minutes, running, report)
        trial.set_user_attr("config", config.model_dump(mode="json"))
    except TrialPruned:
        pass
    except ValueError as error:  # a loss that diverges, or a model too large or too slow
        if is_start:  # the message says what to change
            requeue(study, trial.number, is_suspect=False)
            raise
        trial.set_user_attr("error", str(error))
    trial.set_user_attr("seconds", round(time.monotonic() - began, 1))
    study.tell(trial, ndcg, state=TrialState.PRUNED if ndcg is None else None)


def run_trial(
    run: LabRun, config: Config, minutes: float, running: RunningTrial, report: Callable[[int, float], None]
) -> tuple[Config, float]:
    """Train once: the settings with the epochs that fit the budget, and the best NDCG@10.

    `report` gets the learning curve: percent of the training, NDCG@10.
    """
    plan = {"title": run.name, "budget_minutes": minutes, "held_out": "validation"}
    shutil.rmtree(run.contender, ignore_errors=True)
    write_json(run.contender / "plan.json", plan | {"config": config.model_dump(mode="json")})
    curve, began = TrialCurve(report), time.monotonic()

    def look() -> None:
        running.view.update(running.n_done, facts=f"{run.name}: {describe_progress(run, began)}")
        if (fitted := run.fitted()) is not None:
            epochs = [stage["epochs"] for stage in fitted["config"]["stages"]]
            for event in run.events()[curve.n_seen :]:
                curve.add(event, epochs)

    try:
        error = run_in_process(run, running.lock, running.is_stopped, look)
    finally:
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
    if error is not None:
        raise ValueError(error)
    cost, fitted = run.cost(), run.fitted()
    assert cost is not None
    assert fitted is not None
    return Config.parse(fitted["config"], "epochs.json"), cost["ndcg@10"]


class TrialCurve:
    """The best NDCG@10 so far against the share of the training that is done.

    Trials validate at different moments and have different numbers of epochs, and the pruner
    compares values at equal ones. So the curve is read off at every tenth of the trial's own
    schedule, on straight lines between its validations.
    """

    def __init__(self, report: Callable[[int, float], None]) -> None:
        self.report = report
        self.stages: dict[str, None] = {}  # so far
        self.n_seen, self.percent, self.best, self.reported = 0, 0.0, 0.0, 0

    def add(self, event: dict[str, Any], epochs: list[int]) -> None:
        """An event of the log of a training with these numbers of epochs per stage."""
        self.n_seen += 1
        if "ndcg@10" not in event:
            return
        self.stages |= {event["stage"]: None}
        n_done = sum(epochs[: len(self.stages) - 1]) + event["epoch"]
        percent = 100 * n_done / sum(epochs)
        best = max(self.best, float(event["ndcg@10"]))
        first = self.reported + REPORT_EVERY_PERCENT
        for mark in range(first, int(percent + 1e-9) + 1, REPORT_EVERY_PERCENT):
            value = float(np.interp(mark, [self.percent, percent], [self.best, best]))
            self.reported = mark
            self.report(mark, value)
        self.percent, self.best = percent, best


def _plan_line(study: Study, space: Space, options: TuningOptions) -> str:
    n_done, n = len(finished(study)), options.n_trials
    if n_done >= n:
        return f"all {n} trials are done: pass more --trials to search on"
    if n_done:
        return f"resuming after {n_done} of {n} trials"
    return (
        f"tuning {', '.join(space)}\n{n} trials of at most about {60 * options.minutes:g} s each; "
        "the first is the recipe itself"
    )


def _trial_line(study: Study, number: int, space: Space, n_trials: int) -> str:
    trial = study.trials[number]
    is_best = bool(completed(study)) and study.best_trial.number == number
    settings = ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in settings_of_trial(trial, space).items()
    )
    return (
        f"trial {len(finished(study))} of {n_trials}  {_outcome(trial)}"
        f"{', best so far' * is_best}  ({trial.user_attrs['seconds']:.0f} s)  {settings}"
    )


def _outcome(trial: FrozenTrial) -> str:
    if trial.state == TrialState.COMPLETE:
        return f"NDCG@10 {trial.value:.4f}"
    if "error" in trial.user_attrs:
        return f"could not be trained ({trial.user_attrs['error']})"
    percent = trial.last_step or 0
    value = trial.intermediate_values.get(percent, 0.0)
    return f"pruned at {percent} % with NDCG@10 {value:.4f}, below the median"
