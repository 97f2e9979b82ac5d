"""The memory plan: near the truth, and helpful when it says no."""

import re
import subprocess
import sys

import pytest
from toys import small_config

from bert4rec.config import load_config, override_config
from bert4rec.training.plan import available_memory, check_memory, plan_memory

MEASURE = """
import resource, sys, torch
from bert4rec.config import load_config
from bert4rec.evaluation.protocols import full_rank
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.training.losses import cross_entropy
torch.set_num_threads(1)
config = load_config(overrides=sys.argv[2:])
n_items = int(sys.argv[1])
model = BERT4Rec(n_items, config.model).train()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
shape = config.training.batch_size, config.model.max_len
for _ in range(2):
    tokens = torch.randint(0, n_items, shape)
    at = torch.randperm(tokens.numel())[: int(tokens.numel() * config.training.mask_ratio)]
    cross_entropy(model.asked(tokens, at), *model.output(), tokens.flatten()[at]).backward()
    optimizer.step()
    optimizer.zero_grad()
history = torch.randint(0, n_items, (256, 5))
full_rank(model.score(torch.zeros(256), history), history[:, 0], history)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.parametrize(
    ("n_items", "overrides"),
    [
        (3416, ["max_len=200", "batch_size=64"]),
        (1000, ["max_len=100", "batch_size=64", "attention_dropout=0.2"]),
        (200_000, ["max_len=20", "batch_size=16"]),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is measured as Linux counts it")
def test_the_plan_is_near_what_a_step_really_takes(n_items: int, overrides: list[str]) -> None:
    program = [sys.executable, "-c", MEASURE, str(n_items), *overrides]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=300)
    measured = int(done.stdout)
    planned = plan_memory(load_config(overrides=overrides), n_items, 10_000).total
    assert 0.6 * measured < planned < 1.7 * measured


def test_a_plan_that_does_not_fit_names_settings_that_do() -> None:
    config = load_config(overrides=["max_len=200", "batch_size=4096", "dim=256"])
    with pytest.raises(ValueError, match="--set") as error:
        check_memory(config, 50_000, 1000, 8 * 2**30)
    ideas = re.findall(r"--set ([a-z_.]+=[0-9]+)", str(error.value))
    assert ideas
    for idea in ideas:
        check_memory(override_config(config, [idea]), 50_000, 1000, 8 * 2**30)


def test_a_plan_that_no_setting_saves_says_so() -> None:
    with pytest.raises(ValueError, match="drop rare items"):
        check_memory(small_config(), 100_000_000, 1000, 2**30)


def test_this_machine_has_memory() -> None:
    available = available_memory()
    assert available is None or available > 2**20
