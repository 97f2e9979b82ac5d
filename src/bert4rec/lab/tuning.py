"""A search for better settings of one model, judged by the validation items alone: an Optuna study.

A trial is a run in a process of its own, trained within the budget. Its value is its best
validation NDCG@10; trials below the median of the others are pruned half-way (Optuna's median
pruner). The test items are removed from the split before a trial begins. The first trial that ends
is always the recipe at the start.

OUT/study.db      the study, an SQLite file. A kill in mid-write leaves half a line in Optuna's
                  journal files, and SQLite rolls such a write back
OUT/trials.csv    a line for each trial
OUT/best.toml     the settings of the best trial, as a recipe
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState
from rich.console import Console

from bert4rec.config import Config, RunConfig
from bert4rec.data.sequences import Sequences
from bert4rec.durable import alone_in, write_file
from bert4rec.interrupts import Interrupted, StopRequest, stop_requested
from bert4rec.lab.contenders import flat_settings
from bert4rec.lab.lab_directory import STUDY_FILE, LabRun, data_facts, write_json
from bert4rec.lab.run_lab import describe_progress
from bert4rec.lab.run_process import run_in_process
from bert4rec.lab.search_space import Space, rounded, start_values, with_settings
from bert4rec.progress import ProgressView

NAME = "tune"
MOST_ATTEMPTS = 3  # at a trial during which the program was killed: it may be the trial's fault
RANDOM_TRIALS = 8  # before the sampler uses what it has seen
STARTUP_TRIALS = 5  # complete ones before any is pruned
WARM_UP_PERCENT, REPORT_EVERY_PERCENT = 30, 10
ENOUGH_FOR_IMPORTANCE = 10  # complete trials; with fewer it would be noise

optuna.logging.set_verbosity(optuna.logging.ERROR)  # we print the progress ourselves


@dataclass(frozen=True)
class TuningOptions:
    data_name: str
    n_trials: int = 30
    minutes: float = 5.0  # budget of one trial
    timeout_minutes: float = math.inf  # no trial begins after this
    seed: int = 0


@dataclass(frozen=True)
class TuningResult:
    config: Config  # of the best trial
    best: float  # its validation NDCG@10
    start: float  # that of the recipe at the start
    settings: dict[str, tuple[Any, Any]]  # section.key → (at the start, in the best trial)
    n_trials: int
    n_incomplete: int  # pruned or failed
    # How well a setting separates the good trials from the others, by PED-ANOVA (Watanabe et al.,
    # IJCAI 2023): shares that add up to 1; empty with few trials.
    importance: dict[str, float]


def tune(
    sequences: Sequences, start: RunConfig, space: Space, out: Path, options: TuningOptions, console: Console
) -> TuningResult:
    """Run the trials that are missing of `n_trials`, and save the best settings as a recipe."""
    if start.training.on_validation:
        raise ValueError(
            "training.on_validation leaves nothing to choose settings by: add --set training.on_validation=false"
        )
    ends_at = time.monotonic() + 60 * options.timeout_minutes
    with (
        stop_requested() as is_stopped,
        alone_in(out) as lock,
        open_study(out, sequences.fingerprint, start, space, options.minutes) as study,
        ProgressView(console=console) as view,
    ):
        write_json(out / STUDY_FILE, {"data": data_facts(out, sequences, options.data_name)})
        n, n_done = options.n_trials, len(finished(study))
        view.say(
            f"all {n} trials are done: pass more --trials to search on"
            if n_done >= n
            else f"resuming after {n_done} of {n} trials"
            if n_done
            else f"tuning {', '.join(space)}\n{n} trials of at most about {60 * options.minutes:g} s each; "
            "the first is the recipe itself"
        )
        view.begin("trials", n_done, n)
        while (n_done := len(finished(study))) < n and time.monotonic() < ends_at:
            is_stopped.raise_if_stopped()
            running = RunningTrial(out, options.minutes, lock, is_stopped, view, n_done)
            trial = _run(study, ask(study, space, options.seed), start, space, running)
            best_so_far = ", best so far" * (trial.number == study.best_trial.number)
            view.say(f"trial {n_done + 1} of {n}  {_outcome(trial, space, best_so_far)}")
            save_trials(study, space, out, options.data_name)
        trials = finished(study)
        if not trials:
            raise ValueError("no trial was completed: give a longer --timeout")
        n_complete = sum(trial.state == TrialState.COMPLETE for trial in trials)
        config, before = config_of(study.best_trial), flat_settings(start.model_dump())
        after = flat_settings(config.model_dump())
        return TuningResult(
            config=config,
            best=study.best_value,
            start=trials[0].value or 0.0,
            settings={name: (before[name], after[name]) for name in space},
            n_trials=len(trials),
            n_incomplete=len(trials) - n_complete,
            importance=optuna.importance.get_param_importances(study) if n_complete >= ENOUGH_FOR_IMPORTANCE else {},
        )


@dataclass(frozen=True)
class RunningTrial:
    """What a trial needs beside its settings."""

    out: Path
    minutes: float  # its budget
    lock: int
    is_stopped: StopRequest
    view: ProgressView
    n_done: int  # trials before it


def _run(study: Study, trial: Trial, start: Config, space: Space, running: RunningTrial) -> FrozenTrial:
    """One trial, told to the study. Settings that cannot be trained are a bad trial, no error."""
    is_start = running.n_done == 0

    def report(percent: int, ndcg: float) -> None:
        trial.report(ndcg, percent)
        if not is_start and trial.should_prune():
            raise optuna.TrialPruned

    try:
        values = {name: rounded(tried, trial.params[name]) for name, tried in space.items()}
        config = start if is_start else with_settings(start, values)
        trial.set_user_attr("config", config.model_dump(mode="json"))
        run = LabRun(running.out, f"trial-{trial.number}", config.training.seed)
        config, ndcg = run_trial(run, config, running, report)
    except optuna.TrialPruned:
        return study.tell(trial, state=TrialState.PRUNED)
    except (Interrupted, ValueError) as error:  # a loss that diverges, or a model too large or too slow
        if is_start or isinstance(error, Interrupted):  # an error of the recipe itself says what to change
            requeue(study, trial.number, trial.user_attrs.get("attempt", 1))
            raise
        trial.set_user_attr("error", str(error))
        return study.tell(trial, state=TrialState.PRUNED)
    trial.set_user_attr("config", config.model_dump(mode="json"))
    return study.tell(trial, ndcg)


def run_trial(
    run: LabRun, config: Config, running: RunningTrial, report: Callable[[int, float], None]
) -> tuple[Config, float]:
    """Train once: the settings with the epochs that fit the budget, and the best NDCG@10.

    `report` gets the learning curve: percent of the training, NDCG@10.
    """
    plan = {"title": run.name, "budget_minutes": running.minutes, "held_out": "validation"}
    shutil.rmtree(run.contender, ignore_errors=True)
    write_json(run.contender / "plan.json", plan | {"config": config.model_dump(mode="json")})
    began, reported = time.monotonic(), set[int]()

    def look() -> None:
        running.view.update(running.n_done, facts=f"{run.name}: {describe_progress(run, began)}")
        if (fitted := run.fitted()) is not None:
            curve = learning_curve(run.events(), [stage["epochs"] for stage in fitted["config"]["stages"]])
            for percent in sorted(curve.keys() - reported):
                reported.add(percent)
                report(percent, curve[percent])

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


def learning_curve(events: list[dict[str, Any]], epochs: list[int]) -> dict[int, float]:
    """Percent of the training → the best NDCG@10 so far, from the log of a training with these epochs per stage.

    Trials validate at different moments and have different numbers of epochs, and the pruner
    compares values at equal ones. So the curve is read off at every tenth of the trial's own
    schedule, on straight lines between its validations.
    """
    epochs, stages = [n for n in epochs if n], list(dict.fromkeys(event["stage"] for event in events))
    percents, best = [0.0], [0.0]
    for event in events:
        if "ndcg@10" in event:
            n_done = sum(epochs[: stages.index(event["stage"])]) + event["epoch"]
            percents.append(100 * n_done / sum(epochs))
            best.append(max(best[-1], event["ndcg@10"]))
    marks = range(REPORT_EVERY_PERCENT, int(percents[-1] + 1e-9) + 1, REPORT_EVERY_PERCENT)
    return {mark: float(np.interp(mark, percents, best)) for mark in marks}


@contextlib.contextmanager
def open_study(out: Path, fingerprint: str, start: Config, space: Space, minutes: float) -> Iterator[Study]:
    """The study in `out`, which the caller has locked; the first trial of a new one is the start itself.

    The data (by their fingerprint), the start, the space and the budget must stay the same, so that
    trials are comparable.
    """
    terms: dict[str, Any] = {"data": fingerprint, "budget in minutes": minutes}
    terms |= {f"recipe {key}": value for key, value in flat_settings(start.model_dump()).items()}
    terms |= {f"space {name}": str(tried) for name, tried in space.items()}
    terms = json.loads(json.dumps(terms))  # as they come back from the file
    storage = optuna.storages.RDBStorage(f"sqlite:///{(out / 'study.db').resolve()}")
    pruner = optuna.pruners.MedianPruner(STARTUP_TRIALS, WARM_UP_PERCENT, REPORT_EVERY_PERCENT)

    def load() -> Study:
        return optuna.create_study(
            storage=storage, study_name=NAME, direction="maximize", load_if_exists=True, pruner=pruner
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            study = load()
            if differing := _differing(study.user_attrs.get("terms", terms), terms):
                if finished(study):
                    raise ValueError(
                        f"{out} holds a study on other terms; different: {differing}. "
                        "Give the same as before to resume it, or another --out for a new study"
                    )
                optuna.delete_study(study_name=NAME, storage=storage)  # nothing is lost
                study = load()
            study.set_user_attr("terms", terms)
            if not study.trials:
                study.enqueue_trial(start_values(start, space))
            # The study is locked, so a running trial is one whose program was killed.
            for trial in study.get_trials(states=[TrialState.RUNNING]):
                attempt = trial.user_attrs.get("attempt", 1)
                if attempt < MOST_ATTEMPTS or not finished(study):
                    requeue(study, trial.number, attempt + 1)
                else:
                    study.tell(trial.number, state=TrialState.PRUNED)
            yield study
        finally:
            storage.remove_session()
            storage.engine.dispose()


def _differing(before: dict[str, Any], now: dict[str, Any]) -> str:
    pairs = {key: (before.get(key, "nothing"), now.get(key, "nothing")) for key in sorted(before.keys() | now.keys())}
    return ", ".join(f"{key} ({old} before, now {new})" for key, (old, new) in pairs.items() if old != new)


def ask(study: Study, space: Space, seed: int) -> Trial:
    """The next trial. Its values follow from the seed and its number, so that a resumed study does
    not draw the values of its first trials again.
    """
    word = np.random.SeedSequence([seed, len(study.trials)]).generate_state(1)[0]
    study.sampler = optuna.samplers.TPESampler(seed=int(word), n_startup_trials=RANDOM_TRIALS, multivariate=True)
    return study.ask(dict(space))


def requeue(study: Study, number: int, attempt: int) -> None:
    """Try the settings of a trial again, before any others."""
    # A kill between the two writes tries them once too often, and does not lose them.
    trial = study.trials[number]
    queued = trial.system_attrs.get("fixed_params", {})  # those that a kill kept it from storing, too
    study.enqueue_trial(queued | trial.params, {"attempt": attempt})
    study.tell(number, state=TrialState.FAIL)


def finished(study: Study) -> list[FrozenTrial]:
    """Trials with a result: complete, pruned, or failed by their own fault."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def config_of(trial: FrozenTrial) -> Config:
    return Config.parse(trial.user_attrs["config"], f"trial {trial.number}")


def facts_of(trial: FrozenTrial, space: Space) -> dict[str, Any]:
    """What `trials.csv` says about a finished trial."""
    assert trial.duration is not None
    known = flat_settings(trial.user_attrs.get("config", {})) or trial.params  # rounded, or those of the recipe
    is_failed = "error" in trial.user_attrs  # settings that cannot be trained
    return {
        "state": "failed" if is_failed else trial.state.name.lower(),
        "ndcg@10": trial.intermediate_values.get(trial.last_step or 0) if trial.value is None else trial.value,
        "seconds": round(trial.duration.total_seconds(), 1),
        **{name: known[name] for name in space},
        "error": trial.user_attrs.get("error"),
    }


def save_trials(study: Study, space: Space, out: Path, data_name: str) -> None:
    """`trials.csv` and `best.toml`, after every trial: an interrupted study has them too."""
    text, trials = io.StringIO(), finished(study)
    rows = [
        {"trial": number, "is_start": "yes" if number == 1 else "no"} | facts_of(trial, space)
        for number, trial in enumerate(trials, 1)
    ]
    columns = ["trial", "state", "ndcg@10", "seconds", "is_start", *space, "error"]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(out / "trials.csv", text.getvalue())
    comment = (
        f"Tuned on {data_name} in {len(trials)} trials: validation NDCG@10 "
        f"{study.best_value:.4f}, against {trials[0].value:.4f} of the recipe at the start."
    )
    write_file(out / "best.toml", recipe_toml(config_of(study.best_trial), comment))


def recipe_toml(config: Config, comment: str) -> str:
    """All settings, so that the recipe means the same on top of any other."""
    values = config.model_dump(mode="json")
    stages = values.pop("stages")
    tables = [(f"[{section}]", settings) for section, settings in values.items()]
    lines = [f"# {' '.join(comment.split())}", *([] if stages else ["stages = []"])]
    for heading, settings in [*tables, *(("[[stages]]", stage) for stage in stages)]:
        # TOML has no null: `none` is read as None.
        written = {key: "none" if value is None else value for key, value in settings.items()}
        lines += ["", heading, *(f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in written.items())]
    return "\n".join(lines) + "\n"


def _outcome(trial: FrozenTrial, space: Space, best_so_far: str) -> str:
    facts = facts_of(trial, space)
    value = f"NDCG@10 {facts['ndcg@10'] or 0:.4f}"
    outcome = {
        "complete": f"{value}{best_so_far}",
        "failed": f"could not be trained ({facts['error']})",
        "pruned": f"pruned at {trial.last_step} % with {value}, below the median",
    }[facts["state"]]
    settings = ", ".join(f"{name} {value_text(facts[name])}" for name in space)
    return f"{outcome}  ({facts['seconds']:.0f} s)  {settings}"


def value_text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
