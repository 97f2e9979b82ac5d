"""Where the time of our training steps goes, by torch operation, on one thread.

python benchmarks/speed/step_profile.py [--shape ml-1m]
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, sequence_file
from torch.profiler import ProfilerActivity, profile

sys.path.append(str(Path(__file__).parent / "tools"))
from measure import Sequences
from ours import cloze_config, split_of

from bert4rec.cpu_tuning import keep_freed_memory
from bert4rec.threads import WorkerThreads
from bert4rec.training.gradients import Gradients
from bert4rec.training.optimizer import Optimizer
from bert4rec.training.setup import build_model, build_stages

STEPS = 4


class ThisThread:
    """One worker that computes here: the profiler sees only the thread that starts it."""

    n = 1

    def map(self, function: Callable[[Any], Any], given: Iterable[Any]) -> list[Any]:
        return [function(each) for each in given]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="ml-1m")
    shape = parser.parse_args().shape
    torch.set_num_threads(1)
    keep_freed_memory()  # as `bert4rec train` does
    split, about = split_of(Sequences(sequence_file(shape))), SHAPES[shape]
    config = cloze_config(
        split.n_items,
        f"model.max_len={about.max_len}",
        f"stages.0.mask_ratio={about.mask_ratio}",
        "training.batch_size=256",
    )
    model, loss = build_model(config, split.n_items, 0).train(), config.loss.build(split.train_counts)
    gradients = Gradients(model, loss, ThisThread())
    optimizer = Optimizer(model, config.training.weight_decay)
    with WorkerThreads(1) as batch_thread:
        batches = build_stages(config, split, 1)[0].batches.epoch(0, 0, batch_thread)
        first, *rest = islice(batches, STEPS + 1)
    gradients.add(first, 0)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for batch in rest:
            gradients.add(batch, 0)
            optimizer.step(1e-3)
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    print(f"{shape}: {total / 1e3 / STEPS:.0f} ms per step of 256 on one thread")
    for event in events[:16]:
        print(f"  {event.self_cpu_time_total / total:6.1%}  {event.key}  ({event.count} calls)")


if __name__ == "__main__":
    main()
