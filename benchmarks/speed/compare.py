"""Compare the speed of bert4rec with other BERT4Recs on this machine: `make bench`.

Each peer runs in its own virtual environment under `.bench`, on the same sequences, one process at
a time, round after round, and keeps the best of its rounds. Peers run at their defaults. The
fastest of them runs a second time as `replay-tuned`: with its own options that make it quickest,
and with an environment in which the C library keeps freed memory, as ours does by itself.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from environments import TOOLS, ready_python
from shapes import BENCH, REPOSITORY, SHAPES, write
from summary import COLUMNS, OURS, best_of, ratios, table

PEERS = ["rectools", "replay", "replay-tuned", "recbole", "huggingface", "plain"]
TUNED = "-tuned"
TASKS = ["train", "score", "one"]
THREADS = 2
MODEL = {"batch": 256, "dim": 64, "layers": 2, "heads": 2, "dropout": 0.2}
KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**36), "MALLOC_TOP_PAD_": str(64 * 2**20)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tools", nargs="+", choices=[OURS, *PEERS], default=[OURS, *PEERS])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15, help="timed seconds of one run")
    parser.add_argument("--limit", type=float, default=600, help="most seconds of one run")
    parser.add_argument("--append", action="store_true", help="add rounds to those in --out")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs/results/speed.json")
    return parser.parse_args()


def last_json(text: str) -> dict[str, Any]:
    return json.loads(text.strip().splitlines()[-1])


def without_paths(text: str) -> str:
    """Errors are published: they must not show where things are on one machine."""
    return text.replace(str(REPOSITORY), ".").replace(tempfile.gettempdir(), "TMP")


def run_tool(command: list[str], limit: float, variables: dict[str, str] | None = None) -> dict[str, Any]:
    """What a tool's script measured, or its error; `variables` are added to its environment."""
    with tempfile.TemporaryDirectory() as scratch:
        threads = {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}
        environment = {**os.environ, **threads, "TMPDIR": scratch, **(variables or {})}
        try:
            finished = subprocess.run(
                command, env=environment, cwd=scratch, timeout=limit, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not finished after {limit:.0f} s"}
    if finished.returncode:
        lines = finished.stderr.strip().splitlines() or [f"exit code {finished.returncode}"]
        return {"error": without_paths(lines[-1])}
    return last_json(finished.stdout)


def prepare(tools: list[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """How to start each tool, and why some cannot be started."""
    commands, errors = {}, {}
    for tool in tools:
        try:
            peer = tool.removesuffix(TUNED)
            python = Path(sys.executable) if tool == OURS else ready_python(peer, BENCH)
        except RuntimeError as error:
            errors[tool] = without_paths(f"not installed: {error}")
            print(f"{tool}: {errors[tool]}", flush=True)
            continue
        script = TOOLS / ("ours.py" if tool == OURS else f"peer_{peer}.py")
        commands[tool] = [str(python), str(script), *(["--tuned"] if tool.endswith(TUNED) else [])]
    return commands, errors


def tool_options(task: str, shape: str, seconds: float) -> list[str]:
    """What every tool's script is told."""
    options = {
        "task": task,
        "max-len": SHAPES[shape].max_len,
        "mask-ratio": SHAPES[shape].mask_ratio,
        **MODEL,
        "seconds": seconds,
    }
    return [word for key, value in options.items() for word in (f"--{key}", str(value))]


def one_line(answer: dict[str, Any]) -> str:
    if "error" in answer:
        return f"failed: {answer['error']}"
    per_second, p50 = answer["per_second"], answer["p50_ms"]
    speed = f"{p50:.2f} ms" if answer["task"] == "one" else f"{per_second:,.1f} per second"
    return f"{speed}, peak {answer['peak_mb']:,.0f} MB"


def run_all(arguments: argparse.Namespace, files: dict[str, Path]) -> list[dict[str, Any]]:
    commands, errors = prepare(arguments.tools)
    places = [
        (number, shape, task, tool)
        for number in range(arguments.rounds)
        for shape in arguments.shapes
        for task in arguments.tasks
        for tool in arguments.tools
    ]
    runs: list[dict[str, Any]] = []
    before = json.loads(arguments.out.read_text())["runs"] if arguments.append else []
    n_before = max((run["round"] for run in before), default=0)
    for step, (number, shape, task, tool) in enumerate(places, 1):
        keep_memory = tool.endswith(TUNED)
        if tool in errors:
            answer = {"error": errors[tool]}
        else:
            options = tool_options(task, shape, arguments.seconds)
            command = [*commands[tool], str(files[shape]), *options]
            variables = KEEP_FREED_MEMORY if keep_memory else {}
            answer = run_tool(command, arguments.limit, variables)
        place = {"round": n_before + number + 1, "shape": shape, "task": task, "tool": tool}
        allocator = "its own" if tool == OURS else ("kept" if keep_memory else "default")
        runs.append({**answer, **place, "allocator": allocator})
        where = f"round {n_before + number + 1} {shape:<6} {task:<5} {tool:<11} memory {allocator:<7}"
        print(f"[{step}/{len(places)}] {where} {one_line(answer)}", flush=True)
    return before + runs


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 2**30),
        "system": platform.system(),
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
    }


def roofline() -> dict[str, Any] | None:
    """What the machine could do at best, when that script is there."""
    script = Path(__file__).with_name("roofline.py")
    return run_tool([sys.executable, str(script)], 600) if script.is_file() else None


def main() -> None:
    arguments = parse_arguments()
    files = {shape: BENCH / f"{shape}.npz" for shape in arguments.shapes}
    shapes = {}
    for shape, file in files.items():
        about = SHAPES[shape]
        keys = ("max_len", "mask_ratio", "n_users", "n_items")
        shapes[shape] = {"real": write(shape, file), **{key: getattr(about, key) for key in keys}}
        kind = "real" if shapes[shape]["real"] else "generated"
        print(f"{shape}: {about.n_users:,} {kind} histories, {about.n_items:,} items", flush=True)
    runs = run_all(arguments, files)
    best = best_of(runs)
    good = [run for run in runs if "error" not in run]
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "settings": {**MODEL, "threads": THREADS, "precision": "float32"},
        "timing": {"rounds": max(run["round"] for run in runs), "seconds": arguments.seconds},
        "shapes": shapes,
        "versions": {run["tool"]: {k: run[k] for k in ("version", "torch")} for run in good},
        "columns": {key: title for key, (title, *_) in COLUMNS.items()},
        "best": best,
        "ours_times_better_than_best_peer_at_its_defaults": ratios(best),
        "ours_times_better_than_best_peer_tuned_or_not": ratios(best, tuned=True),
        "roofline": roofline(),
        "runs": runs,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    tools = [tool for tool in [OURS, *PEERS] if any(tool in found for found in best.values())]
    print(f"\n{table(best, tools)}\n\nwritten to {arguments.out.name}", flush=True)
    for tool, shape, task, error in sorted(
        {(r["tool"], r["shape"], r["task"], r["error"]) for r in runs if "error" in r}
    ):
        print(f"failed: {tool}, {shape}, {task}: {error}")


if __name__ == "__main__":
    main()
