"""Training in several processes from the command line, and on Ray.

What the processes do together is in test_process_groups.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray_runtime import ray_address
from typer.testing import CliRunner

from bert4rec.cli import app
from bert4rec.durable import sha256

SETTINGS = [
    "--recipe",
    "demo",
    "--no-baselines",
    "--set=dropout=0",
    "--set=stages.0.epochs=2",
    "--set=stages.1.epochs=1",
    "--set=validate_every=1",
]


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


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("distributed") / "two"
    said = finish(start("train", "demo", "--out", out, "--processes", 2, *SETTINGS))
    assert "2 processes with 1 worker each" in said
    return out


@pytest.mark.filterwarnings("ignore:.* deprecated")  # Ray warns of its own settings
def test_ray_trains_the_same_weights(two_processes: Path, tmp_path: Path) -> None:
    """Two workers of a real local Ray runtime."""
    options = ["--out", tmp_path / "ray", "--processes", 2, "--launcher", "ray"]
    options += ["--ray-address", ray_address(), *SETTINGS]
    done = CliRunner().invoke(app, ["train", "demo", *map(str, options)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "2 processes with 1 worker each" in done.output  # said by the first worker
    ours = tmp_path / "ray" / "model.safetensors"
    assert sha256(ours) == sha256(two_processes / "model.safetensors")
    assert not (tmp_path / "ray" / "ray").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--set=training.shards=5000"], "training.shards = 5000, and only 3,000 users"),
        (["--processes=65"], "65 processes and training.batch_size = 32"),
        (["--processes=4", "--set=training.shards=2"], "training.shards = 2 and 4 processes"),
        (["--processes=2", "--recipe=markov"], "markov is fitted in one pass"),
        (["--processes=0"], "--processes is 0"),
        (["--ray-address=here:1"], "add it"),
    ],
)
def test_wrong_settings_are_said_before_any_process_starts(words: list[str], complaint: str, tmp_path: Path) -> None:
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
