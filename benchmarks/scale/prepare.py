"""Preparing many interactions in bounded memory: `python benchmarks/scale/prepare.py`.

Generates the interactions of `synthetic.py` (not measured), prepares them in a child process and
writes seconds and peak memory to docs/results/scale/prepare.json. Memory is that of the child and
its children, read from /proc twenty times a second: `anonymous` is what they allocated, `resident`
also counts pages of files that the system keeps in memory and could drop.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import duckdb
from synthetic import Size, write

import bert4rec

RESULT = Path(__file__).parents[2] / "docs" / "results" / "scale" / "prepare.json"


def children_of(process: int) -> list[int]:
    """The process and all below it."""
    found = [process]
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        for child in thread.read_text().split():
            found += children_of(int(child))
    return found


def memory_of(process: int) -> dict[str, int]:
    """Resident bytes of the process and all below it, and those that no file backs."""
    total = {"resident": 0, "anonymous": 0}
    for one in children_of(process):
        status = Path(f"/proc/{one}/status").read_text()
        facts = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        for name, key in (("resident", "VmRSS"), ("anonymous", "RssAnon")):
            total[name] += int(facts.get(key, "0 kB").split()[0]) * 1024
    return total


def measured(command: list[str]) -> dict[str, float]:
    """Seconds and peak memory of a command and everything it starts."""
    started = time.perf_counter()
    child = subprocess.Popen(command)
    peak = {"resident": 0, "anonymous": 0}
    while child.poll() is None:
        try:
            now = memory_of(child.pid)
        except OSError:  # one of them has just ended
            continue
        peak = {name: max(value, now[name]) for name, value in peak.items()}
        time.sleep(0.05)
    if child.returncode:
        raise SystemExit(f"{command[:5]} ended with {child.returncode}")
    seconds = round(time.perf_counter() - started, 1)
    return {"seconds": seconds} | {f"peak_{k}_megabytes": round(v / 1e6) for k, v in peak.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of preparing many interactions.")
    for name, default in asdict(Size()).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--memory", default="512MB", help="as for bert4rec data prepare")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--folder", type=Path, help="for the data, which is kept there")
    given = vars(parser.parse_args())
    memory, result, folder = (given.pop(name) for name in ("memory", "result", "folder"))
    size = Size(**given)
    work = Path(folder or tempfile.mkdtemp(prefix="bert4rec-scale-"))
    try:
        source, out = work / "interactions", work / "prepared"
        if not source.is_dir():
            write(size, source)
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, "-m", "bert4rec", "data", "prepare", str(source)]
        took = measured([*command, "--out", str(out), "--memory", memory])
        meta = json.loads((out / "meta.json").read_text(encoding="utf-8"))
        sizes = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    finally:
        if folder is None:
            shutil.rmtree(work)
    wanted = ("n_users", "n_items", "n_interactions", "fingerprint")
    facts = {
        "asked": asdict(size),
        "prepared": {name: meta[name] for name in wanted},
        "memory_limit": memory,
        **took,
        "bytes": sizes,
        "machine": {"cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"bert4rec": bert4rec.__version__, "duckdb": duckdb.__version__},
    }
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
