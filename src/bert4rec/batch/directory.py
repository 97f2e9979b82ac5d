"""Recommendations for many users as a directory of Parquet files, by one or many workers.

Every user is in exactly one part, and a part appears whole. What stops in the middle goes on from
the parts that are there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from bert4rec.batch.parts import (
    Job,
    PartWriter,
    finished_parts,
    is_part,
    part_path,
    remove_leftovers,
    remove_parts,
)
from bert4rec.batch.plan import COMPLETE, PLAN, check_same, make_plan, read_plan, write_plan
from bert4rec.batch.pool import run_in_processes
from bert4rec.batch.rows import Asked, UserRows
from bert4rec.batch.stopping import stopped_by_signals
from bert4rec.cluster import check_has_ray
from bert4rec.data.sequences import Sequences
from bert4rec.durable import alone_in, write_file
from bert4rec.recommender import Recommender, Retrieval
from bert4rec.retrieval.index import has_faiss, note_missing_faiss
from bert4rec.retrieval.store import index_name

USERS = "_users"  # where a table of users is prepared, beside the parts made of it
PreparesUsers = Callable[[Path, dict[str, Any]], Sequences]  # at a place, for a model's about.json
Launcher = Literal["local", "ray"]


@dataclass(frozen=True)
class Scored:
    n_users: int
    n_rows: int
    n_parts: int
    n_parts_before: int  # that were there already


def recommend_in_parts(
    model: str | Path,
    sequences: Sequences | PreparesUsers,
    out: str | Path,
    *,
    k: int = 10,
    exclude_seen: bool = True,
    allow: Iterable[object] | None = None,
    block: Iterable[object] | None = None,
    retrieval: Retrieval = "auto",
    n_parts: int | None = None,
    n_workers: int | None = None,
    launcher: Launcher = "local",
    ray_address: str | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Scored:
    """Files `part-00000.parquet` … in `out`, users in the order of the data; then `_SUCCESS`.

    `launcher` is `local`: by itself, or from 2 on as processes of this machine; or `ray`: actors of
    a Ray cluster (see `cluster.connect`), which must see the same files under the same names.
    Called again with the same settings it computes only the parts that are missing.
    `sequences` may be a function, which is called when nobody else is at work in `out`; what it
    leaves in the folder that it is given is deleted at the end.
    """
    model, out = Path(model), Path(out)
    _check_directory(out, overwrite=overwrite)
    if launcher == "ray":
        check_has_ray()
    if retrieval not in get_args(Retrieval):
        raise ValueError(f"retrieval is {retrieval!r}: choose `auto` or `exact`")
    allow = None if allow is None else list(allow)
    block = None if block is None else list(block)
    asked = Asked(k, exclude_seen, allow, block, retrieval)
    recommender = Recommender.load(model, "exact")  # an index is of no use for what we check
    if retrieval == "auto" and index_name(model) is not None and not has_faiss():
        note_missing_faiss()  # nobody hears it from the workers
    report = on_progress or (lambda n_done, n_users: None)
    with alone_in(out) as lock:
        if isinstance(sequences, Sequences):
            users = sequences
        else:
            users = sequences(out / USERS, recommender.about)
        _check_workers(n_workers, users)
        _check_fits(model, recommender, users, asked)
        del recommender  # the workers have their own
        before = None if overwrite else read_plan(out)
        known_parts = None if before is None else before.n_parts
        plan = make_plan(model, users, asked, n_parts=n_parts, known_parts=known_parts)
        if before is not None:
            check_same(out, before, plan)
        assert users.directory is not None
        job = Job(plan, model.resolve(), users.directory, out.resolve())

        def run(missing: list[int]) -> None:
            _run(job, missing, n_workers, launcher, ray_address, lock, report, say or _say_nothing)

        done = _complete(job, run, report, is_new=before is None)
        if not isinstance(sequences, Sequences):
            shutil.rmtree(out / USERS, ignore_errors=True)
        return done


def _check_directory(out: Path, *, overwrite: bool) -> None:
    """A ValueError if there is something at `out` that is not ours to write to."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, not a directory: choose another name")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out}: the folder {out.parent} does not exist")
    if out.is_dir() and not (out / PLAN).exists():
        for path in out.iterdir():
            is_ours = path.name == USERS or (overwrite and is_part(path))
            if not is_ours and not path.name.startswith("."):
                raise ValueError(
                    f"{out} holds other files, such as {path.name}: choose an empty directory or "
                    "a new name"
                )


def _check_workers(n_workers: int | None, sequences: Sequences) -> None:
    if n_workers is not None and not 1 <= n_workers <= sequences.n_users:
        raise ValueError(
            f"workers is {n_workers} and there are {sequences.n_users:,} users: choose 1 to "
            f"{sequences.n_users:,}"
        )
    if sequences.directory is None:
        raise ValueError("sequences are not on disk, where workers read them: save and load them")


def _check_fits(model: Path, recommender: Recommender, sequences: Sequences, asked: Asked) -> None:
    """What every worker would stumble over, found before there is one."""
    rows = UserRows(recommender, sequences, asked)
    if not rows.knows_some_item:
        raise ValueError(
            f"{model} knows none of the {sequences.n_items:,} items of the data in "
            f"{sequences.directory}: this is the data of another model"
        )


def _complete(
    job: Job, run: Callable[[list[int]], None], report: Callable[[int, int], None], *, is_new: bool
) -> Scored:
    """Compute what is missing, and look with our own eyes before we say that all is there."""
    plan, out = job.plan, job.out
    if is_new:
        # The marker first: a directory that says that it is complete is so at any moment. The plan
        # stays until the new one takes its place: by it we know the directory again.
        (out / COMPLETE).unlink(missing_ok=True)
        remove_parts(out)
        write_plan(out, plan)
    remove_leftovers(out)
    there = finished_parts(out, plan, range(plan.n_parts))
    missing = [part for part in range(plan.n_parts) if part not in there]
    if missing:
        (out / COMPLETE).unlink(missing_ok=True)
        report(plan.n_users - sum(map(plan.n_users_of, missing)), plan.n_users)
        try:
            run(missing)
        finally:
            remove_leftovers(out)
    n_rows = there | finished_parts(out, plan, missing)
    for part in range(plan.n_parts):
        if part not in n_rows:
            raise ValueError(f"{part_path(out, part)} is gone: is something else at work there?")
    if not (out / COMPLETE).exists():
        write_file(out / COMPLETE, "")
    return Scored(plan.n_users, sum(n_rows.values()), plan.n_parts, len(there))


def _run(
    job: Job,
    missing: list[int],
    n_workers: int | None,
    launcher: Launcher,
    ray_address: str | None,
    lock: int,
    report: Callable[[int, int], None],
    say: Callable[[str], None],
) -> None:
    n_there, n_users = job.plan.n_parts - len(missing), job.plan.n_users
    if n_there:
        say(f"{n_there:,} of {job.plan.n_parts:,} parts are there already")

    def on_progress(n_done: int) -> None:
        report(n_done, n_users)

    if launcher == "ray":
        from bert4rec.batch.on_ray import run_on_ray

        run_on_ray(job, missing, ray_address, n_workers=n_workers, on_progress=on_progress)
        return
    is_alone = n_workers is None or n_workers == 1
    with stopped_by_signals(at_once=not is_alone) as stop_if_asked:
        if n_workers is None or n_workers == 1:
            _run_here(job, missing, on_progress, stop_if_asked)
            return
        import torch

        run_in_processes(
            job,
            missing,
            n_workers=n_workers,
            n_cores=torch.get_num_threads(),
            lock=lock,
            on_progress=on_progress,
            say=say,
        )


def _run_here(
    job: Job,
    missing: list[int],
    on_progress: Callable[[int], None],
    stop_if_asked: Callable[[], None],
) -> None:
    writer = PartWriter(job)
    n_before = job.plan.n_users - sum(map(job.plan.n_users_of, missing))

    def on_part_progress(n_done: int) -> None:
        on_progress(n_before + n_done)
        stop_if_asked()

    for part in missing:
        writer.write(part, on_part_progress)
        n_before += job.plan.n_users_of(part)


def _say_nothing(message: str) -> None:
    pass
