"""The learning curve of one of our recipes; `time_to_quality.py` starts this.

The training clock is the loop's own `seconds` (steps and the making of batches, no checkpoints)
without the validations, which the loop counts and this script takes off again.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from curve_log import OWN_END, CurveLog, curve_arguments
from rich.console import Console

import bert4rec
from bert4rec.config import load_config, resolve
from bert4rec.data.sources import open_data
from bert4rec.data.splits import SPLITS
from bert4rec.interrupts import Interrupted
from bert4rec.pipeline import train
from bert4rec.training import loop
from bert4rec.training.checkpoint import Progress, RunDirectory
from bert4rec.training.hardware import choose_hardware
from bert4rec.training.run_log import RunLog
from bert4rec.training.setup import build_model, without_test

SAME_FOR_BOTH = ["training.validation_users=none"]  # RecTools validates on all users, too


class CurveRunLog(RunLog):
    """Keeps the points of the curve as they come, and ends the training when it is time."""

    def __init__(self, run: Path, log: CurveLog) -> None:
        super().__init__(run, Console(stderr=True))
        self.curve_log = log
        self.ended = OWN_END
        self.validation_seconds = 0.0
        self.started = self.last_step = time.monotonic()

    def step(self, progress: Progress) -> None:
        super().step(progress)
        self.last_step = time.monotonic()

    def epochs_done(self, event: dict[str, Any], *, is_best: bool) -> None:
        now = time.monotonic()
        self.validation_seconds += now - self.last_step
        super().epochs_done(event, is_best=is_best)
        reason = self.curve_log.point(
            event["epoch"],
            event["ndcg@10"],
            event["hr@10"],
            training_seconds=event["seconds"] - self.validation_seconds,
            wall_seconds=now - self.started,
            stage=event["stage"],
            loss=event["loss"],
        )
        if reason is not None:
            self.ended = reason
            raise Interrupted


def main() -> None:
    load_before = round(os.getloadavg()[0], 2)
    parser = curve_arguments(__doc__)
    parser.add_argument("data")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--to-the-end", action="store_true")
    arguments = parser.parse_args()
    changes = [*arguments.overrides, f"training.seed={arguments.seed}"]
    config = load_config(arguments.recipe, None, [*changes, *SAME_FOR_BOTH])
    sequences = open_data(arguments.data)
    run = resolve(config, sequences.n_items)
    split = without_test(SPLITS[run.data.split](sequences))
    model = build_model(run, split.n_items, sequences.n_users)
    log = CurveLog(arguments.log, arguments.aim, arguments.minutes, stops_at_aim=not arguments.to_the_end)
    log.begin(
        {
            "tool": "bert4rec",
            "version": bert4rec.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "device": str(choose_hardware(run.training)),
            "load_before": load_before,
            "date": time.strftime("%Y-%m-%d"),
            "minutes": arguments.minutes,
            "recipe": arguments.recipe,
            "changes": changes,
            "settings": run.model_dump(mode="json"),
            "n_parameters": sum(weights.numel() for weights in model.parameters()),
            "n_held_out": len(split.validation),
            "n_items": split.n_items,
        }
    )
    folder = arguments.log.parent / "ours"
    folder.mkdir(parents=True, exist_ok=True)
    loop.CHECKPOINT_SECONDS = float("inf")  # checkpoints are saved after validations only: no clock runs
    with CurveRunLog(folder, log) as shown, contextlib.suppress(Interrupted):
        train(run, split, sequences.n_users, RunDirectory(folder, {}), shown)
    log.end(shown.ended)


if __name__ == "__main__":
    main()
