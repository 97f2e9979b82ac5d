"""Train one recipe with changes and judge it by the validation items; the test items are not read.

    python benchmarks/quality/trial.py ml-1m.txt.gz NAME --recipe best-ml-1m --set model.dim=64

A line with the settings that differ from the recipe, the best validation NDCG@10 and the curve is
appended to `--out` (JSON lines). `--resume` continues from the checkpoints of the same name,
another day or on another machine. `ablations.py`, `defaults.py` and `initialization.py` run tables
of such trials.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bert4rec.config import load_config, resolve
from bert4rec.data.sources import open_data
from bert4rec.data.splits import SPLITS
from bert4rec.pipeline import RunOptions, evaluate_held_out, train
from bert4rec.training.checkpoint import RunDirectory
from bert4rec.training.run_log import RunLog
from bert4rec.training.setup import without_test

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "quality"
TRIALS = Path("runs/trials.jsonl")


def trials_of(path: Path) -> dict[str, dict[str, Any]]:
    """The finished trials by name; the last one counts."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {trial["name"]: trial for trial in map(json.loads, lines)}


def is_done(name: str, recipe: str, changes: list[str], trials: Path) -> bool:
    """Whether the trial has been run with these very settings."""
    trial = trials_of(trials).get(name)
    config = load_config(recipe, None, changes).model_dump(mode="json")
    return trial is not None and trial["config"] == config


def run_trial(data: str | Path, name: str, recipe: str, changes: list[str], trials: Path) -> None:
    """In a process of its own, unless it is done."""
    if is_done(name, recipe, changes, trials):
        return
    command = [sys.executable, __file__, str(data), name, "--recipe", recipe, "--out", str(trials)]
    command += [word for change in changes for word in ("--set", change)]
    subprocess.run(command, check=True)


def published_part(trial: dict[str, Any]) -> dict[str, Any]:
    """What of a trial goes into docs/: the recipe and its changes say the rest."""
    return {key: value for key, value in trial.items() if key not in ("curve", "config")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="as for `bert4rec train`")
    parser.add_argument("name", help="of this trial")
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--out", type=Path, default=TRIALS)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    config = load_config(arguments.recipe, None, arguments.overrides)
    if config.training.on_validation:
        parser.error("a trial is judged by the validation items: --set training.on_validation=false")
    sequences = open_data(arguments.data)
    run = resolve(config, sequences.n_items)
    split = without_test(SPLITS[run.data.split](sequences))
    folder = arguments.out.parent / "trials" / arguments.name
    folder.mkdir(parents=True, exist_ok=True)
    identity = {"config": run.model_dump(mode="json"), "data": sequences.fingerprint}
    started = time.time()
    with RunLog(folder, Console(stderr=True)) as log:
        directory = RunDirectory(folder, identity)
        model, progress = train(run, split, sequences.n_users, directory, log, RunOptions(resume=arguments.resume))
    evaluation = evaluate_held_out(model, split.validation, split, run)
    figures = {
        protocol: {name: round(metrics[name]["value"], 5) for name in ("HR@10", "NDCG@10")}
        for protocol, metrics in evaluation.metrics.items()
    }
    trial = {
        "name": arguments.name,
        "data": Path(arguments.data).name,
        "recipe": arguments.recipe,
        "changes": arguments.overrides,
        "config": config.model_dump(mode="json"),
        "validation": figures,
        "n_validation_users": len(split.validation),
        "seconds": round(progress.seconds, 1),
        "threads": torch.get_num_threads(),
        "started": round(started),
        "curve": progress.events,
    }
    with arguments.out.open("a") as file:
        file.write(json.dumps(trial) + "\n")
    print(f"{arguments.name}: {figures}, {progress.seconds / 60:.1f} min")


if __name__ == "__main__":
    main()
