"""Trains a toy from a given checkpoint and prints its curve; started alone or by torchrun."""

import json
import sys
from pathlib import Path

import torch
from toys import quiet, random_histories, small_config

from bert4rec.data.splits import leave_one_out
from bert4rec.models import LEARNED
from bert4rec.training import losses
from bert4rec.training.distributed import joined
from bert4rec.training.gradients import CPU
from bert4rec.training.loop import train
from bert4rec.training.progress import TrainingDisplay
from bert4rec.training.shards import deal

run, name, kind, overrides = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
is_sharded = kind == "sharded"
torch.set_num_threads(1)
losses.SPARSE_FROM = 1  # rows that a step leaves alone stay as they are, as in a large catalogue
config = small_config(
    "epochs=4",
    "second_stage.epochs=2",
    "dropout=0",
    "validate_every=1",
    "workers=1",
    "shards=3",  # more than processes, and not the same number for each
    "learning_rate=0.01",
    "clip_norm=0.5",
    "loss=in-batch",
    f"model.name={name}",
    f"shard_items={str(is_sharded).lower()}",
    *overrides,
)
split = leave_one_out(random_histories(0, n_users=80))
with torch.device("meta" if is_sharded else "cpu"):
    model = LEARNED[name](split.n_items, config.model)
with joined() as ranks:
    with TrainingDisplay(run, quiet(), is_shown=ranks.is_first) as display:
        progress = train(
            model,
            split,
            config,
            run,
            display,
            identity={},
            hardware=CPU,
            resume=True,
            ranks=ranks,
            shards=deal(3, ranks.n, ranks.rank),
        )
    if ranks.is_first:
        weights = {n: t.double().abs().sum().item() for n, t in model.state().items()}
        sys.stdout.write(json.dumps({"curve": progress.history, "weights": weights}))
