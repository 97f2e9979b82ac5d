"""How to run it: how many machines, how items are searched, and what each part takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from bert4rec.config import Config, override_config
from bert4rec.costs.answering import Scoring, Serving, scoring_of, serving_of
from bert4rec.costs.machines import Machine, layout_of
from bert4rec.costs.memory import (
    USABLE,
    disk_bytes,
    disk_seconds,
    serving_bytes,
    sorting_bytes,
    training_bytes,
    vector_bytes,
)
from bert4rec.costs.model import CostModel
from bert4rec.costs.runs import Run, best_run
from bert4rec.costs.work import BLOCK
from bert4rec.costs.workload import Workload
from bert4rec.retrieval.build import LARGE

MOST_MACHINES = 256
SHORT_HOURS = 1.0  # a training as short as this is left to one process
NEARLY = 1.3  # times as long as with the quickest number of machines
RARE = 5.0  # interactions an item, below which rare items should go


@dataclass(frozen=True)
class Advice:
    workload: Workload
    machine: Machine
    run: Run
    hours: float
    preparing: float  # seconds
    sorting: float  # bytes of memory
    scoring: Scoring
    request: float
    serving: Serving
    gathered: float  # bytes of the first process when training is over
    vectors: dict[str, float]
    disk: dict[str, float]
    beyond: list[str]  # what is larger than anything measured

    @property
    def is_in_time(self) -> bool:
        return self.run.whole <= 3600 * self.hours

    @property
    def drops_rare(self) -> bool:
        return self.workload.interactions / self.workload.items < RARE

    @property
    def notes(self) -> list[str]:
        """What a reader should know before believing a figure."""
        notes = []
        if self.beyond:
            notes.append(
                f"larger than anything measured, so extrapolated: {', '.join(self.beyond)}"
            )
        if not self.is_in_time:
            notes.append(
                f"not done in {self.hours:g} hours; more machines than these would save little or "
                "were not asked for"
            )
        if self.drops_rare:
            each = self.workload.interactions / self.workload.items
            notes.append(
                f"an item has {each:.1f} interactions on average: little can be learned of most, "
                "so the command drops the rarest, and fewer items than planned for will be left"
            )
        if self.gathered > USABLE * self.machine.memory:
            notes.append(
                f"when training is over, its first process needs about {self.gathered / 1e9:,.3g} "
                "GB, for the whole item table and for its index: give the first machine as much"
            )
        if self.run.exchange > 0.5 * self.run.step:
            notes.append("most of a step is waiting for other processes")
        return notes


def advise(
    costs: CostModel,
    workload: Workload,
    config: Config,
    machine: Machine,
    *,
    machines: int | None = None,
    processes: int | None = None,
    hours: float = 24.0,
    loss: str | None = None,
) -> Advice:
    """One process where that is quick; else the fewest machines with the memory, done in time."""
    _check(config, workload, machines, processes, hours)
    if machines is None and processes is None:
        alone = best_run(costs, workload, config, machine, layout_of(machine, 1, 1), loss)
        if alone is not None and alone.whole <= 3600 * min(hours, SHORT_HOURS):
            return _advice(costs, workload, machine, alone, hours)
    counts = [machines] if machines else [2**n for n in range(MOST_MACHINES.bit_length())]
    runs: list[Run] = []
    for n in counts:
        layout = layout_of(machine, n, processes)
        if layout.world <= workload.users:
            run = best_run(costs, workload, config, machine, layout, loss)
            runs += [] if run is None else [run]
        if runs and runs[-1].whole <= 3600 * hours:
            break
    if not runs:
        _raise_too_large(costs, workload, config, machine, counts[-1], processes)
    quickest = min(run.whole for run in runs)
    enough = max(3600 * hours, NEARLY * quickest)  # where none is in time, more would save little
    chosen = next(run for run in runs if run.whole <= enough)
    return _advice(costs, workload, machine, chosen, hours)


def _advice(
    costs: CostModel, workload: Workload, machine: Machine, run: Run, hours: float
) -> Advice:
    config, items, length = run.config, workload.items, workload.length
    serving = serving_of(costs, config, items, machine)
    computing = costs.preparing_seconds(workload.interactions, machine.cores)
    return Advice(
        workload=workload,
        machine=machine,
        run=run,
        hours=hours,
        preparing=computing + disk_seconds(costs, workload, machine.memory),
        sorting=sorting_bytes(costs, workload, machine.memory),
        scoring=scoring_of(costs, config, workload, machine, run.layout.machines, serving),
        request=costs.request_seconds(config, serving.compared, length),
        serving=serving,
        gathered=serving_bytes(costs, config, items, has_index=items >= LARGE),
        vectors=vector_bytes(config, items),
        disk=disk_bytes(costs, config, workload),
        beyond=costs.beyond(
            interactions=workload.interactions,
            items=items,
            length=min(length, config.model.max_len),
            dim=config.model.dim,
            layers=config.model.layers,
        ),
    )


def _check(
    config: Config,
    workload: Workload,
    machines: int | None,
    processes: int | None,
    hours: float,
) -> None:
    if config.model.name not in BLOCK:
        raise ValueError(
            f"model.name is {config.model.name!r}: costs were measured for "
            f"{' and '.join(BLOCK)} only; choose a recipe of one of these"
        )
    for name, value in (("machines", machines), ("processes", processes), ("hours", hours)):
        if value is not None and not value > 0:
            raise ValueError(f"--{name} is {value:g}: give a number above 0")
    world = (machines or 1) * (processes or 1)
    if world > workload.users:
        raise ValueError(
            f"{world:,} processes and {workload.users:,} users: every process needs users of its "
            "own; lower --machines or --processes"
        )


def _raise_too_large(
    costs: CostModel,
    workload: Workload,
    config: Config,
    machine: Machine,
    machines: int,
    processes: int | None,
) -> NoReturn:
    layout = layout_of(machine, machines, processes)
    smallest = override_config(
        config, ["training.loss=sampled-softmax", f"training.workers={layout.workers}"]
    )
    needed = training_bytes(costs, smallest, workload, layout, is_sharded=layout.world > 1)
    raise ValueError(
        f"{machines:,} machines with {machine.memory / 1e9:.3g} GB each do not hold this: each "
        f"would need about {needed / 1e9:,.3g} GB. Use machines with more --memory, more "
        "--machines, a smaller --dim, or drop rare items"
    )


def as_dict(advice: Advice) -> dict[str, Any]:
    """For --json: bytes and seconds, whole numbers where they are counts."""
    run, training = advice.run, advice.run.config.training
    return {
        "workload": {
            "users": advice.workload.users,
            "items": advice.workload.items,
            "length": advice.workload.length,
            "interactions": advice.workload.interactions,
        },
        "machines": run.layout.machines,
        "processes_a_machine": run.layout.processes,
        "workers_a_process": run.layout.workers,
        "loss": training.loss,
        "negatives": None if training.loss == "cross-entropy" else training.n_negatives,
        "batch_size": training.batch_size,
        "learning_rate": training.learning_rate,
        "shards_items": run.is_sharded,
        "evaluated_users": run.evaluated,
        "evaluates_baselines": run.has_baselines,
        "retrieval": "faiss index" if advice.serving.uses_index else "exact",
        "compresses_vectors": advice.serving.compresses,
        "scoring_processes_a_machine": advice.scoring.processes,
        "seconds": {
            "preparing": advice.preparing,
            "step": run.step,
            "exchange_in_a_step": run.exchange,
            "epoch": run.epoch,
            "second_stage_epoch": run.second_epoch,
            "validation": run.validation,
            "training": run.total,
            "evaluation": run.evaluation,
            "building_the_index": run.indexing,
            "scoring_all_users": advice.scoring.seconds,
            "request": advice.request,
        },
        "epochs": training.epochs,
        "steps_an_epoch": run.steps_an_epoch,
        "bytes": {
            "training_a_machine": run.memory,
            "sorting": advice.sorting,
            "scoring_a_machine": advice.scoring.memory,
            "serving": advice.serving.memory,
            "item_vectors": advice.vectors,
            "disk": advice.disk,
        },
        "notes": advice.notes,
    }
