"""Checkpoints: all that a run needs to go on as if nothing had happened.

A checkpoint is a directory `checkpoints/<number>` with `state.json`, `weights.safetensors`,
`optimizer.safetensors`, `best.safetensors` and a manifest. It is renamed into place when it is
complete, and only then is the one before it deleted: a kill at any moment leaves a good one.

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
    """The tensors of some files, each read when it is asked for: a table may be too large."""

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
    """The tensors of a training, or what one process has of them."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    best: Mapping[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    progress: Progress
    tensors: TrainingTensors
    identity: dict[str, Any]  # the configuration and data that it belongs to
    launch: str | None = None  # which start of processes wrote it, where that has a name


def save_checkpoint(
    run: Path, checkpoint: Checkpoint, group: ProcessGroup = SINGLE_PROCESS
) -> None:
    """Called by all processes; each writes the tensors that it has, the first one the rest."""
    if not group.is_first:
        _write(checkpoint.tensors, run / "checkpoints" / group.from_first(None), group)
        group.barrier()  # all parts are there
        group.barrier()  # it has its name
        return
    folder = run / "checkpoints"
    number = max((int(path.name) for path in _complete(folder)), default=0) + 1
    with new_directory(folder / f"{number:06d}") as directory:
        group.from_first(directory.name)
        _write(checkpoint.tensors, directory, group)
        facts = {"identity": checkpoint.identity, "launch": checkpoint.launch}
        text = json.dumps({"progress": asdict(checkpoint.progress)} | facts)
        (directory / "state.json").write_text(text, encoding="utf-8")
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
    facts = _facts(directory)
    parts = (
        StoredTensors(sorted(directory.glob(f"{kind}*.safetensors")))
        for kind in ("weights", "optimizer", "best")
    )
    return Checkpoint(
        Progress(**facts["progress"]),
        TrainingTensors(*parts),
        facts["identity"],
        facts.get("launch"),
    )


def begun_by(run: Path) -> str | None:
    """The launch that wrote the newest checkpoint; None if there is none or it had no name."""
    directory = _newest(run)
    return None if directory is None else _facts(directory).get("launch")


def identity_of(run: Path) -> dict[str, Any]:
    """What the newest checkpoint belongs to; empty if there is none."""
    directory = _newest(run)
    identity: dict[str, Any] = {} if directory is None else _facts(directory)["identity"]
    return identity


def _write(state: TrainingTensors, directory: Path, group: ProcessGroup) -> None:
    for kind in ("weights", "optimizer", "best"):
        tensors = {
            name: tensor.detach().contiguous() for name, tensor in getattr(state, kind).items()
        }
        save_file(tensors, directory / _file_name(kind, group.rank, group.n))


def _file_name(kind: str, rank: int, n: int) -> str:
    return f"{kind}.safetensors" if n == 1 else f"{kind}-{rank}.safetensors"


def has_checkpoint(run: Path) -> bool:
    return bool(_complete(run / "checkpoints"))


def delete_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints", ignore_errors=True)


def _newest(run: Path) -> Path | None:
    return max(_complete(run / "checkpoints"), key=lambda path: int(path.name), default=None)


def _facts(directory: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((directory / "state.json").read_text(encoding="utf-8"))
    return facts


def _complete(folder: Path) -> list[Path]:
    """Checkpoints under their final names; leftovers of a killed save start with a dot."""
    return [path for path in folder.glob("[0-9]*") if path.is_dir()] if folder.is_dir() else []
