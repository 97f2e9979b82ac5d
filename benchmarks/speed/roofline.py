"""What this machine could do at best: its arithmetic, its memory, and the work of one sequence.

    python benchmarks/speed/roofline.py

Measures fp32 matrix products at shapes of the model, split by torch over all cores and as workers
with a core each, and copies of memory. Then counts the floating-point operations of the products a
sequence needs, (plain) padded to the full length with logits of all items at all positions, as in
`tools/peer_plain.py`, and (ours) as bert4rec does it, counted on the microbatches that it really
makes. The highest rate of the workers over our operations is a bound that only products could
reach: softmax, dropout, norms, the optimizer and reading memory come on top. The last line is JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from shapes import SHAPES, Shape, sequence_file

sys.path.append(str(Path(__file__).parent / "tools"))
from measure import Sequences, users_in_random_order
from ours import USERS_AT_ONCE, cloze_config, histories_of, split_of

from bert4rec.cpu_tuning import without_onednn
from bert4rec.scoring import ROWS_OF_BLOCKS, SCORES_BYTES, group_histories
from bert4rec.threads import WorkerThreads
from bert4rec.training.setup import build_stages

DIM, LAYERS, HEADS, BATCH = 64, 2, 2, 256
PRODUCTS = {  # rows, inner, columns
    "feed-forward 2048x64x256": (2048, 64, 256),
    "loss 512x64x1024": (512, 64, 1024),
    "square 1024x1024x1024": (1024, 1024, 1024),
}
COPIED = 256 * 2**20
ROUNDS, SECONDS = 12, 0.06  # the best round counts: a neighbour can only slow one down
BATCHES = 24
# Of the forward pass: a backward one has two products for each, and attention computes its own
# probabilities again.
TRAINING_LINEAR, TRAINING_ATTENTION, TRAINING_LOSS = 3, 3.5, 3
Parts = dict[str, float]  # floating-point operations of: linear layers, attention, items


def seconds_of(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure_products() -> dict[str, dict[str, float]]:
    """Gflop/s: the best rounds of one product on all cores, and of one per worker at a time."""
    best: dict[str, dict[str, float]] = {name: {} for name in PRODUCTS}
    with WorkerThreads() as workers, without_onednn():
        for _ in range(ROUNDS):
            for name, (rows, inner, columns) in PRODUCTS.items():
                operations = 2 * rows * inner * columns
                repeats = max(1, int(SECONDS * 60e9 / operations))
                given = [(torch.randn(rows, inner), torch.randn(inner, columns), repeats) for _ in range(workers.n)]
                multiply(given[0])
                split = operations * repeats / seconds_of(lambda given=given: multiply(given[0]))
                workers.map(multiply, given)
                seconds = seconds_of(lambda given=given: workers.map(multiply, given))
                together = workers.n * operations * repeats / seconds
                for way, rate in (("one_process", split), ("workers", together)):
                    best[name][way] = max(best[name].get(way, 0), round(rate / 1e9, 1))
    return best


def multiply(given: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    left, right, repeats = given
    out = torch.empty(len(left), right.shape[1])
    for _ in range(repeats):
        torch.mm(left, right, out=out)


def measure_copies() -> dict[str, float]:
    """GB/s read plus written, by number of threads."""
    source, target = torch.ones(COPIED // 4), torch.zeros(COPIED // 4)
    n_cores = torch.get_num_threads()
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        for threads in sorted({1, n_cores}):
            torch.set_num_threads(threads)
            rate = 2 * COPIED / seconds_of(lambda: target.copy_(source)) / 1e9
            key = f"threads_{threads}"
            best[key] = max(best.get(key, 0), round(rate, 1))
    torch.set_num_threads(n_cores)
    return best


def parts(linear: float, attention: float, items: float, n: int) -> Parts:
    """Mflop per sequence."""
    return {"linear": linear / n / 1e6, "attention": attention / n / 1e6, "items": items / n / 1e6}


def plain(shape: Shape, *, training: bool) -> Parts:
    n = shape.max_len
    linear, attention = LAYERS * 24 * DIM**2 * n, LAYERS * 4 * DIM * n**2
    items = 2 * DIM * shape.n_items * n
    if not training:
        return parts(linear, attention, items, 1)
    return parts(TRAINING_LINEAR * linear, TRAINING_ATTENTION * attention, TRAINING_LOSS * items, 1)


def ours_training(sequences: Sequences, shape: Shape) -> Parts:
    settings = f"model.max_len={shape.max_len} stages.0.mask_ratio={shape.mask_ratio}"
    batch_size = f"training.batch_size={BATCH}"
    config = cloze_config(sequences.n_items, *settings.split(), batch_size)
    stage = build_stages(config, split_of(sequences), 1)[0]
    linear = attention = items = n_sequences = 0
    with WorkerThreads(1) as batch_thread:
        for batch in islice(stage.batches.epoch(0, 0, batch_thread), BATCHES):
            n_sequences += batch.n_sequences
            for each in batch.microbatches:
                (n_rows, length), n = each.tokens.shape, each.tokens.numel()
                n_queries = len(each.positions)
                most_queries = int(torch.bincount(each.positions // length).max())
                # The last block: keys and values everywhere; query, output and feed-forward at
                # the query positions. Then the head.
                linear += (LAYERS - 1) * 24 * DIM**2 * n + 4 * DIM**2 * n
                linear += (20 + 2) * DIM**2 * n_queries
                attention += 4 * DIM * length * ((LAYERS - 1) * n + n_rows * most_queries)
                items += 2 * DIM * shape.n_items * n_queries
    costs = TRAINING_LINEAR * linear, TRAINING_ATTENTION * attention, TRAINING_LOSS * items
    return parts(*costs, n_sequences)


def ours_scoring(sequences: Sequences, shape: Shape) -> Parts:
    lengths = histories_of(sequences).lengths[users_in_random_order(sequences.n_users)]
    read = np.minimum(lengths, shape.max_len - 1)
    most_rows = max(ROWS_OF_BLOCKS, SCORES_BYTES // (4 * shape.n_items))
    linear = attention = 0
    for first in range(0, len(read), USERS_AT_ONCE):
        some = read[first : first + USERS_AT_ONCE]
        for rows in group_histories(some, most_rows):
            n_rows, length = len(rows), int(some[rows].max()) + 1  # and [MASK]
            n = n_rows * length
            # The last block has one query per row: no keys and values are computed for it.
            linear += (LAYERS - 1) * 24 * DIM**2 * n + (24 + 2) * DIM**2 * n_rows
            attention += 4 * DIM * length * ((LAYERS - 1) * n + HEADS * n_rows)
    return parts(linear, attention, 2 * DIM * shape.n_items * len(read), len(read))


def describe(name: str, task: str, padded: Parts, ours: Parts, gflops: float) -> dict[str, object]:
    """The answer for one task of one shape, which is printed too."""
    bound = gflops * 1e3 / sum(ours.values())
    for way, each in (("plain", padded), ("ours", ours)):
        split = ", ".join(f"{part} {value:,.1f}" for part, value in each.items())
        print(f"{name:<7}{task:<6}{way:<6}{sum(each.values()):>10,.1f} Mflop: {split}")
    print(f"{name:<7}{task:<6}bound {bound:>10,.0f} per second")
    return {
        "plain_mflop": round(sum(padded.values()), 2),
        "ours_mflop": round(sum(ours.values()), 2),
        "bound_per_second": round(bound, 1),
        "plain_parts": {part: round(value, 3) for part, value in padded.items()},
        "ours_parts": {part: round(value, 3) for part, value in ours.items()},
    }


def main() -> None:
    products, copies = measure_products(), measure_copies()
    for name, rates in products.items():
        print(f"{name}: " + ", ".join(f"{way} {rate:,.1f} Gflop/s" for way, rate in rates.items()))
    print("copy: " + ", ".join(f"{threads} {rate:,.1f} GB/s" for threads, rate in copies.items()))
    gflops = max(rates["workers"] for rates in products.values())
    work: dict[str, dict[str, object]] = {}
    for name, shape in SHAPES.items():
        sequences = Sequences(sequence_file(name))
        train, score = ours_training(sequences, shape), ours_scoring(sequences, shape)
        work[name] = {
            "train": describe(name, "train", plain(shape, training=True), train, gflops),
            "score": describe(name, "score", plain(shape, training=False), score, gflops),
        }
    result = {"gemm_gflops": products, "copy_gb_per_second": copies, "bound_gflops": gflops}
    print(json.dumps({**result, "work": work}))


if __name__ == "__main__":
    main()
