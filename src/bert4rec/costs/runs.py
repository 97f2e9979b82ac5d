"""One way to train: its loss, its batch and its learning rate, and what it costs.

- The full softmax is the better teacher and is kept for as long as it is affordable; above that, a
  sampled one with as many negatives as hardly slow a step down.
- The batch is the recipe's, or the smallest larger one that gives every worker something to do. The
  learning rate belongs to the batch: it grows with the square root of it, up to four times the
  recipe's, and has nothing to do with the number of processes that share it. This is a rule of
  thumb for Adam; nothing here measured it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bert4rec.config import Config, override_config
from bert4rec.costs.machines import Layout, Machine, exchange_seconds
from bert4rec.costs.memory import USABLE, training_bytes
from bert4rec.costs.model import CostModel
from bert4rec.costs.work import Step, rows_a_piece, step_of, step_of_second_stage
from bert4rec.costs.workload import Workload
from bert4rec.parallel import MOST_WORKERS
from bert4rec.retrieval.build import LARGE

WORTH_IT = 2.0  # how much longer than a sampled one a run with the full softmax may take
WORTH_SHARDING = 1.5  # how much longer copies of a table may take than one that is shared out
LOSS_SHARE = 0.25  # of a step's time that negatives may take
FEWEST_NEGATIVES, MOST_NEGATIVES = 1024, 8192
LARGEST_BATCH = 16_384
HIGHEST_RATE = 4.0  # times the recipe's learning rate
FEWEST_STEPS = 100  # in an epoch: a larger batch than this leaves is not proposed
EVALUATION_SHARE = 0.1  # of the training that the evaluation at its end may take
EVALUATED = 20_000  # users that are enough for it where all would take longer
N_BASELINES = 2  # that `train` evaluates beside the model


@dataclass(frozen=True)
class Run:
    """One way to train, and what it costs."""

    layout: Layout
    config: Config
    is_sharded: bool
    memory: float  # bytes on each machine
    step: float  # seconds, as all of these
    exchange: float  # of a step
    epoch: float
    second_epoch: float  # 0 without a second stage
    validation: float
    total: float  # of all epochs and validations
    steps_an_epoch: int
    evaluated: int  # users, when all epochs are done, by the first process alone
    has_baselines: bool
    evaluation: float
    indexing: float  # 0 where no index is built

    @property
    def whole(self) -> float:
        return self.total + self.evaluation + self.indexing


def best_run(
    costs: CostModel,
    workload: Workload,
    config: Config,
    machine: Machine,
    layout: Layout,
    loss: str | None,
) -> Run | None:
    """The full softmax where it is affordable and fits, a sampled one where not."""
    found = {}
    for name in ("cross-entropy", "sampled-softmax") if loss in (None, "auto") else (loss,):
        fitting = _with_loss(costs, workload, config, layout, name)
        may_shard = name != "cross-entropy" and layout.world > 1
        kinds = [
            _run(costs, workload, fitting, machine, layout, is_sharded=is_sharded)
            for is_sharded in ((False, True) if may_shard else (False,))
        ]
        fit = [run for run in kinds if run.memory <= USABLE * machine.memory]
        if fit:
            is_worth_it = fit[0].total > WORTH_SHARDING * fit[-1].total
            found[name] = fit[-1] if is_worth_it else fit[0]
    full, sampled = found.get("cross-entropy"), found.get("sampled-softmax")
    if full and sampled and full.total > WORTH_IT * sampled.total:
        return sampled
    return full or next(iter(found.values()), None)


def _with_loss(
    costs: CostModel, workload: Workload, config: Config, layout: Layout, loss: str
) -> Config:
    """The settings of a run: batch and learning rate, the loss and its negatives."""
    _, length = workload.windows(config.model.max_len, config.training.window_step)
    batch = batch_size(config, workload, layout)
    settings = [f"training.loss={loss}", f"training.workers={layout.workers}"]
    if batch != config.training.batch_size:
        growth = min(HIGHEST_RATE, math.sqrt(batch / config.training.batch_size))
        rate = growth * config.training.learning_rate
        settings += [f"training.batch_size={batch}", f"training.learning_rate={rate:.2g}"]
    chosen = override_config(config, settings)
    if loss != "sampled-softmax":
        return chosen
    negatives = FEWEST_NEGATIVES
    while negatives < MOST_NEGATIVES and 2 * negatives <= workload.items // 4:
        more = override_config(chosen, [f"training.n_negatives={2 * negatives}"])
        step = step_of(more, workload.items, batch / layout.world, length, layout.workers)
        seconds = costs.constants["training"]["sampled products"]
        part = seconds * step.asked * step.negatives * step.dim / 1e9 * step.busiest
        if part > LOSS_SHARE * costs.step_seconds(step):
            break
        negatives *= 2
    return override_config(chosen, [f"training.n_negatives={negatives}"])


def batch_size(config: Config, workload: Workload, layout: Layout) -> int:
    """The recipe's, or the smallest power of two that gives every worker a piece to compute."""
    per_user, length = workload.windows(config.model.max_len, config.training.window_step)
    busy = rows_a_piece(length) * layout.workers * layout.world
    most = min(LARGEST_BATCH, workload.users * per_user / FEWEST_STEPS)
    wanted = config.training.batch_size
    while wanted < busy and 2 * wanted <= most:
        wanted *= 2
    return max(wanted, layout.world)


def _run(
    costs: CostModel,
    workload: Workload,
    config: Config,
    machine: Machine,
    layout: Layout,
    *,
    is_sharded: bool,
) -> Run:
    training, second = config.training, config.second_stage
    windows, length = workload.windows(config.model.max_len, training.window_step)
    step = _shared_step(config, workload, length, layout, is_sharded)
    exchange = exchange_seconds(costs, machine, layout, step)
    seconds = costs.step_seconds(step) + exchange
    steps = math.ceil(windows * workload.users / training.batch_size)
    has_second = config.model.name == "bert4rec" and second.epochs > 0
    last = step_of_second_stage(step, config)
    second_step = costs.step_seconds(last) + exchange_seconds(costs, machine, layout, last)
    n_second = workload.users * (windows if second.asks == "every-item" else 1)
    second_epoch = second_step * math.ceil(n_second / training.batch_size)
    n_validated = min(workload.users, training.validation_users or workload.users)
    validation = n_validated * costs.validation_seconds(
        config, workload.items, workload.length, layout.world * layout.workers
    )
    n_validations = math.ceil(training.epochs / training.validate_every)
    total = training.epochs * steps * seconds + n_validations * validation
    if has_second:
        n_validations = math.ceil(second.epochs / training.validate_every)
        total += second.epochs * second_epoch + n_validations * validation
    each = costs.validation_seconds(
        config, workload.items, workload.length, min(machine.cores, MOST_WORKERS)
    )
    evaluated = min(workload.users, config.evaluation.users or workload.users)
    has_baselines = (1 + N_BASELINES) * evaluated * each <= EVALUATION_SHARE * total
    if not has_baselines and config.evaluation.users is None and evaluated > EVALUATED:
        evaluated = EVALUATED
        config = override_config(config, [f"evaluation.users={EVALUATED}"])
    indexes = workload.items >= LARGE
    return Run(
        layout=layout,
        config=config,
        is_sharded=is_sharded,
        memory=training_bytes(costs, config, workload, layout, is_sharded=is_sharded),
        step=seconds,
        exchange=exchange,
        epoch=steps * seconds,
        second_epoch=second_epoch if has_second else 0.0,
        validation=validation,
        total=total,
        steps_an_epoch=steps,
        evaluated=evaluated,
        has_baselines=has_baselines,
        evaluation=(1 + N_BASELINES * has_baselines) * evaluated * each,
        indexing=costs.index_seconds(workload.items, config.model.dim, machine.cores)
        if indexes
        else 0.0,
    )


def _shared_step(
    config: Config, workload: Workload, length: float, layout: Layout, is_sharded: bool
) -> Step:
    rows = config.training.batch_size / layout.world
    step = step_of(config, workload.items, rows, length, layout.workers)
    return replace(step, processes=layout.world, is_sharded=is_sharded)
