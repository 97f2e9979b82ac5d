"""What is checked before a run: data, settings, shards and the directory it writes to."""

from __future__ import annotations

import socket
import uuid
from pathlib import Path

import numpy as np

from bert4rec.config import Config, RunConfig, resolve
from bert4rec.data.sequences import Sequences
from bert4rec.data.splits import SPLITS, HeldOut, Split
from bert4rec.distributed.launch import is_restart, launch_id
from bert4rec.distributed.sharded_items import check_can_shard
from bert4rec.durable import MANIFEST
from bert4rec.models import MODELS, is_trained
from bert4rec.training.batches import check_shards
from bert4rec.training.checkpoint import has_checkpoint, newest_state
from bert4rec.training.process_group import ProcessGroup


def check_training(sequences: Sequences, config: Config, n_processes: int = 1, *, keep_stages: bool = False) -> Split:
    """The split, when the settings can be carried out; before any work is done."""
    name = config.model.name
    split = SPLITS[config.data.split](sequences)
    _check_split(split)
    _check_users(split, name)
    if n_processes > 1 and not is_trained(MODELS[name]):
        raise ValueError(
            f"{name} is fitted in one pass, on one machine: train it without torchrun, --processes and --launcher"
        )
    if config.training.shard_items:
        check_can_shard(resolve(config, sequences.n_items), n_processes, keep_stages)
    settings = config.training
    check_shards(settings.shards, n_processes, len(split.train), settings.batch_size)
    return split


def check_directory(out: Path, resume: bool, overwrite: bool) -> None:
    """A finished model or an interrupted training is replaced only when somebody says so."""
    is_interrupted = has_checkpoint(out)
    if is_interrupted and not (resume or overwrite):
        raise ValueError(
            f"{out} holds a training that was interrupted: pass --resume to continue it, or --overwrite to start anew"
        )
    if (out / MANIFEST).exists() and not (overwrite or (resume and is_interrupted)):
        raise ValueError(f"{out} holds a finished model: name another directory, or pass --overwrite")


def choose_shards(run: RunConfig, out: Path, resume: bool, n_processes: int, n_users: int) -> int:
    """As the settings say; a resumed run keeps the number that it was begun with."""
    begun_with = newest_state(out).get("identity", {}).get("shards", 1) if resume else None
    wanted = run.training.shards or begun_with or n_processes
    check_shards(wanted, n_processes, n_users, run.training.batch_size)
    return wanted


def is_resumed(out: Path, run: RunConfig, resume: bool, overwrite: bool) -> bool:
    """Whether a run resumes: it was told to, or is relaunched; a ValueError if it may not write here."""
    if is_relaunched(out, run, overwrite):
        return True
    check_directory(out, resume, overwrite)
    return resume


def is_relaunched(out: Path, run: RunConfig, overwrite: bool) -> bool:
    """Whether the launcher has restarted its processes: they resume without being told."""
    name, state = launch_id(), newest_state(out)
    if name is None or not state:
        return is_restart() and bool(state)
    is_other = state["identity"].get("config") != run.model_dump(mode="json")
    if overwrite and is_other and not is_restart():
        return False  # a name that was used before, for a run that is to be replaced
    return bool(state["launch"] == name)


def check_same_directory(out: Path, group: ProcessGroup) -> None:
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
    sizes = {"train on": len(split.train), "validate on": len(split.validation), "test on": len(split.test)}
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
