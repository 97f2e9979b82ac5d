"""A search space of one's own, read from a TOML file and checked before anything is trained."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

from bert4rec.config import Config, parse_config
from bert4rec.lab.search_space import Choices, Distribution, Range, Space, setting

# Trials with other values of these could not be compared, or would be chosen for their luck.
NOT_TUNABLE = {
    "model.name": "tune one model at a time and compare them with `bert4rec lab`",
    "training.seed": "the best seed is luck, not a setting",
    "training.minutes": "the time of a trial is given with --budget",
    "training.validation_users": "all trials must answer the same questions",
}
NOT_TUNABLE_SECTIONS = ("data", "evaluation")


def read_space(path: Path, start: Config) -> Space:
    """A search space of one's own: { "training.learning_rate" = { low = …, high = …, log = true },
    "model.dim" = { choices = […] } }, or the same as sections.
    """
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
    return {name: _parsed(name, tried, path, start) for name, tried in named.items()}


def _parsed(name: str, tried: Any, path: Path, start: Config) -> Distribution:
    where = f"{path}: {name}"
    if name.count(".") != 1:
        raise ValueError(f'{where}: write section.key in quotes, as in "training.learning_rate"')
    why = NOT_TUNABLE.get(name)
    if name.split(".")[0] in NOT_TUNABLE_SECTIONS:
        why = "all trials must answer the same questions"
    if why is not None:
        raise ValueError(f"{where} cannot be tuned: {why}")
    example = "{ low = 0.001, high = 0.1, log = true } or { choices = [32, 64] }"
    if not isinstance(tried, dict) or tried.keys() - {"low", "high", "log", "choices"}:
        raise ValueError(f"{where} is {tried!r}: write {example}")
    if "choices" in tried:
        choices = tried["choices"]
        if len(tried) > 1 or not isinstance(choices, list) or len(choices) < 2:
            raise ValueError(f"{where}: choices is a list of two or more values and stands alone")
        for value in choices:
            _check(name, value, where, start)
        return Choices(tuple(dict.fromkeys(choices)))
    bounds: list[Any] = [tried.get("low"), tried.get("high")]
    if not all(type(bound) in (int, float) and math.isfinite(bound) for bound in bounds):
        raise ValueError(f"{where} needs low and high, two numbers, or choices: write {example}")
    low, high = bounds
    log = tried.get("log", False)
    if type(log) is not bool:
        raise ValueError(f"{where}: log is {log!r}: write true or false")
    if low >= high:
        raise ValueError(f"{where}: low = {low} is not lower than high = {high}")
    if log and low <= 0:
        raise ValueError(f"{where}: low = {low}, and a logarithmic scale has no zero; raise it")
    for bound in bounds:
        _check(name, bound, where, start)
    whole = all(type(bound) is int for bound in bounds)
    return Range(low, high, log, whole and not isinstance(setting(start, name), float))


def _check(name: str, value: Any, where: str, start: Config) -> None:
    section, key = name.split(".")
    values = start.model_dump()
    values.setdefault(section, {})[key] = value
    if name in ("model.dim", "model.heads"):  # whether one divides the other is asked of all pairs
        values["model"]["heads" if key == "dim" else "dim"] = 4 * value if key == "heads" else 1
    parse_config(values, where)
