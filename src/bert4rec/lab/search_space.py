"""Which settings are tuned, and between which bounds: Optuna's distributions by `section.key`.

`SPACE` is the default: each of its settings is tuned if the model has it. A TOML file of the user
(`--space`) replaces it; a setting that is given with `--set` is fixed and left out.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from bert4rec.config import Config
from bert4rec.lab.contenders import flat_settings, full_name

Distribution = FloatDistribution | IntDistribution | CategoricalDistribution
Space = dict[str, Distribution]

SPACE: Space = {
    "stages.0.learning_rate": FloatDistribution(3e-4, 5e-3, log=True),
    "training.weight_decay": FloatDistribution(1e-4, 0.3, log=True),
    "training.batch_size": CategoricalDistribution((64, 128, 256)),
    "model.dim": CategoricalDistribution((32, 64, 128)),
    "model.dropout": FloatDistribution(0.0, 0.5),
    "model.layers": IntDistribution(1, 3),
    "model.heads": CategoricalDistribution((1, 2, 4)),
    "stages.0.mask_ratio": FloatDistribution(0.1, 0.6),
    "stages.0.last_item_share": FloatDistribution(0.0, 0.5),
    "stages.1.learning_rate": FloatDistribution(1e-4, 2e-3, log=True),
    "loss.n_negatives": IntDistribution(1, 32, log=True),
    "loss.calibration": FloatDistribution(0.0, 1.0),
    "model.neighbours": IntDistribution(10, 1000, log=True),
    "model.similarity": CategoricalDistribution(("cosine", "tfidf", "bm25")),
    "model.learning_rate": FloatDistribution(1e-3, 0.3, log=True),  # of BPR-MF, as the next two
    "model.regularization": FloatDistribution(1e-4, 0.3, log=True),
    "model.epochs": IntDistribution(10, 500, log=True),
}
MANY = 64  # fewer negatives are drawn for each position, and more are shared and so cheaper
MANY_NEGATIVES = IntDistribution(MANY, 4096, log=True)
# Trials with other values of these could not be compared, or would be chosen by luck.
NOT_TUNABLE = {
    "model.name": "tune one model at a time and compare them with `bert4rec lab`",
    "training.seed": "the best seed is luck, not a setting",
    "training.minutes": "the time of a trial is given with --budget",
    "training.validation_users": "all trials must be judged on the same users",
}


def space_for(start: Config, overrides: Iterable[str] = (), file: Path | None = None) -> Space:
    """What to try for the model of `start`, without the settings in `overrides` (of --set).

    Every range is wide enough for the value of `start` itself, which is the first trial.
    """
    known = flat_settings(start.model_dump())
    fixed = {full_name(override, known) for override in overrides}
    if file is not None:
        space = _read_space(file, start)
        if both := sorted(fixed & space.keys()):
            raise ValueError(f"{both[0]} is in {file} and given with --set as well: leave out one")
    else:
        space = {name: each for name, each in _default_space(start).items() if name not in fixed}
    if not space:
        raise ValueError(
            f"nothing is left to tune of the model {start.model.name!r}: "
            "it has no settings to tune, or all of them are given with --set"
        )
    space = {name: _widened(tried, known[name]) for name, tried in space.items()}
    return _with_heads_that_divide(space, start, is_own=file is not None)


def _default_space(start: Config) -> Space:
    known = flat_settings(start.model_dump())
    is_trained = bool(start.stages)
    space = {n: d for n, d in SPACE.items() if n in known and (is_trained or n[:6] == "model.")}
    for place, stage in enumerate(start.stages):
        has_one_mask = 1 in (getattr(stage, "max_queries", 0), getattr(stage, "last_item_share", 0))
        if not stage.epochs:  # left out
            space.pop(f"stages.{place}.learning_rate", None)
        if not stage.epochs or has_one_mask:  # with more masks it would be another model
            space.pop(f"stages.{place}.mask_ratio", None)
            space.pop(f"stages.{place}.last_item_share", None)
    if known.get("loss.n_negatives", 0) >= MANY and "loss.n_negatives" in space:
        space["loss.n_negatives"] = MANY_NEGATIVES
    return space


def _widened(tried: Distribution, value: Any) -> Distribution:
    """Wide enough for `value`; a logarithmic scale has no zero."""
    if isinstance(tried, CategoricalDistribution):
        choices = (*tried.choices, *([] if value in (None, *tried.choices) else [value]))
        return CategoricalDistribution(choices)
    if value is None or (tried.log and value <= 0):
        return tried
    return type(tried)(min(tried.low, value), max(tried.high, value), log=tried.log)


def start_values(start: Config, space: Space) -> dict[str, Any]:
    """The settings of `start`, or the nearest that a distribution has."""
    known = flat_settings(start.model_dump())
    return {
        name: known[name]
        if isinstance(tried, CategoricalDistribution)
        or (_widened(tried, known[name]) == tried and known[name] is not None)
        else tried.low
        for name, tried in space.items()
    }


def rounded(tried: Distribution, value: Any) -> Any:
    """Three digits are enough, and easier to read in a recipe."""
    if not isinstance(tried, FloatDistribution):
        return value
    return min(max(float(f"{value:.3g}"), tried.low), tried.high)


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """A copy of `config` with these values of `section.key`."""
    values = config.model_dump()
    for name, value in settings.items():
        *path, key = name.split(".")
        section: Any = values
        for part in path:
            section = section[int(part)] if isinstance(section, list | tuple) else section[part]
        section[key] = value
    return Config.parse(values, "the search space")


def _with_heads_that_divide(space: Space, start: Config, *, is_own: bool) -> Space:
    """Every dim must be a multiple of every number of heads that may come with it."""
    n_heads = getattr(start.model, "heads", None)
    if n_heads is None:
        return space
    dims, heads = _integers(space, "model.dim", start), _integers(space, "model.heads", start)
    wrong = [(dim, n) for dim in dims for n in heads if dim % n]
    if wrong and is_own:
        dim, n = wrong[0]
        raise ValueError(
            f"the search space has model.heads = {n} and model.dim = {dim}: "
            "all numbers of heads tried must divide all dims tried"
        )
    if wrong:  # keep the heads of the start, and the dims that they divide
        space = {name: tried for name, tried in space.items() if name != "model.heads"}
        if "model.dim" in space:
            fitting = [dim for dim in dims if dim % n_heads == 0]
            space["model.dim"] = CategoricalDistribution(fitting)
    return space


def _integers(space: Space, name: str, start: Config) -> list[int]:
    tried = space.get(name)
    if isinstance(tried, IntDistribution):
        return list(range(tried.low, tried.high + 1))
    found = getattr(tried, "choices", [flat_settings(start.model_dump())[name]])
    return [int(value) for value in found]


def _read_space(path: Path, start: Config) -> Space:
    """From lines such as `"model.dim" = { choices = […] }`, or the same in sections."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file ({error})") from None
    named: dict[str, Any] = {}
    for key, value in values.items():
        if "." in key or not isinstance(value, dict):
            named[key] = value
        else:
            named |= {f"{key}.{inner}": tried for inner, tried in value.items()}
    if not named:
        raise ValueError(f"{path} is empty: name at least one setting to tune")
    space = {}
    for name, tried in named.items():
        try:
            space[name] = _parsed(name, tried, start)
        except (LookupError, ValueError) as error:
            raise ValueError(f"{path}: {name} {error}") from None
    return space


def _parsed(name: str, tried: Any, start: Config) -> Distribution:
    """A distribution that was written as a TOML table; the errors complete "NAME …"."""
    section = name.split(".")[0]
    if section == name:
        raise ValueError('has no section: write section.key in quotes, as in "model.dim"')
    why = NOT_TUNABLE.get(name)
    if section in ("data", "evaluation"):
        why = "all trials must be judged on the same held-out items"
    if why is not None:
        raise ValueError(f"cannot be tuned: {why}")
    example = "{ low = 0.001, high = 0.1, log = true } or { choices = [32, 64] }"
    if not isinstance(tried, dict) or tried.keys() - {"low", "high", "log", "choices"}:
        raise ValueError(f"is {tried!r}: write {example}")
    low: Any = tried.get("low")
    high: Any = tried.get("high")
    log, choices = tried.get("log", False), tried.get("choices")
    if choices is not None:
        if len(tried) > 1 or not isinstance(choices, list) or len(choices) < 2:
            raise ValueError("has choices that are not a list of two or more values, or not alone")
    elif not all(type(bound) in (int, float) and math.isfinite(bound) for bound in (low, high)):
        raise ValueError(f"needs low and high, two numbers, or choices: write {example}")
    elif type(log) is not bool or low >= high or (log and low <= 0):
        raise ValueError(
            f"is low = {low}, high = {high}, log = {log}: low must be below high and, with log = true, above 0"
        )
    for value in choices or (low, high):
        # Whether heads divide the dim is checked for all pairs later.
        values = {name: value}
        if hasattr(start.model, "heads") and name in ("model.dim", "model.heads"):
            values |= {"model.heads": 1} if name == "model.dim" else {"model.dim": 4 * value}
        with_settings(start, values)
    if choices is not None:
        return CategoricalDistribution(tuple(dict.fromkeys(choices)))
    is_float = isinstance(flat_settings(start.model_dump())[name], float)
    if type(low) is int and type(high) is int and not is_float:
        return IntDistribution(low, high, log=log)
    return FloatDistribution(low, high, log=log)
