"""Tuning: the recipe comes first, the test items are never read, and nothing is done twice."""

import contextlib
import csv
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from optuna import TrialPruned
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from rich.console import Console
from toys import cycle, quiet
from typer.testing import CliRunner

from bert4rec.cli import app
from bert4rec.config import Config, RunConfig, load_config, resolve
from bert4rec.data import splits
from bert4rec.data.sequences import Sequences
from bert4rec.interrupts import Interrupted
from bert4rec.lab import tuning
from bert4rec.lab.contenders import choose_contenders, flat_settings
from bert4rec.lab.lab_directory import STUDY_FILE, LabRun, data_facts, write_json
from bert4rec.lab.run_process import run_one
from bert4rec.lab.search_space import Space, space_for, start_values
from bert4rec.lab.tuning import (
    TuningOptions,
    TuningResult,
    config_of,
    finished,
    learning_curve,
    open_study,
    recipe_toml,
    tune,
)

MINUTES = 0.2
BRIEF = (
    "model.dim=16",
    "model.layers=1",
    "model.max_len=12",
    "training.batch_size=16",
    "training.validation_users=50",
    "training.validate_every=1",
    "training.warmup_steps=0",
    "training.workers=1",
)


def small(*overrides: str) -> RunConfig:
    return resolve(load_config("bert4rec-2-stage", None, [*BRIEF, *overrides]), 8)


START = small("stages.0.epochs=3", "stages.1.epochs=1")
RATE = "stages.0.learning_rate"
SPACE: Space = {
    RATE: FloatDistribution(1e-3, 1e-2, log=True),
    "model.dim": CategoricalDistribution((8, 16)),
    "stages.1.learning_rate": FloatDistribution(1e-4, 1e-3, log=True),
}


def setting(config: Config, name: str) -> Any:
    return flat_settings(config.model_dump())[name]


def tuned(
    out: Path,
    n_trials: int,
    *,
    start: RunConfig = START,
    space: Space = SPACE,
    sequences: Sequences | None = None,
    console: Console | None = None,
    timeout_minutes: float = math.inf,
) -> TuningResult:
    options = TuningOptions("toys.csv", n_trials, MINUTES, timeout_minutes)
    return tune(sequences or cycle(40), start, space, out, options, console or quiet())


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "trials.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def replaced(monkeypatch: pytest.MonkeyPatch, value: Any) -> list[Config]:
    """Trials that train nothing: `value(config)` is their NDCG@10; the settings they had."""
    seen: list[Config] = []

    def run_trial(run: LabRun, config: Config, *_: object) -> tuple[Config, float]:
        seen.append(config)
        return config, value(config)

    monkeypatch.setattr(tuning, "run_trial", run_trial)
    return seen


@pytest.fixture(scope="module")
def small_study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TuningResult]:
    """Really trained: each trial in its own process."""
    out = tmp_path_factory.mktemp("study")
    return out, tuned(out, 3)


def test_the_recipe_itself_is_the_first_trial_and_the_best_is_no_worse(small_study: tuple[Path, TuningResult]) -> None:
    out, result = small_study
    table = rows(out)[:3]
    assert [row["is_start"] for row in table] == ["yes", "no", "no"]
    for name in SPACE:
        assert float(table[0][name]) == setting(START, name)
    assert result.start == float(table[0]["ndcg@10"])
    assert result.best == max(float(row["ndcg@10"]) for row in table) >= result.start
    for row in table:
        assert 1e-3 <= float(row[RATE]) <= 1e-2
        assert int(row["model.dim"]) in (8, 16)
    assert len({row[RATE] for row in table}) == 3


def test_the_recipe_is_that_of_the_best_trial(small_study: tuple[Path, TuningResult]) -> None:
    out, result = small_study
    saved = load_config("default", out / "best.toml")
    best = max(rows(out), key=lambda row: float(row["ndcg@10"]))
    assert saved == result.config
    for name in SPACE:
        assert setting(saved, name) == float(best[name])
        assert result.settings[name] == (setting(START, name), setting(saved, name))
    assert saved.stages[0].epochs <= START.stages[0].epochs
    first_line = (out / "best.toml").read_text(encoding="utf-8").splitlines()[0]
    assert first_line.startswith("# Tuned on toys.csv in 3 trials")
    assert f"{result.best:.4f}" in first_line
    assert f"{result.start:.4f}" in first_line
    assert choose_contenders([str(out / "best.toml")])[0].config == saved


def test_a_trial_leaves_its_log_and_no_model(small_study: tuple[Path, TuningResult]) -> None:
    folder = small_study[0] / "runs" / "trial-0" / "seed-0"
    names = {path.name for path in folder.iterdir()}
    assert {"log.jsonl", "output.txt", "cost.json"} <= names
    assert not names & {"checkpoints", "manifest.json"}


def test_resuming_adds_only_the_trials_that_are_missing(
    small_study: tuple[Path, TuningResult], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, before = small_study
    trained = replaced(monkeypatch, lambda config: 0.0)
    table = rows(out)
    assert tuned(out, 3) == before
    assert not trained
    assert tuned(out, 4).n_trials == 4
    assert len(trained) == 1
    assert rows(out)[:3] == table
    rates = [row[RATE] for row in rows(out)]
    assert len(set(rates)) == 4  # a sampler that starts anew would draw the first ones again


def test_other_terms_are_refused_by_name(small_study: tuple[Path, TuningResult]) -> None:
    out, _ = small_study
    with pytest.raises(ValueError, match=r"different: data \("):
        tuned(out, 9, sequences=cycle(41))
    shorter = small("stages.0.epochs=3", "stages.1.epochs=1", "model.max_len=11")
    with pytest.raises(ValueError, match=r"different: recipe model\.max_len \(12 before, now 11\)"):
        tuned(out, 9, start=shorter)
    wider = SPACE | {"model.dim": CategoricalDistribution((8, 16, 32))}
    with pytest.raises(ValueError, match=r"different: space model\.dim \(.*\(8, 16\)\) before"):
        tuned(out, 9, space=wider)
    fewer = {name: tried for name, tried in SPACE.items() if name != "model.dim"}
    with pytest.raises(ValueError, match=r"different: space model\.dim \(.* now nothing\)"):
        tuned(out, 9, space=fewer)


class Poison:
    """Test items that nobody may look at."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"somebody asked the test items for {name}")

    def __len__(self) -> int:
        raise AssertionError("somebody counted the test items")


@pytest.mark.parametrize("name", ["bert4rec-2-stage", "item-knn"])
def test_the_test_items_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A trial, in this process, on a split whose test items break whoever reads them."""
    given: list[splits.Split] = []

    def poisoned(sequences: Sequences) -> splits.Split:
        split = splits.leave_one_out(sequences)
        fields = {name: getattr(split, name) for name in split.__dataclass_fields__}
        given.append(splits.Split(**(fields | {"test": Poison()})))
        return given[-1]

    monkeypatch.setitem(splits.SPLITS, "leave-one-out", poisoned)
    config = START if name == START.model.name else load_config(name)
    run = LabRun(tmp_path, "trial-0", 0)
    run.folder.mkdir(parents=True)
    write_json(tmp_path / STUDY_FILE, {"data": data_facts(tmp_path, cycle(40), "toys")})
    plan = {"held_out": "validation", "budget_minutes": MINUTES, "title": ""}
    write_json(run.contender / "plan.json", plan | {"config": config.model_dump(mode="json")})
    run_one(run)
    assert len(given) == 1
    cost = run.cost()
    assert cost is not None
    assert 0 < cost["ndcg@10"] <= 1


def test_hopeless_settings_are_pruned_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate of 1e-9 learns nothing; after the first good trial none such trains to its end."""

    def learns(run: LabRun, config: Config, running: Any, report: Any) -> Any:
        best = 0.5 if config.stages[0].learning_rate > 1e-3 else 0.01
        for percent in range(10, 101, 10):
            report(percent, best * percent / 100)
        return config, best

    monkeypatch.setattr(tuning, "run_trial", learns)
    monkeypatch.setattr(tuning, "STARTUP_TRIALS", 1)
    space: Space = {RATE: CategoricalDistribution((1e-9, 1e-2))}
    start, console = small(f"{RATE}=1e-2"), quiet()
    tuned(tmp_path, 6, start=start, space=space, console=console)
    by_rate = {(row[RATE], row["state"]) for row in rows(tmp_path)}
    assert by_rate == {("1e-09", "pruned"), ("0.01", "complete")}
    text = console.file.getvalue()  # type: ignore[attr-defined]
    percent = [int(share) for share in re.findall(r"pruned at (\d+) %", text)]
    assert tuning.WARM_UP_PERCENT <= min(percent) < 100


def test_a_pruned_trial_is_stopped(tmp_path: Path) -> None:
    """Its process ends with it, long before its training would."""
    long = small("stages.0.epochs=100000", "stages.1.epochs=0", "stages.0.patience=none")

    def prune(percent: int, ndcg: float) -> None:
        raise TrialPruned

    write_json(tmp_path / STUDY_FILE, {"data": data_facts(tmp_path, cycle(40), "toys")})
    with pytest.MonkeyPatch.context() as patch, (tmp_path / "lock").open("w") as lock:
        patch.setattr(tuning, "learning_curve", lambda events, epochs: {10: 0.0} if events else {})
        view = tuning.ProgressView(console=quiet())
        running = tuning.RunningTrial(tmp_path, 10.0, lock.fileno(), tuning.StopRequest(), view, 0)
        run = LabRun(tmp_path, "trial-0", 0)
        with pytest.raises(TrialPruned):
            tuning.run_trial(run, long, running, prune)
    assert run.cost() is None
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            assert str(tmp_path).encode() not in path.read_bytes()


def test_a_model_that_is_fitted_in_one_pass_is_tuned_too(tmp_path: Path) -> None:
    """With one neighbour per item, fewer of the items that come next have a score at all."""
    start = resolve(load_config("item-knn", None, ["model.neighbours=1"]), 8)
    space: Space = {"model.neighbours": CategoricalDistribution((1, 7))}
    result = tuned(tmp_path, 2, start=start, space=space)
    assert {row["state"] for row in rows(tmp_path)} == {"complete"}
    assert result.start == float(rows(tmp_path)[0]["ndcg@10"]) > 0


def test_settings_that_cannot_be_trained_do_not_end_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverges(config: Config) -> float:
        if config.stages[0].learning_rate > 1:
            raise ValueError("the loss is no longer a number")
        return 0.5

    replaced(monkeypatch, diverges)
    space: Space = {RATE: CategoricalDistribution((1e-3, 100.0))}
    result = tuned(tmp_path, 8, space=space)
    table = rows(tmp_path)
    assert result.n_trials == 8
    found = {(row[RATE], row["state"]) for row in table}
    assert found == {("0.001", "complete"), ("100.0", "failed")}
    for row in table:
        assert ("no longer a number" in row["error"]) == (row["state"] == "failed")
    with pytest.raises(ValueError, match="no longer a number"):  # the recipe itself must train
        tuned(tmp_path / "other", 2, start=small(f"{RATE}=100"), space=space)


def test_a_process_that_fails_is_a_failed_trial_with_its_error(tmp_path: Path) -> None:
    """`mps` is a good setting, but not on this machine: the recipe itself cannot be trained."""
    with pytest.raises(ValueError, match=r"training\.device = 'mps'"):
        tuned(tmp_path, 1, start=small("training.device=mps"))


def test_an_interrupt_gives_the_trial_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: Config) -> float:
        raise Interrupted

    with monkeypatch.context() as patch:
        replaced(patch, interrupted)
        for _ in range(tuning.MOST_ATTEMPTS + 1):  # no number of times is too many
            with pytest.raises(Interrupted):
                tuned(tmp_path, 1)
    replaced(monkeypatch, lambda config: 0.5)
    assert tuned(tmp_path, 1).n_trials == 1
    assert [row["is_start"] for row in rows(tmp_path)] == ["yes"]


def test_other_terms_are_fine_before_a_trial_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def impossible(config: Config) -> float:
        raise ValueError("too wide for this machine")

    with monkeypatch.context() as patch:
        replaced(patch, impossible)
        with pytest.raises(ValueError, match="too wide"):
            tuned(tmp_path, 1)
    seen = replaced(monkeypatch, lambda config: 0.5)
    smaller = small("stages.0.epochs=3", "stages.1.epochs=1", "model.dim=8")
    assert tuned(tmp_path, 1, start=smaller).n_trials == 1
    assert [setting(config, "model.dim") for config in seen] == [8]
    with pytest.raises(ValueError, match=r"different: recipe model\.dim"):
        tuned(tmp_path, 1)


def test_a_termination_interrupts_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def terminated(config: Config) -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0.5

    replaced(monkeypatch, terminated)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted):
        tuned(tmp_path, 2)
    assert signal.getsignal(signal.SIGTERM) == before
    assert len(rows(tmp_path)) == 1  # and what was done is saved


@pytest.mark.parametrize("setting", ["seed=3", "training.minutes=5"])
def test_what_the_command_chooses_itself_cannot_be_set(setting: str) -> None:
    done = CliRunner().invoke(app, ["tune", "demo", "--set", setting])
    assert isinstance(done.exception, ValueError)
    assert str(done.exception).startswith("--set training.")


CHILD = """
import sys, time
from pathlib import Path
import test_tune
def hangs(run, config, *rest):
    if Path(sys.argv[1], "trials.csv").exists():
        print("IN THE SECOND TRIAL", config.stages[0].learning_rate, flush=True)
        time.sleep(600)
    return config, 0.5
test_tune.tuning.run_trial = hangs
test_tune.tuned(Path(sys.argv[1]), 3)
"""


def test_a_killed_study_resumes_and_tries_the_same_settings_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line.startswith("IN THE SECOND TRIAL")
    with pytest.raises(ValueError, match="another process is at work in"):
        tuned(tmp_path, 3)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert len(rows(tmp_path)) == 1
    replaced(monkeypatch, lambda config: 0.4)
    assert tuned(tmp_path, 3).n_trials == 3
    assert rows(tmp_path)[1][RATE] == line.split()[-1]
    with open_study(tmp_path, cycle(40).fingerprint, START, SPACE, MINUTES) as study:
        states = [trial.state.name for trial in study.get_trials()]
        assert states == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
        assert [config_of(trial) for trial in finished(study)]


def test_a_trial_that_kills_the_program_is_not_tried_for_ever(tmp_path: Path) -> None:
    n_begun = 0
    for _ in range(tuning.MOST_ATTEMPTS + 2):
        with open_study(tmp_path, "data", START, SPACE, MINUTES) as study:
            if n_begun == 0:
                study.tell(tuning.ask(study, SPACE, 0), 0.5)  # the recipe
            elif finished(study)[-1].state.name == "PRUNED":
                break
            tuning.ask(study, SPACE, 0)  # and never told: the program is gone
            n_begun += 1
    assert n_begun == tuning.MOST_ATTEMPTS


def test_the_command_ends_with_a_recipe_and_what_to_do_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, lambda config: setting(config, "model.dim") / 1000)
    monkeypatch.setenv("BERT4REC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    table, space, out = tmp_path / "clicks.csv", tmp_path / "space.toml", tmp_path / "study"
    lines = [f"{user},{(user + i) % 7},{i}" for user in range(12) for i in range(5)]
    table.write_text("\n".join(["who,what,time", *lines]), encoding="utf-8")
    space.write_text('"model.dim" = { choices = [32, 64, 128] }\n', encoding="utf-8")
    command = ["tune", table, "--user", "who", "--item", "what", "--trials", 12, "--out", out]
    command += ["--space", space, "--set", "dropout=0.3"]
    done = CliRunner().invoke(app, [str(word) for word in command], catch_exceptions=False)
    assert done.exit_code == 0
    assert "NDCG@10 0.1280, against 0.0640 of the recipe at the start, in 12 trials" in done.stdout
    assert "100%" in done.stdout  # importance, where only one setting was tuned
    best = load_config("default", out / "best.toml")
    assert (setting(best, "model.dim"), setting(best, "model.dropout")) == (128, 0.3)
    then = next(line for line in done.stdout.splitlines() if line.startswith("  bert4rec train"))
    assert f"--config {out / 'best.toml'}" in then
    assert "--user who --item what" in then


def test_no_trial_begins_after_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def slow(config: Config) -> float:
        clock[0] += 50
        return 0.5

    replaced(monkeypatch, slow)
    monkeypatch.setattr(tuning.time, "monotonic", lambda: clock[0])
    assert tuned(tmp_path, 1000, timeout_minutes=2).n_trials == 3


def test_curves_with_different_validations_are_read_off_at_the_same_places() -> None:
    def curve(epochs: list[int], events: list[tuple[int, int, float]]) -> dict[int, float]:
        log = [{"stage": f"stage {stage}", "epoch": epoch, "ndcg@10": ndcg} for stage, epoch, ndcg in events]
        return learning_curve(log, epochs)

    often = curve([8, 2], [(0, n, n / 100) for n in range(1, 9)] + [(1, 1, 0.09), (1, 2, 0.10)])
    seldom = curve([4, 1], [(0, 2, 0.04), (0, 4, 0.08), (1, 1, 0.10)])
    assert often == pytest.approx({n: n / 1000 for n in range(10, 101, 10)})
    assert seldom == pytest.approx(often)
    assert curve([2], [(0, 1, 0.5), (0, 2, 0.1)])[100] == 0.5  # the best so far, not the last


def test_the_space_fits_the_model_and_holds_the_recipe() -> None:
    everywhere = {RATE, "model.dim", "model.dropout", "training.batch_size"}
    cloze = {"stages.0.mask_ratio", "stages.0.last_item_share", "stages.1.learning_rate"}
    two_stages = load_config("bert4rec-2-stage")
    assert everywhere | cloze | {"model.heads", "model.layers"} <= space_for(two_stages).keys()
    assert cloze & space_for(load_config("default")).keys() == {"stages.1.learning_rate"}
    one_stage = load_config("bert4rec-2-stage", None, ["stages.1.epochs=0"])
    assert "stages.1.learning_rate" not in space_for(one_stage)
    one_mask = load_config("bert4rec-2-stage", None, ["stages.0.max_queries=1"])
    assert not {"stages.0.mask_ratio", "stages.0.last_item_share"} & space_for(one_mask).keys()
    sasrec = load_config("default", None, ["model.name=sasrec"])
    assert not cloze & space_for(sasrec).keys()
    assert "loss.n_negatives" not in space_for(resolve(sasrec, n_items=100))
    assert "loss.n_negatives" in space_for(resolve(sasrec, n_items=50_000))
    assert {"loss.n_negatives", "loss.calibration"} <= space_for(load_config("gsasrec")).keys()
    knn = load_config("item-knn")
    assert space_for(knn).keys() == {"model.neighbours", "model.similarity"}
    with pytest.raises(ValueError, match="nothing is left to tune of the model 'popularity'"):
        space_for(load_config("popularity"))
    for recipe in ("default", "demo", "bert4rec-2-stage", "paper-ml-1m", "paper-steam"):
        config = load_config(recipe)
        space = space_for(config)
        for name, value in start_values(config, space).items():
            assert value == setting(config, name), (recipe, name)
    odd = load_config("default", None, ["model.dim=50", "model.heads=5"])
    space = space_for(odd)
    dims = getattr(space.get("model.dim"), "choices", (50,))
    heads = getattr(space.get("model.heads"), "choices", (5,))
    assert all(dim % n == 0 for dim in dims for n in heads)


def test_a_setting_that_is_given_is_not_tuned() -> None:
    overrides = ["model.dim=64", "weight_decay=0.1", "stages.1.learning_rate = 1e-4"]
    left = space_for(load_config("default", None, overrides), overrides)
    assert not left.keys() & {"model.dim", "training.weight_decay", "stages.1.learning_rate"}
    assert "model.dropout" in left


def test_a_space_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "space.toml"
    path.write_text(
        '"stages.0.learning_rate" = { low = 0.0005, high = 0.01, log = true }\n'
        '"model.layers" = { low = 1, high = 4 }\n'
        '"model.dropout" = { low = 0, high = 0.5 }\n'
        '"training.weight_decay" = { low = 0, high = 1 }\n'
        "[model]\n"
        "dim = { choices = [64, 96] }\n",
        encoding="utf-8",
    )
    assert space_for(load_config("default"), (), path) == {
        RATE: FloatDistribution(0.0005, 0.01, log=True),
        "model.layers": IntDistribution(1, 4),
        "model.dropout": FloatDistribution(0, 0.5),
        "training.weight_decay": FloatDistribution(0, 1),
        "model.dim": CategoricalDistribution((64, 96)),
    }
    with pytest.raises(ValueError, match=r"model\.dim is in .* and given with --set"):
        space_for(load_config("default"), ["model.dim=64"], path)


def test_a_recipe_without_a_value_is_one_of_the_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, start = tmp_path / "space.toml", small("stages.0.patience=none")
    path.write_text(
        '"stages.0.patience" = { choices = [2, 5] }\n"model.layers" = { choices = [1] }\n', encoding="utf-8"
    )
    space = space_for(start, (), path)  # one layer is what the recipe has: nothing to tune
    assert space == {"stages.0.patience": CategoricalDistribution((2, 5, None))}
    replaced(monkeypatch, lambda config: 0.5)
    tuned(tmp_path / "study", 2, start=start, space=space)
    assert rows(tmp_path / "study")[0]["stages.0.patience"] == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"stages.0.learning_rat" = { low = 1, high = 2 }', r"did you mean 'stages\.0\.learning_rate'"),
        ('"model.dropout" = { low = 0.1, high = 1.5 }', r"model\.dropout = 1\.5"),
        (
            '"model.dropout" = { low = 0.4, high = 0.1 }',
            r"model\.dropout is \{'low': 0\.4, 'high': 0\.1\}: write .* low below high",
        ),
        ('"training.weight_decay" = { low = 0, high = 1, log = true }', r"weight_decay is .*'low': 0.* above 0"),
        ('"model.dim" = { choices = [] }', r"model\.dim is \{'choices': \[\]\}: write .*choices = "),
        ('"model.dim" = { choices = [32, "x"] }', r"model\.dim = 'x'"),
        ('"model.dim" = { from = 3 }', r"model\.dim is \{'from': 3\}: write \{ low"),
        ('"model.dim" = 64', r"model\.dim is 64: write"),
        ('"model.dim" = { low = 3 }', r"model\.dim is \{'low': 3\}: write \{ low"),
        (
            '"model.dim" = { choices = [96] }\n"model.heads" = { low = 1, high = 4 }',
            r"heads = 3 does not divide dim = 64",
        ),
        ('"model.heads" = { choices = [2, 3] }', r"heads = 3 does not divide dim = 64"),
        ('"training.seed" = { low = 0, high = 9 }', r"training\.seed cannot be tuned: .* luck"),
        ('"data.min_rating" = { low = 1, high = 5 }', r"data\.min_rating cannot be tuned"),
        ("learning_rate = 3", r"'learning_rate' is no setting .*did you mean 'stages\.\d\.learning_rate'"),
        ("", r"nothing is left to tune .*space\.toml names no setting"),
        ("=", r"not a TOML file"),
    ],
)
def test_mistakes_in_a_space_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "space.toml"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        space_for(load_config("default"), (), path)


def test_every_recipe_survives_being_written_and_read(tmp_path: Path) -> None:
    for recipe in ("default", "demo", "paper-ml-1m", "popularity", "item-knn"):
        config = load_config(recipe)
        path = tmp_path / f"{recipe}.toml"
        path.write_text(recipe_toml(config, "a\nb"), encoding="utf-8")
        assert load_config("paper-steam", path) == config
