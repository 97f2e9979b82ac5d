"""Draw the learning curves of the kept runs: validation NDCG@10 against minutes.

python benchmarks/quality/learning_curves.py docs/images/learning-curves.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from quality_page import DATA, TITLES, runs_of

COLOURS = {"both": "#2f6fde", "both-held": "#2f6fde", "sasrec+-held": "#e07b39"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8))
    for place, (data, title) in zip(axes, DATA.items(), strict=True):
        for name, runs in runs_of(data).items():
            points = [event for event in runs[0]["curve"] if "ndcg@10" in event]
            if not points:
                continue  # nothing was held out to validate on
            minutes = [event["seconds"] / 60 for event in points]
            ndcg = [event["ndcg@10"] for event in points]
            label = TITLES[name].replace("*", "").split(" (")[0].split(",")[0]
            n_cores = runs[0]["training"]["threads"]
            label += f", {n_cores} core{'s' * (n_cores > 1)}"
            place.plot(minutes, ndcg, "o-", color=COLOURS.get(name), markersize=3, label=label)
            if points[-1]["stage"] == "last-item":
                start = max(p["seconds"] for p in points if p["stage"] != "last-item") / 60
                place.axvline(start, color="#b8bcc6", linestyle=":", linewidth=1)
                place.text(start, 0, " second stage", color="#8590a6", va="bottom", fontsize=9)
        place.set_title(title, loc="left", weight="bold")
        place.set_xlabel("minutes, validations included")
        place.set_xlim(0)
        place.set_ylim(0)
        place.grid(axis="y", alpha=0.3)
        place.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.08))
    axes[0].set_ylabel("validation NDCG@10, all items ranked")
    figure.tight_layout()
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.picture, dpi=130)


if __name__ == "__main__":
    main()
