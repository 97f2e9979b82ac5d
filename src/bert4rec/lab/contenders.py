"""Who takes part in a lab: recipes of the package by name, or TOML files of the user.

All contenders are evaluated on the same held-out items of the same data, so the sections `data` and
`evaluation` belong to the lab (`--set`) and not to a contender.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from bert4rec.config import Config, load_config
from bert4rec.settings import recipe_names

# Recipe → title of the models of `--models all`, in the order of a table.
TITLES: dict[str, str] = tomllib.loads((resources.files("bert4rec.lab") / "contenders.toml").read_text("utf-8"))
DETERMINISTIC = {"popularity", "markov", "item-knn"}  # models that are the same for every seed
LAB_SECTIONS = ("data", "evaluation")
CHOOSERS = (".name", ".objective")  # settings that decide which other settings there are


@dataclass(frozen=True)
class Contender:
    """A recipe with a file and settings on top, and on top of these what --set overrides."""

    name: str  # also the name of its folder
    title: str
    source: str  # what the user named: a recipe, a TOML file, a contender of a reproduction
    recipe: str
    file: str | None = None
    settings: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()  # as they were typed for all contenders

    @cached_property
    def config(self) -> Config:
        """With seed 0 and the epochs of the recipe."""
        return self.config_with(self.applied_overrides)

    @cached_property
    def applied_overrides(self) -> list[str]:
        """The overrides whose setting this contender has, once its model and loss are chosen."""
        applied: list[str] = []
        choosing = [each for each in self.overrides if _key(each).endswith(CHOOSERS)]
        for overrides in (choosing, self.overrides):
            known = flat_settings(self.config_with(applied).model_dump(mode="json"))
            keys = {*known, *(name.rpartition(".")[2] for name in known)}
            applied = [each for each in overrides if _key(each) in keys]
        return applied

    def config_with(self, overrides: Iterable[str]) -> Config:
        return load_config(self.recipe, self.file, [*self.settings, *overrides])


def choose_contenders(names: Sequence[str], overrides: Iterable[str] = ()) -> list[Contender]:
    """The contenders named (`all`, recipes, TOML files), each with `overrides` on top."""
    wanted = [each for name in names for each in (list(TITLES) if name == "all" else [name])]
    if not wanted:
        raise ValueError("no model is named: pass --models all, or some of " + _known_names())
    chosen: dict[str, Contender] = {}
    for source in wanted:
        found = _contender(source)
        known = chosen.setdefault(found.name, found)
        if known != found or (found.name in TITLES and source != found.name):
            raise ValueError(f"{source}: there is another model named {found.name!r} in the lab: rename the file")
    return build_contenders([chosen[name] for name in table_order(chosen)], overrides)


def build_contenders(
    chosen: Iterable[Contender], overrides: Iterable[str] = (), lab_settings: Iterable[str] = ()
) -> list[Contender]:
    """The same with `overrides` on top, all evaluated on the same held-out items.

    An override applies to the contenders that have the setting; one that none has is an error.
    `lab_settings` are those of data and evaluation that all contenders share.
    """
    overrides = tuple(overrides)
    refuse_overrides(overrides, {"seed": "several seeds are run, choose them with --seeds"})
    contenders = [replace(each, overrides=overrides) for each in chosen]
    for override in overrides:
        if not any(override in each.applied_overrides for each in contenders):
            contenders[-1].config_with([override])  # its error names the settings that there are
            raise ValueError(f"--set {override}: no model of this lab has this setting")
    known = flat_settings(load_config("default").model_dump(include=set(LAB_SECTIONS)))
    for_all = [override for override in overrides if full_name(override, known) in known]
    shared = load_config("default", None, [*lab_settings, *for_all])
    for each in contenders:
        check_same_evaluation(each, shared)
    return contenders


def refuse_overrides(overrides: Iterable[str], instead: dict[str, str]) -> None:
    """Settings of a training that the command chooses itself: `instead` says how to give them."""
    instead = instead | {"minutes": "choose the time of a training with --budget"}
    for override in overrides:
        key = _key(override).removeprefix("training.")
        if key in instead:
            raise ValueError(f"--set training.{key}: {instead[key]}")


def check_same_evaluation(contender: Contender, lab: Config) -> None:
    """Metrics on different data or held-out items do not say which model is better."""
    for section in LAB_SECTIONS:
        if getattr(contender.config, section) != getattr(lab, section):
            raise ValueError(
                f"{contender.source} has settings of its own in the section {section!r}: all "
                f"models of a lab share them, so pass them to all with --set {section}.…"
            )
    if contender.config.training.on_validation:
        raise ValueError(
            f"{contender.source} trains on the validation items, by which a lab chooses: add "
            "--set training.on_validation=false"
        )


def split_names(parts: Iterable[str] | None) -> list[str]:
    """The names in `a,b` and `c`: an option may be repeated, and its names have commas."""
    return [name.strip() for part in parts or () for name in part.split(",") if name.strip()]


def table_order(names: Iterable[str]) -> list[str]:
    """The package's contenders in their order, then the others as they came."""
    places = {name: place for place, name in enumerate(TITLES)}
    return sorted(dict.fromkeys(names), key=lambda name: places.get(name, len(places)))


def full_name(override: str, known: Iterable[str]) -> str:
    """`training.seed` of `training.seed=1`, and of `seed=1` where only one known setting fits."""
    key = _key(override)
    names = [name for name in known if name.rpartition(".")[2] == key]
    return names[0] if len(names) == 1 else key


def flat_settings(values: Any, name: str = "") -> dict[str, Any]:
    """`section.key` → value of nested settings; stages are numbered, as in `stages.0.epochs`."""
    if name == "stages":
        values = dict(enumerate(values))
    if not isinstance(values, dict):
        return {name: values}
    parts = ((f"{name}.{key}" if name else key, value) for key, value in values.items())
    return {key: value for part in parts for key, value in flat_settings(part[1], part[0]).items()}


def settings_of(config: Config) -> dict[str, Any]:
    """`section.key` → value of all that differs from the defaults of the model, loss and stages."""
    sections = {name: getattr(config, name) for name in type(config).model_fields}
    stages = [stage.model_dump(exclude_defaults=True) for stage in sections.pop("stages")]
    unusual = {name: settings.model_dump(exclude_defaults=True) for name, settings in sections.items()}
    names = flat_settings(unusual | {"stages": stages})
    return {
        name: value
        for name, value in flat_settings(config.model_dump(mode="json")).items()
        if name in names or name.endswith(CHOOSERS)
    }


def _key(override: str) -> str:
    """`model.dim` of `model.dim=64`."""
    return override.partition("=")[0].strip()


def _contender(source: str) -> Contender:
    if source.endswith(".toml"):
        name = Path(source).stem
        if not re.fullmatch(r"\w[\w.+-]*", name):
            raise ValueError(f"{source}: name the file with letters, digits and . + - _ only")
        return Contender(name, name, source, "default", source)
    if source not in recipe_names():
        raise ValueError(f"no model is named {source!r}: there are {_known_names()}")
    return Contender(source, TITLES.get(source, source), source, source)


def _known_names() -> str:
    others = [name for name in recipe_names() if name not in TITLES]
    return f"{', '.join(TITLES)}; other recipes: {', '.join(others)}; or a TOML file of your own (my-model.toml)"
