"""The same parts on a Ray cluster: Ray Data deals them out to actors that hold the model.

A part is a file that appears whole, so that it does no harm when Ray computes one twice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bert4rec import __version__
from bert4rec.batch.parts import Job, PartWriter, finished_parts
from bert4rec.batch.stopping import stopped_by_signals
from bert4rec.cluster import connect
from bert4rec.durable import write_file

TOKEN = ".seen-by-workers"
TRIES = ".tries-"  # and of what: as many bytes as times that it was begun
MOST_TRIES = 3  # of a part, and of loading the model, where the worker dies


class ScoreParts:
    """What an actor of Ray Data runs: a row with the number of a part in, the same row out.

    Ray starts an actor that died again, and its row with it, without end. Tries are counted in
    files, which outlive the actor; an error that is raised ends it all.
    """

    def __init__(self, job: str) -> None:
        import ray

        self._job = Job.from_json(job)
        actor = ray.get_runtime_context().get_actor_id()  # the same when it is started again
        with self._tried(f"actor-{actor}", "a worker died while it loaded the model"):
            self._writer = PartWriter(self._job)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        for part in rows["part"].tolist():
            # Ray does a row again when it loses its answer, though the part may be there.
            if finished_parts(self._job.out, self._job.plan, [part]):
                continue
            first, last = self._job.plan.users_of(part)
            name = f"part {part} (users {first:,} to {last - 1:,} of the data)"
            with self._tried(f"part-{part}", f"{name} was given up: its worker died"):
                self._writer.write(part)
        return rows

    @contextlib.contextmanager
    def _tried(self, name: str, what_happened: str) -> Iterator[None]:
        path = self._job.out / f"{TRIES}{name}"
        with path.open("ab") as file:
            file.write(b".")
            n_tries = file.tell()
        if n_tries > MOST_TRIES:
            raise ValueError(
                f"{what_happened} {MOST_TRIES} times, perhaps because there is not enough memory: "
                "try fewer --workers"
            )
        yield
        path.unlink(missing_ok=True)


def run_on_ray(
    job: Job,
    parts: Sequence[int],
    address: str | None,
    *,
    n_workers: int | None,
    on_progress: Callable[[int], None],
) -> None:
    """Compute `parts` with `n_workers` actors of one CPU each; None takes all CPUs there are."""
    with connect(address, n_workers=n_workers) as cluster, stopped_by_signals(at_once=True):
        _check_machines(job)
        n_actors = min(n_workers or cluster.n_cpus, len(parts))
        n_done = job.plan.n_users - sum(map(job.plan.n_users_of, parts))
        with _clear_errors(), _no_tries_in(job.out):
            for part in _computed(job, parts, n_actors):
                n_done += job.plan.n_users_of(part)
                on_progress(n_done)


def _computed(job: Job, parts: Sequence[int], n_actors: int) -> Iterator[int]:
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    for name in ("ray.data", "ray"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rows = ray.data.from_items([{"part": part} for part in parts], override_num_blocks=len(parts))
    done = rows.map_batches(
        ScoreParts,
        fn_constructor_args=(job.as_json(),),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=n_actors, max_tasks_in_flight_per_actor=1),
        num_cpus=1,
    )
    for row in done.iter_rows():
        yield int(row["part"])


@contextlib.contextmanager
def _no_tries_in(out: Path) -> Iterator[None]:
    """Neither those of a run before nor, afterwards, ours."""
    try:
        for path in out.glob(f"{TRIES}*"):
            path.unlink(missing_ok=True)
        yield
    finally:
        for path in out.glob(f"{TRIES}*"):
            path.unlink(missing_ok=True)


def _check_machines(job: Job) -> None:
    """Every machine has this program and sees our files, or we say so before any work begins."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    all_nodes: Any = ray.nodes  # has no types
    token = job.out / TOKEN
    text = secrets.token_hex(16)
    write_file(token, text)
    try:
        look = ray.remote(what_is_wrong)
        nodes = [each for each in all_nodes() if each["Alive"] and each["Resources"].get("CPU")]
        asked = [
            look.options(
                num_cpus=0,
                max_retries=1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(each["NodeID"], soft=False),
            ).remote(job.as_json(), text, __version__)
            for each in nodes
        ]
        for node, answer in zip(nodes, asked, strict=True):
            try:
                wrong = ray.get(answer)
            except ray.exceptions.RayError as error:
                wrong = _last_line(error)
            if wrong is not None:
                raise ValueError(
                    f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}) of the Ray "
                    f"cluster cannot take part: {wrong}"
                )
    finally:
        token.unlink(missing_ok=True)


def what_is_wrong(job_text: str, token: str, version: str) -> str | None:
    """Asked on a machine of the cluster: why it cannot take part, or None."""
    job = Job.from_json(job_text)
    if version != __version__:
        return f"it has bert4rec {__version__}, and {version} is here: install the same"
    for folder in (job.model, job.data):
        if not folder.is_dir():
            return f"it does not see {folder}: put model and data on storage that all share"
    if not _is_seen(job.out / TOKEN, token):
        return f"it does not see what is written to {job.out}: choose storage that all share"
    if not os.access(job.out, os.W_OK):
        return f"it may not write to {job.out}"
    return None


def _is_seen(path: Path, token: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == token
    except OSError:
        return False


@contextlib.contextmanager
def _clear_errors() -> Iterator[None]:
    """Ray's errors are pages of tracebacks around the one line that matters."""
    import ray

    try:
        yield
    except ray.exceptions.RayError as error:
        raise ValueError(
            f"a worker of the Ray cluster failed: {_last_line(error)}; finished parts are kept, "
            "and the same command goes on from there"
        ) from error


def _last_line(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[-1].removeprefix("ValueError: ") if lines else type(cause).__name__
