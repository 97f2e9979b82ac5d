"""One run as a process of its own: `python -m bert4rec.lab.run_process LAB NAME SEED`.

With one process per run, the measured memory is that of the model alone, and a run that dies does
not take the others with it. A trial of `bert4rec tune` is such a run too; its plan says that the
validation items judge it, and the test items are removed from its split.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert4rec.data.sequences import Sequences
from bert4rec.data.splits import Spans
from bert4rec.durable import MANIFEST
from bert4rec.interrupts import Interrupted, StopRequest
from bert4rec.lab.contenders import settings_of
from bert4rec.lab.lab_directory import LAB_FILE, LabRun, read_json, write_json
from bert4rec.pipeline import split_of, train_recommender
from bert4rec.recommender import Recommender
from bert4rec.training.checkpoint import has_checkpoint

EXIT_INTERRUPTED = 130
POLL_SECONDS = 0.1
SCORED_USERS = 2000  # at most, in the measurement of speed
SCORING_SECONDS = 2.0
MOST_PASSES = 50  # over those users, where they are few


@dataclass(frozen=True)
class EndedProcess:
    """`error` is why it failed; None when it succeeded."""

    error: str | None
    peak_memory_mb: float


def run_in_process(
    run: LabRun, lock: int, is_stopped: StopRequest, on_poll: Callable[[], None]
) -> EndedProcess:
    """Start the run, wait for it, and pass a request to stop on to it; `on_poll` is called often.

    Raises `Interrupted` when the run was stopped before its end.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "cost.json").unlink(missing_ok=True)  # of a failure before
    output = run.folder / "output.txt"
    command = [sys.executable, "-m", "bert4rec.lab.run_process"]
    with output.open("ab") as file:
        begins_at = file.tell()
        process = subprocess.Popen(
            [*command, str(run.lab), run.name, str(run.seed)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only us, and we pass it on
            pass_fds=[lock],
        )
    n_passed_on = 0
    try:
        while (ended := _ended(process)) is None:
            if is_stopped.count > n_passed_on:
                n_passed_on += 1  # the first asks for a checkpoint, the second is impatient
                process.terminate()
            on_poll()
            time.sleep(POLL_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()
    code, peak_memory_mb = ended
    if run.is_done():
        return EndedProcess(None, peak_memory_mb)
    if is_stopped():
        raise Interrupted
    return EndedProcess(_reason(code, output, begins_at), peak_memory_mb)


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
    return last.removeprefix("ValueError: ") if code != EXIT_INTERRUPTED else "interrupted"


def run_one(run: LabRun) -> None:
    """Train (or resume), evaluate, measure, and write cost.json."""
    lab, plan = read_json(run.lab / LAB_FILE), run.plan()
    assert lab is not None
    assert plan is not None
    sequences = _data(lab["data"])
    config = _config(run, sequences, plan)
    if (run.folder / MANIFEST).exists():  # only the measurement is missing
        recommender = Recommender.load(run.folder)
    else:
        recommender = train_recommender(
            sequences, config, run.folder, resume=has_checkpoint(run.folder), baselines=False
        ).recommender
    histories = split_of(recommender, sequences).test.histories
    training = recommender.about["training"]
    cost = {
        "status": "done",
        "error": None,
        "training_seconds": training["seconds"],
        "epochs": _epochs(run),  # None for a model that is fitted in one pass
        "stopped_by_clock": is_stopped_by_clock(run, config, training["seconds"]),
        "budget_minutes": plan["budget_minutes"],
        "n_parameters": training["n_parameters"],
        "scoring_users_per_second": round(scoring_speed(recommender, histories), 1),
        "peak_memory_mb": peak_memory_mb(),
        "title": plan["title"],
        "settings": settings_of(recommender.config),
    }
    write_json(run.folder / "cost.json", cost)


def scoring_speed(recommender: Recommender, histories: Spans) -> float:
    """Users per second, warm, on all cores: ten items each, seen ones excluded."""
    n = min(SCORED_USERS, len(histories))
    sample = histories.take(
        np.sort(np.random.default_rng(0).choice(len(histories), n, replace=False))
    )

    def seconds() -> float:
        started = time.monotonic()
        for _ in recommender.rank(sample):
            pass
        return time.monotonic() - started

    seconds()
    times = [seconds()]
    while sum(times) < SCORING_SECONDS and len(times) < MOST_PASSES:
        times.append(seconds())
    return n * len(times) / sum(times)


def _data(facts: dict[str, Any]) -> Sequences:
    sequences = Sequences.load(facts["directory"])
    if sequences.fingerprint != facts["fingerprint"]:
        raise ValueError(f"the data in {facts['directory']} changed since the lab was begun")
    return sequences


def peak_memory_mb() -> float | None:
    """The most memory that this process ever used.

    Not `ru_maxrss` where there is something better: on Linux it begins with the parent's size.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        peak = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        assert peak is not None
        return round(int(peak[1]) / 1024, 1)
    try:
        import resource
    except ImportError:  # Windows
        return None
    return in_megabytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def in_megabytes(ru_maxrss: int) -> float:
    return round(ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**20, 1)


def main() -> None:
    lab, name, seed = sys.argv[1:]
    try:
        run_one(LabRun(Path(lab), name, int(seed)))
    except (Interrupted, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
