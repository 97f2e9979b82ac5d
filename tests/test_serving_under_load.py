"""The service under load: models replaced, broken ones refused, ends and kills; the short form.

`make soak` runs the long form of the same functions.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served, free_port, save_model, serve
from under_load.ends import END_WITHIN, end_often
from under_load.kills import kill_often
from under_load.model_place import ModelPlace, lines_of, until_logged
from under_load.questions import Questions
from under_load.reloads import (
    BY_CALL,
    BY_SIGNAL,
    BY_WATCH,
    broken_ways,
    refuse_under_load,
    reload_under_load,
)

pytestmark = pytest.mark.slow
N_CONNECTIONS = 8


@pytest.fixture(scope="module")
def questions() -> Questions:
    return Questions()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, questions: Questions) -> ModelPlace:
    place = ModelPlace(tmp_path_factory.mktemp("models"))
    place.switch(questions.versions[0].recommender)
    return place


@pytest.fixture(scope="module")
def served(place: ModelPlace) -> Iterator[Served]:
    with serve(place.path, "--no-access-log") as served:
        yield served


def version_now(served: Served) -> str:
    with served.client() as client:
        answer = client.post("/v1/recommend", json={"history": []})
    version: str = answer.json()["model_version"]
    return version


def test_no_request_fails_while_models_are_replaced(
    served: Served, place: ModelPlace, questions: Questions
) -> None:
    load = reload_under_load(
        served,
        place,
        questions,
        version_now(served),
        n_answers=2_000,
        n_connections=N_CONNECTIONS,
        ways=[("switch", BY_SIGNAL), ("overwrite", BY_CALL)] * 2,
        progress=lambda line: None,
    )
    outcome = asyncio.run(load)
    assert outcome.faults == []
    assert (outcome.n_reloads, set(outcome.by_version)) == (4, set(questions.by_name))


def test_broken_models_are_refused_while_the_old_one_answers(
    served: Served, place: ModelPlace, questions: Questions
) -> None:
    load = refuse_under_load(
        served,
        place,
        questions,
        version_now(served),
        broken=broken_ways(8, (BY_CALL, BY_SIGNAL)),
        n_connections=N_CONNECTIONS,
        progress=lambda line: None,
        n_between=10,
    )
    outcome = asyncio.run(load)
    assert outcome.faults == []
    assert outcome.n_refused == 8


def test_a_watched_model_is_taken_when_it_is_whole(tmp_path: Path, questions: Questions) -> None:
    """Replaced under load; and copied by a tool that brings the manifest before the weights."""
    place = ModelPlace(tmp_path)
    first, second, third = questions.versions
    place.switch(first.recommender)
    with serve(place.path, "--no-access-log", "--watch") as served:
        load = reload_under_load(
            served,
            place,
            questions,
            first.version,
            n_answers=300,
            n_connections=N_CONNECTIONS,
            ways=[("overwrite", BY_WATCH)],
            progress=lambda line: None,
        )
        outcome = asyncio.run(load)
        assert outcome.faults == []
        assert set(outcome.by_version) == {first.version, second.version}

        whole, arriving = place.new_directory(), place.new_directory()
        third.recommender.save(whole)
        weights = "model.safetensors"
        shutil.copytree(whole, arriving, dirs_exist_ok=True, ignore=lambda *_: [weights])
        place.switch_to(arriving)
        asyncio.run(until_logged(served, "model refused", 1))
        shutil.copy(whole / weights, arriving / weights)
        lines = asyncio.run(until_logged(served, "model loaded", 2))
        assert lines[-1]["to"] == third.version
        assert len(lines_of(served, "model refused")) <= 3, "looked at again without need"


def test_sigterm_loses_no_accepted_request(tmp_path: Path, questions: Questions) -> None:
    for end in end_often(tmp_path, questions, n_ends=3, n_connections=16):
        assert end.is_clean, end


def test_kill_9_loses_no_acknowledged_event(tmp_path: Path) -> None:
    kills = list(kill_often(tmp_path, n_kills=2))
    assert [kill.killed for kill in kills] == ["workers", "main"]
    for kill in kills:
        assert kill.is_harmless, kill


def test_signals_while_it_starts(tmp_path: Path) -> None:
    """SIGHUP is not the end of a worker that cannot reload yet, and SIGTERM is no failure."""
    save_model(tmp_path / "model")
    words = [sys.executable, "-c", "from bert4rec.cli import main; main()", "serve"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*words, str(tmp_path / "model"), "--port", str(free_port())], stderr=log
        )
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not children.read_text():
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(0.5)  # the worker imports torch now
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert process.poll() is None, (tmp_path / "log").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_WITHIN) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
