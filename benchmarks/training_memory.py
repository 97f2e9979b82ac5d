"""Does memory stay flat over a training whose batches have many shapes?

    python benchmarks/training_memory.py [--onednn]

trains on generated histories of ML-1M's lengths and prints speed and resident memory an epoch; with
--onednn it leaves oneDNN's cache of kernels on, which is why `models/onednn.py` turns it off.
"""

import argparse
import contextlib
import time

import numpy as np
import torch

from bert4rec.config import load_config
from bert4rec.data.splits import Spans
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.threads import WorkerThreads
from bert4rec.training.batches import cloze_task, epoch_order, make_batch
from bert4rec.training.gradients import CPU, Gradients
from bert4rec.training.hardware import Hardware
from bert4rec.training.losses import make_loss
from bert4rec.training.optimizer import Optimizer

N_USERS, N_ITEMS = 6040, 3416


class WithOneDNN(Hardware):
    def computing(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--onednn", action="store_true", help="leave oneDNN on")
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(4.6, 0.95, N_USERS), 18, 2000).astype(np.int64)
    ends = np.cumsum(lengths)
    tokens = generator.integers(0, N_ITEMS, ends[-1], dtype=np.int32)
    train = Spans(tokens, ends - lengths, ends, np.arange(N_USERS))
    config = load_config("bert4rec-2-stage", overrides=["max_len=200", "batch_size=128"])
    model = BERT4Rec(N_ITEMS, config.model).train()
    loss = make_loss(config.training, np.bincount(tokens, minlength=N_ITEMS))
    task = cloze_task(train, N_ITEMS, config)
    hardware = WithOneDNN(CPU.device, uses_bf16=False) if arguments.onednn else CPU
    with WorkerThreads() as workers:
        gradients = Gradients(model, loss, workers, hardware)
        optimizer = Optimizer(model, config.training, is_sparse=loss.is_sparse)
        for epoch in range(arguments.epochs):
            started = time.perf_counter()
            windows = task.windows(generator)
            order = epoch_order(len(windows), config.training.batch_size, generator)
            for step, rows in enumerate(order):
                masks = torch.Generator().manual_seed(step)
                gradients.add(make_batch(task, windows, rows, N_ITEMS, masks), step)
                optimizer.step(config.training.learning_rate)
            rate = N_USERS / (time.perf_counter() - started)
            print(f"epoch {epoch + 1}: {rate:,.0f} sequences/s, {resident_mb():,.0f} MB resident")


def resident_mb() -> float:
    with open("/proc/self/status") as file:  # noqa: PTH123
        line = next(line for line in file if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
