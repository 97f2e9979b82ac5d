"""Checkpoints: all that a run needs to resume as if it had not been interrupted.

A checkpoint is a directory `checkpoints/<number>` with `state.json`, `weights.safetensors`,
`optimizer.safetensors`, `best.safetensors` and a manifest. It is renamed into place when it is
complete, and only then is the one before it deleted: a kill at any moment leaves a whole one.

Several processes each write a share of the tensors (`weights-1.safetensors`, …) into the same
directory, which must lie on storage that all of them see; any number of processes can read it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bert4rec.durable import new_directory, verify_manifest
from bert4rec.training.process_group import SINGLE_PROCESS, ProcessGroup

KINDS = ("weights", "optimizer", "best")


@dataclass
class Progress:
    """Where a run stands. Everything random follows from the seed and these numbers."""

    stage: int = 0
    epoch: int = 0  # epochs completed in this stage
    batch: int = 0  # batches completed in this epoch
    step: int = 0  # steps completed in this stage
    best: float = -1.0  # best validation NDCG@10 so far, in any stage
    best_stage: int = 0
    best_epoch: int = 0
    bad_validations: int = 0
    loss_sum: float = 0.0  # of this epoch
    seconds: float = 0.0  # spent training and validating, over all sessions
    sequences: int = 0  # trained, over all sessions
    history: list[dict[str, float | int | str]] = field(default_factory=list)

    @property
    def mean_loss(self) -> float:
        return self.loss_sum / max(self.batch, 1)


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of some files, each read on access: all of them may not fit into memory."""

    def __init__(self, paths: list[Path]) -> None:
        self._path_of: dict[str, Path] = {}
        for path in paths:
            with safe_open(path, "pt") as file:
                self._path_of |= dict.fromkeys(file.keys(), path)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._path_of[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor.clone()  # it is a map of the file, which the next checkpoint deletes

    def __iter__(self) -> Iterator[str]:
        return iter(self._path_of)

    def __len__(self) -> int:
        return len(self._path_of)


@dataclass(frozen=True)
class TrainingTensors:
    """The tensors of a run, or those that one process writes or needs."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    best: Mapping[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """One moment of a run, and which run it belongs to."""

    progress: Progress
    tensors: TrainingTensors
    identity: dict[str, Any]  # the configuration and data of the run
    launch: str | None = None  # the name of the launch that wrote it, if it has one


def save_checkpoint(run: Path, checkpoint: Checkpoint, group: ProcessGroup = SINGLE_PROCESS) -> None:
    """Called by all processes: each writes its tensors, and the first one everything else."""
    if not group.is_first:
        _write(checkpoint.tensors, run / "checkpoints" / group.from_first(None), group)
        group.barrier()  # all tensors are written
        group.barrier()  # the checkpoint is complete
        return
    folder = run / "checkpoints"
    number = max((int(path.name) for path in _checkpoints(folder)), default=0) + 1
    with new_directory(folder / f"{number:06d}") as directory:
        group.from_first(directory.name)
        _write(checkpoint.tensors, directory, group)
        state = {"progress": asdict(checkpoint.progress), "identity": checkpoint.identity, "launch": checkpoint.launch}
        (directory / "state.json").write_text(json.dumps(state), encoding="utf-8")
        group.barrier()
        for rank in range(group.n):
            if not (directory / _file_name("best", rank, group.n)).is_file():
                raise ValueError(f"{directory} has no part of process {rank}: is --out shared?")
    for path in folder.iterdir():  # older ones, and what a killed process left
        if path.name != f"{number:06d}":
            shutil.rmtree(path, ignore_errors=True)
    group.barrier()


def load_checkpoint(run: Path) -> Checkpoint | None:
    """The newest complete checkpoint of a run, or None when it has none."""
    directory = _newest(run)
    if directory is None:
        return None
    verify_manifest(directory)
    state = _state(directory)
    tensors = (StoredTensors(sorted(directory.glob(f"{kind}*.safetensors"))) for kind in KINDS)
    return Checkpoint(Progress(**state["progress"]), TrainingTensors(*tensors), state["identity"], state["launch"])


def begun_by(run: Path) -> str | None:
    """The name of the launch that wrote the newest checkpoint; None if there is none."""
    directory = _newest(run)
    return None if directory is None else _state(directory)["launch"]


def identity_of(run: Path) -> dict[str, Any]:
    """The identity of the newest checkpoint; empty if there is none."""
    directory = _newest(run)
    identity: dict[str, Any] = {} if directory is None else _state(directory)["identity"]
    return identity


def _write(tensors: TrainingTensors, directory: Path, group: ProcessGroup) -> None:
    for kind in KINDS:
        some = {name: t.detach().contiguous() for name, t in getattr(tensors, kind).items()}
        save_file(some, directory / _file_name(kind, group.rank, group.n))


def _file_name(kind: str, rank: int, n: int) -> str:
    return f"{kind}.safetensors" if n == 1 else f"{kind}-{rank}.safetensors"


def has_checkpoint(run: Path) -> bool:
    return bool(_checkpoints(run / "checkpoints"))


def delete_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints", ignore_errors=True)


def _newest(run: Path) -> Path | None:
    return max(_checkpoints(run / "checkpoints"), key=lambda path: int(path.name), default=None)


def _state(directory: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((directory / "state.json").read_text(encoding="utf-8"))
    return state


def _checkpoints(folder: Path) -> list[Path]:
    """The complete ones, under their final names; leftovers of a killed save start with a dot."""
    return [path for path in folder.glob("[0-9]*") if path.is_dir()] if folder.is_dir() else []
