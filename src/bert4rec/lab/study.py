"""An Optuna study in a directory: begun, resumed, or refused because its terms are different.

The study is an SQLite file, in which Optuna stores numbers and JSON. A kill in mid-write leaves
half a line in Optuna's journal files, and SQLite rolls such a write back.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from bert4rec.config import Config
from bert4rec.durable import alone_in, write_file
from bert4rec.lab.contenders import flat_settings
from bert4rec.lab.search_space import Space, start_values

NAME = "tune"
MOST_ATTEMPTS = 3  # at a trial during which the program was killed: it may be the trial's fault
RANDOM_TRIALS = 8  # before the sampler uses what it has seen
WARM_UP_PERCENT, REPORT_EVERY_PERCENT = 30, 10
ENOUGH_FOR_IMPORTANCE = 10  # complete trials; with fewer it would be noise

optuna.logging.set_verbosity(optuna.logging.ERROR)  # we print the progress ourselves


@dataclass(frozen=True)
class StudyTerms:
    """All that must stay the same for trials to be comparable."""

    fingerprint: str  # of the data
    start: Config
    space: Space
    minutes: float
    startup_trials: int = 5  # complete ones before any is pruned; may change

    def to_json(self) -> dict[str, Any]:
        terms = {"data": self.fingerprint, "budget in minutes": self.minutes}
        terms |= {f"recipe {k}": v for k, v in flat_settings(self.start.model_dump()).items()}
        terms |= {f"space {name}": str(tried) for name, tried in self.space.items()}
        return dict(json.loads(json.dumps(terms)))  # as they come back from the file


@contextlib.contextmanager
def open_study(out: Path, terms: StudyTerms) -> Iterator[tuple[Study, int]]:
    """The study in `out` and its lock; the first trial of a new one is the start itself."""
    with alone_in(out) as lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = optuna.storages.RDBStorage(f"sqlite:///{(out / 'study.db').resolve()}")
        pruner = optuna.pruners.MedianPruner(max(1, terms.startup_trials), WARM_UP_PERCENT, REPORT_EVERY_PERCENT)

        def load() -> Study:
            return optuna.create_study(
                storage=storage, study_name=NAME, direction="maximize", load_if_exists=True, pruner=pruner
            )

        try:
            study, now = load(), terms.to_json()
            before = study.user_attrs.get("terms", now)
            if finished(study):
                _check_terms(out, before, now)
            elif before != now:
                optuna.delete_study(study_name=NAME, storage=storage)  # nothing is lost
                study = load()
            study.set_user_attr("terms", now)
            if not study.trials:
                study.enqueue_trial(start_values(terms.start, terms.space), {"is_start": True})
            # The study is locked, so a running trial is one whose program was killed.
            for trial in study.get_trials(states=[TrialState.RUNNING]):
                requeue(study, trial.number, is_suspect=True)
            yield study, lock
        finally:
            storage.remove_session()
            storage.engine.dispose()


def _check_terms(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    differing = [
        f"{key} ({before.get(key, 'nothing')} before, now {now.get(key, 'nothing')})"
        for key in sorted(before.keys() | now.keys())
        if before.get(key, "nothing") != now.get(key, "nothing")
    ]
    if differing:
        raise ValueError(
            f"{out} holds a study on other terms; different: {', '.join(differing)}. "
            "Give the same as before to resume it, or another --out for a new study"
        )


def ask(study: Study, space: Space, seed: int) -> Trial:
    """The next trial. Its values follow from the seed and its number, so that a resumed study does
    not draw the values of its first trials again.
    """
    word = np.random.SeedSequence([seed, len(study.trials)]).generate_state(1)[0]
    study.sampler = optuna.samplers.TPESampler(seed=int(word), n_startup_trials=RANDOM_TRIALS, multivariate=True)
    return study.ask(dict(space))


def requeue(study: Study, number: int, *, is_suspect: bool) -> None:
    """Try a trial again, first of all; one that is suspect too often is pruned."""
    trial = study.trials[number]
    attempt = trial.user_attrs.get("attempt", 1) + is_suspect
    is_start = trial.user_attrs.get("is_start", False)
    if attempt > MOST_ATTEMPTS and not is_start:
        study.tell(number, state=TrialState.PRUNED)
        return
    # First queue it, then mark it failed: a kill between the two must not lose it.
    if not any(each.user_attrs.get("instead_of") == number for each in study.trials):
        attributes = {"is_start": is_start, "attempt": attempt, "instead_of": number}
        values = trial.system_attrs.get("fixed_params", {}) | trial.params
        study.enqueue_trial(values, attributes)
    study.tell(number, state=TrialState.FAIL)


def finished(study: Study) -> list[FrozenTrial]:
    """Trials with a result: complete, pruned, or failed by their own fault."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def completed(study: Study) -> list[FrozenTrial]:
    return [trial for trial in finished(study) if trial.state == TrialState.COMPLETE]


def start_value(study: Study) -> float:
    starts = [trial for trial in completed(study) if trial.user_attrs.get("is_start")]
    return float(starts[0].value or 0.0) if starts else float("nan")


def importance(study: Study) -> dict[str, float]:
    """Shares that add up to 1, by PED-ANOVA (Watanabe et al., IJCAI 2023); empty with few trials.

    A setting is important if it separates the good trials from the others.
    """
    is_enough = len(completed(study)) >= ENOUGH_FOR_IMPORTANCE
    return optuna.importance.get_param_importances(study) if is_enough else {}


def config_of(trial: FrozenTrial) -> Config:
    return Config.parse(trial.user_attrs["config"], f"trial {trial.number}")


def settings_of_trial(trial: FrozenTrial, space: Space) -> dict[str, Any]:
    """What was trained with: rounded, and for the start exactly what the recipe says."""
    known = flat_settings(trial.user_attrs.get("config", {})) or trial.params
    return {name: known[name] for name in space}


def save_best(study: Study, space: Space, out: Path, data_name: str) -> None:
    """`trials.csv` and `best.toml`, after every trial: an interrupted study has them too."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", "state", "ndcg@10", "seconds", "is_start", *space, "error"])
    for number, trial in enumerate(finished(study), 1):
        is_complete, known = trial.state == TrialState.COMPLETE, trial.user_attrs
        state = "complete" if is_complete else "failed" if "error" in known else "pruned"
        last = trial.intermediate_values.get(trial.last_step or 0, "")
        facts = [number, state, trial.value if is_complete else last, known.get("seconds", "")]
        facts += ["yes" if known.get("is_start") else "no"]
        settings = settings_of_trial(trial, space).values()
        writer.writerow([*facts, *settings, known.get("error", "")])
    write_file(out / "trials.csv", text.getvalue())
    if completed(study):
        comment = (
            f"Tuned on {data_name} in {len(finished(study))} trials: validation NDCG@10 "
            f"{study.best_value:.4f}, against {start_value(study):.4f} of the recipe at the start."
        )
        write_file(out / "best.toml", recipe_toml(config_of(study.best_trial), comment))


def recipe_toml(config: Config, comment: str) -> str:
    """All settings, so that the recipe means the same on top of any other."""
    values = config.model_dump(mode="json")
    stages = values.pop("stages")
    lines = [f"# {' '.join(comment.split())}", *([] if stages else ["stages = []"])]
    tables = [(f"[{section}]", settings) for section, settings in values.items()]
    for heading, settings in [*tables, *(("[[stages]]", stage) for stage in stages)]:
        lines += ["", heading]
        # TOML has no null: `none` is read as None.
        written = {key: "none" if value is None else value for key, value in settings.items()}
        lines += [f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in written.items()]
    return "\n".join(lines) + "\n"
