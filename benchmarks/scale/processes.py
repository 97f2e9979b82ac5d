"""How fast two processes train against one, on the demo data with the same global batch.

One process is timed in two ways: with two threads of torch, which split every operation between
them, and as we train by default, with two workers that each compute whole microbatches. Each
round times all three in turn, so that a noisy machine is as noisy for all; the ratios of a round
are what counts. Run it alone:

    python benchmarks/scale/processes.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch

OUT = Path(__file__).parents[2] / "docs" / "results" / "scale" / "processes.json"


KINDS = {
    "one_process_two_torch_threads": (1, ["training.workers=1"]),
    "one_process_two_workers": (1, []),
    "two_processes": (2, []),
}


def sequences_per_second(kind: str, batch_size: int, recipe: str, data: str, epochs: int) -> float:
    """Of training steps alone: what the log says between the first validation and the last."""
    n_processes, own = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"stages.0.epochs={epochs}", "stages.0.patience=none", "stages.1.epochs=0"]
        settings += ["training.validate_every=1", "training.validation_users=1"]
        settings += [f"training.batch_size={batch_size}", "evaluation.users=1", *own]
        words = [word for each in settings for word in ("--set", each)]
        command = [sys.executable, "-m", "bert4rec", "train", data, "--recipe", recipe, *words]
        command += ["--out", f"{folder}/run", "--no-baselines", "--processes", str(n_processes)]
        subprocess.run(command, check=True, capture_output=True)
        log = [json.loads(line) for line in Path(f"{folder}/run/log.jsonl").read_text().splitlines()]
    first, last = log[0], log[-1]
    n_sequences = last["sequences_per_second"] * last["seconds"]
    n_sequences -= first["sequences_per_second"] * first["seconds"]
    return float(n_sequences / (last["seconds"] - first["seconds"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=256, help="of all processes together")
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    rounds = []
    for number in range(given.rounds):
        order = list(KINDS)[number % 3 :] + list(KINDS)[: number % 3]
        options = (given.batch_size, given.recipe, given.data, given.epochs)
        found = {kind: round(sequences_per_second(kind, *options)) for kind in order}
        rounds.append({kind: found[kind] for kind in KINDS})
        print(f"round {number + 1}: {rounds[-1]}")
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": Path(given.data).name,
        "recipe": given.recipe,
        "batch_size": given.batch_size,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "rounds": rounds,
    }
    for kind in list(KINDS)[:2]:
        ratios = sorted(each["two_processes"] / each[kind] for each in rounds)
        result[f"two_processes_over_{kind}"] = {
            "median": round(statistics.median(ratios), 2),
            "lowest": round(ratios[0], 2),
            "highest": round(ratios[-1], 2),
        }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
