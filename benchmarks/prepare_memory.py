"""Peak memory of preparing a large CSV: `python benchmarks/prepare_memory.py [ROWS]`.

Writes ROWS (default 10 million) random rows to a temporary folder, prepares them in a child process
and prints the child's peak resident memory and its time.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import duckdb

CHILD = """
import json, resource, sys, time
from pathlib import Path
from bert4rec.data.interactions import Interactions
from bert4rec.data.prepare import prepare
started = time.perf_counter()
folder = Path(sys.argv[1])
sequences = prepare(
    Interactions.read(folder / "events.csv"), out=folder / "prepared", memory_limit=sys.argv[2]
)
unit = 1 if sys.platform == "darwin" else 1024
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
print(json.dumps({
    "rows": sequences.n_interactions,
    "users": sequences.n_users,
    "items": sequences.n_items,
    "peak_megabytes": round(peak / 1e6),
    "seconds": round(time.perf_counter() - started, 1),
}))
"""


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
    write_events(folder / "events.csv", n_rows)
    child = [sys.executable, "-c", CHILD, str(folder), memory_limit]
    finished = subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(finished.stdout)
    return result


if __name__ == "__main__":
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measure(rows, Path(name)), indent=2))
