"""Published figures, and whether ours agree with them.

A reproduction is data: a TOML file that names a data set, contenders with the figures that were
published for them, and claims about who is better than whom. A figure passes when ours lies within
the tolerance on either side: a model that is far better than published is no reproduction either.
An order passes when the paired difference is above zero with its whole 95 % interval; it is
`unclear` while the interval holds zero.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from bert4rec.config import Settings, Share
from bert4rec.lab.result import REPORTED, Figure
from bert4rec.lab.words import STOPPED_BY_CLOCK

ProtocolName = Literal["full", "popularity", "uniform"]
Verdict = Literal["pass", "unclear", "miss", "not run"]
Name = Annotated[str, Field(pattern=r"^\w[\w.+-]*$")]  # also the name of a folder


class PublishedTraining(Settings):
    """How long the published model was trained, where that is known."""

    says: str
    sequences: float | None = None
    epochs: float | None = None


class Published(Settings):
    """One contender: a recipe with settings on top, and what was published for it."""

    name: Name
    title: str
    recipe: str | None = None  # None begins with the reproduction's `base`
    set: tuple[str, ...] = ()
    published: dict[str, Share] = Field(default_factory=dict)
    source: str | None = None  # where it differs from the reproduction's
    training: PublishedTraining | None = None
    at: float | None = None  # the place on a curve


class Base(Settings):
    recipe: str
    set: tuple[str, ...] = ()
    training: PublishedTraining | None = None


class Tolerance(Settings):
    """The larger of two: a share of the published figure, and a floor for small figures."""

    relative: Share
    absolute: Share

    def of(self, published: float) -> float:
        return max(self.absolute, self.relative * published)


class Order(Settings):
    """`better` is above each of `worse`."""

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
    data_set: tuple[str, ...] = ()  # settings of the section `data`, for all contenders
    protocol: ProtocolName
    notes: str
    tolerance: Tolerance
    base: Base | None = None
    contenders: tuple[Published, ...] = Field(min_length=1)
    order: tuple[Order, ...] = ()
    curve_over: str | None = None  # what `at` of the contenders is
    attention_positions: int | None = None  # draw attention maps of so many last positions

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        names = [contender.name for contender in self.contenders]
        if len(set(names)) < len(names):
            raise ValueError("two contenders have the same name")
        metrics = {m for c in self.contenders for m in c.published}
        for order in self.order:
            for name in (order.better, *order.worse):
                if name not in names:
                    raise ValueError(f"order {order.says!r} names {name!r}, which is no contender")
            metrics.add(order.metric)
        if unknown := metrics - set(REPORTED):
            raise ValueError(f"unknown metrics {sorted(unknown)}: use {', '.join(REPORTED)}")
        if self.base is None and any(c.recipe is None for c in self.contenders):
            raise ValueError("a contender without a recipe needs a [base]")
        return self


@dataclass(frozen=True)
class FigureClaim:
    """A published figure beside ours; `difference` is ours minus published."""

    contender: str
    title: str
    metric: str
    protocol: str
    source: str
    published: float
    tolerance: float
    ours: Figure | None
    difference: float | None
    verdict: Verdict
    missed_by: float  # how far outside the tolerance; 0 for a pass
    notes: tuple[str, ...]


@dataclass(frozen=True)
class OrderClaim:
    """`better` minus `worse`, paired by user; `published` is None where no figures were."""

    says: str
    better: str
    worse: str
    metric: str
    protocol: str
    published: float | None
    difference: Figure | None
    verdict: Verdict
    notes: tuple[str, ...]


def judge_figure(ours: float | None, published: float, tolerance: float) -> tuple[Verdict, float]:
    """The verdict, and by how much the tolerance was missed."""
    if ours is None:
        return "not run", 0.0
    outside = abs(ours - published) - tolerance
    # Figures have four digits: what agrees to a tenth of the last one is not told apart.
    return ("pass", 0.0) if outside <= 1e-5 else ("miss", outside)


def judge_order(difference: Figure | None) -> Verdict:
    if difference is None:
        return "not run"
    low = difference.value if difference.low is None else difference.low
    high = difference.value if difference.high is None else difference.high
    if low > 0:
        return "pass"
    return "miss" if high < 0 else "unclear"


def shortfall(
    published: PublishedTraining | None,
    *,
    sequences: float | None,
    epochs: float | None,
    planned_epochs: float | None,
    fitted_epochs: float | None,
    is_stopped_by_clock: bool = False,
) -> list[str]:
    """What a reader must know when our training was shorter than the published one, or cut.

    `planned_epochs` are the recipe's, `fitted_epochs` those that fit the budget.
    """
    notes = []
    if published is not None:
        for ours, theirs, what in (
            (sequences, published.sequences, "sequences"),
            (epochs, published.epochs, "epochs"),
        ):
            if ours is not None and theirs is not None and ours < theirs:
                share = f"{100 * ours / theirs:.2g} %"
                notes.append(f"trained on {share} of the published {what} ({published.says})")
    was_cut = (
        planned_epochs is not None
        and fitted_epochs is not None
        and epochs is not None
        and epochs >= fitted_epochs  # else it stopped by itself, having learned what it could
        and fitted_epochs < planned_epochs
    )
    if was_cut:
        notes.append(f"the budget allowed {fitted_epochs:g} of {planned_epochs:g} epochs")
    if is_stopped_by_clock:
        notes.append(STOPPED_BY_CLOCK)
    return notes


def reproduction_names() -> list[str]:
    folder = resources.files("bert4rec") / "reproductions"
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    )


def load_reproduction(source: str) -> Reproduction:
    """One of the package by its name, or a TOML file of one's own."""
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
        values: dict[str, Any] = tomllib.loads(text)
        return Reproduction.model_validate({"name": name} | values)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source}: not a TOML file ({error})") from None
    except ValidationError as error:
        found = [(".".join(map(str, e["loc"])) or "the file", e["msg"]) for e in error.errors()]
        raise ValueError(f"{source}: " + "; ".join(f"{at}: {what}" for at, what in found)) from None
