"""Which settings are tuned, and between which bounds: Optuna's distributions by `section.key`.

A search space is a TOML file. `search_space.toml` is the default: each of its settings is tuned if
the model has it. A file of the user (`--space`) replaces it; a setting that is given with `--set`
is fixed and left out.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from bert4rec.config import Config, apply_overrides, read_toml
from bert4rec.lab.contenders import flat_settings, full_name
from bert4rec.losses.sampled import SHARED_FROM
from bert4rec.settings import nearest

Distribution = FloatDistribution | IntDistribution | CategoricalDistribution
Space = dict[str, Distribution]

MANY_NEGATIVES = {"low": SHARED_FROM, "high": 4096, "log": True}  # shared ones are cheap
# Trials with other values of these could not be compared, or would be chosen by luck.
NOT_TUNABLE = {
    "model.name": "tune one model at a time and compare them with `bert4rec lab`",
    "training.seed": "the best seed is luck, not a setting",
    "training.validation_users": "all trials must be judged on the same users",
    "data": "all trials must be judged on the same held-out items",
    "evaluation": "all trials must be judged on the same held-out items",
}


def space_for(start: Config, overrides: Iterable[str] = (), file: Path | None = None) -> Space:
    """What to try for the model of `start`, without the settings in `overrides` (of --set).

    Every range is wide enough for the value of `start` itself, which is the first trial.
    """
    known = flat_settings(start.model_dump())
    fixed = {full_name(override, known) for override in overrides}
    if file is None:
        tables = {name: table for name, table in _default_tables(start).items() if name not in fixed}
    else:
        tables = _by_full_name(read_toml(file))
        if both := sorted(fixed & tables.keys()):
            raise ValueError(f"{both[0]} is in {file} and given with --set as well: leave out one")
    where = file or "the default search space"
    try:
        space = {name: _parsed(name, table, known) for name, table in tables.items()}
        if file is not None:
            _check_values(space, start)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    space = {name: tried for name, tried in space.items() if not tried.single()}
    if not space:
        raise ValueError(
            f"nothing is left to tune of the model {start.model.name!r}: {where} names no setting that it has "
            "and that is not given with --set"
        )
    return space


def start_values(start: Config, space: Space) -> dict[str, Any]:
    """The settings of `start`; the lowest of a range for none, and for zero on a logarithmic scale."""
    known = flat_settings(start.model_dump())
    return {
        name: known[name] if isinstance(tried, CategoricalDistribution) else max(tried.low, known[name] or 0)
        for name, tried in space.items()
    }


def rounded(tried: Distribution, value: Any) -> Any:
    """Three digits are enough, and easier to read in a recipe."""
    if not isinstance(tried, FloatDistribution):
        return value
    return min(max(float(f"{value:.3g}"), tried.low), tried.high)


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """A copy of `config` with these values of `section.key`."""
    overrides = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    return Config.parse(apply_overrides(config.model_dump(), overrides), "with the values tried")


def _default_tables(start: Config) -> dict[str, Any]:
    """Those of `search_space.toml` that go with the other settings of the recipe."""
    known = flat_settings(start.model_dump())
    tables = read_toml(resources.files("bert4rec") / "lab" / "search_space.toml")
    tables = {name: table for name, table in tables.items() if name in known and _is_tuned(name, start)}
    if known.get("loss.n_negatives", 0) >= SHARED_FROM and "loss.n_negatives" in tables:
        tables["loss.n_negatives"] = MANY_NEGATIVES
    for name in [name for name, table in tables.items() if "choices" in table]:
        choices = []
        for value in dict.fromkeys([*tables[name]["choices"], known[name]]):
            with contextlib.suppress(ValueError):  # as of 4 heads for a dim of 50
                with_settings(start, {name: value})
                choices.append(value)
        tables[name] = {"choices": choices}
    return tables


def _is_tuned(name: str, start: Config) -> bool:
    section, _, key = name.rpartition(".")
    if not section.startswith("stages."):
        return section == "model" or bool(start.stages)
    stage = start.stages[int(section.removeprefix("stages."))]
    has_one_mask = 1 in (getattr(stage, "max_queries", 0), getattr(stage, "last_item_share", 0))
    # With more masks it would be another model; a stage without epochs is left out.
    return stage.epochs > 0 and (key == "learning_rate" or not has_one_mask)


def _by_full_name(values: dict[str, Any]) -> dict[str, Any]:
    """Of lines such as `"model.dim" = { choices = […] }`, or of the same in sections."""
    named: dict[str, Any] = {}
    for key, value in values.items():
        is_section = "." not in key and isinstance(value, dict)
        named |= {f"{key}.{inner}": table for inner, table in value.items()} if is_section else {key: value}
    return named


def _parsed(name: str, table: Any, known: dict[str, Any]) -> Distribution:
    """The distribution that a line of the file describes, and wide enough for the recipe's own value."""
    if why := NOT_TUNABLE.get(name) or NOT_TUNABLE.get(name.partition(".")[0]):
        raise ValueError(f"{name} cannot be tuned: {why}")
    if name not in known:
        raise ValueError(f"{name!r} is no setting of this recipe{nearest(name, known)}")
    own = known[name]
    match table:
        case {"choices": [_, *_] as choices} if len(table) == 1:
            return CategoricalDistribution(tuple(dict.fromkeys([*choices, own])))
        case {"low": int() | float() as low, "high": int() | float() as high} if (
            table.keys() <= {"low", "high", "log"} and low < high
        ):
            log = table.get("log", False)
            if log is False or (log is True and low > 0):
                if isinstance(own, int | float) and (own > 0 or not log):  # a logarithmic scale has no zero
                    low, high = min(low, own), max(high, own)
                if isinstance(low, int) and isinstance(high, int) and not isinstance(own, float):
                    return IntDistribution(low, high, log=log)
                return FloatDistribution(low, high, log=log)
    raise ValueError(
        f"{name} is {table!r}: write {{ low = 0.001, high = 0.1 }}, low below high, and with log = true above 0; "
        "or { choices = [32, 64] }"
    )


def _check_values(space: Space, start: Config) -> None:
    """Every value must be one that the model can have, and each dim must go with each number of heads."""
    pair = [name for name in space if name in ("model.dim", "model.heads")]
    for names in [pair, *([name] for name in space if name not in pair)]:
        tried = [_values(space[name], is_each=names is pair) for name in names]
        for values in product(*tried):
            with_settings(start, dict(zip(names, values, strict=True)))


def _values(tried: Distribution, *, is_each: bool) -> Iterable[Any]:
    """The choices; of a range its two ends or, of integers, each."""
    if isinstance(tried, CategoricalDistribution):
        return tried.choices
    return (
        range(tried.low, tried.high + 1) if is_each and isinstance(tried, IntDistribution) else (tried.low, tried.high)
    )
