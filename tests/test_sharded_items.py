"""Item embeddings that are sharded over processes learn the same as whole ones."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toys import small_config

from bert4rec.config import RunConfig
from bert4rec.distributed.shard_parameters import ShardParameters
from bert4rec.distributed.sharded_items import ShardedItems, capacity_for, check_can_shard
from bert4rec.threads import WorkerThreads
from bert4rec.training.checkpoint import Progress, RunDirectory, TrainingTensors, save_checkpoint
from bert4rec.training.gradients import CPU
from bert4rec.training.process_group import ProcessGroup
from bert4rec.training.replica import copy_of
from bert4rec.training.setup import build_model

PROGRAM = Path(__file__).with_name("sharded_program.py")
SETTINGS = (
    "stages.0.epochs=4",
    "stages.0.learning_rate=0.01",
    "model.dropout=0",
    "training.validate_every=1",
    "training.workers=1",
    "training.shards=3",
    "loss.name=sampled-softmax",
    "loss.negatives=in-batch",
    "loss.n_negatives=10000",  # all others of the batch: nothing is drawn
)
SECOND = ("stages.1.epochs=2", "stages.1.learning_rate=3e-4")
SHARDED = "training.shard_items=true"


def trained(run: Path, recipe: str, overrides: tuple[str, ...]) -> Any:
    """The curve and the sums of the weights: of two processes where the items are sharded."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch = torchrun if SHARDED in overrides else []
    done = subprocess.run(
        [sys.executable, *launch, str(PROGRAM), str(run), recipe, *overrides],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(PROGRAM.parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("bert4rec-2-stage", SECOND),
        ("default", (*SECOND, "model.name=bert4rec")),  # next items, then from a random place on
        ("sasrec", ("model.attention_dropout=0",)),
    ],
)
def test_two_processes_with_half_the_rows_each_learn_what_one_with_all_of_them_does(
    recipe: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """From the same weights, with losses, validations and weights compared, to rounding."""
    settings = (*SETTINGS, *overrides)
    start = copy_of(build_model(small_config(*settings, recipe=recipe), 30, 0))
    runs = [tmp_path / kind for kind in ("whole", "sharded")]
    runs[0].mkdir()
    tensors = TrainingTensors(start, {}, start)
    save_checkpoint(RunDirectory(runs[0], {"shards": 3}), Progress(), tensors)
    shutil.copytree(runs[0], runs[1])
    whole = trained(runs[0], recipe, settings)
    sharded = trained(runs[1], recipe, (*settings, SHARDED))
    assert len(whole["curve"]) == (4 if recipe == "sasrec" else 6)
    before = {key: tensor.double().abs().sum().item() for key, tensor in start.items()}
    assert whole["weights"] != pytest.approx(before, rel=1e-1)  # they have moved
    for a, b in zip(whole["curve"], sharded["curve"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["ndcg@10"] == pytest.approx(b["ndcg@10"], abs=0.01)
    assert sharded["weights"] == pytest.approx(whole["weights"], rel=1e-3)


N_ITEMS = 31


def parameters_of(rank: int, n: int) -> ShardParameters:
    """Those of one process, in which every number says which row of the whole it is in."""
    small = build_model(small_config(), 8, 0)
    own = ShardParameters(small, ProcessGroup(n, rank), torch.arange(N_ITEMS).float(), seed=0)
    with torch.no_grad():
        rows = torch.arange(rank, N_ITEMS + 2, n)
        own.item_embedding.weight.copy_(rows[:, None].expand_as(own.item_embedding.weight))
    return own


def assert_rows(found: dict[str, torch.Tensor], rank: int, n: int, prefix: str = "") -> None:
    expected = torch.arange(rank, N_ITEMS + 2, n).float()
    assert torch.equal(found[f"{prefix}item_embedding.weight"][:, 0], expected)
    assert torch.equal(found[f"{prefix}output_bias"], torch.arange(rank, N_ITEMS, n).float())


@pytest.mark.parametrize("n_writers", [1, 2, 3])
def test_rows_are_found_again_by_another_number_of_processes(n_writers: int) -> None:
    """Three processes wrote a checkpoint, or one that was not sharded, and two resume from it."""
    written = {}
    for rank in range(n_writers):
        own = parameters_of(rank, n_writers)
        tensors = copy_of(own)
        moments = {f"exp_avg/{name}": tensor for name, tensor in tensors.items()}
        counts = {f"step/{name}": torch.tensor(7.0) for name in tensors}
        everything = tensors | moments | counts
        written |= everything if n_writers == 1 else own.to_checkpoint(everything)
    assert len(written) == 3 * len(tensors) + (n_writers - 1) * 4  # two rows, and their moments
    for rank in range(2):
        found = parameters_of(rank, 2).from_checkpoint(written)
        assert found.keys() == everything.keys()
        assert_rows(found, rank, 2)
        assert_rows(found, rank, 2, "exp_avg/")
        assert found["step/item_embedding.weight"] == 7


def test_a_step_has_room_for_all_items_that_it_can_touch() -> None:
    """No item twice, each sequence as long as can be, and as many negatives."""
    config = sharded("loss.n_negatives=100", "model.max_len=12")
    assert capacity_for(config, n_items=10**6, n_sequences=1000) == 1000 * 13 + 100
    assert capacity_for(config, n_items=10**6, n_sequences=1) == 256 * 13  # a validation
    assert capacity_for(config, n_items=50, n_sequences=1000) == 50


def test_the_special_tokens_start_as_in_a_whole_model() -> None:
    config = sharded("loss.n_negatives=64")
    with WorkerThreads(1) as workers:
        replicas = []
        for rank in range(2):
            small = build_model(config, 8, 0)
            loss = config.loss.build(np.ones(N_ITEMS, dtype=np.int64))
            group = ProcessGroup(2, rank)
            bias = torch.zeros(N_ITEMS)
            replicas.append(ShardedItems(small, bias, loss, config, workers, CPU, group))
    whole = build_model(config, 8, 0).get_parameter("item_embedding.weight")
    pad, mask = (replicas[row % 2].own.item_embedding.weight[row // 2] for row in (N_ITEMS, N_ITEMS + 1))
    assert torch.equal(pad, whole[8])
    assert torch.equal(mask, whole[9])


def sharded(*settings: str) -> RunConfig:
    return small_config(SHARDED, "loss.name=sampled-softmax", *settings)


@pytest.mark.parametrize(
    ("config", "n", "complaint"),
    [
        (sharded(), 1, "there is one: start more"),
        (small_config(SHARDED), 2, "cross-entropy touches all"),
        (sharded("loss.name=bce", "loss.n_negatives=10"), 2, "draw 64 or more"),
        (small_config(SHARDED, recipe="gru4rec"), 2, "not for gru4rec"),
        (sharded("training.device=cuda"), 2, "works on CPUs"),
    ],
)
def test_what_cannot_be_sharded_is_said(config: RunConfig, n: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_can_shard(config, n)


def test_stages_of_a_sharded_model_cannot_be_kept() -> None:
    check_can_shard(sharded(), 2)
    with pytest.raises(ValueError, match="--keep-stages"):
        check_can_shard(sharded(), 2, keep_stages=True)
