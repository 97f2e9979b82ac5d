"""How time and memory of training grow with users, items, length and width.

    python benchmarks/speed/scaling.py [--quick]

writes docs/results/scaling.json and docs/images/scaling.png; with --quick it prints some points.

Each point trains on generated histories in a process of its own, by the same parts as `bert4rec
train` and in batches of 256: a warm-up step, then a whole epoch (users) or some steps (the rest).
Peak memory is the largest resident size of that process, torch itself included.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
from compare import machine, run_tool
from shapes import REPOSITORY

BATCH = 256
LEAST_SECONDS, LEAST_STEPS = 3.0, 3  # of what is timed
ENOUGH_SECONDS, EPOCH_SECONDS = 8.0, 40.0  # but no other step is started after this
LIMIT = 300  # seconds after which a point is given up
MILLION = 1_000_000
NEGATIVES = 1024
LOSSES = {"cross-entropy": "#2f6fde", "sampled-softmax": "#d9822b"}  # and their colours


@dataclass(frozen=True)
class Point:
    curve: str
    users: int = 20_000
    items: int = 5_000
    loss: str = "cross-entropy"
    length: int | None = None  # of every history; none draws short ones, 8 on average, at most 50
    dim: int = 64

    @property
    def settings(self) -> list[str]:
        settings = [
            f"model.max_len={self.length or 50}",
            f"model.dim={self.dim}",
            f"model.heads={max(2, self.dim // 32)}",
            f"stages.0.mask_ratio={0.2 if self.length else 0.6}",
            f"training.batch_size={BATCH}",
            f"loss.name={self.loss}",
        ]
        is_sampled = self.loss == "sampled-softmax"
        return [*settings, f"loss.n_negatives={NEGATIVES}"] if is_sampled else settings


def points(*, quick: bool) -> list[Point]:
    users = (1_000, 10_000) if quick else (1_000, 3_000, 10_000, 30_000, 100_000)
    items = (1_000, 100_000) if quick else (1_000, 10_000, 100_000, MILLION)
    lengths = (25, 100) if quick else (25, 50, 100, 200, 400)
    dims = (32, 128) if quick else (32, 64, 128, 256)
    return [
        *(Point("users", users=n) for n in users),
        *(Point("items", items=n, loss=loss) for loss in LOSSES for n in items),
        *(Point("length", users=2_000, length=n) for n in lengths),
        *(Point("dim", users=2_000, length=100, dim=n) for n in dims),
    ]


def generate(point: Point) -> SimpleNamespace:
    """Histories as `tools/ours.py` reads them; training leaves out the last two items."""
    generator = np.random.default_rng(0)
    if point.length:
        lengths = np.full(point.users, point.length)
    else:
        lengths = np.clip(3 + generator.exponential(5.6, point.users), 3, 50).astype(np.int64)
    offsets = np.append(0, np.cumsum(lengths + 2))
    popularity = (np.arange(point.items) + 40.0) ** -0.9
    tokens = generator.choice(point.items, offsets[-1], p=popularity / popularity.sum())
    return SimpleNamespace(tokens=tokens.astype(np.int32), offsets=offsets, n_items=point.items, n_users=point.users)


def measure(point: Point) -> dict[str, Any]:
    """One point, in this process."""
    sys.path.append(str(Path(__file__).parent / "tools"))
    import torch
    from measure import peak_megabytes
    from ours import cloze_config, training_steps

    torch.manual_seed(0)
    steps = training_steps(generate(point), cloze_config(point.items, *point.settings))
    next(steps)
    seconds, n, has_enough = [], 0, False
    while not has_enough:
        started = time.perf_counter()
        n += next(steps)
        seconds.append(time.perf_counter() - started)
        total = sum(seconds)
        if point.curve == "users":
            has_enough = n >= point.users or total > EPOCH_SECONDS
        else:
            is_sure = total > LEAST_SECONDS and len(seconds) >= LEAST_STEPS
            has_enough = is_sure or total > ENOUGH_SECONDS
    return {
        "step_seconds": round(median(seconds), 4),
        "epoch_seconds": round(total * point.users / n, 3),
        "timed_steps": len(seconds),
        "sequences_per_second": round(n / total, 1),
        "peak_mb": round(peak_megabytes()),
    }


def line(point: Point, answer: dict[str, Any]) -> str:
    head = f"{point.curve:<8}{getattr(point, point.curve):>10,}  {point.loss:<16}"
    if "error" in answer:
        return head + answer["error"]
    epoch = f"{answer['epoch_seconds']:,.2f}" if point.curve == "users" else ""
    speed = f"{answer['step_seconds'] * 1000:>10,.0f}{answer['sequences_per_second']:>14,.0f}"
    return f"{head}{speed}{epoch:>12}{answer['peak_mb']:>10,}"


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Time above, memory below; a panel per curve, and a dotted line of what is in proportion."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    plt.rcParams.update({"font.size": 11, "figure.facecolor": "white"})
    titles = {"users": "users", "items": "items", "length": "length of a history", "dim": "width"}
    figure, grid = plt.subplots(2, 4, figsize=(14, 6.4), sharex="col")
    for column, (curve, title) in zip(grid.T, titles.items(), strict=True):
        is_epoch = curve == "users"
        time_key = "epoch_seconds" if is_epoch else "step_seconds"
        for axes, key in zip(column, (time_key, "peak_mb"), strict=True):
            for loss, colour in LOSSES.items():
                some = [p for p in points if (p["curve"], p["loss"]) == (curve, loss) and key in p]
                x, y = [p["x"] for p in some], [p[key] for p in some]
                axes.loglog(x, y, "o-", color=colour, label=loss if x else None, lw=2, ms=5)
                if key == time_key and x and loss == "cross-entropy":
                    line = [y[-1] * each / x[-1] for each in x]
                    axes.loglog(x, line, ":", color="#888", label="in proportion", zorder=0)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.minorticks_off()
            axes.grid(color="#e6e6e6")
            axes.spines[["top", "right"]].set_visible(False)
        of = "per epoch" if is_epoch else f"per step of {BATCH}"
        column[0].set_title(f"{title}\nseconds {of}", fontsize=11, loc="left")
        column[1].set_title("peak memory, MB", fontsize=11, loc="left")
        column[1].set_ylim(200, 8000)
        ticks = sorted({p["x"] for p in points if p["curve"] == curve})
        names = [f"{x:,}" if x < 1000 else f"{x // 1000:,}k" for x in ticks]
        column[1].set_xticks(ticks, [name.replace("1,000k", "1M") for name in names])
    grid[0, 1].legend(fontsize=9, frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer points; writes only to --out")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--chart", type=Path)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        print(json.dumps(measure(Point(**json.loads(arguments.point)))))
        return
    docs = None if arguments.quick else REPOSITORY / "docs"
    out = arguments.out or (docs and docs / "results" / "scaling.json")
    chart = arguments.chart or (docs and docs / "images" / "scaling.png")
    print(f"{'loss':>24}{'ms per step':>22}{'sequences/s':>14}{'s per epoch':>12}{'peak MB':>10}")
    answers = []
    for point in points(quick=arguments.quick):
        command = [sys.executable, str(Path(__file__).resolve()), "--point"]
        answer = run_tool([*command, json.dumps(asdict(point))], LIMIT)
        answers.append({**asdict(point), "x": getattr(point, point.curve), **answer})
        print(line(point, answer), flush=True)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "settings": {"batch": BATCH, "layers": 2, "precision": "float32", "n_negatives": NEGATIVES},
        "points": answers,
    }
    for answer in answers:
        if answer["items"] == MILLION and "error" not in answer:
            gb = answer["peak_mb"] * 2**20 / 1e9
            print(f"1,000,000 items, {answer['loss']}, batch {BATCH}: peak {gb:.2f} GB")
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
    if chart:
        draw(answers, chart)


if __name__ == "__main__":
    main()
