"""Checkpoints: all that a run needs to go on as if nothing had happened.

A checkpoint is a directory `checkpoints/<number>` with `state.json`, `weights.safetensors`,
`optimizer.safetensors`, `best.safetensors` and a manifest. It is renamed into place when it is
complete, and only then is the one before it deleted: a kill at any moment leaves a good one.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from bert4rec.durable import new_directory, verify_manifest


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


@dataclass(frozen=True)
class Checkpoint:
    progress: Progress
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    best: dict[str, Tensor]
    identity: dict[str, Any]  # the configuration and data that it belongs to


def save_checkpoint(run: Path, checkpoint: Checkpoint) -> None:
    folder = run / "checkpoints"
    number = max((int(path.name) for path in _complete(folder)), default=0) + 1
    with new_directory(folder / f"{number:06d}") as directory:
        save_file(_contiguous(checkpoint.weights), directory / "weights.safetensors")
        save_file(_contiguous(checkpoint.optimizer), directory / "optimizer.safetensors")
        save_file(_contiguous(checkpoint.best), directory / "best.safetensors")
        state = {"progress": asdict(checkpoint.progress), "identity": checkpoint.identity}
        (directory / "state.json").write_text(json.dumps(state), encoding="utf-8")
    for path in folder.iterdir():  # older ones, and what a killed process left
        if path.name != f"{number:06d}":
            shutil.rmtree(path)


def load_checkpoint(run: Path) -> Checkpoint | None:
    """The newest complete checkpoint of a run, or None when it has none."""
    complete = _complete(run / "checkpoints")
    if not complete:
        return None
    directory = max(complete, key=lambda path: int(path.name))
    verify_manifest(directory)
    state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
    return Checkpoint(
        Progress(**state["progress"]),
        load_file(directory / "weights.safetensors"),
        load_file(directory / "optimizer.safetensors"),
        load_file(directory / "best.safetensors"),
        state["identity"],
    )


def has_checkpoint(run: Path) -> bool:
    return bool(_complete(run / "checkpoints"))


def delete_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints", ignore_errors=True)


def _complete(folder: Path) -> list[Path]:
    """Checkpoints under their final names; leftovers of a killed save start with a dot."""
    return [path for path in folder.glob("[0-9]*") if path.is_dir()] if folder.is_dir() else []


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
