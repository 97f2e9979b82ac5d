"""RePlay's Bert4Rec: its Lightning module, data sets and callback, at its defaults or tuned.

Tuned means three options that its documentation has: `CE_restricted`, its full softmax with logits
at the masked positions only; tied embeddings, as in the paper; and its OpenVINO model for scoring.
"""

import importlib.metadata
import logging
from collections.abc import Iterator

import lightning
import numpy as np
import pandas as pd
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
from replay.data import FeatureHint, FeatureSource, FeatureType
from replay.data.nn import PandasSequentialDataset, TensorFeatureInfo, TensorFeatureSource, TensorSchema
from replay.models.nn.sequential.bert4rec import Bert4Rec, Bert4RecPredictionDataset, Bert4RecTrainingDataset
from replay.models.nn.sequential.compiled import Bert4RecCompiled
from replay.models.nn.sequential.postprocessors import RemoveSeenItems
from torch.utils.data import DataLoader


def schema_of(arguments, sequences: Sequences) -> TensorSchema:
    return TensorSchema(
        TensorFeatureInfo(
            name="item_id",
            is_seq=True,
            cardinality=sequences.n_items,
            embedding_dim=arguments.dim,
            feature_type=FeatureType.CATEGORICAL,
            feature_sources=[TensorFeatureSource(FeatureSource.INTERACTIONS, "item_id")],
            feature_hint=FeatureHint.ITEM_ID,
        )
    )


def dataset_of(schema: TensorSchema, sequences: list[np.ndarray], users: np.ndarray) -> PandasSequentialDataset:
    rows = [sequences[user].astype(np.int64) for user in users]
    table = pd.DataFrame({"user_id": users, "item_id": rows})
    return PandasSequentialDataset(schema, "user_id", "item_id", table)


class Timer(lightning.Callback):
    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        trainer.should_stop = self.stopwatch.step_done(len(batch["query_id"]))


def make_trainer(callbacks: list[lightning.Callback]) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        max_epochs=1000,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def make_model(arguments, schema: TensorSchema) -> Bert4Rec:
    return Bert4Rec(
        schema,
        block_count=arguments.layers,
        head_count=arguments.heads,
        hidden_size=arguments.dim,
        max_seq_len=arguments.max_len,
        dropout_rate=arguments.dropout,
        loss_type="CE_restricted" if arguments.tuned else "CE",
        enable_embedding_tying=arguments.tuned,
    )


def train(arguments, sequences: Sequences) -> tuple[Stopwatch, str]:
    schema = schema_of(arguments, sequences)
    everyone = np.arange(sequences.n_users)
    rows = Bert4RecTrainingDataset(
        dataset_of(schema, sequences.train(), everyone),
        max_sequence_length=arguments.max_len,
        mask_prob=arguments.mask_ratio,
    )
    loader = DataLoader(rows, batch_size=arguments.batch, shuffle=True)
    stopwatch = Stopwatch(arguments.seconds)
    make_trainer([Timer(stopwatch)]).fit(make_model(arguments, schema), loader)
    how = "CE_restricted, tied embeddings" if arguments.tuned else "CE, embeddings not tied"
    return stopwatch, f"{how}; 0 workers (default)"


def untrained(arguments, sequences: Sequences, mode: str, batch: int):
    """Its torch module or its OpenVINO model, and batches of histories for it."""
    schema = schema_of(arguments, sequences)
    histories = dataset_of(schema, sequences.histories(), users_in_random_order(sequences.n_users))
    rows = Bert4RecPredictionDataset(histories, max_sequence_length=arguments.max_len)
    model = make_model(arguments, schema).eval()
    if arguments.tuned:
        model = Bert4RecCompiled.compile(model, mode, batch_size=batch, num_threads=THREADS)
    return model, DataLoader(rows, batch_size=batch, drop_last=True), histories


def score(arguments, sequences: Sequences) -> tuple[Stopwatch, str]:
    model, loader, histories = untrained(arguments, sequences, "batch", arguments.batch)
    seen = RemoveSeenItems(histories)

    def steps() -> Iterator[int]:
        """What its Lightning callback does with each batch."""
        for batch in loader:
            _, scores = seen.on_prediction(batch["query_id"], model.predict(batch))
            scores.topk(TOP)
            yield len(scores)

    stopwatch = Stopwatch(arguments.seconds)
    with torch.inference_mode():
        stopwatch.time(steps())
    how = "Bert4RecCompiled (OpenVINO)" if arguments.tuned else "its torch module"
    return stopwatch, f"{how}, RemoveSeenItems; 0 workers (default)"


def one(arguments, sequences: Sequences) -> tuple[float, str]:
    model, loader, histories = untrained(arguments, sequences, "one_query", 1)
    batches = [batch for batch, _ in zip(loader, range(N_HISTORIES), strict=False)]
    seen = [torch.from_numpy(histories.get_sequence(i, "item_id")) for i in range(N_HISTORIES)]

    @torch.inference_mode()
    def top(i: int) -> torch.Tensor:
        scores = model.predict(batches[i % N_HISTORIES])
        scores[0, seen[i % N_HISTORIES]] = -torch.inf
        return scores.topk(TOP)

    how = "Bert4RecCompiled (OpenVINO) for one query" if arguments.tuned else "its torch module"
    return median_milliseconds(top), f"{how}, from tensors"


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    sequences = Sequences(arguments.sequences)
    version = importlib.metadata.version("replay-rec")
    answer = {}
    if arguments.task == "one":
        answer["p50_ms"], answer["note"] = one(arguments, sequences)
    else:
        task = {"train": train, "score": score}[arguments.task]
        answer["stopwatch"], answer["note"] = task(arguments, sequences)
    report("replay", version, torch.__version__, arguments, **answer)


if __name__ == "__main__":
    main()
