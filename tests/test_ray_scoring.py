"""Scoring on a real Ray runtime of two workers: the same rows as without it."""

import dataclasses
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from ray_runtime import ray_address
from scored import Saved, rows_of, save

from bert4rec import __version__
from bert4rec.distributed.batch_scoring import WorkerOptions, recommend_in_parts
from bert4rec.distributed.cluster import connect
from bert4rec.distributed.ray_scoring import PartActor, RayWorker, compute_on_ray
from bert4rec.distributed.scoring_parts import PLAN, ScoringJob, read_plan
from bert4rec.distributed.scoring_workers import Reports
from bert4rec.distributed.user_rows import no_report

pytest.importorskip("ray")
N_USERS, N_PARTS = 240, 60


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(tmp_path_factory.mktemp("saved"), N_USERS)


def test_an_address_where_no_cluster_answers_is_told_soon() -> None:
    """And not by Ray, which waits for minutes."""
    with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as silent:
        closed.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        answers_rubbish = f"127.0.0.1:{silent.getsockname()[1]}"

        def talk_rubbish() -> None:
            with silent.accept()[0] as connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=talk_rubbish)
        thread.start()
        begun = time.monotonic()
        for address, named in (
            (nobody, f"no Ray cluster answers at {nobody} .*refused.*ray start --head"),
            (answers_rubbish, "something else than Ray is there"),
            ("nowhere", "'nowhere' is not the address of a Ray cluster"),
            ("ray://head:10001", "Ray's client"),
        ):
            with pytest.raises(ValueError, match=named), connect(address, n_workers=2):
                pass
        thread.join()
    assert time.monotonic() - begun < 15


def test_the_rows_are_those_of_local_scoring_also_when_a_worker_is_killed(saved: Saved, tmp_path: Path) -> None:
    address = ray_address()
    recommend_in_parts(saved.model, saved.sequences, tmp_path / "local", n_parts=N_PARTS)
    out = tmp_path / "ray"
    killed: list[int] = []

    def kill_a_worker(n_done: int, n_users: int) -> None:
        if not killed and 0 < n_done < n_users:
            killed.extend(actors()[:1])
            os.kill(killed[0], signal.SIGKILL)

    done = recommend_in_parts(
        saved.model,
        saved.sequences,
        out,
        n_parts=N_PARTS,
        workers=WorkerOptions(2, "ray", address),
        on_progress=kill_a_worker,
    )
    assert len(killed) == 1
    assert (done.n_parts, done.n_parts_before) == (N_PARTS, 0)
    assert rows_of(out) == rows_of(tmp_path / "local")  # to the last bit
    assert (out / "_SUCCESS").exists()
    hidden = {path.name for path in out.glob(".*")}
    assert hidden == {".lock", *(f".part-{part:05d}.sha256" for part in range(N_PARTS))}
    # What one launcher began another one goes on with.
    (out / "part-00007.parquet").unlink()
    again = recommend_in_parts(saved.model, saved.sequences, out)
    assert again.n_parts_before == N_PARTS - 1
    assert rows_of(out) == rows_of(tmp_path / "local")


def actors() -> list[int]:
    """Processes of our runtime's actors that hold the model: children of our child, the raylet."""
    found = []
    for raylet in children_of(os.getpid()):
        for worker in children_of(raylet):
            title = Path(f"/proc/{worker}/cmdline").read_bytes()
            if b"PartActor" in title:
                found.append(worker)
    return found


def children_of(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for path in threads for word in path.read_text().split()]


def test_more_workers_than_the_cluster_has_are_refused(saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 2 CPUs, and 3 workers were requested"):
        recommend_in_parts(
            saved.model, saved.sequences, tmp_path / "recs", workers=WorkerOptions(3, "ray", ray_address())
        )


def test_a_machine_that_does_not_see_our_files_says_so(saved: Saved, tmp_path: Path) -> None:
    here = (str(tmp_path), str(saved.model), str(saved.data))
    elsewhere = (str(tmp_path), str(tmp_path / "not-here"), str(saved.data))
    check = PartActor().check
    with pytest.raises(ValueError, match="does not see what is written to"):
        check(__version__, "the plan", *here)
    (tmp_path / PLAN).write_text("another plan")
    with pytest.raises(ValueError, match="does not see what is written to"):
        check(__version__, "the plan", *here)
    (tmp_path / PLAN).write_text("the plan")
    check(__version__, "the plan", *here)
    with pytest.raises(ValueError, match="install the same"):
        check("0.0", "the plan", *here)
    with pytest.raises(ValueError, match="not-here"):
        check(__version__, "the plan", *elsewhere)


def job_of(saved: Saved, out: Path) -> ScoringJob:
    """Of two parts, the second of which is missing."""
    recommend_in_parts(saved.model, saved.sequences, out, n_parts=2)
    (out / "part-00001.parquet").unlink()
    plan = read_plan(out)
    assert plan is not None
    return ScoringJob(plan, saved.model, saved.data, out)


def test_a_part_that_kills_every_worker_is_given_up(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(saved, tmp_path / "recs")
    compute = RayWorker.compute

    def write_and_die(worker: RayWorker, part: int | None) -> bool:
        if part is not None:
            worker.kill()
        return compute(worker, part)

    monkeypatch.setattr(RayWorker, "compute", write_and_die)
    said: list[str] = []
    with pytest.raises(ValueError, match=r"part 1 \(users 120 to 239 .* given up"):
        compute_on_ray(job, [1], ray_address(), 1, Reports(no_report, said.append))
    assert len(said) == 2


def test_an_error_of_a_worker_is_said_in_one_line(saved: Saved, tmp_path: Path) -> None:
    job = job_of(saved, tmp_path / "recs")
    other = dataclasses.replace(job, plan=job.plan.model_copy(update={"model": "another model"}))
    reports = Reports(no_report, no_report)
    with pytest.raises(ValueError, match=r"^a worker of the Ray cluster failed: [^\n]*has changed"):
        compute_on_ray(other, [1], ray_address(), 1, reports)
    compute_on_ray(job, [1], ray_address(), 1, reports)
    assert job.finished([1])
