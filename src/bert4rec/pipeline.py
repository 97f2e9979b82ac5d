"""The whole way from sequences to a trained, evaluated and saved model.

Several processes that torchrun or Ray started train together; the first of them evaluates and saves
as if it were alone, and the others are done when the training is.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console

from bert4rec import __version__
from bert4rec.allocator import keep_freed_memory
from bert4rec.config import Config, RunConfig, resolve
from bert4rec.data.sequences import Sequences
from bert4rec.data.splits import SPLITS, HeldOut, Split
from bert4rec.distributed.sharded_items import ShardedItems, capacity_for, check_can_shard
from bert4rec.distributed.torch_process_group import is_restart, launch_id, processes_here
from bert4rec.durable import MANIFEST
from bert4rec.evaluation.evaluate import evaluate
from bert4rec.evaluation.result import Evaluation
from bert4rec.interrupts import stop_requested
from bert4rec.models import MODELS, Model, is_fitted
from bert4rec.models.sequence_model import SequenceModel
from bert4rec.recommender import Recommender
from bert4rec.threads import WorkerThreads
from bert4rec.training.checkpoint import (
    Progress,
    begun_by,
    delete_checkpoints,
    has_checkpoint,
    identity_of,
)
from bert4rec.training.hardware import choose_hardware
from bert4rec.training.loop import RunDirectory, TrainingLoop
from bert4rec.training.memory import MemoryEstimate, available_memory, check_memory
from bert4rec.training.process_group import SINGLE_PROCESS, ProcessGroup
from bert4rec.training.replica import Replica, Trainee
from bert4rec.training.run_log import RunLog
from bert4rec.training.setup import (
    build_loss,
    build_model,
    build_stages,
    initial_output_bias,
    stage_names,
    training_split,
    validation_users,
)
from bert4rec.training.timing import StageTime, time_stages
from bert4rec.training.user_shards import check_shards, shards_of

OnProgress = Callable[[int, int], None]
BASELINES = ("popularity", "markov")  # every training is compared with them
EVALUATION_SEED = 0  # of the users that are evaluated, where not all are


@dataclass(frozen=True)
class RunOptions:
    """How a run is carried out; none of these changes what is learned."""

    resume: bool = False  # from the last checkpoint
    overwrite: bool = False  # a model or an interrupted training that is there already
    baselines: bool = True  # evaluate popularity and a Markov chain beside it
    tensorboard: bool = False
    keep_stages: bool = False  # write the best weights at the end of each stage beside the model
    minutes: float | None = None  # end training with the epoch in which this much time is over


@dataclass(frozen=True)
class Outcome:
    recommender: Recommender
    evaluation: Evaluation
    baselines: dict[str, Evaluation]


class DryRun(NamedTuple):
    config: RunConfig
    memory: MemoryEstimate | None  # None for models that are fitted
    stages: dict[str, tuple[int, StageTime]]  # name → epochs, and how long they take


def train_recommender(
    sequences: Sequences,
    config: Config,
    out: str | Path,
    options: RunOptions = RunOptions(),  # noqa: B008
    *,
    console: Console | None = None,
    on_evaluation: OnProgress | None = None,
    group: ProcessGroup = SINGLE_PROCESS,
) -> Outcome | None:
    """Train, evaluate on the test items and save to `out`.

    Of several processes each calls it, with its `group`; only the first gets an outcome.
    """
    out = Path(out)
    run = resolve(config, sequences.n_items)
    split = check_training(sequences, run, group.n)
    resume = options.resume
    if group.is_first:
        if _is_relaunched(out, run, options.overwrite):
            resume = True
        else:
            check_directory(out, resume, options.overwrite)
    model, facts = _fit(sequences, split, run, out, options, resume, console, group)
    if not group.is_first:
        return None
    torch.set_num_threads(torch.get_num_threads() * processes_here())  # the others are done
    about = _about(sequences) | facts
    recommender = Recommender(model, sequences.vocabulary, run, about)
    evaluation = evaluate_held_out(model, split.test, split, run, on_evaluation)
    (out / MANIFEST).unlink(missing_ok=True)  # what was here before is replaced from now on
    save_evaluation(evaluation, sequences, out)
    baselines = {}
    for name in sorted(set(BASELINES if options.baselines else ()) - {run.model.name}):
        baselines[name] = _save_baseline(name, sequences, split, run, out / "baselines" / name)
    recommender.save(out)
    if note := recommender.index_if_large(split.validation.histories):
        recommender.save_index(out)
        if console:
            console.print(note, markup=False, highlight=False)
    delete_checkpoints(out)
    return Outcome(recommender, evaluation, baselines)


def dry_run(sequences: Sequences, config: Config, seconds: float = 3.0) -> DryRun:
    """What a training would take on this machine, from some steps of a throw-away model."""
    run = resolve(config, sequences.n_items)
    split = check_training(sequences, run)
    if is_fitted(MODELS[run.model.name]):
        return DryRun(run, None, {})
    longest, n_users = int(split.train.lengths.max()), sequences.n_users
    memory = check_memory(run, split.n_items, longest, available_memory(), n_users)
    keep_freed_memory()
    epochs = [stage.epochs for stage in run.stages if stage.epochs]
    times = time_stages(split, run, seconds)
    pairs = zip(epochs, times, strict=True)
    return DryRun(run, memory, dict(zip(stage_names(run), pairs, strict=True)))


def check_training(sequences: Sequences, config: Config, n_processes: int = 1) -> Split:
    """The split, when the settings can be carried out; before any work is done."""
    name = config.model.name
    split = SPLITS[config.data.split](sequences)
    _check_split(split)
    _check_users(split, name)
    if n_processes > 1 and is_fitted(MODELS[name]):
        raise ValueError(
            f"{name} is fitted in one pass, on one machine: train it without "
            "torchrun, --processes and --launcher"
        )
    if config.training.shard_items:
        check_can_shard(resolve(config, sequences.n_items), n_processes)
    settings = config.training
    check_shards(settings.shards, n_processes, len(split.train), settings.batch_size)
    return split


def evaluate_held_out(
    model: Model,
    held_out: HeldOut,
    split: Split,
    config: RunConfig,
    on_progress: OnProgress | None = None,
) -> Evaluation:
    settings = config.evaluation
    if settings.users is not None:
        held_out = held_out.sample(settings.users, EVALUATION_SEED)
    return evaluate(
        model,
        held_out,
        train_counts=split.train_counts,
        ks=settings.ks,
        exclude_seen=settings.exclude_seen,
        n_workers=config.training.workers,
        progress=on_progress,
    )


def split_of(recommender: Recommender, sequences: Sequences) -> Split:
    """The split that the model was trained on; a ValueError for any other data."""
    if sequences.fingerprint != recommender.about["data"]["fingerprint"]:
        raise ValueError(
            "this is not the data that the model was trained on (its fingerprint differs): "
            "the held-out items would be others, and some of them may have been trained on"
        )
    return SPLITS[recommender.config.data.split](sequences)


def saved_outcome(out: Path) -> Outcome:
    """The same as `train_recommender` gave, read back from where it was saved."""
    folder = out / "baselines"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    baselines = {name: Evaluation.load(folder / name) for name in names}
    return Outcome(Recommender.load(out), Evaluation.load(out), baselines)


def save_evaluation(evaluation: Evaluation, sequences: Sequences, out: Path) -> None:
    items = [sequences.vocabulary.raw(token) for token in range(sequences.n_items)]
    evaluation.save(out, user_ids=sequences.user_ids, item_ids=items)


def check_directory(out: Path, resume: bool, overwrite: bool) -> None:
    """A finished model or an interrupted training is replaced only when somebody says so."""
    is_interrupted = has_checkpoint(out)
    if is_interrupted and not (resume or overwrite):
        raise ValueError(
            f"{out} holds a training that was interrupted: pass --resume to continue it, "
            "or --overwrite to start anew"
        )
    if (out / MANIFEST).exists() and not (overwrite or (resume and is_interrupted)):
        raise ValueError(
            f"{out} holds a finished model: name another directory, or pass --overwrite"
        )


def _save_baseline(
    name: str, sequences: Sequences, split: Split, run: RunConfig, out: Path
) -> Evaluation:
    settings = run.with_model(name)
    model = _fit_once(split, settings)
    evaluation = evaluate_held_out(model, split.test, split, run)
    save_evaluation(evaluation, sequences, out)
    # Saved whole, so that it can be asked and served, too.
    Recommender(model, sequences.vocabulary, settings, _about(sequences)).save(out)
    return evaluation


def _fit_once(split: Split, run: RunConfig) -> Model:
    model = MODELS[run.model.name]
    assert is_fitted(model)
    train = training_split(split, run).train
    return model.fit(train, split.n_items, run.model, run.training.seed)


def _fit(
    sequences: Sequences,
    split: Split,
    run: RunConfig,
    out: Path,
    options: RunOptions,
    resume: bool,
    console: Console | None,
    group: ProcessGroup,
) -> tuple[Model, dict[str, Any]]:
    """The trained model, and facts about its training."""
    if is_fitted(MODELS[run.model.name]):
        started = time.monotonic()
        fitted = _fit_once(split, run)
        n_numbers = sum(tensor.numel() for tensor in fitted.state().values())
        seconds = round(time.monotonic() - started, 1)
        return fitted, {"training": {"seconds": seconds, "n_parameters": n_numbers}}
    available = available_memory()
    if available is not None:
        available //= processes_here()
    longest, n_users = int(split.train.lengths.max()), sequences.n_users
    memory = check_memory(run, split.n_items, longest, available, n_users, group.n)
    resume = group.from_first(resume)
    n_shards = group.from_first(_n_shards(run, out, resume, group.n, len(split.train)))
    identity: dict[str, Any] = {
        "config": run.model_dump(mode="json"),
        "data": sequences.fingerprint,
    }
    if n_shards > 1:
        identity["shards"] = n_shards
    group.check_same(version=__version__, torch=str(torch.__version__), **identity)
    if group.is_first:
        out.mkdir(parents=True, exist_ok=True)
        if not resume:
            delete_checkpoints(out)
    _check_same_directory(out, group)
    directory = RunDirectory(out, identity, launch_id())
    is_shown = group.is_first
    with RunLog(out, console, options.tensorboard, is_shown=is_shown) as log:
        log.say(str(memory))
        model, progress = train(run, split, n_users, directory, log, options, resume, group)
    return model, {
        "training": {
            "seconds": round(progress.seconds, 1),
            "sequences": progress.sequences,
            "best_validation_ndcg@10": None if run.training.on_validation else progress.best,
            "best_stage": progress.best_stage,
            "best_epoch": progress.best_epoch,
            "threads": torch.get_num_threads(),
            "processes": group.n,
            "shards": n_shards,
            "n_parameters": sum(p.numel() for p in model.parameters()),
        }
    }


def train(
    run: RunConfig,
    split: Split,
    n_users: int,
    directory: RunDirectory,
    log: RunLog,
    options: RunOptions = RunOptions(),  # noqa: B008
    resume: bool = False,
    group: ProcessGroup = SINGLE_PROCESS,
) -> tuple[SequenceModel, Progress]:
    """The model with its best weights; checkpoints go to the directory."""
    keep_freed_memory()
    split = training_split(split, run)
    shard_items = run.training.shard_items
    device = {"device": "cpu"} if shard_items else {}
    hardware = choose_hardware(run.training.model_copy(update=device))
    # The whole of sharded items is put together when the training is over, by the first process.
    with torch.device("meta" if shard_items else "cpu"):
        model = build_model(run, split.n_items, n_users)
    n_workers = run.training.workers if hardware.device.type == "cpu" else 1
    with WorkerThreads(n_workers) as workers, stop_requested() as is_stopped:
        shards = shards_of(directory.identity.get("shards", 1), group.n, group.rank)
        stages = build_stages(run, split, workers.n, group, shards)
        bias, loss = initial_output_bias(run, split), build_loss(run, split)
        trainee: Trainee
        if shard_items:
            longest = max(sum(stage.batches.n_per_step.values()) for stage in stages)
            torch.manual_seed(run.training.seed)
            small = build_model(run, capacity_for(run, split.n_items, longest), 0)
            bias = torch.zeros(split.n_items) if bias is None else bias
            trainee = ShardedItems(small, bias, loss, run, workers, hardware, group)
        else:
            if bias is not None:
                model.get_parameter("output_bias").data.copy_(bias)
            model.to(hardware.device)
            decay = run.training.weight_decay
            trainee = Replica(model, loss, decay, workers, hardware, group)
        validation = validation_users(split, run)
        loop = TrainingLoop(trainee, stages, validation, run.training, directory, log)
        loop.exclude_seen, loop.minutes = run.evaluation.exclude_seen, options.minutes
        loop.keep_stages, loop.is_stopped = options.keep_stages, is_stopped
        _describe(run, hardware, workers.n, group, log)
        if validation is None:
            log.say("the validation items are trained on: nothing is validated")
        elif note := unreachable_note(validation, run.evaluation.exclude_seen):
            log.say(note)
        progress = loop.run(resume=resume)
        trainee.finish(model)
    return model, progress


def _describe(
    run: RunConfig, hardware: object, n_workers: int, group: ProcessGroup, log: RunLog
) -> None:
    threads = f"{n_workers} worker{'s' * (n_workers > 1)}"
    if group.n > 1:
        threads = f"{group.n} processes with {threads} each"
    log.say(f"training on {hardware}, {threads}, {run.loss.name}")


def unreachable_note(held_out: HeldOut, exclude_seen: bool) -> str | None:
    """A warning when many targets were seen before by their user and so cannot be recommended."""
    if not exclude_seen:
        return None
    histories = held_out.histories
    n = sum(target in histories[i] for i, target in enumerate(held_out.targets.tolist()))
    if n < 0.1 * len(held_out):
        return None
    return (
        f"note: {n / len(held_out):.0%} of the validation targets are items that the user had "
        "before. They count as missed, because seen items are not recommended; if people repeat "
        "items in your data, train with --set evaluation.exclude_seen=false"
    )


def _n_shards(run: RunConfig, out: Path, resume: bool, n_processes: int, n_users: int) -> int:
    """As the settings say; a resumed run keeps the number that it was begun with."""
    begun_with = identity_of(out).get("shards", 1) if resume else None
    wanted = run.training.shards or begun_with or n_processes
    check_shards(wanted, n_processes, n_users, run.training.batch_size)
    return wanted


def _is_relaunched(out: Path, run: RunConfig, overwrite: bool) -> bool:
    """Whether the launcher has restarted its processes: they resume without being told."""
    if not has_checkpoint(out):
        return False
    name = launch_id()
    if name is None:
        return is_restart()
    is_other = identity_of(out).get("config") != run.model_dump(mode="json")
    if overwrite and is_other and not is_restart():
        return False  # a name that was used before, for a run that is to be replaced
    return begun_by(out) == name


def _check_same_directory(out: Path, group: ProcessGroup) -> None:
    """Checkpoints are written by all: a process that does not see the directory is an error now."""
    if group.n == 1:
        return
    token = out / f".seen-by-all-{uuid.uuid4().hex}"
    if group.is_first:
        token.touch()
    name = group.from_first(token.name)
    seen = group.all_gather([socket.gethostname(), (out / name).exists()])
    if group.is_first:
        token.unlink()
    if blind := sorted({host for host, is_seen in seen if not is_seen}):
        raise ValueError(
            f"{out} of the first process cannot be seen from {', '.join(blind)}: give an --out on "
            "storage that all machines share"
        )


def _check_split(split: Split) -> None:
    sizes = {
        "train on": len(split.train),
        "validate on": len(split.validation),
        "test on": len(split.test),
    }
    for what, size in sizes.items():
        if not size:
            raise ValueError(
                f"nothing is left to {what}: leave-one-out needs users with three or more actions, "
                "and a global-time split users with actions in each period; use more data or "
                "weaker filters"
            )


def _check_users(split: Split, name: str) -> None:
    if not MODELS[name].needs_known_user:
        return
    held_out = np.union1d(split.validation.users, split.test.users)
    n_unknown = int((~np.isin(held_out, split.train.users)).sum())
    if n_unknown:
        raise ValueError(
            f"{name} knows only the users that it was trained on, and {n_unknown:,} of the "
            "held-out users have nothing in the training part: use a model that reads "
            "histories, or --set data.split=leave-one-out"
        )


def _about(sequences: Sequences) -> dict[str, Any]:
    return {
        "bert4rec_version": __version__,
        "torch_version": str(torch.__version__),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": {
            "fingerprint": sequences.fingerprint,
            "directory": None if sequences.directory is None else str(sequences.directory),
            "source": sequences.meta.get("source"),
            "dropped": sequences.meta.get("dropped", []),
            "n_users": sequences.n_users,
            "n_interactions": sequences.n_interactions,
        },
    }
