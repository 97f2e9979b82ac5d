"""Throughput and latency of the service, what batching gains, and what is left under overload.

    python benchmarks/serving/load.py [--rounds 5] [--seconds 3] [--out docs/results/serving]

The model has the size of ML-1M's (untrained weights cost the same), histories have 50 items, the
load generator runs on the same machine. Ways take turns, round after round, and the median counts:
a machine is never quiet. Overload has two forms: five times the peak, sent by clients that ignore
`Retry-After` (what really came in is reported), and five times the clients, who wait as it says.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from generators import HISTORY, N_ITEMS, WRK, Measured, by_client, load, percentile  # noqa: E402
from load_page import page  # noqa: E402
from served import Served, serve  # noqa: E402
from soak import Facts, machine, say  # noqa: E402

from bert4rec.config import load_config  # noqa: E402
from bert4rec.data.sequences import Vocabulary  # noqa: E402
from bert4rec.models.bert4rec import BERT4Rec  # noqa: E402
from bert4rec.recommender import Recommender  # noqa: E402

CONNECTIONS = (1, 8, 64)
OVERLOAD = 5
OVERLOAD_CONNECTIONS = 1000
PATIENT_CONNECTIONS = OVERLOAD * CONNECTIONS[-1]  # five times those that saturate
MODEL = ("model.dim=64", "model.layers=2", "model.heads=2", "model.max_len=200")
# The probe of recovery: connections and pause that leave a healthy server half idle.
PROBE_CONNECTIONS, PROBE_DELAY_MS, WINDOW = 4, 20.0, 0.25
NORMAL = 2.0  # times the probe's median before the overload


def save_model(directory: Path) -> None:
    config = load_config("default", None, list(MODEL))
    torch.manual_seed(0)
    model = BERT4Rec(N_ITEMS, config.model).eval()
    ids = [f"item-{token}" for token in range(N_ITEMS)]
    titles = [f"Title {token}" for token in range(N_ITEMS)]
    vocabulary = Vocabulary(ids, np.arange(N_ITEMS, 0, -1), titles)
    Recommender(model, vocabulary, config, {"data": {"fingerprint": "none"}}).save(directory)


@contextlib.contextmanager
def servers(*options: str) -> Iterator[tuple[Served, Served]]:
    """One as it is by default, one that answers one at a time; only one is loaded at any time."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_model(model)
        store = f"sqlite:{folder}"
        options = ("--no-access-log", *options)
        with (
            serve(model, *options, "--store", f"{store}/batching.db") as batching,
            serve(model, *options, "--store", f"{store}/alone.db", "--max-batch", "1") as alone,
        ):
            yield batching, alone


def facts_of(rounds: list[Measured]) -> Facts:
    """Medians, and the throughput of every round."""
    return {
        "per_second": round(median(each.ok_rate for each in rounds), 1),
        "p50_ms": round(median(each.p50_ms for each in rounds), 2),
        "p99_ms": round(median(each.p99_ms for each in rounds), 2),
        "n_failed": sum(each.n_overloaded + each.n_other + each.n_broken for each in rounds),
        "rounds_per_second": [round(each.ok_rate, 1) for each in rounds],
    }


def throughput(batching: Served, one_at_a_time: Served, n_rounds: int, seconds: float) -> Facts:
    found: dict[str, list[Measured]] = {}
    ways = [(str(n), batching, n) for n in CONNECTIONS]
    ways.append(("64, one at a time", one_at_a_time, 64))
    for number in range(1, n_rounds + 1):
        for name, served, connections in ways:
            measured = load(served.port, connections=connections, seconds=seconds)
            found.setdefault(name, []).append(measured)
            say(f"round {number}, connections {name}: {measured.ok_rate:,.0f} a second")
    return {name: facts_of(rounds) for name, rounds in found.items()}


def overload(batching: Served, n_rounds: int, seconds: float) -> Facts:
    """Peak, five times the peak by clients of two kinds, peak, recovery: round after round."""
    rounds = []
    for number in range(1, n_rounds + 1):
        before = asyncio.run(by_client(batching.port, PROBE_CONNECTIONS, seconds / 2, PROBE_DELAY_MS))
        peak_before = load(batching.port, connections=CONNECTIONS[-1], seconds=seconds).ok_rate
        wanted = OVERLOAD * peak_before
        measured = overloaded(batching.port, wanted, seconds * 2)
        recovered = recovery(batching.port, NORMAL * before.measured.p50_ms, seconds)
        peak_after = load(batching.port, connections=CONNECTIONS[-1], seconds=seconds).ok_rate
        patient = load(batching.port, connections=PATIENT_CONNECTIONS, seconds=seconds * 2, manner="patient")
        peak = (peak_before + peak_after) / 2
        rounds.append(
            {
                "peak_per_second": round(peak, 1),
                "sent_per_second": round(measured.sent_rate, 1),
                "ok_per_second": round(measured.ok_rate, 1),
                "refused_per_second": round(measured.n_overloaded / measured.seconds, 1),
                "n_failed": measured.n_other + measured.n_broken,
                "p50_ms": measured.p50_ms,
                "p99_ms": measured.p99_ms,
                "goodput_share": round(measured.ok_rate / peak, 3),
                "patient_ok_per_second": round(patient.ok_rate, 1),
                "patient_refused_per_second": round(patient.n_overloaded / patient.seconds, 1),
                "patient_goodput_share": round(patient.ok_rate / peak, 3),
                "recovered_after_seconds": seconds if recovered is None else recovered,
            }
        )
        say(f"round {number}, overload: {rounds[-1]}")
    medians: Facts = {name: round(median(e[name] for e in rounds), 3) for name in rounds[0]}
    sizes = {"connections": OVERLOAD_CONNECTIONS, "patient_connections": PATIENT_CONNECTIONS}
    return medians | sizes | {"rounds": rounds}


def overloaded(port: int, wanted: float, seconds: float) -> Measured:
    """A client waits for its response first: its pause is made shorter by that time.

    A server that keeps all clients waiting gets less than is wanted, whatever their pause.
    """
    between_ms = delay_ms = OVERLOAD_CONNECTIONS / wanted * 1000
    for _ in range(4):
        tried = load(port, connections=OVERLOAD_CONNECTIONS, seconds=2, delay_ms=delay_ms)
        if 0.95 < tried.sent_rate / wanted < 1.1:
            break
        too_long_ms = OVERLOAD_CONNECTIONS / tried.sent_rate * 1000 - between_ms
        delay_ms = max(1.0, delay_ms - 0.7 * too_long_ms)
    return load(port, connections=OVERLOAD_CONNECTIONS, seconds=seconds, delay_ms=delay_ms)


def recovery(port: int, normal_ms: float, seconds: float) -> float | None:
    """Seconds until the probe's median is normal for good; None if it never was."""
    began = time.monotonic()
    probed = asyncio.run(by_client(port, PROBE_CONNECTIONS, seconds, PROBE_DELAY_MS))
    windows: dict[int, list[float]] = {}
    for moment, took in probed.times:
        windows.setdefault(int((moment - began) / WINDOW), []).append(took)
    last_slow = max(
        (window for window in range(int(seconds / WINDOW)) if percentile(windows.get(window, []), 50) > normal_ms),
        default=-1,
    )
    after = round((last_slow + 1) * WINDOW, 2)
    return after if after < seconds else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3, help="of one measurement")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs/results/serving")
    parser.add_argument("--serve", default="", help="more options of bert4rec serve, in one word")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = machine() | {
        "generator": "wrk" if WRK else "python, which is slower: install wrk",
        "model": {"items": N_ITEMS, "history": HISTORY, "settings": MODEL},
        "rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "serve_options": arguments.serve,
    }
    with servers(*arguments.serve.split()) as (batching, one_at_a_time):
        for served in (batching, one_at_a_time):
            load(served.port, connections=8, seconds=1)  # warm
        rates = throughput(batching, one_at_a_time, arguments.rounds, arguments.seconds)
        result["throughput"] = rates
        gain = rates["64"]["per_second"] / rates["64, one at a time"]["per_second"]
        result["batching_gain"] = round(gain, 2)
        result["overload"] = overload(batching, arguments.rounds, arguments.seconds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=2)
    (arguments.out / "load.json").write_text(text + "\n", encoding="utf-8")
    (arguments.out / "load.md").write_text(page(result), encoding="utf-8")
    print(page(result))


if __name__ == "__main__":
    main()
