"""Laws of the SQLite store: nothing is lost, erased text is gone, other files are left alone."""

import asyncio
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from stores import adder, items, run_histories, with_store

from bert4rec.serving.http.response_sending import set_unread_timeout
from bert4rec.serving.store import SHOWN_EVENTS, Event, HistoryStore, open_store, sqlite_file


def test_a_killed_process_loses_no_acknowledged_event(tmp_path: Path) -> None:
    for round_number in range(3):
        url = f"sqlite:{tmp_path / str(round_number)}"
        process = adder(url, "u", 100_000)
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(40 * (round_number + 1))]
        os.kill(process.pid, signal.SIGKILL)
        rest, _ = process.communicate()
        acknowledged += [int(line) for line in rest.splitlines(keepends=True) if line[-1:] == "\n"]
        stored = items(with_store(url, lambda store: store.history("u")))
        shared = items(with_store(url, lambda store: store.history("shared")))
        assert len(stored) < SHOWN_EVENTS
        assert set(acknowledged) <= set(stored)
        assert stored == sorted(set(stored))  # none twice
        assert shared == [f"u-{at}" for at in stored]  # whole calls only
        with sqlite3.connect(url.removeprefix("sqlite:")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.close()


@pytest.mark.parametrize("is_small", [True, False])
def test_erased_text_is_in_no_file(tmp_path: Path, is_small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite moves rows about while the file grows, and leaves copies; a large file is left."""
    monkeypatch.setattr(sqlite_file, "SMALL", 2**30 if is_small else 0)
    url = f"sqlite:{tmp_path / 'db'}"
    draw = random.Random(1)
    names = [f"<{n:06d}>" for n in range(1000)]

    async def laws(store: HistoryStore) -> None:
        for n in range(10):
            users = draw.choices(names, k=1000)
            await store.add([Event(each, each, draw.random(), f"{n}-{at}{each}") for at, each in enumerate(users)])
        await asyncio.gather(*map(store.erase, names[::4]))

    with_store(url, laws)
    if not is_small:
        run_histories("compact", "--store", url)
    content = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    left = set(re.findall(rb"<\d{6}>", content))
    assert left == {name.encode() for at, name in enumerate(names) if at % 4}


def test_a_file_of_histories_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with_store(f"sqlite:{path}", lambda store: store.add([Event("u", "a", 1)]))
    assert path.stat().st_mode & 0o077 == 0


def test_a_file_that_is_not_ours_is_refused_and_left_alone(tmp_path: Path) -> None:
    text, other, newer, torn = (tmp_path / name for name in ("text", "other", "newer", "torn"))
    text.write_text("not a database, but long enough to be looked at" * 100)
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE users (user TEXT)")
    connection.close()
    for path in (newer, torn):
        with_store(f"sqlite:{path}", lambda store: store.add([Event("u", "a", 1)]))
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    torn.write_bytes(torn.read_bytes()[:100] + b"\xff" * 8000)
    for path, reason in (
        (text, "not a store"),
        (other, "another program"),
        (newer, "version 99"),
        (torn, "damaged"),
        (tmp_path, "not a file"),
        (tmp_path / "none" / "db", "no folder"),
    ):
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(ValueError, match=reason):
            asyncio.run(open_store(f"sqlite:{path}"))
        assert before is None or path.read_bytes() == before


def test_a_long_write_does_not_hold_up_a_read_or_the_loop(tmp_path: Path) -> None:
    async def laws(store: HistoryStore) -> None:
        await store.add([Event("u", "a", 1)])
        many = [Event(f"user {n % 500}", n, n, str(n)) for n in range(40_000)]
        writing = asyncio.create_task(store.add(many))
        await asyncio.sleep(0)
        n_reads = 0
        while not writing.done():
            assert len(await store.history("u")) == 1
            n_reads += 1
        assert n_reads > 3
        assert (await writing).stored == len(many)

    with_store(f"sqlite:{tmp_path / 'db'}", laws)


def test_listing_makes_no_store(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no store"):
        run_histories("list", "--store", f"sqlite:{tmp_path / 'typo'}")
    assert not (tmp_path / "typo").exists()


def test_looking_for_sockets_leaves_the_locks_of_the_store_alone(tmp_path: Path) -> None:
    """Otherwise a process that opens the file deletes its log, and later writes with it."""
    file = tmp_path / "histories.db"
    writer = sqlite3.connect(file)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("CREATE TABLE seen (n)")
    writer.commit()
    set_unread_timeout(20)
    look = f"import sqlite3; c = sqlite3.connect({str(file)!r}); c.execute('SELECT * FROM seen')"
    subprocess.run([sys.executable, "-c", f"{look}; c.close()"], check=True)
    assert Path(f"{file}-wal").exists()
    writer.close()
