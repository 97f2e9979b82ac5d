"""What each stage of a training reaches, and what the second one gains, paired by user.

    bert4rec train ml-1m.txt.gz --recipe best-ml-1m --keep-stages --out runs/best
    python benchmarks/quality/stages.py runs/best ml-1m.txt.gz docs/results/quality/ml-1m.json

evaluates the weights at the end of each stage on the validation and on the test items. The weights
of the first stage are also evaluated as BERT4Rec-causal, in which an item sees only those before
it, as in the training of that stage (no longer the paper's network).
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from bert4rec.config import RunConfig, override_config, resolve
from bert4rec.data.sequences import Sequences
from bert4rec.data.sources import open_data
from bert4rec.data.splits import Split
from bert4rec.evaluation.compare import compare
from bert4rec.pipeline import evaluate_held_out, save_evaluation, split_of
from bert4rec.recommender import Recommender
from bert4rec.training.setup import build_model

METRICS = ("HR@10", "NDCG@10")
FIRST, SECOND, FIRST_CAUSAL = "stage-0", "stage-1", "stage-0, causal"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="directory of a finished training")
    parser.add_argument("data", help="as for `bert4rec train`")
    parser.add_argument("out", type=Path)
    parser.add_argument("--users", type=int, help="evaluate this many, drawn once; else all")
    return parser.parse_args()


def evaluate_stage(weights: Path, config: RunConfig, split: Split, sequences: Sequences, out: Path) -> dict[str, Any]:
    """Figures by held-out items and protocol; the ranks of every user go to `out`."""
    model = build_model(config, split.n_items, sequences.n_users)
    model.load_state_dict(load_file(weights))
    figures: dict[str, Any] = {}
    for name, held_out in (("validation", split.validation), ("test", split.test)):
        evaluation = evaluate_held_out(model, held_out, split, config)
        save_evaluation(evaluation, sequences, out / name)
        figures[name] = {
            protocol: {metric: dict(metrics[metric]) for metric in METRICS}
            for protocol, metrics in evaluation.metrics.items()
        }
    return figures


def causal(config: RunConfig) -> RunConfig:
    """The same model with items that see only those before them; its stages are not needed."""
    values = config.model_dump() | {"stages": []}
    values["model"] |= {"name": "bert4rec-causal"}
    return RunConfig.model_validate(values)


def main() -> None:
    arguments = parse_arguments()
    sequences = open_data(arguments.data)
    recommender = Recommender.load(arguments.run)
    config, split = recommender.config, split_of(recommender, sequences)
    if arguments.users is not None:
        limited = override_config(config, [f"evaluation.users={arguments.users}"])
        config = resolve(limited, split.n_items)
    found = {}
    for name, stage, settings in (
        (FIRST, FIRST, config),
        (SECOND, SECOND, config),
        (FIRST_CAUSAL, FIRST, causal(config)),
    ):
        weights = arguments.run / f"{stage}.safetensors"
        if weights.is_file():
            found[name] = evaluate_stage(weights, settings, split, sequences, folder_of(arguments.run, name))
            print(name, json.dumps(found[name]["validation"]["full"]))
    gains = {
        f"{b} against {a}": {
            held_out: {
                protocol: [
                    asdict(difference)
                    for difference in compare(
                        *(folder_of(arguments.run, each) / held_out for each in (a, b)), METRICS, protocol
                    ).differences
                ]
                for protocol in ("full", "popularity")
            }
            for held_out in ("validation", "test")
        }
        for a, b in ((FIRST, SECOND), (FIRST_CAUSAL, SECOND))
        if a in found and b in found
    }
    result = {
        "data": Path(arguments.data).name,
        "recipe": config.model_dump(mode="json"),
        "training": recommender.about["training"],
        "users": arguments.users,
        "stages": found,
        "gains": gains,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, gain in gains.items():
        for held_out, protocols in gain.items():
            ndcg = protocols["full"][1]
            print(
                f"{name}, {held_out}: NDCG@10 {ndcg['a']:.4f} to {ndcg['b']:.4f}, difference "
                f"{ndcg['difference']:+.4f} ({ndcg['low']:+.4f} to {ndcg['high']:+.4f})"
            )


def folder_of(run: Path, name: str) -> Path:
    return run / "stages" / name.replace(", ", "-")


if __name__ == "__main__":
    main()
