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
