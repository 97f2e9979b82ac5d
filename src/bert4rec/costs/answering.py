"""Answers of a trained model: what a process that gives them keeps, and how many fit a machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bert4rec.config import Config
from bert4rec.costs.machines import Machine
from bert4rec.costs.memory import USABLE, serving_bytes
from bert4rec.costs.model import CostModel
from bert4rec.costs.workload import Workload
from bert4rec.parallel import MOST_WORKERS
from bert4rec.retrieval.build import LARGE

INDEX_SPEEDUP = 10.0  # against comparing with all items: the least that is asked of it


@dataclass(frozen=True)
class Serving:
    """A process that answers; one with compressed vectors has no index and compares with all."""

    uses_index: bool
    compresses: bool
    memory: float  # bytes
    compared: float  # items, or as many as the search of an index is worth


@dataclass(frozen=True)
class Scoring:
    """All users: processes of some threads on one machine, Ray's actors of one CPU on several."""

    processes: int  # on each machine
    memory: float  # bytes on each machine
    seconds: float


def serving_of(costs: CostModel, config: Config, items: int, machine: Machine) -> Serving:
    """As `train` leaves the model, if that fits; else compressed."""
    uses_index = items >= LARGE
    whole = serving_bytes(costs, config, items, has_index=uses_index)
    if whole <= USABLE * machine.memory:
        compared = items / INDEX_SPEEDUP if uses_index else float(items)
        return Serving(uses_index, False, whole, compared)
    small = serving_bytes(costs, config, items, kind="int8")
    if small > USABLE * machine.memory:
        raise ValueError(
            f"a machine with {machine.memory / 1e9:.3g} GB does not hold a process that answers: "
            f"with the vectors of {items:,} items as int8 it would need about {small / 1e9:,.3g} "
            "GB. Use machines with more --memory, a smaller --dim, or drop rare items"
        )
    return Serving(False, True, small, float(items))


def scoring_of(
    costs: CostModel,
    config: Config,
    workload: Workload,
    machine: Machine,
    machines: int,
    serving: Serving,
) -> Scoring:
    """As many processes as use the cores, each of which loads the model, if the memory allows."""
    fitting = math.floor(USABLE * machine.memory / serving.memory)
    if machines > 1:
        processes = cores = min(machine.cores, fitting)
    else:
        processes = min(math.ceil(machine.cores / MOST_WORKERS), fitting)
        cores = min(machine.cores, MOST_WORKERS * processes)
    each = costs.scoring_seconds(config, serving.compared, workload.length, cores)
    return Scoring(processes, processes * serving.memory, each * workload.users / machines)
