"""An advice in rows and sentences: the figures, and what was chosen and why."""

from __future__ import annotations

from bert4rec.costs.advice import Advice
from bert4rec.costs.words import duration, size
from bert4rec.retrieval.build import LARGE


def figures(advice: Advice) -> list[tuple[str, str, str, str]]:
    """What, on how many machines, with how much memory on each, for how long."""
    run, scoring = advice.run, advice.scoring
    machines = str(run.layout.machines)
    epochs = run.config.training.epochs
    rows = [
        ("prepare the table", "1", size(advice.sorting), duration(advice.preparing)),
        ("train, an epoch", machines, size(run.memory), duration(run.epoch)),
    ]
    title = f"train, {epochs} epochs"
    if run.second_epoch:
        rows.append(("last-item stage, an epoch", machines, "", duration(run.second_epoch)))
        title += f" and {run.config.second_stage.epochs} of the last-item stage"
    return [
        *rows,
        ("validate once", machines, "", duration(run.validation)),
        (title, machines, size(run.memory), duration(run.total)),
        *_at_the_end(advice),
        ("score all users", machines, size(scoring.memory), duration(scoring.seconds)),
        ("answer one request", "1", size(advice.serving.memory), duration(advice.request)),
    ]


def _at_the_end(advice: Advice) -> list[tuple[str, str, str, str]]:
    """What the first process does when all epochs are done."""
    run, memory = advice.run, size(advice.gathered)
    asked = (
        "all test users" if run.evaluated == advice.workload.users else f"{run.evaluated:,} users"
    )
    and_baselines = " and two baselines" if run.has_baselines else ""
    rows = [(f"evaluate with {asked}{and_baselines}", "1", memory, duration(run.evaluation))]
    if run.indexing:
        rows.append(("build the index", "1", memory, duration(run.indexing)))
    return rows


def disk(advice: Advice) -> str:
    parts = ", ".join(f"{name} {size(n_bytes)}" for name, n_bytes in advice.disk.items())
    return f"disk: {size(sum(advice.disk.values()))}: {parts}"


def choices(advice: Advice) -> list[str]:
    """One sentence for every decision."""
    return [
        _loss(advice),
        _batch(advice),
        _processes(advice),
        *_table(advice),
        *_evaluation(advice),
        _retrieval(advice),
        disk(advice),
    ]


def loss_name(advice: Advice) -> str:
    training = advice.run.config.training
    if training.loss == "cross-entropy":
        return "full softmax"
    return f"{training.loss}, {training.n_negatives:,} negatives"


def _loss(advice: Advice) -> str:
    if advice.run.config.training.loss == "cross-entropy":
        return "loss: full softmax (cross-entropy over all items), which is affordable here"
    return (
        f"loss: {loss_name(advice)}: the full softmax over {advice.workload.items:,} items "
        "would take more than twice the time, or does not fit"
    )


def _batch(advice: Advice) -> str:
    run, training = advice.run, advice.run.config.training
    return (
        f"batch: {training.batch_size:,} sequences a step over all processes, learning rate "
        f"{training.learning_rate:g}, {run.steps_an_epoch:,} steps an epoch. The learning rate "
        "belongs to this batch (it grows with its square root, up to four times the recipe's) and "
        "does not change with the number of processes"
    )


def _processes(advice: Advice) -> str:
    layout = advice.run.layout
    if layout.world == 1:
        return f"one machine, one process with {layout.workers} threads: no launcher is needed"
    machines = "one machine" if layout.machines == 1 else f"{layout.machines} machines"
    return (
        f"{machines} with {layout.processes} processes of {layout.workers} threads each; a step "
        f"takes {duration(advice.run.step)}, {duration(advice.run.exchange)} of it waiting for "
        "the other processes"
    )


def _table(advice: Advice) -> list[str]:
    if not advice.run.is_sharded:
        return []
    return [
        "item table: sharded over the processes (training.shard_items=true): a copy in each, with "
        "Adam's moments, does not fit, or keeping the copies alike takes longer"
    ]


def _evaluation(advice: Advice) -> list[str]:
    if advice.run.has_baselines:
        return []
    return [
        f"evaluation at the end: {advice.run.evaluated:,} users and no baselines, as the first "
        "process does it alone, and all of it would take more than a tenth of the training"
    ]


def _retrieval(advice: Advice) -> str:
    vectors = {name: size(n_bytes) for name, n_bytes in advice.vectors.items()}
    if advice.serving.compresses:
        return (
            f"retrieval: exact, in compressed item vectors: {vectors['int8']} as int8 instead of "
            f"{vectors['float32']}, as these do not fit a machine with all that belongs to them. "
            "With more --memory an index would be quicker"
        )
    if not advice.serving.uses_index:
        return f"retrieval: exact; the item vectors take {vectors['float32']}"
    return (
        f"retrieval: a faiss index, from {LARGE:,} items on; the item vectors take "
        f"{vectors['float32']}, and once more in the index ({vectors['int8']} as int8 without one, "
        "should memory be short)"
    )
