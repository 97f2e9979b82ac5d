"""A run that was interrupted or killed and resumed is bit-identical to one that was not.

The first part stops a tiny run at each of its steps and at each of its checkpoints, in this
process. The second part kills real processes: with SIGKILL at a chosen step, or in the middle of
writing a chosen checkpoint. They kill themselves, because a signal from outside would come at
another moment each time.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from toys import quiet, random_histories, small_config

from bert4rec import pipeline
from bert4rec.config import RunConfig
from bert4rec.data.splits import leave_one_out
from bert4rec.durable import sha256
from bert4rec.interrupts import Interrupted
from bert4rec.pipeline import RunOptions, train, train_recommender
from bert4rec.training import checkpoint, loop
from bert4rec.training.checkpoint import RunDirectory, has_checkpoint, save_checkpoint
from bert4rec.training.run_log import RunLog

# Every step and every checkpoint

EPOCHS = ("stages.0.epochs=3", "stages.1.epochs=2")
TINY = (*EPOCHS, "model.dim=4", "model.layers=1", "batch_size=8", "workers=1")
TIMES = ("seconds", "sequences_per_second")
VARIANTS = {
    "validate every 2 epochs": ("validate_every=2",),
    "validate at the end only": ("validate_every=100",),
    "no validation": ("on_validation=true",),
    "sampled loss": ("loss.name=sampled-softmax", "loss.n_negatives=4", "validate_every=2"),
    "early stopping": ("validate_every=1", "stages.0.patience=1", "stages.1.patience=1"),
}


class TinyRun:
    """One run in one directory, in as many sessions as it takes."""

    def __init__(self, path: Path, config: RunConfig, minutes: float | None = None) -> None:
        path.mkdir(exist_ok=True)
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
        assert events == facts.pop("events")
        curve = [{key: e[key] for key in e if key not in TIMES} for e in events]
        weights = {name: tensor.tolist() for name, tensor in model.state().items()}
        stages = {path.name: sha256(path) for path in self.path.glob("stage-*.safetensors")}
        return {"weights": weights, "progress": facts, "log": curve, "stages": stages}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no power is cut here, and there are many
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


@pytest.mark.parametrize("seconds", [-1.0, 1e9], ids=["every step", "validations only"])
def test_a_run_that_dies_at_any_checkpoint_ends_as_if_it_had_not(
    variant: RunConfig, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right before a checkpoint is saved or right after it.

    A run leaves behind what is in its directory at that moment: a copy of it is resumed.
    """
    copies: list[Path] = []

    def copy() -> None:
        copies.append(tmp_path / f"died-{len(copies)}")
        shutil.copytree(whole.path, copies[-1])

    def save(*arguments: Any) -> None:
        copy()
        save_checkpoint(*arguments)
        copy()

    whole = TinyRun(tmp_path / "whole", variant)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "CHECKPOINT_SECONDS", seconds)
        patch.setattr(loop, "save_checkpoint", save)
        expected = whole.session(monkeypatch)
    n_saves = whole.n_steps if seconds < 0 else 0
    assert len(copies) >= 2 * (n_saves + len(variant.stages))
    for number, path in enumerate(copies):
        assert TinyRun(path, variant).session(monkeypatch) == expected, f"copy {number}"


def test_a_run_whose_save_fails_resumes_from_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full: the error comes through, and the last checkpoint is whole."""
    config = small_config(*TINY, "validate_every=2")
    whole, run = TinyRun(tmp_path / "whole", config), TinyRun(tmp_path / "failed", config)
    expected = whole.session(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "CHECKPOINT_SECONDS", -1.0)
        patch.setattr(checkpoint, "_write", fails_at(5, checkpoint._write))
        with pytest.raises(OSError, match="No space left"):
            run.session(monkeypatch)
    assert run.n_steps == 5
    assert run.session(monkeypatch) == expected
    assert run.n_steps == 5 + whole.n_steps - 4


def fails_at(number: int, function: Callable[..., None]) -> Callable[..., None]:
    calls = count(1)

    def failing(*arguments: Any) -> None:
        function(*arguments)
        if next(calls) == number:
            raise OSError(errno.ENOSPC, "No space left on device")

    return failing


@pytest.mark.parametrize("validate_every", [1, 2])
def test_out_of_time_a_run_ends_its_epoch_whenever_it_was_stopped(
    validate_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The minutes are over after the first step: the epoch is ended, the second stage skipped."""
    config = small_config(*TINY, f"validate_every={validate_every}")
    whole = TinyRun(tmp_path / "whole", config, minutes=1e-7)
    expected = whole.session(monkeypatch)
    events = [(e["stage"], e["epoch"], e["step"]) for e in expected["log"]]
    assert events == [("cloze", 1, whole.n_steps)]
    for step in range(1, whole.n_steps + 1):
        run = TinyRun(tmp_path / f"stopped-{step}", config, minutes=1e-7)
        with pytest.raises(Interrupted):
            run.session(monkeypatch, stop_at=step)
        assert run.session(monkeypatch) == expected
        assert run.n_steps == whole.n_steps


# Real processes that are killed

PROGRAM = """
import os, signal, sys
import torch
from toys import quiet, random_histories, small_config
from bert4rec import durable, pipeline
from bert4rec.interrupts import Interrupted
from bert4rec.training import loop

torch.set_num_threads(1)
loop.CHECKPOINT_SECONDS = -1.0  # a checkpoint after every step
out, mode, number, kind, resume = sys.argv[1:]
calls = 0

def die_at(function):
    def counted(*arguments, **named):
        global calls
        calls += 1
        if calls == int(number):
            os.kill(os.getpid(), getattr(signal, kind))
        return function(*arguments, **named)
    return counted

if mode == "step":
    loop.TrainingLoop._step = die_at(loop.TrainingLoop._step)
if mode == "save":  # weights are written, the manifest is not
    durable.write_manifest = die_at(durable.write_manifest)
options = pipeline.RunOptions(resume=resume == "resume", baselines=False)
config = small_config("stages.0.epochs=3", "stages.1.epochs=2")
try:
    pipeline.train_recommender(random_histories(0), config, out, options, console=quiet())
except Interrupted:
    sys.exit(130)
"""
KILLED = -signal.SIGKILL


def start(out: Path, mode: str = "none", number: int = 0, *, resume: bool = False, kind: str = "SIGKILL") -> int:
    arguments = [str(out), mode, str(number), kind, "resume" if resume else "fresh"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode not in (0, 130, KILLED):
        pytest.fail(done.stderr)
    return done.returncode


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted") / "model"
    assert start(out) == 0
    return out


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in its ninth step; for tests that leave it as it is."""
    out = tmp_path_factory.mktemp("killed") / "model"
    assert start(out, "step", 9) == KILLED
    return out


def assert_same_run(a: Path, b: Path) -> None:
    for name in ("model.safetensors", "metrics.json"):
        assert sha256(a / name) == sha256(b / name)
    assert learning_curve(a) == learning_curve(b)


def learning_curve(run: Path) -> list[tuple[object, ...]]:
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [(e["stage"], e["epoch"], e["step"], e["loss"], e["ndcg@10"]) for e in events]


@pytest.mark.parametrize(("mode", "number"), [("step", 4), ("save", 12)])
def test_a_killed_process_is_resumed_to_the_same_bits(
    uninterrupted: Path, tmp_path: Path, mode: str, number: int
) -> None:
    out = tmp_path / "model"
    assert start(out, mode, number) == KILLED
    assert not (out / "manifest.json").exists()
    assert start(out, resume=True) == 0
    assert_same_run(uninterrupted, out)
    assert not (out / "checkpoints").exists()


def test_killed_in_the_first_save_there_is_nothing_to_resume_and_a_fresh_start_works(
    uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "model"
    assert start(out, "save", 1) == KILLED
    leftovers = [path.name for path in (out / "checkpoints").iterdir()]
    assert leftovers
    assert all(name.startswith(".") for name in leftovers)
    assert start(out) == 0
    assert_same_run(uninterrupted, out)


@pytest.mark.parametrize("kind", ["SIGINT", "SIGTERM"])
def test_interrupted_it_finishes_the_step_and_saves(uninterrupted: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "model"
    assert start(out, "step", 9, kind=kind) == 130
    assert start(out, resume=True) == 0
    assert_same_run(uninterrupted, out)


def test_leftovers_of_a_process_with_our_number_are_in_nobodys_way(tmp_path: Path) -> None:
    """In a container every run may be process 1, and a kill in mid-save leaves its directory."""
    leftover = tmp_path / "model" / "checkpoints" / f".000001.{os.getpid()}.tmp"
    leftover.mkdir(parents=True)
    (leftover / "weights.safetensors").write_bytes(b"half")
    leftover.with_name(".000007.1.tmp").mkdir()
    config, out = small_config("stages.0.epochs=1", "stages.1.epochs=0"), tmp_path / "model"
    options = RunOptions(overwrite=True, baselines=False)
    train_recommender(random_histories(0), config, out, options, console=quiet())
    assert (out / "manifest.json").exists()


def test_another_seed_gives_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = (TinyRun(tmp_path / str(n), small_config(*TINY, f"training.seed={n}")) for n in (0, 1))
    zero, one = (run.session(monkeypatch)["weights"] for run in runs)
    assert zero != one


def test_resuming_with_other_settings_or_into_a_finished_model_is_refused(
    uninterrupted: Path, killed: Path, tmp_path: Path
) -> None:
    def attempt(out: Path, n_epochs: int = 3, *, resume: bool = False) -> None:
        config = small_config(f"stages.0.epochs={n_epochs}", "stages.1.epochs=2")
        options = RunOptions(resume=resume)
        train_recommender(random_histories(0), config, out, options, console=quiet())

    with pytest.raises(ValueError, match=r"different: config\.stages\)"):
        attempt(killed, 4, resume=True)
    with pytest.raises(ValueError, match="--resume"):
        attempt(killed)
    with pytest.raises(ValueError, match="--overwrite"):
        attempt(uninterrupted)
    with pytest.raises(ValueError, match="--overwrite"):
        attempt(uninterrupted, resume=True)
    with pytest.raises(ValueError, match="no checkpoint"):
        attempt(tmp_path / "fresh", resume=True)


def test_a_damaged_checkpoint_is_refused_by_name(killed: Path, tmp_path: Path) -> None:
    out = shutil.copytree(killed, tmp_path / "model")
    weights = next((out / "checkpoints").glob("*/weights.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    options = RunOptions(resume=True)
    with pytest.raises(ValueError, match=r"weights\.safetensors is damaged"):
        train_recommender(random_histories(0), small_config(), out, options, console=quiet())
