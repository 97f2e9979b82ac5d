"""What all tools share: the command line, the sequences, the clock and the answer.

Each tool's script is run in its own virtual environment with this folder on its path, so nothing
but the standard library and numpy is used here.
"""

import argparse
import json
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

WARM_UP_STEPS = 2
LEAST_STEPS = 3
WARM_UP_CALLS, CALLS = 20, 200
N_HISTORIES = 256  # how many different ones the task `one` goes through
TOP = 10
THREADS = 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("sequences", type=Path)
    parser.add_argument("--task", choices=("train", "score", "one"), required=True)
    parser.add_argument("--max-len", type=int, default=200)
    parser.add_argument("--mask-ratio", type=float, default=0.2)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--tuned", action="store_true", help="not its defaults but its fastest way")
    warnings.filterwarnings("ignore")  # the last line of the output is the answer; keep it short
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the seed of the tools that mask with numpy's global one
    return parser.parse_args()


class Sequences:
    """Histories in time order: training leaves out the last two items, scoring the last one."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self.tokens: np.ndarray = file["tokens"]
            self.offsets: np.ndarray = file["offsets"]
            self.n_items = int(file["n_items"])
        self.n_users = len(self.offsets) - 1

    def train(self) -> list[np.ndarray]:
        return self._without_last(2)

    def histories(self) -> list[np.ndarray]:
        return self._without_last(1)

    def _without_last(self, n: int) -> list[np.ndarray]:
        pairs = zip(self.offsets[:-1], self.offsets[1:] - n, strict=True)
        return [self.tokens[start:end] for start, end in pairs]


def users_in_random_order(n_users: int) -> np.ndarray:
    """So that a timed part of the users has the same mix of lengths as all of them."""
    return np.random.default_rng(0).permutation(n_users)


class Stopwatch:
    """Counts rows from the end of the warm-up to the end of the last step, data loading included.

    Call `step_done` after each step; it answers true when it is time to stop.
    """

    def __init__(self, seconds: float, warm_up: int = WARM_UP_STEPS) -> None:
        self.wanted, self.warm_up = seconds, warm_up
        self.steps = self.n = 0
        self.started = self.seconds = 0.0

    def step_done(self, n_rows: int) -> bool:
        now = time.perf_counter()
        self.steps += 1
        if self.steps <= self.warm_up:
            self.started = now
            return False
        self.n += n_rows
        self.seconds = now - self.started
        return self.seconds >= self.wanted and self.steps - self.warm_up >= LEAST_STEPS

    def time(self, steps: Iterable[int]) -> None:
        """Run steps that say how many rows they had, until it is time to stop."""
        for n_rows in steps:
            if self.step_done(n_rows):
                return
        if self.steps - self.warm_up < LEAST_STEPS:
            raise RuntimeError("too few steps to time: not enough sequences")


def median_milliseconds(call: Callable[[int], Any]) -> float:
    """Median time of `call(i)` for i = 0, 1, …, after a warm-up."""
    times = []
    for i in range(WARM_UP_CALLS + CALLS):
        started = time.perf_counter()
        call(i)
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP_CALLS:]) * 1000


def peak_megabytes() -> float:
    """The process's largest resident memory; workers of a data loader are not counted."""
    with open("/proc/self/status") as file:  # noqa: PTH123
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def report(
    tool: str,
    version: str,
    torch: str,
    arguments: argparse.Namespace,
    *,
    stopwatch: Stopwatch | None = None,
    p50_ms: float | None = None,
    note: str = "",
) -> None:
    """Print the answer as the last line, and end at once, before any library's clean-up talks."""
    answer = {
        "tool": tool,
        "version": version,
        "torch": torch,
        "task": arguments.task,
        "per_second": stopwatch and round(stopwatch.n / stopwatch.seconds, 2),
        "p50_ms": p50_ms and round(p50_ms, 3),
        "peak_mb": round(peak_megabytes()),
        "n": stopwatch.n if stopwatch else CALLS,
        "seconds": stopwatch and round(stopwatch.seconds, 2),
        "note": note,
    }
    print(json.dumps(answer), flush=True)
    os._exit(0)
