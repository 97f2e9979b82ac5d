"""The runs of a lab, one process after another, whatever becomes of each of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from bert4rec.config import parse_config
from bert4rec.data.sequences import Sequences
from bert4rec.durable import alone_in, write_file
from bert4rec.lab.board import Board
from bert4rec.lab.contenders import Contender, settings_of
from bert4rec.lab.machine import in_megabytes
from bert4rec.lab.plan import Run, plan_lab, read_json, read_lab

LOOK_EVERY = 0.1  # seconds


class Stopped(Exception):
    """The lab was asked to stop; what was running saved its checkpoint."""


def run_lab(
    directory: Path,
    sequences: Sequences,
    contenders: Sequence[Contender],
    console: Console,
    *,
    data_name: str,
    n_seeds: int = 3,
    minutes: float = 20.0,
    overwrite: bool = False,
    reproduction: str | None = None,
) -> None:
    """Run all that is not done. A model that fails is written down, and the others go on."""
    read_lab(directory)  # nothing is written where something else than a lab is
    with alone_in(directory) as lock:
        lab = plan_lab(
            directory,
            sequences,
            contenders,
            data_name=data_name,
            n_seeds=n_seeds,
            minutes=minutes,
            overwrite=overwrite,
            reproduction=reproduction,
        )
        with _counted_signals() as signals, Board(lab, console) as board:
            for run in lab.runs:
                if run.is_done():
                    continue
                if signals:
                    raise Stopped
                board.begin(run)
                _run(run, board, lock, signals)
                board.end(run)


def _run(run: Run, board: Board, lock: int, signals: list[int]) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "cost.json").unlink(missing_ok=True)  # that it failed the last time
    output = run.folder / "output.txt"
    with output.open("ab") as file:
        begins_at = file.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "bert4rec.lab.one", str(run.lab), run.name, str(run.seed)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches us, and we pass it on once
            pass_fds=[lock],
        )
    n_passed_on = 0
    while (ended := _ended(process)) is None:
        if len(signals) > n_passed_on:
            n_passed_on += 1  # the first asks for a checkpoint, the second is impatient
            process.send_signal(signal.SIGTERM if n_passed_on < 3 else signal.SIGKILL)
        board.refresh(is_stopping=bool(signals))
        time.sleep(LOOK_EVERY)
    code, peak_memory_mb = ended
    if run.is_done():
        return
    if signals:
        raise Stopped
    _write_failure(run, _reason(code, output, begins_at), peak_memory_mb)


def _ended(process: subprocess.Popen[bytes]) -> tuple[int, float] | None:
    """(exit code, peak memory in MiB), or None while it runs.

    The memory of a run that succeeded is measured from inside, without what the child of a large
    process seems to use before it begins; for one that was killed there is only this.
    """
    pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    if pid == 0:
        return None
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, in_megabytes(usage.ru_maxrss)


def _reason(code: int, output: Path, begins_at: int) -> str:
    """The last line of an error, which says what went wrong, or the signal that ended it."""
    if code == -signal.SIGKILL:
        return "killed (SIGKILL), probably because the machine ran out of memory"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    text = output.read_bytes()[begins_at:].decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    return last.removeprefix("ValueError: ") if code != 130 else "stopped from outside"


def _write_failure(run: Run, reason: str, peak_memory_mb: float) -> None:
    plan = read_json(run.contender / "plan.json")
    assert plan is not None
    chosen = read_json(run.contender / "epochs.json") or plan
    cost = {
        "status": "failed",
        "error": reason,
        "training_seconds": None,
        "epochs": None,
        "budget_minutes": plan["budget_minutes"],
        "n_parameters": None,
        "scoring_users_per_second": None,
        "peak_memory_mb": peak_memory_mb,
        "title": plan["title"],
        "settings": settings_of(parse_config(chosen["config"], "epochs.json")),
    }
    write_file(run.folder / "cost.json", json.dumps(cost, indent=2) + "\n")


@contextlib.contextmanager
def _counted_signals() -> Iterator[list[int]]:
    """The signals that came to end us, so far."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {n: signal.signal(n, receive) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
