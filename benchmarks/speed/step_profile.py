"""Where the time of our training steps goes, by torch operation, on one thread.

python benchmarks/speed/step_profile.py [--shape ml-1m]
"""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from shapes import REPOSITORY, SHAPES, write
from tools.measure import Sequences
from torch.profiler import ProfilerActivity, profile

from bert4rec.allocator import keep_freed_memory
from bert4rec.config import load_config
from bert4rec.data.splits import Spans
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.training.batches import cloze_task, epoch_order, make_batch
from bert4rec.training.gradients import Gradients
from bert4rec.training.losses import make_loss
from bert4rec.training.optimizer import Optimizer

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
    file = REPOSITORY / ".bench" / f"{shape}.npz"
    file.parent.mkdir(exist_ok=True)
    write(shape, file)
    sequences, about = Sequences(file), SHAPES[shape]
    sizes = [f"max_len={about.max_len}", f"mask_ratio={about.mask_ratio}", "batch_size=256"]
    config = load_config(
        "bert4rec-2-stage", overrides=[*sizes, "window_step=none", "last_item_share=0"]
    )
    model = BERT4Rec(sequences.n_items, config.model).train()
    loss = make_loss(config.training, np.ones(sequences.n_items, dtype=np.int64))
    gradients = Gradients(model, loss, ThisThread())
    optimizer = Optimizer(model, config.training, is_sparse=loss.is_sparse)
    starts, ends = sequences.offsets[:-1], sequences.offsets[1:] - 2
    train = Spans(sequences.tokens, starts, ends, np.arange(sequences.n_users))
    task = cloze_task(train, sequences.n_items, config)
    generator = np.random.default_rng(0)
    windows = task.windows(generator)
    order = epoch_order(len(windows), config.training.batch_size, generator)[: STEPS + 1]
    masks = torch.Generator().manual_seed(0)
    first, *rest = (make_batch(task, windows, rows, sequences.n_items, masks) for rows in order)
    gradients.add(first, 0)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for batch in rest:
            gradients.add(batch, 0)
            optimizer.step(1e-3)
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    print(f"{shape}: {total / 1e3 / STEPS:.0f} ms a step of 256 on one thread")
    for event in events[:16]:
        print(f"  {event.self_cpu_time_total / total:6.1%}  {event.key}  ({event.count} calls)")


if __name__ == "__main__":
    main()
