"""Training steps with up to five million items: memory and time of each loss.

    python benchmarks/scale/catalogue.py

Random histories of 50 items, d=64; each size and loss in a process of its own, by the steps that a
training takes. Only their time and the memory count: nothing can be learned from chance.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from prepare import measured

RESULT = Path(__file__).parents[2] / "docs" / "results" / "scale" / "catalogue.json"
CHILD = """
import json, sys
from pathlib import Path
import numpy as np
from bert4rec.cpu_tuning import keep_freed_memory
from bert4rec.config import load_config, resolve
from bert4rec.data.splits import HeldOut, Spans, Split
from bert4rec.training.timing import time_stages

n_items, loss, seconds, out = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
sampled = ["loss.n_negatives=1024"] if loss == "sampled-softmax" else []
config = load_config("default", None, [
    "model.max_len=50", f"loss.name={loss}", *sampled, "training.batch_size=256",
    "training.validation_users=1", "stages.1.epochs=0",
])
n_users, length = 256 * 50, 52
tokens = np.random.default_rng(0).integers(0, n_items, n_users * length).astype(np.int32)
starts = np.arange(n_users, dtype=np.int64) * length
train = Spans(tokens, starts, starts + length - 2, np.arange(n_users))
held_out = HeldOut(train, tokens[train.ends].astype(np.int64))
split = Split(train, held_out, held_out, n_items, np.bincount(tokens, minlength=n_items))
keep_freed_memory()
found = time_stages(split, resolve(config, n_items), seconds)[0].seconds_per_step
Path(out).write_text(json.dumps({"seconds_per_step": round(found, 3)}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, nargs="+", default=[1_000_000, 5_000_000])
    parser.add_argument("--losses", nargs="+", default=["sampled-softmax", "cross-entropy"])
    parser.add_argument("--seconds", type=float, default=8, help="of timed steps, at least eight")
    parser.add_argument("--result", type=Path, default=RESULT)
    given = parser.parse_args()
    rows = []
    for n_items in given.items:
        for loss in given.losses:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "out.json"
                words = [str(n_items), loss, str(given.seconds), str(out)]
                took = measured([sys.executable, "-c", CHILD, *words])
                row = {"n_items": n_items, "loss": loss}
                rows.append(row | json.loads(out.read_text()) | took)
                print(rows[-1])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    facts = {"commit": commit.stdout.strip(), "cores": os.cpu_count(), "dim": 64, "batch": 256}
    given.result.parent.mkdir(parents=True, exist_ok=True)
    given.result.write_text(json.dumps(facts | {"rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
