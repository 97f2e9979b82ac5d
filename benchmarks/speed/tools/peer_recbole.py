"""RecBole's BERT4Rec: its data set, data loader, Trainer and `full_sort_predict`.

Its own files hold one row a history (its documented way to bring sequences ready made), so that it
trains on the same sequences as the others; its usual preparation would make one row an interaction.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

# RecBole 1.2.1 sets and uses these names, which numpy 2 no longer has.
for _name, _type in (("float_", np.float64), ("complex_", np.complex128), ("unicode_", np.str_)):
    setattr(np, _name, _type)
np.float = np.float64  # noqa: NPY001

import recbole  # noqa: E402
import torch  # noqa: E402
from measure import (  # noqa: E402
    N_HISTORIES,
    THREADS,
    TOP,
    Sequences,
    Stopwatch,
    median_milliseconds,
    parse_arguments,
    report,
    users_in_random_order,
)
from recbole.config import Config  # noqa: E402
from recbole.data import create_dataset, data_preparation  # noqa: E402
from recbole.data.interaction import Interaction  # noqa: E402
from recbole.model.sequential_recommender import BERT4Rec  # noqa: E402
from recbole.trainer import Trainer  # noqa: E402


class Enough(Exception):
    """Raised out of the trainer when the clock has what it needs."""


def write_files(folder: Path, sequences: Sequences, max_len: int) -> None:
    """`item_id` of a row is the item after its history: RecBole's target, not in the row itself."""

    def write(part: str, histories: list[np.ndarray], targets: np.ndarray) -> None:
        rows = [
            f"{user}\t{' '.join(map(str, history[-max_len:]))}\t{target}\n"
            for user, (history, target) in enumerate(zip(histories, targets, strict=True))
        ]
        header = "user_id:token\titem_id_list:token_seq\titem_id:token\n"
        (folder / f"histories.{part}.inter").write_text(header + "".join(rows))

    ends = sequences.offsets[1:]
    write("train", sequences.train(), sequences.tokens[ends - 2])
    write("test", sequences.histories(), sequences.tokens[ends - 1])
    # Never used for validation: it makes RecBole's vocabulary hold every item.
    items = np.array_split(np.arange(sequences.n_items), -(-sequences.n_items // max_len))
    write("valid", items, np.zeros(len(items), dtype=int))


def prepare(arguments, sequences: Sequences):
    """Data loaders and an untrained model."""
    sys.argv = sys.argv[:1]  # Config reads the command line too
    os.chdir(tempfile.mkdtemp())  # Trainer writes logs where it is run
    folder = Path("histories")
    folder.mkdir()
    write_files(folder, sequences, arguments.max_len)
    settings = {
        "data_path": ".",
        "benchmark_filename": ["train", "valid", "test"],
        "load_col": {"inter": ["user_id", "item_id_list", "item_id"]},
        "alias_of_item_id": ["item_id_list"],
        "MAX_ITEM_LIST_LENGTH": arguments.max_len,
        "eval_args": {"order": "TO", "split": {"LS": "valid_and_test"}, "mode": "full"},
        "train_neg_sample_args": None,
        "loss_type": "CE",
        "mask_ratio": arguments.mask_ratio,
        "n_layers": arguments.layers,
        "n_heads": arguments.heads,
        "hidden_size": arguments.dim,
        "inner_size": 4 * arguments.dim,
        "hidden_dropout_prob": arguments.dropout,
        "attn_dropout_prob": arguments.dropout,
        "train_batch_size": arguments.batch,
        "eval_batch_size": arguments.batch,
        "epochs": 1000,
        "use_gpu": False,
        "show_progress": False,
        "state": "ERROR",
    }
    config = Config(model="BERT4Rec", dataset="histories", config_dict=settings)
    dataset = create_dataset(config)
    train_data, _, test_data = data_preparation(config, dataset)
    assert dataset.item_num == sequences.n_items + 1
    return config, train_data, test_data, BERT4Rec(config, train_data.dataset)


def train(arguments, sequences: Sequences) -> tuple[Stopwatch, str]:
    config, train_data, _, model = prepare(arguments, sequences)
    trainer = Trainer(config, model)
    stopwatch = Stopwatch(arguments.seconds)
    calculate_loss, rows = model.calculate_loss, 0

    def counting(interaction: Interaction) -> torch.Tensor:
        nonlocal rows
        rows = len(interaction)
        return calculate_loss(interaction)

    def step_done(*_) -> None:
        if stopwatch.step_done(rows):
            raise Enough

    model.calculate_loss = counting
    trainer.optimizer.register_step_post_hook(step_done)
    with contextlib.suppress(Enough):
        trainer.fit(train_data, verbose=False, saved=False)
    return stopwatch, "one row a history; 0 workers (default)"


class Scorer:
    """Top items for rows of the test data, as in its `full_sort_topk`.

    RecBole hides the history only for its other models, so seen items are hidden here the way
    its loader for those does it.
    """

    def __init__(self, arguments, sequences: Sequences) -> None:
        _, _, test_data, model = prepare(arguments, sequences)
        self.dataset, self.model = test_data.dataset, model.eval()
        ids = self.dataset.token2id("item_id", [str(i) for i in range(sequences.n_items)])
        self.seen = [torch.from_numpy(ids[history]) for history in sequences.histories()]

    @torch.inference_mode()
    def top(self, users: np.ndarray, rows: Interaction) -> torch.Tensor:
        scores = self.model.full_sort_predict(rows)
        scores[:, 0] = -torch.inf
        columns = [self.seen[user] for user in users]
        lengths = torch.tensor([len(column) for column in columns])
        lines = torch.arange(len(users)).repeat_interleave(lengths)
        scores[lines, torch.cat(columns)] = -torch.inf
        return scores.topk(TOP)


def score(arguments, sequences: Sequences) -> tuple[Stopwatch, str]:
    scorer = Scorer(arguments, sequences)
    order = users_in_random_order(sequences.n_users)

    def steps() -> Iterator[int]:
        for start in range(0, len(order), arguments.batch):
            users = order[start : start + arguments.batch]
            scorer.top(users, scorer.dataset[users])
            yield len(users)

    stopwatch = Stopwatch(arguments.seconds)
    stopwatch.time(steps())
    return stopwatch, "full_sort_predict without its masking transform; seen items hidden by us"


def one(arguments, sequences: Sequences) -> tuple[float, str]:
    scorer = Scorer(arguments, sequences)
    users = users_in_random_order(sequences.n_users)[:N_HISTORIES, None]
    pairs = [(user, scorer.dataset[user]) for user in users]
    p50 = median_milliseconds(lambda i: scorer.top(*pairs[i % N_HISTORIES]))
    return p50, "full_sort_predict of one row from tensors"


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(THREADS)
    sequences = Sequences(arguments.sequences)
    answer = {}
    if arguments.task == "one":
        answer["p50_ms"], answer["note"] = one(arguments, sequences)
    else:
        task = {"train": train, "score": score}[arguments.task]
        answer["stopwatch"], answer["note"] = task(arguments, sequences)
    report("recbole", recbole.__version__, torch.__version__, arguments, **answer)


if __name__ == "__main__":
    main()
