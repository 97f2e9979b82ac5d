"""Seconds and bytes as people say them, with no more digits than an estimate deserves."""

from __future__ import annotations

TIMES = (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))
SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6))


def duration(seconds: float) -> str:
    """Days only from two of them on: 30 h says more than 1.2 days."""
    for unit, size in TIMES:
        if seconds >= (2 * size if unit == "days" else size):
            return f"{two_digits(seconds / size)} {unit}"
    return f"{two_digits(seconds / 1e-3)} ms"


def size(n_bytes: float) -> str:
    for unit, each in SIZES:
        if n_bytes >= each:
            return f"{two_digits(n_bytes / each)} {unit}"
    return f"{two_digits(n_bytes / 1e6)} MB"


def two_digits(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{float(f'{value:.2g}'):,.0f}"


def count(value: float) -> str:
    """1 million, 50 thousand; other numbers as they are."""
    for word, each in (("billion", 10**9), ("million", 10**6), ("thousand", 10**3)):
        if value >= each and value % each == 0:
            return f"{int(value) // each:,} {word}"
    return f"{value:,.0f}"
