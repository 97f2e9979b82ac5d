"""RecTools' BERT4RecModel: its own `fit` with a Lightning trainer, its own `recommend`.

The scripts here are called peer_*.py because `rectools.py` would hide the library of that name.
"""

import logging
import time

import numpy as np
import pandas as pd
import pytorch_lightning
import rectools
import torch
from measure import (
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
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import BERT4RecModel


def dataset_of(sequences: list[np.ndarray], users: np.ndarray) -> Dataset:
    lengths = [len(sequences[user]) for user in users]
    table = pd.DataFrame(
        {
            Columns.User: np.repeat(users, lengths),
            Columns.Item: np.concatenate([sequences[user] for user in users]).astype(np.int64),
            Columns.Weight: 1.0,
            Columns.Datetime: pd.Timestamp(0)
            + pd.to_timedelta(np.concatenate([np.arange(n) for n in lengths]), unit="s"),
        }
    )
    return Dataset.construct(table)


class Timer(pytorch_lightning.Callback):
    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        trainer.should_stop = self.stopwatch.step_done(len(batch["x"]))


def make_model(arguments, timer: Timer | None) -> BERT4RecModel:
    """Without a timer the model is built by `fit` but not trained."""

    def trainer() -> pytorch_lightning.Trainer:
        return pytorch_lightning.Trainer(
            accelerator="cpu",
            max_epochs=1000,
            limit_train_batches=1.0 if timer else 0,
            callbacks=[timer] if timer else None,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    return BERT4RecModel(
        n_blocks=arguments.layers,
        n_heads=arguments.heads,
        n_factors=arguments.dim,
        dropout_rate=arguments.dropout,
        mask_prob=arguments.mask_ratio,
        session_max_len=arguments.max_len,
        loss="softmax",
        batch_size=arguments.batch,
        recommend_batch_size=arguments.batch,
        recommend_torch_device="cpu",
        get_trainer_func=trainer,
    )


def train(arguments, sequences: Sequences) -> Stopwatch:
    model = make_model(arguments, Timer(Stopwatch(arguments.seconds)))
    model.fit(dataset_of(sequences.train(), np.arange(sequences.n_users)))
    return model.fit_trainer.callbacks[0].stopwatch  # `fit` works on a copy of the trainer


def untrained(arguments, sequences: Sequences) -> BERT4RecModel:
    model = make_model(arguments, None)
    model.fit(dataset_of(sequences.train(), np.arange(sequences.n_users)))
    return model


def score(arguments, sequences: Sequences) -> Stopwatch:
    """One call of `recommend` for many users; a smaller call before it says how many."""
    model, histories = untrained(arguments, sequences), sequences.histories()
    order = users_in_random_order(sequences.n_users)

    def recommend(users: np.ndarray) -> float:
        dataset = dataset_of(histories, users)
        started = time.perf_counter()
        model.recommend(users=users, dataset=dataset, k=TOP, filter_viewed=True)
        return time.perf_counter() - started

    trial = order[: 2 * arguments.batch]
    recommend(trial)
    rate = len(trial) / recommend(trial)
    n = min(max(int(rate * arguments.seconds), 3 * arguments.batch), len(order))
    stopwatch = Stopwatch(arguments.seconds)
    stopwatch.n, stopwatch.seconds = n, recommend(order[:n])
    return stopwatch


def one(arguments, sequences: Sequences) -> tuple[float, str]:
    """`recommend` for one user goes through tables; its public torch module is quicker."""
    model, histories = untrained(arguments, sequences), sequences.histories()
    users = users_in_random_order(sequences.n_users)
    preparator, network = model.data_preparator, model.torch_model.eval()
    known = preparator.item_id_map.to_internal
    mask = preparator.extra_token_ids["MASK"]
    first_item = preparator.n_item_extra_tokens
    inputs, seen = [], []
    for user in users[:N_HISTORIES]:
        items = torch.as_tensor(known.reindex(histories[user]).dropna().to_numpy(dtype=np.int64))
        row = torch.zeros((1, arguments.max_len), dtype=torch.long)
        session = torch.cat((items, torch.tensor([mask])))[-arguments.max_len :]
        row[0, -len(session) :] = session
        inputs.append({"x": row})
        seen.append(items)

    with torch.inference_mode():
        item_embs = network.item_model.get_all_embeddings()  # once, as its validation does

    @torch.inference_mode()
    def from_tensors(i: int) -> torch.Tensor:
        encoded = network.encode_sessions(inputs[i % N_HISTORIES], item_embs)[:, -1]
        scores = network.similarity_module(encoded, item_embs)
        scores[0, seen[i % N_HISTORIES]] = -torch.inf
        return scores[:, first_item:].topk(TOP)

    datasets = [dataset_of(histories, users[i : i + 1]) for i in range(N_HISTORIES)]
    by_recommend = median_milliseconds(
        lambda i: model.recommend(users[i : i + 1], datasets[i], k=TOP, filter_viewed=True)
    )
    note = f"p50 of its torch module from tensors; `recommend` for one user: {by_recommend:.1f} ms"
    return median_milliseconds(from_tensors), note


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    sequences = Sequences(arguments.sequences)
    answer = {"note": "vocabulary from its training sequences, as the library does; 0 workers (default)"}
    if arguments.task == "one":
        answer["p50_ms"], answer["note"] = one(arguments, sequences)
    else:
        measured = {"train": train, "score": score}[arguments.task](arguments, sequences)
        answer["stopwatch"] = measured
    report("rectools", rectools.__version__, torch.__version__, arguments, **answer)


if __name__ == "__main__":
    main()
