"""Does memory stay flat over a training whose batches have many shapes?

    python benchmarks/training_memory.py [--onednn]

trains on generated histories of ML-1M's lengths and prints speed and resident memory per epoch;
with --onednn oneDNN's cache of kernels stays on, which `bert4rec.cpu_tuning` turns off.
"""

import argparse
import contextlib
import time

import numpy as np

from bert4rec.config import load_config, resolve
from bert4rec.data.splits import HeldOut, Spans, Split
from bert4rec.threads import WorkerThreads
from bert4rec.training.gradients import CPU, Gradients
from bert4rec.training.hardware import Hardware
from bert4rec.training.optimizer import Optimizer
from bert4rec.training.setup import build_model, build_stages

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
    held_out = HeldOut(train, tokens[ends - 1].astype(np.int64))  # not read
    split = Split(train, held_out, held_out, N_ITEMS, np.bincount(tokens, minlength=N_ITEMS))
    changes = ["model.max_len=200", "training.batch_size=128"]
    config = resolve(load_config("bert4rec-2-stage", None, changes), N_ITEMS)
    model, loss = build_model(config, N_ITEMS, 0).train(), config.loss.build(split.train_counts)
    hardware = WithOneDNN(CPU.device, uses_bf16=False) if arguments.onednn else CPU
    with WorkerThreads() as workers, WorkerThreads(1) as batch_thread:
        gradients = Gradients(model, loss, workers, hardware)
        optimizer = Optimizer(model, config.training.weight_decay)
        stage = build_stages(config, split, workers.n)[0]
        for epoch in range(arguments.epochs):
            started = time.perf_counter()
            for number, batch in enumerate(stage.batches.epoch(epoch, 0, batch_thread)):
                gradients.add(batch, number)
                optimizer.step(stage.settings.learning_rate)
            rate = N_USERS / (time.perf_counter() - started)
            print(f"epoch {epoch + 1}: {rate:,.0f} sequences/s, {resident_mb():,.0f} MB resident")


def resident_mb() -> float:
    with open("/proc/self/status") as file:  # noqa: PTH123
        line = next(line for line in file if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
