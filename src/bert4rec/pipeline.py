"""The whole way from sequences to a trained, evaluated and saved model.

Several processes that torchrun or Ray started train together; the first of them evaluates and saves
as if it were alone, and the others are done when the training is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from bert4rec import __version__
from bert4rec.config import Config, RunConfig, override_config, resolve, resolved_values
from bert4rec.cpu_tuning import keep_freed_memory
from bert4rec.data.sequences import Sequences
from bert4rec.data.splits import SPLITS, HeldOut, Split
from bert4rec.distributed.launch import launch_id, processes_here
from bert4rec.distributed.sharded_items import ShardedItems, capacity_for
from bert4rec.durable import MANIFEST
from bert4rec.evaluation.evaluate import evaluate
from bert4rec.evaluation.result import Evaluation
from bert4rec.interrupts import stop_requested
from bert4rec.models import MODELS, FittedModel, Model, is_trained
from bert4rec.models.sequence_model import SequenceModel
from bert4rec.recommender import Recommender
from bert4rec.run_checks import check_same_directory, check_training, choose_shards, is_resumed, unreachable_note
from bert4rec.training.checkpoint import Progress, RunDirectory, delete_checkpoints
from bert4rec.training.hardware import choose_hardware
from bert4rec.training.loop import TrainingLoop
from bert4rec.training.memory import MemoryEstimate, available_memory, check_memory
from bert4rec.training.process_group import SINGLE_PROCESS, ProcessGroup
from bert4rec.training.replica import Replica
from bert4rec.training.run_log import RunLog
from bert4rec.training.setup import (
    build_model,
    build_stages,
    initial_output_bias,
    stage_names,
    training_split,
    validation_users,
)
from bert4rec.training.timing import StageTime, time_stages

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
    """A saved model, and how well it and its baselines predict the test items."""

    recommender: Recommender
    evaluation: Evaluation
    baselines: dict[str, Evaluation]


class DryRun(NamedTuple):
    """What a training would do and take."""

    config: RunConfig
    memory: MemoryEstimate | None  # None for models that are fitted
    stages: dict[str, tuple[int, StageTime]]  # name → epochs, and how long they take


@dataclass(frozen=True)
class _Run:
    """The data and the resolved settings of a run, and the directory that it writes to."""

    sequences: Sequences
    split: Split
    config: RunConfig
    out: Path


def train_recommender(
    sequences: Sequences,
    config: Config,
    out: str | Path,
    options: RunOptions = RunOptions(),  # noqa: B008
    *,
    console: Console | None = None,
    on_evaluation: OnProgress | None = None,
) -> Outcome:
    """Train, evaluate on the test items and save to `out`."""
    outcome = train_in_group(
        sequences, SINGLE_PROCESS, console, config=config, out=Path(out), options=options, on_evaluation=on_evaluation
    )
    assert outcome is not None
    return outcome


def train_in_group(
    sequences: Sequences,
    group: ProcessGroup,
    console: Console | None = None,
    *,
    config: Config,
    out: Path,
    options: RunOptions,
    on_evaluation: OnProgress | None = None,
) -> Outcome | None:
    """The part of one of several processes that train together; only the first prints and gets an outcome."""
    settings = resolve(config, sequences.n_items)
    split = check_training(sequences, settings, group.n, keep_stages=options.keep_stages)
    if console is not None and group.is_first and (notes := resolved_values(config, settings)):
        console.print(f"auto: {notes}", markup=False, highlight=False)
    run = _Run(sequences, split, settings, out)
    if group.is_first:
        options = replace(options, resume=is_resumed(out, settings, options.resume, options.overwrite))
    if not is_trained(MODELS[settings.model.name]):
        model, facts = _fit(run)
    else:
        model, facts = _train(run, options, console, group)
    if not group.is_first:
        return None
    torch.set_num_threads(torch.get_num_threads() * processes_here())  # the others are done
    names = sorted(set(BASELINES) - {settings.model.name}) if options.baselines else []
    recommender, evaluation = _evaluate_and_save(run, model, facts, on_evaluation)
    baselines = {name: _save_baseline(name, run) for name in names}
    if note := recommender.index_if_large(split.validation.histories):
        recommender.save_index(run.out)
        if console:
            console.print(note, markup=False, highlight=False)
    delete_checkpoints(run.out)
    return Outcome(recommender, evaluation, baselines)


def dry_run(sequences: Sequences, config: Config, seconds: float = 3.0) -> DryRun:
    """What a training would take on this machine, from some steps of a throw-away model."""
    run = resolve(config, sequences.n_items)
    split = check_training(sequences, run)
    if not is_trained(MODELS[run.model.name]):
        return DryRun(run, None, {})
    longest, n_users = int(split.train.lengths.max()), sequences.n_users
    memory = check_memory(run, split.n_items, longest, available_memory(), n_users)
    keep_freed_memory()
    epochs = [stage.epochs for stage in run.stages if stage.epochs]
    times = time_stages(split, run, seconds)
    pairs = zip(epochs, times, strict=True)
    return DryRun(run, memory, dict(zip(stage_names(run), pairs, strict=True)))


def evaluate_held_out(
    model: Model, held_out: HeldOut, split: Split, config: RunConfig, on_progress: OnProgress | None = None
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


def _evaluate_and_save(
    run: _Run, model: Model, facts: dict[str, Any], on_evaluation: OnProgress | None = None
) -> tuple[Recommender, Evaluation]:
    evaluation = evaluate_held_out(model, run.split.test, run.split, run.config, on_evaluation)
    (run.out / MANIFEST).unlink(missing_ok=True)  # what was here before is replaced from now on
    save_evaluation(evaluation, run.sequences, run.out)
    recommender = Recommender(model, run.sequences.vocabulary, run.config, _about(run.sequences) | facts)
    recommender.save(run.out)
    return recommender, evaluation


def _save_baseline(name: str, run: _Run) -> Evaluation:
    """Saved whole, so that it can recommend and be served, too."""
    baseline = replace(
        run, config=override_config(run.config, [f"model.name={name}"]), out=run.out / "baselines" / name
    )
    model, _ = _fit(baseline)
    return _evaluate_and_save(baseline, model, {})[1]


def _fit(run: _Run) -> tuple[Model, dict[str, Any]]:
    """The fitted model, and facts about its training."""
    started, settings = time.monotonic(), run.config
    model_class = MODELS[settings.model.name]
    assert issubclass(model_class, FittedModel)
    train = training_split(run.split, settings).train
    model = model_class.fit(train, run.split.n_items, settings.model, settings.training.seed)
    n_numbers = sum(tensor.numel() for tensor in model.state().values())
    return model, {"training": {"seconds": round(time.monotonic() - started, 1), "n_parameters": n_numbers}}


def _train(
    run: _Run, options: RunOptions, console: Console | None, group: ProcessGroup
) -> tuple[Model, dict[str, Any]]:
    """The trained model, and facts about its training."""
    split, config, out = run.split, run.config, run.out
    available = available_memory(processes_here())
    longest, n_users = int(split.train.lengths.max()), run.sequences.n_users
    memory = check_memory(config, split.n_items, longest, available, n_users, group.n)
    options = replace(options, resume=group.from_first(options.resume))
    n_shards = group.from_first(choose_shards(config, out, options.resume, group.n, len(split.train)))
    identity: dict[str, Any] = {"config": config.model_dump(mode="json"), "data": run.sequences.fingerprint}
    if n_shards > 1:
        identity["shards"] = n_shards
    group.check_same(version=__version__, torch=str(torch.__version__), **identity)
    if group.is_first:
        out.mkdir(parents=True, exist_ok=True)
        if not options.resume:
            delete_checkpoints(out)
    check_same_directory(out, group)
    directory = RunDirectory(out, identity, launch_id())
    with RunLog(out, console, options.tensorboard, is_shown=group.is_first) as log:
        log.say(str(memory))
        model, progress = train(config, split, n_users, directory, log, options, group)
    return model, {
        "training": {
            "seconds": round(progress.seconds, 1),
            "sequences": progress.sequences,
            "best_validation_ndcg@10": None if config.training.on_validation else progress.best_ndcg,
            "best_stage": progress.best_stage,
            "best_epoch": progress.best_epoch,
            "threads": torch.get_num_threads(),
            "processes": group.n,
            "shards": n_shards,
            "n_parameters": sum(p.numel() for p in model.parameters()),
        }
    }


def train(
    config: RunConfig,
    split: Split,
    n_users: int,
    directory: RunDirectory,
    log: RunLog,
    options: RunOptions = RunOptions(),  # noqa: B008
    group: ProcessGroup = SINGLE_PROCESS,
) -> tuple[SequenceModel, Progress]:
    """The model with its best weights; checkpoints go to the directory."""
    keep_freed_memory()
    split = training_split(split, config)
    training, n_shards = config.training, directory.identity.get("shards", 1)
    hardware = choose_hardware(training)
    with hardware.workers(training) as workers, stop_requested() as is_stopped:
        stages = build_stages(config, split, workers.n, group, n_shards)
        bias, loss = initial_output_bias(config, split), config.loss.build(split.train_counts)
        if training.shard_items:
            n_sequences = max(sum(stage.batches.n_per_step.values()) for stage in stages)
            small = build_model(config, capacity_for(config, split.n_items, n_sequences), 0)
            bias = torch.zeros(split.n_items) if bias is None else bias
            replica: Replica = ShardedItems(small, bias, loss, config, workers, hardware, group)
        else:
            model = build_model(config, split.n_items, n_users)
            if bias is not None:
                model.get_parameter("output_bias").data.copy_(bias)
            model.to(hardware.device)
            replica = Replica(model, loss, training.weight_decay, workers, hardware, group)
        validation = validation_users(split, config)
        loop = TrainingLoop(
            replica,
            stages,
            validation,
            config,
            directory,
            log,
            max_minutes=options.minutes,
            keep_stages=options.keep_stages,
        )
        threads = f"{workers.n} worker{'s' * (workers.n > 1)}"
        processes = f"{group.n} processes with {threads} each" if group.n > 1 else threads
        log.say(f"training on {hardware}, {processes}, {config.loss.name}")
        if validation is None:
            log.say("the validation items are trained on: nothing is validated")
        elif note := unreachable_note(validation, config.evaluation.exclude_seen):
            log.say(note)
        progress = loop.run(is_stopped, resume=options.resume)
        return replica.finish(), progress


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
