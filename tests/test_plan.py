"""The memory plan: near the truth, and helpful when it says no."""

import re
import subprocess
import sys

import pytest
from toys import small_config

from bert4rec.config import load_config, override_config
from bert4rec.training.plan import available_memory, check_memory, plan_memory

MEASURE = """
import sys, numpy as np, torch
from bert4rec.config import load_config
from bert4rec.data.splits import Spans
from bert4rec.evaluation.protocols import full_rank
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.parallel import Workers
from bert4rec.training.batches import cloze_task, make_batch
from bert4rec.training.gradients import Gradients
from bert4rec.training.losses import make_loss
from bert4rec.training.optimizer import Optimizer
from bert4rec.training.settled import settled
torch.set_num_threads(2)
n_items = int(sys.argv[1])
config = settled(load_config(overrides=sys.argv[2:]), n_items)
n_rows, length = config.training.batch_size, config.model.max_len
model = BERT4Rec(n_items, config.model).train()
best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
tokens = np.random.default_rng(0).integers(0, n_items, n_rows * length, dtype=np.int32)
starts = np.arange(n_rows) * length
train = Spans(tokens, starts, starts + length, np.arange(n_rows))
loss = make_loss(config.training, np.ones(n_items, dtype=np.int64))
with Workers(2) as workers:
    gradients = Gradients(model, loss, workers)
    optimizer = Optimizer(model, config.training, is_sparse=loss.is_sparse)
    for step in range(2):
        task = cloze_task(train, n_items, config)
        rows, generator = np.arange(n_rows), torch.Generator().manual_seed(step)
        gradients.add(make_batch(task, train, rows, n_items, generator), step)
        optimizer.step(1e-3)
history = torch.randint(0, n_items, (256, 5))
full_rank(model.score(torch.zeros(256), history), history[:, 0], history)
status = open("/proc/self/status").read()  # ru_maxrss would count the parent, too
print(1024 * int(status.split("VmHWM:")[1].split()[0]))
"""


@pytest.mark.parametrize(
    ("n_items", "overrides"),
    [
        (3416, ["max_len=200", "batch_size=64"]),
        (
            1000,
            [
                *("max_len=100", "batch_size=64", "attention_dropout=0.2"),
                *("sees=both-sides", "next_item_share=0", "second_stage.asks=end"),
            ],
        ),
        (200_000, ["max_len=20", "batch_size=16", "loss=cross-entropy"]),
        (200_000, ["max_len=50", "batch_size=64", "loss=sampled-softmax", "n_negatives=500"]),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is measured as Linux counts it")
def test_the_plan_is_near_what_a_step_really_takes(n_items: int, overrides: list[str]) -> None:
    program = [sys.executable, "-c", MEASURE, str(n_items), *overrides]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=300)
    measured = int(done.stdout)
    planned = plan_memory(load_config(overrides=[*overrides, "workers=2"]), n_items, 10_000).total
    assert 0.6 * measured < planned < 1.7 * measured


def test_a_plan_that_does_not_fit_names_settings_that_do() -> None:
    config = load_config(overrides=["max_len=200", "dim=256", "workers=4", "loss=cross-entropy"])
    with pytest.raises(ValueError, match="--set") as error:
        check_memory(config, 1_000_000, 1000, 8 * 2**30)
    ideas = re.findall(r"--set ([a-z_.]+=[0-9]+)", str(error.value))
    assert ideas
    for idea in ideas:
        check_memory(override_config(config, [idea]), 1_000_000, 1000, 8 * 2**30)


def test_a_plan_that_no_setting_saves_says_so() -> None:
    with pytest.raises(ValueError, match="drop rare items"):
        check_memory(small_config(), 100_000_000, 1000, 2**30)


def test_this_machine_has_memory() -> None:
    available = available_memory()
    assert available is None or available > 2**20
