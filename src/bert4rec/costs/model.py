"""Seconds from counts: the constants that were fitted to measurements, and how far off they are."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from bert4rec.config import Config
from bert4rec.costs.work import PARALLEL, Step, work_of_answer, work_of_index, work_of_step

# Two workers on two cores were measured. More cores share the memory and its bandwidth.
EFFICIENCY = 0.8  # of each further core; an assumption
MEASURED_CORES = 2


@dataclass(frozen=True)
class CostModel:
    constants: dict[str, dict[str, float]]
    errors: dict[str, dict[str, float | None]]  # of a kind: typical, worst, n_points
    measured: dict[str, Any]  # when, on what, with which commit
    points: list[dict[str, Any]]

    def step_seconds(self, step: Step) -> float:
        """A step of one process, without what it exchanges with others."""
        work, seconds = work_of_step(step), self.constants["training"]
        parallel = sum(seconds[name] * work[name] for name in PARALLEL)
        serial = sum(seconds[name] * work[name] for name in work if name not in PARALLEL)
        return parallel / efficiency(step.workers) + serial

    def scoring_seconds(self, config: Config, items: float, length: float, cores: int) -> float:
        """One of many users, when all cores work on them."""
        work = work_of_answer(config, items, length)
        return _dot(self.constants["scoring"], work) / (cores * efficiency(cores))

    def validation_seconds(self, config: Config, items: float, length: float, cores: int) -> float:
        """One user of a validation: always compared with all the items."""
        work = work_of_answer(config, items, length)
        return _dot(self.constants["validation"], work) / (cores * efficiency(cores))

    def request_seconds(self, config: Config, items: float, length: float) -> float:
        return _dot(self.constants["request"], work_of_answer(config, items, length))

    def preparing_seconds(self, interactions: float, cores: int) -> float:
        """Without the disk. Rows are shared out over the cores; starting is not."""
        work, seconds = work_of_preparing(interactions), self.constants["preparing"]
        share = MEASURED_CORES / (cores * efficiency(cores))
        return seconds["rows"] * work["rows"] * share + seconds["start"] * work["start"]

    def index_seconds(self, items: int, dim: int, cores: int) -> float:
        """Building an index, by all cores of a machine."""
        work = work_of_index(items, dim)
        return _dot(self.constants["index"], work) / (cores * efficiency(cores))

    def exchange_seconds(self, n_bytes: float, bytes_a_second: float, hops: int) -> float:
        """Bytes that a process sends, and the waiting for `hops` others one after another."""
        return n_bytes / bytes_a_second + hops * self.constants["exchange"]["hops"]

    @property
    def local_bytes_a_second(self) -> float:
        """Between processes of one machine."""
        return 1e9 / self.constants["exchange"]["gigabytes"]

    def beyond(self, interactions: float, **numbers: float) -> list[str]:
        """Which of these numbers are larger than any that was measured."""
        points = [point for point in self.points if "error" not in point]
        steps = [point for point in points if point["kind"] == "training"]
        rows = max(point["rows"] for point in points if point["kind"] == "preparing")
        return [
            name for name, value in numbers.items() if value > max(point[name] for point in steps)
        ] + (["interactions"] if interactions > rows else [])


def work_of_preparing(interactions: float) -> dict[str, float]:
    return {"rows": interactions / 1e6, "start": 1.0}


def work_of_exchange(n_bytes: float) -> dict[str, float]:
    """An all-reduce between two processes, each of which sends all of it once."""
    return {"gigabytes": n_bytes / 1e9, "hops": 2.0}


def efficiency(cores: int) -> float:
    """What a core is worth where `cores` of them work, against one of the two measured."""
    if cores <= MEASURED_CORES:
        return 1.0
    return (MEASURED_CORES + EFFICIENCY * (cores - MEASURED_CORES)) / cores


@cache
def measured_costs() -> CostModel:
    """The model that comes with the package."""
    file = resources.files("bert4rec") / "costs" / "measurements.json"
    return cost_model(json.loads(file.read_text(encoding="utf-8")))


def cost_model(measurements: dict[str, Any]) -> CostModel:
    return CostModel(
        measurements["constants"],
        measurements["errors"],
        measurements["measured"],
        measurements["points"],
    )


def _dot(seconds: dict[str, float], work: dict[str, float]) -> float:
    return math.fsum(seconds[name] * amount for name, amount in work.items())
