"""Trains a toy from a given checkpoint and prints its curve; started alone or by torchrun."""

import json
import os
import sys
from pathlib import Path

import torch
from toys import quiet, random_histories, small_config

from bert4rec import losses
from bert4rec.data.splits import leave_one_out
from bert4rec.distributed.launch import joined
from bert4rec.pipeline import RunOptions, train
from bert4rec.training import optimizer
from bert4rec.training.checkpoint import RunDirectory
from bert4rec.training.run_log import RunLog

run, recipe, overrides = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
torch.set_num_threads(1)
losses.SPARSE_FROM = 1  # rows that a step leaves alone stay as they are, as in a large catalogue
optimizer.CLIP_NORM = 0.5  # reached here, so that the length of a sharded gradient matters
config = small_config(*overrides, recipe=recipe)
split = leave_one_out(random_histories(0, n_users=80))
directory = RunDirectory(run, {"shards": 3})  # not the same number for each process
with joined() as group:
    with RunLog(run, quiet(), is_shown=group.is_first) as log:
        options = RunOptions(resume=True)
        model, progress = train(config, split, 80, directory, log, options, group)
    if group.is_first:
        weights = {n: t.double().abs().sum().item() for n, t in model.state().items()}
        sys.stdout.write(json.dumps({"curve": progress.events, "weights": weights}))
    group.barrier()
# As in `run_as_rank`: threads of torch's connections can abort a process while Python ends.
sys.stdout.flush()
os._exit(0)
