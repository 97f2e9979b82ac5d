"""Draw docs/images/speed.png from docs/results/speed.json: `make bench` does it at its end."""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from summary import COLUMNS, NAMES, OURS, shown

DOCS = Path(__file__).resolve().parents[2] / "docs"
OURS_COLOUR, PEER_COLOUR = "#2f6fde", "#b8bcc6"


def draw_bars(axes: plt.Axes, tools: dict[str, dict[str, float]], column: str) -> None:
    """A bar a tool, ours on top; a tool without a figure says so instead of looking fast."""
    names = [tool for tool in NAMES if tool in tools]
    values = [tools[tool].get(column) for tool in names]
    longest = max((value for value in values if value is not None), default=1.0)
    for place, (tool, value) in enumerate(zip(names, values, strict=True)):
        ours = tool == OURS
        axes.barh(place, value or 0, color=OURS_COLOUR if ours else PEER_COLOUR, height=0.72)
        axes.text(
            (value or 0) + longest * 0.02, place, shown(column, value), va="center", weight="bold" if ours else "normal"
        )
    axes.set_yticks(range(len(names)), [NAMES[tool] for tool in names])
    for label, tool in zip(axes.get_yticklabels(), names, strict=True):
        label.set_weight("bold" if tool == OURS else "normal")
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.25)
    axes.set_xticks([])


def draw(result: dict, path: Path) -> None:
    plt.rcParams.update({"font.size": 11, "figure.facecolor": "white"})
    shapes = list(result["best"])
    rows, columns = len(shapes), len(COLUMNS)
    figure, grid = plt.subplots(rows, columns, figsize=(14, 1 + 2.6 * rows), squeeze=False)
    for line, shape in zip(grid, shapes, strict=True):
        about = result["shapes"][shape]
        for axes, (column, (title, _, _, more_is_better)) in zip(line, COLUMNS.items(), strict=True):
            draw_bars(axes, result["best"][shape], column)
            axes.spines[["top", "right", "bottom"]].set_visible(False)
            axes.tick_params(axis="y", length=0, labelleft=axes is line[0])
            better = "more" if more_is_better else "less"
            axes.set_title(f"{title}\n({better} is better)", fontsize=11, loc="left")
        kind = "" if about["real"] else ", generated"
        where = f"{shape}{kind}: {about['n_items']:,} items, up to {about['max_len']} a history"
        line[0].annotate(where, (0, 1.32), xycoords="axes fraction", fontsize=12, weight="bold", ha="left")
    settings, machine = result["settings"], result["machine"]
    figure.text(
        0.01,
        0.01,
        f"{machine['cpu']}, {settings['threads']} threads, fp32, batch {settings['batch']}, "
        f"{settings['layers']} layers of {settings['dim']}; best of {result['timing']['rounds']} "
        "rounds",
        fontsize=9.5,
        color="#555",
    )
    figure.subplots_adjust(left=0.15, right=0.99, top=0.84, bottom=0.07, wspace=0.1, hspace=0.75)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, nargs="?", default=DOCS / "results" / "speed.json")
    parser.add_argument("--out", type=Path, default=DOCS / "images" / "speed.png")
    arguments = parser.parse_args()
    draw(json.loads(arguments.result.read_text()), arguments.out)
    print(f"drawn: {arguments.out.name}")
