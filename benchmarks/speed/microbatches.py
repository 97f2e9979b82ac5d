"""Which sizes of microbatches are fastest: the measurement behind `bert4rec.data.splits`.

    python benchmarks/speed/microbatches.py [--tasks train score] [--shapes ml-1m] [--seconds 14]

For sizes (positions, padding) around FOR_TRAINING and FOR_SCORING, on the lengths of the two shapes
of the speed comparison: the share of padding, microbatches per batch, and sequences or users per
second. All sizes take turns on the same batch in one process. The last column is the median over
the batches of the speed in comparison with the size in use (*), which a slow moment of the machine
changes little: trust it more than the speeds.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from shapes import SHAPES, Shape, sequence_file

sys.path.append(str(Path(__file__).parent / "tools"))
from measure import TOP, Sequences, users_in_random_order
from ours import USERS_AT_ONCE, cloze_config, histories_of, split_of

from bert4rec import scoring
from bert4rec.data.splits import FOR_SCORING, FOR_TRAINING, MicrobatchSize
from bert4rec.threads import WorkerThreads
from bert4rec.training.batches import Sizes, make_batch
from bert4rec.training.gradients import Gradients
from bert4rec.training.optimizer import Optimizer
from bert4rec.training.setup import build_model, build_stages

BATCH = 256
FACTORS = (0.5, 1, 2, 4)
ONLY_PADDING = (0.3, 3)
# What was computed for one batch: rows, real positions, all positions, microbatches.
Done = tuple[int, int, int, int]
Step = Callable[[MicrobatchSize, NDArray[np.int64], int], Done]


def sizes_around(size: MicrobatchSize) -> list[MicrobatchSize]:
    both = [MicrobatchSize(int(size.positions * f), int(size.padding * f)) for f in FACTORS]
    only_padding = [MicrobatchSize(size.positions, int(size.padding * f)) for f in ONLY_PADDING]
    return both + only_padding


def settings(shape: Shape) -> list[str]:
    words = f"model.max_len={shape.max_len} stages.0.mask_ratio={shape.mask_ratio}"
    return f"{words} training.batch_size={BATCH}".split()


def training_step(sequences: Sequences, shape: Shape, workers: WorkerThreads) -> Step:
    config, split = cloze_config(shape.n_items, *settings(shape)), split_of(sequences)
    model, loss = build_model(config, shape.n_items, 0).train(), config.loss.build(split.train_counts)
    gradients = Gradients(model, loss, workers)
    optimizer = Optimizer(model, config.training.weight_decay)
    stage = build_stages(config, split, workers.n)[0]
    objective = stage.batches.objectives[0]
    windows = objective.draw_sequences(np.random.default_rng(0))

    def step(size: MicrobatchSize, rows: NDArray[np.int64], number: int) -> Done:
        masks = torch.Generator().manual_seed(number)
        some = windows.take(rows)
        batch = make_batch(objective, some, shape.n_items, masks, Sizes(size))
        gradients.add(batch, seed=number)
        optimizer.step(stage.settings.learning_rate)
        n_all = sum(each.tokens.numel() for each in batch.microbatches)
        return len(rows), int(some.lengths.sum()), n_all, len(batch.microbatches)

    return step


def scoring_step(sequences: Sequences, shape: Shape, workers: WorkerThreads) -> Step:
    config = cloze_config(shape.n_items, *settings(shape))
    model, histories = build_model(config, shape.n_items, 0).eval(), histories_of(sequences)

    def step(size: MicrobatchSize, rows: NDArray[np.int64], number: int) -> Done:
        scoring.FOR_SCORING = size  # type: ignore[misc]
        some = histories.take(rows)
        for _ in scoring.rank_histories(model, model, some, TOP, n_workers=workers.n):
            pass
        read = np.minimum(some.lengths, shape.max_len - 1)
        groups = scoring.group_histories(read, scoring.most_rows(model))
        n_all = sum(len(group) * (int(read[group].max()) + 1) for group in groups)  # with [MASK]
        return len(rows), int((read + 1).sum()), n_all, len(groups)

    return step


def rows_of(n_users: int, n: int) -> Iterator[NDArray[np.int64]]:
    order = users_in_random_order(n_users)
    while True:
        yield from (order[i : i + n] for i in range(0, n_users - n + 1, n))


def compare(step: Step, sizes: list[MicrobatchSize], n_users: int, n: int, seconds: float) -> None:
    """All sizes on the same rows, batch after batch; the first to go changes each time."""
    times: dict[MicrobatchSize, list[float]] = {size: [] for size in sizes}
    done: dict[MicrobatchSize, list[Done]] = {size: [] for size in sizes}
    started = time.perf_counter()
    for number, rows in enumerate(rows_of(n_users, n)):
        first = number % len(sizes)
        for size in sizes[first:] + sizes[:first]:
            before = time.perf_counter()
            result = step(size, rows, number)
            if number:  # the first batch is the warm-up
                times[size].append(time.perf_counter() - before)
                done[size].append(result)
        if number > 2 and time.perf_counter() - started > seconds:
            break
    in_use = sizes[FACTORS.index(1)]
    for size in sorted(sizes):
        n_rows, n_real, n_all, n_groups = np.sum(done[size], axis=0)
        ratio = median(used / own for used, own in zip(times[in_use], times[size], strict=True))
        n = len(done[size])
        speed = n_rows / n / median(times[size])
        padded, groups = 1 - n_real / n_all, n_groups / n
        print(
            f"  {size.positions:>9,}{size.padding:>9,}{padded:>9.1%}{groups:>9.1f}{speed:>11,.0f}"
            f"{ratio:>9.3f}{'*' if size == in_use else ''}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seconds", type=float, default=14, help="of each task and shape")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for task in arguments.tasks:
        make, size, n = TASKS[task]
        for name in arguments.shapes:
            sequences = Sequences(sequence_file(name))
            print(f"{task}, {name}, batches of {n:,}")
            print("  positions  padding   padded   groups per second    ratio")
            with WorkerThreads() as workers:
                step = make(sequences, SHAPES[name], workers)
                compare(step, sizes_around(size), sequences.n_users, n, arguments.seconds)


TASKS = {"train": (training_step, FOR_TRAINING, BATCH), "score": (scoring_step, FOR_SCORING, USERS_AT_ONCE)}

if __name__ == "__main__":
    main()
