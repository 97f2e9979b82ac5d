"""A lab: every model under one protocol, each run a process, whatever becomes of each of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from toys import cycle, quiet, sequences_of, small_config
from typer.testing import CliRunner

from bert4rec.cli import app
from bert4rec.config import Config, load_config, recipe_names
from bert4rec.data.sequences import Sequences
from bert4rec.data.splits import leave_one_out
from bert4rec.lab.budget import parse_budget
from bert4rec.lab.contenders import TITLES, choose_contenders, split_names
from bert4rec.lab.one import _is_stopped_by_clock
from bert4rec.lab.plan import Run, plan_lab
from bert4rec.lab.run import run_lab
from bert4rec.training.rehearsal import HARD_STOP, Pace, epochs_within, fit_into

TINY = """
[model]
dim = 16
max_len = 12
[training]
batch_size = 16
validation_users = 50
epochs = {epochs}
[second_stage]
epochs = {second}
"""
BROKEN = "[training]\ndevice = 'mps'\n"  # a good setting, that this machine cannot do


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and settings files."""
    folder = tmp_path_factory.mktemp("lab")
    histories = [cycle()[user] for user in range(120)]
    rows = [f"{user},{item},{i}" for user, h in enumerate(histories) for i, item in enumerate(h)]
    (folder / "clicks.csv").write_text("\n".join(["user,item,time", *rows]))
    (folder / "tiny.toml").write_text(TINY.format(epochs=3, second=1))
    (folder / "long.toml").write_text(TINY.format(epochs=40, second=0))
    (folder / "broken.toml").write_text(BROKEN)
    return folder


# One thread: under load two of them spend their time waiting for each other.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def command(out: str, models: str, *options: str) -> list[str]:
    arguments = ["lab", "clicks.csv", "--models", models, "--out", out, "--set", "bootstrap=50"]
    return [sys.executable, "-c", "from bert4rec.cli import main; main()", *arguments, *options]


def run_command(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=place,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.fixture(scope="module")
def lab(place: Path) -> Path:
    names = "popularity,markov,tiny.toml"
    done = run_command(place, "lab", names, "--seeds", "2", "--budget", "10m")
    assert done.returncode == 0, done.stderr
    assert "report.html" in done.stdout
    lab = place / "lab"
    # A further model is added to what is there. It will fail.
    broken = choose_contenders([str(place / "broken.toml")], ["bootstrap=50"])
    run_lab(lab, data_of(lab), broken, quiet(), data_name="clicks.csv", n_seeds=1, minutes=10)
    return lab


def data_of(lab: Path) -> Sequences:
    return Sequences.load(read(lab / "lab.json")["data"]["directory"])


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def costs(lab: Path) -> dict[str, dict[str, Any]]:
    paths = sorted((lab / "runs").glob("*/seed-*/cost.json"))
    return {f"{path.parts[-3]}/{path.parts[-2]}": read(path) for path in paths}


def test_every_contender_runs_with_every_seed_or_once_where_chance_has_no_part(lab: Path) -> None:
    done = {name for name, cost in costs(lab).items() if cost["status"] == "done"}
    assert done == {"popularity/seed-0", "markov/seed-0", "tiny/seed-0", "tiny/seed-1"}
    facts = read(lab / "lab.json")
    assert facts["models"] == ["popularity", "markov", "tiny", "broken"]
    assert facts["seeds"] == [0, 1]
    for name in ("report.html", "report.md", "report.csv"):
        assert (lab / name).stat().st_size > 100
    one, two = (lab / "runs" / "tiny" / f"seed-{seed}" / "model.safetensors" for seed in (0, 1))
    assert one.read_bytes() != two.read_bytes()


def test_costs_are_those_of_the_run(lab: Path) -> None:
    tiny, counted = costs(lab)["tiny/seed-1"], costs(lab)["markov/seed-0"]
    assert tiny["epochs"] == 4  # both stages: the budget is larger than the recipe
    assert tiny["settings"]["training.seed"] == 1
    assert tiny["settings"]["training.minutes"] == pytest.approx(HARD_STOP * 10)
    assert 0 < tiny["training_seconds"] < 60
    assert counted["epochs"] is None
    assert (tiny["stopped_by_clock"], counted["stopped_by_clock"]) == (False, False)
    for cost in (tiny, counted):
        assert cost["n_parameters"] > 0
        assert cost["scoring_users_per_second"] > 10
        assert 100 < cost["peak_memory_mb"] < 2000


def test_a_model_that_fails_says_why_and_does_not_stop_the_others(lab: Path) -> None:
    failed = costs(lab)["broken/seed-0"]
    assert failed["status"] == "failed"
    assert failed["error"].startswith("training.device = 'mps': torch finds none")
    assert "Traceback" in (lab / "runs" / "broken" / "seed-0" / "output.txt").read_text()
    shown = CliRunner().invoke(app, ["lab", "--report-only", "--out", str(lab)])
    assert shown.exit_code == 0
    assert "failed: broken, seed 0: training.device = 'mps'" in shown.stderr
    assert "Markov" in shown.stdout


def test_an_option_that_would_do_nothing_is_refused_by_name(tmp_path: Path) -> None:
    for option, name in ((["--seeds", "2"], "--seeds"), (["--set", "dim=8"], "--set")):
        command = ["lab", "--report-only", "--out", str(tmp_path), *option]
        done = CliRunner().invoke(app, command)
        assert isinstance(done.exception, ValueError)
        assert str(done.exception) == f"{name} does nothing with --report-only: leave it out"


@pytest.mark.parametrize(
    ("epochs", "second", "seconds", "is_stopped"),
    [
        ({"cloze": 7}, 0, 60.0, True),
        ({"cloze": 10}, 0, 60.0, False),  # all epochs, however late
        ({"cloze": 7}, 0, 30.0, False),  # its patience was over
        ({"cloze": 10}, 5, 60.0, True),  # the second stage never began
        ({"cloze": 7, "last-item": 5}, 5, 60.0, False),
    ],
)
def test_a_run_that_the_clock_stopped_is_told_from_one_that_had_learned_all_it_could(
    tmp_path: Path, epochs: dict[str, int], second: int, seconds: float, is_stopped: bool
) -> None:
    run = Run(tmp_path, "x", 0)
    run.folder.mkdir(parents=True)
    lines = [json.dumps({"stage": stage, "epoch": n}) for stage, n in epochs.items()]
    (run.folder / "log.jsonl").write_text("\n".join(lines))
    config = small_config("epochs=10", "minutes=1", f"second_stage.epochs={second}")
    assert _is_stopped_by_clock(run, config, seconds) == is_stopped
    assert not _is_stopped_by_clock(run, load_config("popularity", None, ["minutes=1"]), seconds)


def test_what_is_done_is_kept_and_what_differs_is_refused(
    lab: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)

    def again(*overrides: str, data: Any = None, minutes: float = 10) -> None:
        names = ["popularity", "markov", "tiny.toml"]
        contenders = choose_contenders(names, ["bootstrap=50", *overrides])
        sequences = data or data_of(lab)
        run_lab(lab, sequences, contenders, quiet(), data_name="x", n_seeds=2, minutes=minutes)

    def times() -> dict[Path, int]:
        files = (path for path in (lab / "runs").rglob("*") if path.is_file())
        return {path: path.stat().st_mtime_ns for path in files}

    before = times()
    again()
    again(minutes=5)  # another budget is for new models only
    assert times() == before
    with pytest.raises(ValueError, match=r"other settings: .*tiny \(model\.dim\)"):
        again("model.dim=8")
    with pytest.raises(ValueError, match=r"different: evaluation\.exclude_seen\)"):
        again("evaluation.exclude_seen=false")
    with pytest.raises(ValueError, match="different: the data"):
        again(data=sequences_of([[0, 1, 2, 3]] * 5, 4))
    assert times() == before
    assert read(lab / "lab.json")["models"] == ["popularity", "markov", "tiny", "broken"]


def test_interrupted_in_mid_training_and_continued(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", ENVIRONMENT["OMP_NUM_THREADS"])
    arguments = ("interrupted", "long.toml", "--seeds", "1", "--budget", "1m")
    folder = place / "interrupted" / "runs" / "long" / "seed-0"
    log = folder / "log.jsonl"
    process = subprocess.Popen(
        command(*arguments), cwd=place, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 180
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    message = process.communicate(timeout=120)[1]
    assert process.returncode == 130, message
    assert "To resume:" in message
    assert "long.toml --out interrupted" in message
    assert not (folder / "cost.json").exists()
    assert any((folder / "checkpoints").glob("[0-9]*"))
    early, chosen = log.read_text(), (folder.parent / "epochs.json").read_text()
    assert len(early.splitlines()) < 20

    lab = place / "interrupted"
    again = choose_contenders([str(place / "long.toml")], ["bootstrap=50"])
    run_lab(lab, data_of(lab), again, quiet(), data_name="clicks.csv", n_seeds=1, minutes=1)
    assert log.read_text().startswith(early)  # with the times of the first session
    assert (folder.parent / "epochs.json").read_text() == chosen
    assert read(folder / "cost.json")["status"] == "done"


def test_one_process_at_a_time_works_in_a_lab(tmp_path: Path) -> None:
    import fcntl

    contenders = choose_contenders(["popularity"])
    (tmp_path / "lab").mkdir()
    with (tmp_path / "lab" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is at work"):
            run_lab(tmp_path / "lab", cycle(), contenders, quiet(), data_name="x")


def test_nothing_is_touched_where_something_else_than_a_lab_is(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ValueError, match="something else than a lab"):
        run_lab(tmp_path, cycle(), choose_contenders(["popularity"]), quiet(), data_name="x")
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_a_start_that_was_killed_while_writing_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / ".lab.json.123.tmp").write_text("{")
    plan_lab(tmp_path, cycle(), choose_contenders(["popularity"]), data_name="x")
    assert read(tmp_path / "lab.json")["models"] == ["popularity"]


def test_a_plan_keeps_what_was_typed(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[model]\ndim = 8\n")
    names = split_names([f"popularity, {tmp_path / 'mine.toml'}", "markov"])
    contenders = choose_contenders(names, ["layers=1"])
    plan_lab(tmp_path / "lab", cycle(), contenders, data_name="x")
    plans = {
        name: read(tmp_path / "lab" / "runs" / name / "plan.json") for name in ("markov", "mine")
    }
    assert {name: plan["source"] for name, plan in plans.items()} == {
        "markov": "markov",
        "mine": str(tmp_path / "mine.toml"),
    }
    assert [plan["overrides"] for plan in plans.values()] == [["layers=1"]] * 2


def test_runs_that_only_failed_are_planned_anew_with_other_settings(tmp_path: Path) -> None:
    def plan(*overrides: str) -> dict[str, Any]:
        contenders = choose_contenders(["demo"], overrides)
        plan_lab(tmp_path / "lab", cycle(), contenders, data_name="x", n_seeds=1)
        return read(tmp_path / "lab" / "runs" / "demo" / "plan.json")["settings"]

    assert "model.dim" not in plan()
    failed = tmp_path / "lab" / "runs" / "demo" / "seed-0" / "cost.json"
    failed.parent.mkdir()
    failed.write_text('{"status": "failed"}')
    assert plan("model.dim=8")["model.dim"] == 8
    assert not failed.exists()


def test_overwriting_replaces_the_models_named_and_other_data_replaces_all(tmp_path: Path) -> None:
    lab = tmp_path / "lab"

    def plan(*names: str, data: Sequences | None = None, overwrite: bool = True) -> list[str]:
        contenders = choose_contenders(names)
        plan_lab(lab, data or cycle(), contenders, data_name="x", overwrite=overwrite)
        return sorted(path.parts[-3] for path in lab.glob("runs/*/seed-0/manifest.json"))

    plan("popularity", "markov")
    for name in ("popularity", "markov"):
        (lab / "runs" / name / "seed-0").mkdir()
        (lab / "runs" / name / "seed-0" / "manifest.json").write_text("{}")
    assert plan("popularity", overwrite=False) == ["markov", "popularity"]
    assert plan("popularity") == ["markov"]
    assert read(lab / "lab.json")["models"] == ["popularity", "markov"]
    assert plan("popularity", data=sequences_of([[0, 1, 2, 3]] * 5, 4)) == []
    assert read(lab / "lab.json")["models"] == ["popularity"]
    assert (lab / "runs.old" / "markov" / "seed-0" / "manifest.json").exists()  # nothing is lost
    plan("popularity")
    assert (lab / "runs.old2").is_dir()


@pytest.mark.parametrize(
    ("text", "minutes"), [("90s", 1.5), ("20m", 20), ("1h", 60), ("1h30m", 90), ("0.5h", 30)]
)
def test_budgets_are_read(text: str, minutes: float) -> None:
    assert parse_budget(text) == minutes


@pytest.mark.parametrize("text", ["", "20", "m", "0m", "twenty minutes", "30m1h", "1.2.3m", "-5m"])
def test_what_is_no_budget_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"--budget is .*: write a time as in 90s, 20m"):
        parse_budget(text)


def test_another_option_for_a_time_is_named() -> None:
    with pytest.raises(ValueError, match="--timeout is 'soon'"):
        parse_budget("soon", "--timeout")


def test_contenders_are_checked_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'sasrek': there are popularity, item-knn, .*gsasrec"):
        choose_contenders(["popularity", "sasrek"])
    mine, namesake, own_data = (tmp_path / n for n in ("mine.toml", "markov.toml", "data.toml"))
    mine.write_text("[model]\nname = 'nothing'\n")
    with pytest.raises(ValueError, match=r"mine: model\.name is 'nothing': choose one of"):
        plan_lab(tmp_path / "lab", cycle(), choose_contenders([str(mine)]), data_name="x")
    namesake.write_text("[model]\ndim = 8\n")
    with pytest.raises(ValueError, match="another model named 'markov'"):
        choose_contenders([str(namesake)])
    own_data.write_text("[data]\nk_core = 5\n")
    with pytest.raises(ValueError, match="settings of its own in the section 'data'"):
        choose_contenders([str(own_data)])
    assert choose_contenders([str(own_data)], ["k_core=5"])[0].config.data.k_core == 5
    with pytest.raises(ValueError, match="--seeds"):
        choose_contenders(["popularity"], ["seed=3"])
    with pytest.raises(ValueError, match=r"--set training\.minutes: .*--budget"):
        choose_contenders(["popularity"], ["minutes=3"])


def test_the_default_set_is_shipped_and_comes_in_the_order_of_a_table() -> None:
    assert set(TITLES) <= set(recipe_names())
    chosen = choose_contenders(["demo", "all"], ["model.max_len=30"])
    assert [each.name for each in chosen] == [*TITLES, "demo"]
    assert {each.config.model.max_len for each in chosen} == {30}


def fitted(pace: Pace, minutes: float, *overrides: str) -> tuple[Config, float]:
    found = fit_into(load_config("default", None, overrides), pace, minutes)
    return found.config, found.seconds


def test_epochs_fill_the_budget_and_never_exceed_it_or_the_recipe() -> None:
    pace = Pace(epoch=10.0, validation=1.0)
    for minutes in (1, 2, 7, 20, 33.3):
        config, seconds = fitted(pace, minutes, "epochs=1000")
        assert seconds == pytest.approx(60 * minutes, abs=0.08 * 60 * minutes + 12)
        assert seconds <= 60 * minutes
        assert config.training.minutes == HARD_STOP * minutes
    assert fitted(pace, 600, "epochs=30")[0].training.epochs == 30


def test_the_second_stage_gets_its_share_of_the_budget() -> None:
    pace = Pace(epoch=10.0, validation=0.1, second_stage_epoch=5.0)
    config, seconds = fitted(pace, 20, "epochs=1000", "second_stage.epochs=1000")
    assert config.second_stage.epochs * 5.0 == pytest.approx(0.3 * seconds, rel=0.05)
    left_over, _ = fitted(pace, 20, "epochs=10", "second_stage.epochs=1000")
    assert left_over.second_stage.epochs > 2 * config.second_stage.epochs


def test_validations_are_neither_too_few_nor_too_dear() -> None:
    few, _ = fitted(Pace(epoch=10.0, validation=0.1), 3, "epochs=1000", "validate_every=10")
    assert few.training.epochs // few.training.validate_every >= 8
    dear, _ = fitted(Pace(epoch=1.0, validation=2.0), 20, "epochs=9999", "validate_every=1")
    every = dear.training.validate_every
    assert 2.0 / (every * 1.0 + 2.0) <= 0.15
    assert 2.0 / ((every - 1) * 1.0 + 2.0) > 0.15
    usual, _ = fitted(Pace(epoch=1.0, validation=0.01), 20, "epochs=9999", "validate_every=10")
    assert usual.training.validate_every == 10


def test_a_budget_that_one_epoch_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="one pass over the training data takes about 10"):
        fitted(Pace(epoch=600.0, validation=1.0), 5)


def test_a_rehearsal_gives_fewer_epochs_for_a_smaller_budget() -> None:
    config = small_config("workers=1", "epochs=100000", "second_stage.epochs=100000")
    split = leave_one_out(cycle())
    # Far apart, as a loaded machine may be several times slower in one rehearsal than the other.
    small, large = (epochs_within(split, config, minutes) for minutes in (0.05, 10))
    assert 1 <= small.training.epochs < large.training.epochs < 100_000
    assert 1 <= small.second_stage.epochs < large.second_stage.epochs < 100_000
    fits_itself = load_config("popularity")
    assert epochs_within(split, fits_itself, 1) == fits_itself
