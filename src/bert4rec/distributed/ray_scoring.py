"""The same parts on a Ray cluster, by actors that hold the model."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bert4rec import __version__
from bert4rec.distributed.cluster import connect
from bert4rec.distributed.scoring_parts import PartWriter, ScoringJob
from bert4rec.distributed.scoring_workers import Reports, WorkerDied, compute_parts
from bert4rec.durable import write_file

TOKEN = ".seen-by-workers"


def compute_on_ray(
    job: ScoringJob, parts: Sequence[int], address: str | None, n_workers: int | None, reports: Reports
) -> None:
    """Compute `parts` with `n_workers` actors of one CPU each; None takes all CPUs there are."""
    with connect(address, n_workers=n_workers) as cluster, _token_in(job.out) as token:
        import ray

        try:
            compute_parts(job, parts, lambda: RayWorker(job, token), n_workers or cluster.n_cpus, reports)
        except ray.exceptions.RayError as error:
            raise ValueError(
                f"a worker of the Ray cluster failed: {_last_line(error)}; finished parts are "
                "kept, and the same command resumes from there"
            ) from error


class PartActor:
    """What runs on the cluster."""

    def check(self, *facts: str) -> None:
        """A ValueError that says why this machine cannot take part, see `what_is_wrong`."""
        if (wrong := what_is_wrong(*facts)) is not None:
            raise ValueError(f"{socket.gethostname()} cannot take part: {wrong}")

    def load(self, job: ScoringJob) -> None:
        self._writer = PartWriter(job)

    def write(self, part: int) -> None:
        self._writer.write(part)


class RayWorker:
    """An actor, which Ray places on a machine with a free CPU."""

    n_done = 0  # an actor tells nothing before its part is finished

    def __init__(self, job: ScoringJob, token: str) -> None:
        import ray

        self._job, self._token = job, token
        as_actor: Any = ray.remote(num_cpus=1)
        self._actor = as_actor(PartActor).remote()

    def load(self) -> None:
        job = self._job
        _wait_for(self._actor.check.remote(__version__, self._token, str(job.out), str(job.model), str(job.data)))
        _wait_for(self._actor.load.remote(job))

    def write(self, part: int) -> None:
        _wait_for(self._actor.write.remote(part))

    def how_it_died(self) -> str:
        return "died, perhaps because its machine is gone or out of memory"

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)


def _wait_for(work: Any) -> None:
    import ray

    try:
        ray.get(work)
    except ray.exceptions.RayActorError:
        raise WorkerDied from None


def _last_line(error: BaseException) -> str:
    """Ray's errors are pages of tracebacks around the one line that matters."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[-1].removeprefix("ValueError: ") if lines else type(cause).__name__


@contextlib.contextmanager
def _token_in(out: Path) -> Iterator[str]:
    """A new text in a file there, by which a machine knows that it sees what is written here."""
    text = secrets.token_hex(16)
    write_file(out / TOKEN, text)
    try:
        yield text
    finally:
        (out / TOKEN).unlink(missing_ok=True)


def what_is_wrong(version: str, token: str, out: str, model: str, data: str) -> str | None:
    """Runs on a machine of the cluster: why it cannot take part, or None.

    It takes text only, which a machine with another version understands too.
    """
    if version != __version__:
        return f"it has bert4rec {__version__}, and {version} is here: install the same"
    for folder in (model, data):
        if not Path(folder).is_dir():
            return f"it does not see {folder}: put model and data on storage that all share"
    seen = Path(out) / TOKEN
    if not seen.is_file() or seen.read_text(encoding="utf-8") != token:
        return f"it does not see what is written to {out}: choose storage that all share"
    if not os.access(out, os.W_OK):
        return f"it may not write to {out}"
    return None
