"""Which interactions are kept. Filters apply in a fixed order and report each step."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from bert4rec.settings import Count, Settings

Dropped = dict[str, Any]  # {"step", "rows", "users", "items"}

# The rows to keep, as SQL over all events of a user together and the counts of all users and items.
KEEP = {
    "min_rating": "SELECT * FROM {events} WHERE rating >= {value}",
    "drop_repeats": "SELECT * FROM {events} QUALIFY row_number() OVER "
    '(PARTITION BY "user", item ORDER BY "time", row) = 1',
    "min_item_actions": "SELECT * FROM {events} WHERE item IN (SELECT code FROM {item_counts} WHERE n >= {value})",
    "min_user_actions": 'SELECT * FROM {events} WHERE "user" IN (SELECT code FROM {user_counts} WHERE n >= {value})',
}
ORDER = (*KEEP, "k_core")


class Filters(Settings):
    """What to drop, in the order min_rating, drop_repeats, min_item_actions, min_user_actions, k_core.

    The minima are one pass each, as for the papers' data sets. So an item may end up below its
    minimum when its users leave. `k_core` repeats both passes until none is left below.
    """

    min_user_actions: Count = Field(0, description="drop users with fewer actions than this")
    min_item_actions: Count = Field(0, description="drop items with fewer actions than this")
    k_core: Count = Field(0, description="repeat both minimum filters with this number until stable")
    min_rating: float | None = Field(None, description="drop interactions rated lower than this")
    drop_repeats: bool = Field(False, description="keep a user's first action on an item only")

    def as_dict(self) -> dict[str, Any]:
        """The filters in their order, without the settings of a subclass."""
        return {name: getattr(self, name) for name in ORDER}

    def active(self) -> dict[str, float]:
        """The filters that may drop something: every user and item has one action."""
        return {
            name: value
            for name, value in self.as_dict().items()
            if value is not None and (name == "min_rating" or value is True or value > 1)
        }


class DataSettings(Filters):
    split: Literal["leave-one-out", "global-time"] = Field(
        "leave-one-out", description="how the test and validation items are held out"
    )


def describe_step(step: Dropped) -> str:
    return f"{step['step']} dropped {step['rows']:,} rows, {step['users']:,} users, {step['items']:,} items"
