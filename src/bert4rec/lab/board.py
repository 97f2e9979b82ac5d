"""The whole table of a lab while it runs: who is done, who is at work and how far, who waits.

The board reads what the runs write (log.jsonl, cost.json, metrics.json) and asks nothing of them.
"""

from __future__ import annotations

import json
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bert4rec.lab.plan import Lab, Run, read_json

REDRAW_EVERY = 1.0  # seconds
PLAIN_LINE_EVERY = 20.0  # seconds between two lines where there is no terminal


class Board:
    def __init__(self, lab: Lab, console: Console) -> None:
        self.lab, self.console = lab, console
        self._over: dict[Run, str] = {}
        for run in lab.runs:
            if (cost := run.cost()) is not None:
                # A failed run is tried again, so it waits.
                self._over |= {run: _verdict(run, cost)} if cost["status"] == "done" else {}
        self._at_work: Run | None = None
        self._begun = self._last_shown = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        for note in self.lab.notes:
            self._say(note)
        if n := len(self._over):
            self._say(f"{n} of {len(self.lab.runs)} runs are done already")
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def begin(self, run: Run) -> None:
        self._at_work, self._begun = run, time.monotonic()
        if not self.console.is_terminal:
            self._say(f"{run} ({len(self._over) + 1} of {len(self.lab.runs)})")

    def end(self, run: Run) -> None:
        cost = run.cost()
        assert cost is not None
        self._over[run], self._at_work = _verdict(run, cost), None
        minutes = (time.monotonic() - self._begun) / 60
        if cost["status"] == "failed":
            self._say(f"{run}: failed after {minutes:.1f} min, {cost['error']}")
        elif not self.console.is_terminal:
            self._say(f"{run}: done in {minutes:.1f} min, NDCG@10 {self._over[run]}")

    def refresh(self, *, is_stopping: bool = False) -> None:
        """Show what changed; costs next to nothing when called often."""
        now, is_live = time.monotonic(), self.console.is_terminal
        if now - self._last_shown < (REDRAW_EVERY if is_live else PLAIN_LINE_EVERY):
            return
        self._last_shown = now
        if is_live:
            self._live.update(self._view(is_stopping), refresh=True)
        elif self._at_work is not None:
            self._say(f"{self._at_work}: {self._progress(self._at_work)}")

    def _say(self, line: str) -> None:
        self._last_shown = time.monotonic()
        # A Text, because options of `print` would hold for the live table below it as well.
        self.console.print(Text(line, style="dim"), soft_wrap=not self.console.is_terminal)

    def _view(self, is_stopping: bool) -> Group:
        n_left = len(self.lab.runs) - len(self._over)
        line = f"{self.lab.directory}: {len(self._over)} of {len(self.lab.runs)} runs are over"
        if is_stopping:
            line += "; stopping, a checkpoint is being saved"
        elif n_left:
            line += f"; training takes at most {_duration(self._seconds_left())} more"
        table = Table()
        table.add_column("model", no_wrap=True)
        seeds = sorted({run.seed for run in self.lab.runs})
        for seed in seeds:
            table.add_column(f"seed {seed}")
        for name in dict.fromkeys(run.name for run in self.lab.runs):
            runs = [Run(self.lab.directory, name, seed) for seed in seeds]
            table.add_row(name, *(self._cell(run) for run in runs))
        return Group(Text(line), table)

    def _cell(self, run: Run) -> str:
        if run == self._at_work:
            return f"[bold]{self._progress(run)}[/bold]"
        if run in self._over:
            return self._over[run]
        return "[dim]waiting[/dim]" if run in self.lab.runs else ""

    def _progress(self, run: Run) -> str:
        """`epoch 12 of 40, NDCG@10 .1234, 3.1 min, about 6 min left`."""
        chosen, event = read_json(run.contender / "epochs.json"), _last_event(run)
        minutes = (time.monotonic() - self._begun) / 60
        if chosen is None:
            return f"timing an epoch, {minutes:.1f} min"
        if event is None:
            return f"begun, {minutes:.1f} min"
        section = "second_stage" if event["stage"] == "last-item" else "training"
        epochs = chosen["config"][section]["epochs"]
        is_first = event["stage"] != "last-item" and chosen["config"]["model"]["name"] == "bert4rec"
        has_second = is_first and chosen["config"]["second_stage"]["epochs"]
        if event["epoch"] == epochs and not has_second:
            return f"evaluating, {minutes:.1f} min"
        since = time.time() - (run.folder / "log.jsonl").stat().st_mtime
        trained = event["seconds"] + since
        left = chosen["expected_seconds"] - trained
        so_far = (
            f"{event['stage']} epoch {event['epoch']} of {epochs}, NDCG@10 "
            f"{_figure(event['ndcg@10'])}, {trained / 60:.1f} min"
        )
        return so_far if left < 0 else f"{so_far}, about {_duration(left)} left"

    def _seconds_left(self) -> float:
        waiting = [run for run in self.lab.runs if run not in self._over]
        return sum(_expected_seconds(run) for run in waiting)


def _expected_seconds(run: Run) -> float:
    chosen = read_json(run.contender / "epochs.json")
    if chosen is not None:
        return float(chosen["expected_seconds"])
    plan = read_json(run.contender / "plan.json")
    return 0.0 if plan is None else 60.0 * plan["budget_minutes"]


def _last_event(run: Run) -> dict[str, Any] | None:
    try:
        lines = (run.folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
        return dict(json.loads(lines[-1])) if lines else None
    except (FileNotFoundError, json.JSONDecodeError):  # not begun, or a line half written
        return None


def _verdict(run: Run, cost: dict[str, Any]) -> str:
    if cost["status"] != "done":
        return "[red]failed[/red]"
    metrics = read_json(run.folder / "metrics.json")
    value = None if metrics is None else metrics["metrics"]["full"].get("NDCG@10")
    return "done" if value is None else _figure(value["value"])


def _figure(value: float) -> str:
    return f"{value:.4f}".removeprefix("0")


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    if minutes >= 90:
        return f"{minutes / 60:.1f} h"
    return f"{minutes:.0f} min" if minutes >= 1.5 else f"{seconds:.0f} s"
