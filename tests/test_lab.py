"""A lab: every model under one protocol, each run in a process, whatever happens to it."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from toys import cycle, quiet, sequences_of
from typer.testing import CliRunner

from bert4rec.cli import app
from bert4rec.config import RunConfig, load_config, resolve
from bert4rec.data.sequences import Sequences
from bert4rec.data.splits import leave_one_out
from bert4rec.lab.budget import HARD_STOP, epochs_that_fit, fit_budget, parse_budget
from bert4rec.lab.contenders import TITLES, choose_contenders, split_names
from bert4rec.lab.lab_directory import LabTerms, plan_lab
from bert4rec.lab.run_lab import run_lab
from bert4rec.lab.run_process import is_stopped_by_clock
from bert4rec.settings import recipe_names
from bert4rec.training.timing import StageTime

TINY = """
[model]
dim = 16
max_len = 12
layers = 1
[training]
batch_size = 16
validation_users = 20
[[stages]]
objective = "cloze"
epochs = {epochs}
[[stages]]
objective = "last_item"
epochs = {second}
"""
BROKEN = "[training]\ndevice = 'mps'\n"  # a good setting, but not on this machine
TERMS = LabTerms("clicks.csv", n_seeds=2, minutes=0.5)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and settings files."""
    folder = tmp_path_factory.mktemp("lab")
    histories = [cycle()[user] for user in range(40)]
    rows = [f"{user},{item},{i}" for user, h in enumerate(histories) for i, item in enumerate(h)]
    (folder / "clicks.csv").write_text("\n".join(["user,item,time", *rows]))
    (folder / "tiny.toml").write_text(TINY.format(epochs=3, second=1))
    (folder / "long.toml").write_text(TINY.format(epochs=40, second=0))
    (folder / "broken.toml").write_text(BROKEN)
    return folder


# One thread: under load two of them spend their time waiting for each other.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def command(out: str, models: str, *options: str) -> list[str]:
    arguments = ["lab", "clicks.csv", "--models", models, "--out", out]
    return [sys.executable, "-m", "bert4rec", *arguments, *options]


@pytest.fixture(scope="module")
def lab(place: Path) -> Path:
    """Two models with two seeds; a third is added, and fails."""
    done = subprocess.run(
        command("lab", "popularity,tiny.toml", "--seeds", "2", "--budget", "30s"),
        cwd=place,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert "report.html" in done.stdout
    lab = place / "lab"
    broken = choose_contenders([str(place / "broken.toml")])
    run_lab(lab, data_of(lab), broken, LabTerms("clicks.csv", 1, 0.5), quiet())
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
    assert done == {"popularity/seed-0", "tiny/seed-0", "tiny/seed-1"}
    facts = read(lab / "lab.json")["facts"]
    assert facts["models"] == ["popularity", "tiny", "broken"]
    assert facts["seeds"] == [0, 1]
    for name in ("report.html", "report.json", "report.csv"):
        assert (lab / name).stat().st_size > 100
    one, two = (lab / "runs" / "tiny" / f"seed-{seed}" / "model.safetensors" for seed in (0, 1))
    assert one.read_bytes() != two.read_bytes()


def test_costs_are_those_of_the_run(lab: Path) -> None:
    tiny, counted = (costs(lab)[name]["cost"] for name in ("tiny/seed-1", "popularity/seed-0"))
    settings = costs(lab)["tiny/seed-1"]["settings"]
    assert tiny["epochs"] == 4  # both stages: the budget is larger than the recipe
    assert (settings["training.seed"], settings["stages.1.epochs"]) == (1, 1)
    assert 0 <= tiny["training_seconds"] < 60  # in tenths of a second
    assert counted["epochs"] is None
    assert (tiny["stopped_by_clock"], counted["stopped_by_clock"]) == (False, False)
    for cost in (tiny, counted):
        assert cost["n_parameters"] > 0
        assert cost["scoring_users_per_second"] > 10
        assert 100 < cost["peak_memory_mb"] < 2000


def test_a_run_that_fails_says_why_and_does_not_stop_the_others(lab: Path) -> None:
    failed = costs(lab)["broken/seed-0"]
    assert failed["status"] == "failed"
    assert failed["error"].startswith("training.device = 'mps': torch finds none")
    assert "Traceback" in (lab / "runs" / "broken" / "seed-0" / "output.txt").read_text()
    shown = CliRunner().invoke(app, ["lab", "--report-only", "--out", str(lab)])
    assert shown.exit_code == 0
    assert "failed: broken, seed 0: training.device = 'mps'" in shown.stderr
    assert "POP" in shown.stdout


def test_the_table_is_printed_as_markdown_or_latex(lab: Path) -> None:
    report = ["lab", "--report-only", "--out", str(lab)]
    markdown = CliRunner().invoke(app, [*report, "--markdown"]).stdout
    assert markdown.startswith("| model | HR@10 | NDCG@10 |")
    latex = CliRunner().invoke(app, [*report, "--latex"]).stdout
    assert latex.startswith(r"\begin{tabular}{lr")
    both = CliRunner().invoke(app, [*report, "--latex", "--markdown"])
    assert "choose one" in str(both.exception)


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
        ({"cloze": 7}, 0, 30.0, False),  # stopped by its patience
        ({"cloze": 10}, 5, 60.0, True),  # the second stage never began
        ({"cloze": 7, "last_item": 5}, 5, 60.0, False),
    ],
)
def test_a_run_stopped_by_the_time_limit_is_distinguished_from_one_that_converged(
    epochs: dict[str, int], second: int, seconds: float, is_stopped: bool
) -> None:
    config = two_stages("stages.0.epochs=10", f"stages.1.epochs={second}")
    minutes = 1 / HARD_STOP
    assert is_stopped_by_clock(config, epochs, seconds, minutes) == is_stopped
    counted = resolve(load_config("popularity"), 8)
    assert not is_stopped_by_clock(counted, {}, seconds, minutes)


def two_stages(*overrides: str) -> RunConfig:
    small = ["model.dim=8", "model.layers=1", "model.max_len=12", "training.batch_size=16"]
    return resolve(load_config("bert4rec-2-stage", None, [*small, *overrides]), 8)


def test_finished_runs_are_kept_and_other_settings_are_refused(
    lab: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)

    def repeat(*overrides: str, data: Any = None, minutes: float = 0.5) -> None:
        contenders = choose_contenders(["popularity", "tiny.toml"], overrides)
        run_lab(lab, data or data_of(lab), contenders, LabTerms("x", 2, minutes), quiet())

    def times() -> dict[Path, int]:
        files = (path for path in (lab / "runs").rglob("*") if path.is_file())
        return {path: path.stat().st_mtime_ns for path in files}

    before = times()
    repeat()
    repeat(minutes=0.25)  # another budget is for new models only
    assert times() == before
    with pytest.raises(ValueError, match=r"other settings: .*tiny \(model\.dim\)"):
        repeat("model.dim=8")
    with pytest.raises(ValueError, match=r"different: evaluation\.exclude_seen\)"):
        repeat("evaluation.exclude_seen=false")
    with pytest.raises(ValueError, match="different: the data"):
        repeat(data=sequences_of([[0, 1, 2, 3]] * 5, 4))
    assert times() == before
    assert read(lab / "lab.json")["facts"]["models"] == ["popularity", "tiny", "broken"]


def test_interrupted_in_mid_training_and_resumed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", ENVIRONMENT["OMP_NUM_THREADS"])
    arguments = ("interrupted", "long.toml", "--seeds", "1", "--budget", "1m")
    folder = place / "interrupted" / "runs" / "long" / "seed-0"
    log = folder / "log.jsonl"
    process = subprocess.Popen(command(*arguments), cwd=place, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
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
    contenders = choose_contenders([str(place / "long.toml")])
    run_lab(lab, data_of(lab), contenders, LabTerms("clicks.csv", 1, 1), quiet())
    assert log.read_text().startswith(early)  # with the times of the first session
    assert (folder.parent / "epochs.json").read_text() == chosen
    assert read(folder / "cost.json")["status"] == "done"


def test_one_process_at_a_time_works_in_a_lab(tmp_path: Path) -> None:
    contenders = choose_contenders(["popularity"])
    (tmp_path / "lab").mkdir()
    with (tmp_path / "lab" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is at work"):
            run_lab(tmp_path / "lab", cycle(), contenders, TERMS, quiet())


def test_nothing_is_touched_where_something_else_than_a_lab_is(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty and not a lab"):
        run_lab(tmp_path, cycle(), choose_contenders(["popularity"]), TERMS, quiet())
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_a_start_that_was_killed_while_writing_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / ".lab.json.123.tmp").write_text("{")
    plan_lab(tmp_path, cycle(), choose_contenders(["popularity"]), TERMS)
    assert read(tmp_path / "lab.json")["facts"]["models"] == ["popularity"]


def test_a_plan_keeps_what_was_typed(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[model]\ndim = 8\n")
    names = split_names([f"popularity, {tmp_path / 'mine.toml'}", "markov"])
    contenders = choose_contenders(names, ["layers=1"])
    plan_lab(tmp_path / "lab", cycle(), contenders, TERMS)
    plans = {name: read(tmp_path / "lab" / "runs" / name / "plan.json") for name in ("markov", "mine")}
    assert {name: plan["source"] for name, plan in plans.items()} == {
        "markov": "markov",
        "mine": str(tmp_path / "mine.toml"),
    }
    assert [plan["overrides"] for plan in plans.values()] == [["layers=1"]] * 2


def test_runs_that_only_failed_are_planned_anew_with_other_settings(tmp_path: Path) -> None:
    def plan(*overrides: str) -> dict[str, Any]:
        contenders = choose_contenders(["demo"], overrides)
        plan_lab(tmp_path / "lab", cycle(), contenders, TERMS)
        return read(tmp_path / "lab" / "runs" / "demo" / "plan.json")["config"]["model"]

    assert plan()["dim"] != 8
    failed = tmp_path / "lab" / "runs" / "demo" / "seed-0" / "cost.json"
    failed.parent.mkdir()
    failed.write_text('{"status": "failed"}')
    assert plan("model.dim=8")["dim"] == 8
    assert not failed.exists()


def test_overwriting_replaces_the_models_named_and_other_data_replaces_all(tmp_path: Path) -> None:
    lab = tmp_path / "lab"

    def plan(*names: str, data: Sequences | None = None, overwrite: bool = True) -> list[str]:
        contenders = choose_contenders(names)
        plan_lab(lab, data or cycle(), contenders, LabTerms("x", overwrite=overwrite))
        return sorted(path.parts[-3] for path in lab.glob("runs/*/seed-0/manifest.json"))

    plan("popularity", "markov")
    for name in ("popularity", "markov"):
        (lab / "runs" / name / "seed-0").mkdir()
        (lab / "runs" / name / "seed-0" / "manifest.json").write_text("{}")
    assert plan("popularity", overwrite=False) == ["markov", "popularity"]
    assert plan("popularity") == ["markov"]
    assert read(lab / "lab.json")["facts"]["models"] == ["popularity", "markov"]
    assert plan("popularity", data=sequences_of([[0, 1, 2, 3]] * 5, 4)) == []
    assert read(lab / "lab.json")["facts"]["models"] == ["popularity"]
    assert (lab / "runs.old" / "markov" / "seed-0" / "manifest.json").exists()  # nothing is lost
    plan("popularity")
    assert (lab / "runs.old2").is_dir()


@pytest.mark.parametrize(("text", "minutes"), [("90s", 1.5), ("20m", 20), ("1h", 60), ("1h30m", 90), ("0.5h", 30)])
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
    with pytest.raises(ValueError, match=r"model\.name is 'nothing': choose one of"):
        choose_contenders([str(mine)])
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


def test_an_override_applies_to_the_models_that_have_the_setting() -> None:
    chosen = choose_contenders(["popularity", "sasrec"], ["model.heads=2", "k_core=5"])
    popularity, sasrec = (each.config for each in chosen)
    assert "heads" not in popularity.model.model_dump()
    assert sasrec.model.model_dump()["heads"] == 2
    assert popularity.data.k_core == sasrec.data.k_core == 5
    with pytest.raises(ValueError, match="several settings have that name"):
        choose_contenders(["sasrec", "bert4rec-2-stage"], ["epochs=5"])
    with pytest.raises(ValueError, match=r"unknown setting 'model\.dimm' \(did you mean 'dim'"):
        choose_contenders(["popularity", "sasrec"], ["model.dimm=8"])


def test_the_default_set_is_shipped_and_comes_in_the_order_of_a_table() -> None:
    assert set(TITLES) <= set(recipe_names())
    chosen = choose_contenders(["demo", "all"], ["model.max_len=30"])
    assert [each.name for each in chosen] == [*TITLES, "demo"]
    assert {getattr(each.config.model, "max_len", 30) for each in chosen} == {30}


def fitted(minutes: float, times: list[tuple[float, float]], *overrides: str) -> tuple[Any, float]:
    """The stages of a config for stages with these (seconds per epoch, per validation)."""
    return epochs_that_fit(two_stages(*overrides), [StageTime(epoch / 10, 10, v) for epoch, v in times], minutes)


ONE = "stages.1.epochs=0"


def test_epochs_fill_the_budget_and_never_exceed_it_or_the_recipe() -> None:
    for minutes in (1, 2, 7, 20, 33.3):
        _, seconds = fitted(minutes, [(10.0, 1.0)], "stages.0.epochs=1000", ONE)
        assert seconds == pytest.approx(60 * minutes, abs=0.08 * 60 * minutes + 12)
        assert seconds <= 60 * minutes
    config, _ = fitted(600, [(10.0, 1.0)], "stages.0.epochs=30", ONE)
    assert [stage.epochs for stage in config.stages] == [30]


def test_the_second_stage_gets_its_share_of_the_budget() -> None:
    times = [(10.0, 0.1), (5.0, 0.1)]
    config, seconds = fitted(20, times, "stages.0.epochs=1000", "stages.1.epochs=1000")
    assert config.stages[1].epochs * 5.0 == pytest.approx(0.3 * seconds, rel=0.05)
    left_over, _ = fitted(20, times, "stages.0.epochs=10", "stages.1.epochs=1000")
    assert left_over.stages[1].epochs > 2 * config.stages[1].epochs


def test_validations_are_neither_too_few_nor_too_expensive() -> None:
    def every(minutes: float, epoch: float, validation: float, wanted: int) -> tuple[int, int]:
        given = ["stages.0.epochs=9999", f"training.validate_every={wanted}", ONE]
        config, _ = fitted(minutes, [(epoch, validation)], *given)
        return config.training.validate_every, config.stages[0].epochs

    often, epochs = every(3, 10.0, 0.1, 10)
    assert epochs // often >= 8
    seldom, _ = every(20, 1.0, 2.0, 1)
    assert 2.0 / (seldom * 1.0 + 2.0) <= 0.15
    assert 2.0 / ((seldom - 1) * 1.0 + 2.0) > 0.15
    assert every(20, 1.0, 0.01, 10)[0] == 10


def test_a_budget_that_one_epoch_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="one pass over the training data takes about 10"):
        fitted(5, [(600.0, 1.0)], ONE)


def test_a_smaller_budget_gives_fewer_epochs() -> None:
    config = two_stages("workers=1", "stages.0.epochs=100000", "stages.1.epochs=100000")
    split = leave_one_out(cycle())
    # Far apart, since a loaded machine may be several times slower in one timing than the other.
    small, large = (fit_budget(split, config, minutes)[0].stages for minutes in (0.05, 10))
    for one, two in zip(small, large, strict=True):
        assert 1 <= one.epochs < two.epochs < 100_000
    counted = resolve(load_config("popularity"), 8)
    assert fit_budget(split, counted, 1)[0] == counted
