"""A run that was interrupted or killed and resumed is bit-identical to one that was not.

The first part stops a tiny run at each of its steps and at each of its checkpoints, in this
process. The second part kills real processes: with SIGKILL at a chosen step, or in the middle of
writing a chosen checkpoint. They kill themselves, because a signal from outside would come at
another moment each time.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import quiet, random_histories, small_config

from bert4rec import pipeline
from bert4rec.config import RunConfig
from bert4rec.data.splits import leave_one_out
from bert4rec.durable import sha256
from bert4rec.interrupts import Interrupted
from bert4rec.pipeline import RunOptions, train, train_recommender
from bert4rec.training import loop
from bert4rec.training.checkpoint import has_checkpoint, save_checkpoint
from bert4rec.training.loop import RunDirectory
from bert4rec.training.run_log import RunLog

# Every step and every checkpoint

EPOCHS = ("stages.0.epochs=3", "stages.1.epochs=2")
TINY = (*EPOCHS, "model.dim=4", "model.layers=1", "batch_size=8", "workers=1")
N_STEPS = 3 * 3 + 2 * 3  # 20 users in batches of 8
TIMES = ("seconds", "sequences_per_second")
VARIANTS = {
    "validate every 2 epochs": ("validate_every=2",),
    "validate at the end only": ("validate_every=100",),
    "no validation": ("on_validation=true",),
    "early stopping": ("validate_every=1", "stages.0.patience=1", "stages.1.patience=1"),
}


class Died(Exception):
    """Stands for a process that is killed: nothing is saved any more."""


class TinyRun:
    """One run in one directory, in as many sessions as it takes."""

    def __init__(self, path: Path, config: RunConfig, minutes: float | None = None) -> None:
        path.mkdir()
        self.path, self.config = path, config
        self.options = RunOptions(keep_stages=True, minutes=minutes)
        self.split = leave_one_out(random_histories(3, n_users=20))
        self.n_steps = 0

    def session(self, monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> Any:
        """Train on to the end; all that the run leaves behind, without times.

        `stop_at` is the step of this session in which Ctrl-C is pressed.
        """
        n_steps = 0

        def is_stopped() -> bool:  # called once per step
            nonlocal n_steps
            n_steps += 1
            return n_steps == stop_at

        @contextmanager
        def stop_requested() -> Iterator[Callable[[], bool]]:
            yield is_stopped

        monkeypatch.setattr(pipeline, "stop_requested", stop_requested)
        options = replace(self.options, resume=has_checkpoint(self.path))
        directory = RunDirectory(self.path, {"config": self.config.model_dump(mode="json")})
        try:
            with RunLog(self.path, quiet()) as log:
                model, progress = train(self.config, self.split, 20, directory, log, options)
        finally:
            self.n_steps += n_steps
        facts = {key: value for key, value in asdict(progress).items() if key not in TIMES}
        events = [json.loads(line) for line in (self.path / "log.jsonl").read_text().splitlines()]
        assert events == facts.pop("history")
        curve = [{key: e[key] for key in e if key not in TIMES} for e in events]
        weights = {name: tensor.tolist() for name, tensor in model.state().items()}
        stages = {path.name: sha256(path) for path in self.path.glob("stage-*.safetensors")}
        return {"weights": weights, "progress": facts, "log": curve, "stages": stages}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> RunConfig:
    return small_config(*TINY, *VARIANTS[request.param])


def test_stopped_at_any_step_a_run_ends_as_if_it_had_not_been(
    variant: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = TinyRun(tmp_path / "whole", variant)
    expected = whole.session(monkeypatch)
    assert len(expected["stages"]) == 2
    for step in range(1, whole.n_steps + 1):
        run = TinyRun(tmp_path / f"stopped-{step}", variant)
        with pytest.raises(Interrupted):
            run.session(monkeypatch, stop_at=step)
        assert run.session(monkeypatch) == expected, f"stopped at step {step}"
        assert run.n_steps == whole.n_steps, f"stopped at step {step}"


def test_stopped_at_every_step_a_run_ends_as_if_it_had_not_been(
    variant: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = TinyRun(tmp_path / "whole", variant)
    expected = whole.session(monkeypatch)
    run = TinyRun(tmp_path / "stopped", variant)
    for _ in range(whole.n_steps):
        with pytest.raises(Interrupted):
            run.session(monkeypatch, stop_at=1)
    assert run.session(monkeypatch) == expected
    assert run.n_steps == whole.n_steps


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("seconds", [-1.0, 1e9], ids=["every step", "validations only"])
def test_a_run_that_dies_at_any_checkpoint_ends_as_if_it_had_not(
    variant: RunConfig,
    seconds: float,
    is_before: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Right before a checkpoint is saved, or right after it; the next session resumes."""
    monkeypatch.setattr(loop, "SAVE_EVERY", seconds)
    n_saves, dies_at = 0, 0

    def save(*arguments: Any) -> None:
        nonlocal n_saves
        n_saves += 1
        if is_before and n_saves == dies_at:
            raise Died
        save_checkpoint(*arguments)
        if n_saves == dies_at:
            raise Died

    monkeypatch.setattr(loop, "save_checkpoint", save)
    expected = TinyRun(tmp_path / "whole", variant).session(monkeypatch)
    n_all = n_saves
    assert n_all >= (N_STEPS if seconds < 0 and variant.stages[0].patience != 1 else 2)
    for number in range(1, n_all + 1):
        run = TinyRun(tmp_path / f"died-{number}", variant)
        n_saves, dies_at = 0, number
        with pytest.raises(Died):
            run.session(monkeypatch)
        dies_at = 0
        assert run.session(monkeypatch) == expected, f"died at checkpoint {number}"


@pytest.mark.parametrize("validate_every", [1, 2])
def test_out_of_time_a_run_ends_its_epoch_whenever_it_was_stopped(
    validate_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The minutes are over after the first step: the epoch is ended, the second stage left out."""
    config = small_config(*TINY, f"validate_every={validate_every}")
    whole = TinyRun(tmp_path / "whole", config, minutes=1e-7)
    expected = whole.session(monkeypatch)
    assert [(e["stage"], e["epoch"], e["step"]) for e in expected["log"]] == [("cloze", 1, 3)]
    for step in (1, 2, 3):
        run = TinyRun(tmp_path / f"stopped-{step}", config, minutes=1e-7)
        with pytest.raises(Interrupted):
            run.session(monkeypatch, stop_at=step)
        assert run.session(monkeypatch) == expected
        assert run.n_steps == whole.n_steps == 3
