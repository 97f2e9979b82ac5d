"""The runs of a lab, one process after another; a run that fails does not stop the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from bert4rec.data.sequences import Sequences
from bert4rec.durable import alone_in
from bert4rec.evaluation.report import figure
from bert4rec.interrupts import stop_requested
from bert4rec.lab.contenders import Contender
from bert4rec.lab.lab_directory import (
    LabRun,
    LabTerms,
    plan_lab,
    read_json,
    read_lab,
    write_json,
)
from bert4rec.lab.report_text import duration
from bert4rec.lab.run_process import run_in_process

REDRAW_SECONDS = 1.0
LINE_SECONDS = 20.0  # between two lines of progress where there is no terminal
N_SIGNALS = 2  # the first asks a run for a checkpoint, the second is passed on, the third kills


def run_lab(
    directory: Path,
    sequences: Sequences,
    contenders: Sequence[Contender],
    terms: LabTerms,
    console: Console,
) -> None:
    """Run all that is not done. A run that fails is recorded, and the others continue."""
    read_lab(directory)  # refuses a directory of something else before anything is written
    with (
        alone_in(directory) as lock,
        stop_requested(n_counted=N_SIGNALS) as is_stopped,
        status_line(console) as status,
    ):
        lab = plan_lab(directory, sequences, contenders, terms)
        for note in lab.notes:
            status.say(note)
        waiting = [run for run in lab.runs if not run.is_done()]
        if n_done := len(lab.runs) - len(waiting):
            status.say(f"{n_done} of {len(lab.runs)} runs are done already")
        for place, run in enumerate(waiting):
            is_stopped.raise_if_stopped()
            title = f"{run} ({n_done + place + 1} of {len(lab.runs)})"
            status.say(title, is_for_log=True)
            left = sum(_expected_seconds(each) for each in waiting[place + 1 :])
            more = f"; the runs after it take at most {duration(left)}" if left else ""
            began = time.monotonic()
            show = partial(_show, status, run, title, began, more)
            ended = run_in_process(run, lock, is_stopped, show)
            spent = duration(time.monotonic() - began)
            if ended.error is None:
                status.say(f"{run}: done in {spent}, NDCG@10 {_ndcg(run)}")
            else:
                status.say(f"{run}: failed after {spent}, {ended.error}")
                cost = {"peak_memory_mb": ended.peak_memory_mb}
                failure = {"status": "failed", "error": ended.error, "cost": cost}
                write_json(run.folder / "cost.json", failure)


def _show(status: StatusLine, run: LabRun, title: str, began: float, more: str) -> None:
    status.show(lambda: f"{title}: {describe_progress(run, began)}{more}")


class StatusLine:
    """Lines about what happened, and one below them about what is happening."""

    def __init__(self, console: Console, live: Live) -> None:
        self.console, self.live = console, live
        self._last_shown = time.monotonic()

    def say(self, line: str, *, is_for_log: bool = False) -> None:
        """A line that stays; one that is only for a log is not needed on a terminal."""
        if not (is_for_log and self.console.is_terminal):
            self.console.print(Text(line, style="dim"), soft_wrap=not self.console.is_terminal)
            self._last_shown = time.monotonic()

    def show(self, line: Callable[[], str]) -> None:
        """Replace the line below; without a terminal, print one now and then."""
        seconds = REDRAW_SECONDS if self.console.is_terminal else LINE_SECONDS
        if time.monotonic() - self._last_shown < seconds:
            return
        self._last_shown = time.monotonic()
        if self.console.is_terminal:
            self.live.update(Text(line()), refresh=True)
        else:
            self.say(line())


@contextmanager
def status_line(console: Console) -> Iterator[StatusLine]:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield StatusLine(console, live)


def describe_progress(run: LabRun, began: float) -> str:
    """`cloze epoch 12 of 40, NDCG@10 .1234, 3.1 min, about 6 min left`; reads what a run writes."""
    fitted, events = run.fitted(), run.events()
    spent = duration(time.monotonic() - began)
    if fitted is None:
        return f"timing some steps, {spent}"
    if not events:
        return f"begun, {spent}"
    event, stages = events[-1], fitted["config"]["stages"]
    place = len({each["stage"] for each in events}) - 1
    epochs = stages[place]["epochs"]
    if event["epoch"] == epochs and place == len(stages) - 1:
        return f"evaluating, {spent}"
    trained = event["seconds"] + time.time() - (run.folder / "log.jsonl").stat().st_mtime
    left = fitted["expected_seconds"] - trained
    ndcg = f", NDCG@10 {figure(event['ndcg@10'])}" if "ndcg@10" in event else ""
    more = f", about {duration(left)} left" if left > 0 else ""
    return f"{event['stage']} epoch {event['epoch']} of {epochs}{ndcg}, {duration(trained)}{more}"


def _expected_seconds(run: LabRun) -> float:
    fitted = run.fitted()
    plan = run.plan() or {"budget_minutes": 0.0}
    return float(60 * plan["budget_minutes"] if fitted is None else fitted["expected_seconds"])


def _ndcg(run: LabRun) -> str:
    metrics = read_json(run.folder / "metrics.json") or {}
    return figure(metrics["metrics"]["full"]["NDCG@10"]["value"])
