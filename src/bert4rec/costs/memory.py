"""Bytes of memory and of disk, from shapes; training by the same plan that `train` checks."""

from __future__ import annotations

from functools import lru_cache

from bert4rec.compression import NUMBERS_PER_BYTE
from bert4rec.config import Config
from bert4rec.costs.machines import Layout, rows_held
from bert4rec.costs.model import CostModel
from bert4rec.costs.workload import Workload
from bert4rec.training.plan import MemoryPlan, plan_memory

FLOAT = 4
# Numbers that a process keeps of each user and training window, from the arrays of a split and of
# an epoch's order: starts, ends, rows and targets, eight bytes each.
BYTES_A_USER, BYTES_A_WINDOW = 80, 32
BYTES_AN_ANSWER = 16  # a row of Parquet with a user, an item and a score: an assumption
ANSWERS = 10
PROCESS = 400 * 2**20  # Python, torch and what they map
SORTING = 0.5  # the share of a machine's memory that sorting may have
SPILLED = 2.0  # times the table: what sorting puts on disk, at most; an assumption
DISK_SPEED = 5e8  # bytes a second that a disk reads or writes; an assumption
USABLE = 0.9  # of a machine's memory


def training_bytes(
    costs: CostModel, config: Config, workload: Workload, layout: Layout, *, is_sharded: bool
) -> float:
    """Of all processes on one machine."""
    max_len = config.model.max_len
    plan = _planned(config, workload.items)
    state = plan
    if is_sharded:
        state = _planned(config, rows_held(workload.items, layout))
    windows, _ = workload.windows(max_len, config.training.window_step)
    users = workload.users / layout.world
    data = users * (BYTES_A_USER + windows * BYTES_A_WINDOW)
    ids = workload.items * costs.constants["memory"]["bytes_an_id"]
    each = state.parameters + state.optimizer + plan.batch + plan.process + data + ids
    return layout.processes * each


@lru_cache(maxsize=256)
def _planned(config: Config, items: int) -> MemoryPlan:
    """Several numbers of machines ask for the same; each answer makes a model without numbers."""
    return plan_memory(config, items, config.model.max_len)


def sorting_bytes(costs: CostModel, workload: Workload, memory: float) -> float:
    """What DuckDB should be allowed: all of the table if it fits, a part of the machine if not."""
    table = costs.constants["disk"]["table_bytes_a_row"] * workload.interactions
    return min(max(5e8, table), SORTING * memory)


def disk_seconds(costs: CostModel, workload: Workload, memory: float) -> float:
    """Of preparing: the table is read and the result written; what spills goes there and back."""
    disk = costs.constants["disk"]
    table = disk["table_bytes_a_row"] * workload.interactions
    moved = table + disk["prepared_bytes_a_row"] * workload.interactions
    if table > sorting_bytes(costs, workload, memory):
        moved += 2 * SPILLED * table
    return moved / DISK_SPEED


def vector_bytes(config: Config, items: int) -> dict[str, float]:
    """The item vectors of a served model, whole and compressed."""
    numbers = float(items) * config.model.dim
    return {
        "float32": FLOAT * numbers,
        "int8": numbers + FLOAT * items,
        "pq": numbers / NUMBERS_PER_BYTE,
    }


def serving_bytes(
    costs: CostModel, config: Config, items: int, *, has_index: bool = False, kind: str = "float32"
) -> float:
    """A process that answers; an index keeps the vectors once more, uncompressed."""
    ids = items * costs.constants["memory"]["bytes_an_id"]
    vectors = vector_bytes(config, items)
    return vectors[kind] + (vectors["float32"] if has_index else 0) + ids + PROCESS


def disk_bytes(costs: CostModel, config: Config, workload: Workload) -> dict[str, float]:
    disk = costs.constants["disk"]
    table = disk["table_bytes_a_row"] * workload.interactions
    parameters = vector_bytes(config, workload.items)["float32"]
    return {
        "the table": table,
        "prepared": disk["prepared_bytes_a_row"] * workload.interactions,
        "while sorting": SPILLED * table,
        "model and checkpoint": 5 * parameters,  # the model; weights, the best, two moments
        "recommendations": float(ANSWERS * BYTES_AN_ANSWER * workload.users),
    }
