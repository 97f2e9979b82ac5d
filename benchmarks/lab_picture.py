"""Keep a lab's report for the docs, and draw its picture for pages that cannot show HTML.

    python benchmarks/lab_picture.py runs/lab-ml-1m ml-1m

copies report.* to docs/results/lab-ml-1m (they hold aggregates only, and no path of a machine) and
draws docs/images/lab-ml-1m.png from report.json.
"""

import argparse
import shutil
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from pydantic import TypeAdapter

from bert4rec.lab.lab_result import LabResult

DOCS = Path(__file__).resolve().parents[1] / "docs"
FILES = ("report.json", "report.csv", "report.html")
OURS, RIVALS = "#2f6fde", "#6b7486"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lab", type=Path, help="directory of a lab")
    parser.add_argument("name", help="name under docs/results, without lab-")
    arguments = parser.parse_args()
    folder = DOCS / "results" / f"lab-{arguments.name}"
    folder.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        shutil.copy(arguments.lab / file, folder / file)
    result = TypeAdapter(LabResult).validate_json((folder / "report.json").read_text(encoding="utf-8"))
    draw(result, DOCS / "images" / f"lab-{arguments.name}.png")


def draw(result: LabResult, path: Path) -> None:
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    models = result.models[::-1]
    figure, axes = plt.subplots(figsize=(10, 0.9 + 0.29 * len(models)))
    for place, model in enumerate(models):
        score = model.score
        colour = OURS if model.name.startswith("bert4rec") else RIVALS
        axes.plot([score.low, score.high], [place, place], color=colour, linewidth=2)
        axes.plot(score.value, place, "o", color=colour)
        seconds, epochs = model.mean_cost("training_seconds"), model.mean_cost("epochs")
        minutes = "" if seconds is None or epochs is None else f"  ({seconds / 60:.0f} min)"
        text = f"{score.value:.3f}".lstrip("0") + minutes
        axes.text((score.high or score.value) + 0.002, place, text, va="center", fontsize=9)
    axes.set_yticks(range(len(models)), [model.title for model in models])
    axes.set_xlim(0, axes.get_xlim()[1] * 1.08)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("NDCG@10 over all items, 95 % interval over users, and training time")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
