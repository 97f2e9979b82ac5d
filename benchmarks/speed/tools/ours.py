"""bert4rec itself, through the same parts that `bert4rec train` and `Recommender` use."""

from collections.abc import Iterator

import numpy as np
import torch
from measure import (
    N_HISTORIES,
    TOP,
    Sequences,
    Stopwatch,
    median_milliseconds,
    parse_arguments,
    report,
    users_in_random_order,
)

from bert4rec import __version__
from bert4rec.allocator import keep_freed_memory
from bert4rec.config import Config, load_config
from bert4rec.data.sequences import Vocabulary
from bert4rec.data.splits import Spans
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.threads import WorkerThreads
from bert4rec.recommender import Recommender
from bert4rec.training.batches import Batch, cloze_task, epoch_order, make_batch
from bert4rec.training.gradients import Gradients
from bert4rec.training.losses import make_loss
from bert4rec.training.optimizer import Optimizer

USERS_AT_ONCE = 1024


def spans(sequences: Sequences, n_left_out: int) -> Spans:
    starts, ends = sequences.offsets[:-1], sequences.offsets[1:] - n_left_out
    return Spans(sequences.tokens, starts, ends, np.arange(sequences.n_users))


def training_steps(sequences: Sequences, config: Config) -> Iterator[int]:
    keep_freed_memory()  # as `bert4rec train` does
    train = spans(sequences, 2)
    model = BERT4Rec(sequences.n_items, config.model).train()
    counts = np.bincount(train.tokens, minlength=sequences.n_items)
    loss = make_loss(config.training, counts)
    task = cloze_task(train, sequences.n_items, config)
    generator = np.random.default_rng(0)

    def batches() -> Iterator[tuple[int, Spans, np.ndarray]]:
        step = 0
        while True:
            windows = task.windows(generator)
            for rows in epoch_order(len(windows), config.training.batch_size, generator):
                yield step, windows, rows
                step += 1

    def make(given: tuple[int, Spans, np.ndarray]) -> Batch:
        step, windows, rows = given
        masks = torch.Generator().manual_seed(step)
        return make_batch(task, windows, rows, sequences.n_items, masks)

    with WorkerThreads() as workers, WorkerThreads(1) as preparer:
        gradients = Gradients(model, loss, workers)
        optimizer = Optimizer(model, config.training, is_sparse=loss.is_sparse)
        for step, batch in enumerate(preparer.stream(make, batches(), ahead=2)):
            gradients.add(batch, seed=step)
            optimizer.step(config.training.learning_rate)
            yield batch.n_sequences


def recommender_of(sequences: Sequences, config: Config) -> Recommender:
    ids = [f"item-{token}" for token in range(sequences.n_items)]
    counts = np.bincount(sequences.tokens, minlength=sequences.n_items)
    model = BERT4Rec(sequences.n_items, config.model).eval()
    return Recommender(model, Vocabulary(ids, counts), config, {})


def scoring_steps(sequences: Sequences, config: Config) -> Iterator[int]:
    keep_freed_memory()  # as `bert4rec recommend --users` does
    recommender = recommender_of(sequences, config)
    histories = spans(sequences, 1).take(users_in_random_order(sequences.n_users))
    while True:
        for first in range(0, len(histories), USERS_AT_ONCE):
            rows = np.arange(first, min(first + USERS_AT_ONCE, len(histories)))
            for ranking in recommender.rank(histories.take(rows), TOP):
                yield len(ranking.items)


def milliseconds_for_one(sequences: Sequences, config: Config) -> float:
    """From raw ids to raw ids, titles and probabilities, by the public `recommend`."""
    recommender = recommender_of(sequences, config)
    users = users_in_random_order(sequences.n_users)[:N_HISTORIES]
    all_histories = sequences.histories()
    raw = [[f"item-{token}" for token in all_histories[user].tolist()] for user in users]
    return median_milliseconds(lambda i: recommender.recommend(raw[i % len(raw)], TOP))


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    sequences = Sequences(arguments.sequences)
    config = load_config(
        "bert4rec-2-stage",
        overrides=[
            f"max_len={arguments.max_len}",
            f"mask_ratio={arguments.mask_ratio}",
            f"batch_size={arguments.batch}",
            f"dim={arguments.dim}",
            f"layers={arguments.layers}",
            f"heads={arguments.heads}",
            f"dropout={arguments.dropout}",
            "window_step=none",  # the last items only, as the peers do
            "last_item_share=0",
        ],
    )
    version, of_torch = __version__, torch.__version__
    if arguments.task == "one":
        p50 = milliseconds_for_one(sequences, config)
        note = "recommend(): from raw ids to raw ids with probabilities"
        report("ours", version, of_torch, arguments, p50_ms=p50, note=note)
    stopwatch = Stopwatch(arguments.seconds)
    steps = training_steps if arguments.task == "train" else scoring_steps
    stopwatch.time(steps(sequences, config))
    report("ours", version, of_torch, arguments, stopwatch=stopwatch)


if __name__ == "__main__":
    main()
