"""What a study leaves behind: the best settings as a recipe, and a table of all trials."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert4rec.config import Config, parse_config
from bert4rec.durable import write_file
from bert4rec.lab.search_space import Space, setting
from bert4rec.lab.study import best_of, completed, finished, require_optuna

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

BEST_FILE, TRIALS_FILE = "best.toml", "trials.csv"
ENOUGH_FOR_IMPORTANCE = 10  # complete trials; with fewer it would be noise


@dataclass(frozen=True)
class Tuned:
    config: Config  # of the best trial
    best: float  # its validation NDCG@10
    start: float  # that of the recipe that tuning began with
    settings: dict[str, tuple[Any, Any]]  # section.key → (at the start, in the best trial)
    n_trials: int
    n_given_up: int
    importance: dict[str, float]  # shares that add up to 1; empty when there were few trials


def summary(study: Study, start: Config, space: Space) -> Tuned:
    best = best_of(study)
    assert best is not None
    config = config_of(best)
    return Tuned(
        config,
        float(best.value or 0.0),
        _start_value(study),
        {name: (setting(start, name), setting(config, name)) for name in space},
        len(finished(study)),
        len(finished(study)) - len(completed(study)),
        _importance(study),
    )


def save_tuned(out: Path, study: Study, space: Space, data_name: str) -> None:
    """Written anew after every trial, so that an interrupted study has its best so far too."""
    write_file(out / TRIALS_FILE, _table(study, space))
    best = best_of(study)
    if best is not None:
        comment = (
            f"Tuned on {data_name} in {len(finished(study))} trials: validation NDCG@10 "
            f"{best.value:.4f}, against {_start_value(study):.4f} of the recipe at the start."
        )
        write_file(out / BEST_FILE, recipe_toml(config_of(best), comment))


def recipe_toml(config: Config, comment: str) -> str:
    """All settings, so that the recipe means the same whatever it is put on top of."""
    lines = [f"# {' '.join(comment.split())}"]
    for section, values in config.model_dump(mode="json").items():
        lines.append(f"\n[{section}]" if len(lines) > 1 else f"[{section}]")
        lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def config_of(trial: FrozenTrial) -> Config:
    return parse_config(trial.user_attrs["config"], f"trial {trial.number}")


def settings_of_trial(trial: FrozenTrial, space: Space) -> dict[str, Any]:
    """What was trained with: rounded, and for the start exactly what the recipe says."""
    if "config" not in trial.user_attrs:
        return dict(trial.params)
    return {name: setting(config_of(trial), name) for name in space}


def _start_value(study: Study) -> float:
    starts = [trial for trial in completed(study) if trial.user_attrs.get("is_start")]
    return float(starts[0].value or 0.0) if starts else float("nan")


def _importance(study: Study) -> dict[str, float]:
    """PED-ANOVA (Watanabe et al., IJCAI 2023): which settings tell good trials from the others."""
    if len(completed(study)) < ENOUGH_FOR_IMPORTANCE:
        return {}
    found: dict[str, float] = require_optuna().importance.get_param_importances(study)
    return found


def _table(study: Study, space: Space) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", "state", "ndcg@10", "seconds", "is_start", *space, "error"])
    for number, trial in enumerate(finished(study), 1):
        is_complete = trial.state.name == "COMPLETE"
        curve = trial.intermediate_values
        last = trial.value if is_complete else curve[max(curve)] if curve else ""
        attributes = trial.user_attrs
        state = "complete" if is_complete else "failed" if "error" in attributes else "given up"
        values = settings_of_trial(trial, space)
        writer.writerow(
            [
                number,
                state,
                last,
                attributes.get("seconds", ""),
                "yes" if attributes.get("is_start") else "no",
                *(values.get(name, "") for name in space),
                attributes.get("error", ""),
            ]
        )
    return text.getvalue()


def _toml(value: Any) -> str:
    """A value of a setting as TOML, which has no null: `none` is read as nothing."""
    return json.dumps("none" if value is None else value, ensure_ascii=False)
