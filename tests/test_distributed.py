"""Several real processes train one model: the same curve as one, the same bits after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ray_runtime import ray_address
from toys import quiet, random_histories, small_config
from typer.testing import CliRunner

from bert4rec.cli import app
from bert4rec.durable import sha256
from bert4rec.pipeline import check_training, train_recommender
from bert4rec.training.checkpoint import (
    Checkpoint,
    Progress,
    State,
    load_checkpoint,
    save_checkpoint,
)
from bert4rec.training.shards import Shards, check_shards, deal, share_of_batch

# Without dropout nothing differs between one process and two but the order of sums.
SETTINGS = [
    "--recipe",
    "demo",
    "--no-baselines",
    "--set=dropout=0",
    "--set=training.epochs=2",
    "--set=second_stage.epochs=1",
    "--set=validate_every=1",
    "--set=evaluation.bootstrap=10",
]
TOLERANCE = 1e-4  # of a loss, relative


def start(*words: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bert4rec", *map(str, words)],
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def curve(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("distributed") / "two"
    said = finish(start("train", "demo", "--out", out, "--processes", 2, *SETTINGS))
    assert "2 processes with 1 worker each" in said
    return out


def test_two_processes_have_the_curve_of_one(two_processes: Path, tmp_path: Path) -> None:
    """Same global batch, same shards: same losses, and the validation of all ranks' shares."""
    finish(start("train", "demo", "--out", tmp_path / "one", "--set=shards=2", *SETTINGS))
    one, two = curve(tmp_path / "one"), curve(two_processes)
    assert [(e["stage"], e["epoch"], e["step"]) for e in one] == [
        (e["stage"], e["epoch"], e["step"]) for e in two
    ]
    assert len(one) == 3
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=TOLERANCE)
        assert a["ndcg@10"] == pytest.approx(b["ndcg@10"], abs=0.003)
    about = json.loads((two_processes / "about.json").read_text())
    assert about["training"]["processes"] == about["training"]["shards"] == 2


def test_a_killed_process_is_replaced_and_the_end_has_the_same_bits(
    two_processes: Path, tmp_path: Path
) -> None:
    """kill -9 in mid-epoch: torchrun starts both again, and they go on from the checkpoint."""
    out = tmp_path / "killed"
    options = ["--out", out, "--processes", 2, "--set=checkpoint_minutes=0.004", *SETTINGS]
    process = start("train", "demo", *options)
    give_up = time.monotonic() + 120
    while not list((out / "checkpoints").glob("[0-9]*[2-9]")):  # one of the first epoch, or later
        assert process.poll() is None
        assert time.monotonic() < give_up
        time.sleep(0.05)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "bert4rec train"], capture_output=True, text=True
    ).stdout.split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGKILL)
    said = finish(process)
    assert said.count("training on cpu") == 2  # it was really begun twice
    assert sha256(out / "model.safetensors") == sha256(two_processes / "model.safetensors")
    assert [e["loss"] for e in curve(out)] == [e["loss"] for e in curve(two_processes)]


@pytest.mark.filterwarnings("ignore:.* deprecated")  # Ray warns of its own settings
def test_ray_trains_the_same_bits(two_processes: Path, tmp_path: Path) -> None:
    """Two workers of a real local Ray runtime."""
    options = ["--out", tmp_path / "ray", "--processes", 2, "--launcher", "ray"]
    options += ["--ray-address", ray_address(), *SETTINGS]
    done = CliRunner().invoke(app, ["train", "demo", *map(str, options)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "2 processes with 1 worker each" in done.output  # said by the first worker
    ours = tmp_path / "ray" / "model.safetensors"
    assert sha256(ours) == sha256(two_processes / "model.safetensors")
    assert not (tmp_path / "ray" / "ray").exists()


def test_two_machines_that_differ_say_so_before_they_train(tmp_path: Path) -> None:
    """Two torchruns, as on two machines, of which one has other settings."""
    port = 29000 + os.getpid() % 900

    def machine(epochs: int) -> subprocess.Popen[str]:
        launch = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        launch += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test"]
        options = ["--out", str(tmp_path / "run"), *SETTINGS, f"--set=training.epochs={epochs}"]
        words = ["-m", "bert4rec", "train", "demo", *options]
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *launch, *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    both = [machine(epochs) for epochs in (3, 4)]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert all(process.returncode for process in both)
    assert any("another config.training.epochs than process 0" in text for text in said)
    assert not (tmp_path / "run" / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--set=training.shards=5000"], "training.shards = 5000, and only 3,000 users"),
        (["--processes=65"], "65 processes and training.batch_size = 32"),
        (["--processes=4", "--set=training.shards=2"], "training.shards = 2 and 4 processes"),
        (["--processes=2", "--set=model.name=markov"], "markov is fitted in one pass"),
        (["--processes=0"], "--processes is 0"),
        (["--ray-address=here:1"], "add it"),
    ],
)
def test_wrong_settings_are_said_before_any_process_starts(
    words: list[str], complaint: str, tmp_path: Path
) -> None:
    command = ["train", "demo", "--recipe=demo", f"--out={tmp_path / 'run'}", *words]
    found = CliRunner().invoke(app, command).exception
    assert isinstance(found, ValueError)  # `main` prints it as one sentence
    assert complaint in str(found)
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_no_cluster_at_the_address_is_said_before_any_worker_starts(tmp_path: Path) -> None:
    place = ["--out", tmp_path / "run", "--launcher", "ray", "--ray-address", "127.0.0.1:9"]
    process = start("train", "demo", *place)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "no Ray cluster answers at 127.0.0.1:9" in said
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_a_missing_extra_is_named_before_any_work() -> None:
    """A process to which Ray does not exist."""
    program = (
        "import sys; sys.modules['ray'] = None\n"
        "sys.argv = ['bert4rec', 'train', 'nothing.csv', '--launcher', 'ray']\n"
        "from bert4rec.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'bert4rec[scale]'" in done.stderr


@pytest.mark.parametrize("name", ["", "a-launch"])
def test_a_restart_never_replaces_a_finished_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies before it has looked at the directory is started again by torchrun."""
    sequences, config = random_histories(0), small_config("training.steps=2")
    train_recommender(sequences, config, tmp_path / "run", baselines=False, console=quiet())
    before = sha256(tmp_path / "run" / "model.safetensors")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
    with pytest.raises(ValueError, match="holds a finished model"):
        train_recommender(sequences, config, tmp_path / "run", console=quiet())
    assert sha256(tmp_path / "run" / "model.safetensors") == before


def test_what_was_read_of_a_checkpoint_stays_when_its_files_go(tmp_path: Path) -> None:
    """On shared storage a mapped file that another machine deletes kills whoever reads it."""
    state = {"weight": torch.arange(5.0)}
    save_checkpoint(tmp_path, Checkpoint(Progress(), State(state, {}, state), {}))
    found = load_checkpoint(tmp_path)
    assert found is not None
    weight = found.state.weights["weight"]
    for path in (tmp_path / "checkpoints").rglob("*.safetensors"):
        path.write_bytes(b"")
    assert weight.tolist() == [0, 1, 2, 3, 4]


def test_every_user_is_in_one_shard_and_all_shards_end_together() -> None:
    split = check_training(random_histories(0, n_users=50), small_config())
    for n in (1, 2, 3, 7):
        parts = [Shards(n, (s,)).part(split.train, s) for s in range(n)]
        assert [u for part in parts for u in part.users.tolist()] == split.train.users.tolist()
        n_all = sum(map(len, parts))
        n_steps = [-(-len(part) // share_of_batch(len(part), n_all, 16)) for part in parts]
        assert max(n_steps) <= -(-n_all // 16)
        assert max(n_steps) - min(n_steps) <= 1


def test_processes_share_the_shards_out() -> None:
    for n_ranks in (1, 2, 3, 4):
        dealt = [deal(4, n_ranks, rank).mine for rank in range(n_ranks)]
        assert sorted(shard for mine in dealt for shard in mine) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="at most 4 processes"):
        check_shards(4, 5, 100, 16)
