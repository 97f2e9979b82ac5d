"""Training steps with up to five million items: memory and time of each loss.

    python benchmarks/scale/catalogue.py

Random histories, d=64; each size and loss in a process of its own, by the loop that trains. Only
the time of a step and the memory are looked at: nothing can be learned from chance.
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
import json, sys, tempfile, time
from pathlib import Path
import numpy as np
from bert4rec.config import load_config
from bert4rec.data.splits import Questions, Spans, Split
from bert4rec.models import LEARNED
from bert4rec.training.hardware import choose_hardware
from bert4rec.training.loop import train
from bert4rec.training.progress import TrainingDisplay

n_items, loss, steps, out = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
config = load_config("default", None, [
    "model.max_len=50", f"training.loss={loss}", "training.n_negatives=1024",
    "training.batch_size=256", f"training.steps={steps}", "second_stage.epochs=0",
    "training.validation_users=1", "training.epochs=1",
])
n_users, length = 256 * (steps + 1), 52
generator = np.random.default_rng(0)
tokens = generator.integers(0, n_items, n_users * length).astype(np.int32)
starts = np.arange(n_users, dtype=np.int64) * length
users = np.arange(n_users)
def questions(before):
    at = starts + length - before
    return Questions(Spans(tokens, starts, at, users), tokens[at].astype(np.int64))
counts = np.bincount(tokens, minlength=n_items)
train_part = Spans(tokens, starts, starts + length - 2, users)
split = Split(train_part, questions(2), questions(1), n_items, counts)
ends = []
class Watch(TrainingDisplay):
    def step(self, done, epoch, loss, n_sequences):
        ends.append(time.monotonic())
with tempfile.TemporaryDirectory() as folder:
    model = LEARNED["bert4rec"](n_items, config.model)
    with Watch(Path(folder)) as display:
        train(model, split, config, Path(folder), display, identity={},
              hardware=choose_hardware(config.training))
seconds = (ends[-1] - ends[1]) / (len(ends) - 2)
Path(out).write_text(json.dumps({"seconds_a_step": round(seconds, 3)}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, nargs="+", default=[1_000_000, 5_000_000])
    parser.add_argument("--result", type=Path, default=RESULT)
    given = parser.parse_args()
    rows = []
    for n_items in given.items:
        for loss, steps in (("sampled-softmax", 40), ("cross-entropy", 3)):
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "out.json"
                took = measured(
                    [sys.executable, "-c", CHILD, str(n_items), loss, str(steps), str(out)]
                )
                row = {"n_items": n_items, "loss": loss, "steps": steps}
                rows.append(row | json.loads(out.read_text()) | took)
                print(rows[-1])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    facts = {"commit": commit.stdout.strip(), "cores": os.cpu_count(), "dim": 64, "batch": 256}
    given.result.parent.mkdir(parents=True, exist_ok=True)
    given.result.write_text(json.dumps(facts | {"rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
