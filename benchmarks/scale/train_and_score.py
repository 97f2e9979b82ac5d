"""Training on very many interactions and items, and scoring some users, with peak memory.

    python benchmarks/scale/prepare.py --folder scratch        # 100 million interactions
    python benchmarks/scale/train_and_score.py scratch/prepared

Trains for one epoch by the command line, as a user would, builds the index and scores 10,000 users
into Parquet; seconds and peak memory of each go to docs/results/scale/train-and-score.json. Memory
is read as in `prepare.py`. An epoch is a step per 256 users: `prepare.py --users` makes fewer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from prepare import measured

RESULT = Path(__file__).parents[2] / "docs" / "results" / "scale" / "train-and-score.json"
SETTINGS = (
    "model.max_len=50",
    "loss.name=sampled-softmax",
    "loss.n_negatives=1024",
    "stages.0.epochs=1",
    "stages.0.window_stride=none",
    "stages.1.epochs=0",
    "training.batch_size=256",
    "training.validation_users=500",
    "evaluation.users=2000",
)
SCORE = """
import sys
from pathlib import Path
from bert4rec.data.sequences import Sequences
from bert4rec.distributed.batch_scoring import recommend_users
from bert4rec.recommender import Recommender
prepared, model, n, out = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
everybody = Sequences.load(prepared)
some = Sequences(
    everybody.tokens[: everybody.offsets[n]],
    everybody.offsets[: n + 1],
    everybody.vocabulary,
    everybody.user_ids[:n],
    user_id_type=everybody.user_id_type,
)
recommend_users(Recommender.load(model), some, out)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prepared", type=Path)
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--result", type=Path, default=RESULT)
    given = parser.parse_args()
    model, scores = given.prepared.parent / "model", given.prepared.parent / "scores.parquet"
    shutil.rmtree(model, ignore_errors=True)
    words = [word for each in SETTINGS for word in ("--set", each)]
    python = sys.executable
    command = [python, "-m", "bert4rec", "train", str(given.prepared), "--out", str(model)]
    train = measured([*command, "--no-baselines", *words])
    about = json.loads((model / "about.json").read_text())
    metrics = json.loads((model / "metrics.json").read_text())
    score = measured([python, "-c", SCORE, str(given.prepared), str(model), str(given.users), str(scores)])
    facts = {
        "data": {name: about["data"][name] for name in ("n_users", "n_interactions")},
        "n_items": about["n_items"],
        "settings": SETTINGS,
        "train": train | about["training"],
        "index": next((json.loads(p.read_text()) for p in model.glob("index-*.json")), None),
        "metrics": metrics["metrics"]["full"] if "metrics" in metrics else metrics,
        "score": score | {"users": given.users},
        "cores": os.cpu_count(),
    }
    given.result.parent.mkdir(parents=True, exist_ok=True)
    given.result.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
