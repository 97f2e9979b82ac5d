"""Calls of a store in a loop of their own, processes that write, and the verb `histories`."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

from typer.testing import CliRunner

from bert4rec.cli import app
from bert4rec.serving.store import Event, HistoryStore, open_store

T = TypeVar("T")
ADDER = """
import asyncio, sys
from bert4rec.serving.store import Event, open_store
async def main(url, user, n):
    store = await open_store(url)
    async def add(k):
        for at in range(k, n, 8):
            await store.add([Event(user, at, at, str(at)), Event("shared", f"{user}-{at}", at)])
            print(at, flush=True)
    await asyncio.gather(*(add(k) for k in range(8)))
    await store.close()
asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


def with_store(url: str, call: Callable[[HistoryStore], Awaitable[T]]) -> T:
    async def run() -> T:
        store = await open_store(url)
        try:
            return await call(store)
        finally:
            await store.close()

    return asyncio.run(run())


def items(history: list[Event]) -> list[str | int]:
    return [event.item for event in history]


def adder(url: str, user: str, n: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ADDER, url, user, str(n)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def run_histories(*words: str) -> str:
    result = CliRunner().invoke(app, ["histories", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output
