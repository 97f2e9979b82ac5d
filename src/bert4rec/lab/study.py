"""An Optuna study in a directory: begun, gone on with, or refused because its terms are others.

The study is an SQLite file, in which Optuna keeps numbers and JSON. Its journal files would do too,
but a kill in mid-write leaves half a line in them, and SQLite takes such a write back.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bert4rec.config import Config
from bert4rec.durable import alone_in
from bert4rec.lab.search_space import Choices, Space, setting

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

STUDY_FILE = "study.db"
NAME = "tune"
MOST_ATTEMPTS = 3  # at a trial in which the process died or broke: it may be the trial's fault
RANDOM_TRIALS = 8  # before the sampler believes that it knows something
WARM_UP_PERCENT, REPORT_EVERY_PERCENT = 30, 10


@contextlib.contextmanager
def open_study(
    out: Path, terms: dict[str, Any], start: Config, space: Space, *, startup_trials: int
) -> Iterator[Study]:
    """The study in `out`, locked for this process; the first trial of a new one is `start`."""
    optuna = require_optuna()
    out.mkdir(parents=True, exist_ok=True)
    path = (out / STUDY_FILE).resolve()
    terms = json.loads(json.dumps(terms))  # as they come back from the file
    with alone_in(out), warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = optuna.storages.RDBStorage(f"sqlite:///{path}")

        def load() -> Study:
            pruner = optuna.pruners.MedianPruner(
                startup_trials, WARM_UP_PERCENT, REPORT_EVERY_PERCENT
            )
            found: Study = optuna.create_study(
                study_name=NAME,
                storage=storage,
                direction="maximize",
                load_if_exists=True,
                pruner=pruner,
            )
            return found

        try:
            study = load()
            if finished(study):
                _check_terms(out, study.user_attrs["terms"], terms)
            elif study.user_attrs.get("terms", terms) != terms:
                optuna.delete_study(study_name=NAME, storage=storage)  # nothing is lost
                study = load()
            study.set_user_attr("terms", terms)
            if not study.get_trials(deepcopy=False):
                values = {
                    name: tried.nearest(setting(start, name)) for name, tried in space.items()
                }
                study.enqueue_trial(values, {"is_start": True, "attempt": 1})
            _try_again_what_was_cut_off(study)
            yield study
        finally:
            storage.remove_session()
            storage.engine.dispose()


def ask(study: Study, space: Space, seed: int) -> Trial:
    """The next trial. What is drawn follows from the seed and the trial's number, so a study that
    is gone on with does not draw the values of its first trials again.
    """
    optuna = require_optuna()
    number = len(study.get_trials(deepcopy=False))
    word = np.random.SeedSequence([seed, number]).generate_state(1)[0]
    study.sampler = optuna.samplers.TPESampler(
        seed=int(word), n_startup_trials=RANDOM_TRIALS, multivariate=True
    )
    return study.ask({name: _for_optuna(tried) for name, tried in space.items()})


def stop(study: Study, trial: Trial, *, is_to_blame: bool) -> None:
    """Give a trial back; it comes first the next time, unless it is to blame once too often."""
    frozen = study.get_trials(deepcopy=False)[trial.number]
    if not frozen.state.is_finished():
        _try_again(study, frozen, attempt_more=int(is_to_blame))


def finished(study: Study) -> list[FrozenTrial]:
    """Trials with a result: trained to the end, or given up before."""
    states = require_optuna().trial.TrialState
    return study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED))


def completed(study: Study) -> list[FrozenTrial]:
    states = require_optuna().trial.TrialState
    return study.get_trials(deepcopy=False, states=(states.COMPLETE,))


def best_of(study: Study) -> FrozenTrial | None:
    """The highest NDCG@10, and of equal ones the first."""
    trials = completed(study)
    return max(trials, key=lambda t: (t.value or 0.0, -t.number)) if trials else None


def terms_of(fingerprint: str, start: Config, space: Space, minutes: float) -> dict[str, Any]:
    """All that has to stay the same for trials to be compared."""
    return {
        "data": fingerprint,
        "recipe": start.model_dump(mode="json"),
        "space": {
            name: {"choices": list(tried.values)} if isinstance(tried, Choices) else asdict(tried)
            for name, tried in space.items()
        },
        "budget in minutes": minutes,
    }


def require_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ValueError("Optuna is not installed: pip install 'bert4rec[lab]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # it is we who tell what happens
    return optuna


def _check_terms(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    differing = _differences(before, now)
    if differing:
        raise ValueError(
            f"{out} holds a study on other terms; different: {', '.join(differing)}. "
            "Give the same as before to go on with it, or another --out for a new study"
        )


def _differences(before: Any, now: Any, place: str = "") -> list[str]:
    if before == now:
        return []
    is_leaf = "low" in before or "choices" in before if isinstance(before, dict) else True
    if is_leaf or not isinstance(now, dict):
        return [f"{place} ({_brief(before)} before, now {_brief(now)})"]
    found = []
    for key in sorted(before.keys() | now.keys()):
        if key not in now or key not in before:
            found.append(f"{place} {key} ({'new' if key in now else 'left out now'})".strip())
        else:
            joint = " " if place in ("", "recipe", "space") else "."
            found += _differences(before[key], now[key], f"{place}{joint}{key}".strip())
    return found


def _brief(value: Any) -> str:
    if isinstance(value, dict) and "choices" in value:
        return str(value["choices"])
    if isinstance(value, dict):
        return f"{value['low']} to {value['high']}" + " log" * bool(value.get("log"))
    text = str(value)
    return text if len(text) <= 16 else f"{text[:8]}…"


def _try_again_what_was_cut_off(study: Study) -> None:
    """Nobody else is at work here, so a running trial is one whose process was killed."""
    states = require_optuna().trial.TrialState
    for trial in study.get_trials(deepcopy=False, states=(states.RUNNING,)):
        _try_again(study, trial, attempt_more=1)


def _try_again(study: Study, trial: FrozenTrial, *, attempt_more: int) -> None:
    """First queue it, then mark it failed: a kill between the two must not lose it."""
    states = require_optuna().trial.TrialState
    attempt = trial.user_attrs.get("attempt", 1) + attempt_more
    known = study.get_trials(deepcopy=False)
    if attempt > MOST_ATTEMPTS:
        if trial.user_attrs.get("is_start"):
            raise ValueError(
                f"the recipe itself could not be trained in {MOST_ATTEMPTS} attempts, probably "
                "because the machine ran out of memory: start from a smaller model"
            )
        study.tell(trial.number, state=states.PRUNED)
        return
    if not any(each.user_attrs.get("instead_of") == trial.number for each in known):
        is_start = trial.user_attrs.get("is_start", False)
        attributes = {"is_start": is_start, "attempt": attempt, "instead_of": trial.number}
        values = trial.system_attrs.get("fixed_params", {}) | trial.params
        study.enqueue_trial(values, attributes)
    study.tell(trial.number, state=states.FAIL)


def _for_optuna(tried: Any) -> BaseDistribution:
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if isinstance(tried, Choices):
        return CategoricalDistribution(tried.values)
    if tried.whole:
        return IntDistribution(int(tried.low), int(tried.high), log=tried.log)
    return FloatDistribution(float(tried.low), float(tried.high), log=tried.log)
