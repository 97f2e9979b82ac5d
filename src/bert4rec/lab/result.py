"""What a lab found, as `report.json` keeps it: aggregates only.

A committed report must not hold rows of licensed data, so nothing in here is about one user or
one item. Whatever a report shows is computed before it comes here, so that a report can be
written again from `report.json` alone, years after the runs were deleted.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Self

FORMAT_VERSION = 1
FULL = "full"
RANKED_BY = "NDCG@10"  # under full ranking: what "best" means throughout a report
COMPARED = ("NDCG@10", "HR@10")
REPORTED = ("HR@1", "HR@5", "HR@10", "HR@20", "NDCG@5", "NDCG@10", "NDCG@20", "MRR")


@dataclass(frozen=True)
class Figure:
    """A mean over users, and its 95 % interval over users where it is known."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Difference:
    """A model minus the best one, paired by user; the interval is not corrected, `holm_p` is."""

    value: float
    low: float
    high: float
    p_value: float  # two-sided
    holm_p: float


@dataclass(frozen=True)
class Cost:
    """What one run took; None is not known, or does not apply (a counted model has no epochs)."""

    training_seconds: float | None = None
    epochs: float | None = None
    budget_minutes: float | None = None
    n_parameters: int | None = None
    peak_memory_mb: float | None = None
    scoring_users_per_second: float | None = None
    stopped_by_clock: bool | None = None  # before its learning rate had decayed to zero


@dataclass(frozen=True)
class Validation:
    """A point of a learning curve."""

    stage: str
    epoch: int
    minutes: float  # of training and validation so far
    loss: float | None
    ndcg_10: float
    hr_10: float | None


@dataclass(frozen=True)
class Bin:
    """Users whose number (history length, or training count of the target) is in low..high."""

    low: int
    high: int
    n_users: int


@dataclass(frozen=True)
class ModelResult:
    """One model. Tuples "by seed" are in the order of `seeds`."""

    name: str
    title: str
    settings: dict[str, Any]  # what differs from the model's defaults
    seeds: tuple[int, ...]
    is_without_chance: bool  # counted: every seed gives the same model, so one was run
    figures: dict[str, dict[str, Figure]]  # protocol -> metric; users' means over seeds
    seed_figures: dict[str, dict[str, tuple[Figure, ...]]]  # the same for each seed
    costs: tuple[Cost, ...]  # by seed
    curves: tuple[tuple[Validation, ...], ...]  # by seed; empty for counted models
    hit_rates: tuple[float, ...]  # HR@1, HR@2, … under full ranking
    by_history_length: tuple[float, ...]  # NDCG@10 in each of `LabResult.history_bins`
    by_popularity: tuple[float, ...]  # NDCG@10 in each of `LabResult.popularity_bins`
    differences: dict[str, Difference]  # to the best model; empty for the best itself

    @property
    def score(self) -> Figure:
        return self.figures[FULL][RANKED_BY]

    def seed_range(self, metric: str, protocol: str = FULL) -> tuple[float, float] | None:
        """Lowest and highest mean of a seed; None when there is one seed only."""
        values = [figure.value for figure in self.seed_figures[protocol][metric]]
        return (min(values), max(values)) if len(values) > 1 else None

    def mean_cost(self, name: str) -> float | None:
        known = [value for cost in self.costs if (value := getattr(cost, name)) is not None]
        return sum(known) / len(known) if known else None

    @property
    def has_epochs(self) -> bool:
        """Was it trained, rather than fitted in one go? Only then a budget means something."""
        return any(cost.epochs is not None for cost in self.costs)

    @property
    def budget_minutes(self) -> float | None:
        """The longest that any seed was given; None for a model without epochs."""
        if not self.has_epochs:
            return None
        known = [c.budget_minutes for c in self.costs if c.budget_minutes is not None]
        return max(known, default=None)


@dataclass(frozen=True)
class MissingRun:
    """A run without a result: its error when it failed, None when it has not finished."""

    name: str
    title: str
    seed: int
    error: str | None


@dataclass(frozen=True)
class Planned:
    """What was typed to have a model in the lab."""

    source: str  # a recipe, the name of a settings file, or a contender of a reproduction
    overrides: tuple[str, ...]  # `section.key=value`, each given with --set
    budget_minutes: float | None


@dataclass(frozen=True)
class Facts:
    """`lab.json`: what was run, on what, where."""

    data: dict[str, Any]
    settings: dict[str, Any]  # of data and evaluation, the same for all; what is not the default
    split: str
    models: tuple[str, ...]
    seeds: tuple[int, ...]
    budget_minutes: float | None
    machine: dict[str, Any]
    versions: dict[str, str]
    created: str
    plans: dict[str, Planned] = field(default_factory=dict)  # by model
    reproduction: str | None = None  # that the lab belongs to, as `bert4rec reproduce` takes it


@dataclass(frozen=True)
class LabResult:
    """Models are sorted by full-ranking NDCG@10, the best first."""

    facts: Facts
    protocols: tuple[str, ...]
    n_users: int
    n_negatives: int | None
    n_resamples: int
    history_bins: tuple[Bin, ...]
    popularity_bins: tuple[Bin, ...]
    models: tuple[ModelResult, ...]
    missing: tuple[MissingRun, ...]
    format_version: int = FORMAT_VERSION

    @property
    def failed(self) -> list[MissingRun]:
        return [run for run in self.missing if run.error is not None]

    @property
    def unfinished(self) -> list[MissingRun]:
        return [run for run in self.missing if run.error is None]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        from pydantic import TypeAdapter, ValidationError

        try:
            found = TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            raise ValueError(
                f"this is not a lab report ({place}: {first['msg']}): write it again with "
                "`bert4rec lab`"
            ) from None
        if found.format_version != FORMAT_VERSION:
            raise ValueError(
                f"the lab report has format version {found.format_version}, this program reads "
                f"{FORMAT_VERSION}: write it again with `bert4rec lab`"
            )
        return found
