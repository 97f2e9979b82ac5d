"""Computing parts by several workers; here those workers are processes of this machine.

A worker gets one part at a time. When it dies, another worker takes its place and its part is
computed again. A part is a file that is complete or absent, so computing it twice does no harm.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from typing import Protocol

from bert4rec.distributed.scoring_parts import PartWriter, ScoringJob
from bert4rec.interrupts import stop_requested

MOST_TRIES = 3  # of a part, and of loading the model, when workers die
LOOK_EVERY = 0.2  # seconds between two looks at progress and interrupts


class ScoringWorker(Protocol):
    """A process somewhere that computes parts; a thread of ours waits for what it does."""

    n_done: int  # users done in its current part

    def compute(self, part: int | None) -> bool:
        """Wait until the part is written, for None until the model is loaded; false if the worker died."""

    def how_it_died(self) -> str:
        """As in `was killed`."""

    def kill(self) -> None:
        """End it at once, whatever it does; may be called twice."""


@dataclass(frozen=True)
class Reports:
    """What a caller wants to hear while it waits."""

    on_progress: Callable[[int, int], object]  # users done, those of unfinished parts too; users in all
    say: Callable[[str], object]


def compute_parts(
    job: ScoringJob, parts: Sequence[int], start_worker: Callable[[], ScoringWorker], n_workers: int, reports: Reports
) -> None:
    """Compute `parts` with `n_workers` workers; finished parts are kept whatever happens.

    Only a worker that has loaded the model gets a part: on a busy cluster some may never start. An
    error that a worker raises ends the run, since any other worker would raise it too. Ctrl-C and
    SIGTERM end all workers and raise `Interrupted`.
    """
    waiting, unfinished, n_deaths = deque(parts), set(parts), Counter[int | None]()
    workers: list[ScoringWorker] = []
    busy: dict[Future[bool], tuple[ScoringWorker, int | None]] = {}  # None: loading the model

    def assign(worker: ScoringWorker, part: int | None) -> None:
        worker.n_done = 0
        busy[threads.submit(worker.compute, part)] = worker, part

    def start() -> None:
        workers.append(start_worker())
        assign(workers[-1], None)

    with stop_requested() as is_stopped, ThreadPoolExecutor(n_workers) as threads:
        try:
            for _ in range(min(n_workers, len(parts))):
                start()
            while unfinished:
                done, _ = wait(busy, LOOK_EVERY, FIRST_COMPLETED)
                is_stopped.raise_if_stopped()
                for future in done:
                    worker, part = busy.pop(future)
                    has_died = not future.result()
                    if part is not None and (not has_died or job.finished([part])):
                        unfinished.remove(part)  # one that died may have finished its part before
                    elif has_died:
                        n_deaths[part] += 1
                        if n_deaths[part] == MOST_TRIES:
                            raise ValueError(_given_up(job, part, worker.how_it_died()))
                        if part is not None:
                            waiting.appendleft(part)
                    if not waiting:
                        worker.kill()
                    elif has_died:
                        reports.say(f"a worker {worker.how_it_died()}: another one takes its place")
                        start()
                    else:
                        n_deaths[None] = 0  # the model can be loaded
                        assign(worker, waiting.popleft())
                n_within = sum(worker.n_done for worker, _ in busy.values())
                reports.on_progress(job.plan.n_users - job.n_users_of(unfinished) + n_within, job.plan.n_users)
        finally:
            for worker in workers:
                worker.kill()


def _given_up(job: ScoringJob, part: int | None, cause: str) -> str:
    what = "loading the model"
    if part is not None:
        first, last = job.plan.users_of(part)
        what = f"part {part} (users {first:,} to {last - 1:,} of the data)"
    return (
        f"{what} was given up: its worker {cause}, {MOST_TRIES} times; finished parts are kept in "
        f"{job.out}. Run the same command again to resume, with fewer --workers if memory is short"
    )


class LocalWorker:
    """A process of this machine; it ends with the coordinator, even if that is killed."""

    def __init__(self, job: ScoringJob, n_threads: int, lock: int) -> None:
        context = get_context("spawn")
        self.n_done = 0
        self._connection, theirs = context.Pipe()
        # The process has a copy of the lock: the directory stays locked while it lives.
        with theirs, Connection(os.dup(lock), writable=False) as held:
            self._process = context.Process(target=_serve, args=(job, n_threads, theirs, held))
            # The process inherits the mask: Ctrl-C is the coordinator's, who ends it.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def compute(self, part: int | None) -> bool:
        try:
            self._connection.send(part)
            while isinstance(answer := self._connection.recv(), int):
                self.n_done = answer
        except (EOFError, OSError):
            return False
        if answer is not None:
            raise answer
        return True

    def how_it_died(self) -> str:
        self._process.join()
        code = self._process.exitcode
        assert code is not None
        if code == -signal.SIGKILL:
            return "was killed (SIGKILL), perhaps because the machine ran out of memory"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"

    def kill(self) -> None:
        self._process.kill()  # a part is complete or absent: there is nothing to wait for
        self._process.join()


def _serve(job: ScoringJob, n_threads: int, connection: Connection, lock: Connection) -> None:
    """What a worker's process does: answer None for each part when it is done, or with the error.

    Before that the answers are numbers of users done.
    """
    import torch

    def end_with_coordinator() -> None:
        coordinator = parent_process()
        assert coordinator is not None
        coordinator.join()
        os._exit(1)

    threading.Thread(target=end_with_coordinator, daemon=True).start()
    torch.set_num_threads(n_threads)
    try:
        while True:
            if (part := connection.recv()) is None:
                writer = PartWriter(job)
            else:
                writer.write(part, connection.send)
            connection.send(None)
    except Exception as error:
        error.add_note(traceback.format_exc())  # of this process, for those who debug
        with contextlib.suppress(BrokenPipeError):  # the coordinator is gone
            connection.send(error)
