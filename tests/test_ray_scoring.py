"""Scoring on a real Ray runtime of two workers: the same rows as without it."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ray_runtime import ray_address
from scored import Saved, rows_of, save

from bert4rec.batch import recommend_in_parts
from bert4rec.batch.on_ray import TOKEN, TRIES, ScoreParts, what_is_wrong
from bert4rec.batch.parts import Job
from bert4rec.batch.plan import read_plan
from bert4rec.cluster import connect

pytest.importorskip("ray")
pytestmark = [  # Ray Data warns of its own settings
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.data"),
    pytest.mark.filterwarnings(r"ignore:.*is deprecated:UserWarning:ray\.data"),
]
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


def test_the_rows_are_those_of_local_scoring_also_when_a_worker_is_killed(
    saved: Saved, tmp_path: Path
) -> None:
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
        n_workers=2,
        launcher="ray",
        ray_address=address,
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
    again = recommend_in_parts(saved.model, saved.sequences, out, launcher="local")
    assert again.n_parts_before == N_PARTS - 1
    assert rows_of(out) == rows_of(tmp_path / "local")


def actors() -> list[int]:
    """Processes of our runtime's actors that hold the model: children of our child, the raylet."""
    found = []
    for raylet in children_of(os.getpid()):
        for worker in children_of(raylet):
            title = Path(f"/proc/{worker}/cmdline").read_bytes()
            if b"MapBatches(ScoreParts)" in title:
                found.append(worker)
    return found


def children_of(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for path in threads for word in path.read_text().split()]


def test_more_workers_than_the_cluster_has_are_refused(saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 2 CPUs, and 3 workers were asked for"):
        recommend_in_parts(
            saved.model,
            saved.sequences,
            tmp_path / "recs",
            n_workers=3,
            launcher="ray",
            ray_address=ray_address(),
        )


def test_a_machine_that_does_not_see_our_files_says_so(saved: Saved, tmp_path: Path) -> None:
    out = tmp_path / "recs"
    recommend_in_parts(saved.model, saved.sequences, out, n_parts=1)
    plan = read_plan(out)
    assert plan is not None
    here = Job(plan, saved.model, saved.data, out)
    from bert4rec import __version__

    assert "does not see what is written to" in str(
        what_is_wrong(here.as_json(), "token", __version__)
    )
    (out / TOKEN).write_text("token")
    assert what_is_wrong(here.as_json(), "token", __version__) is None
    assert "install the same" in str(what_is_wrong(here.as_json(), "token", "0.0"))
    elsewhere = Job(plan, tmp_path / "not-here", saved.data, out)
    assert "not-here" in str(what_is_wrong(elsewhere.as_json(), "token", __version__))


def test_a_part_that_kills_every_worker_is_given_up(saved: Saved, tmp_path: Path) -> None:
    ray_address()
    out = tmp_path / "recs"
    recommend_in_parts(saved.model, saved.sequences, out, n_parts=2)
    plan = read_plan(out)
    assert plan is not None
    actor = ScoreParts(Job(plan, saved.model, saved.data, out).as_json())
    (out / "part-00001.parquet").unlink()
    (out / f"{TRIES}part-1").write_bytes(b"..")  # it died twice
    actor({"part": np.array([0, 1])})
    assert (out / "part-00001.parquet").exists()
    (out / "part-00001.parquet").unlink()
    (out / f"{TRIES}part-1").write_bytes(b"...")
    with pytest.raises(ValueError, match=r"part 1 \(users 120 to 239 .* given up"):
        actor({"part": np.array([0, 1])})
