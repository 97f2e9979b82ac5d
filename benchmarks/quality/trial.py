"""Train one recipe with changes and judge it by the validation items; the test items are not read.

    python benchmarks/quality/trial.py ml-1m.txt.gz NAME --recipe best-ml-1m --set model.dim=64

A line with the settings that differ from the recipe, the best validation NDCG@10 and the curve is
appended to `--out` (JSON lines); `ablations.py` makes the table of docs/quality.md from them.
`--continue` goes on from the checkpoints of the same name, another day or on another machine.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch
from rich.console import Console

from bert4rec.config import load_config
from bert4rec.data.sources import open_data
from bert4rec.data.splits import SPLITS
from bert4rec.models import LEARNED
from bert4rec.pipeline import evaluate_questions
from bert4rec.training.hardware import choose_hardware
from bert4rec.training.loop import train
from bert4rec.training.progress import TrainingDisplay
from bert4rec.training.settled import settled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="as for `bert4rec train`")
    parser.add_argument("name", help="of this trial")
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--out", type=Path, default=Path("runs/trials.jsonl"))
    parser.add_argument("--continue", action="store_true", dest="resume")
    arguments = parser.parse_args()
    asked = load_config(arguments.recipe, None, arguments.overrides)
    if asked.training.on_validation:
        parser.error(
            "a trial is judged by the validation items: --set training.on_validation=false"
        )
    sequences = open_data(arguments.data)
    config = settled(asked, sequences.n_items)
    split = dataclasses.replace(SPLITS[config.data.split](sequences), test=None)  # type: ignore[arg-type]
    torch.manual_seed(config.training.seed)
    model = LEARNED[config.model.name](split.n_items, config.model, sequences.n_users)
    run = arguments.out.parent / "trials" / arguments.name
    run.mkdir(parents=True, exist_ok=True)
    started = time.time()
    with TrainingDisplay(run, Console(stderr=True)) as display:
        progress = train(
            model,
            split,
            config,
            run,
            display,
            identity={"config": config.model_dump(mode="json"), "data": sequences.fingerprint},
            hardware=choose_hardware(config.training),
            resume=arguments.resume,
        )
    evaluation = evaluate_questions(model, split.validation, split, config)
    figures = {
        protocol: {name: round(metrics[name]["value"], 5) for name in ("HR@10", "NDCG@10")}
        for protocol, metrics in evaluation.metrics.items()
    }
    trial = {
        "name": arguments.name,
        "data": Path(arguments.data).name,
        "recipe": arguments.recipe,
        "changes": arguments.overrides,
        "config": asked.model_dump(mode="json"),
        "validation": figures,
        "n_validation_users": len(split.validation),
        "seconds": round(progress.seconds, 1),
        "threads": torch.get_num_threads(),
        "started": round(started),
        "curve": progress.history,
    }
    with arguments.out.open("a") as file:
        file.write(json.dumps(trial) + "\n")
    print(f"{arguments.name}: {figures}, {progress.seconds / 60:.1f} min")


if __name__ == "__main__":
    main()
