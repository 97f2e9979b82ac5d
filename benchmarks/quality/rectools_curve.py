"""The learning curve of RecTools' BERT4Rec, in its own environment; `time_to_quality.py` starts it.

The model trains by its own `fit`; a Lightning callback stops the clock at the end of an epoch and
ranks the validation items by the torch module, as the library's `recommend` does: the last known
items, [MASK] after them, padding before them. The settings are those of its authors' published
replication; what is not named in them is the library's default.
"""

import logging
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytorch_lightning
import rectools
import torch
from curve_log import CurveLog, curve_arguments
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import BERT4RecModel

PUBLISHED = {
    "n_factors": 256,
    "n_heads": 4,
    "n_blocks": 2,
    "session_max_len": 100,
    "mask_prob": 0.15,
    "loss": "softmax",
}
AT_ONCE = 256  # histories scored together
MISSED = np.iinfo(np.int64).max


class SplitFile:
    """What our code wrote: training histories, validation histories and their targets."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as file:
            self.train = rows_of(file["train_items"], file["train_offsets"])
            self.histories = rows_of(file["history_items"], file["history_offsets"])
            self.targets: np.ndarray = file["targets"]
            self.n_items = int(file["n_items"])


def rows_of(items: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
    return np.split(items, offsets[1:-1])


def dataset_of(histories: list[np.ndarray]) -> Dataset:
    lengths = [len(history) for history in histories]
    places = np.concatenate([np.arange(n) for n in lengths])
    table = pd.DataFrame(
        {
            Columns.User: np.repeat(np.arange(len(histories)), lengths),
            Columns.Item: np.concatenate(histories).astype(np.int64),
            Columns.Weight: 1.0,
            Columns.Datetime: pd.Timestamp(0) + pd.to_timedelta(places, unit="s"),
        }
    )
    return Dataset.construct(table)


class EncodedHeldOut:
    """The held-out users in RecTools' own item numbers, which are known only after `fit`."""

    def __init__(self, model: BERT4RecModel, split: SplitFile) -> None:
        preparator = model.data_preparator
        self.first_item = preparator.n_item_extra_tokens
        known = preparator.item_id_map.to_internal

        def internal(items: np.ndarray) -> np.ndarray:
            """-1 for an item that it never saw: it keeps the last 100 of each history only."""
            return known.reindex(items).fillna(-1).to_numpy(dtype=np.int64)

        self.targets = internal(split.targets)
        self.seen = [row[row >= 0] for row in map(internal, split.histories)]
        length = preparator.session_max_len
        mask = preparator.extra_token_ids["MASK"]
        self.inputs = torch.zeros((len(self.seen), length), dtype=torch.long)
        for row, items in zip(self.inputs, self.seen, strict=True):
            session = torch.as_tensor(np.append(items, mask)[-length:])
            row[-len(session) :] = session

    @torch.inference_mode()
    def ranks(self, network: torch.nn.Module) -> np.ndarray:
        """Among all items but the seen ones, ties before the target; dropout as it was after."""
        was_training = network.training
        network.eval()
        item_embs = network.item_model.get_all_embeddings()
        ranks = np.full(len(self.targets), MISSED)
        for start in range(0, len(ranks), AT_ONCE):
            rows = range(start, min(start + AT_ONCE, len(ranks)))
            encoded = network.encode_sessions({"x": self.inputs[start : rows.stop]}, item_embs)
            scores = network.similarity_module(encoded[:, -1], item_embs).numpy()
            if not np.isfinite(scores).all():
                raise ValueError("RecTools' scores are not finite: its training has diverged")
            scores[:, : self.first_item] = -np.inf  # PAD and MASK are no items
            for row, score in zip(rows, scores, strict=True):
                target = self.targets[row]
                score[self.seen[row]] = -np.inf
                if target >= 0 and score[target] > -np.inf:
                    ranks[row] = (score >= score[target]).sum()  # itself included
        network.train(was_training)
        return ranks


class Curve(pytorch_lightning.Callback):
    """Time from the first step on, without what happens in here.

    `fit` works on a deep copy of its trainer and of this, so the model is reached by functions.
    """

    def __init__(
        self, log: CurveLog, every: int, encode: Callable[[], EncodedHeldOut], about: Callable[[], dict[str, Any]]
    ) -> None:
        self.curve_log, self.every, self.encode, self.about = log, every, encode, about
        self.paused = 0.0

    def on_train_start(self, trainer, module) -> None:
        self.held_out = self.encode()
        n_parameters = sum(weights.numel() for weights in module.torch_model.parameters())
        n_unknown = int((self.held_out.targets < 0).sum())
        facts = {"n_parameters": n_parameters, "n_unknown_targets": n_unknown}
        self.curve_log.begin(self.about() | facts)
        self.started = time.monotonic()

    def on_train_epoch_end(self, trainer, module) -> None:
        stopped = time.monotonic()
        seconds = stopped - self.started - self.paused
        epoch = trainer.current_epoch + 1
        is_over = seconds >= 60 * self.curve_log.minutes
        loss = trainer.callback_metrics.get("train_loss")
        loss = None if loss is None else float(loss)
        said = f"rectools: epoch {epoch}" + ("" if loss is None else f"  loss {loss:.3f}")
        if epoch % self.every == 0 or is_over:
            ranks = self.held_out.ranks(module.torch_model)
            is_hit = ranks <= 10
            ndcg = float((is_hit / np.log2(np.where(is_hit, ranks, 1) + 1.0)).mean())
            reason = self.curve_log.point(
                epoch,
                ndcg,
                float(is_hit.mean()),
                training_seconds=seconds,
                wall_seconds=time.monotonic() - self.started,
                stage="cloze",
                loss=loss,
            )
            said += f"  validation NDCG@10 {ndcg:.4f}  HR@10 {is_hit.mean():.4f}"
            if reason:
                self.curve_log.end(reason)
                trainer.should_stop = True
        print(f"{said}  {seconds / 60:.1f} min", flush=True)
        self.paused += time.monotonic() - stopped


def main() -> None:
    load_before = round(os.getloadavg()[0], 2)
    parser = curve_arguments(__doc__)
    parser.add_argument("split", type=Path, help=".npz of time_to_quality.py")
    parser.add_argument("--every", type=int, default=1, help="epochs between two validations")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    pytorch_lightning.seed_everything(arguments.seed)
    split = SplitFile(arguments.split)
    log = CurveLog(arguments.log, arguments.aim, arguments.minutes)

    def about() -> dict[str, Any]:
        defaults = {name: getattr(model, name) for name in ("dropout_rate", "lr", "batch_size")}
        return {
            "tool": "RecTools",
            "version": rectools.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "device": "cpu (float32)",
            "load_before": load_before,
            "date": time.strftime("%Y-%m-%d"),
            "minutes": arguments.minutes,
            "settings": {**PUBLISHED, **defaults, "seed": arguments.seed},
            "n_held_out": len(split.targets),
            "n_items": split.n_items,
        }

    def trainer() -> pytorch_lightning.Trainer:
        return pytorch_lightning.Trainer(
            accelerator="cpu",
            max_epochs=1_000_000,  # the callback ends it
            callbacks=[Curve(log, arguments.every, lambda: EncodedHeldOut(model, split), about)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    model = BERT4RecModel(**PUBLISHED, recommend_torch_device="cpu", get_trainer_func=trainer)
    model.fit(dataset_of(split.train))


if __name__ == "__main__":
    main()
