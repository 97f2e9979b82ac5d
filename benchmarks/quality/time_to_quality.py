"""Minutes of training to a validation NDCG@10, ours against RecTools' BERT4Rec, and both curves.

    python benchmarks/quality/time_to_quality.py ml-1m.txt.gz --recipe best-ml-1m

The tools train one after the other, each alone on all cores, on the same histories without their
last two items, and validated on the same held-out users: the item before the last, among all items
but the seen ones, for every user. A tool trains until a validation reaches --aim or --minutes of
training are over. Time of validations counts for neither. Every point is in `--logs` as soon as it
is known; when a run was killed, `--from-logs` writes what there is. The test items are not read.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from curve_log import minutes_to, read_curve

sys.path.append(str(Path(__file__).resolve().parents[1] / "speed"))
from compare import machine
from environments import ready_python
from shapes import BENCH, REPOSITORY

from bert4rec.config import load_config
from bert4rec.data.sources import open_data
from bert4rec.data.splits import SPLITS, Spans

HERE = Path(__file__).resolve().parent
TOOLS = ("ours", "rectools")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="as for `bert4rec train`")
    parser.add_argument("--recipe", default="best-ml-1m", help="ours")
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="of ours")
    parser.add_argument("--aim", type=float, default=0.15, help="validation NDCG@10")
    parser.add_argument("--minutes", type=float, default=120, help="most minutes of training")
    parser.add_argument("--only", choices=TOOLS, help="run one tool; the other stays as in --out")
    parser.add_argument("--to-the-end", action="store_true", help="ours continues after --aim, within --minutes")
    parser.add_argument("--from-logs", action="store_true", help="run nothing, write --out")
    parser.add_argument("--every", type=int, default=1, help="epochs of RecTools per validation")
    parser.add_argument("--seed", type=int, default=0, help="of both tools")
    parser.add_argument("--environments", type=Path, default=BENCH, help="folder of peers' venvs")
    parser.add_argument("--logs", type=Path, default=REPOSITORY / "runs" / "time-to-quality")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs/results/quality/time-to-quality.json")
    return parser.parse_args()


def write_split(arguments: argparse.Namespace, path: Path) -> None:
    """The split as plain arrays for a process that does not have our package."""
    config = load_config(arguments.recipe, None, arguments.overrides)
    sequences = open_data(arguments.data)
    split = SPLITS[config.data.split](sequences)
    train_items, train_offsets = flat(split.train)
    history_items, history_offsets = flat(split.validation.histories)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        train_items=train_items,
        train_offsets=train_offsets,
        history_items=history_items,
        history_offsets=history_offsets,
        targets=split.validation.targets,
        n_items=split.n_items,
    )


def flat(spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    rows = [spans[i] for i in range(len(spans))]
    return np.concatenate(rows), np.concatenate(([0], np.cumsum(spans.lengths)))


def command_of(tool: str, arguments: argparse.Namespace, log: Path) -> list[str]:
    told = ["--aim", arguments.aim, "--minutes", arguments.minutes, "--seed", arguments.seed]
    if tool == "rectools":
        python = ready_python("rectools", arguments.environments.resolve())
        held_out = log.with_name("held-out.npz")
        write_split(arguments, held_out)
        script, words = "rectools_curve.py", [held_out, "--every", arguments.every]
    else:
        python, script = Path(sys.executable), "ours_curve.py"
        words = [arguments.data, "--recipe", arguments.recipe]
        words += [word for change in arguments.overrides for word in ("--set", change)]
        words += ["--to-the-end"] if arguments.to_the_end else []
    return [str(word) for word in (python, HERE / script, log, *words, *told)]


def merged(before: dict[str, Any] | None, curves: dict[str, dict[str, Any]], aim: float, data: str) -> dict[str, Any]:
    """New curves beside those of other tools on the same held-out users."""
    facts = {(curve["about"]["n_held_out"], curve["about"]["n_items"]) for curve in curves.values()}
    (n_held_out, n_items) = facts.pop()
    same = {"data": data, "n_held_out": n_held_out, "n_items": n_items, "aim": aim}
    if facts or (before is not None and any(before.get(key) != same[key] for key in same)):
        raise ValueError(
            f"the curves are of different held-out users: here {same}; run both tools in one go, or give another --out"
        )
    tools = before["tools"] if before is not None else {}
    for tool, curve in curves.items():
        reached = minutes_to(curve["curve"], aim, curve["about"]["minutes"])
        best = max((point["ndcg@10"] for point in curve["curve"]), default=None)
        tools[tool] = {"minutes_to_aim": None if reached is None else round(reached, 2), "best_ndcg@10": best, **curve}
    return {
        **same,
        "machine": machine(),
        "clock": "seconds of training without validations; wall_seconds has them",
        "tools": {tool: tools[tool] for tool in TOOLS if tool in tools},
    }


def summary(tool: str, found: dict[str, Any], aim: float) -> str:
    if not found["curve"]:
        return f"{tool}: no validation yet ({found['ended']})"
    if found["minutes_to_aim"] is not None:
        return f"{tool}: NDCG@10 {aim} after {found['minutes_to_aim']:.1f} minutes of training"
    minutes = found["curve"][-1]["training_seconds"] / 60
    return f"{tool}: {aim} not reached in {minutes:.1f} minutes, at {found['best_ndcg@10']:.4f}"


def main() -> None:
    arguments = parse_arguments()
    tools = [arguments.only] if arguments.only else list(TOOLS)
    logs = {tool: arguments.logs.resolve() / f"{tool}.jsonl" for tool in tools}
    for tool, log in logs.items():
        if not arguments.from_logs:
            command = command_of(tool, arguments, log)
            log.unlink(missing_ok=True)
            print(f"{tool}: up to {arguments.minutes:g} minutes of training", flush=True)
            finished = subprocess.run(command)
            if finished.returncode:
                print(f"{tool}: failed with exit code {finished.returncode}", flush=True)
    curves = {tool: read_curve(log) for tool, log in logs.items() if log.is_file()}
    if not curves:
        raise SystemExit("no tool has written a curve: see the errors above")
    before = json.loads(arguments.out.read_text()) if arguments.out.is_file() else None
    is_all_new = set(curves) == set(TOOLS)
    result = merged(None if is_all_new else before, curves, arguments.aim, Path(arguments.data).name)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for tool, found in result["tools"].items():
        print(summary(tool, found, arguments.aim))
    print(f"written to {arguments.out.name}")


if __name__ == "__main__":
    main()
