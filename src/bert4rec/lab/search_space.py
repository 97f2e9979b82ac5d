"""Which settings are tuned, between which bounds, and for which models.

`SPACE` is the whole answer when nobody says otherwise: one line a setting. A file of one's own
(`--space`) takes its place; a setting that is given with `--set` is fixed and left out of either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert4rec.config import Config, parse_config, setting_descriptions
from bert4rec.models import LEARNED

Value = float | int | str | bool


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`, both included; `log` tries as many of 1–10 as of 10–100."""

    low: float
    high: float
    log: bool = False
    whole: bool = False  # integers only

    def holding(self, value: Any) -> Range:
        """The range, made wide enough for `value`; zero is no place on a logarithmic scale."""
        if value is None or (self.log and value <= 0):
            return self
        return dataclasses.replace(self, low=min(self.low, value), high=max(self.high, value))

    def nearest(self, value: Any) -> Value:
        return self.low if value is None else min(max(value, self.low), self.high)

    def rounded(self, value: Value) -> Value:
        """Three digits are enough for anybody, and easier to read in a recipe."""
        assert not isinstance(value, str)
        return value if self.whole else self.nearest(float(f"{value:.3g}"))


@dataclass(frozen=True)
class Choices:
    values: tuple[Value, ...]

    def holding(self, value: Any) -> Choices:
        if value is None or value in self.values:
            return self
        values = (*self.values, value)
        is_number = all(not isinstance(each, str) for each in values)
        return Choices(tuple(sorted(values)) if is_number else values)

    def nearest(self, value: Any) -> Value:
        return value if value in self.values else self.values[0]

    def rounded(self, value: Value) -> Value:
        return value


Distribution = Range | Choices
Space = dict[str, Distribution]  # section.key → what to try
Applies = Callable[[Config], bool]


def is_learned(config: Config) -> bool:
    return config.model.name in LEARNED


def is_one_of(*names: str) -> Applies:
    return lambda config: config.model.name in names


def has_task(*tasks: str) -> Applies:
    return lambda config: is_learned(config) and LEARNED[config.model.name].task in tasks


def hides_items(config: Config) -> bool:
    """Not BERT4Rec with one mask, which would become another model, or without the Cloze task."""
    training = config.training
    has_one_mask = training.max_masked == 1 or training.last_item_share == 1
    if has_task("cloze")(config) and training.next_item_share == 1:
        return False
    return has_task("cloze", "reconstruction")(config) and not has_one_mask


def has_second_stage(config: Config) -> bool:
    return has_task("cloze")(config) and config.second_stage.epochs > 0


def draws_negatives(config: Config) -> bool:
    return is_learned(config) and config.training.loss not in ("cross-entropy", "in-batch")


FEW = 64  # fewer negatives are drawn for each position, and more are shared and so cost less

# setting, what to try, for which models
SPACE: tuple[tuple[str, Distribution, Applies], ...] = (
    ("training.learning_rate", Range(3e-4, 5e-3, log=True), is_learned),
    ("training.weight_decay", Range(1e-4, 0.3, log=True), is_learned),
    ("training.batch_size", Choices((64, 128, 256)), is_learned),
    ("model.dim", Choices((32, 64, 128)), is_learned),
    ("model.dropout", Range(0.0, 0.5), is_learned),
    ("model.layers", Range(1, 3, whole=True), is_one_of("bert4rec", "sasrec", "gru4rec")),
    ("model.heads", Choices((1, 2, 4)), is_one_of("bert4rec", "sasrec")),
    ("training.mask_ratio", Range(0.1, 0.6), hides_items),
    (
        "training.last_item_share",
        Range(0.0, 0.5),
        lambda config: has_task("cloze")(config) and hides_items(config),
    ),
    ("second_stage.learning_rate", Range(1e-4, 2e-3, log=True), has_second_stage),
    (
        "training.n_negatives",
        Range(1, 32, log=True, whole=True),
        lambda config: draws_negatives(config) and config.training.n_negatives < FEW,
    ),
    (
        "training.n_negatives",
        Range(FEW, 4096, log=True, whole=True),
        lambda config: draws_negatives(config) and config.training.n_negatives >= FEW,
    ),
    (
        "training.gbce_calibration",
        Range(0.0, 1.0),
        lambda config: is_learned(config) and config.training.loss == "gbce",
    ),
    ("model.neighbours", Range(10, 1000, log=True, whole=True), is_one_of("item-knn")),
    ("model.similarity", Choices(("cosine", "tfidf", "bm25")), is_one_of("item-knn")),
    ("model.dim", Choices((32, 64, 128, 256)), is_one_of("bpr-mf")),
    ("training.learning_rate", Range(1e-3, 0.3, log=True), is_one_of("bpr-mf")),
    ("training.weight_decay", Range(1e-4, 0.3, log=True), is_one_of("bpr-mf")),
    ("training.epochs", Range(10, 500, log=True, whole=True), is_one_of("bpr-mf")),
)


def space_for(start: Config, fixed: Iterable[str] = (), file: Path | None = None) -> Space:
    """What to try for the model of `start`, without the settings named in `fixed`.

    Every part is wide enough for the value of `start` itself: it is the first to be tried.
    """
    fixed = set(fixed)
    if file is not None:
        from bert4rec.lab.space_file import read_space

        space = read_space(file, start)
        if both := sorted(fixed & space.keys()):
            raise ValueError(
                f"{both[0]} is in {file} and is given with --set as well: leave out one"
            )
    else:
        space = {name: tried for name, tried, applies in SPACE if applies(start)}
        space = {name: tried for name, tried in space.items() if name not in fixed}
    space = {name: tried.holding(setting(start, name)) for name, tried in space.items()}
    if not space:
        raise ValueError(
            f"nothing is left to tune of the model {start.model.name!r}: "
            "it has no settings that matter, or all of them are given with --set"
        )
    return _with_heads_that_divide(space, start, is_own=file is not None)


def setting(config: Config, name: str) -> Any:
    section, key = name.split(".")
    return getattr(getattr(config, section), key)


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """A copy of `config` with these values of `section.key`."""
    values = config.model_dump()
    for name, value in settings.items():
        section, key = name.split(".")
        values[section][key] = value
    return parse_config(values, "the search space")


def full_names(overrides: Iterable[str]) -> list[str]:
    """`section.key` of each `--set`, where the section may be left out (training comes first)."""
    known = [name for name, _, _ in setting_descriptions()]
    known.sort(key=lambda name: not name.startswith("training."))
    keys = [override.partition("=")[0].strip() for override in overrides]
    return [
        next((name for name in known if key in (name, name.split(".")[1])), key) for key in keys
    ]


def _with_heads_that_divide(space: Space, start: Config, *, is_own: bool) -> Space:
    """Every width must be a multiple of every number of heads that may come with it."""
    if not {"model.dim", "model.heads"} & space.keys():
        return space
    dims, heads = _values(space, "model.dim", start), _values(space, "model.heads", start)
    wrong = [(dim, n) for dim in dims for n in heads if dim % n]
    if not wrong:
        return space
    if is_own:
        dim, n = wrong[0]
        raise ValueError(
            f"the search space has model.heads = {n} and model.dim = {dim}: "
            "all heads tried must divide all widths tried"
        )
    fitting = tuple(n for n in heads if all(dim % n == 0 for dim in dims))
    if "model.heads" in space and start.model.heads in fitting:
        return _narrowed(space, "model.heads", fitting)
    space = {name: tried for name, tried in space.items() if name != "model.heads"}
    fitting = tuple(dim for dim in dims if dim % start.model.heads == 0)
    return _narrowed(space, "model.dim", fitting)


def _values(space: Space, name: str, start: Config) -> tuple[int, ...]:
    tried = space.get(name, Choices((setting(start, name),)))
    if isinstance(tried, Range):
        return tuple(range(int(tried.low), int(tried.high) + 1))
    return tuple(int(value) for value in tried.values)


def _narrowed(space: Space, name: str, values: tuple[int, ...]) -> Space:
    """`name` with these values only; with a single one there is nothing to choose."""
    narrow = {each: Choices(values) if each == name else tried for each, tried in space.items()}
    return {each: tried for each, tried in narrow.items() if each != name or len(values) > 1}
