"""How much faster two processes train than one process with two threads, on the demo data.

Each round trains for some seconds by one process and by two (`--processes 2`), in turn, so that a
noisy machine is as noisy for both; the ratio of a round is what counts. Run it alone:

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


def sequences_per_second(n_processes: int, recipe: str, data: str, epochs: int) -> float:
    """Of training steps alone: what the log says between the first validation and the last."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"training.epochs={epochs}", "second_stage.epochs=0", "validate_every=1"]
        settings += ["validation_users=1", "evaluation.users=1", "evaluation.bootstrap=1"]
        settings += [f"shards={2}", "patience=none"]
        words = [word for each in settings for word in ("--set", each)]
        command = [sys.executable, "-m", "bert4rec", "train", data, "--recipe", recipe, *words]
        command += ["--out", f"{folder}/run", "--no-baselines", "--processes", str(n_processes)]
        subprocess.run(command, check=True, capture_output=True)
        log = [
            json.loads(line) for line in Path(f"{folder}/run/log.jsonl").read_text().splitlines()
        ]
    first, last = log[0], log[-1]
    n_sequences = last["sequences_per_second"] * last["seconds"]
    n_sequences -= first["sequences_per_second"] * first["seconds"]
    return float(n_sequences / (last["seconds"] - first["seconds"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    rounds = []
    for number in range(given.rounds):
        pair = [
            sequences_per_second(n, given.recipe, given.data, given.epochs)
            for n in ((1, 2) if number % 2 else (2, 1))
        ]
        two, one = pair if number % 2 == 0 else reversed(pair)
        rounds.append({"one_process": round(one), "two_processes": round(two)})
        print(f"round {number + 1}: {one:,.0f} and {two:,.0f} sequences/s, {two / one:.2f}x")
    ratios = [each["two_processes"] / each["one_process"] for each in rounds]
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": Path(given.data).name,
        "recipe": given.recipe,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "rounds": rounds,
        "median_ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"median {result['median_ratio']}x; saved to {given.out}")


if __name__ == "__main__":
    main()
