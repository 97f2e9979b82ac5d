"""Each tool's best figures out of all rounds, and how ours compare with the best other tool's."""

from collections.abc import Sequence
from typing import Any

OURS = "ours"
NAMES = {
    OURS: "bert4rec (ours)",
    "rectools": "RecTools",
    "replay": "RePlay",
    "replay-tuned": "RePlay, tuned",
    "recbole": "RecBole",
    "huggingface": "Hugging Face BERT",
    "plain": "nn.TransformerEncoder",
}
# Column: title, task it comes from, key of the answer, whether more is better.
COLUMNS = {
    "train": ("training, sequences/s", "train", "per_second", True),
    "score": ("scoring, users/s", "score", "per_second", True),
    "one": ("one user, ms", "one", "p50_ms", False),
    "memory": ("training peak, MB", "train", "peak_mb", False),
}
Best = dict[str, dict[str, dict[str, float]]]  # shape, tool, column


def best_of(runs: list[dict[str, Any]], worst_memory_of: Sequence[str] = (OURS,)) -> Best:
    """Best of the rounds; of our own peak memory the worst."""
    best: Best = {}
    for run in runs:
        if "error" in run:
            continue
        figures = best.setdefault(run["shape"], {}).setdefault(run["tool"], {})
        for column, (_, task, key, more_is_better) in COLUMNS.items():
            if run["task"] != task:
                continue
            largest = more_is_better or (column == "memory" and run["tool"] in worst_memory_of)
            choose = max if largest else min
            figures[column] = choose(figures.get(column, run[key]), run[key])
    return best


def best_peer(tools: dict[str, dict[str, float]], column: str, *, tuned: bool = False) -> str | None:
    peers = [
        tool
        for tool, figures in tools.items()
        if tool != OURS and column in figures and (tuned or not tool.endswith("tuned"))
    ]
    choose = max if COLUMNS[column][3] else min
    return choose(peers, key=lambda tool: tools[tool][column]) if peers else None


def ratios(best: Best, *, tuned: bool = False) -> dict[str, dict[str, float]]:
    """How many times better ours is than the best peer: above 1 is better in every column."""
    answer: dict[str, dict[str, float]] = {}
    for shape, tools in best.items():
        for column, (_, _, _, more_is_better) in COLUMNS.items():
            peer = best_peer(tools, column, tuned=tuned)
            if peer is None or column not in tools.get(OURS, {}):
                continue
            ratio = tools[OURS][column] / tools[peer][column]
            answer.setdefault(shape, {})[column] = round(ratio if more_is_better else 1 / ratio, 3)
    return answer


def shown(column: str, value: float | None) -> str:
    if value is None:
        return "no result"
    return f"{value:.2f}" if column == "one" else f"{value:,.0f}"


def table(best: Best, tools: list[str]) -> str:
    """Markdown: a row per tool, then ours against the best peer of each column."""
    places = [(shape, column) for shape in best for column in COLUMNS]
    head = " | ".join(f"{shape}: {COLUMNS[column][0]}" for shape, column in places)
    lines = [f"| tool | {head} |", "|---|" + "---:|" * len(places)]

    def add(name: str, cells: list[str]) -> None:
        lines.append(f"| {name} | " + " | ".join(cells) + " |")

    for tool in tools:
        figures = {shape: best[shape].get(tool, {}) for shape in best}
        add(NAMES[tool], [shown(column, figures[shape].get(column)) for shape, column in places])
    for tuned, which in ((False, "best other tool at its defaults"), (True, "best other tool, tuned or not")):
        peers = [best_peer(best[shape], column, tuned=tuned) for shape, column in places]
        add(which, [NAMES[peer] if peer else "–" for peer in peers])
        times = ratios(best, tuned=tuned)
        figures = [times.get(shape, {}).get(column) for shape, column in places]
        add("ours is better by", [f"{x:.1f}×" if x else "–" for x in figures])
    return "\n".join(lines)
