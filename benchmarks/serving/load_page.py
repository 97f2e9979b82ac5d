"""The results of load.py as a page of Markdown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from marked_tables import wrap_prose


def page(result: dict[str, Any]) -> str:
    lines = [
        "# Load on the service",
        "",
        f"Made by `benchmarks/serving/load.py` on {result['date'][:10]}: {result['cores']} cores, "
        f"load by {result['generator']} on the same machine, one worker, a model of "
        f"{result['model']['items']:,} items ({', '.join(result['model']['settings'])}), histories "
        f"of {result['model']['history']}. Medians of {result['rounds']} rounds of "
        f"{result['seconds']:g} s that took turns.",
        "",
        "| connections | requests per second | p50, ms | p99, ms | failed |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, facts in result["throughput"].items():
        lines.append(
            f"| {name} | {facts['per_second']:,.0f} | {facts['p50_ms']:.1f} "
            f"| {facts['p99_ms']:.1f} | {facts['n_failed']} |"
        )
    over = result["overload"]
    times = over["sent_per_second"] / over["peak_per_second"]
    shares = ", ".join(f"{each['goodput_share']:.0%}" for each in over["rounds"])
    patient = ", ".join(f"{each['patient_goodput_share']:.0%}" for each in over["rounds"])
    lines += [
        "",
        f"Batching gains {result['batching_gain']:.1f}x at 64 connections.",
        "",
        "| overload | clients that ignore Retry-After | clients that obey it |",
        "|---|---:|---:|",
        f"| clients | {over['connections']:,} | {over['patient_connections']:,} |",
        f"| peak at 64 connections, before and after | {over['peak_per_second']:,.0f} per second | |",
        f"| sent | {over['sent_per_second']:,.0f} ({times:.1f} times the peak) | |",
        f"| refused with 503 | {over['refused_per_second']:,.0f} | {over['patient_refused_per_second']:,.0f} |",
        f"| answered with 200 | {over['ok_per_second']:,.0f} | {over['patient_ok_per_second']:,.0f} |",
        f"| goodput, share of the peak | **{over['goodput_share']:.0%}** | **{over['patient_goodput_share']:.0%}** |",
        f"| in each round | {shares} | {patient} |",
        "",
        f"Over all responses to clients that ignore it, refusals included, p50 was {over['p50_ms']:.0f} ms and "
        f"p99 {over['p99_ms']:.0f} ms. Latency was normal again "
        f"{over['recovered_after_seconds']:g} s after the overload ended (medians of the rounds).",
        "",
    ]
    return wrap_prose("\n".join(lines))
