"""Who takes part in a lab: recipes of the package by name, or settings files of one's own.

All contenders answer the same questions about the same data, so the sections `data` and
`evaluation` belong to the lab (`--set`) and not to a contender.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert4rec.config import Config, load_config, override_config, recipe_names

# The order of a table: counted, matrix factorisation, recurrent, convolution, attention.
TITLES = {
    "popularity": "POP",
    "item-knn": "Item-kNN",
    "bpr-mf": "BPR-MF",
    "markov": "Markov chain",
    "fpmc": "FPMC",
    "neumf": "NCF (NeuMF)",
    "cdae": "CDAE",
    "gru4rec": "GRU4Rec",
    "gru4rec+": "GRU4Rec+",
    "gru4rec-ce": "GRU4Rec (cross-entropy)",
    "caser": "Caser",
    "narm": "NARM",
    "stamp": "STAMP",
    "sasrec": "SASRec",
    "sasrec+": "SASRec+",
    "sasrec+3000": "SASRec+ (3,000 negatives)",
    "gsasrec": "gSASRec",
    "bert4rec-1-mask": "BERT4Rec, one mask",
    "bert4rec": "BERT4Rec",
    "bert4rec-2-stage": "BERT4Rec + last-item stage",
    "bert4rec-causal": "BERT4Rec-causal",
}
WITHOUT_CHANCE = {"popularity", "markov", "item-knn"}  # models that are the same for every seed
LAB_SECTIONS = ("data", "evaluation")


@dataclass(frozen=True)
class Contender:
    name: str  # also the name of its folder
    title: str
    config: Config  # with seed 0, and the epochs of the recipe
    source: str  # as it was asked for: a recipe, a TOML file, a contender of a reproduction
    overrides: tuple[str, ...] = ()  # that were given with --set

    def seeds(self, n: int) -> list[int]:
        return [0] if self.config.model.name in WITHOUT_CHANCE else list(range(n))


def choose_contenders(names: Sequence[str], overrides: Iterable[str] = ()) -> list[Contender]:
    """The contenders named (`all`, recipes, TOML files), each with `overrides` on top."""
    overrides = list(overrides)
    lab = lab_config(overrides)
    wanted = [each for name in names for each in (list(TITLES) if name == "all" else [name])]
    if not wanted:
        raise ValueError("no model is named: pass --models all, or some of " + _there_are())
    chosen: dict[str, Contender] = {}
    sources: dict[str, str] = {}
    for source in wanted:
        contender = _contender(source, overrides)
        name = contender.name
        if sources.get(name, source) != source or (name in TITLES and source != name):
            raise ValueError(
                f"{source}: there is another model named {name!r} in the lab: rename the file"
            )
        check_asked_the_same(contender, lab)
        chosen[name], sources[name] = contender, source
    return in_table_order(chosen)


def lab_config(overrides: Iterable[str]) -> Config:
    """What all contenders share: the sections `data` and `evaluation` count."""
    overrides = list(overrides)
    refuse_overrides(overrides, {"seed": "several seeds are run, choose them with --seeds"})
    return override_config(Config(), overrides)


def refuse_overrides(overrides: Iterable[str], instead: dict[str, str]) -> None:
    """Settings of a training that the command itself chooses: `instead` says how it is told."""
    chosen, usual = override_config(Config(), overrides).training, Config().training
    for key, what in (instead | {"minutes": "choose the time of a training with --budget"}).items():
        if getattr(chosen, key) != getattr(usual, key):
            raise ValueError(f"--set training.{key}: {what}")


def check_asked_the_same(contender: Contender, lab: Config) -> None:
    """Figures from different data or questions say nothing about who is better."""
    for section in LAB_SECTIONS:
        if getattr(contender.config, section) != getattr(lab, section):
            raise ValueError(
                f"{contender.source} has settings of its own in the section {section!r}: all "
                f"models of a lab are asked the same, so pass them to all with --set {section}.…"
            )
    if contender.config.training.on_validation:
        raise ValueError(
            f"{contender.source} trains on the validation items, by which a lab chooses: add "
            "--set training.on_validation=false"
        )


def split_names(parts: Iterable[str] | None) -> list[str]:
    """The names in `a,b` and `c`: an option may be repeated, and its names have commas."""
    return [name.strip() for part in parts or () for name in part.split(",") if name.strip()]


def in_table_order(chosen: dict[str, Contender]) -> list[Contender]:
    return [chosen[name] for name in table_order(chosen)]


def table_order(names: Iterable[str]) -> list[str]:
    """The package's contenders in their order, then the others as they came."""
    places = {name: place for place, name in enumerate(TITLES)}
    return sorted(names, key=lambda name: places.get(name, len(places)))


def settings_of(config: Config) -> dict[str, Any]:
    """`section.key` → value of all that differs from the defaults."""
    ours, defaults = config.model_dump(mode="json"), Config().model_dump(mode="json")
    return {
        f"{section}.{key}": value
        for section, values in ours.items()
        for key, value in values.items()
        if value != defaults[section][key]
    }


def _contender(source: str, overrides: list[str]) -> Contender:
    if source.endswith(".toml"):
        name = Path(source).stem
        if not re.fullmatch(r"\w[\w.+-]*", name):
            raise ValueError(f"{source}: name the file with letters, digits and . + - _ only")
        config = load_config("default", source, overrides)
        return Contender(name, name, config, source, tuple(overrides))
    if source not in recipe_names():
        raise ValueError(f"no model is named {source!r}: there are {_there_are()}")
    config = load_config(source, None, overrides)
    return Contender(source, TITLES.get(source, source), config, source, tuple(overrides))


def _there_are() -> str:
    others = [name for name in recipe_names() if name not in TITLES]
    return (
        f"{', '.join(TITLES)}; other recipes: {', '.join(others)}; "
        "or a TOML file of your own (my-model.toml)"
    )
