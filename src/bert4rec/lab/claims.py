"""Reproductions as data: published figures, and claims about which model is better.

A reproduction is a TOML file that names a data set, contenders with the figures published for them,
and claims about their order. A figure passes when ours lies within the tolerance on either side: a
model that is far better than published is not a reproduction either. An order passes when the whole
95 % interval of the paired difference is above zero; it is `unclear` while the interval holds zero.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bert4rec.lab.contenders import Contender, build_contenders
from bert4rec.lab.lab_result import REPORTED, MeanEstimate
from bert4rec.lab.report_text import STOPPED_BY_CLOCK
from bert4rec.settings import Settings, Share, parse_settings

ProtocolName = Literal["full", "popularity", "uniform"]
Verdict = Literal["pass", "unclear", "miss", "not run"]
Name = Annotated[str, Field(pattern=r"^\w[\w.+-]*$")]  # also the name of a folder


class PublishedTraining(Settings):
    """How long the published model was trained, where that is known."""

    says: str
    sequences: float | None = None
    epochs: float | None = None


class PublishedModel(Settings):
    """One contender: a recipe with settings on top, and the figures published for it."""

    name: Name
    title: str
    recipe: str | None = None  # None starts from the reproduction's `base`
    set: tuple[str, ...] = ()
    published: dict[str, Share] = Field(default_factory=dict)
    source: str | None = None  # where it differs from the reproduction's
    training: PublishedTraining | None = None
    at: float | None = None  # the x-value on a curve


class SharedRecipe(Settings):
    """What contenders without a recipe of their own start from."""

    recipe: str
    set: tuple[str, ...] = ()
    training: PublishedTraining | None = None


class Tolerance(Settings):
    """The larger of a share of the published figure and a floor for small figures."""

    relative: Share
    absolute: Share

    def of(self, published: float) -> float:
        return max(self.absolute, self.relative * published)


class PublishedOrder(Settings):
    """`better` has a higher metric than each of `worse`."""

    says: str
    better: Name
    worse: tuple[Name, ...]
    metric: str = "NDCG@10"


class Reproduction(Settings):
    name: Name
    title: str
    source: str
    data: str
    data_note: str = ""  # what to do when the data is not there
    n_users: int | None = None  # of the published data, after its filters
    n_items: int | None = None
    data_set: tuple[str, ...] = ()  # settings of the section `data`, shared by all
    protocol: ProtocolName
    notes: str
    tolerance: Tolerance
    base: SharedRecipe | None = None
    contenders: tuple[PublishedModel, ...] = Field(min_length=1)
    order: tuple[PublishedOrder, ...] = ()
    curve_over: str | None = None  # what the x-values of a curve are
    attention_positions: int | None = None  # draw attention maps of the last positions

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        names = [contender.name for contender in self.contenders]
        if len(set(names)) < len(names):
            raise ValueError("two contenders have the same name")
        metrics = {m for c in self.contenders for m in c.published}
        for order in self.order:
            for name in (order.better, *order.worse):
                if name not in names:
                    raise ValueError(f"order {order.says!r} names {name!r}, which is not a contender")
            metrics.add(order.metric)
        if unknown := metrics - set(REPORTED):
            raise ValueError(f"unknown metrics {sorted(unknown)}: use {', '.join(REPORTED)}")
        if self.base is None and any(c.recipe is None for c in self.contenders):
            raise ValueError("a contender without a recipe needs a [base]")
        return self


@dataclass(frozen=True)
class Claim:
    """A published figure of one contender, or a difference of two, beside ours."""

    says: str  # the contender, or "better > worse"
    metric: str
    published: float | None  # None where an order was published without figures
    tolerance: float | None  # None for an order
    ours: MeanEstimate | None
    verdict: Verdict
    contenders: tuple[str, ...]
    source: str
    notes: tuple[str, ...] = ()

    @property
    def missed_by(self) -> float:
        """How far ours is outside the tolerance."""
        if self.ours is None or self.published is None or self.tolerance is None:
            return 0.0
        return max(0.0, abs(self.ours.value - self.published) - self.tolerance)


def judge_figure(ours: float | None, published: float, tolerance: float) -> Verdict:
    if ours is None:
        return "not run"
    # Figures have four digits: a tenth of the last one is not a difference.
    return "pass" if abs(ours - published) - tolerance <= 1e-5 else "miss"


def judge_order(difference: MeanEstimate | None) -> Verdict:
    if difference is None:
        return "not run"
    assert difference.low is not None
    assert difference.high is not None
    return "pass" if difference.low > 0 else "miss" if difference.high < 0 else "unclear"


@dataclass(frozen=True)
class TrainingLength:
    """How long a contender was trained here."""

    sequences: float | None
    epochs: float | None
    planned_epochs: float | None  # of the recipe
    fitted_epochs: float | None  # that fit the budget
    is_stopped_by_clock: bool = False


def shortfall(published: PublishedTraining | None, ours: TrainingLength) -> list[str]:
    """Notes for the reader when our training was shorter than the published one, or cut."""
    notes = []
    if published is not None:
        for done, wanted, what in (
            (ours.sequences, published.sequences, "sequences"),
            (ours.epochs, published.epochs, "epochs"),
        ):
            if done is not None and wanted is not None and done < wanted:
                share = f"{100 * done / wanted:.2g} %"
                notes.append(f"trained on {share} of the published {what} ({published.says})")
    planned, fitted = ours.planned_epochs or 0, ours.fitted_epochs or 0
    # A run with fewer epochs than fit was stopped by its own patience.
    if fitted < planned and (ours.epochs or 0) >= fitted:
        notes.append(f"the budget allowed {fitted:g} of {planned:g} epochs")
    if ours.is_stopped_by_clock:
        notes.append(STOPPED_BY_CLOCK)
    return notes


def contenders_of(
    reproduction: Reproduction, names: Sequence[str] = (), overrides: Sequence[str] = ()
) -> list[Contender]:
    """The contenders of a reproduction, or those that are named, with `overrides` on top."""
    known = {contender.name: contender for contender in reproduction.contenders}
    for name in names:
        if name not in known:
            raise ValueError(f"--models {name}: {reproduction.name} has {', '.join(known)}; choose among them")
    sources = []
    for each in (known[name] for name in known if name in names or not names):
        recipe, settings = each.recipe, each.set
        if recipe is None:
            assert reproduction.base is not None
            recipe, settings = reproduction.base.recipe, (*reproduction.base.set, *each.set)
        settings = (*reproduction.data_set, *settings)
        sources.append(Contender(each.name, each.title, each.name, recipe, settings=settings))
    return build_contenders(sources, overrides, reproduction.data_set)


def reproduction_names() -> list[str]:
    folder = resources.files("bert4rec") / "reproductions"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_reproduction(source: str) -> Reproduction:
    """A reproduction of the package by its name, or a TOML file of the user."""
    if source.endswith(".toml"):
        path = Path(source)
        try:
            text, name = path.read_text(encoding="utf-8"), path.stem
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    elif source in reproduction_names():
        file = resources.files("bert4rec") / "reproductions" / f"{source}.toml"
        text, name = file.read_text(encoding="utf-8"), source
    else:
        raise ValueError(
            f"no reproduction is named {source!r}: there are {', '.join(reproduction_names())}; "
            "or pass a TOML file of your own"
        )
    try:
        return parse_settings(Reproduction, {"name": name} | tomllib.loads(text), "")
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source}: not a TOML file ({error})") from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
