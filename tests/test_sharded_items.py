"""Item vectors that are dealt out over processes learn the same as a whole table."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import small_config

from bert4rec.models import LEARNED
from bert4rec.threads import WorkerThreads
from bert4rec.training.checkpoint import Checkpoint, Progress, State, save_checkpoint
from bert4rec.training.distributed import Ranks
from bert4rec.training.gradients import CPU
from bert4rec.training.losses import make_loss
from bert4rec.training.replica import copy_of
from bert4rec.training.sharded import ShardedItems, check_can_shard

PROGRAM = Path(__file__).with_name("sharded_program.py")


def trained(run: Path, name: str, kind: str, overrides: tuple[str, ...]) -> Any:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch = torchrun if kind == "sharded" else []
    done = subprocess.run(
        [sys.executable, *launch, str(PROGRAM), str(run), name, kind, *overrides],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("bert4rec", ()),
        ("bert4rec", ("next_item_share=1", "second_stage.asks=every-item")),
        ("sasrec", ()),
    ],
)
def test_two_processes_with_half_the_rows_each_learn_what_one_with_all_of_them_does(
    name: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """From the same weights, with losses, validations and weights compared, to rounding."""
    torch.manual_seed(0)
    start = copy_of(LEARNED[name](30, small_config().model))
    runs = [tmp_path / kind for kind in ("whole", "sharded")]
    runs[0].mkdir()
    save_checkpoint(runs[0], Checkpoint(Progress(), State(start, {}, start), {}))
    shutil.copytree(runs[0], runs[1])
    whole, sharded = (trained(run, name, run.name, overrides) for run in runs)
    assert len(whole["curve"]) == (6 if name == "bert4rec" else 4)
    before = {key: tensor.double().abs().sum().item() for key, tensor in start.items()}
    assert whole["weights"] != pytest.approx(before, rel=1e-1)  # they have moved
    for a, b in zip(whole["curve"], sharded["curve"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["ndcg@10"] == pytest.approx(b["ndcg@10"], abs=0.01)
    assert sharded["weights"] == pytest.approx(whole["weights"], rel=1e-3)


def test_rows_are_found_again_by_another_number_of_processes() -> None:
    """Three processes wrote a checkpoint, two go on with it."""
    n_items = 31
    config = small_config("shard_items=true", "loss=sampled-softmax", "n_negatives=64")

    def trainee(rank: int, n: int) -> ShardedItems:
        torch.manual_seed(0)
        small = LEARNED["bert4rec"](n_items, config.model)
        counts = torch.ones(n_items, dtype=torch.int64).numpy()
        loss = make_loss(config.training, counts)
        return ShardedItems(small, torch.zeros(n_items), loss, config, workers, CPU, Ranks(n, rank))

    with WorkerThreads(1) as workers:
        three = [trainee(rank, 3) for rank in range(3)]
        for each in three:
            with torch.no_grad():  # every number says which row of the whole table it is
                rows = torch.arange(each.ranks.rank, n_items + 2, 3)
                each.own.items.weight.copy_(rows[:, None].expand_as(each.own.items.weight))
                assert each.own.output_bias is not None
                each.own.output_bias.copy_(torch.arange(each.ranks.rank, n_items, 3))
        written = {k: t for each in three for k, t in each._own_share(each._copy()).items()}
        for rank in range(2):
            part = trainee(rank, 2)._own_part(written)
            expected = torch.arange(rank, n_items + 2, 2).float()
            assert torch.equal(part["items.weight"][:, 0], expected)
            assert torch.equal(part["output_bias"], torch.arange(rank, n_items, 2).float())


@pytest.mark.parametrize(
    ("settings", "n", "complaint"),
    [
        (["loss=sampled-softmax"], 1, "there is one: start more"),
        ([], 2, "cross-entropy touches all"),
        (["loss=bce", "n_negatives=10"], 2, "draw 64 or more"),
        (["loss=bpr", "model.name=gru4rec"], 2, "not for gru4rec"),
    ],
)
def test_what_cannot_be_sharded_is_said(settings: list[str], n: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_can_shard(small_config("shard_items=true", *settings), n)
