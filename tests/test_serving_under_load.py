"""The service under load: new and broken models, SIGTERM and kill -9; the short form.

`make soak` runs the long form of the same functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served, free_port, save_model, serve, wait_until
from under_load.kills import kill_often
from under_load.known_requests import KnownRequests
from under_load.model_link import ModelLink, lines_of, until_logged
from under_load.reloads import BY_CALL, BY_SIGNAL, BY_WATCH, broken_ways, refuse_under_load, reload_under_load
from under_load.shutdowns import STOP_WITHIN, stop_often

pytestmark = pytest.mark.slow
N_CONNECTIONS = 8


@pytest.fixture(scope="module")
def known() -> KnownRequests:
    return KnownRequests()


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory, known: KnownRequests) -> ModelLink:
    link = ModelLink(tmp_path_factory.mktemp("models"))
    link.switch(known.versions[0].recommender)
    return link


@pytest.fixture(scope="module")
def served(link: ModelLink) -> Iterator[Served]:
    with serve(link.path, "--no-access-log") as served:
        yield served


def version_now(served: Served) -> str:
    with served.client() as client:
        answer = client.post("/v1/recommend", json={"history": []})
    version: str = answer.json()["model_version"]
    return version


def test_no_request_fails_while_models_are_replaced(served: Served, link: ModelLink, known: KnownRequests) -> None:
    load = reload_under_load(
        served,
        link,
        known,
        version_now(served),
        n_answers=2_000,
        n_connections=N_CONNECTIONS,
        ways=[("switch", BY_SIGNAL), ("overwrite", BY_CALL)] * 2,
        progress=lambda line: None,
    )
    outcome = asyncio.run(load)
    assert outcome.faults == []
    assert (outcome.n_reloads, set(outcome.by_version)) == (4, set(known.by_name))


def test_broken_models_are_refused_while_the_old_one_answers(
    served: Served, link: ModelLink, known: KnownRequests
) -> None:
    load = refuse_under_load(
        served,
        link,
        known,
        version_now(served),
        broken=broken_ways(8, (BY_CALL, BY_SIGNAL)),
        n_connections=N_CONNECTIONS,
        progress=lambda line: None,
        n_between=10,
    )
    outcome = asyncio.run(load)
    assert outcome.faults == []
    assert outcome.n_refused == 8


def test_a_watched_model_is_loaded_when_it_is_complete(tmp_path: Path, known: KnownRequests) -> None:
    """Replaced under load; and copied by a tool that brings the manifest before the weights."""
    link = ModelLink(tmp_path)
    first, second, third = known.versions
    link.switch(first.recommender)
    with serve(link.path, "--no-access-log", "--watch") as served:
        load = reload_under_load(
            served,
            link,
            known,
            first.version,
            n_answers=300,
            n_connections=N_CONNECTIONS,
            ways=[("overwrite", BY_WATCH)],
            progress=lambda line: None,
        )
        outcome = asyncio.run(load)
        assert outcome.faults == []
        assert set(outcome.by_version) == {first.version, second.version}

        whole, arriving = link.new_directory(), link.new_directory()
        third.recommender.save(whole)
        weights = "model.safetensors"
        shutil.copytree(whole, arriving, dirs_exist_ok=True, ignore=lambda *_: [weights])
        link.switch_to(arriving)
        asyncio.run(until_logged(served, "model refused", 1))
        shutil.copy(whole / weights, arriving / weights)
        lines = asyncio.run(until_logged(served, "model loaded", 2))
        assert lines[-1]["to"] == third.version
        assert len(lines_of(served, "model refused")) <= 3, "loaded again without need"


def test_sigterm_loses_no_accepted_request(tmp_path: Path, known: KnownRequests) -> None:
    for end in stop_often(tmp_path, known, n_stops=2, n_connections=16):
        assert end.is_clean, end


def test_kill_9_loses_no_acknowledged_event(tmp_path: Path) -> None:
    kills = list(kill_often(tmp_path, n_kills=2))
    assert [kill.killed for kill in kills] == ["workers", "main"]
    for kill in kills:
        assert kill.is_harmless, kill


@contextlib.contextmanager
def starting(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """A server whose worker is still loading, that worker, and the log."""
    save_model(folder / "model")
    words = [sys.executable, "-c", "from bert4rec.cli import main; main()", "serve"]
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen([*words, str(folder / "model"), "--port", str(free_port())], stderr=file)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: bool(children.read_text()), log)
        worker = int(children.read_text().split()[0])
        wait_until(lambda: ignores(worker, signal.SIGHUP), log)
        yield process, worker, log
    finally:
        process.kill()
        process.wait()


def ignores(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    [mask] = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_sighup_does_not_end_a_worker_that_is_still_loading(tmp_path: Path) -> None:
    with starting(tmp_path) as (process, worker, log):
        process.send_signal(signal.SIGHUP)
        os.kill(worker, signal.SIGHUP)
        wait_until(lambda: '"ready"' in log.read_text(), log)
        assert process.poll() is None
        os.kill(worker, 0)


def test_sigterm_while_it_loads_is_not_a_failure(tmp_path: Path) -> None:
    with starting(tmp_path) as (process, _, log):
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_WITHIN) == 0, log.read_text()
