"""Peak memory of preparing a large CSV: `python benchmarks/prepare_memory.py [ROWS]`.

Writes ROWS (default 10 million) random rows to a temporary folder, prepares them in a child process
and prints the child's peak resident memory and its time.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import duckdb


def write_events(path: Path, n_rows: int) -> None:
    """Shuffled rows: text user ids, skewed items, times in seconds with ties."""
    with duckdb.connect(config={"memory_limit": "512MB", "temp_directory": str(path.parent)}) as db:
        db.execute("SET enable_progress_bar = false")
        db.execute(
            f"""COPY (SELECT 'user-' || (hash(i) % {max(n_rows // 20, 2)})::VARCHAR AS user_id,
                'item-' || floor({max(n_rows // 100, 2)} * pow((hash(i + 1) % 1000000) / 1e6, 3))
                    ::BIGINT::VARCHAR AS item_id,
                1600000000 + hash(i + 2) % 100000000 AS timestamp
            FROM range({n_rows}) t(i)) TO '{path}' (HEADER)"""
        )


def measure(n_rows: int, folder: Path, memory_limit: str = "512MB") -> dict[str, float]:
    table, out = folder / "events.csv", folder / "prepared"
    write_events(table, n_rows)
    options = ["--out", str(out), "--memory", memory_limit]
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "bert4rec", "data", "prepare", str(table), *options],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - started
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
    meta = json.loads((out / "meta.json").read_text(encoding="utf-8"))
    sizes = {"rows": "n_interactions", "users": "n_users", "items": "n_items"}
    return {
        **{name: meta[key] for name, key in sizes.items()},
        "peak_megabytes": round(peak / 1e6),
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measure(rows, Path(name)), indent=2))
