"""Which interactions are kept. Filters apply in the order of their fields and report each step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field

from bert4rec.settings import Count, Settings

if TYPE_CHECKING:  # settings are read without loading DuckDB
    import duckdb

Dropped = dict[str, Any]  # {"step", "rows", "users", "items"}

# The rows to keep, as SQL over `events` and its counts; {value} is the filter's setting.
_KEEP = {
    "min_rating": "SELECT * FROM events WHERE rating >= {value}",
    "drop_repeats": "SELECT * FROM events QUALIFY row_number() OVER "
    '(PARTITION BY "user", item ORDER BY "time", row) = 1',
    "min_item_actions": "SELECT * FROM events WHERE item IN (SELECT code FROM item_counts WHERE n >= {value})",
    "min_user_actions": 'SELECT * FROM events WHERE "user" IN (SELECT code FROM user_counts WHERE n >= {value})',
}

_MINIMA = ("min_item_actions", "min_user_actions", "k_core")


@dataclass(frozen=True)
class Filters:
    """What to drop, in this order.

    min_rating: interactions rated lower than this.
    drop_repeats: a user's interactions with an item, except the first.
    min_item_actions, then min_user_actions: one pass each, as for the papers' data sets. So an item
        may end up below its minimum when its users leave.
    k_core: users and items with fewer than k actions, repeated until none is left.
    """

    min_rating: float | None = None
    drop_repeats: bool = False
    min_item_actions: int = 0
    min_user_actions: int = 0
    k_core: int = 0

    def __post_init__(self) -> None:
        if self.min_rating is not None and not math.isfinite(self.min_rating):
            raise ValueError(f"min_rating is {self.min_rating}: choose a number, or None for all")
        for name in _MINIMA:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it cannot be negative")

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def apply(self, events: Events, progress: Callable[[str], None]) -> list[Dropped]:
        """Shrink the events; return what each active filter dropped."""
        dropped = []
        for name, value in self.as_dict().items():
            if value is None or value is False or (name in _MINIMA and value < 2):
                continue  # every user and item has one action
            before = events.totals()
            if name == "k_core":
                _peel(events, value)
            else:
                events.keep(_KEEP[name].format(value=value))
            after = events.totals()
            step = name if value is True else f"{name}={value:g}"
            counts = {what: before[what] - after[what] for what in before}
            dropped.append({"step": step, **counts})
            progress(describe_step(dropped[-1]))
        return dropped


class Events(Protocol):
    """What the filters need of the events, which are on one machine or on many."""

    def totals(self) -> dict[str, int]:
        """Numbers of rows, users and items."""
        ...

    def keep(self, kept: str) -> None:
        """Keep only the rows of the query `kept` over events, user_counts and item_counts.

        The query sees all rows of a user together, and the counts of all events.
        """
        ...


class LocalEvents:
    """The view `events` of one database, with its counts."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    def totals(self) -> dict[str, int]:
        return totals(self._connection)

    def keep(self, kept: str) -> None:
        self._connection.execute(f"CREATE TABLE kept AS {kept}")
        self._connection.execute("DROP TABLE IF EXISTS all_events")
        self._connection.execute("ALTER TABLE kept RENAME TO all_events")
        self._connection.execute("CREATE OR REPLACE VIEW events AS SELECT * FROM all_events")
        count_events(self._connection)


def count_events(connection: duckdb.DuckDBPyConnection) -> None:
    for role in ("user", "item"):
        connection.execute(
            f'CREATE OR REPLACE TABLE {role}_counts AS SELECT "{role}" AS code, count(*) AS n FROM events GROUP BY 1'
        )


def describe_step(step: Dropped) -> str:
    return f"{step['step']} dropped {step['rows']:,} rows, {step['users']:,} users, {step['items']:,} items"


def totals(connection: duckdb.DuckDBPyConnection) -> dict[str, int]:
    found = connection.execute(
        "SELECT coalesce(sum(n), 0)::BIGINT, count(*), (SELECT count(*) FROM item_counts) FROM user_counts"
    ).fetchone()
    assert found is not None
    return {"rows": found[0], "users": found[1], "items": found[2]}


def _peel(events: Events, k: int) -> None:
    before, after = -1, events.totals()["rows"]
    while before != after:
        for side in ("min_item_actions", "min_user_actions"):
            events.keep(_KEEP[side].format(value=k))
        before, after = after, events.totals()["rows"]


class DataSettings(Settings):
    min_user_actions: Count = Field(0, description="drop users with fewer actions than this")
    min_item_actions: Count = Field(0, description="drop items with fewer actions than this")
    k_core: Count = Field(0, description="repeat both minimum filters with this number until stable")
    min_rating: float | None = Field(None, description="drop interactions rated lower than this")
    drop_repeats: bool = Field(False, description="keep a user's first action on an item only")
    split: Literal["leave-one-out", "global-time"] = Field(
        "leave-one-out", description="how the test and validation items are held out"
    )
