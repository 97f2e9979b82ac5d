"""The data that somebody has, in four numbers."""

from __future__ import annotations

from dataclasses import dataclass

DISAGREEMENT = 0.1  # how far users x length may be from the interactions


@dataclass(frozen=True)
class Workload:
    users: int
    items: int
    length: float  # interactions of a user, on average
    interactions: int

    def windows(self, max_len: int, step_share: float | None) -> tuple[float, float]:
        """Training windows a user has, and the positions of each, for a user of average length."""
        trained = max(1.0, self.length - 2)  # the last two items are held out
        if trained <= max_len:
            return 1.0, trained
        if step_share is None:
            return 1.0, float(max_len)
        step = max(1, int(max_len * step_share))
        return 1 + (trained - max_len) / step, float(max_len)


def workload_of(
    *,
    users: int | None = None,
    items: int,
    length: float | None = None,
    interactions: int | None = None,
) -> Workload:
    """Two of users, length and interactions give the third; all three have to agree."""
    given = {"users": users, "items": items, "length": length, "interactions": interactions}
    for name, value in given.items():
        if value is not None and not value > 0:
            raise ValueError(f"--{name} is {value:g}: give a number above 0")
    if users is None:
        if interactions is None or length is None:
            raise ValueError("give two of --users, --length and --interactions")
        users = max(1, round(interactions / length))
    elif length is None:
        if interactions is None:
            raise ValueError("give two of --users, --length and --interactions")
        length = interactions / users
    if interactions is None:
        interactions = round(users * length)
    if abs(users * length / interactions - 1) > DISAGREEMENT:
        raise ValueError(
            f"--interactions is {interactions:,}, and {users:,} users with {length:g} each make "
            f"{users * length:,.0f}: leave one of --users, --length and --interactions out"
        )
    if length < 3:
        raise ValueError(
            f"--length is {length:g}: users need three interactions or more on average, one to "
            "learn from and two to be asked about"
        )
    if items > interactions:
        raise ValueError(
            f"--items is {items:,} and there are {interactions:,} interactions: an item that "
            "nobody touched cannot be learned; give the number of items that occur in the data"
        )
    if items < 2:
        raise ValueError(f"--items is {items}: there is nothing to choose from")
    return Workload(users, items, length, interactions)
