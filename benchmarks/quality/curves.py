"""Draw validation NDCG@10 against minutes, from the JSON files of docs/results/quality.

    python benchmarks/quality/curves.py

draws docs/images/learning-curves.png, of the kept runs, and docs/images/time-to-quality.png, ours
and RecTools'.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from quality_page import DATA, DOCS, RESULTS, TITLES, runs_of

RUN_COLOURS = {"both": "#2f6fde", "both-held": "#2f6fde", "sasrec+-held": "#e07b39"}
COLOURS = {"ours": "#2f6fde", "rectools": "#e07b39"}
AIM_COLOUR = "#8590a6"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, default=DOCS / "images")
    arguments = parser.parse_args()
    arguments.images.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, grid = plt.subplots(1, 2, figsize=(11, 3.8))
    for axes, (data, title) in zip(grid, DATA.items(), strict=True):
        draw_runs(axes, data, title)
    grid[0].set_ylabel("validation NDCG@10, all items ranked")
    figure.tight_layout()
    figure.savefig(arguments.images / "learning-curves.png", dpi=130)
    plt.rcParams.update({"font.size": 11})
    figure, axes = plt.subplots(figsize=(9, 4.2))
    draw(axes, json.loads((RESULTS / "time-to-quality.json").read_text(encoding="utf-8")))
    figure.tight_layout()
    figure.savefig(arguments.images / "time-to-quality.png", dpi=130)


def draw_runs(axes: Axes, data: str, title: str) -> None:
    """The first seed of every kept run on one data set."""
    for name, runs in runs_of(data).items():
        points = [event for event in runs[0]["curve"] if "ndcg@10" in event]
        if not points:
            continue  # nothing was held out to validate on
        minutes = [event["seconds"] / 60 for event in points]
        ndcg = [event["ndcg@10"] for event in points]
        label = TITLES[name].replace("*", "").split(" (")[0].split(",")[0]
        n_cores = runs[0]["training"]["threads"]
        label += f", {n_cores} core{'s' * (n_cores > 1)}"
        axes.plot(minutes, ndcg, "o-", color=RUN_COLOURS.get(name), markersize=3, label=label)
        first = [event for event in points if event["stage"] == points[0]["stage"]]
        if len(first) < len(points):
            start = first[-1]["seconds"] / 60
            axes.axvline(start, color="#b8bcc6", linestyle=":", linewidth=1)
            axes.text(start, 0, " second stage", color="#8590a6", va="bottom", fontsize=9)
    axes.set_title(title, loc="left", weight="bold")
    axes.set_xlabel("minutes, validations included")
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.08))


def draw(axes: Axes, result: dict[str, Any]) -> None:
    tools = {tool: found for tool, found in result["tools"].items() if found["curve"]}
    for tool, found in tools.items():
        draw_curve(axes, found, COLOURS[tool])
    last = max(found["curve"][-1]["training_seconds"] for found in tools.values()) / 60
    for tool, found in tools.items():
        name_curve(axes, found, COLOURS[tool], last)
    axes.axhline(result["aim"], color=AIM_COLOUR, linestyle="--", linewidth=1)
    text = f"aim {result['aim']:g}".replace("0.", ".")
    axes.text(last / 2, result["aim"], text, va="bottom", ha="center", color=AIM_COLOUR)
    axes.set_xlim(0, 1.04 * last)
    highest = max(result["aim"], *(found["best_ndcg@10"] for found in tools.values()))
    axes.set_ylim(0, 1.25 * highest)  # with room for the names at the ends of the lines
    threads = max(found["about"]["threads"] for found in tools.values())
    cores = f"{threads} CPU core{'s' * (threads > 1)}"
    axes.set_xlabel(f"minutes of training on {cores}, validations not counted")
    axes.set_ylabel("validation NDCG@10, all items ranked")
    axes.grid(axis="y", alpha=0.3)


def draw_curve(axes: Axes, found: dict[str, Any], colour: str) -> None:
    minutes = [point["training_seconds"] / 60 for point in found["curve"]]
    ndcg = [point["ndcg@10"] for point in found["curve"]]
    axes.plot(minutes, ndcg, color=colour, marker="o", markersize=2.5, linewidth=1.6)


def name_curve(axes: Axes, found: dict[str, Any], colour: str, last: float) -> None:
    """Whose curve it is and what it reached, above its end."""
    about, end, reached = found["about"], found["curve"][-1], found["minutes_to_aim"]
    minutes = end["training_seconds"] / 60
    recipe = about.get("recipe")
    name = f"{about['tool']}, {recipe}" if recipe else f"{about['tool']}' BERT4Rec"
    best = f"best {found['best_ndcg@10']:.3f}".replace("0.", ".")
    if reached is not None:
        points = {point["training_seconds"]: point["ndcg@10"] for point in found["curve"]}
        at = min(points, key=lambda seconds: abs(seconds / 60 - reached))
        axes.plot(at / 60, points[at], "o", color=colour, markersize=8)
    axes.annotate(
        f"{name}\n" + (f"{best} so far" if reached is None else f"aim after {reached:.1f} minutes"),
        (minutes, end["ndcg@10"]),
        xytext=(0, 9),
        textcoords="offset points",
        color=colour,
        va="bottom",
        ha="left" if minutes < last / 2 else "right",
        weight="normal" if reached is None else "bold",
    )


if __name__ == "__main__":
    main()
