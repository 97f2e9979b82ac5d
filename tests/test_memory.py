"""The memory estimate: near the truth, and helpful when it says no. And what a dry run returns."""

import re
import subprocess
import sys

import pytest
from toys import random_histories, sequences_of, small_config

from bert4rec.config import RunConfig, load_config, override_config, resolve
from bert4rec.data.splits import leave_one_out
from bert4rec.pipeline import dry_run
from bert4rec.training import timing
from bert4rec.training.memory import available_memory, check_memory, estimate_memory
from bert4rec.training.setup import build_stages, stage_names
from bert4rec.training.timing import time_stages

MEASURE = """
import sys, numpy as np, torch
from bert4rec.config import load_config, resolve
from bert4rec.data.splits import Spans
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.objectives import ModelSpec
from bert4rec.scoring import rank_of
from bert4rec.threads import WorkerThreads
from bert4rec.training.batches import make_batch
from bert4rec.training.gradients import Gradients
from bert4rec.training.optimizer import Optimizer
torch.set_num_threads(2)
recipe, n_items = sys.argv[1], int(sys.argv[2])
config = resolve(load_config(recipe, None, sys.argv[3:]), n_items)
n_rows, length = config.training.batch_size, config.model.max_len
model = BERT4Rec(n_items, config.model).train()
best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
tokens = np.random.default_rng(0).integers(0, n_items, n_rows * length, dtype=np.int32)
starts = np.arange(n_rows) * length
train = Spans(tokens, starts, starts + length, np.arange(n_rows))
loss = config.loss.build(np.ones(n_items, dtype=np.int64))
objective = config.stages[0].build(train, ModelSpec(n_items, length, has_mask=True))
with WorkerThreads(2) as workers:
    gradients = Gradients(model, loss, workers)
    optimizer = Optimizer(model, 0.01)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        gradients.add(make_batch(objective, train, n_items, generator), step)
        optimizer.step(1e-3)
histories = torch.randint(0, n_items, (256, 5))
h = model.encode(torch.zeros(256), histories)
with torch.inference_mode():
    rank_of(model.output_layer().block_scores(h, 0, n_items), histories[:, 0])
status = open("/proc/self/status").read()  # ru_maxrss would count the parent, too
print(1024 * int(status.split("VmHWM:")[1].split()[0]))
"""


@pytest.mark.parametrize(
    ("recipe", "n_items", "overrides"),
    [
        ("demo", 3416, ["model.max_len=200", "batch_size=64"]),
        ("bert4rec", 1000, ["model.max_len=100", "batch_size=64", "model.attention_dropout=0.2"]),
        ("bert4rec", 200_000, ["model.max_len=20", "batch_size=16"]),
        (
            "demo",
            200_000,
            [*("model.max_len=50", "batch_size=64"), *("loss.name=sampled-softmax", "loss.n_negatives=500")],
        ),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is measured as Linux counts it")
def test_the_estimate_is_near_what_a_step_really_takes(recipe: str, n_items: int, overrides: list[str]) -> None:
    program = [sys.executable, "-c", MEASURE, recipe, str(n_items), *overrides]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=300)
    measured = int(done.stdout)
    config = resolve(load_config(recipe, None, [*overrides, "workers=2"]), n_items)
    assert 0.6 * measured < estimate_memory(config, n_items, 10_000).total < 1.7 * measured


def large_config(*overrides: str) -> RunConfig:
    settings = ["model.max_len=200", "model.dim=256", "workers=4", *overrides]
    return resolve(load_config("bert4rec", None, settings), 1_000_000)


def test_an_estimate_that_does_not_fit_names_settings_that_do() -> None:
    config = large_config()
    with pytest.raises(ValueError, match="--set") as error:
        check_memory(config, 1_000_000, 1000, 8 * 2**30)
    ideas = re.findall(r"--set ([a-z_.]+=[0-9]+)", str(error.value))
    assert ideas
    for idea in ideas:
        smaller = resolve(override_config(config, [idea]), 1_000_000)
        check_memory(smaller, 1_000_000, 1000, 8 * 2**30)


def test_an_estimate_that_no_setting_saves_says_so() -> None:
    with pytest.raises(ValueError, match="drop rare items"):
        check_memory(small_config(), 100_000_000, 1000, 2**30)


def test_sharded_items_need_a_share_of_the_memory_in_each_process() -> None:
    config = large_config("loss.name=sampled-softmax", "training.shard_items=true")
    shares = [estimate_memory(config, 1_000_000, 1000, n_processes=n) for n in (1, 2, 4)]
    assert shares[0].parameters > 1.9 * shares[1].parameters > 3.5 * shares[2].parameters
    assert shares[2].total >= shares[2].whole >= 1_000_000 * 256 * 4  # the first assembles it


def test_a_stage_without_epochs_needs_no_memory() -> None:
    only_cloze = large_config()
    values = only_cloze.model_dump()
    values["stages"] += ({"objective": "next_item", "epochs": 0},)
    with_other = RunConfig.model_validate(values)
    estimates = [estimate_memory(c, 10_000, 1000) for c in (only_cloze, with_other)]
    assert estimates[0] == estimates[1]


def test_this_machine_has_memory() -> None:
    available = available_memory()
    assert available is None or available > 2**20


# Dry runs


def test_a_dry_run_returns_the_resolved_settings_the_memory_and_each_stage() -> None:
    sequences = random_histories(0)
    config = load_config("demo", None, ["stages.0.epochs=3", "stages.1.epochs=2", "workers=1"])
    found = dry_run(sequences, config, seconds=0)
    assert found.config == resolve(config, sequences.n_items)
    assert found.memory == estimate_memory(
        found.config, sequences.n_items, int(leave_one_out(sequences).train.lengths.max())
    )
    assert list(found.stages) == stage_names(found.config) == ["next_item 1", "next_item 2"]
    assert [epochs for epochs, _ in found.stages.values()] == [3, 2]
    stages = build_stages(found.config, leave_one_out(sequences), 1)
    for stage, (_, time) in zip(stages, found.stages.values(), strict=True):
        assert time.steps_per_epoch == stage.batches.steps_per_epoch > 0
        assert time.seconds_per_step > 0
        assert time.seconds_per_epoch == time.seconds_per_step * time.steps_per_epoch
        assert time.seconds_per_validation > 0


def test_a_dry_run_of_a_fitted_model_has_nothing_to_time() -> None:
    found = dry_run(random_histories(0), load_config("popularity"))
    assert found.memory is None
    assert found.stages == {}


def test_only_stages_with_epochs_are_timed_and_those_without_histories_take_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "MOST_STEPS", 10)
    config = small_config("workers=1", "training.on_validation=true")
    split = leave_one_out(random_histories(0))
    assert all(time.seconds_per_validation == 0 for time in time_stages(split, config, 0))
    short = leave_one_out(sequences_of([[i % 7, (i + 1) % 7, (i + 2) % 7] for i in range(30)], 7))
    cloze, last_item = time_stages(short, small_config("workers=1"), 0)
    assert cloze.steps_per_epoch == 2
    assert (last_item.steps_per_epoch, last_item.seconds_per_step) == (0, 0.0)
    assert len(time_stages(short, small_config("workers=1", "stages.1.epochs=0"), 0)) == 1


def test_a_dry_run_of_settings_that_do_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bert4rec.pipeline.available_memory", lambda: 2**20)
    with pytest.raises(ValueError, match="of memory and 1 MiB are free"):
        dry_run(random_histories(0), small_config())
