"""The learning curve of one of our recipes; `time_to_quality.py` starts this.

The training clock is the loop's own `seconds` (steps and the making of batches, no checkpoints)
without the validations, which the loop counts and this script takes off again.
"""

import contextlib
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import torch
from curve_log import OWN_END, CurveLog, curve_arguments
from rich.console import Console

import bert4rec
from bert4rec.config import load_config
from bert4rec.data.sources import open_data
from bert4rec.data.splits import SPLITS
from bert4rec.models import LEARNED
from bert4rec.training.hardware import choose_hardware
from bert4rec.training.loop import Interrupted, train
from bert4rec.training.progress import TrainingDisplay
from bert4rec.training.settled import settled

# Every validation asks all users, as RecTools' does; checkpoints are saved after validations only,
# where no clock runs.
SAME_FOR_BOTH = ["training.validation_users=none", "training.checkpoint_minutes=1e9"]


class CurveDisplay(TrainingDisplay):
    """Keeps the points of the curve as they come, and says when it is time to stop."""

    def __init__(self, run: Path, log: CurveLog) -> None:
        super().__init__(run, Console(stderr=True))
        self.curve_log = log
        self.why_over: str | None = None
        self.validation_seconds = 0.0
        self.started = self.last_step = time.monotonic()

    def step(self, done: int, epoch: int, loss: float, n_sequences: int) -> None:
        super().step(done, epoch, loss, n_sequences)
        self.last_step = time.monotonic()

    def validated(self, event: dict[str, Any], is_best: bool) -> None:
        now = time.monotonic()
        self.validation_seconds += now - self.last_step
        super().validated(event, is_best)
        self.why_over = self.curve_log.point(
            event["epoch"],
            event["ndcg@10"],
            event["hr@10"],
            training_seconds=event["seconds"] - self.validation_seconds,
            wall_seconds=now - self.started,
            stage=event["stage"],
            loss=event["loss"],
        )


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
    config = settled(config, sequences.n_items)
    split = dataclasses.replace(SPLITS[config.data.split](sequences), test=None)  # type: ignore[arg-type]
    torch.manual_seed(config.training.seed)
    model = LEARNED[config.model.name](split.n_items, config.model, sequences.n_users)
    log = CurveLog(
        arguments.log, arguments.aim, arguments.minutes, stops_at_aim=not arguments.to_the_end
    )
    hardware = choose_hardware(config.training)
    log.begin(
        {
            "tool": "bert4rec",
            "version": bert4rec.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "device": str(hardware),
            "load_before": load_before,
            "date": time.strftime("%Y-%m-%d"),
            "minutes": arguments.minutes,
            "recipe": arguments.recipe,
            "changes": changes,
            "settings": config.model_dump(mode="json"),
            "n_parameters": sum(weights.numel() for weights in model.parameters()),
            "n_questions": len(split.validation),
            "n_items": split.n_items,
        }
    )
    run = arguments.log.parent / "ours"
    run.mkdir(parents=True, exist_ok=True)
    with CurveDisplay(run, log) as display, contextlib.suppress(Interrupted):  # as it was asked to
        train(
            model,
            split,
            config,
            run,
            display,
            identity={"config": config.model_dump(mode="json"), "data": sequences.fingerprint},
            hardware=hardware,
            should_stop=lambda: display.why_over is not None,
        )
    log.end(display.why_over or OWN_END)


if __name__ == "__main__":
    main()
