"""Hostile requests in number against a real server, with what came of them as JSON.

    .venv/bin/python benchmarks/serving/fuzz.py [--model DIR] [--output fuzz.json]

At least 10,000 made-up requests, 50 bodies of 200 MB at once, 200 slow clients. Without --model an
untrained one is used. Ends with an error if anything that must hold does not. Needs the dev extra.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from hostile.cases import CUT_OFF, HEADS, INVALID
from hostile.fuzz import ERROR_BODY, Outcome, by_description, by_hand
from hostile.large import megabytes, push_many, reset_peak
from hostile.raw import ask, head, post
from hostile.slow import KINDS, LONG_TITLES, asking_steadily, seconds_until_closed
from served import Served, save_model, serve

NO_KEY = "X-No: key"


def made_up(server: Served, n_cases: int) -> dict[str, object]:
    """Rounds with other random numbers, until there are enough."""
    total = Outcome()
    outcomes = [by_list(server)]
    number = 0
    while sum(outcome.total for outcome in outcomes) < n_cases:
        number += 1
        outcomes += [by_description(server.url, 60, number, {}), by_hand(server.url, 3000, number, {})]
        print(f"{sum(outcome.total for outcome in outcomes):,} requests", flush=True)
    for outcome in outcomes:
        total.by_status += outcome.by_status
        total.n_hangs += outcome.n_hangs
        total.largest_error = max(total.largest_error, outcome.largest_error)
        total.slowest = max(total.slowest, outcome.slowest)
        total.faults += outcome.faults
    holds = total.n_5xx == total.n_hangs == 0 and total.largest_error < ERROR_BODY
    return {"holds": holds and not total.faults, **total.as_json()}


def by_list(server: Served) -> Outcome:
    """The hand-written ones of the tests."""
    outcome = Outcome()
    requests = [(post(path, body), False) for path, body in INVALID.values()]
    requests += [(request, False) for request, _ in HEADS.values()]
    requests += [(request, True) for request, _ in CUT_OFF.values()]
    for request, then_ends in requests:
        began = time.monotonic()
        try:
            answer = ask(server.port, request, then_ends=then_ends)
        except TimeoutError:
            outcome.n_hangs += 1
            continue
        outcome.note(answer.status, len(answer.body), time.monotonic() - began)
    return outcome


def large_bodies(server: Served, n: int, n_bytes: int) -> dict[str, object]:
    [worker] = server.workers()
    reset_peak(worker)
    before = megabytes(worker, "VmRSS")
    began = time.monotonic()
    statuses = push_many(server.port, n, n_bytes)
    rise = megabytes(worker) - before
    return {
        "holds": rise < 100 and set(statuses) <= {0, 413, 415},
        "bodies": n,
        "bytes_each": n_bytes,
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "rise_of_memory_mb": round(rise, 1),
        "seconds": round(time.monotonic() - began, 2),
    }


def slow_clients(server: Served, n: int) -> dict[str, object]:
    [worker] = server.workers()
    with asking_steadily(server.port, NO_KEY) as alone:
        time.sleep(10)
    kinds = [KINDS[number % len(KINDS)] for number in range(n)]
    with asking_steadily(server.port, NO_KEY) as beside:
        closed = seconds_until_closed(server.port, worker, kinds, NO_KEY, within=60)
    latencies = {
        name: {
            "requests": len(found.seconds),
            "failed": found.n_failed,
            "p50_ms": round(found.quantile(0.5) * 1000, 2),
            "p99_ms": round(found.quantile(0.99) * 1000, 2),
        }
        for name, found in (("alone", alone), ("beside", beside))
    }
    return {
        "holds": max(closed) <= 30 and alone.n_failed == beside.n_failed == 0,
        "clients": n,
        "kinds": [kind.__name__ for kind in KINDS],
        "closed": sum(seconds < float("inf") for seconds in closed),
        "last_closed_after_seconds": round(max(closed), 1) if max(closed) < 1e9 else None,
        "latency_of_another": latencies,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="directory of a trained model")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--output", type=Path, help="write the result there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bert4rec-fuzz-") as folder:
        model = options.model or Path(folder) / "model"
        if options.model is None:  # long titles, so that a batch has an answer of several megabytes
            save_model(model, titles=LONG_TITLES)
        with serve(model, "--store", f"sqlite:{folder}/histories.db") as server:
            workers = server.workers()
            result = {
                "made_up_requests": made_up(server, options.cases),
                "large_bodies": large_bodies(server, 50, 200 * 2**20),
                "slow_clients": slow_clients(server, 200),
            }
            is_well = server.workers() == workers
            is_well &= ask(server.port, head("GET", "/readyz")).status == 200
            n_errors = sum(line["level"] == "error" for line in server.log_lines())
    result["afterwards"] = {"holds": is_well and not n_errors, "errors_in_the_log": n_errors}
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    if not all(part["holds"] for part in result.values()):
        sys.exit("something does not hold")


if __name__ == "__main__":
    main()
