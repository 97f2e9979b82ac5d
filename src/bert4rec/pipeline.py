"""The whole way from sequences to a trained, evaluated and saved model.

Several processes that torchrun or Ray started train together; the first of them evaluates and saves
as if it were alone, and the others are done when the training is.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from rich.console import Console

from bert4rec import __version__
from bert4rec.config import Config
from bert4rec.data.sequences import Sequences
from bert4rec.data.splits import SPLITS, Questions, Spans, Split
from bert4rec.durable import MANIFEST
from bert4rec.evaluation.evaluate import evaluate
from bert4rec.evaluation.result import Evaluation
from bert4rec.models import FITTED, LEARNED, MODELS, Model
from bert4rec.recommender import Recommender
from bert4rec.training.checkpoint import (
    begun_by,
    delete_checkpoints,
    has_checkpoint,
    identity_of,
)
from bert4rec.training.distributed import ALONE, Ranks, is_restart, launch_id, processes_here
from bert4rec.training.hardware import choose_hardware
from bert4rec.training.loop import train
from bert4rec.training.plan import available_memory, check_memory
from bert4rec.training.progress import TrainingDisplay
from bert4rec.training.settled import settled
from bert4rec.training.sharded import check_can_shard
from bert4rec.training.shards import check_shards, deal

OnProgress = Callable[[int, int], None]
BASELINES = ("popularity", "markov")  # what every training is held against


@dataclass(frozen=True)
class Outcome:
    recommender: Recommender
    evaluation: Evaluation
    baselines: dict[str, Evaluation]


def train_recommender(
    sequences: Sequences,
    config: Config,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    tensorboard: bool = False,
    baselines: bool = True,
    console: Console | None = None,
    on_evaluation: OnProgress | None = None,
    ranks: Ranks = ALONE,
) -> Outcome:
    """Train, evaluate on the test items and save to `out`; `baselines` are evaluated beside it.

    Of several `ranks` the first calls this, and the others `train_beside`.
    """
    assert ranks.is_first
    out, config = Path(out), settled(config, sequences.n_items)
    split = check_training(sequences, config, ranks.n)
    if _is_again(out, config, overwrite):
        resume = True
    else:
        check_directory(out, resume, overwrite)
    model, facts = _fit(split, sequences, config, out, resume, tensorboard, console, ranks)
    torch.set_num_threads(torch.get_num_threads() * processes_here())  # the others are done
    about = _about(sequences, config) | facts
    recommender = Recommender(model, sequences.vocabulary, config, about)
    evaluation = evaluate_questions(model, split.test, split, config, on_evaluation)
    (out / MANIFEST).unlink(missing_ok=True)  # what was here before is replaced from now on
    save_evaluation(evaluation, sequences, out)
    rivals = {}
    for name in set(BASELINES if baselines else ()) - {config.model.name}:
        baseline = FITTED[name].fit(_trained_on(split, config), split.n_items, config)
        rivals[name] = evaluate_questions(baseline, split.test, split, config)
        save_evaluation(rivals[name], sequences, out / "baselines" / name)
        settings = config.of_model(name)
        rival = Recommender(baseline, sequences.vocabulary, settings, _about(sequences, settings))
        rival.save(out / "baselines" / name)  # so that it can be asked and served, too
    recommender.save(out)
    if note := recommender.index_if_large(split.validation.histories):
        recommender.save_index(out)
        if console:
            console.print(note, markup=False, highlight=False)
    delete_checkpoints(out)
    return Outcome(recommender, evaluation, dict(sorted(rivals.items())))


def train_beside(sequences: Sequences, config: Config, out: str | Path, ranks: Ranks) -> None:
    """What every process but the first does of a training."""
    assert not ranks.is_first
    config = settled(config, sequences.n_items)
    split = check_training(sequences, config, ranks.n)
    _fit(split, sequences, config, Path(out), False, False, None, ranks)


def check_training(sequences: Sequences, config: Config, n_processes: int = 1) -> Split:
    """The split, when all can be had that the settings ask for; before any work is done."""
    config = settled(config, sequences.n_items)
    if config.model.name not in MODELS:
        raise ValueError(f"model.name is {config.model.name!r}: choose one of {', '.join(MODELS)}")
    split = SPLITS[config.data.split](sequences)
    _check_split(split)
    _check_users(split, config.model.name)
    settings = config.training
    if n_processes > 1 and config.model.name in FITTED:
        raise ValueError(
            f"{config.model.name} is fitted in one pass, on one machine: train it without "
            "torchrun, --processes and --launcher"
        )
    if settings.shard_items:
        check_can_shard(config, n_processes)
    check_shards(settings.shards, n_processes, len(split.train), settings.batch_size)
    return split


def evaluate_questions(
    model: Model,
    questions: Questions,
    split: Split,
    config: Config,
    on_progress: OnProgress | None = None,
) -> Evaluation:
    settings = config.evaluation
    if settings.users is not None:
        questions = questions.sample(settings.users, settings.seed)
    return evaluate(
        model,
        questions,
        train_counts=split.train_counts,
        ks=settings.ks,
        exclude_seen=settings.exclude_seen,
        n_negatives=settings.n_negatives,
        seed=settings.seed,
        bootstrap=settings.bootstrap,
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


def _trained_on(split: Split, config: Config) -> Spans:
    on_validation = config.training.on_validation
    return split.training_on_validation().train if on_validation else split.train


def _fit(
    split: Split,
    sequences: Sequences,
    config: Config,
    out: Path,
    resume: bool,
    tensorboard: bool,
    console: Console | None,
    ranks: Ranks,
) -> tuple[Model, dict[str, Any]]:
    if config.model.name in FITTED:
        started = time.monotonic()
        fitted = FITTED[config.model.name].fit(_trained_on(split, config), split.n_items, config)
        n_numbers = sum(tensor.numel() for tensor in fitted.state().values())
        seconds = round(time.monotonic() - started, 1)
        return fitted, {"training": {"seconds": seconds, "n_parameters": n_numbers}}
    longest = int(split.train.lengths.max())
    available = available_memory()
    if available is not None:
        available //= processes_here()
    n_users = sequences.n_users
    plan = check_memory(config, split.n_items, longest, available, n_users, ranks.n)
    training = config.training
    if training.shard_items:
        training = training.model_copy(update={"device": "cpu"})
    hardware = choose_hardware(training)
    torch.manual_seed(config.training.seed)
    # Of a sharded table the whole is made when the training is over, by the first process.
    with torch.device("meta" if config.training.shard_items else "cpu"):
        model = LEARNED[config.model.name](split.n_items, config.model, sequences.n_users)
    identity: dict[str, Any] = {"config": config.model_dump(mode="json")}
    identity["data"] = sequences.fingerprint
    resume = ranks.of_first(resume)
    n_shards = ranks.of_first(_n_shards(config, out, resume, ranks.n, len(split.train)))
    shards = deal(n_shards, ranks.n, ranks.rank)
    if shards.n > 1:
        identity["shards"] = shards.n
    ranks.check_same(version=__version__, torch=str(torch.__version__), **identity)
    if ranks.is_first:
        out.mkdir(parents=True, exist_ok=True)
        if not resume:
            delete_checkpoints(out)
    _check_same_directory(out, ranks)
    with (
        TrainingDisplay(out, console, tensorboard, is_shown=ranks.is_first) as display,
        _stop_on_signal() as should_stop,
    ):
        display.say(str(plan))
        progress = train(
            model,
            split,
            config,
            out,
            display,
            identity=identity,
            hardware=hardware,
            resume=resume,
            should_stop=should_stop,
            ranks=ranks,
            shards=shards,
        )
    return model, {
        "training": {
            "seconds": round(progress.seconds, 1),
            "sequences": progress.sequences,
            "best_validation_ndcg@10": None if training.on_validation else progress.best,
            "best_stage": progress.best_stage,
            "best_epoch": progress.best_epoch,
            "threads": torch.get_num_threads(),
            "processes": ranks.n,
            "shards": shards.n,
            "n_parameters": sum(p.numel() for p in model.parameters()),
        }
    }


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[Callable[[], bool]]:
    """True after Ctrl-C or SIGTERM; a second Ctrl-C ends the program at once, as usual."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, signal.default_int_handler)

    try:
        before = {n: signal.signal(n, receive) for n in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: whoever runs us handles signals
        yield lambda: False
        return
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def saved_outcome(out: Path) -> Outcome:
    """The same as `train_recommender` gave, read back from where it was saved."""
    folder = out / "baselines"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    rivals = {name: Evaluation.load(folder / name) for name in names}
    return Outcome(Recommender.load(out), Evaluation.load(out), rivals)


def _n_shards(config: Config, out: Path, resume: bool, n_processes: int, n_users: int) -> int:
    """As the settings say; a run that goes on keeps the number that it was begun with."""
    begun_with = identity_of(out).get("shards", 1) if resume else None
    wanted = config.training.shards or begun_with or n_processes
    check_shards(wanted, n_processes, n_users, config.training.batch_size)
    return wanted


def _is_again(out: Path, config: Config, overwrite: bool) -> bool:
    """Whether whoever launched us has started its processes anew: we go on without being told."""
    if not has_checkpoint(out):
        return False
    name = launch_id()
    if name is None:
        return is_restart()
    is_other = identity_of(out).get("config") != config.model_dump(mode="json")
    if overwrite and is_other and not is_restart():
        return False  # a name that was used before, for a run that is to be replaced
    return begun_by(out) == name


def _check_same_directory(out: Path, ranks: Ranks) -> None:
    """Checkpoints are written by all: a process that does not see the directory is an error now."""
    if ranks.n == 1:
        return
    token = out / f".seen-by-all-{uuid.uuid4().hex}"
    if ranks.is_first:
        token.touch()
    name = ranks.of_first(token.name)
    seen = ranks.gathered([socket.gethostname(), (out / name).exists()])
    if ranks.is_first:
        token.unlink()
    if blind := sorted({host for host, is_seen in seen if not is_seen}):
        raise ValueError(
            f"{out} of the first process cannot be seen from {', '.join(blind)}: give an --out on "
            "storage that all machines share"
        )


def check_directory(out: Path, resume: bool, overwrite: bool) -> None:
    """A finished model or an interrupted training is replaced only when somebody says so."""
    is_interrupted = has_checkpoint(out)
    if is_interrupted and not (resume or overwrite):
        raise ValueError(
            f"{out} holds a training that was interrupted: pass --resume to go on with it, "
            "or --overwrite to start anew"
        )
    if (out / MANIFEST).exists() and not (overwrite or (resume and is_interrupted)):
        raise ValueError(
            f"{out} holds a finished model: name another directory, or pass --overwrite"
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
    asked = np.union1d(split.validation.users, split.test.users)
    n_strangers = int((~np.isin(asked, split.train.users)).sum())
    if n_strangers:
        raise ValueError(
            f"{name} knows only the users that it was trained on, and {n_strangers:,} of those who "
            "are asked about have nothing in the training part: use a model that reads "
            "histories, or --set data.split=leave-one-out"
        )


def _about(sequences: Sequences, config: Config) -> dict[str, Any]:
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


def save_evaluation(evaluation: Evaluation, sequences: Sequences, out: Path) -> None:
    items = [sequences.vocabulary.raw(token) for token in range(sequences.n_items)]
    evaluation.save(out, user_ids=sequences.user_ids, item_ids=items)
