"""Keep the results of a run for the docs: its settings, metrics and learning curve, and a picture.

    python benchmarks/publish_run.py runs/ml-1m ml-1m

writes docs/results/ml-1m/*.json and docs/images/ml-1m.png. `results_page.py` makes tables of them.
"""

import argparse
import json
import shutil
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parents[1] / "docs"
NAMES = {"popularity": "popularity", "markov": "Markov chain", "run": "BERT4Rec"}
STAGE_COLOURS = ("#2f6fde", "#e07b39", "#3a9a5c", "#8a5cc9")
COLOURS = {"popularity": "#b8bcc6", "markov": "#8590a6", "run": "#2f6fde"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="directory of a finished training")
    parser.add_argument("name", help="name under docs/results")
    parser.add_argument("--title", help="title of the picture", default=None)
    arguments = parser.parse_args()
    folder = DOCS / "results" / arguments.name
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "metrics.json", "log.jsonl"):
        shutil.copy(arguments.run / name, folder / name)
    about = json.loads((arguments.run / "about.json").read_text())
    about["data"].pop("directory")  # a path of one machine
    (folder / "about.json").write_text(json.dumps(about, indent=2) + "\n")
    for baseline in (arguments.run / "baselines").iterdir():
        shutil.copy(baseline / "metrics.json", folder / f"{baseline.name}.json")
    draw(folder, arguments.title or arguments.name, DOCS / "images" / f"{arguments.name}.png")


def metrics_of(folder: Path) -> dict[str, dict]:
    files = {"popularity": "popularity.json", "markov": "markov.json", "run": "metrics.json"}
    return {k: json.loads((folder / file).read_text())["metrics"] for k, file in files.items()}


def draw(folder: Path, title: str, path: Path) -> None:
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (bars, curve) = plt.subplots(1, 2, figsize=(11, 3.8), width_ratios=(1, 1.25))
    for place, (key, metrics) in enumerate(metrics_of(folder).items()):
        value = metrics["full"]["NDCG@10"]
        spread = [[value["value"] - value["low"]], [value["high"] - value["value"]]]
        bars.barh(place, value["value"], color=COLOURS[key], xerr=spread, ecolor="#444", capsize=3)
        bars.text(value["high"] * 1.02 + 0.001, place, f"{value['value']:.3f}", va="center")
    names = dict(NAMES)
    if json.loads((folder / "config.json").read_text())["model"]["name"] == "bert4rec-causal":
        names["run"] = "BERT4Rec-causal"
    bars.set_yticks(range(3), list(names.values()))
    bars.set_xlabel("NDCG@10 on test items, all items ranked")
    bars.set_xlim(0, bars.get_xlim()[1] * 1.12)
    bars.set_title(title, loc="left", weight="bold")
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    stages = dict.fromkeys(event["stage"] for event in events)
    for stage, colour in zip(stages, STAGE_COLOURS, strict=False):
        points = [(e["seconds"] / 60, e["ndcg@10"]) for e in events if e["stage"] == stage]
        if points:
            curve.plot(*zip(*points, strict=True), color=colour, marker="o", ms=3, label=stage)
    threads = json.loads((folder / "about.json").read_text())["training"]["threads"]
    curve.set_xlabel(f"minutes on {threads} CPU cores")
    curve.set_ylabel("validation NDCG@10")
    curve.set_ylim(0)
    curve.legend(frameon=False, title="stage")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
