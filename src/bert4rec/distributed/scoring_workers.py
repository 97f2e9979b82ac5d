"""Computing parts by several workers; here those workers are processes of this machine.

A worker gets one part at a time. When it dies, another worker takes its place and its part is
computed again. A part is a file that is complete or absent, so computing it twice does no harm.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import Connection
from typing import Any, Protocol

from bert4rec.distributed.scoring_parts import PartWriter, ScoringJob
from bert4rec.interrupts import StopRequest

SECONDS_TO_REAP = 5.0
MOST_TRIES = 3  # of a part, and of loading the model, when workers die
LOOK_EVERY = 0.2  # seconds between two looks at progress and interrupts


class ScoringWorker(Protocol):
    """A process somewhere that has the model; it computes one part at a time."""

    ready: Future[None]  # done when the model is loaded

    def write(self, part: int) -> Future[None]: ...

    def n_done(self) -> int:
        """Users done in its current part."""

    def died_of(self, error: BaseException) -> str | None:
        """How it died, as in `was killed`; None if its work raised this error."""

    def end(self) -> None:
        """End it at once, whatever it does; may be called twice."""

    def wait_for_end(self) -> None: ...


@dataclass(frozen=True)
class Reports:
    """What a caller wants to hear while it waits."""

    users: Callable[[int], None]  # users done, those of unfinished parts too
    say: Callable[[str], None]


def compute_parts(
    job: ScoringJob,
    parts: Sequence[int],
    start_worker: Callable[[], ScoringWorker],
    n_workers: int,
    reports: Reports,
    is_stopped: StopRequest,
) -> None:
    """Compute `parts` with `n_workers` workers; finished parts are kept whatever happens.

    Only a worker that has loaded the model gets a part: on a busy cluster some may never start. An
    error that a worker raises ends the run, since any other worker would raise it too.
    """
    waiting, unfinished, n_deaths = deque(parts), set(parts), Counter[int | None]()
    workers: list[ScoringWorker] = []
    busy: dict[Future[None], tuple[ScoringWorker, int | None]] = {}  # None: loading the model

    def start() -> None:
        workers.append(start_worker())
        busy[workers[-1].ready] = workers[-1], None

    def replace(part: int | None, cause: str) -> None:
        """Start another worker, if there is work for it."""
        if part is None or part in unfinished:
            n_deaths[part] += 1
            if n_deaths[part] == MOST_TRIES:
                raise ValueError(_given_up(job, part, cause))
        if part in unfinished:
            waiting.appendleft(part)
        if waiting:
            reports.say(f"a worker {cause}: another one takes its place")
            start()

    try:
        for _ in range(min(n_workers, len(parts))):
            start()
        while unfinished:
            done, _ = wait(busy, LOOK_EVERY, FIRST_COMPLETED)
            is_stopped.raise_if_stopped()
            for future in done:
                worker, part = busy.pop(future)
                error = future.exception()
                cause = None if error is None else worker.died_of(error)
                if error is not None and cause is None:
                    raise error
                # One that died may have finished its part before.
                if part is not None and (cause is None or job.is_finished(part)):
                    unfinished.remove(part)
                if cause is not None:
                    replace(part, cause)
                elif waiting:
                    n_deaths[None] = 0  # the model can be loaded
                    part = waiting.popleft()
                    busy[worker.write(part)] = worker, part
                else:
                    worker.end()
            n_within = sum(worker.n_done() for worker, part in busy.values() if part is not None)
            reports.users(job.plan.n_users - job.n_users_of(unfinished) + n_within)
    finally:
        for worker in workers:
            worker.end()
        for worker in workers:
            worker.wait_for_end()


def _given_up(job: ScoringJob, part: int | None, cause: str) -> str:
    if part is None:
        what = "loading the model"
    else:
        first, last = job.plan.users_of(part)
        what = f"part {part} (users {first:,} to {last - 1:,} of the data)"
    return (
        f"{what} was given up: its worker {cause}, {MOST_TRIES} times; finished parts are kept in "
        f"{job.out}. Run the same command again to resume, with fewer --workers if memory is short"
    )


class LocalWorker:
    """A process of this machine; it ends with the coordinator, even if that is killed.

    Each worker is a pool of one process: when it breaks, we know which part is lost.
    """

    def __init__(self, job: ScoringJob, n_threads: int, lock: int) -> None:
        context = get_context("spawn")
        self._n_done = context.RawValue("q", 0)
        before = set(active_children())
        # The process has a copy of the lock: the directory stays locked while it lives.
        with Connection(os.dup(lock), writable=False) as held:
            arguments = (job, n_threads, self._n_done, held)
            self._pool = ProcessPoolExecutor(1, context, _begin, arguments)
            self.ready = self._submit(_load)  # starts the process
        self._process = next(iter(set(active_children()) - before), None)  # None: dead already

    def write(self, part: int) -> Future[None]:
        self._n_done.value = 0
        return self._submit(_write, part)

    def n_done(self) -> int:
        return int(self._n_done.value)

    def died_of(self, error: BaseException) -> str | None:
        if not isinstance(error, BrokenProcessPool):
            return None
        if self._process is None:
            return "died when it was started"
        self._process.join()
        deadline = time.monotonic() + SECONDS_TO_REAP
        # The pool's own thread may have reaped the process, and is about to note its exit code.
        while (code := self._process.exitcode) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if code is None:
            return "died"
        if code == -signal.SIGKILL:
            return "was killed (SIGKILL), perhaps because the machine ran out of memory"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()  # a part is complete or absent: there is nothing to wait for

    def wait_for_end(self) -> None:
        self._pool.shutdown(wait=True)

    def _submit(self, task: Callable[..., None], *arguments: Any) -> Future[None]:
        # The process starts here and inherits the mask: Ctrl-C is the coordinator's, who ends it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._pool.submit(task, *arguments)
        except BrokenProcessPool as error:  # it died while it was idle
            failed: Future[None] = Future()
            failed.set_exception(error)
            return failed
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


_here: dict[str, Any] = {}  # in a worker process: what it was started with, and its writer


def _begin(job: ScoringJob, n_threads: int, n_done: Any, lock: Connection) -> None:
    import torch

    def end_with_coordinator() -> None:
        coordinator = parent_process()
        assert coordinator is not None
        coordinator.join()
        os._exit(1)

    threading.Thread(target=end_with_coordinator, daemon=True).start()
    torch.set_num_threads(n_threads)
    _here.update(job=job, n_done=n_done, lock=lock)


def _load() -> None:
    _here["writer"] = PartWriter(_here["job"])


def _write(part: int) -> None:
    def note(n_done: int) -> None:
        _here["n_done"].value = n_done

    _here["writer"].write(part, note)
