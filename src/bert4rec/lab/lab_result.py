"""What a lab found, as `report.json` stores it: aggregates only.

A committed report must not hold rows of licensed data, so nothing here is about one user or one
item. Everything that a report shows is computed before, so that `report.json` alone is enough to
write it again years after the runs were deleted.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

FORMAT_VERSION: Literal[2] = 2
FULL = "full"
RANKED_BY = "NDCG@10"  # under full ranking: what "best" means throughout a report
COMPARED = ("NDCG@10", "HR@10")
REPORTED = ("HR@1", "HR@5", "HR@10", "HR@20", "NDCG@5", "NDCG@10", "NDCG@20", "MRR")


@dataclass(frozen=True)
class MeanEstimate:
    """A mean over users, with its 95 % interval over users where that is known."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class DifferenceToBest(MeanEstimate):
    """A model minus the best one, paired by user; the interval is not corrected, `holm_p` is."""

    p_value: float  # two-sided
    holm_p: float


@dataclass(frozen=True)
class RunCost:
    """What one run took; None is unknown or does not apply (a counted model has no epochs)."""

    training_seconds: float | None = None
    epochs: float | None = None
    budget_minutes: float | None = None
    n_parameters: int | None = None
    peak_memory_mb: float | None = None
    scoring_users_per_second: float | None = None
    stopped_by_clock: bool | None = None  # before its learning rate had decayed to zero


@dataclass(frozen=True)
class CurveValidation:
    """One validation: a point of a learning curve."""

    stage: str
    epoch: int
    minutes: float  # of training and validation so far
    loss: float | None
    ndcg_10: float
    hr_10: float | None


@dataclass(frozen=True)
class UserBin:
    """Users whose number (history length, or training count of the target) is in low..high."""

    low: int
    high: int
    n_users: int

    def __str__(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,}–{self.high:,}"


@dataclass(frozen=True)
class ModelResult:
    """One model. Tuples "by seed" are in the order of `seeds`."""

    name: str
    title: str
    settings: dict[str, Any]  # that differ from the model's defaults
    seeds: tuple[int, ...]
    is_deterministic: bool  # every seed gives the same model, so one was run
    figures: dict[str, dict[str, MeanEstimate]]  # protocol -> metric; users' means over seeds
    seed_figures: dict[str, dict[str, tuple[MeanEstimate, ...]]]  # the same by seed
    costs: tuple[RunCost, ...]  # by seed
    curves: tuple[tuple[CurveValidation, ...], ...]  # by seed; empty for counted models
    hit_rates: tuple[float, ...]  # HR@1, HR@2, … under full ranking
    by_bin: dict[str, tuple[float, ...]]  # NDCG@10 in each of `LabResult.bins`
    differences: dict[str, DifferenceToBest]  # by metric; empty for the best model itself

    @property
    def score(self) -> MeanEstimate:
        return self.figures[FULL][RANKED_BY]

    @property
    def is_single_training(self) -> bool:
        """Whether another seed might give another result, and none was tried."""
        return len(self.seeds) == 1 and not self.is_deterministic

    def seed_range(self, metric: str, protocol: str = FULL) -> tuple[float, float] | None:
        """Lowest and highest mean of a seed; None with one seed."""
        values = [figure.value for figure in self.seed_figures[protocol][metric]]
        return (min(values), max(values)) if len(values) > 1 else None

    def mean_cost(self, name: str) -> float | None:
        known = [value for cost in self.costs if (value := getattr(cost, name)) is not None]
        return sum(known) / len(known) if known else None

    @property
    def budget_minutes(self) -> float | None:
        """The largest budget of any seed; None for a model without epochs, which needs none."""
        known = [c.budget_minutes for c in self.costs if c.epochs is not None and c.budget_minutes is not None]
        return max(known, default=None)


@dataclass(frozen=True)
class MissingRun:
    """A run without a result: its error when it failed, None when it has not finished."""

    name: str
    title: str
    seed: int
    error: str | None


@dataclass(frozen=True)
class PlannedModel:
    """What to type to run a model of the lab."""

    source: str  # a recipe, the name of a TOML file, or a contender of a reproduction
    overrides: tuple[str, ...]  # `section.key=value`, for --set
    budget_minutes: float | None


@dataclass(frozen=True)
class LabFacts:
    """What was run, on what, where."""

    data: dict[str, Any]
    settings: dict[str, Any]  # of data and evaluation, shared by all, that are not the defaults
    split: str
    models: tuple[str, ...]
    seeds: tuple[int, ...]
    budget_minutes: float  # of the models that were added last
    machine: dict[str, Any]
    versions: dict[str, str]
    created: str
    plans: dict[str, PlannedModel]  # by model
    reproduction: str | None = None  # which one the lab belongs to, if any


@dataclass(frozen=True)
class LabResult:
    """Models are sorted by full-ranking NDCG@10, the best first."""

    facts: LabFacts
    protocols: tuple[str, ...]
    n_users: int
    n_negatives: int | None
    n_resamples: int
    bins: dict[str, tuple[UserBin, ...]]  # by "history" length and by "popularity" of the target
    models: tuple[ModelResult, ...]
    missing: tuple[MissingRun, ...]
    format_version: Literal[2] = FORMAT_VERSION

    @property
    def failed(self) -> list[MissingRun]:
        return [run for run in self.missing if run.error is not None]

    @property
    def unfinished(self) -> list[MissingRun]:
        return [run for run in self.missing if run.error is None]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
