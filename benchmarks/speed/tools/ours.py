"""bert4rec itself, through the same parts that `bert4rec train` and `Recommender` use."""

from collections.abc import Iterator
from itertools import count

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
from bert4rec.config import RunConfig, load_config, resolve
from bert4rec.cpu_tuning import keep_freed_memory
from bert4rec.data.sequences import Vocabulary
from bert4rec.data.splits import HeldOut, Spans, Split
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.recommender import Recommender
from bert4rec.threads import WorkerThreads
from bert4rec.training.gradients import Gradients
from bert4rec.training.optimizer import Optimizer
from bert4rec.training.setup import build_model, build_stages

USERS_AT_ONCE = 1024


def cloze_config(n_items: int, *changes: str) -> RunConfig:
    """Cloze training on the last items of each history only, as the peers do."""
    alike = ("stages.0.window_stride=none", "stages.0.last_item_share=0")
    return resolve(load_config("bert4rec-2-stage", None, [*alike, *changes]), n_items)


def split_of(sequences: Sequences) -> Split:
    """Leave one out; the validation items stand in for the test items, which nobody reads."""
    starts, ends = sequences.offsets[:-1], sequences.offsets[1:] - 2
    train = Spans(sequences.tokens, starts, ends, np.arange(sequences.n_users))
    held_out = HeldOut(train, sequences.tokens[ends].astype(np.int64))
    counts = np.bincount(sequences.tokens, minlength=sequences.n_items)
    return Split(train, held_out, held_out, sequences.n_items, counts)


def histories_of(sequences: Sequences) -> Spans:
    """All but the last item of each user."""
    starts, ends = sequences.offsets[:-1], sequences.offsets[1:] - 1
    return Spans(sequences.tokens, starts, ends, np.arange(sequences.n_users))


def training_steps(sequences: Sequences, config: RunConfig) -> Iterator[int]:
    keep_freed_memory()  # as `bert4rec train` does
    split = split_of(sequences)
    model, loss = build_model(config, split.n_items, 0).train(), config.loss.build(split.train_counts)
    with WorkerThreads() as workers, WorkerThreads(1) as batch_thread:
        stage = build_stages(config, split, workers.n)[0]
        gradients = Gradients(model, loss, workers)
        optimizer = Optimizer(model, config.training.weight_decay)
        step = 0
        for epoch in count():
            for batch in stage.batches.epoch(epoch, 0, batch_thread):
                gradients.add(batch, stage.batches.seed_of(step))
                optimizer.step(stage.settings.learning_rate)
                step += 1
                yield batch.n_sequences


def recommender_of(sequences: Sequences, config: RunConfig) -> Recommender:
    ids = [f"item-{token}" for token in range(sequences.n_items)]
    counts = np.bincount(sequences.tokens, minlength=sequences.n_items)
    model = BERT4Rec(sequences.n_items, config.model).eval()
    return Recommender(model, Vocabulary(ids, counts), config, {})


def scoring_steps(sequences: Sequences, config: RunConfig) -> Iterator[int]:
    keep_freed_memory()  # as `bert4rec recommend --users` does
    recommender = recommender_of(sequences, config)
    histories = histories_of(sequences).take(users_in_random_order(sequences.n_users))
    while True:
        for first in range(0, len(histories), USERS_AT_ONCE):
            rows = np.arange(first, min(first + USERS_AT_ONCE, len(histories)))
            for ranking in recommender.top_k(histories.take(rows), TOP):
                yield len(ranking.items)


def milliseconds_for_one(sequences: Sequences, config: RunConfig) -> float:
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
    config = cloze_config(
        sequences.n_items,
        f"model.max_len={arguments.max_len}",
        f"model.dim={arguments.dim}",
        f"model.layers={arguments.layers}",
        f"model.heads={arguments.heads}",
        f"model.dropout={arguments.dropout}",
        f"stages.0.mask_ratio={arguments.mask_ratio}",
        f"training.batch_size={arguments.batch}",
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
