"""Put the figures of docs/results/scale* into docs/explanation/performance.md.

    python benchmarks/scale/scaling_page.py              # write the tables again
    python benchmarks/scale/scaling_page.py --check      # exit 1 when the files say otherwise

`speed/scaling.py` measures the first and draws its picture; `prepare.py`, `train_and_score.py` and
`catalogue.py` measure the others.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from marked_tables import markdown_table, write_or_check

DOCS = Path(__file__).resolve().parents[2] / "docs"
LOSSES = ("cross-entropy", "sampled-softmax")


def load(name: str) -> Any:
    return json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))


def points(curve: str, loss: str = LOSSES[0]) -> dict[int, dict[str, Any]]:
    """The measured points of one curve by their place on it."""
    found = load("scaling")["points"]
    return {p["x"]: p for p in found if (p["curve"], p["loss"]) == (curve, loss) and "peak_mb" in p}


def milliseconds(point: dict[str, Any]) -> str:
    return f"{1000 * point['step_seconds']:,.0f} ms"


def gigabytes(megabytes: float) -> str:
    return f"{megabytes / 1000:.1f} GB"


def items_table() -> list[str]:
    full, sampled = (points("items", loss) for loss in LOSSES)
    rows = [
        [
            f"{n:,}",
            *(milliseconds(full[n]), f"{full[n]['peak_mb']:,} MB"),
            *(milliseconds(sampled[n]), f"{sampled[n]['peak_mb']:,} MB"),
        ]
        for n in full
        if n in sampled
    ]
    header = ["items", "full softmax: per step", "memory", "1,024 negatives: per step", "memory"]
    return markdown_table(header, rows)


def users_table() -> list[str]:
    header = ["users", "per epoch", "memory"]
    found = points("users").items()
    rows = [[f"{n:,}", f"{p['epoch_seconds']:,.1f} s", f"{p['peak_mb']:,} MB"] for n, p in found]
    return markdown_table(header, rows)


def shape_table() -> list[str]:
    header = ["length of a history", "width", "per step", "memory"]
    rows = [[f"{n:,}", f"{p['dim']}", milliseconds(p), f"{p['peak_mb']:,} MB"] for n, p in points("length").items()]
    rows += [[f"{p['length']}", f"{n}", milliseconds(p), f"{p['peak_mb']:,} MB"] for n, p in points("dim").items()]
    return markdown_table(header, rows)


def large_table() -> list[str]:
    prepared, trained = load("scale/prepare"), load("scale/train-and-score")
    train, score = trained["train"], trained["score"]
    n_steps = train["sequences"] // 256
    rows = [
        (f"prepare {prepared['asked']['files']} Parquet files, `--memory 512MB`", prepared),
        (f"train for {n_steps:,} steps, evaluate 2,000 users, build the index", train),
        (f"load the model and score {score['users']:,} users", score),
    ]
    return markdown_table(
        ["", "seconds", "peak memory"],
        [[what, f"{took['seconds']:.0f}", gigabytes(took["peak_resident_megabytes"])] for what, took in rows],
    )


TABLES = {"items": items_table, "users": users_table, "shapes": shape_table, "large": large_table}

if __name__ == "__main__":
    write_or_check(DOCS / "explanation" / "performance.md", TABLES, __doc__)
