"""Scoring in parts: every user once, the same rows, whatever dies on the way."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from scored import Row, Saved, in_one_file, rows_of, save
from typer.testing import CliRunner

from bert4rec.cli import app
from bert4rec.data.sequences import Sequences
from bert4rec.distributed.batch_scoring import WorkerOptions, recommend_in_parts
from bert4rec.distributed.scoring_parts import PartWriter, ScoringJob, default_parts, read_plan
from bert4rec.distributed.scoring_workers import Reports, compute_parts
from bert4rec.distributed.user_rows import BatchRequest, no_report
from bert4rec.durable import alone_in
from bert4rec.interrupts import Interrupted
from bert4rec.recommender import Recommender

N_USERS = 1200
MANY = 80  # parts, so that there is time to kill a worker in the middle


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(tmp_path_factory.mktemp("saved"), N_USERS)


@pytest.fixture(scope="module")
def expected(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return in_one_file(saved, tmp_path_factory.mktemp("expected"))


def assert_same(found: list[Row], expected: list[Row]) -> None:
    """Scores may differ in the last bit, as others are in the same matrix product."""
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert mine[:3] + mine[5:] == other[:3] + other[5:]
        assert mine[3:5] == pytest.approx(other[3:5], rel=1e-4, abs=1e-4)


def names_in(out: Path) -> set[str]:
    return {path.name for path in out.iterdir()}


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def workers_of(pid: int) -> list[int]:
    """Its worker processes; the multiprocessing module has a helper process beside them."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    children = [int(word) for word in path.read_text().split()] if path.exists() else []
    return [child for child in children if b"spawn_main" in command_line(child)]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_alive(pid: int) -> bool:
    """A zombie is not: nobody may have waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def n_parts_in(out: Path) -> int:
    return len(list(out.glob("part-*.parquet")))


@contextlib.contextmanager
def started(saved: Saved, out: Path, *options: object) -> Iterator[subprocess.Popen[str]]:
    """The command, in the middle of its work."""
    process = subprocess.Popen(saved.command(out, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: n_parts_in(out) >= 3 or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("n_parts", [1, 7, N_USERS])
def test_every_user_is_in_one_part_in_the_order_of_the_data(
    n_parts: int, saved: Saved, expected: list[Row], tmp_path: Path
) -> None:
    if n_parts == N_USERS:
        saved = save(tmp_path, 17)
        n_parts, expected = 17, in_one_file(saved, tmp_path)
    out = tmp_path / "recs"
    done = recommend_in_parts(saved.model, saved.sequences, out, n_parts=n_parts)
    assert (done.n_parts, done.n_parts_before) == (n_parts, 0)
    assert done.n_rows == len(expected)
    assert_same(rows_of(out), expected)
    parts = {f"part-{part:05d}.parquet" for part in range(n_parts)}
    sums = {f".part-{part:05d}.sha256" for part in range(n_parts)}
    assert names_in(out) == parts | sums | {"_scoring.json", "_SUCCESS", ".lock"}
    owners = Counter(user for part in parts for user in {row[0] for row in rows_of(out / part)})
    assert set(owners.values()) == {1}
    assert list(owners.keys() ^ set(saved.sequences.user_ids)) == []


def test_other_programs_read_the_directory_as_one_table(saved: Saved, tmp_path: Path) -> None:
    from pyarrow import dataset

    done = recommend_in_parts(saved.model, saved.sequences, tmp_path / "recs", n_parts=5)
    assert dataset.dataset(tmp_path / "recs").count_rows() == done.n_rows


def test_the_number_of_parts_suits_the_users() -> None:
    assert default_parts(1, 10) == 1
    assert default_parts(6_040, 10) == 6
    assert default_parts(1_000_000, 10) == 64
    assert default_parts(1_000_000, 200) == 100  # a part has at most some million rows
    assert default_parts(100_000_000, 10) == 1526


def test_it_goes_on_with_the_parts_that_are_there(saved: Saved, expected: list[Row], tmp_path: Path) -> None:
    out = tmp_path / "recs"
    recommend_in_parts(saved.model, saved.sequences, out, n_parts=6)
    kept = out / "part-00001.parquet"
    (out / "part-00000.parquet").unlink()
    (out / "part-00002.parquet").write_bytes(b"PAR1 cut short")
    (out / "part-00003.parquet").write_bytes((out / "part-00004.parquet").read_bytes())
    for name in (".part-00005.parquet.1.tmp", "..part-00005.sha256.1.tmp", "._SUCCESS.1.tmp"):
        (out / name).write_bytes(b"of a killed process")
    before = kept.stat().st_mtime_ns
    done = recommend_in_parts(saved.model, saved.sequences, out)  # its number of parts is known
    assert (done.n_parts, done.n_parts_before) == (6, 3)
    assert kept.stat().st_mtime_ns == before
    assert not list(out.glob(".*.tmp"))
    assert_same(rows_of(out), expected)
    again = recommend_in_parts(saved.model, saved.sequences, out)
    assert (again.n_parts_before, again.n_rows) == (6, done.n_rows)


def test_a_part_that_was_damaged_in_its_middle_is_computed_again(
    saved: Saved, expected: list[Row], tmp_path: Path
) -> None:
    out = tmp_path / "recs"
    recommend_in_parts(saved.model, saved.sequences, out, n_parts=3)
    part = out / "part-00001.parquet"
    content = part.read_bytes()
    middle = len(content) // 2
    part.write_bytes(content[:middle] + bytes(2000) + content[middle + 2000 :])
    done = recommend_in_parts(saved.model, saved.sequences, out)
    assert done.n_parts_before == 2
    assert_same(rows_of(out), expected)


def test_what_was_killed_while_it_deleted_parts_can_be_started_again(tmp_path: Path) -> None:
    mine, out = save(tmp_path, 20), tmp_path / "recs"
    recommend_in_parts(mine.model, mine.sequences, out, n_parts=3)
    victim = out / "part-00001.parquet"
    victim.unlink()
    victim.mkdir()  # deleting ends here, as if it had been killed
    with pytest.raises(OSError):  # noqa: PT011 (another one on each system)
        recommend_in_parts(mine.model, mine.sequences, out, BatchRequest(k=3), overwrite=True)
    victim.rmdir()
    assert not (out / "_SUCCESS").exists()
    done = recommend_in_parts(mine.model, mine.sequences, out, n_parts=3)
    assert done.n_parts_before < 3


def test_parts_without_a_plan_are_deleted_only_if_asked(tmp_path: Path) -> None:
    mine, out = save(tmp_path, 20), tmp_path / "recs"
    recommend_in_parts(mine.model, mine.sequences, out, n_parts=3)
    (out / "_SUCCESS").unlink()
    (out / "_scoring.json").rename(out / "._scoring.json.1-a.tmp")  # it died before the rename
    with pytest.raises(ValueError, match=r"holds other files, such as part-0000"):
        recommend_in_parts(mine.model, mine.sequences, out)
    recommend_in_parts(mine.model, mine.sequences, out, n_parts=2, overwrite=True)
    assert n_parts_in(out) == 2
    assert not list(out.glob(".*.tmp"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "part-00000-of-another-program.parquet").write_text("")
    with pytest.raises(ValueError, match="holds other files"):
        recommend_in_parts(mine.model, mine.sequences, other, overwrite=True)


def test_other_settings_are_refused_by_name(saved: Saved, tmp_path: Path) -> None:
    out = tmp_path / "recs"
    recommend_in_parts(saved.model, saved.sequences, out, n_parts=2)
    other = save(tmp_path / "other", N_USERS, seed=4)
    renamed = saved.sequences
    renamed._user_source = [f"someone-{row}" for row in range(N_USERS)]
    renamed.save(tmp_path / "renamed")
    before = rows_of(out)
    for options, named in (
        ({"k": 3}, r"--k differs \(10 there, 3 now\)"),
        ({"exclude_seen": False}, "seen items"),
        ({"block": ["item-1"]}, "--block differs"),
        ({"allow": ["item-1", "item-2"]}, "--allow differs"),
    ):
        request = BatchRequest(**options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"{named}.*; pass --overwrite"):
            recommend_in_parts(saved.model, saved.sequences, out, request)
    with pytest.raises(ValueError, match=r"--parts differs \(2 there, 3 now\).*; pass --overwrite"):
        recommend_in_parts(saved.model, saved.sequences, out, n_parts=3)
    with pytest.raises(ValueError, match="the model differs"):
        recommend_in_parts(other.model, saved.sequences, out)
    with pytest.raises(ValueError, match="the data differs"):
        recommend_in_parts(saved.model, other.sequences, out)
    with pytest.raises(ValueError, match="the list of user ids differs"):
        recommend_in_parts(saved.model, type(renamed).load(tmp_path / "renamed"), out)
    assert rows_of(out) == before
    three = BatchRequest(k=3)
    recommend_in_parts(saved.model, saved.sequences, out, three, n_parts=1, overwrite=True)
    assert n_parts_in(out) == 1
    assert {row[1] for row in rows_of(out)} == {1, 2, 3}


def test_mistakes_are_told_before_anything_is_written(saved: Saved, tmp_path: Path) -> None:
    few = save(tmp_path / "few", 5)
    sequences = few.sequences
    sequences.vocabulary.ids = [f"other-{i}" for i in range(30)]
    sequences.meta = {}
    sequences.save(tmp_path / "unknown")
    file, full = tmp_path / "file", tmp_path / "full"
    file.write_text("")
    full.mkdir()
    (full / "letters.txt").write_text("of somebody")
    out = tmp_path / "recs"
    for data, place, options, named in (
        (few.sequences, out, {"n_parts": 6}, "parts is 6 and there are 5 users"),
        (few.sequences, out, {"n_parts": 0}, "parts is 0"),
        (few.sequences, out, {"workers": WorkerOptions(6)}, "workers is 6 and there are 5"),
        (few.sequences, out, {"request": BatchRequest(k=0)}, "k is 0"),
        (type(sequences).load(tmp_path / "unknown"), out, {}, "knows none of the 30 items"),
        (few.sequences, file, {}, "is a file, not a directory"),
        (few.sequences, full, {}, "holds other files, such as letters.txt"),
        (few.sequences, tmp_path / "no" / "recs", {}, "does not exist"),
    ):
        with pytest.raises(ValueError, match=named):
            recommend_in_parts(saved.model, data, place, **options)  # type: ignore[arg-type]
    assert not out.exists() or names_in(out) <= {".lock"}
    assert names_in(full) == {"letters.txt"}


def test_a_killed_worker_is_replaced_and_every_user_is_there_once(
    saved: Saved, expected: list[Row], tmp_path: Path
) -> None:
    out = tmp_path / "recs"
    with started(saved, out, "--workers", 2, "--parts", MANY) as process:
        workers = workers_of(process.pid)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "a worker was killed (SIGKILL)" in said
    assert not any(map(is_alive, workers))
    assert (out / "_SUCCESS").exists()
    assert_same(rows_of(out), expected)


def test_a_killed_coordinator_takes_its_workers_along_and_can_be_started_again(
    saved: Saved, expected: list[Row], tmp_path: Path
) -> None:
    out = tmp_path / "recs"
    with started(saved, out, "--workers", 2, "--parts", MANY) as process:
        workers = workers_of(process.pid)
        process.kill()
        wait_until(lambda: not any(map(is_alive, workers)), seconds=10)
        n_before = n_parts_in(out)  # nobody is left who could write another one
        assert n_before < MANY
        assert not (out / "_SUCCESS").exists()
    done = recommend_in_parts(saved.model, saved.sequences, out)
    assert (done.n_parts, done.n_parts_before) == (MANY, n_before)
    assert_same(rows_of(out), expected)


@pytest.mark.parametrize(("n_workers", "number"), [(1, signal.SIGTERM), (2, signal.SIGINT)])
def test_a_signal_interrupts_it_and_the_message_says_how_to_resume(
    number: signal.Signals, n_workers: int, saved: Saved, tmp_path: Path
) -> None:
    out = tmp_path / "recs"
    with started(saved, out, "--workers", n_workers, "--parts", MANY) as process:
        workers = workers_of(process.pid)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "To resume:" in said
    assert not any(map(is_alive, workers))
    assert not list(out.glob(".*.tmp"))
    assert 0 < n_parts_in(out) < MANY


def test_workers_that_die_again_and_again_end_the_command(saved: Saved, tmp_path: Path) -> None:
    command = saved.command(tmp_path / "recs", "--workers", 2, "--parts", 2)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            for worker in workers_of(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
            time.sleep(0.01)
        _, said = process.communicate()
    assert process.returncode == 1
    words = " ".join(said.split())
    assert "loading the model was given up: its worker " in words
    assert "killed (SIGKILL)" in words or "died when it was started" in words  # killed before it was seen


class WorkerThatDies:
    """Computes a part at once, in this process, unless it is `deadly`."""

    def __init__(self, job: ScoringJob, deadly: int | None, *, after_writing: bool = False) -> None:
        self._writer, self._deadly, self._after_writing = PartWriter(job), deadly, after_writing
        self.n_done = 0

    def compute(self, part: int | None) -> bool:
        if part is not None and (part != self._deadly or self._after_writing):
            self._writer.write(part)
        return part is None or part != self._deadly

    def how_it_died(self) -> str:
        return "died"

    def kill(self) -> None:
        pass


@pytest.fixture
def job(tmp_path: Path) -> ScoringJob:
    """Of four parts, none of which is there."""
    mine, out = save(tmp_path, 20), tmp_path / "recs"
    recommend_in_parts(mine.model, mine.sequences, out, n_parts=4)
    for part in out.glob("part-*"):
        part.unlink()
    plan = read_plan(out)
    assert plan is not None
    return ScoringJob(plan, mine.model, mine.data, out)


NO_REPORTS = Reports(no_report, no_report)


def test_a_part_that_kills_every_worker_is_named(job: ScoringJob) -> None:
    with pytest.raises(ValueError, match=r"part 2 \(users 10 to 14 .* given up.* died, 3 times"):
        compute_parts(job, range(4), lambda: WorkerThatDies(job, 2), 1, NO_REPORTS)
    assert list(job.finished(range(4))) == [0, 1]


def test_a_worker_that_dies_after_its_part_was_written_is_not_counted(job: ScoringJob) -> None:
    started: list[WorkerThatDies] = []

    def start() -> WorkerThatDies:
        started.append(WorkerThatDies(job, 1, after_writing=True))
        return started[-1]

    done: list[int] = []
    reports = Reports(lambda n_done, n_users: done.append(n_done), no_report)
    compute_parts(job, range(4), start, 1, reports)
    assert len(started) == 2  # part 1 was not computed again
    assert len(job.finished(range(4))) == 4
    assert done[-1] == 20
    assert done == sorted(done)


def test_a_request_to_stop_ends_all_workers_and_keeps_what_is_finished(job: ScoringJob) -> None:
    def stop_after_a_part(n_done: int, n_users: int) -> None:
        if n_done > 0:
            signal.raise_signal(signal.SIGTERM)

    reports = Reports(stop_after_a_part, no_report)
    with pytest.raises(Interrupted):
        compute_parts(job, range(4), lambda: WorkerThatDies(job, None), 1, reports)
    assert 0 < len(job.finished(range(4))) < 4


def test_a_table_of_users_in_parts_is_the_same_as_in_one_file(saved: Saved, tmp_path: Path) -> None:
    table = tmp_path / "clicks.csv"
    table.write_text("user,item\nann,item-3\nbob,item-1\nann,item-4\ncyd,never-seen\n")
    for out, parts in (("recs", ["--parts", "3"]), ("one.parquet", [])):
        asked = [saved.model, "--users", table, "--out", tmp_path / out, *parts]
        done = CliRunner().invoke(app, ["recommend", *map(str, asked)], catch_exceptions=False)
        assert done.exit_code == 0
    assert_same(rows_of(tmp_path / "recs"), rows_of(tmp_path / "one.parquet"))
    fallback = {row[0]: row[6] for row in rows_of(tmp_path / "recs")}
    assert fallback == {"ann": False, "bob": False, "cyd": True}
    assert not (tmp_path / "recs" / "_users").exists()


def test_a_second_run_leaves_the_users_of_a_running_one_alone(saved: Saved, tmp_path: Path) -> None:
    out, table = tmp_path / "recs", tmp_path / "clicks.csv"
    table.write_text("user,item\nann,item-3\nbob,item-1\n")
    other = saved.sequences
    other.meta["content_key"] = "of another table"  # by which preparing knows its own
    other.save(out / "_users")
    asked = [saved.model, "--users", table, "--out", out, "--overwrite"]
    with alone_in(out):
        done = CliRunner().invoke(app, ["recommend", *map(str, asked)])
        assert "another process is at work" in str(done.exception)
        assert Sequences.load(out / "_users").user_ids == other.user_ids
        assert names_in(out) == {".lock", "_users"}


def test_no_index_is_read_where_something_is_only_checked(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for = []
    load = Recommender.load

    def noted(directory: Path, retrieval: str = "auto") -> Recommender:
        asked_for.append(retrieval)
        return load(directory, retrieval)  # type: ignore[arg-type]

    monkeypatch.setattr(Recommender, "load", noted)
    asked = [*saved.command(tmp_path / "recs")[3:], "--parts", "1"]
    assert CliRunner().invoke(app, asked).exit_code == 0
    assert asked_for == ["exact", "auto"]  # to check, and to score
    best = BatchRequest(retrieval="best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="retrieval is 'best'"):
        recommend_in_parts(saved.model, saved.sequences, tmp_path / "recs", best)


def test_other_names_in_the_data_are_noticed_by_a_worker(tmp_path: Path) -> None:
    mine, out = save(tmp_path, 20), tmp_path / "recs"
    recommend_in_parts(mine.model, mine.sequences, out, n_parts=2)
    plan = read_plan(out)
    assert plan is not None
    job = ScoringJob(plan, mine.model, mine.data, out)
    writer = PartWriter(job)
    renamed = mine.sequences
    renamed._user_source = [f"someone-{row}" for row in range(20)]
    renamed.save(tmp_path / "renamed")
    shutil.move(mine.data, tmp_path / "before")
    shutil.move(tmp_path / "renamed", mine.data)  # as preparing does: one folder for another
    with pytest.raises(ValueError, match="has changed since scoring began"):
        writer.write(0)
    with pytest.raises(ValueError, match="has changed since scoring began"):
        PartWriter(job)


def test_a_retrained_model_is_noticed_by_a_worker(saved: Saved, tmp_path: Path) -> None:
    mine = save(tmp_path / "mine", 20)
    recommend_in_parts(mine.model, mine.sequences, tmp_path / "recs", n_parts=2)
    plan = read_plan(tmp_path / "recs")
    assert plan is not None
    Recommender.load(saved.model).save(mine.model)
    job = ScoringJob(plan, mine.model, mine.data, tmp_path / "recs")
    with pytest.raises(ValueError, match="has changed since scoring began"):
        PartWriter(job)
