"""What each stage of a training reaches, and what the second one gains, pair by pair of users.

    bert4rec train ml-1m.txt.gz --recipe best-ml-1m --set training.keep_stages=true --out runs/best
    python benchmarks/quality/stages.py runs/best ml-1m.txt.gz docs/results/quality/ml-1m.json

evaluates the weights at the end of each stage on the validation and on the test items. The weights
of the first stage are also asked with items that see those before them only, as they were trained
(`sees = before`: no longer the paper's network).
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from bert4rec.config import Config
from bert4rec.data.sources import open_data
from bert4rec.data.splits import Split
from bert4rec.evaluation.compare import compare
from bert4rec.models import LEARNED
from bert4rec.pipeline import evaluate_questions, save_evaluation, split_of
from bert4rec.recommender import Recommender

METRICS = ("HR@10", "NDCG@10")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="directory of a finished training")
    parser.add_argument("data", help="as for `bert4rec train`")
    parser.add_argument("out", type=Path)
    parser.add_argument("--first", default="next-item", help="name of the first stage")
    parser.add_argument("--second", default="last-item", help="name of the second stage")
    parser.add_argument("--users", type=int, help="ask this many users, drawn once; else all")
    return parser.parse_args()


def evaluated(
    weights: Path, config: Config, split: Split, sequences: Any, out: Path
) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by questions and protocol; the ranks of every user go to `out`."""
    model = LEARNED[config.model.name](split.n_items, config.model)
    model.load_state_dict(load_file(weights))
    figures: dict[str, Any] = {}
    for name, questions in (("validation", split.validation), ("test", split.test)):
        evaluation = evaluate_questions(model, questions, split, config)
        save_evaluation(evaluation, sequences, out / name)
        figures[name] = {
            protocol: {metric: dict(metrics[metric]) for metric in METRICS}
            for protocol, metrics in evaluation.metrics.items()
        }
    return figures


def main() -> None:
    arguments = parse_arguments()
    run, first, second = arguments.run, arguments.first, arguments.second
    sequences = open_data(arguments.data)
    recommender = Recommender.load(run)
    config, split = recommender.config, split_of(recommender, sequences)
    if arguments.users is not None:
        asked = config.evaluation.model_copy(update={"users": arguments.users})
        config = config.model_copy(update={"evaluation": asked})
    causal = config.model.model_copy(update={"sees": "before"})
    runs = {
        first: (first, config),
        second: (second, config),
        f"{first}, sees before": (first, config.model_copy(update={"model": causal})),
    }
    folders = {name: run / "stages" / name.replace(", ", "-").replace(" ", "-") for name in runs}
    found = {}
    for name, (stage, settings) in runs.items():
        weights = run / f"{stage}.safetensors"
        if weights.is_file():
            found[name] = evaluated(weights, settings, split, sequences, folders[name])
            print(name, json.dumps(found[name]["validation"]["full"]))
    gains = {
        f"{b} against {a}": {
            questions: {
                protocol: [
                    asdict(difference)
                    for difference in compare(
                        folders[a] / questions, folders[b] / questions, METRICS, protocol
                    ).differences
                ]
                for protocol in ("full", "popularity")
            }
            for questions in ("validation", "test")
        }
        for a, b in ((first, second), (f"{first}, sees before", second))
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
        for questions, protocols in gain.items():
            ndcg = protocols["full"][1]
            print(
                f"{name}, {questions}: NDCG@10 {ndcg['a']:.4f} to {ndcg['b']:.4f}, difference "
                f"{ndcg['difference']:+.4f} ({ndcg['low']:+.4f} to {ndcg['high']:+.4f})"
            )


if __name__ == "__main__":
    main()
