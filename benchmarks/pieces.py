"""Which sizes of pieces are fastest: the measurement behind `bert4rec.data.pieces`.

    python benchmarks/pieces.py [--tasks train score] [--shapes ml-1m beauty] [--seconds 14]

For sizes (positions, padding) around FOR_TRAINING and FOR_SCORING, on the lengths of the two shapes
of the speed comparison: the share of padding, pieces a batch, and sequences or users a second. All
sizes take turns on the same batch in one process. The last column is the median over the batches
of the speed in comparison with the size in use (*), which a slow moment of the machine changes
little: trust it more than the speeds.
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

sys.path.append(str(Path(__file__).parent / "speed"))

from shapes import REPOSITORY, SHAPES, Shape, write
from tools.measure import TOP, Sequences, users_in_random_order

from bert4rec import ranking
from bert4rec.config import load_config
from bert4rec.data.pieces import FOR_SCORING, FOR_TRAINING, Size, like_lengths
from bert4rec.data.splits import Spans
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.threads import WorkerThreads
from bert4rec.training import batches
from bert4rec.training.gradients import Gradients
from bert4rec.training.losses import make_loss
from bert4rec.training.optimizer import Optimizer

BATCH, USERS_AT_ONCE = 256, 1024
FACTORS = (0.5, 1, 2, 4)
ONLY_PADDING = (0.3, 3)
# What a size did with one batch: rows, real positions, all positions, pieces.
Done = tuple[int, int, int, int]
Step = Callable[[Size, NDArray[np.int64], int], Done]


def sizes_around(size: Size) -> list[Size]:
    both = [Size(int(size.positions * f), int(size.padding * f)) for f in FACTORS]
    return both + [Size(size.positions, int(size.padding * f)) for f in ONLY_PADDING]


def spans(sequences: Sequences, n_left_out: int) -> Spans:
    starts, ends = sequences.offsets[:-1], sequences.offsets[1:] - n_left_out
    return Spans(sequences.tokens, starts, ends, np.arange(sequences.n_users))


def settings(shape: Shape) -> list[str]:
    words = f"max_len={shape.max_len} mask_ratio={shape.mask_ratio} batch_size={BATCH}"
    return f"{words} window_step=none last_item_share=0".split()


def training_step(sequences: Sequences, shape: Shape, workers: WorkerThreads) -> Step:
    config = load_config("bert4rec-2-stage", overrides=settings(shape))
    train = spans(sequences, 2)
    model = BERT4Rec(shape.n_items, config.model).train()
    loss = make_loss(config.training, np.bincount(train.tokens, minlength=shape.n_items))
    gradients = Gradients(model, loss, workers)
    optimizer = Optimizer(model, config.training, is_sparse=loss.is_sparse)
    task = batches.cloze_task(train, shape.n_items, config)
    windows = task.windows(np.random.default_rng(0))

    def step(size: Size, rows: NDArray[np.int64], number: int) -> Done:
        masks = torch.Generator().manual_seed(number)
        batch = batches.make_batch(task, windows, rows, shape.n_items, masks, size)
        gradients.add(batch, seed=number)
        optimizer.step(config.training.learning_rate)
        n_all = sum(piece.tokens.numel() for piece in batch.pieces)
        return len(rows), int(windows.lengths[rows].sum()), n_all, len(batch.pieces)

    return step


def scoring_step(sequences: Sequences, shape: Shape, workers: WorkerThreads) -> Step:
    model = BERT4Rec(shape.n_items, load_config(overrides=settings(shape)).model).eval()
    histories = spans(sequences, 1)
    most_rows = ranking.SCORES_BYTES // (4 * shape.n_items)

    def step(size: Size, rows: NDArray[np.int64], number: int) -> Done:
        ranking.FOR_SCORING = size
        for _ in ranking.rank_histories(model, model, histories.take(rows), TOP, workers=workers):
            pass
        lengths = -np.sort(-histories.lengths[rows])
        read = np.minimum(lengths, shape.max_len - 1) + 1  # with [MASK]
        pieces = like_lengths(lengths, size, most_rows)
        n_all = sum(len(read[piece]) * int(read[piece.start]) for piece in pieces)
        return len(rows), int(read.sum()), n_all, len(pieces)

    return step


def rows_of(n_users: int, n: int) -> Iterator[NDArray[np.int64]]:
    order = users_in_random_order(n_users)
    while True:
        yield from (order[i : i + n] for i in range(0, n_users - n + 1, n))


def compare(step: Step, sizes: list[Size], n_users: int, n: int, seconds: float) -> None:
    """All sizes on the same rows, batch after batch; the first to go changes each time."""
    times: dict[Size, list[float]] = {size: [] for size in sizes}
    done: dict[Size, list[Done]] = {size: [] for size in sizes}
    started = time.perf_counter()
    for number, rows in enumerate(rows_of(n_users, n)):
        first = number % len(sizes)
        for size in sizes[first:] + sizes[:first]:
            before = time.perf_counter()
            answer = step(size, rows, number)
            if number:  # the first batch is the warm-up
                times[size].append(time.perf_counter() - before)
                done[size].append(answer)
        if number > 2 and time.perf_counter() - started > seconds:
            break
    in_use = sizes[FACTORS.index(1)]
    for size in sorted(sizes):
        n_rows, n_real, n_all, n_pieces = np.sum(done[size], axis=0)
        ratio = median(used / own for used, own in zip(times[in_use], times[size], strict=True))
        n = len(done[size])
        speed = n_rows / n / median(times[size])
        padded, pieces = 1 - n_real / n_all, n_pieces / n
        print(
            f"  {size.positions:>9,}{size.padding:>9,}{padded:>9.1%}{pieces:>9.1f}{speed:>11,.0f}"
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
            file = REPOSITORY / ".bench" / f"{name}.npz"
            if not file.is_file():
                write(name, file)
            sequences = Sequences(file)
            print(f"{task}, {name}, batches of {n:,}")
            print("  positions  padding   padded   pieces   a second    ratio")
            with WorkerThreads() as workers:
                step = make(sequences, SHAPES[name], workers)
                compare(step, sizes_around(size), sequences.n_users, n, arguments.seconds)


TASKS = {
    "train": (training_step, FOR_TRAINING, BATCH),
    "score": (scoring_step, FOR_SCORING, USERS_AT_ONCE),
}

if __name__ == "__main__":
    main()
