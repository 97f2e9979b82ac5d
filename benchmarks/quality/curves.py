"""Draw both learning curves: validation NDCG@10 against minutes of training.

python benchmarks/quality/curves.py docs/results/quality/time-to-quality.json PICTURE.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLOURS = {"ours": "#2f6fde", "rectools": "#e07b39"}
AIM_COLOUR = "#8590a6"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, help="JSON of time_to_quality.py")
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text(encoding="utf-8"))
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(9, 4.2))
    draw(axes, result)
    figure.tight_layout()
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.picture, dpi=130)


def draw(axes: Axes, result: dict[str, Any]) -> None:
    tools = {tool: found for tool, found in result["tools"].items() if found["curve"]}
    for tool, found in tools.items():
        draw_curve(axes, found, COLOURS[tool])
    last = max(f["curve"][-1]["training_seconds"] for f in tools.values()) / 60
    axes.axhline(result["aim"], color=AIM_COLOUR, linestyle="--", linewidth=1)
    edge = 1.22 * last  # room for the names at the ends of the lines
    text = f"aim {result['aim']:g}".replace("0.", ".")
    axes.text(edge, result["aim"], text, va="bottom", ha="right", color=AIM_COLOUR)
    axes.set_xlim(0, edge)
    axes.set_ylim(0)
    threads = max(found["about"]["threads"] for found in tools.values())
    cores = f"{threads} CPU core{'s' * (threads > 1)}"
    axes.set_xlabel(f"minutes of training on {cores}, validations not counted")
    axes.set_ylabel("validation NDCG@10, all items ranked")
    axes.grid(axis="y", alpha=0.3)


def draw_curve(axes: Axes, found: dict[str, Any], colour: str) -> None:
    minutes = [point["training_seconds"] / 60 for point in found["curve"]]
    ndcg = [point["ndcg@10"] for point in found["curve"]]
    axes.plot(minutes, ndcg, color=colour, marker="o", markersize=2.5, linewidth=1.6)
    about, best, reached = found["about"], found["best_ndcg@10"], found["minutes_to_aim"]
    recipe = about.get("recipe")
    name = about["tool"] + (f", {recipe}" if recipe else "'s BERT4Rec")
    at_the_end = f"best {best:.3f}".replace("0.", ".")
    if reached is not None:
        at = next(y for x, y in zip(minutes, ndcg, strict=True) if abs(x - reached) < 0.01)
        axes.plot(reached, at, "o", color=colour, markersize=8)
        at_the_end += f", aim after {reached:.1f} minutes"
    axes.annotate(
        f"{name}\n{at_the_end}",
        (minutes[-1], ndcg[-1]),
        xytext=(0, -12),
        textcoords="offset points",
        color=colour,
        va="top",
        weight="normal" if reached is None else "bold",
    )


if __name__ == "__main__":
    main()
