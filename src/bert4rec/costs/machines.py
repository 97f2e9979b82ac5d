"""Machines, the processes on them, and what these send each other in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bert4rec.costs.model import CostModel
from bert4rec.costs.work import Step
from bert4rec.parallel import MOST_WORKERS

FLOAT, INDEX = 4, 8
# What gradients get of a network's nominal speed: an assumption, as no network was measured.
USED_NETWORK = 0.6
GIGABIT = 1e9 / 8


@dataclass(frozen=True)
class Machine:
    cores: int = 16
    memory: float = 64e9  # bytes
    network: float = 10.0  # gigabits a second

    def __post_init__(self) -> None:
        for name, value in (
            ("cores", self.cores),
            ("memory", self.memory),
            ("network", self.network),
        ):
            if not value > 0:
                raise ValueError(f"--{name} is {value:g}: give what a machine has, above 0")


@dataclass(frozen=True)
class Layout:
    machines: int
    processes: int  # on each machine
    workers: int  # threads of each process

    @property
    def world(self) -> int:
        return self.machines * self.processes


def layout_of(machine: Machine, machines: int, processes: int | None) -> Layout:
    """As few processes as use all cores, unless their number is given."""
    if processes is None:
        processes = math.ceil(machine.cores / MOST_WORKERS)
    if processes > machine.cores:
        raise ValueError(
            f"--processes is {processes} on a machine with {machine.cores} cores: give each at "
            "least one core"
        )
    return Layout(machines, processes, min(MOST_WORKERS, machine.cores // processes))


def sent_bytes(step: Step) -> float:
    """What each process sends in a step.

    Dense gradients are all-reduced in a ring, (n - 1) / n of them twice. Of tables with a sampled
    loss the touched rows and their numbers go to all others. Rows of a sharded table are fetched
    before the step and their gradients are sent back: twice the rows, to their owners only.
    """
    world = step.processes
    if world == 1:
        return 0.0
    dense = 2 * (world - 1) / world * step.dense_parameters * FLOAT
    if not step.updates_rows_only:
        return dense
    distinct = min(step.touched, float(step.items))
    row = step.dim * FLOAT + INDEX
    if step.is_sharded:
        return dense + 2 * distinct * row * (world - 1) / world
    return dense + distinct * row * (world - 1)


def exchange_seconds(costs: CostModel, machine: Machine, layout: Layout, step: Step) -> float:
    """Waiting for the others; nothing of it is taken to overlap with computing."""
    if layout.world == 1:
        return 0.0
    n_bytes, speed = sent_bytes(step), costs.local_bytes_a_second
    if layout.machines > 1:  # the processes of a machine share its network
        speed = min(speed, machine.network * GIGABIT * USED_NETWORK)
        if step.updates_rows_only:
            n_bytes *= layout.processes
    return costs.exchange_seconds(n_bytes, speed, 2 * (layout.world - 1))


def rows_held(items: int, layout: Layout) -> int:
    """Rows of a sharded item table that one process keeps, with their moments."""
    return math.ceil(items / layout.world)
