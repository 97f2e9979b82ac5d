"""Does the fast training path reach the validation quality of a plain one?

    python benchmarks/quality/fast_path.py --out docs/results/fast-path.json

trains the same models both ways, three seeds each, on the embedded data and on ML-1M (from
`../shared/data` or `$BERT4REC_SHARED_DATA`; left out when it is not there), with the Cloze stage
only, and compares NDCG@10 over all validation users after the last epoch.

- fast: as `bert4rec train` does it. Microbatches of like length on all cores, the last block at the
  query positions only, byte dropout whose masks the microbatches of a worker share, the loss in
  tiles.
- plain: the whole batch padded to its longest history, `BERT4Rec.forward` with all scores at all
  positions, torch's dropout with fresh masks, autograd for everything, torch's AdamW and clipping.

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

from bert4rec.config import RunConfig, load_config, resolve
from bert4rec.data.sources import open_data
from bert4rec.data.splits import Spans, Split, leave_one_out
from bert4rec.evaluation.metrics import METRICS
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.models.kernels.byte_dropout import ByteDropout
from bert4rec.objectives import Examples, Objective
from bert4rec.scoring import rank_held_out
from bert4rec.threads import WorkerThreads
from bert4rec.training.batches import Batch, Sizes, make_batch, shuffled_batches
from bert4rec.training.gradients import Gradients
from bert4rec.training.optimizer import CLIP_NORM, Optimizer
from bert4rec.training.setup import build_model, build_stages

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SHOW_EVERY = 5  # epochs
T_95 = {2: 4.30, 4: 2.78, 6: 2.45, 8: 2.31}  # Student's t, two-sided 95 %, by degrees of freedom


class FastPath:
    """The parts that the training loop is made of."""

    def __init__(self, model: BERT4Rec, split: Split, config: RunConfig, workers: WorkerThreads) -> None:
        self.pad, self.sizes = model.pad_token, Sizes(n_workers=workers.n)
        loss = config.loss.build(split.train_counts)
        self.gradients = Gradients(model, loss, workers)
        decay = config.training.weight_decay
        self.optimizer = Optimizer(model, decay)

    def batch(self, objective: Objective, sequences: Spans, masks: torch.Generator) -> Batch:
        return make_batch(objective, sequences, self.pad, masks, self.sizes)

    def step(self, batch: Batch, learning_rate: float, seed: int) -> None:
        self.gradients.add(batch, seed)
        self.optimizer.step(learning_rate)


class PlainPath:
    def __init__(self, model: BERT4Rec, split: Split, config: RunConfig, workers: WorkerThreads) -> None:
        self.model = model
        model.item_embedding.__class__ = nn.Embedding  # type: ignore[assignment]
        for module in model.modules():
            if isinstance(module, ByteDropout):
                module.__class__ = TorchDropout
        matrices = {"params": [p for p in model.parameters() if p.ndim > 1]}
        vectors = {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}
        decay = config.training.weight_decay
        self.optimizer = torch.optim.AdamW([matrices, vectors], weight_decay=decay)

    def batch(self, objective: Objective, sequences: Spans, masks: torch.Generator) -> Examples:
        padded = sequences.padded(np.arange(len(sequences)), self.model.pad_token)
        return objective.make_examples(torch.from_numpy(padded), masks)

    def step(self, batch: Examples, learning_rate: float, seed: int) -> None:
        torch.manual_seed(seed)  # of the dropout
        is_query = batch.is_target[:, :, 0]
        scores = self.model(batch.inputs)[is_query]
        self.optimizer.zero_grad()
        F.cross_entropy(scores, batch.targets[:, :, 0][is_query]).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()


class TorchDropout(ByteDropout):
    """torch's own, with a fresh mask for every call."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropped_of_256 / 256, self.training)

    def add(self, x: Tensor, change: Tensor) -> Tensor:
        return x + self.forward(change)


PATHS: dict[str, Any] = {"fast": FastPath, "plain": PlainPath}


def train_once(split: Split, config: RunConfig, seed: int, name: str) -> dict[str, float]:
    """One training; quality after its last epoch, speed without the validations."""
    seeded = config.training.model_copy(update={"seed": seed})
    config = config.model_copy(update={"training": seeded})
    model = build_model(config, split.n_items, 0)  # the same weights for both paths
    stage, number, seconds = build_stages(config, split, 1)[0], list(PATHS).index(name), 0.0
    objective = stage.batches.objectives[0]
    sequences = objective.draw_sequences(np.random.default_rng(0))  # of Cloze: always the same
    steps_per_epoch = -(-len(sequences) // config.training.batch_size)
    with WorkerThreads() as workers, WorkerThreads(1) as batch_thread:
        path = PATHS[name](model, split, config, workers)

        def prepare(given: tuple[int, np.ndarray]) -> tuple[int, int, Any]:
            step, rows = given
            random = int(np.random.SeedSequence([seed, number, step]).generate_state(1)[0])
            masks = torch.Generator().manual_seed(random)
            return step, random, path.batch(objective, sequences.take(rows), masks)

        for epoch in range(stage.settings.epochs):
            model.train()
            started = time.perf_counter()
            generator = np.random.default_rng([seed, number, epoch])
            order = shuffled_batches(len(sequences), config.training.batch_size, generator)
            numbered = enumerate(order, epoch * steps_per_epoch)
            for step, random, batch in batch_thread.stream(prepare, numbered, ahead=2):
                warm = min(1.0, (step + 1) / (config.training.warmup_steps + 1))
                decay = 1 - step / (stage.settings.epochs * steps_per_epoch)
                path.step(batch, stage.settings.learning_rate * warm * decay, random ^ 1)
            seconds += time.perf_counter() - started
            speed = (epoch + 1) * len(sequences) / seconds
            if (epoch + 1) % SHOW_EVERY == 0 or epoch + 1 == stage.settings.epochs:
                ranks = rank_held_out(model, split.validation, exclude_seen=True)
                quality = {f"{m}@10": float(METRICS[m](ranks, 10).mean()) for m in ("NDCG", "HR")}
                figures = " ".join(f"{metric} {value:.4f}" for metric, value in quality.items())
                print(f"{name} seed {seed} epoch {epoch + 1}: {figures} {speed:.0f}/s", flush=True)
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20, help="on ML-1M")
    parser.add_argument("--max-len", type=int, default=20, help="on ML-1M")
    parser.add_argument("--demo-epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3, choices=range(2, 6), help="how many")
    parser.add_argument("--only", choices=("demo", "ml-1m"), help="one data set; else both")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    demo = ["model.max_len=64", f"stages.0.epochs={arguments.demo_epochs}"]
    short = [f"model.max_len={arguments.max_len}", f"stages.0.epochs={arguments.epochs}"]
    short += ["stages.0.learning_rate=2e-3"]  # to get somewhere in 20 epochs
    ml_1m = Path(os.environ.get("BERT4REC_SHARED_DATA", SHARED_DATA)) / "ml-1m" / "ml-1m.txt.gz"
    results = {}
    for title, source, changes in (("demo", "demo", demo), ("ml-1m", str(ml_1m), short)):
        if arguments.only not in (None, title):
            continue
        if title == "ml-1m" and not ml_1m.is_file():
            print(f"no ML-1M at {ml_1m}: left out; set BERT4REC_SHARED_DATA to have it")
            continue
        print(title)
        split, seeds = leave_one_out(open_data(source)), list(range(arguments.seeds))
        config = resolve(load_config("bert4rec-2-stage", None, changes), split.n_items)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in PATHS}
        for seed in seeds:  # in turn, so that a slow hour of the machine hits both
            for name in PATHS:
                runs[name].append(train_once(split, config, seed, name))
        settings = config.model_dump(mode="json", include={"model", "stages", "training"})
        results[title] = {"settings": settings, "seeds": seeds, "runs": runs} | compare(runs)
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
