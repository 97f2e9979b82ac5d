"""The default recipe on the data sets at hand, beside SASRec+ of the same width and epochs.

    python benchmarks/quality/defaults.py ../shared/data     # some forty minutes on two cores

runs `trial.py` for every data set that is in the folder (its layout: DATA below), judges by the
validation items and writes defaults.json; what `--trials` already has is not run again, and what
is not asked for (`--data`, `--recipes`) stays as it is in that file.
"""

import argparse
import json
from pathlib import Path

from trial import RESULTS, TRIALS, published_part, run_trial, trials_of

OUT = RESULTS / "defaults.json"
DATA = {
    "MovieLens-1M": "ml-1m/ml-1m.txt.gz",
    "Beauty (54,542 items)": "beauty/beauty.txt.gz",
    "MovieLens-100k": "ml-100k/u.data",
    "Steam, a sample": "steam-sample/interactions.tsv.gz",
    "Beauty, 5-core": "amazon-beauty-5core/interactions.tsv.gz",
}
RECIPES = {"default": [], "sasrec+": ["model.dim=64", "model.max_len=100", "stages.0.patience=5", "loss.name=auto"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=Path, default=TRIALS)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    arguments = parser.parse_args()
    wanted = [(data, recipe) for data in arguments.data for recipe in arguments.recipes]
    for data, recipe in wanted:
        path = arguments.folder / DATA[data]
        if path.is_file():
            run_trial(path, name_of(data, recipe), recipe, RECIPES[recipe], arguments.trials)
    found = trials_of(arguments.trials)
    before = json.loads(OUT.read_text()) if OUT.is_file() else {}
    table: dict[str, dict[str, dict]] = {}
    for data in DATA:
        for recipe in RECIPES:
            name = name_of(data, recipe)
            if (data, recipe) in wanted and name in found:
                table.setdefault(data, {})[recipe] = published_part(found[name])
            elif (data, recipe) not in wanted and recipe in before.get(data, {}):
                table.setdefault(data, {})[recipe] = before[data][recipe]
    OUT.write_text(json.dumps(table, indent=1) + "\n")


def name_of(data: str, recipe: str) -> str:
    return f"{recipe}-{DATA[data].split('/')[0]}"


if __name__ == "__main__":
    main()
