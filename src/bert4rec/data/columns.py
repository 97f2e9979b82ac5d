"""Find the columns of a table that hold the user, the item, the time, the rating or the title."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

Role = Literal["user", "item", "time", "rating", "title"]

# Names are compared without case, blanks, underscores and dashes. Earlier names win: Amazon tables
# have both `asin` and `parent_asin`, and only the latter is one product; a track has an artist too.
_USUAL: dict[Role, str] = {
    "user": "user userid uid u visitor visitorid customer customerid client clientid member "
    "memberid reviewer reviewerid account accountid buyer buyerid person personid profileid player "
    "playerid steamid listener reader username useridx userhash author authorid session sessionid",
    "item": "item itemid iid i movie movieid film filmid product productid parentasin asin sku "
    "track trackid song songid book bookid isbn article articleid newsid news business businessid "
    "game gameid app appid video videoid show showid anime animeid recipe recipeid venue venueid "
    "place placeid poi poiid listing listingid course courseid content contentid goods goodsid "
    "stockcode artist artistid ad adid url itemidx",
    "time": "timestamp ts time datetime date unixreviewtime unixtime unixtimestamp eventtime "
    "eventdate createdat created createdon occurredat reviewtime reviewdate ratedat purchasedat "
    "orderdate invoicedate viewedat playedat listenedat day t",
    "rating": "rating ratings score stars overall weight strength preference",
    "title": "title name itemtitle itemname movietitle producttitle productname trackname songtitle booktitle label",
}
NAMES: dict[Role, list[str]] = {role: names.split() for role, names in _USUAL.items()}


def normalized(name: str) -> str:
    """`User_ID`, `user-id` and RecBole's `user_id:token` are all `userid`."""
    return re.sub(r"[\W_]+", "", name.split(":")[0].casefold())


def find_column(role: Role, columns: Sequence[str], named: str | None, table: str) -> int | None:
    """The position of the column for `role`: the one that is `named`, else one with a usual name.

    None if no column has a usual name.
    """
    names = [normalized(column) for column in columns]
    if named is not None:
        if named in columns:
            return list(columns).index(named)
        if normalized(named) in names:
            return names.index(normalized(named))
        raise ValueError(
            f"{table} has no column {named!r}, which was named as the {role} column; its columns are {_listed(columns)}"
        )
    return next((names.index(name) for name in NAMES[role] if name in names), None)


def require_column(role: Role, columns: Sequence[str], named: str | None, table: str) -> int:
    at = find_column(role, columns, named, table)
    if at is None:
        raise ValueError(
            f"{table} has no {role} column that can be recognised: its columns are "
            f"{_listed(columns)}, and the names looked for are {', '.join(NAMES[role][:12])}, …; "
            f"name it with {role}=… (--{role} on the command line), or pass header=False "
            "(--no-header) if the first line is already a row"
        )
    return at


def positions_without_header(n_columns: int) -> dict[Role, int]:
    """`user item` (SASRec), `user item time`, or `user item rating time` (MovieLens)."""
    roles: tuple[Role, ...] = ("user", "item", "time") if n_columns == 3 else ("user", "item", "rating", "time")
    return {role: at for at, role in enumerate(roles[:n_columns])}


def _listed(columns: Sequence[str]) -> str:
    shown = ", ".join(repr(column) for column in columns[:30])
    return shown + (", …" if len(columns) > 30 else "")
