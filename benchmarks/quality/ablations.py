"""Short trainings that each leave one thing out, judged on the validation items.

    python benchmarks/quality/ablations.py ml-1m ml-1m.txt.gz      # some half an hour on one core
    python benchmarks/quality/ablations.py beauty beauty.txt.gz    # some ten minutes per row

runs `trial.py` for every row of a table in docs/experiments/2026-11-quality.md and writes
ablations-NAME.json; rows that `--trials` already has with the same settings are not run again. With
`--only` the other rows stay as they are in that file.
"""

import argparse
import json
from pathlib import Path

from trial import RESULTS, TRIALS, is_done, published_part, run_trial, trials_of

SMALL = [  # of best-ml-1m
    "model.dim=64",
    "model.heads=2",
    "model.max_len=50",
    "stages.0.epochs=6",
    "stages.0.learning_rate=4e-3",
    "training.workers=1",
    "training.validate_every=6",
    "stages.1.epochs=3",
    "stages.1.learning_rate=2e-3",
]
ONE_STAGE = ["stages.1.epochs=0", "stages.0.epochs=9", "training.validate_every=9"]
SLOW = ["stages.0.learning_rate=1e-3", "stages.1.learning_rate=1e-3"]
CLOZE = ["stages.0.objective=cloze"]
PAPER_INITIALIZATION = ["model.initialization=paper"]
SASREC = [
    "model.dim=64",
    "model.max_len=50",
    "training.workers=1",
    "training.validation_users=none",
    "stages.0.patience=none",
    "stages.0.epochs=9",
    "training.validate_every=9",
]
Rows = dict[str, tuple[str, str, list[str]]]  # name: title, recipe, settings
ML_1M: Rows = {
    "as-it-is": ("BERT4Rec trained on prefixes", "best-ml-1m", SMALL),
    "bias-popularity": (
        "… an output bias that starts at popularity",
        "best-ml-1m",
        [*SMALL, "model.output_bias=popularity"],
    ),
    "init-paper": ("… the paper's initialization", "best-ml-1m", [*SMALL, *PAPER_INITIALIZATION]),
    "lr-1e-3": ("… learning rate 1e-3", "best-ml-1m", [*SMALL, *SLOW]),
    "batch-64": ("… batches of 64", "best-ml-1m", [*SMALL, "training.batch_size=64"]),
    "gain-3": ("… a softmax that starts 3 times as sharp", "best-ml-1m", [*SMALL, "model.output_gain=3"]),
    "windows": ("… older items, too, in windows side by side", "best-ml-1m", [*SMALL, "stages.0.window_stride=1"]),
    "layers-3": ("… three blocks", "best-ml-1m", [*SMALL, "model.layers=3"]),
    "cloze": ("… the Cloze objective in the first stage", "best-ml-1m", [*SMALL, *CLOZE]),
    "second-stage-end": (
        "… one query per history in the second stage",
        "best-ml-1m",
        [*SMALL, "stages.1.objective=last_item"],
    ),
    "no-second-stage": ("… no second stage, its epochs added to the first", "best-ml-1m", [*SMALL, *ONE_STAGE]),
    "paper": (
        "the paper's: Cloze, its initialization and 1e-3, no second stage",
        "best-ml-1m",
        [*SMALL, *CLOZE, *PAPER_INITIALIZATION, *SLOW, *ONE_STAGE],
    ),
    "causal": (
        "*BERT4Rec-causal*",
        "best-ml-1m",
        [*SMALL, "model.name=bert4rec-causal", *ONE_STAGE, "stages.1.bidirectional_prefix=false"],
    ),
    "sasrec-1e-3": (
        "SASRec+, learning rate 1e-3, batches of 64",
        "sasrec+",
        [*SASREC, "training.batch_size=64", "stages.0.learning_rate=1e-3"],
    ),
    "sasrec-b32": ("SASRec+, 1e-3, batches of 32", "sasrec+", [*SASREC, "stages.0.learning_rate=1e-3"]),
    "sasrec-b32-2e-3": ("SASRec+, 2e-3, batches of 32: its recipe", "sasrec+", SASREC),
    "sasrec-b32-4e-3": ("SASRec+, 4e-3, batches of 32", "sasrec+", [*SASREC, "stages.0.learning_rate=4e-3"]),
}
HELD = ["training.on_validation=false", "training.workers=1"]  # of best-beauty
SASREC_BEAUTY = [
    "model.dim=64",
    "model.max_len=50",
    "model.dropout=0.3",
    "training.workers=1",
    "training.batch_size=128",
    "stages.0.learning_rate=2e-3",
    "stages.0.epochs=12",
    "loss.name=sampled-softmax",
    "loss.negatives=popularity",
    "loss.n_negatives=2048",
    "training.validation_users=10000",
    "stages.0.patience=none",
]
BEAUTY: Rows = {
    "beauty": ("BERT4Rec trained on prefixes", "best-beauty", HELD),
    "beauty-bias-zero": ("… an output bias that starts at zero", "best-beauty", [*HELD, "model.output_bias=zero"]),
    "beauty-dropout-3": ("… dropout .3", "best-beauty", [*HELD, "model.dropout=0.3"]),
    "beauty-gain-1": ("… a softmax that starts even", "best-beauty", [*HELD, "model.output_gain=1"]),
    "beauty-uniform": ("… uniform negatives", "best-beauty", [*HELD, "loss.negatives=uniform"]),
    "beauty-sasrec": ("SASRec+, the same loss, rate and epochs", "sasrec+", SASREC_BEAUTY),
    "beauty-sasrec-1e-3": ("SASRec+, learning rate 1e-3", "sasrec+", [*SASREC_BEAUTY, "stages.0.learning_rate=1e-3"]),
    "beauty-sasrec-4e-3": ("SASRec+, learning rate 4e-3", "sasrec+", [*SASREC_BEAUTY, "stages.0.learning_rate=4e-3"]),
}
ROWS = {"ml-1m": ML_1M, "beauty": BEAUTY}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=ROWS)
    parser.add_argument("data", help="that data set, as for `bert4rec train`")
    parser.add_argument("--trials", type=Path, default=TRIALS)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="of the table; else all")
    arguments = parser.parse_args()
    rows, trials = ROWS[arguments.table], arguments.trials
    if unknown := set(arguments.only or ()) - set(rows):
        parser.error(f"{', '.join(unknown)}: the rows are {', '.join(rows)}")
    for name in arguments.only or rows:
        _, recipe, changes = rows[name]
        run_trial(arguments.data, name, recipe, changes, trials)
    out = RESULTS / f"ablations-{arguments.table}.json"
    before = json.loads(out.read_text()) if arguments.only and out.is_file() else []
    table = {row["name"]: row for row in before}
    found = trials_of(trials)
    for name, (title, recipe, changes) in rows.items():
        if is_done(name, recipe, changes, trials):
            table[name] = published_part(found[name]) | {"title": title}
    in_order = [table[name] for name in dict.fromkeys([*rows, *table]) if name in table]
    out.write_text(json.dumps(in_order, indent=1) + "\n")


if __name__ == "__main__":
    main()
