"""The link to a model that a server loads: switched at once, or its files overwritten."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable
from pathlib import Path

from served import Served
from under_load.client import Answer, ask_once

from bert4rec.recommender import Recommender

NOTICED_WITHIN = 60.0  # seconds


class ModelLink:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / "model"
        self._numbers = itertools.count()

    def new_directory(self) -> Path:
        directory = self._folder / f"model-{next(self._numbers)}"
        directory.mkdir()
        return directory

    def switch_to(self, target: Path) -> None:
        """Readers see the old directory or the new one, never none."""
        link = self._folder / ".new-link"
        link.symlink_to(target)
        link.replace(self.path)

    def switch(self, recommender: Recommender) -> None:
        directory = self.new_directory()
        recommender.save(directory)
        self.switch_to(directory)

    def overwrite(self, recommender: Recommender) -> None:
        """File by file, in the directory that is being served."""
        recommender.save(self.path)


async def reload_by_call(served: Served) -> Answer:
    return await ask_once(served.port, "/v1/admin/reload", {})


async def reload_by_signal(served: Served) -> None:
    served.process.send_signal(signal.SIGHUP)


async def until_logged(served: Served, message: str, n: int) -> list[dict[str, object]]:
    """Until `message` is in the log `n` times: these lines."""
    return await until(lambda: lines_of(served, message), lambda found: len(found) >= n, message)


def lines_of(served: Served, message: str) -> list[dict[str, object]]:
    return [line for line in served.log_lines() if line.get("message") == message]


async def until(
    look: Callable[[], list[dict[str, object]]], is_enough: Callable[[list[dict[str, object]]], bool], what: str
) -> list[dict[str, object]]:
    deadline = asyncio.get_running_loop().time() + NOTICED_WITHIN
    while not is_enough(found := look()):
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"{what!r} was not logged within {NOTICED_WITHIN:g} s")
        await asyncio.sleep(0.05)
    return found
