"""Real processes that torchrun starts train one model: the curve of one, the bits after a kill.

The same through the command line, and on Ray, is in test_distributed.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toys import quiet, random_histories, small_config

from bert4rec.config import load_config
from bert4rec.durable import sha256
from bert4rec.pipeline import RunOptions, train_recommender
from bert4rec.run_checks import check_training, is_relaunched
from bert4rec.training.batches import check_shards, share_of_batch, users_of_shard
from bert4rec.training.checkpoint import Progress, RunDirectory, TrainingTensors, load_checkpoint, save_checkpoint
from bert4rec.training.process_group import ProcessGroup
from bert4rec.training.setup import build_stages

# Without dropout nothing differs between one process and two but the order of sums.
SETTINGS = ("dropout=0", "stages.0.epochs=2", "stages.1.epochs=1", "validate_every=1", "workers=1")
TOLERANCE = 1e-4  # of a loss, relative
# The second process kills itself in step `dies_at`, unless torchrun has restarted it.
PROGRAM = """
import os, signal, sys
from pathlib import Path
import torch
from toys import random_histories, small_config
from bert4rec.distributed.launch import is_restart, joined
from bert4rec.pipeline import RunOptions, train_in_group, train_recommender
from bert4rec.training import loop

torch.set_num_threads(1)
out, dies_at, overrides = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
loop.CHECKPOINT_SECONDS = -1.0 if dies_at else 1e9
step, calls = loop.TrainingLoop._step, 0

def counted(*arguments):
    global calls
    calls += 1
    if calls == dies_at and os.environ["RANK"] == "1" and not is_restart():
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*arguments)

loop.TrainingLoop._step = counted
with joined() as group:
    options = RunOptions(baselines=False)
    config, out = small_config(*overrides), Path(out)
    train_in_group(random_histories(0, n_users=80), group, config=config, out=out, options=options)
    group.barrier()
os._exit(0)  # as in `run_as_rank`: threads of torch's connections can abort a process that ends
"""


def start(out: Path, *overrides: str, launch: tuple[str, ...], dies_at: int = 0) -> subprocess.Popen[str]:
    program = out.with_suffix(".py")
    program.write_text(PROGRAM, encoding="utf-8")
    words = [str(program), str(out), str(dies_at), *SETTINGS, *overrides]
    python_path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launch, *words],
        env=os.environ | {"PYTHONPATH": python_path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> str:
    _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    return said


def curve(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


TWO = ("--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("processes") / "two"
    said = finished(start(out, launch=TWO))
    assert "2 processes with 1 worker each" in said
    return out


def test_two_processes_have_the_curve_of_one(two_processes: Path, tmp_path: Path) -> None:
    """Same global batch, same shards: same losses, and a validation of everybody's users."""
    config = small_config(*SETTINGS, "shards=2")
    sequences, options = random_histories(0, n_users=80), RunOptions(baselines=False)
    train_recommender(sequences, config, tmp_path / "one", options, console=quiet())
    one, two = curve(tmp_path / "one"), curve(two_processes)
    assert [(e["stage"], e["epoch"], e["step"]) for e in one] == [(e["stage"], e["epoch"], e["step"]) for e in two]
    assert len(one) == 3
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=TOLERANCE)
        assert a["ndcg@10"] == pytest.approx(b["ndcg@10"], abs=0.003)
    about = json.loads((two_processes / "about.json").read_text())
    assert about["training"]["processes"] == about["training"]["shards"] == 2


def test_a_killed_process_is_restarted_and_the_end_is_bit_identical(two_processes: Path, tmp_path: Path) -> None:
    """kill -9 in mid-epoch: torchrun restarts both, and they resume from the checkpoint."""
    launch = (*TWO, "--max-restarts", "1")
    said = finished(start(tmp_path / "killed", launch=launch, dies_at=7))
    assert said.count("training on cpu") == 2
    assert "resuming from epoch 2 of cloze" in said
    out = tmp_path / "killed"
    assert sha256(out / "model.safetensors") == sha256(two_processes / "model.safetensors")
    assert [e["loss"] for e in curve(out)] == [e["loss"] for e in curve(two_processes)]


def test_two_machines_that_differ_say_so_before_they_train(tmp_path: Path) -> None:
    """Two torchruns, as on two machines, of which one has other settings."""
    endpoint = f"127.0.0.1:{29000 + os.getpid() % 900}"
    launch = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d")
    launch += ("--rdzv-endpoint", endpoint, "--rdzv-id", "test")
    out = tmp_path / "run"
    both = [start(out, f"warmup_steps={n}", launch=launch) for n in (3, 4)]
    said = [process.communicate(timeout=200)[1] for process in both]
    assert all(process.returncode for process in both)
    assert any("another config.training.warmup_steps than process 0" in text for text in said)
    assert not (out / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("recipe", "overrides", "n_processes", "complaint"),
    [
        ("bert4rec", ["shards=5000"], 1, "training.shards = 5000, and only 40 users"),
        ("bert4rec", [], 33, "33 processes and training.batch_size = 32"),
        ("bert4rec", ["shards=2"], 4, "training.shards = 2 and 4 processes"),
        ("markov", [], 2, "markov is fitted in one pass"),
        ("bert4rec", ["shard_items=true"], 2, "cross-entropy touches all"),
    ],
)
def test_settings_that_do_not_go_with_the_processes_are_refused(
    recipe: str, overrides: list[str], n_processes: int, complaint: str
) -> None:
    sequences = random_histories(0, n_users=50)
    n_users = len(check_training(sequences, load_config(recipe)).train)
    complaint = complaint.replace("40 users", f"{n_users} users")
    with pytest.raises(ValueError, match=complaint):
        check_training(sequences, load_config(recipe, None, overrides), n_processes)


@pytest.mark.parametrize("name", ["", "a-launch"])
def test_a_restart_never_replaces_a_finished_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies before it has looked at the directory is restarted by torchrun."""
    config = small_config("stages.0.epochs=1", "stages.1.epochs=0")
    sequences, options = random_histories(0), RunOptions(baselines=False)
    train_recommender(sequences, config, tmp_path / "run", options, console=quiet())
    before = sha256(tmp_path / "run" / "model.safetensors")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
    with pytest.raises(ValueError, match="holds a finished model"):
        train_recommender(sequences, config, tmp_path / "run", options, console=quiet())
    assert sha256(tmp_path / "run" / "model.safetensors") == before


def test_a_launch_resumes_its_own_checkpoints_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, other = small_config(), small_config("training.seed=1")
    identity = {"config": config.model_dump(mode="json")}
    save_checkpoint(RunDirectory(tmp_path, identity, "ours"), Progress(), TrainingTensors({}, {}, {}))
    monkeypatch.delenv("BERT4REC_LAUNCH", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert not is_relaunched(tmp_path, config, overwrite=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ours")
    assert is_relaunched(tmp_path, config, overwrite=False)
    assert is_relaunched(tmp_path, config, overwrite=True)
    assert not is_relaunched(tmp_path, other, overwrite=True)  # the name was used before
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert not is_relaunched(tmp_path, config, overwrite=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert is_relaunched(tmp_path, config, overwrite=False)
    assert not is_relaunched(tmp_path / "empty", config, overwrite=False)


def test_what_was_read_of_a_checkpoint_stays_when_its_files_go(tmp_path: Path) -> None:
    """On shared storage a mapped file that another machine deletes kills whoever reads it."""
    tensors = {"weight": torch.arange(5.0)}
    run = RunDirectory(tmp_path, {})
    save_checkpoint(run, Progress(), TrainingTensors(tensors, {}, tensors))
    _, found = load_checkpoint(run)
    weight = found.weights["weight"]
    for path in (tmp_path / "checkpoints").rglob("*.safetensors"):
        path.write_bytes(b"")
    assert weight.tolist() == [0, 1, 2, 3, 4]


def test_every_user_is_in_one_shard_and_all_shards_end_together() -> None:
    split = check_training(random_histories(0, n_users=50), small_config())
    for n in (1, 2, 3, 7):
        parts = [users_of_shard(split.train, shard, n) for shard in range(n)]
        assert [u for part in parts for u in part.users.tolist()] == split.train.users.tolist()
        n_all = sum(map(len, parts))
        n_steps = [-(-len(part) // share_of_batch(len(part), n_all, 16)) for part in parts]
        assert max(n_steps) <= -(-n_all // 16)
        assert max(n_steps) - min(n_steps) <= 1


class UnconnectedProcess(ProcessGroup):
    """One of several, which hears nothing of the others."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_tensor(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]


def test_each_shard_belongs_to_one_process() -> None:
    split = check_training(random_histories(0, n_users=50), small_config())
    for n in (1, 2, 3, 4):
        groups = [UnconnectedProcess(n, rank) for rank in range(n)]
        stages = [build_stages(small_config(), split, 1, group, n_shards=4)[0] for group in groups]
        assert sorted(shard for stage in stages for shard in stage.batches.objectives) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="at most 4 processes"):
        check_shards(4, 5, 100, 16)
