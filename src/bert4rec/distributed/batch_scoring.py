"""Recommendations for many users: into one file, or by many workers into a directory of parts.

In a directory every user is in exactly one part, and a part is complete or absent. A run that was
interrupted resumes from the parts that are there.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from bert4rec.cpu_tuning import keep_freed_memory
from bert4rec.data.sequences import Sequences
from bert4rec.distributed.cluster import check_has_ray
from bert4rec.distributed.scoring_parts import (
    COMPLETE,
    PLAN,
    PartWriter,
    ScoringJob,
    ScoringPlan,
    check_same_plan,
    is_part,
    make_plan,
    read_plan,
    remove_parts,
    write_plan,
)
from bert4rec.distributed.scoring_workers import LocalWorker, Reports, compute_parts
from bert4rec.distributed.user_rows import BatchRequest, UserRows, no_report
from bert4rec.durable import alone_in, new_file, write_file
from bert4rec.interrupts import stop_requested
from bert4rec.recommender import Recommender, Retrieval
from bert4rec.retrieval.item_index import has_faiss, index_name, note_missing_faiss

FORMATS = {".parquet": "FORMAT parquet", ".csv": "FORMAT csv, HEADER", ".jsonl": "FORMAT json"}
USERS = "_users"  # where a table of users is prepared, beside the parts
PreparesUsers = Callable[[Path, dict[str, Any]], Sequences]  # into a folder, for a model's about.json
OnProgress = Callable[[int, int], object]  # users done, users in all


@dataclass(frozen=True)
class WorkerOptions:
    """Who computes the parts: this process, `n` processes of this machine, or Ray actors.

    With `ray`, all machines must see the same files under the same paths; for the address see
    `cluster.connect`.
    """

    n: int | None = None  # local: None is 1; Ray: None is one actor per CPU of the cluster
    launcher: Literal["local", "ray"] = "local"
    ray_address: str | None = None


@dataclass(frozen=True)
class BatchResult:
    n_users: int
    n_rows: int
    n_parts: int
    n_parts_before: int  # that were there already


def recommend_users(
    recommender: Recommender,
    sequences: Sequences,
    out: str | Path,
    request: BatchRequest | None = None,
    *,
    on_progress: OnProgress = no_report,
) -> int:
    """Write one row per recommendation, users in the order of `sequences`; returns the row count.

    The file appears under its name when it is complete.
    """
    out, n_users = Path(out), sequences.n_users
    if out.suffix not in FORMATS:
        raise ValueError(
            f"{out}: end the name in one of {', '.join(FORMATS)} to choose a format, or in / for "
            "a directory of Parquet files"
        )
    _check_parent(out)
    keep_freed_memory()
    rows = UserRows(recommender, sequences, request or BatchRequest())
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".recommending-") as folder, new_file(out) as temporary:
        database = str(Path(folder) / "rows.duckdb")  # all rows might not fit into memory
        options = FORMATS[out.suffix]
        return rows.write(temporary, options, (0, n_users), lambda n: on_progress(n, n_users), database)


def recommend_in_parts(
    model: str | Path,
    sequences: Sequences | PreparesUsers,
    out: str | Path,
    request: BatchRequest | None = None,
    *,
    n_parts: int | None = None,
    workers: WorkerOptions | None = None,
    overwrite: bool = False,
    on_progress: OnProgress = no_report,
    say: Callable[[str], object] = no_report,
) -> BatchResult:
    """Write `part-00000.parquet` … to `out`, users in the order of the data; then `_SUCCESS`.

    The same call resumes an interrupted run: it computes only the parts that are missing. Ctrl-C
    and SIGTERM raise `Interrupted`. `sequences` may be a function, which is called once no other
    run is at work in `out`; what it leaves in its folder is deleted at the end.
    """
    model, out = Path(model), Path(out)
    request, workers = request or BatchRequest(), workers or WorkerOptions()
    _check_directory(out, overwrite=overwrite)
    if workers.launcher == "ray":
        check_has_ray()
    if request.retrieval not in get_args(Retrieval):
        raise ValueError(f"retrieval is {request.retrieval!r}: choose `auto` or `exact`")
    recommender = Recommender.load(model, "exact")  # the checks need no index
    if request.retrieval == "auto" and index_name(model) is not None and not has_faiss():
        note_missing_faiss()  # what workers print is not shown
    with alone_in(out) as lock:
        users = sequences if isinstance(sequences, Sequences) else sequences(out / USERS, recommender.about)
        _check_users(model, recommender, users, request, workers.n)
        del recommender  # the workers load their own
        before = None if overwrite else read_plan(out)
        plan = make_plan(model, users, request, n_parts, before)
        if before is None:
            _begin(out, plan)
        else:
            check_same_plan(out, before, plan)
        assert users.directory is not None
        job = ScoringJob(plan, model.resolve(), users.directory, out.resolve())
        result = _complete(job, workers, lock, Reports(on_progress, say))
        if users is not sequences:
            shutil.rmtree(out / USERS, ignore_errors=True)
        return result


def _check_parent(out: Path) -> None:
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out}: the folder {out.parent} does not exist")


def _check_directory(out: Path, *, overwrite: bool) -> None:
    """A ValueError if there is something at `out` that is not ours to write to."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, not a directory: choose another name")
    _check_parent(out)
    if out.is_dir() and not (out / PLAN).exists():
        for path in out.iterdir():
            is_ours = path.name == USERS or (overwrite and is_part(path))
            if not is_ours and not path.name.startswith("."):
                raise ValueError(
                    f"{out} holds other files, such as {path.name}: choose an empty directory or a new name"
                )


def _check_users(
    model: Path, recommender: Recommender, users: Sequences, request: BatchRequest, n_workers: int | None
) -> None:
    """Find what every worker would fail on, before one is started."""
    if n_workers is not None and not 1 <= n_workers <= users.n_users:
        raise ValueError(f"workers is {n_workers} and there are {users.n_users:,} users: choose 1 to {users.n_users:,}")
    if users.directory is None:
        raise ValueError("sequences are not on disk, where workers read them: save and load them")
    if not UserRows(recommender, users, request).knows_some_item:
        raise ValueError(
            f"{model} knows none of the {users.n_items:,} items of the data in "
            f"{users.directory}: this is the data of another model"
        )


def _begin(out: Path, plan: ScoringPlan) -> None:
    """Delete the parts of another plan, if there are any."""
    # The marker goes first: a directory that has it is complete at any moment. The old plan
    # stays until the new one replaces it: by the plan we know that the directory is ours.
    (out / COMPLETE).unlink(missing_ok=True)
    remove_parts(out)
    write_plan(out, plan)


def _complete(job: ScoringJob, workers: WorkerOptions, lock: int, reports: Reports) -> BatchResult:
    """Compute what is missing, and check that all parts are there before saying so."""
    plan, marker = job.plan, job.out / COMPLETE
    job.remove_leftovers()
    there = job.finished(range(plan.n_parts))
    missing = [part for part in range(plan.n_parts) if part not in there]
    if missing:
        marker.unlink(missing_ok=True)
        if there:
            reports.say(f"{len(there):,} of {plan.n_parts:,} parts are there already")
        reports.on_progress(plan.n_users - job.n_users_of(missing), plan.n_users)
        try:
            _compute(job, missing, workers, lock, reports)
        finally:
            job.remove_leftovers()
    n_rows = there | job.finished(missing)
    for part in missing:
        if part not in n_rows:
            raise ValueError(f"{job.part_path(part)} is gone: is something else at work there?")
    if not marker.exists():
        write_file(marker, "")
    return BatchResult(plan.n_users, sum(n_rows.values()), plan.n_parts, len(there))


def _compute(job: ScoringJob, parts: list[int], workers: WorkerOptions, lock: int, reports: Reports) -> None:
    n = workers.n or 1
    if workers.launcher == "ray":
        from bert4rec.distributed.ray_scoring import compute_on_ray

        compute_on_ray(job, parts, workers.ray_address, workers.n, reports)
    elif n == 1:
        _compute_here(job, parts, reports)
    else:
        n_threads = max(1, torch.get_num_threads() // n)
        compute_parts(job, parts, lambda: LocalWorker(job, n_threads, lock), n, reports)


def _compute_here(job: ScoringJob, parts: list[int], reports: Reports) -> None:
    n_before = job.plan.n_users - job.n_users_of(parts)

    def on_part(n_done: int) -> None:
        reports.on_progress(n_before + n_done, job.plan.n_users)
        is_stopped.raise_if_stopped()

    with stop_requested() as is_stopped:
        writer = PartWriter(job)
        for part in parts:
            writer.write(part, on_part)
            n_before += job.n_users_of([part])
