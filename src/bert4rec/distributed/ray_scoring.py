"""The same parts on a Ray cluster, by actors that hold the model."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert4rec import __version__
from bert4rec.distributed.cluster import connect
from bert4rec.distributed.scoring_parts import PLAN, PartWriter, ScoringJob
from bert4rec.distributed.scoring_workers import Reports, compute_parts


def compute_on_ray(
    job: ScoringJob, parts: Sequence[int], address: str | None, n_workers: int | None, reports: Reports
) -> None:
    """Compute `parts` with `n_workers` actors of one CPU each; None takes all CPUs there are."""
    with connect(address, n_workers=n_workers) as cluster:
        import ray

        try:
            compute_parts(job, parts, lambda: RayWorker(job), n_workers or cluster.n_cpus, reports)
        except ray.exceptions.RayError as error:
            raise ValueError(
                f"a worker of the Ray cluster failed: {_last_line(error)}; finished parts are "
                "kept, and the same command resumes from there"
            ) from error


class PartActor:
    """What runs on the cluster."""

    def check(self, version: str, plan: str, out: str, model: str, data: str) -> None:
        """A ValueError if this machine lacks this program or does not see our files.

        It takes text only, which a machine with another version understands too.
        """
        place = Path(out) / PLAN
        if version != __version__:
            wrong = f"has bert4rec {__version__}, and {version} is here: install the same"
        elif missing := [folder for folder in (model, data) if not Path(folder).is_dir()]:
            wrong = f"does not see {missing[0]}: put model and data on storage that all share"
        elif not place.is_file() or place.read_text(encoding="utf-8") != plan:
            wrong = f"does not see what is written to {out}: choose storage that all share"
        elif not os.access(out, os.W_OK):
            wrong = f"may not write to {out}"
        else:
            return
        raise ValueError(f"{socket.gethostname()} cannot take part, as it {wrong}")

    def load(self, job: ScoringJob) -> None:
        self._writer = PartWriter(job)

    def write(self, part: int) -> None:
        self._writer.write(part)


class RayWorker:
    """An actor, which Ray places on a machine with a free CPU."""

    def __init__(self, job: ScoringJob) -> None:
        import ray

        self.n_done = 0  # an actor tells nothing before its part is finished
        self._is_killed = False
        self._job = job
        as_actor: Any = ray.remote(num_cpus=1)
        self._actor = as_actor(PartActor).remote()

    def compute(self, part: int | None) -> bool:
        import ray

        actor, job = self._actor, self._job
        try:
            if part is None:
                plan = (job.out / PLAN).read_text(encoding="utf-8")
                self._wait(actor.check.remote(__version__, plan, str(job.out), str(job.model), str(job.data)))
                self._wait(actor.load.remote(job))
            else:
                self._wait(actor.write.remote(part))
        except ray.exceptions.RayActorError:
            return False
        return True

    def _wait(self, answer: Any) -> None:
        """Until it is there or the actor is killed, which need not wake a `ray.get` of one that was never placed."""
        import ray

        while not self._is_killed:
            with contextlib.suppress(ray.exceptions.GetTimeoutError):
                ray.get(answer, timeout=1)
                return
        raise ray.exceptions.RayActorError

    def how_it_died(self) -> str:
        return "died, perhaps because its machine is gone or out of memory"

    def kill(self) -> None:
        import ray

        self._is_killed = True
        ray.kill(self._actor)


def _last_line(error: BaseException) -> str:
    """Ray's errors are pages of tracebacks around the one line that matters."""
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    return lines[-1].removeprefix("ValueError: ")
