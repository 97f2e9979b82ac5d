"""Which interactions are kept. Applied in the order of the fields; every step says what it cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import duckdb

# The rows to keep, as SQL over `events`; {value} is the filter's setting.
_KEEP = {
    "min_rating": "SELECT * FROM events WHERE rating >= {value}",
    "drop_repeats": "SELECT * FROM events QUALIFY row_number() OVER "
    '(PARTITION BY "user", item ORDER BY "time", row) = 1',
    "min_item_actions": "SELECT * FROM events WHERE item IN "
    "(SELECT item FROM events GROUP BY item HAVING count(*) >= {value})",
    "min_user_actions": 'SELECT * FROM events WHERE "user" IN '
    '(SELECT "user" FROM events GROUP BY "user" HAVING count(*) >= {value})',
    "keep_last": "SELECT * FROM events QUALIFY row_number() OVER "
    '(PARTITION BY "user" ORDER BY "time" DESC, row DESC) <= {value}',
}

_MINIMA = ("min_item_actions", "min_user_actions", "k_core")


@dataclass(frozen=True)
class Filters:
    """What to leave out, in this order.

    min_rating: only interactions rated at least this.
    drop_repeats: only the first of a user's interactions with the same item.
    min_item_actions, then min_user_actions: one pass each, as the papers' data sets were made; so
        an item may end up below its minimum when its users leave.
    k_core: users and items with fewer than k actions, again and again until none is left.
    keep_last: only the last N interactions of a user.
    """

    min_rating: float | None = None
    drop_repeats: bool = False
    min_item_actions: int = 0
    min_user_actions: int = 0
    k_core: int = 0
    keep_last: int | None = None

    def __post_init__(self) -> None:
        if self.min_rating is not None and not math.isfinite(self.min_rating):
            raise ValueError(f"min_rating is {self.min_rating}: choose a number, or None for all")
        for name in _MINIMA:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it cannot be negative")
        if self.keep_last is not None and self.keep_last < 2:
            raise ValueError(f"keep_last is {self.keep_last}: a sequence needs at least 2 actions")

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def apply(
        self, connection: duckdb.DuckDBPyConnection, progress: Callable[[str], None]
    ) -> list[dict[str, Any]]:
        """Shrink the table `events`; what each active filter dropped."""
        dropped = []
        for name, value in self.as_dict().items():
            if value is None or value is False or (name in _MINIMA and value < 2):
                continue  # every user and item has one action
            before = totals(connection)
            if name == "k_core":
                _peel(connection, value)
            else:
                _replace_events(connection, _KEEP[name].format(value=value))
            after = totals(connection)
            step = name if value is True else f"{name}={value:g}"
            counts = {what: before[what] - after[what] for what in before}
            dropped.append({"step": step, **counts})
            progress(describe_step(dropped[-1]))
        return dropped


def describe_step(step: dict[str, Any]) -> str:
    return (
        f"{step['step']} dropped {step['rows']:,} rows, "
        f"{step['users']:,} users, {step['items']:,} items"
    )


def totals(connection: duckdb.DuckDBPyConnection) -> dict[str, int]:
    found = connection.execute(
        'SELECT count(*), count(DISTINCT "user"), count(DISTINCT item) FROM events'
    ).fetchone()
    assert found is not None
    return {"rows": found[0], "users": found[1], "items": found[2]}


def _peel(connection: duckdb.DuckDBPyConnection, k: int) -> None:
    before, after = -1, totals(connection)["rows"]
    while before != after:
        for side in ("min_item_actions", "min_user_actions"):
            _replace_events(connection, _KEEP[side].format(value=k))
        before, after = after, totals(connection)["rows"]


def _replace_events(connection: duckdb.DuckDBPyConnection, kept: str) -> None:
    connection.execute(f"CREATE TABLE kept AS {kept}")
    connection.execute("DROP TABLE events")
    connection.execute("ALTER TABLE kept RENAME TO events")
