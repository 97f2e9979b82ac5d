"""Ways to compute the cross-entropy over all items and its gradients, in time and memory.

    python benchmarks/losses.py [--cases 600x3416 ...] [--out docs/results/losses.json]

A case is query positions x items at width 64; --out keeps what it has of other cases. All ways get
the same tensors, add to the same gradients, take turns round after round, and may keep freed memory
(`bert4rec.cpu_tuning`); the median counts. Memory is the largest that one call adds. Run it on an
idle machine: beside other work, operations split over two threads wait for each other.
"""

import argparse
import ctypes
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert4rec.cpu_tuning import keep_freed_memory
from bert4rec.losses.cross_entropy import FEWEST_ROWS, LOGITS_BYTES, add_cross_entropy

CASES = ["600x3416", "500x54542", "10240x3416", "64x1000000"]
DIM = 64
TOO_MUCH = 4e9  # bytes: a way that would need more is left out
SHORT_CALL = 0.05  # seconds: shorter ones are repeated within a round
LONG_CALL = 5  # seconds: a way whose second call, already compiled, takes longer is left out
ROUNDS = 3  # at least
Way = Callable[[], float]


class Case:
    """The tensors of one case, with gradients that are added to in place."""

    def __init__(self, rows: int, items: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows, self.items, self.scale = rows, items, 1 / rows
        self.h = torch.randn(rows, DIM, generator=generator)
        self.weight = nn.Parameter(torch.randn(items, DIM, generator=generator) * 0.1)
        self.bias = nn.Parameter(torch.zeros(items))
        self.targets = torch.randint(items, (rows,), generator=generator)
        for parameter in (self.weight, self.bias):
            parameter.grad = torch.zeros_like(parameter)
        self.grad_h: Tensor | None = None
        self.too_slow: dict[str, str] = {}  # ways, and how long a call took

    def ours(self, memory: int) -> float:
        given = self.h, self.weight.detach(), self.bias.detach(), self.targets
        gradients = self.weight.grad, self.bias.grad
        loss, self.grad_h = add_cross_entropy(*given, *gradients, scale=self.scale, memory=memory)
        return float(loss)

    def by_autograd(self, function: Callable[..., Tensor]) -> float:
        h = self.h.clone().requires_grad_()
        loss = function(h, self.weight, self.bias, self.targets) * self.scale
        loss.backward()
        self.grad_h = h.grad
        return float(loss.detach())


def plain(h: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, weight, bias), targets, reduction="sum")


def fused(h: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.linear_cross_entropy(h, weight, targets, linear_bias=bias, reduction="sum", **options)


def ways_of(case: Case) -> dict[str, tuple[float, Way]]:
    """Name: about how many bytes it needs, and a call of it."""
    once = max(LOGITS_BYTES, 4 * case.items * min(FEWEST_ROWS, case.rows))
    logits, table = 4 * case.rows * case.items, 4 * DIM * case.items
    ways: dict[str, tuple[float, Way]] = {
        "ours, once": (once, lambda: case.ours(once)),
        "ours, twice": (0, lambda: case.ours(0)),
        "plain": (3 * logits + table, lambda: case.by_autograd(plain)),
        "F.linear_cross_entropy": (3 * logits + table, lambda: case.by_autograd(fused)),
    }
    if hasattr(nn, "LinearCrossEntropyOptions"):
        chunked = functools.partial(fused, options=nn.LinearCrossEntropyOptions())
        ways["the same, chunked"] = (logits + table, lambda: case.by_autograd(chunked))
    compiled = torch.compile(plain, dynamic=False)
    ways["plain, torch.compile"] = (3 * logits + table, lambda: case.by_autograd(compiled))
    return ways


def status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def added_memory(way: Way) -> int:
    ctypes.CDLL(None).malloc_trim(0)  # gives back what earlier calls left
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status_bytes("VmRSS")
    way()
    return max(0, status_bytes("VmHWM") - before)


def seconds_of(way: Way, repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        way()
    return (time.perf_counter() - started) / repeats


def checked(case: Case, ways: dict[str, tuple[float, Way]]) -> tuple[dict[str, Way], dict[str, str]]:
    """The ways that work here and agree with the first one, and why the others do not."""
    good: dict[str, Way] = {}
    bad: dict[str, str] = {}
    expected: tuple[float, Tensor] | None = None
    for name, (needed, way) in ways.items():
        if needed > TOO_MUCH or name in case.too_slow:
            bad[name] = case.too_slow.get(name, f"left out: needs about {needed / 1e9:.1f} GB")
            continue
        try:
            if seconds_of(way, 1) > LONG_CALL and (seconds := seconds_of(way, 1)) > LONG_CALL:
                bad[name] = case.too_slow[name] = f"left out: a call takes {seconds:.0f} s"
                continue
            loss = way()
        except Exception as error:  # no compiler, say
            bad[name] = f"failed: {type(error).__name__}"
            continue
        assert case.grad_h is not None
        expected = expected or (loss, case.grad_h)
        torch.testing.assert_close(loss, expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(case.grad_h, expected[1], rtol=1e-3, atol=1e-6)
        good[name] = way
    return good, bad


def measure(case: Case, threads: int, seconds: float) -> list[dict[str, Any]]:
    """All ways in turn until `seconds` are over, but at least ROUNDS times."""
    torch.set_num_threads(threads)
    torch.compiler.reset()  # compiled code is for a number of threads
    ways, bad = checked(case, ways_of(case))
    memory = {name: added_memory(way) for name, way in ways.items()}
    repeats = {name: max(1, round(SHORT_CALL / seconds_of(way, 1))) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    started, n = time.perf_counter(), 0
    while n < ROUNDS or time.perf_counter() - started < seconds:
        for name, way in ways.items():
            if sum(times[name]) < seconds:  # a very slow one has fewer rounds
                times[name].append(seconds_of(way, repeats[name]))
        n += 1
    same = {"rows": case.rows, "items": case.items, "threads": threads}
    return [
        {
            **same,
            "way": name,
            "ms": round(median(each) * 1e3, 3),
            "ns_per_logit": round(median(each) * 1e9 / (case.rows * case.items), 3),
            "added_mb": round(memory[name] / 2**20, 1),
            "rounds": len(each),
        }
        for name, each in times.items()
    ] + [{**same, "way": name, "error": reason} for name, reason in bad.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="ROWSxITEMS")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, min(2, os.cpu_count() or 1)])
    parser.add_argument("--seconds", type=float, default=4, help="of each case and thread count")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    keep_freed_memory()
    answers = []
    for words in arguments.cases:
        case = Case(*map(int, words.split("x")))
        for threads in arguments.threads:
            print(f"\n{case.rows:,} queries, {case.items:,} items, {threads} threads")
            for answer in measure(case, threads, arguments.seconds):
                answers.append(answer)
                figures = answer.get("error") or (
                    f"{answer['ms']:>10,.1f} ms{answer['ns_per_logit']:>8.2f} ns per logit"
                    f"{answer['added_mb']:>9,.0f} MB"
                )
                print(f"  {answer['way']:<24}{figures}", flush=True)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        new = {(answer["rows"], answer["items"], answer["threads"]) for answer in answers}
        old = json.loads(arguments.out.read_text())["results"] if arguments.out.exists() else []
        kept = [each for each in old if (each["rows"], each["items"], each["threads"]) not in new]
        result = {"torch": torch.__version__, "dim": DIM, "results": kept + answers}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
