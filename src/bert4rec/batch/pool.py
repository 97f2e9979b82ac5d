"""Local worker processes: parts are dealt out one at a time, and a worker that dies is replaced."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from bert4rec.batch.parts import Job, finished_parts
from bert4rec.batch.worker import STOP

MOST_TRIES = 3  # of a part whose worker dies
SECONDS_TO_STOP = 10.0


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    part: int
    log: IO[bytes]  # what it says on its standard error
    unread: bytes = b""

    def send(self, line: object) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is noticed where we listen to it
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()


@dataclass
class _Progress:
    """Users that are done, also in parts that are not."""

    n_finished: int
    within: dict[int, int] = field(default_factory=dict)

    @property
    def n_users(self) -> int:
        return self.n_finished + sum(self.within.values())


def run_in_processes(
    job: Job,
    parts: Sequence[int],
    *,
    n_workers: int,
    n_cores: int,
    lock: int,
    on_progress: Callable[[int], None],
    say: Callable[[str], None],
) -> None:
    """Compute `parts` with `n_workers` processes that share the cores.

    Each holds on to the file descriptor `lock`. A part whose worker died is done again, a few
    times; an error that a worker can put into words ends it all. Finished parts are kept.
    """
    waiting, n_deaths = deque(parts), Counter[int]()
    n_before = job.plan.n_users - sum(map(job.plan.n_users_of, parts))
    progress = _Progress(n_before)
    n_threads = max(1, n_cores // n_workers)

    def finish(part: int) -> None:
        progress.within.pop(part, None)
        progress.n_finished += job.plan.n_users_of(part)
        on_progress(progress.n_users)

    with selectors.DefaultSelector() as selector, _all_ended() as workers:

        def start() -> None:
            worker = _start(job, waiting.popleft(), n_threads, lock)
            workers.append(worker)
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]

        for _ in range(min(n_workers, len(parts))):
            start()
        while workers:
            for key, _ in selector.select():
                worker: _Worker = key.data
                has_ended = False
                for answer in _answers(worker):
                    if answer is None:
                        has_ended = True
                    elif "error" in answer:
                        raise ValueError(answer["error"])
                    elif "is_finished" in answer:
                        finish(worker.part)
                        worker.part = waiting.popleft() if waiting else -1
                        worker.send(worker.part if worker.part >= 0 else STOP)
                    else:
                        progress.within[worker.part] = answer["n_done"]
                        on_progress(progress.n_users)
                if not has_ended:
                    continue
                selector.unregister(key.fileobj)
                workers.remove(worker)
                part, reason = worker.part, _end(worker)
                if part < 0:
                    continue  # it was told to stop
                progress.within.pop(part, None)
                if finished_parts(job.out, job.plan, [part]):
                    finish(part)  # it died between finishing and telling
                else:
                    n_deaths[part] += 1
                    waiting.appendleft(part)
                    if n_deaths[part] == MOST_TRIES:
                        raise ValueError(_given_up(job, part, reason))
                say(f"a worker {reason}: another one takes its place")
                if waiting:
                    start()


def _start(job: Job, part: int, n_threads: int, lock: int) -> _Worker:
    log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
    process = subprocess.Popen(
        [sys.executable, "-m", "bert4rec.batch.worker", str(n_threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,  # Ctrl-C reaches us, and we end them
        pass_fds=[lock],
        env=os.environ | {"OMP_NUM_THREADS": str(n_threads)},
    )
    worker = _Worker(process, part, log)
    worker.send(job.as_json())
    worker.send(part)
    return worker


def _answers(worker: _Worker) -> Iterator[dict[str, Any] | None]:
    """What it wrote since; None when it has ended. A line that was cut off is dropped."""
    assert worker.process.stdout is not None
    some = os.read(worker.process.stdout.fileno(), 65_536)
    *lines, worker.unread = (worker.unread + some).split(b"\n")
    yield from map(json.loads, lines)
    if not some:
        yield None


@contextlib.contextmanager
def _all_ended() -> Iterator[list[_Worker]]:
    """Workers that do not outlive the block, however it is left."""
    workers: list[_Worker] = []
    try:
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()  # a part appears whole or not at all: nothing to wait for
        for worker in workers:
            _end(worker)


def _end(worker: _Worker) -> str:
    """Wait for its end, and say in words how it ended."""
    assert worker.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # of what it did not read
        worker.process.stdin.close()
    with worker.process, worker.log:
        try:
            code = worker.process.wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:  # it has said its last word, and hangs
            worker.process.kill()
            code = worker.process.wait()
        if code == -signal.SIGKILL:
            return "was killed (SIGKILL), perhaps because the machine ran out of memory"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        worker.log.seek(0)
        said = worker.log.read().decode("utf-8", "replace").strip().splitlines()
        return f"ended with exit code {code}: {said[-1] if said else 'no message'}"


def _given_up(job: Job, part: int, reason: str) -> str:
    first, last = job.plan.users_of(part)
    return (
        f"part {part} (users {first:,} to {last - 1:,} of the data) was given up: its worker "
        f"{reason}, {MOST_TRIES} times; finished parts are kept in {job.out}. Run the same command "
        "again to go on, with fewer --workers if memory is short"
    )
