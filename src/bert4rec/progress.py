"""How far something is: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

SECONDS_UNSEEN = 2.0  # what is done by then needs no view
SECONDS_BETWEEN_LINES = 30.0  # where there is no terminal


class ProgressView:
    """`update` costs next to nothing and may be called for every step.

    The bar appears two seconds after the first `update`, and leaves nothing behind. Elsewhere a
    line is printed then, and one every 30 seconds. Of several processes the first one `is_shown`.
    """

    def __init__(self, description: str = "", *, console: Console | None = None, is_shown: bool = True) -> None:
        self.console = console or Console(stderr=True)
        self.is_shown = is_shown
        self._bar: Progress | None = None
        self.begin(description)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._remove_bar()

    def begin(self, description: str, done: int = 0, total: int | None = None) -> None:
        """Something else begins, or resumes after `done` of `total`."""
        self._remove_bar()
        self._description, self._facts = description, ""
        self._done, self._total, self._done_at_start = done, total, done
        self._started: float | None = None
        self._next_line = 0.0

    def update(self, done: int, total: int | None = None, facts: str = "") -> None:
        """`done` of `total` (of `begin` if it is not given), and free text such as `loss 4.21`."""
        if not self.is_shown:
            return
        now = time.monotonic()
        if self._started is None:
            self._started, self._done_at_start = now, done
            self._next_line = now + SECONDS_UNSEEN
        self._done, self._facts = done, facts
        self._total = self._total if total is None else total
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=self._total, facts=facts)
        elif now >= self._next_line:
            if self.console.is_terminal:
                self._show_bar()
            else:
                self.say(self._line(now - self._started))

    def say(self, line: str) -> None:
        """A line of its own, above the bar; elsewhere the next line of progress waits for it."""
        if self.is_shown:
            self._next_line = max(self._next_line, time.monotonic() + SECONDS_BETWEEN_LINES)
            self.console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)

    def _show_bar(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            refresh_per_second=4,
        )
        self._bar.add_task(self._description, total=self._total, completed=self._done, facts=self._facts)
        self._bar.start()

    def _remove_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self, seconds: float) -> str:
        if self._total is None:
            return f"{self._description}: {self._done:,}  {self._facts}".rstrip()
        n_done, n_left = self._done - self._done_at_start, self._total - self._done
        words = [f"{self._description}: {self._done:,} of {self._total:,}", self._facts]
        if n_done > 0:
            left = seconds / n_done * n_left
            words.append(f"{left:.0f} s left" if left < 100 else f"{left / 60:.0f} min left")
        return "  ".join(word for word in words if word)
