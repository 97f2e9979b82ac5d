"""Times as integers: the unit that the rows are in, and the SQL that reads them.

The decision rests on counts that add up, so that a table in many files, read on many machines, gets
the same times as in one file.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import duckdb

from bert4rec.data.database import fetch_row
from bert4rec.data.interactions import Interactions
from bert4rec.data.table_sql import ColumnKind

TimeUnit = Literal["us", "ns"]
# Today is 1.8e9 s, 1.8e12 ms, 1.8e15 us, 1.8e18 ns: (from, below, factor to integers) per unit.
UNITS = ((0.0, 1e11, 10**6), (1e11, 1e14, 1000), (1e14, 1e17, 1), (1e17, 1e19, 1))
NANOSECONDS_FROM = UNITS[-1][0]
MAX_RATING = 100
SMALLEST = 1e-9  # what is smaller, and zero, counts as this: it has no logarithm
DECADE = 64  # histogram bins per factor of ten; every limit of UNITS is an edge of a bin

_NUMBER = 'TRY_CAST("time" AS DOUBLE)'
_DATE = 'TRY_CAST("time" AS TIMESTAMPTZ)'
_FINER = "regexp_extract(\"time\", '[.][0-9]{6}([0-9]{1,3})', 1)"  # digits below microseconds


@dataclass(frozen=True)
class TimeFacts:
    n_numbers: int
    n_dates: int
    n_finer: int  # dates with digits below microseconds
    largest: float = 0.0  # of the numbers that int64 holds
    sizes: Counter[float] = field(default_factory=Counter)  # how many of them in each bin of the logarithm

    def __add__(self, other: TimeFacts) -> TimeFacts:
        return TimeFacts(
            self.n_numbers + other.n_numbers,
            self.n_dates + other.n_dates,
            self.n_finer + other.n_finer,
            max(self.largest, other.largest),
            self.sizes + other.sizes,
        )

    @property
    def median(self) -> float:
        """The lower edge of the bin of the median: at most 4 % too small."""
        n_before, half = 0, (sum(self.sizes.values()) + 1) // 2
        for size, n in sorted(self.sizes.items()):
            n_before += n
            if n_before >= half:
                return math.pow(10, size / DECADE)
        return 0.0


def time_facts(connection: duckdb.DuckDBPyConnection, rows: str, kind: ColumnKind) -> TimeFacts:
    """What the times of the rows look like."""
    if kind == "timestamp":
        (n,) = fetch_row(connection, f'SELECT count(*) FILTER (isfinite("time")) FROM {rows}')
        return TimeFacts(0, n, 0)
    is_text = kind == "text"
    dates = f"count(*) FILTER (isfinite({_DATE}))" if is_text else "0"
    finer = f"count(*) FILTER (isfinite({_DATE}) AND {_FINER} != '')" if is_text else "0"
    fits = f"abs({_NUMBER}) < 9.2e18"  # what int64 holds
    size = f"floor(log10(greatest(abs({_NUMBER}), {SMALLEST})) * {DECADE})"
    n_numbers, n_dates, n_finer, largest, sizes = fetch_row(
        connection,
        f"SELECT count(*) FILTER (isfinite({_NUMBER})), {dates}, {finer}, "
        f"max(abs({_NUMBER})) FILTER ({fits}), histogram({size}) FILTER ({fits}) FROM {rows}",
    )
    return TimeFacts(n_numbers, n_dates, n_finer, largest or 0.0, Counter(sizes or {}))


def time_expression(facts: TimeFacts, kind: ColumnKind, interactions: Interactions) -> tuple[str, TimeUnit]:
    """SQL for the time of a row as an integer (NULL if unreadable), and its unit.

    Nanoseconds are kept, as rounding them could make ties; everything else becomes microseconds.
    """
    if kind == "timestamp":
        return 'CASE WHEN isfinite("time") THEN epoch_us("time") END', "us"
    if facts.n_dates > facts.n_numbers:
        microseconds = f"CASE WHEN isfinite({_DATE}) THEN epoch_us({_DATE}) END"
        if not facts.n_finer:
            return microseconds, "us"
        nanoseconds = f"TRY_CAST(rpad({_FINER}, 3, '0') AS BIGINT)"
        return (f"TRY_CAST(({microseconds})::HUGEINT * 1000 + coalesce({nanoseconds}, 0) AS BIGINT)"), "ns"
    guessed = next((table for table in interactions.tables if table.is_time_guessed), None)
    if guessed is not None and facts.sizes and facts.largest <= MAX_RATING:
        column = guessed.columns[guessed.roles["time"]]
        raise ValueError(
            f"{guessed.name} has no header, and its {column} looks like a rating, not a time (it "
            f"is at most {facts.largest:g}): pass rating={column!r} (--rating {column}) if it is "
            f"one, time={column!r} (--time {column}) otherwise"
        )
    return _number_expression(facts.median, kind)


def _number_expression(median: float, kind: ColumnKind) -> tuple[str, TimeUnit]:
    """Times as numbers, in the unit of the median: one absurd time must not decide for all.

    A number that belongs to another unit and is 100 times off the median is NULL: a bad row.
    """
    least, limit, factor = next(unit for unit in UNITS if median < unit[1])
    low, high = min(least, median / 100), max(limit, median * 100)
    unit: TimeUnit = "ns" if least == NANOSECONDS_FROM else "us"
    is_absurd = f"NOT abs({_NUMBER}) BETWEEN {low} AND {high}"
    # Integers do not go through floats, which would round nanoseconds.
    whole = f'TRY_CAST(TRY_CAST("time" AS HUGEINT) * {factor} AS BIGINT)'
    if kind == "integer":
        return f"CASE WHEN {is_absurd} THEN NULL ELSE {whole} END", unit
    return (
        f"CASE WHEN {is_absurd} THEN NULL "
        f"WHEN regexp_full_match(\"time\", '[-+]?[0-9]{{1,19}}') THEN {whole} "
        f"WHEN isfinite({_NUMBER}) THEN TRY_CAST(round({_NUMBER} * {factor}) AS BIGINT) END"
    ), unit
