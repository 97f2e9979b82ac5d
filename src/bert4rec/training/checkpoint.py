"""Checkpoints: all that a run needs to resume as if it had not been interrupted.

A checkpoint is a directory `checkpoints/<number>` with `state.json`, `weights.safetensors`,
`optimizer.safetensors`, `best.safetensors` and a manifest. It is renamed into place when it is
complete, and only then is the one before it deleted: a kill at any moment leaves a whole one.

Several processes each write a share of the tensors (`weights-1.safetensors`, …) into the same
directory, which must lie on storage that all of them see; any number of processes can read it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bert4rec.durable import new_directory, verify_manifest
from bert4rec.training.process_group import SINGLE_PROCESS, ProcessGroup, differences


@dataclass(frozen=True)
class RunDirectory:
    """Where checkpoints go, and what they belong to."""

    path: Path
    identity: dict[str, Any]  # the configuration and data of the run
    launch: str | None = None  # id of this multi-process launch, if it has one


@dataclass
class Progress:
    """Where a run stands. Everything random follows from the seed and these numbers."""

    stage_index: int = 0
    epoch: int = 0  # epochs completed in this stage
    batch: int = 0  # batches completed in this epoch
    step: int = 0  # steps completed in this stage
    best_ndcg: float = -1.0  # best validation NDCG@10 so far, in any stage
    best_stage: int = 0
    best_epoch: int = 0
    bad_validations: int = 0
    loss_sum: float = 0.0  # of this epoch
    seconds: float = 0.0  # spent training and validating, over all sessions
    sequences: int = 0  # trained, over all sessions
    events: list[dict[str, float | int | str]] = field(default_factory=list)

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


KINDS = tuple(each.name for each in fields(TrainingTensors))


def save_checkpoint(
    run: RunDirectory, progress: Progress, tensors: TrainingTensors, group: ProcessGroup = SINGLE_PROCESS
) -> None:
    """Called by all processes: each writes its tensors, and the first one everything else."""
    folder, before = run.path / "checkpoints", _complete(run.path)
    number = int(before[-1].name) + 1 if before else 1
    with new_directory(folder / f"{number:06d}") if group.is_first else contextlib.nullcontext() as created:
        directory = folder / group.from_first(created and created.name)
        _write(tensors, directory, group)
        if group.is_first:
            state = {"progress": asdict(progress), "identity": run.identity, "launch": run.launch}
            (directory / "state.json").write_text(json.dumps(state), encoding="utf-8")
        group.barrier()  # all tensors are written
        written = [directory / _file_name(kind, rank, group.n) for kind in KINDS for rank in range(group.n)]
        if group.is_first and (missing := [path.name for path in written if not path.is_file()]):
            raise ValueError(f"{directory} lacks {missing[0]}: all processes must see the same storage")
    if group.is_first:
        for path in folder.iterdir():  # older ones, and what a killed process left
            if path.name != f"{number:06d}":
                shutil.rmtree(path, ignore_errors=True)
    group.barrier()  # the checkpoint is complete


def load_checkpoint(run: RunDirectory) -> tuple[Progress, TrainingTensors]:
    """The newest complete checkpoint of this very run."""
    if not (complete := _complete(run.path)):
        raise ValueError(f"{run.path} has no checkpoint to resume from: train without --resume")
    verify_manifest(complete[-1])
    state = newest_state(run.path)
    if names := differences(state["identity"], run.identity):
        raise ValueError(
            f"the checkpoint in {run.path} belongs to another run (different: {names}): "
            "resume with the same data and settings, or train into another directory"
        )
    tensors = (StoredTensors(sorted(complete[-1].glob(f"{kind}*.safetensors"))) for kind in KINDS)
    return Progress(**state["progress"]), TrainingTensors(*tensors)


def newest_state(run: Path) -> dict[str, Any]:
    """Of the newest checkpoint: `progress`, `identity` and `launch`; empty if there is none."""
    complete = _complete(run)
    state: dict[str, Any] = json.loads((complete[-1] / "state.json").read_text("utf-8")) if complete else {}
    return state


def has_checkpoint(run: Path) -> bool:
    return bool(_complete(run))


def delete_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints", ignore_errors=True)


def _write(tensors: TrainingTensors, directory: Path, group: ProcessGroup) -> None:
    for kind in KINDS:
        some = {name: t.detach().contiguous() for name, t in getattr(tensors, kind).items()}
        save_file(some, directory / _file_name(kind, group.rank, group.n))


def _file_name(kind: str, rank: int, n: int) -> str:
    return f"{kind}.safetensors" if n == 1 else f"{kind}-{rank}.safetensors"


def _complete(run: Path) -> list[Path]:
    """Checkpoints under their final names, the newest last; leftovers of a killed save start with a dot."""
    paths = (path for path in (run / "checkpoints").glob("[0-9]*") if path.is_dir())
    return sorted(paths, key=lambda path: int(path.name))
