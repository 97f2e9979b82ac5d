"""Is this tree as fast as another revision, and does it take no more memory?

    python benchmarks/speed/before_after.py [--before REVISION] [--rounds 3] [--seconds 10]

The revision is checked out into a temporary worktree. Training, scoring and one request on both
shapes are measured by each tree's own `tools/ours.py`, as in `compare.py`, with the same Python and
packages and the tree's own `src`, in turn: before, after, before, after. The best round of each
counts. The table and docs/results/before-after.json say how many times better this tree is; the
exit code is 1 when anything is slower, or takes more memory, by more than 3 %.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from compare import TASKS, machine, one_line, run_tool, tool_options
from shapes import REPOSITORY, SHAPES, sequence_file
from summary import COLUMNS, best_of, shown

REDESIGN = "cb200a4"  # the last commit before it
OUT = REPOSITORY / "docs" / "results" / "before-after.json"
TOLERANCE = 0.03
SIDES = ("before", "after")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", default=REDESIGN, metavar="REVISION")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10, help="timed seconds of one run")
    parser.add_argument("--limit", type=float, default=600, help="most seconds of one run")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


def git(*words: str) -> str:
    finished = subprocess.run(["git", *words], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return finished.stdout.strip()


def measure_all(arguments: argparse.Namespace, trees: dict[str, Path]) -> list[dict[str, Any]]:
    runs = []
    for number in range(1, arguments.rounds + 1):
        for shape in arguments.shapes:
            for task in arguments.tasks:
                for side in SIDES:
                    script = trees[side] / "benchmarks" / "speed" / "tools" / "ours.py"
                    options = tool_options(task, shape, arguments.seconds)
                    command = [sys.executable, str(script), str(sequence_file(shape)), *options]
                    source = {"PYTHONPATH": str(trees[side] / "src")}
                    result = run_tool(command, arguments.limit, source)
                    place = {"round": number, "shape": shape, "task": task, "tool": side}
                    runs.append({**result, **place})
                    print(f"round {number} {shape:<6} {task:<5} {side:<6} {one_line(result)}")
                    sys.stdout.flush()
    return runs


def compare(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per shape and column; a ratio above 1 means that this tree is better."""
    rows = []
    for shape, sides in best_of(runs, worst_memory_of=SIDES).items():
        for column, (title, _, _, more_is_better) in COLUMNS.items():
            if any(column not in sides.get(side, {}) for side in SIDES):
                continue
            before, after = (sides[side][column] for side in SIDES)
            ratio = after / before if more_is_better else before / after
            rows.append(
                {
                    "shape": shape,
                    "column": column,
                    "title": title,
                    "before": before,
                    "after": after,
                    "times_better": round(ratio, 3),
                    "is_worse": ratio < 1 / (1 + TOLERANCE),
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| | before | after | times better |", "|---|---:|---:|---:|"]
    for row in rows:
        before, after = (shown(row["column"], row[side]) for side in SIDES)
        worse = ", worse" if row["is_worse"] else ""
        cells = f"{before} | {after} | {row['times_better']:.2f}{worse}"
        lines.append(f"| {row['shape']}: {row['title']} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "before"
        git("worktree", "add", "--detach", "--quiet", str(other), arguments.before)
        try:
            trees = {"before": other, "after": REPOSITORY}
            runs = measure_all(arguments, trees)
        finally:
            git("worktree", "remove", "--force", str(other))
    rows, failed = compare(runs), [run for run in runs if "error" in run]
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "before": git("rev-parse", "--short", arguments.before),
        "after": git("rev-parse", "--short", "HEAD"),
        "machine": machine() | {"load_before": round(load, 2)},
        "timing": {"rounds": arguments.rounds, "seconds": arguments.seconds},
        "tolerance": TOLERANCE,
        "rows": rows,
        "runs": runs,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{table(rows)}\n\nwritten to {arguments.out.name}")
    sys.exit(1 if failed or any(row["is_worse"] for row in rows) else 0)


if __name__ == "__main__":
    main()
