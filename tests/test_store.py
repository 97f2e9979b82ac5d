"""Laws of the stores of histories: the same for SQLite and for a real Redis."""

import asyncio
import sqlite3
import time
from pathlib import Path
from typing import TypeVar

import pytest
from redis.asyncio import Redis
from rich.text import Text
from stores import adder, items, run_histories, with_store
from toys import sequences_of

from bert4rec.cli.console import printable
from bert4rec.serving.store import (
    SHOWN_EVENTS,
    AddResult,
    Event,
    EventConflict,
    HistoryStore,
    StoredUser,
    StoreUnavailable,
    open_store,
    redis_store,
    sqlite_store,
)
from bert4rec.serving.store.history_import import import_histories

T = TypeVar("T")
HOSTILE = [
    "",
    "a\0b",
    "a\nb\r",
    "'; DROP TABLE events; --",
    '"|+:{}[]',
    "\U0001f600\U0010ffff",
    "\u00e9",
    "e\u0301",
    " ",
    "007",
    "%s%d",
    "x" * 2000,
]


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'histories.db'}"
    socket = request.getfixturevalue("redis_socket")
    return f"unix://{socket}?db=0&prefix={tmp_path.name}"


def test_a_history_is_ordered_by_time_and_then_arrival(url: str) -> None:
    async def laws(store: HistoryStore) -> None:
        await store.add([Event("u", "late", 20.5), Event("u", "first", 10), Event("v", "x", 1)])
        await store.add([Event("u", "tie", 20.5), Event("u", "early", -3e9)])
        for n in range(12):  # 10 comes after 9
            await store.add([Event("u", n, 30)])
        found = await store.history("u")
        assert items(found) == ["early", "first", "late", "tie", *range(12)]
        assert found[2] == Event("u", "late", 20.5, None)
        assert await store.history("nobody") == []

    with_store(url, laws)


def test_what_was_added_is_there_when_the_store_is_opened_again(url: str) -> None:
    event = Event("u", 5, 1_700_000_000.123456, "e")
    assert with_store(url, lambda store: store.add([event])) == AddResult(1, 0)
    assert with_store(url, lambda store: store.history("u")) == [event]
    assert with_store(url, lambda store: store.add([event])) == AddResult(0, 1)


def test_an_event_without_a_time_happens_now_and_can_be_sent_again(url: str) -> None:
    async def laws(store: HistoryStore) -> None:
        before = time.time()
        assert await store.add([Event("u", "a", None, "1")]) == AddResult(1, 0)
        assert await store.add([Event("u", "a", None, "1")]) == AddResult(0, 1)
        (event,) = await store.history("u")
        assert event.time is not None
        assert before <= event.time <= time.time()
        with pytest.raises(EventConflict):
            await store.add([Event("u", "b", None, "1")])

    with_store(url, laws)


def test_an_event_id_is_stored_once_for_a_user(url: str) -> None:
    async def laws(store: HistoryStore) -> None:
        events = [Event("u", "a", 1, "1"), Event("u", "b", 2, "2"), Event("u", "a", 1, "1")]
        assert await store.add(events) == AddResult(2, 1)
        assert await store.add([*events, Event("v", "z", 9, "1")]) == AddResult(1, 3)
        assert await store.add([Event("u", "a", 1)] * 2) == AddResult(2, 0)  # no id: all are new
        assert items(await store.history("u")) == ["a", "a", "a", "b"]
        assert items(await store.history("v")) == ["z"]
        assert await store.add([]) == AddResult(0, 0)

    with_store(url, laws)


def test_an_integer_and_its_text_are_one_item_but_keep_their_type(url: str) -> None:
    async def laws(store: HistoryStore) -> None:
        big = 2**70
        await store.add([Event("u", 5, 1, "1"), Event("u", "5", 2, "2"), Event("u", big, 3, "3")])
        assert await store.add([Event("u", "5", 1, "1")]) == AddResult(0, 1)
        assert items(await store.history("u")) == [5, "5", big]

    with_store(url, laws)


@pytest.mark.parametrize("other", [Event("u", "b", 1, "1"), Event("u", "a", 2, "1")])
def test_a_conflict_stores_nothing_of_the_call(url: str, other: Event) -> None:
    async def laws(store: HistoryStore) -> None:
        news = [Event("v", "n", 5, "n"), Event("u", "n", 5)]
        with pytest.raises(EventConflict):
            await store.add([*news, Event("u", "a", 1, "1"), other])  # within one call
        assert await store.users("", 10) == []
        await store.add([Event("u", "a", 1, "1")])
        with pytest.raises(EventConflict):
            await store.add([*news, other])
        assert await store.history("v") == []
        assert items(await store.history("u")) == ["a"]
        assert await store.users("", 10) == [StoredUser("u", 1, 1)]
        assert await store.add(news) == AddResult(2, 0)

    with_store(url, laws)


def test_a_conflict_does_not_touch_the_adds_beside_it(url: str) -> None:
    async def laws(store: HistoryStore) -> None:
        await store.add([Event("u", "a", 1, "same")])
        calls = [store.add([Event("u", n, n, "same" if n % 3 == 0 else f"e{n}")]) for n in range(60)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(each, EventConflict) for each in outcomes] == [n % 3 == 0 for n in range(60)]
        assert set(items(await store.history("u"))) == {"a"} | {n for n in range(60) if n % 3}

    with_store(url, laws)


def test_erasing_forgets_the_events_their_ids_and_the_user(url: str) -> None:
    async def laws(store: HistoryStore) -> None:
        mine = [Event("u", "a", 1, "1"), Event("u", "b", 2)]
        await store.add([*mine, Event("uu", "c", 3, "1")])
        assert await store.erase("u") == 2
        assert await store.erase("u") == 0
        assert await store.history("u") == []
        assert [each.user for each in await store.users("", 10)] == ["uu"]
        assert items(await store.history("uu")) == ["c"]
        assert await store.add([Event("u", "other", 7, "1")]) == AddResult(1, 0)
        assert items(await store.history("u")) == ["other"]

    with_store(url, laws)


@pytest.mark.parametrize("few", [0, 1000])  # a search has two ways to go
def test_users_are_found_by_a_plain_prefix_newest_first(url: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "FEW_USERS", few)
    monkeypatch.setattr(redis_store, "FEW_USERS", few)
    monkeypatch.setattr(redis_store, "PAGE", 2)
    names = ["a%b", "a_b", "aab", "A", "a", "ab", "a\U0010ffffz", "b", "\ud7ffq", "\U0010ffffq"]

    async def laws(store: HistoryStore) -> None:
        await store.add([Event(name, "x", 100 - at) for at, name in enumerate(names)])

        async def found(prefix: str, limit: int = 100) -> list[str]:
            return [each.user for each in await store.users(prefix, limit)]

        for prefix in ("", "a", "a%", "a_", "%", "_", "a\U0010ffff", "\ud7ff", "\U0010ffff", "zz"):
            assert await found(prefix) == [name for name in names if name.startswith(prefix)]
        assert await found("a", 2) == ["a%b", "a_b"]
        await store.add([Event("ab", "y", 500), Event("ab", "z", 7)])
        assert await store.users("a", 1) == [StoredUser("ab", 3, 500)]

    with_store(url, laws)


def test_a_history_shows_the_newest_and_old_events_go(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n_stored = SHOWN_EVENTS + 200
    monkeypatch.setattr(sqlite_store, "STORED_EVENTS", n_stored)
    monkeypatch.setattr(redis_store, "STORED_EVENTS", n_stored)

    async def laws(store: HistoryStore) -> None:
        events = [Event("u", n, n, f"e{n}") for n in range(SHOWN_EVENTS + 500)]
        await store.add(events[:-100][::-1])
        await store.add(events[-100:])
        await store.add([Event("u", "too old", -1)])
        assert items(await store.history("u")) == list(range(500, SHOWN_EVENTS + 500))
        assert await store.users("", 9) == [StoredUser("u", SHOWN_EVENTS, SHOWN_EVENTS + 499)]
        # Sent again, an event changes nothing, whether it is shown, remembered or forgotten.
        assert await store.add([events[-1], events[320]]) == AddResult(0, 2)
        await store.add(events)
        assert items(await store.history("u")) == list(range(500, SHOWN_EVENTS + 500))
        assert await store.erase("u") == n_stored
        await store.add(events)
        with pytest.raises(EventConflict):
            await store.add([Event("u", "other", -1, "e300")])
        assert await store.add([Event("u", "other", -1, "e299")]) == AddResult(1, 0)  # forgotten

    with_store(url, laws)


def test_any_text_is_an_id(url: str) -> None:
    async def laws(store: HistoryStore) -> None:
        for at, user in enumerate(HOSTILE):
            events = [Event(user, item, n, item) for n, item in enumerate(HOSTILE)]
            assert await store.add(events) == AddResult(len(HOSTILE), 0), at
            assert await store.add(events) == AddResult(0, len(HOSTILE)), at
        for user in HOSTILE:
            history = await store.history(user)
            assert items(history) == HOSTILE
            assert [event.id for event in history] == HOSTILE
        assert {each.user for each in await store.users("", 100)} == set(HOSTILE)
        assert await store.erase("a\0b") == len(HOSTILE)
        assert len(await store.history("a\nb\r")) == len(HOSTILE)

    with_store(url, laws)


def test_what_cannot_be_kept_is_refused(url: str) -> None:
    async def laws(store: HistoryStore) -> None:
        good, half = Event("u", "a", 1), "\ud800"
        for bad in (
            Event(half, "a", 1),
            Event("u", half, 1),
            Event("u", "a", 1, half),
            Event("u", "a", float("nan")),
            Event("u", "a", float("inf")),
            Event("u", True, 1),
        ):
            with pytest.raises(ValueError, match=r"surrogate|seconds|string"):
                await store.add([good, bad])
        for question in (store.history(half), store.erase(half), store.users(half, 1)):
            with pytest.raises(ValueError, match="surrogate"):
                await question
        assert await store.history("u") == []

    with_store(url, laws)


def test_an_add_is_seen_by_the_next_read_of_another_process(url: str) -> None:
    """Each worker has a store of its own."""

    async def laws(store: HistoryStore) -> None:
        other = await open_store(url)
        for n in range(50):
            await store.add([Event("u", n, 1)])
            assert len(await other.history("u")) == n + 1
        await other.close()

    with_store(url, laws)


def test_several_processes_lose_nothing(url: str) -> None:
    """They also start at once on a file that is not there."""
    n = 200
    processes = [adder(url, f"u{number}", n) for number in range(3)]
    for process in processes:
        process.communicate()
        assert process.returncode == 0

    async def laws(store: HistoryStore) -> None:
        for number in range(3):
            assert items(await store.history(f"u{number}")) == list(range(n))
        expected = {f"u{number}-{at}" for number in range(3) for at in range(n)}
        shared = items(await store.history("shared"))
        assert len(shared) == 3 * n
        assert set(shared) == expected

    with_store(url, laws)


@pytest.mark.parametrize(
    "url",
    [
        *("", "histories.db", "mysql://x", "sqlite:", "sqlite::memory:", "sqlite://x/y"),
        *("redis://h:port/0", "redis://h:99999", "redis://:secret@h/?whatever=1"),
    ],
)
def test_a_url_that_cannot_be_used_says_why(url: str) -> None:
    with pytest.raises(ValueError, match="write sqlite:PATH") as raised:
        asyncio.run(open_store(url))
    assert "secret" not in str(raised.value)


def test_a_store_that_does_not_respond_says_so(tmp_path: Path) -> None:
    async def no_server() -> None:
        store = await open_store(f"unix://{tmp_path}/s")
        for question in (store.ping(), store.add([Event("u", "a")]), store.erase("u")):
            with pytest.raises(StoreUnavailable, match="Redis does not respond"):
                await question
        for asked in (store.history("u"), store.users("", 5)):
            with pytest.raises(StoreUnavailable):
                await asked
        await store.close()

    async def lost_tables() -> None:
        path = tmp_path / "db"
        store = await open_store(f"sqlite:{path}")
        await store.ping()
        with sqlite3.connect(path) as connection:
            connection.execute("DROP TABLE users")
        connection.close()
        for question in (store.ping(), store.add([Event("u", "a")]), store.erase("u")):
            with pytest.raises(StoreUnavailable, match="no such table"):
                await question
        await store.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.add([Event("u", "a")])

    asyncio.run(no_server())
    asyncio.run(lost_tables())


def test_redis_comes_back_by_itself(tmp_path: Path, redis_socket: Path) -> None:
    """After a lost connection the next call works."""

    async def laws(store: HistoryStore) -> None:
        await store.add([Event("u", "a", 1)])
        async with Redis(unix_socket_path=str(redis_socket)) as other:
            assert await other.client_kill_filter(_type="normal", skipme=True) >= 1
        assert items(await store.history("u")) == ["a"]

    url = f"unix://{redis_socket}?prefix={tmp_path.name}"
    with_store(url, laws)


TABLE = """user,item,time
anna,7,2024-01-02 00:00:00.25
bert,8,2024-01-01
anna,8,2024-01-01
anna,7,2024-01-02 00:00:00.25
"""


def test_importing_a_table_twice_is_importing_it_once(url: str, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(TABLE)
    assert "4 events of 2 users are new" in run_histories("import", str(table), "--store", url)
    assert "0 events of 2 users are new" in run_histories("import", str(table), "--store", url)
    january = 1_704_067_200.0
    history = with_store(url, lambda store: store.history("anna"))
    assert [(event.item, event.time) for event in history] == [
        (8, january),
        (7, january + 86400.25),
        (7, january + 86400.25),
    ]
    table.write_text(TABLE + "cora,9,2024-01-05\n")
    assert "1 events of 3 users are new" in run_histories("import", str(table), "--store", url)
    shown = run_histories("list", "--store", url)
    assert shown.index("cora") < shown.index("anna") < shown.index("bert")
    assert "2024-01-02 00:00:00" in shown
    assert "bert" not in run_histories("list", "--store", url, "--query", "ann")


def test_importing_data_without_times_keeps_its_order(url: str) -> None:
    long = [n % 7 for n in range(SHOWN_EVENTS + 50)]
    sequences = sequences_of([[3, 1, 2, 1], long], n_items=7)
    assert sequences.times is None

    async def laws(store: HistoryStore) -> None:
        assert await import_histories(store, sequences) == AddResult(SHOWN_EVENTS + 4, 0)
        assert await import_histories(store, sequences) == AddResult(0, SHOWN_EVENTS + 4)
        for row, expected in enumerate(([3, 1, 2, 1], long[-SHOWN_EVENTS:])):
            history = await store.history(str(sequences.user_ids[row]))
            assert items(history) == [sequences.vocabulary.raw(token) for token in expected]

    with_store(url, laws)


def test_an_id_cannot_play_with_the_terminal() -> None:
    text = printable("evil\x1b]0;title\x07\x1b[31m[bold]red\nnext")
    assert not [letter for letter in text if not letter.isprintable()]
    assert Text.from_markup(text).plain == r"evil\x1b]0;title\x07\x1b[31m[bold]red\nnext"
