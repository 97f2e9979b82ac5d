"""Measure what things cost here and fit the constants of `bert4rec plan` to it.

    python benchmarks/scale/costs.py             # measures what is missing, and fits
    python benchmarks/scale/costs.py --fresh     # measures everything anew, some minutes
    python benchmarks/scale/costs.py --fit-only  # fits again to what was measured
    python benchmarks/scale/scaling_page.py      # then: the tables of docs/scaling.md

writes src/bert4rec/costs/measurements.json when it has all points, and until then what it has so
far beside it, so that a run that was stopped goes on where it was. Each point is a process of its
own on two threads (`cost_points.py`). Training steps and validations are timed by the real loop
(`bert4rec.training.rehearsal`), on generated histories of one length; answers by `Recommender`,
indexes by `benchmarks/scale/retrieval.py`, preparing by `benchmarks/prepare_memory.py`, exchanges
by gloo between two processes. Every constant
is 0 or above (non-negative least squares on relative errors); a point's error is that of a fit
without it. Run it on an idle machine: what other programs used is stored, too.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from cost_points import ROOT, THREADS, Point, points, settings_of
from scipy.optimize import nnls

OUT = ROOT / "src" / "bert4rec" / "costs" / "measurements.json"
LIMIT = 240  # seconds after which a point is given up
QUIET = 0.7  # most cores that other programs may use for a measurement to count as quiet
SIGNIFICANT = 4
KINDS = ("training", "validation", "scoring", "request", "index", "preparing", "exchange")
FEWEST_POINTS = 3  # of a kind, to leave one out


def in_a_child(point: Point, seconds: float) -> Point:
    threads = {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}
    script = str(Path(__file__).with_name("cost_points.py"))
    command = [sys.executable, script, json.dumps(point), str(seconds)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **threads},
            timeout=LIMIT,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {LIMIT} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    answer: Point = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def fit(measured: list[Point]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants and errors of every kind; the points get what is fitted to them."""
    constants: dict[str, Any] = {}
    errors: dict[str, Any] = {}
    for name, rows in observations(measured).items():
        if len(rows) < 2:
            raise SystemExit(f"{name}: too few points to fit; measure again")
        names = list(rows[0][1])
        counts = np.array([[work[each] for each in names] for _, work, _ in rows])
        seconds = np.array([each for *_, each in rows])
        relative = counts / seconds[:, None]
        constants[name] = dict(zip(names, map(rounded, solved(relative)), strict=True))
        left_out = []
        for row, (point, _, _) in enumerate(rows):
            others = np.delete(relative, row, 0)
            left_out.append(float(relative[row] @ solved(others)) - 1)
            errors_of_point = point.setdefault("relative_error", {})
            fitted = float(relative[row] @ np.array(list(constants[name].values()))) - 1
            errors_of_point[name] = {"fitted": round(fitted, 3), "left out": round(left_out[-1], 3)}
        sizes = np.abs(left_out)
        is_known = len(rows) >= FEWEST_POINTS
        errors[name] = {
            "typical": round(float(np.median(sizes)), 3) if is_known else None,
            "worst": round(float(sizes.max()), 3) if is_known else None,
            "n_points": len(rows),
        }
    return constants, errors


def solved(relative: Any) -> Any:
    """Constants, none of them negative, with the smallest relative errors."""
    scale = np.abs(relative).max(0)
    scale[scale == 0] = 1
    return nnls(relative / scale, np.ones(len(relative)))[0] / scale


def observations(measured: list[Point]) -> dict[str, list[tuple[Point, dict[str, float], float]]]:
    """Of every kind: the point, what there was to compute, and the seconds (of a core) it took."""
    from bert4rec.config import load_config
    from bert4rec.costs.model import work_of_exchange, work_of_preparing
    from bert4rec.costs.work import step_of, work_of_answer, work_of_index, work_of_step

    rows: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for point in (each for each in measured if "error" not in each):
        kind = point["kind"]
        if kind in ("training", "answers"):
            config = load_config(overrides=settings_of(point))
            answer = work_of_answer(config, point["items"], point["length"])
        if kind == "training":
            step = step_of(config, point["items"], point["batch"], point["length"], THREADS)
            if "seconds" in point:
                rows["training"].append((point, work_of_step(step), point["seconds"]))
            if "validation_seconds" in point:
                rows["validation"].append((point, answer, THREADS * point["validation_seconds"]))
        elif kind == "answers":
            rows["scoring"].append((point, answer, THREADS * point["scoring_seconds"]))
            rows["request"].append((point, answer, point["request_seconds"]))
        elif kind == "index":
            work = work_of_index(point["items"], point["dim"])
            rows[kind].append((point, work, THREADS * point["seconds"]))
        elif kind == "preparing":
            rows[kind].append((point, work_of_preparing(point["rows"]), point["seconds"]))
        elif kind == "exchange":
            rows[kind].append((point, work_of_exchange(point["bytes"]), point["seconds"]))
    return rows


def rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT}g}")


def about_this(measured: list[Point]) -> dict[str, Any]:
    import platform

    import torch

    dates, loads = [p["date"] for p in measured], [p["load"] for p in measured]
    model = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "first": min(dates),
        "last": max(dates),
        "cpu": model[0] if model else platform.machine(),
        "cores": os.cpu_count(),
        "threads": THREADS,
        "torch": torch.__version__,
        "commits": sorted({point["commit"] for point in measured}),
        "highest_load": max(loads),
        "is_quiet": max(loads) <= QUIET,
        "command": "python benchmarks/scale/costs.py",
    }


def seconds_of_others() -> float:
    """Of all cores, since the machine started: busy, but not with our children."""
    numbers = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
    busy = (sum(numbers) - numbers[3] - numbers[4]) / os.sysconf("SC_CLK_TCK")
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    return busy - ours.ru_utime - ours.ru_stime


def commit() -> str:
    """With a + if the package is not as committed; the measurements themselves do not count."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "unknown") + (
        "+" if git("status", "--porcelain", "src", ":!*/costs/measurements*") else ""
    )


def key(point: Point) -> tuple[Any, ...]:
    names = ("kind", "model", "dim", "layers", "length", "items", "batch", "loss", "negatives")
    return tuple(point.get(name) for name in (*names, "rows", "bytes"))


def write(measured: list[Point], out: Path) -> dict[str, Any]:
    for point in measured:
        point.pop("relative_error", None)
    constants, errors = fit(measured)
    for point in measured:
        if point["kind"] == "vocabulary" and "error" not in point:
            constants["memory"] = {"bytes_an_id": rounded(point["bytes_an_item"])}
    largest = [p for p in measured if p["kind"] == "preparing" and "error" not in p]
    if largest:
        last = max(largest, key=lambda point: point["rows"])
        constants["disk"] = {"prepared_bytes_a_row": rounded(last["prepared_bytes_a_row"])}
        constants["disk"]["table_bytes_a_row"] = rounded(last["table_bytes_a_row"])
    result = {
        "measured": about_this(measured),
        "constants": constants,
        "errors": errors,
        "points": measured,
    }
    text = json.dumps(result, indent=1)
    partial = out.with_suffix(".partial")
    partial.write_text(text + "\n")
    partial.replace(out)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--fit-only", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", nargs="+", metavar="KIND", help="measure these kinds of points")
    parser.add_argument("--seconds", type=float, default=2.0, help="timed at a point, about")
    arguments = parser.parse_args()
    unfinished = arguments.out.with_suffix(".partial.json")
    if arguments.fresh:
        unfinished.unlink(missing_ok=True)
    before: list[Point] = []
    if unfinished.exists():
        before = json.loads(unfinished.read_text())
    elif arguments.out.exists() and not arguments.fresh:
        before = json.loads(arguments.out.read_text())["points"]
    wanted = {key(point): point for point in points()}
    known = {key(point): point for point in before if "error" not in point}
    measured = [known[each] for each in wanted if each in known]
    started, measured_commit = time.monotonic(), commit()
    for number, (name, point) in enumerate(wanted.items(), 1):
        is_wanted = not arguments.only or point["kind"] in arguments.only
        if name in known or arguments.fit_only or not is_wanted:
            continue
        facts: Point = {"date": time.strftime("%Y-%m-%d"), "commit": measured_commit}
        began, others = time.monotonic(), seconds_of_others()
        answer = {
            each: _rounded(value) for each, value in in_a_child(point, arguments.seconds).items()
        }
        load = (seconds_of_others() - others) / (time.monotonic() - began)
        facts["load"] = round(max(0.0, load), 2)  # cores that other programs used meanwhile
        measured.append({**point, **answer, **facts})
        unfinished.write_text(json.dumps(measured, indent=1))
        shape = " ".join(str(value) for value in point.values())
        print(
            f"{number:>3}/{len(wanted)} {time.monotonic() - started:>5.0f} s  {shape}: {answer} "
            f"(load {facts['load']})",
            flush=True,
        )
    show(write(measured, arguments.out))
    unfinished.unlink(missing_ok=True)


def _rounded(value: Any) -> Any:
    return rounded(value) if isinstance(value, float) else value


def show(result: dict[str, Any]) -> None:
    from bert4rec.costs.assumptions import in_words

    for kind, error in result["errors"].items():
        print(f"\n{kind}: {in_words(error)}")
        for name, value in result["constants"][kind].items():
            print(f"  {name:<24}{value:>12g}")
        for point in result["points"]:
            if kind in point.get("relative_error", {}):
                each = point["relative_error"][kind]
                shape = " ".join(str(value) for value in key(point) if value is not None)
                print(f"    {each['fitted']:>+7.0%} {each['left out']:>+7.0%}  {shape}")
    failed = [point for point in result["points"] if "error" in point]
    for point in failed:
        print(f"failed: {point}")
    if not result["measured"]["is_quiet"]:
        print(f"\nnot quiet: others used up to {result['measured']['highest_load']} cores")


if __name__ == "__main__":
    main()
