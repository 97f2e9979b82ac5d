"""The results of load.py as a page of Markdown."""

from __future__ import annotations

from typing import Any


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
        "| connections | requests a second | p50, ms | p99, ms | failed |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, facts in result["throughput"].items():
        lines.append(
            f"| {name} | {facts['per_second']:,.0f} | {facts['p50_ms']:.1f} "
            f"| {facts['p99_ms']:.1f} | {facts['n_failed']} |"
        )
    over = result["overload"]
    recovered = over["recovered_after_seconds"]
    lines += [
        "",
        f"Batching gains {result['batching_gain']:.1f}x at 64 connections.",
        "",
        "| overload, five times the peak | a second |",
        "|---|---:|",
        f"| peak at 64 connections | {over['peak_per_second']:,.0f} |",
        f"| wanted by {over['connections']:,} clients | {over['wanted_per_second']:,.0f} |",
        f"| sent, as they wait for their answers | {over['sent_per_second']:,.0f} |",
        f"| answered with 200 | {over['ok_per_second']:,.0f} |",
        f"| refused with 503 | {over['overloaded_per_second']:,.0f} |",
        "",
        f"Goodput is {over['goodput_share']:.0%} of the peak; p50 {over['p50_ms']:.0f} ms and p99 "
        f"{over['p99_ms']:.0f} ms over all answers, refusals too. "
        + (
            "The service did not recover while it was watched."
            if recovered is None
            else f"p99 was normal again {recovered:g} s after the overload ended."
        ),
        "",
    ]
    return "\n".join(lines)
