"""Does the fast training path reach the validation quality of a plain one?

    python benchmarks/fast_path_quality.py --out docs/results/fast-path.json

trains the same models both ways, three seeds each, on the embedded data and on ML-1M (from
`../shared/data` or `$BERT4REC_SHARED_DATA`; left out when it is not there), with the Cloze stage
only, and compares NDCG@10 over all validation users after the last epoch.

- fast: as `bert4rec train` does it. Pieces of like length on all cores, the last block at asked
  positions only, byte dropout whose masks the pieces of a worker share, the loss in tiles.
- plain: the whole batch as one padded piece, all blocks at all positions, torch's dropout with
  fresh masks, full logits, autograd for everything, torch's AdamW and clipping.

A seed fixes the initial weights, which both paths share; order, masks and dropout are drawn anew
for each path. So runs differ by chance, and the difference of the means is held against its
standard error; the interval says how much could be hidden in it. Speed is measured in `speed/`.
"""

import argparse
import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert4rec.config import Config, load_config
from bert4rec.data.sources import open_data
from bert4rec.data.splits import Spans, Split, leave_one_out
from bert4rec.evaluation.evaluate import full_ranks
from bert4rec.evaluation.metrics import METRICS
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.models.layers import ByteDropout
from bert4rec.threads import WorkerThreads
from bert4rec.training.batches import IGNORE, Batch, Task, epoch_order, make_batch
from bert4rec.training.gradients import Gradients
from bert4rec.training.loop import _learning_rate, stages_of
from bert4rec.training.losses import make_loss
from bert4rec.training.optimizer import Optimizer

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SHOW_EVERY = 5  # epochs
T_95 = {2: 4.30, 4: 2.78, 6: 2.45, 8: 2.31}  # Student's t, two-sided 95 %, by degrees of freedom
Asked = tuple[Tensor, Tensor, Tensor]  # what the model sees, which are hidden, what stood there


class FastPath:
    """The parts that `training/loop.py` is made of."""

    def __init__(
        self, model: BERT4Rec, split: Split, config: Config, workers: WorkerThreads
    ) -> None:
        self.pad, loss = model.pad, make_loss(config.training, split.train_counts)
        self.gradients = Gradients(model, loss, workers)
        self.optimizer = Optimizer(model, config.training, is_sparse=loss.is_sparse)

    def batch(self, task: Task, windows: Spans, rows: np.ndarray, masks: torch.Generator) -> Batch:
        return make_batch(task, windows, rows, self.pad, masks)

    def step(self, batch: Batch, learning_rate: float, seed: int) -> None:
        self.gradients.add(batch, seed)
        self.optimizer.step(learning_rate)


class PlainPath:
    def __init__(
        self, model: BERT4Rec, split: Split, config: Config, workers: WorkerThreads
    ) -> None:
        self.model, self.clip_norm = model, config.training.clip_norm
        model.items.__class__ = nn.Embedding  # type: ignore[assignment]
        for module in model.modules():
            if isinstance(module, ByteDropout) and module.dropped_of_256:
                module.__class__, module.probability = PlainDropout, config.model.dropout
        matrices = {"params": [p for p in model.parameters() if p.ndim > 1]}
        vectors = {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}
        decay = config.training.weight_decay
        self.optimizer = torch.optim.AdamW([matrices, vectors], weight_decay=decay)

    def batch(self, task: Task, windows: Spans, rows: np.ndarray, masks: torch.Generator) -> Asked:
        sequences = torch.from_numpy(windows.padded(rows, self.model.pad))
        inputs, targets = task.ask(sequences, masks)
        hidden = targets[:, :, 0] != IGNORE
        return inputs, hidden, sequences[hidden]

    def step(self, batch: Asked, learning_rate: float, seed: int) -> None:
        model, (inputs, hidden, targets) = self.model, batch
        torch.manual_seed(seed)  # of the dropout
        h = model.head_norm(F.gelu(model.head(model.hidden(inputs)[hidden])))
        logits = F.linear(h, model.items.weight[: model.n_items], model.output_bias)
        self.optimizer.zero_grad()
        F.cross_entropy(logits, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), self.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()


class PlainDropout(ByteDropout):
    """torch's own, with a fresh mask for every call."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.probability, self.training)

    def added(self, x: Tensor, change: Tensor) -> Tensor:
        return x + self.forward(change)


PATHS: dict[str, Any] = {"fast": FastPath, "plain": PlainPath}


def train_once(split: Split, config: Config, seed: int, name: str, title: str) -> dict[str, float]:
    """One training; quality after its last epoch, speed without the validations."""
    torch.manual_seed(seed)
    model = BERT4Rec(split.n_items, config.model)  # the same weights for both paths
    stage = stages_of(split, config)[0]
    batch_size, number = config.training.batch_size, list(PATHS).index(name)
    # Of the Cloze stage: always the same.
    windows = stage.tasks[0].windows(np.random.default_rng(0))
    steps_an_epoch = -(-len(windows) // batch_size)
    seconds = 0.0
    with WorkerThreads() as workers, WorkerThreads(1) as preparer:
        path = PATHS[name](model, split, config, workers)

        def prepared(step: int, rows: np.ndarray) -> tuple[int, int, Any]:
            random = int(np.random.SeedSequence([seed, number, step]).generate_state(1)[0])
            masks = torch.Generator().manual_seed(random)
            return step, random, path.batch(stage.tasks[0], windows, rows, masks)

        for epoch in range(stage.epochs):
            model.train()
            started = time.perf_counter()
            random_order = np.random.default_rng([seed, number, epoch])
            order = epoch_order(len(windows), batch_size, random_order)
            numbered = enumerate(order, epoch * steps_an_epoch)
            for step, random, batch in preparer.stream(lambda x: prepared(*x), numbered, ahead=2):
                rate = _learning_rate(stage, step, stage.epochs * steps_an_epoch)
                path.step(batch, rate, random ^ 1)
            seconds += time.perf_counter() - started
            speed = (epoch + 1) * len(windows) / seconds
            if (epoch + 1) % SHOW_EVERY == 0 or epoch + 1 == stage.epochs:
                ranks = full_ranks(model, split.validation)
                quality = {f"{m}@10": float(METRICS[m](ranks, 10).mean()) for m in ("NDCG", "HR")}
                values = " ".join(f"{metric} {value:.4f}" for metric, value in quality.items())
                print(
                    title,
                    name,
                    f"seed {seed} epoch {epoch + 1}:",
                    values,
                    f"{speed:.0f}/s",
                    flush=True,
                )
    return {**quality, "sequences_per_second": round(speed, 1)}


def compare(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Prints the table; the difference of the means, with what chance alone makes of it."""
    print("\nNDCG@10 by seed, their mean, sequences/s")
    values = {name: [run["NDCG@10"] for run in of_path] for name, of_path in runs.items()}
    for name, of_path in runs.items():
        speed = statistics.median(run["sequences_per_second"] for run in of_path)
        cells = [f"{value:.4f}" for value in [*values[name], statistics.mean(values[name])]]
        print(f"{name:6}", *cells, f"{speed:6.0f}")
    fast, plain = (statistics.mean(each) for each in values.values())
    difference, n = fast - plain, len(runs["fast"])
    error = math.sqrt(sum(statistics.variance(each) for each in values.values()) / n)
    most = T_95[2 * n - 2] * error
    verdict = "within noise" if abs(difference) < most else "more than noise"
    print(f"difference {difference:+.4f}, standard error {error:.4f}, 95 % ±{most:.4f}: {verdict}")
    found = {"difference": difference, "standard_error": error, "plus_minus_95": most}
    return found | {"verdict": verdict}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20, help="on ML-1M")
    parser.add_argument("--max-len", type=int, default=20, help="on ML-1M")
    parser.add_argument("--demo-epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3, choices=range(2, 6), help="how many")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    short = [f"max_len={arguments.max_len}", "learning_rate=2e-3"]  # to get somewhere in 20 epochs
    work = {"demo": ("demo", "bert4rec-2-stage", ["max_len=64"], arguments.demo_epochs)}
    ml_1m = Path(os.environ.get("BERT4REC_SHARED_DATA", SHARED_DATA)) / "ml-1m" / "ml-1m.txt.gz"
    if ml_1m.is_file():
        work["ml-1m"] = (str(ml_1m), "bert4rec-2-stage", short, arguments.epochs)
    else:
        print(f"no ML-1M at {ml_1m}: left out; set BERT4REC_SHARED_DATA to have it")
    results = {}
    for title, (source, recipe, changes, epochs) in work.items():
        # Of long histories the last items only: sliding windows would take many times as long.
        changes = [*changes, f"training.epochs={epochs}", "window_step=none"]
        config = load_config(recipe, overrides=[*changes, "validation_users=none"])
        split, seeds = leave_one_out(open_data(source)), list(range(arguments.seeds))
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in PATHS}
        for seed in seeds:  # in turn, so that a slow hour of the machine hits both
            for name in PATHS:
                runs[name].append(train_once(split, config, seed, name, title))
        settings = config.model_dump(mode="json", include={"model", "training"})
        results[title] = {"settings": settings, "seeds": seeds, "runs": runs} | compare(runs)
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
