"""Reproductions as data: published figures, and claims about which model is better.

A reproduction is a TOML file that names a data set, contenders with the figures published for them,
and claims about their order. A figure passes when ours lies within the tolerance on either side: a
model that is far better than published is not a reproduction either. An order passes when the whole
95 % interval of the paired difference is above zero; it is `unclear` while the interval holds zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from bert4rec.config import read_toml
from bert4rec.lab.contenders import Contender, build_contenders
from bert4rec.lab.lab_result import REPORTED, MeanEstimate
from bert4rec.settings import Settings, Share, parse_settings

ProtocolName = Literal["full", "popularity", "uniform"]
Verdict = Literal["pass", "unclear", "miss", "not run"]
Name = Annotated[str, Field(pattern=r"^\w[\w.+-]*$")]  # also the name of a folder


class PublishedTraining(Settings):
    """How long the published model was trained, where that is known."""

    says: str
    sequences: float | None = None
    epochs: float | None = None


class SharedRecipe(Settings):
    """What contenders without a recipe of their own start from."""

    recipe: str
    set: tuple[str, ...] = ()
    training: PublishedTraining | None = None


class PublishedModel(Settings):
    """One contender: a recipe with settings on top, and the figures published for it."""

    name: Name
    title: str
    recipe: str = ""  # without one it starts from the reproduction's `base`
    set: tuple[str, ...] = ()
    published: dict[str, Share] = Field(default_factory=dict)
    source: str | None = None  # where it differs from the reproduction's
    training: PublishedTraining | None = None
    at: float | None = None  # the x-value on a curve

    def on_top_of(self, base: SharedRecipe) -> PublishedModel:
        settings, training = (*base.set, *self.set), self.training or base.training
        return self.model_copy(update={"recipe": base.recipe, "set": settings, "training": training})


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

    @field_validator("contenders")
    @classmethod
    def _start_from_base(cls, contenders: tuple[PublishedModel, ...], others: ValidationInfo) -> Any:
        base = others.data.get("base")
        if base is None and not all(each.recipe for each in contenders):
            raise ValueError("a contender without a recipe needs a [base]")
        return tuple(each.on_top_of(base) if base and not each.recipe else each for each in contenders)

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
        return self


@dataclass(frozen=True)
class Claim:
    """A published figure of one contender, or a difference of two, and ours once they were run."""

    says: str  # the contender, or "better > worse"
    metric: str
    published: float | None  # None where an order was published without figures
    tolerance: float | None  # None for an order
    contenders: tuple[str, ...]
    source: str
    ours: MeanEstimate | None = None
    verdict: Verdict = "not run"
    missed_by: float = 0.0  # how far ours is outside the tolerance
    notes: tuple[str, ...] = ()


def published_claims(reproduction: Reproduction) -> Iterator[Claim]:
    """All figures, then all orders."""
    models = {model.name: model for model in reproduction.contenders}
    for model in models.values():
        for metric, value in model.published.items():
            source, tolerance = model.source or reproduction.source, reproduction.tolerance.of(value)
            yield Claim(model.title, metric, value, tolerance, (model.name,), source)
    for order in reproduction.order:
        for name in order.worse:
            better, worse = models[order.better], models[name]
            above, below = (each.published.get(order.metric) for each in (better, worse))
            difference = None if above is None or below is None else above - below
            says = f"{better.title} > {worse.title}"
            yield Claim(says, order.metric, difference, None, (better.name, worse.name), order.says)


def judge(claim: Claim, ours: MeanEstimate | None, notes: Iterable[str] = ()) -> Claim:
    """The claim with our figure, or our difference, and the verdict on it."""
    verdict: Verdict
    missed_by = 0.0
    if ours is None:
        verdict = "not run"
    elif claim.published is not None and claim.tolerance is not None:
        outside = abs(ours.value - claim.published) - claim.tolerance
        missed_by = outside if outside > 1e-5 else 0.0  # a tenth of the last digit is not a difference
        verdict = "miss" if missed_by else "pass"
    else:
        assert ours.low is not None
        assert ours.high is not None
        verdict = "pass" if ours.low > 0 else "miss" if ours.high < 0 else "unclear"
    return replace(claim, ours=ours, verdict=verdict, missed_by=missed_by, notes=tuple(notes))


def shortfall(
    published: PublishedTraining | None, sequences: float | None, epochs: float | None, planned: float, fitted: float
) -> list[str]:
    """Notes for the reader when our training was shorter than the published one, or cut.

    `planned` are the epochs of the recipe, `fitted` those that fit the budget.
    """
    notes = []
    if published is not None:
        for done, wanted, what in ((sequences, published.sequences, "sequences"), (epochs, published.epochs, "epochs")):
            if done is not None and wanted is not None and done < wanted:
                notes.append(f"trained on {100 * done / wanted:.2g} % of the published {what} ({published.says})")
    if (epochs or 0) >= fitted < planned:  # with fewer epochs than fit, its own patience stopped it
        notes.append(f"the budget allowed {fitted:g} of {planned:g} epochs")
    return notes


def contenders_of(
    reproduction: Reproduction, names: Sequence[str] = (), overrides: Sequence[str] = ()
) -> list[Contender]:
    """The contenders of a reproduction, or those that are named, with `overrides` on top."""
    known = {each.name: each for each in reproduction.contenders}
    for name in names:
        if name not in known:
            raise ValueError(f"--models {name}: {reproduction.name} has {', '.join(known)}; choose among them")
    shared = reproduction.data_set
    sources = [
        Contender(each.name, each.title, each.name, each.recipe, settings=(*shared, *each.set))
        for each in reproduction.contenders
        if each.name in names or not names
    ]
    return build_contenders(sources, overrides, shared)


def reproduction_names() -> list[str]:
    folder = resources.files("bert4rec") / "reproductions"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_reproduction(source: str) -> Reproduction:
    """A reproduction of the package by its name, or a TOML file of the user."""
    if source.endswith(".toml"):
        values, name = read_toml(Path(source)), Path(source).stem
    elif source in reproduction_names():
        values, name = read_toml(resources.files("bert4rec") / "reproductions" / f"{source}.toml"), source
    else:
        raise ValueError(
            f"no reproduction is named {source!r}: there are {', '.join(reproduction_names())}; "
            "or pass a TOML file of your own"
        )
    try:
        return parse_settings(Reproduction, {"name": name} | values, "")
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
