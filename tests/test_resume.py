"""A run that was killed and resumed ends with the same bits as one that was not.

Each training is a real process. It kills itself with SIGKILL at a chosen step, or in the middle of
writing a chosen checkpoint, because a signal from outside would come at another moment each time.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toys import quiet, random_histories, small_config

from bert4rec.config import Config
from bert4rec.data.splits import leave_one_out
from bert4rec.durable import sha256
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.pipeline import train_recommender
from bert4rec.training.gradients import CPU
from bert4rec.training.loop import Interrupted, train
from bert4rec.training.progress import TrainingDisplay

LAST_STEP = 4  # of an epoch of 40 users in 16 a batch, some of them in two windows
PROGRAM = """
import os, signal, sys
import torch
from toys import quiet, random_histories, small_config
from bert4rec import durable, pipeline
from bert4rec.training import checkpoint, loop

torch.set_num_threads(1)
out, mode, number, resume = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "resume"
calls = 0

def die_at(function):
    def counted(*arguments, **named):
        global calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGNAL)
        return function(*arguments, **named)
    return counted

if mode == "step":
    loop._Trainer._step = die_at(loop._Trainer._step)
if mode == "save":  # weights are written, the manifest is not
    durable.write_manifest = die_at(durable.write_manifest)
config = small_config(
    "epochs=3", "second_stage.epochs=2", "training.checkpoint_minutes=CHECKPOINT_MINUTES"
)
try:
    pipeline.train_recommender(
        random_histories(0, n_users=120), config, out, resume=resume, console=quiet()
    )
except loop.Interrupted:
    sys.exit(130)
"""


def run(
    out: Path, mode: str = "none", number: int = 0, *, resume: bool = False, kind: str = "SIGKILL"
) -> int:
    program = PROGRAM.replace("SIGNAL", kind, 1).replace("signal.SIGKILL", f"signal.{kind}")
    program = program.replace("CHECKPOINT_MINUTES", "0")  # after every step
    arguments = [str(out), mode, str(number), "resume" if resume else "fresh"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode not in (0, 130, -signal.SIGKILL):
        pytest.fail(done.stderr)
    return done.returncode


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted") / "model"
    assert run(out) == 0
    return out


def assert_same_run(a: Path, b: Path) -> None:
    for name in ("model.safetensors", "metrics.json"):
        assert sha256(a / name) == sha256(b / name)
    assert learning_curve(a) == learning_curve(b)


def learning_curve(run: Path) -> list[tuple[object, ...]]:
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [(e["stage"], e["epoch"], e["step"], e["loss"], e["ndcg@10"]) for e in events]


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        ("step", 4),  # in the middle of the first epoch
        ("step", 30),  # in the second stage
        ("save", 5),
        ("save", 30),
    ],
)
def test_killed_and_resumed_gives_the_same_bits(
    uninterrupted: Path, tmp_path: Path, mode: str, number: int
) -> None:
    out = tmp_path / "model"
    assert run(out, mode, number) == -signal.SIGKILL
    assert not (out / "manifest.json").exists()
    assert run(out, resume=True) == 0
    assert_same_run(uninterrupted, out)
    assert not (out / "checkpoints").exists()


def test_killed_in_the_first_save_there_is_nothing_to_resume_and_a_fresh_start_works(
    uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "model"
    assert run(out, "save", 1) == -signal.SIGKILL
    leftovers = [path.name for path in (out / "checkpoints").iterdir()]
    assert leftovers
    assert all(name.startswith(".") for name in leftovers)
    assert run(out) == 0
    assert_same_run(uninterrupted, out)


def test_leftovers_of_a_process_with_our_number_are_in_nobodys_way(tmp_path: Path) -> None:
    """In a container every run may be process 1, and a kill in mid-save leaves its directory."""
    leftover = tmp_path / "model" / "checkpoints" / f".000001.{os.getpid()}.tmp"
    leftover.mkdir(parents=True)
    (leftover / "weights.safetensors").write_bytes(b"half")
    other = leftover.with_name(".000007.1.tmp")
    other.mkdir()
    config = small_config("epochs=1", "second_stage.epochs=0", "training.checkpoint_minutes=0")
    out = tmp_path / "model"
    train_recommender(random_histories(0), config, out, overwrite=True, console=quiet())
    assert (out / "manifest.json").exists()


@pytest.mark.parametrize("kind", ["SIGINT", "SIGTERM"])
def test_asked_to_stop_it_finishes_the_step_and_saves(
    uninterrupted: Path, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "model"
    assert run(out, "step", 9, kind=kind) == 130
    assert run(out, resume=True) == 0
    assert_same_run(uninterrupted, out)


def test_another_seed_gives_another_model(uninterrupted: Path, tmp_path: Path) -> None:
    config = small_config("epochs=3", "second_stage.epochs=2", "training.seed=1")
    sequences = random_histories(0, n_users=120)
    train_recommender(sequences, config, tmp_path / "other", console=quiet())
    other = sha256(tmp_path / "other" / "model.safetensors")
    assert other != sha256(uninterrupted / "model.safetensors")


def test_resuming_with_other_settings_or_into_a_finished_model_is_refused(
    uninterrupted: Path, tmp_path: Path
) -> None:
    sequences = random_histories(0, n_users=120)
    out = tmp_path / "model"
    assert run(out, "step", 9) == -signal.SIGKILL
    config = small_config("epochs=4", "second_stage.epochs=2", "training.checkpoint_minutes=0")
    with pytest.raises(ValueError, match=r"different: config\.training\.epochs\)"):
        train_recommender(sequences, config, out, resume=True, console=quiet())
    with pytest.raises(ValueError, match="--resume"):
        train_recommender(sequences, small_config(), out, console=quiet())
    with pytest.raises(ValueError, match="--overwrite"):
        train_recommender(sequences, small_config(), uninterrupted, console=quiet())
    fresh = tmp_path / "fresh"
    with pytest.raises(ValueError, match="no checkpoint"):
        train_recommender(sequences, small_config(), fresh, resume=True, console=quiet())


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert run(out, "step", 9) == -signal.SIGKILL
    weights = next((out / "checkpoints").glob("*/weights.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"weights\.safetensors is damaged"):
        train_recommender(
            random_histories(0, n_users=120), small_config(), out, resume=True, console=quiet()
        )


@pytest.mark.parametrize("stops_after", [1, LAST_STEP])
@pytest.mark.parametrize("validate_every", [1, 2])
def test_out_of_time_a_resumed_run_ends_the_epoch_like_an_uninterrupted_one(
    tmp_path: Path, stops_after: int, validate_every: int
) -> None:
    """`training.minutes` are over after the first step: the epoch that has begun is still ended."""
    config = small_config(
        "training.minutes=1e-7", "epochs=5", f"validate_every={validate_every}", "workers=1"
    )
    whole, steps = trained(config, tmp_path / "whole")
    assert steps == LAST_STEP
    with pytest.raises(Interrupted):
        trained(config, tmp_path / "parts", stops_after=stops_after)
    resumed, rest = trained(config, tmp_path / "parts", resume=True)
    assert rest == LAST_STEP - stops_after
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    curve = learning_curve(tmp_path / "whole")
    assert [event[:3] for event in curve] == [("cloze", 1, LAST_STEP)]
    assert learning_curve(tmp_path / "parts") == curve


def trained(
    config: Config, run: Path, *, resume: bool = False, stops_after: int | None = None
) -> tuple[dict[str, torch.Tensor], int]:
    """The weights in the end, and the number of steps that were taken."""
    run.mkdir(exist_ok=True)
    split = leave_one_out(random_histories(0))
    torch.manual_seed(0)
    model = BERT4Rec(split.n_items, config.model)
    n_steps = 0

    def should_stop() -> bool:  # asked once after every step
        nonlocal n_steps
        n_steps += 1
        return n_steps == stops_after

    with TrainingDisplay(run, quiet()) as display:
        train(
            model,
            split,
            config,
            run,
            display,
            identity={},
            hardware=CPU,
            resume=resume,
            should_stop=should_stop,
        )
    return model.state(), n_steps
