"""Short trainings that each leave one thing out, judged on the validation items.

    python benchmarks/quality/ablations.py ml-1m ml-1m.txt.gz      # some half an hour on one core
    python benchmarks/quality/ablations.py beauty beauty.txt.gz    # some ten minutes a row

runs `trial.py` for every row of a table in docs/quality.md and writes ablations-NAME.json; rows
that `--trials` already has with the same settings are not run again. With `--only` the other rows
stay as they are in that file.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from bert4rec.config import load_config

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[1] / "docs" / "results" / "quality"
SMALL = [  # of best-ml-1m
    "model.dim=64",
    "model.heads=2",
    "model.max_len=50",
    "training.epochs=6",
    "training.learning_rate=4e-3",
    "training.workers=1",
    "training.validate_every=6",
    "second_stage.epochs=3",
    "second_stage.learning_rate=2e-3",
]
ONE_STAGE = ["second_stage.epochs=0", "training.epochs=9", "training.validate_every=9"]
SLOW = ["training.learning_rate=1e-3", "second_stage.learning_rate=1e-3"]
CLOZE = ["training.next_item_share=0"]
PAPERS_START = ["model.init=paper"]
SASREC = [
    "model.dim=64",
    "model.max_len=50",
    "training.workers=1",
    "training.validation_users=none",
    "training.patience=none",
    "training.epochs=9",
    "training.validate_every=9",
]
Rows = dict[str, tuple[str, str, list[str]]]  # name: title, recipe, settings
ML_1M: Rows = {
    "as-it-is": ("BERT4Rec trained on prefixes", "best-ml-1m", SMALL),
    "bias-popularity": (
        "… a bias that starts at popularity",
        "best-ml-1m",
        [*SMALL, "model.bias_init=popularity"],
    ),
    "init-identity": (
        "… attention that starts with all items alike",
        "best-ml-1m",
        [*SMALL, "model.init=identity"],
    ),
    "init-paper": ("… weights that start as the paper's", "best-ml-1m", [*SMALL, *PAPERS_START]),
    "lr-1e-3": ("… learning rate 1e-3", "best-ml-1m", [*SMALL, *SLOW]),
    "batch-64": ("… batches of 64", "best-ml-1m", [*SMALL, "training.batch_size=64"]),
    "gain-3": (
        "… a softmax that starts 3 times as sharp",
        "best-ml-1m",
        [*SMALL, "model.head_gain=3"],
    ),
    "windows": (
        "… older items, too, in windows side by side",
        "best-ml-1m",
        [*SMALL, "training.window_step=1"],
    ),
    "layers-3": ("… three blocks", "best-ml-1m", [*SMALL, "model.layers=3"]),
    "cloze": ("… the Cloze task in the first stage", "best-ml-1m", [*SMALL, *CLOZE]),
    "second-stage-end": (
        "… one question a history in the second stage",
        "best-ml-1m",
        [*SMALL, "second_stage.asks=end"],
    ),
    "no-second-stage": (
        "… no second stage, its epochs added to the first",
        "best-ml-1m",
        [*SMALL, *ONE_STAGE],
    ),
    "paper": (
        "the paper's: Cloze task, start and 1e-3, no second stage",
        "best-ml-1m",
        [*SMALL, *CLOZE, *PAPERS_START, *SLOW, *ONE_STAGE],
    ),
    "sees-before": (
        "*BERT4Rec-causal*",
        "best-ml-1m",
        [*SMALL, "model.sees=before", *ONE_STAGE],
    ),
    "sasrec-1e-3": (
        "SASRec+, learning rate 1e-3, batches of 64",
        "sasrec+",
        [*SASREC, "training.batch_size=64", "training.learning_rate=1e-3"],
    ),
    "sasrec-b32": (
        "SASRec+, 1e-3, batches of 32",
        "sasrec+",
        [*SASREC, "training.learning_rate=1e-3"],
    ),
    "sasrec-b32-2e-3": ("SASRec+, 2e-3, batches of 32: its recipe", "sasrec+", SASREC),
    "sasrec-b32-4e-3": (
        "SASRec+, 4e-3, batches of 32",
        "sasrec+",
        [*SASREC, "training.learning_rate=4e-3"],
    ),
}
HELD = ["training.on_validation=false", "training.workers=1"]  # of best-beauty
SASREC_BEAUTY = [
    "model.dim=64",
    "model.max_len=50",
    "model.dropout=0.3",
    "training.workers=1",
    "training.batch_size=128",
    "training.learning_rate=2e-3",
    "training.epochs=12",
    "training.loss=sampled-softmax",
    "training.negatives=popularity",
    "training.n_negatives=2048",
    "training.validation_users=10000",
    "training.patience=none",
]
BEAUTY: Rows = {
    "beauty": ("BERT4Rec trained on prefixes", "best-beauty", HELD),
    "beauty-bias-zero": (
        "… a bias that starts at zero",
        "best-beauty",
        [*HELD, "model.bias_init=zero"],
    ),
    "beauty-identity": (
        "… attention that starts with all items alike",
        "best-beauty",
        [*HELD, "model.init=identity"],
    ),
    "beauty-dropout-3": ("… dropout .3", "best-beauty", [*HELD, "model.dropout=0.3"]),
    "beauty-gain-1": ("… a softmax that starts even", "best-beauty", [*HELD, "model.head_gain=1"]),
    "beauty-uniform": (
        "… negatives drawn evenly",
        "best-beauty",
        [*HELD, "training.negatives=uniform"],
    ),
    "beauty-sasrec": ("SASRec+, the same loss, rate and epochs", "sasrec+", SASREC_BEAUTY),
    "beauty-sasrec-1e-3": (
        "SASRec+, learning rate 1e-3",
        "sasrec+",
        [*SASREC_BEAUTY, "training.learning_rate=1e-3"],
    ),
    "beauty-sasrec-4e-3": (
        "SASRec+, learning rate 4e-3",
        "sasrec+",
        [*SASREC_BEAUTY, "training.learning_rate=4e-3"],
    ),
}
ROWS = {"ml-1m": ML_1M, "beauty": BEAUTY}


def finished(path: Path) -> dict[str, dict]:
    lines = path.read_text().splitlines() if path.is_file() else []
    return {trial["name"]: trial for trial in map(json.loads, lines)}


def is_done(name: str, recipe: str, changes: list[str], trials: Path) -> bool:
    trial = finished(trials).get(name)
    config = load_config(recipe, None, changes).model_dump(mode="json")
    return trial is not None and trial["config"] == config


def kept(trial: dict) -> dict:
    """What of a trial goes into docs/: the recipe and its changes say the rest."""
    return {key: value for key, value in trial.items() if key not in ("curve", "config")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=ROWS)
    parser.add_argument("data", help="that data set, as for `bert4rec train`")
    parser.add_argument("--trials", type=Path, default=Path("runs/trials.jsonl"))
    parser.add_argument("--only", nargs="+", metavar="ROW", help="of the table; else all")
    arguments = parser.parse_args()
    rows = ROWS[arguments.table]
    if unknown := set(arguments.only or ()) - set(rows):
        parser.error(f"{', '.join(unknown)}: the rows are {', '.join(rows)}")
    for name in arguments.only or rows:
        _, recipe, changes = rows[name]
        if is_done(name, recipe, changes, arguments.trials):
            continue
        command = [sys.executable, str(HERE / "trial.py"), arguments.data, name]
        command += ["--recipe", recipe, "--out", str(arguments.trials)]
        command += [word for change in changes for word in ("--set", change)]
        subprocess.run(command, check=True)
    out = OUT / f"ablations-{arguments.table}.json"
    before = json.loads(out.read_text()) if arguments.only and out.is_file() else []
    table = {row["name"]: row for row in before}
    found = finished(arguments.trials)
    for name, (title, recipe, changes) in rows.items():
        if is_done(name, recipe, changes, arguments.trials):
            table[name] = kept(found[name]) | {"title": title}
    in_order = [table[name] for name in rows if name in table]
    OUT.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(in_order, indent=1) + "\n")


if __name__ == "__main__":
    main()
