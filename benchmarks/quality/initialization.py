"""Which initialization of BERT4Rec is best: three seeds each, judged on the validation items.

    python benchmarks/quality/initialization.py ../shared/data     # some four hours on one core

runs `trial.py` with `model.initialization` = `local` and `paper` in short runs on ML-1M, at length
50 and 200, and with the recipe of Beauty, and writes docs/results/quality/initialization.json.
Trials that `--trials` already has with the same settings are not run again; `--only` chooses some
cases.
"""

import argparse
import json
import subprocess
from pathlib import Path
from statistics import mean
from typing import Any

from ablations import HELD, SMALL
from trial import RESULTS, TRIALS, run_trial, trials_of

OUT = RESULTS / "initialization.json"
INITIALIZATIONS = ("local", "paper")
SEEDS = (0, 1, 2)
KEPT = ("name", "seed", "initialization", "recipe", "changes", "validation", "seconds")
CASES: dict[str, tuple[str, str, list[str]]] = {  # data, recipe, settings
    "ml1m": ("ml-1m/ml-1m.txt.gz", "best-ml-1m", SMALL),
    "ml1m200": ("ml-1m/ml-1m.txt.gz", "best-ml-1m", [*SMALL, "model.max_len=200"]),
    "beauty": ("beauty/beauty.txt.gz", "best-beauty", HELD),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with ml-1m/ml-1m.txt.gz, beauty/beauty.txt.gz")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--trials", type=Path, default=TRIALS)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in SEEDS:
        for case in arguments.only:
            data, recipe, settings = CASES[case]
            for chosen in INITIALIZATIONS:
                name = f"{case}-{chosen}-{seed}"
                changes = [*settings, f"model.initialization={chosen}", f"training.seed={seed}"]
                run_trial(arguments.folder / data, name, recipe, changes, arguments.trials)
                trial = trials_of(arguments.trials)[name]
                trial |= {"seed": seed, "initialization": chosen}
                rows.append({key: trial[key] for key in KEPT})
                write(rows)
    for case in arguments.only:
        for chosen in INITIALIZATIONS:
            found = [row for row in rows if row["name"].startswith(f"{case}-{chosen}-")]
            values = [row["validation"]["full"]["NDCG@10"] for row in found]
            print(f"{case:<8} {chosen:<6} NDCG@10 {mean(values):.4f}", *values)


def write(rows: list[dict[str, Any]]) -> None:
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS)
    result = {"revision": revision.stdout.strip(), "note": "", "trials": rows}
    OUT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
