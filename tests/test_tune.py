"""Tuning: the recipe comes first, the test items are never seen, and nothing is done twice."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from toys import cycle, quiet, small_config
from typer.testing import CliRunner

from bert4rec.cli import app
from bert4rec.config import Config, load_config
from bert4rec.data import splits
from bert4rec.data.sequences import Sequences
from bert4rec.lab import study as studies
from bert4rec.lab import tune as tuning
from bert4rec.lab.contenders import choose_contenders
from bert4rec.lab.search_space import Choices, Range, Space, full_names, setting, space_for
from bert4rec.lab.study import finished, open_study, terms_of
from bert4rec.lab.tune import Curve, tune
from bert4rec.lab.tuned import Tuned, config_of, recipe_toml
from bert4rec.training.settled import settled

MINUTES = 0.2
BRIEF = ("epochs=3", "second_stage.epochs=1", "validate_every=1", "warmup_steps=0", "workers=1")
START = small_config(*BRIEF, "model.layers=1")
SPACE: Space = {
    "training.learning_rate": Range(1e-3, 1e-2, log=True),
    "model.dim": Choices((8, 16)),
    "second_stage.learning_rate": Range(1e-4, 1e-3, log=True),
}


def tuned(
    out: Path,
    n_trials: int,
    *,
    start: Config = START,
    space: Space = SPACE,
    sequences: Sequences | None = None,
    console: Console | None = None,
    startup_trials: int = 5,
) -> Tuned:
    return tune(
        sequences or cycle(40),
        start,
        out,
        console or quiet(),
        data_name="toys.csv",
        space=space,
        n_trials=n_trials,
        minutes=MINUTES,
        startup_trials=startup_trials,
    )


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "trials.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def without_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The epochs of the recipe, whatever time they take: quicker, and the same on any machine."""
    monkeypatch.setattr(tuning, "epochs_within", lambda split, config, minutes: config)


@pytest.fixture(scope="module")
def small_study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tuned]:
    out = tmp_path_factory.mktemp("study")
    return out, tuned(out, 4)


def test_the_recipe_itself_is_the_first_trial_and_the_best_is_no_worse(
    small_study: tuple[Path, Tuned],
) -> None:
    out, result = small_study
    table = rows(out)
    assert [row["is_start"] for row in table] == ["yes", "no", "no", "no"]
    for name in SPACE:
        assert float(table[0][name]) == setting(START, name)
    assert result.start == float(table[0]["ndcg@10"])
    assert result.best == max(float(row["ndcg@10"]) for row in table) >= result.start
    for row in table:
        assert 1e-3 <= float(row["training.learning_rate"]) <= 1e-2
        assert int(row["model.dim"]) in (8, 16)
    assert len({row["training.learning_rate"] for row in table}) == 4


def test_the_recipe_is_that_of_the_best_trial(small_study: tuple[Path, Tuned]) -> None:
    out, result = small_study
    saved = load_config("default", out / "best.toml")
    best = max(rows(out), key=lambda row: float(row["ndcg@10"]))
    assert saved == result.config
    for name in SPACE:
        assert setting(saved, name) == float(best[name])
        assert result.settings[name] == (setting(START, name), setting(saved, name))
    assert saved.training.minutes is None
    assert saved.training.epochs <= START.training.epochs
    first_line = (out / "best.toml").read_text(encoding="utf-8").splitlines()[0]
    assert first_line.startswith("# Tuned on toys.csv in 4 trials")
    assert f"{result.best:.4f}" in first_line
    assert f"{result.start:.4f}" in first_line
    sections = ["evaluation.bootstrap=50"]  # a lab's own, and so given to it
    assert choose_contenders([str(out / "best.toml")], sections)[0].config == saved


def test_going_on_adds_only_the_trials_that_are_missing(
    small_study: tuple[Path, Tuned], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, before = small_study
    trained: list[Config] = []
    run_trial = tuning.run_trial

    def counted(split, config, *rest):  # type: ignore[no-untyped-def]
        trained.append(config)
        return run_trial(split, config, *rest)

    monkeypatch.setattr(tuning, "run_trial", counted)
    table = rows(out)
    assert tuned(out, 4) == before
    assert not trained
    assert tuned(out, 5).n_trials == 5
    assert len(trained) == 1
    assert rows(out)[:4] == table
    rates = [row["training.learning_rate"] for row in rows(out)]
    assert len(set(rates)) == 5  # a sampler that starts anew would draw the first ones again


def test_other_terms_are_refused_by_name(small_study: tuple[Path, Tuned]) -> None:
    out, _ = small_study
    with pytest.raises(ValueError, match=r"different: data \("):
        tuned(out, 9, sequences=cycle(41))
    with pytest.raises(ValueError, match=r"different: recipe model\.max_len \(12 before, now 11\)"):
        tuned(out, 9, start=small_config(*BRIEF, "model.layers=1", "model.max_len=11"))
    wider = SPACE | {"model.dim": Choices((8, 16, 32))}
    with pytest.raises(ValueError, match=r"different: space model\.dim \(\[8, 16\] before"):
        tuned(out, 9, space=wider)
    fewer = {name: tried for name, tried in SPACE.items() if name != "model.dim"}
    with pytest.raises(ValueError, match=r"different: space model\.dim \(left out now\)"):
        tuned(out, 9, space=fewer)


class Poison:
    """Test items that nobody may look at."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"somebody asked the test items for {name}")

    def __len__(self) -> int:
        raise AssertionError("somebody counted the test items")


def test_the_test_items_are_never_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[splits.Split] = []

    def poisoned(sequences: Sequences) -> splits.Split:
        split = splits.leave_one_out(sequences)
        fields = {name: getattr(split, name) for name in split.__dataclass_fields__}
        given.append(splits.Split(**(fields | {"test": Poison()})))
        return given[-1]

    monkeypatch.setitem(splits.SPLITS, "leave-one-out", poisoned)
    seen: list[int] = []
    run_trial = tuning.run_trial

    def looks(split, *rest):  # type: ignore[no-untyped-def]
        seen.append(len(split.test))
        return run_trial(split, *rest)

    monkeypatch.setattr(tuning, "run_trial", looks)
    assert tuned(tmp_path, 1).n_trials == 1
    assert len(given) == 1
    assert seen == [0]


@pytest.mark.usefixtures("without_rehearsal")
def test_hopeless_settings_are_given_up_early(tmp_path: Path) -> None:
    """A rate of 1e-9 learns nothing; after the first good trials no such one trains to its end."""
    space: Space = {"training.learning_rate": Choices((1e-9, 1e-2))}
    start = small_config(
        "epochs=10",
        "second_stage.epochs=0",
        *BRIEF[2:],
        "learning_rate=1e-2",
    )
    console = quiet()
    tuned(tmp_path, 6, start=start, space=space, startup_trials=1, console=console)
    by_rate = {(row["training.learning_rate"], row["state"]) for row in rows(tmp_path)}
    assert ("1e-09", "given up") in by_rate
    assert ("1e-09", "complete") not in by_rate
    assert ("0.01", "complete") in by_rate
    text = console.file.getvalue()  # type: ignore[attr-defined]
    percent = [int(share) for share in re.findall(r"given up at (\d+) %", text)]
    assert studies.WARM_UP_PERCENT <= min(percent) < 100


def test_a_model_that_fits_itself_is_tuned_too(tmp_path: Path) -> None:
    """With one neighbour an item, fewer of the items that come next have a score at all."""
    start = load_config("item-knn", None, ["model.neighbours=1"])
    space: Space = {"model.neighbours": Choices((1, 7))}
    result = tuned(tmp_path, 4, start=start, space=space)
    assert {row["state"] for row in rows(tmp_path)} == {"complete"}
    by_neighbours = {row["model.neighbours"]: float(row["ndcg@10"]) for row in rows(tmp_path)}
    assert by_neighbours["7"] > by_neighbours["1"] == result.start
    assert result.config.model.neighbours == 7


def test_settings_that_cannot_be_trained_do_not_end_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverges(split, config, n_users, minutes, view, keep, report):  # type: ignore[no-untyped-def]
        if config.training.learning_rate > 1:
            raise ValueError("the loss is no longer a number")
        return SimpleNamespace(ndcg=0.5)

    monkeypatch.setattr(tuning, "run_trial", diverges)
    space: Space = {"training.learning_rate": Choices((1e-3, 100.0))}
    result = tuned(tmp_path, 8, space=space)
    table = rows(tmp_path)
    assert result.n_trials == 8
    assert {(row["training.learning_rate"], row["state"]) for row in table} == {
        ("0.001", "complete"),
        ("100.0", "failed"),
    }
    assert all(
        ("no longer a number" in row["error"]) == (row["state"] == "failed") for row in table
    )
    impossible = small_config("learning_rate=100")
    with pytest.raises(ValueError, match="no longer a number"):  # the recipe itself must train
        tuned(tmp_path / "other", 2, start=impossible, space=space)


@pytest.mark.usefixtures("without_rehearsal")
def test_ctrl_c_gives_the_trial_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tuning, "run_trial", interrupted)
        for _ in range(studies.MOST_ATTEMPTS + 1):  # no number of times is too many
            with pytest.raises(tuning.Stopped):
                tuned(tmp_path, 1)
    assert tuned(tmp_path, 1).n_trials == 1
    assert [row["is_start"] for row in rows(tmp_path)] == ["yes"]


@pytest.mark.usefixtures("without_rehearsal")
def test_a_trial_that_breaks_is_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(split, config, *rest):  # type: ignore[no-untyped-def]
        if config.training.learning_rate > 1:
            raise RuntimeError("out of memory")
        return SimpleNamespace(ndcg=0.5)

    monkeypatch.setattr(tuning, "run_trial", breaks)
    space: Space = {"training.learning_rate": Choices((1e-3, 100.0))}
    n_broken = 0
    for _ in range(50):
        try:
            assert tuned(tmp_path, 4, space=space).n_trials == 4
            break
        except RuntimeError:
            n_broken += 1
    bad = [row for row in rows(tmp_path) if row["training.learning_rate"] == "100.0"]
    assert n_broken == studies.MOST_ATTEMPTS * len(bad) > 0
    assert {(row["state"], row["error"]) for row in bad} == {
        ("failed", "RuntimeError: out of memory")
    }


def test_other_terms_are_fine_before_a_trial_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impossible(*arguments: object) -> None:
        raise ValueError("too wide for this machine")

    with monkeypatch.context() as patch:
        patch.setattr(tuning, "run_trial", impossible)
        with pytest.raises(ValueError, match="too wide"):
            tuned(tmp_path, 1)
    seen: list[int] = []

    def trained(split, config, *rest):  # type: ignore[no-untyped-def]
        seen.append(config.model.dim)
        return SimpleNamespace(ndcg=0.5)

    monkeypatch.setattr(tuning, "run_trial", trained)
    smaller = small_config(*BRIEF, "model.layers=1", "model.dim=8")
    assert tuned(tmp_path, 1, start=smaller).n_trials == 1
    assert seen == [8]
    with pytest.raises(ValueError, match=r"different: recipe model\.dim"):
        tuned(tmp_path, 1)


def test_a_termination_is_as_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def terminated(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(tuning, "run_trial", terminated)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(tuning.Stopped):
        tuned(tmp_path, 1)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("setting", ["seed=3", "training.minutes=5"])
def test_what_the_command_chooses_itself_cannot_be_set(setting: str) -> None:
    done = CliRunner().invoke(app, ["tune", "demo", "--set", setting])
    assert isinstance(done.exception, ValueError)
    assert str(done.exception).startswith("--set training.")


CHILD = """
import sys, time
from pathlib import Path
import test_tune
run_trial = test_tune.tuning.run_trial
test_tune.tuning.epochs_within = lambda split, config, minutes: config
def hangs(split, config, *rest):
    if Path(sys.argv[1], "trials.csv").exists():
        print("IN THE SECOND TRIAL", config.training.learning_rate, flush=True)
        time.sleep(600)
    return run_trial(split, config, *rest)
test_tune.tuning.run_trial = hangs
test_tune.tuned(Path(sys.argv[1]), 3)
"""


@pytest.mark.usefixtures("without_rehearsal")
def test_a_killed_study_goes_on_and_tries_the_same_settings_again(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
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
    assert tuned(tmp_path, 3).n_trials == 3
    assert rows(tmp_path)[1]["training.learning_rate"] == line.split()[-1]
    terms = terms_of(cycle(40).fingerprint, START, SPACE, MINUTES)
    with open_study(tmp_path, terms, START, SPACE, startup_trials=5) as study:
        states = [trial.state.name for trial in study.get_trials()]
        assert states == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
        assert [config_of(trial) for trial in finished(study)]


def test_a_trial_that_kills_the_process_is_not_tried_for_ever(tmp_path: Path) -> None:
    terms = terms_of("data", START, SPACE, MINUTES)
    n_begun = 0
    for _ in range(studies.MOST_ATTEMPTS + 2):
        with open_study(tmp_path, terms, START, SPACE, startup_trials=5) as study:
            if n_begun == 0:
                study.tell(studies.ask(study, SPACE, 0), 0.5)  # the recipe
            elif finished(study)[-1].state.name == "PRUNED":
                break
            studies.ask(study, SPACE, 0)  # and never told: the process is gone
            n_begun += 1
    assert n_begun == studies.MOST_ATTEMPTS


def test_the_command_ends_with_a_recipe_and_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wide_is_good(split, config, *rest):  # type: ignore[no-untyped-def]
        rest[3](config)  # keep
        return SimpleNamespace(ndcg=config.model.dim / 1000)

    monkeypatch.setattr(tuning, "run_trial", wide_is_good)
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
    assert (best.model.dim, best.model.dropout) == (128, 0.3)
    then = next(line for line in done.stdout.splitlines() if line.startswith("  bert4rec train"))
    assert f"--config {out / 'best.toml'}" in then
    assert "--user who --item what" in then


def test_no_trial_begins_after_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: object) -> SimpleNamespace:
        time.sleep(0.5)
        return SimpleNamespace(ndcg=0.5)

    monkeypatch.setattr(tuning, "run_trial", slow)
    result = tune(
        cycle(40),
        START,
        tmp_path,
        quiet(),
        data_name="toys",
        space=SPACE,
        n_trials=1000,
        timeout_minutes=2 / 60,
    )
    assert 1 <= result.n_trials <= 4


def test_curves_with_different_validations_are_read_off_at_the_same_places() -> None:
    def curve(epochs: list[int], events: list[tuple[int, int, float]]) -> dict[int, float]:
        told: dict[int, float] = {}
        line = Curve(epochs, told.__setitem__)
        for stage, epoch, ndcg in events:
            line.stage = stage
            line.validated({"epoch": epoch, "ndcg@10": ndcg})
        return told

    often = curve([8, 2], [(0, n, n / 100) for n in range(1, 9)] + [(1, 1, 0.09), (1, 2, 0.10)])
    seldom = curve([4, 1], [(0, 2, 0.04), (0, 4, 0.08), (1, 1, 0.10)])
    assert often == pytest.approx({n: n / 1000 for n in range(10, 101, 10)})
    assert seldom == pytest.approx(often)
    assert curve([2], [(0, 1, 0.5), (0, 2, 0.1)])[100] == 0.5  # the best so far, not the last


def test_the_space_fits_the_model_and_holds_the_recipe() -> None:
    everywhere = {"training.learning_rate", "model.dim", "model.dropout", "training.batch_size"}
    cloze = {"training.mask_ratio", "training.last_item_share", "second_stage.learning_rate"}
    two_stages = load_config("bert4rec-2-stage")
    assert everywhere | cloze | {"model.heads", "model.layers"} <= space_for(two_stages).keys()
    assert cloze & space_for(load_config("default")).keys() == {"second_stage.learning_rate"}
    one_mask = load_config("bert4rec-2-stage", None, ["max_masked=1"])
    assert not {"training.mask_ratio", "training.last_item_share"} & space_for(one_mask).keys()
    sasrec = load_config("default", None, ["model.name=sasrec"])
    assert not cloze & space_for(sasrec).keys()
    assert "training.n_negatives" not in space_for(settled(sasrec, n_items=100))
    assert "training.n_negatives" in space_for(settled(sasrec, n_items=50_000))
    gbce = load_config("default", None, ["model.name=sasrec", "loss=gbce", "n_negatives=256"])
    assert {"training.n_negatives", "training.gbce_calibration"} <= space_for(gbce).keys()
    knn = load_config("default", None, ["model.name=item-knn"])
    assert space_for(knn).keys() == {"model.neighbours", "model.similarity"}
    with pytest.raises(ValueError, match="nothing is left to tune of the model 'popularity'"):
        space_for(load_config("default", None, ["model.name=popularity"]))
    for recipe in ("default", "demo", "bert4rec-2-stage", "paper-ml-1m", "paper-steam"):
        config = load_config(recipe)
        for name, tried in space_for(config).items():
            assert tried.nearest(setting(config, name)) == setting(config, name), (recipe, name)
    odd = load_config("default", None, ["model.dim=50", "model.heads=5"])
    space = space_for(odd)
    dims = getattr(space.get("model.dim"), "values", (50,))
    heads = getattr(space.get("model.heads"), "values", (5,))
    assert all(dim % n == 0 for dim in dims for n in heads)


def test_a_setting_that_is_given_is_not_tuned() -> None:
    overrides = ["model.dim=64", "learning_rate=0.001", "second_stage.learning_rate = 1e-4"]
    fixed = full_names(overrides)
    assert fixed == ["model.dim", "training.learning_rate", "second_stage.learning_rate"]
    left = space_for(load_config("default", None, overrides), fixed)
    assert not left.keys() & set(fixed)
    assert "model.dropout" in left


def test_a_space_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "space.toml"
    path.write_text(
        '"training.learning_rate" = { low = 0.0005, high = 0.01, log = true }\n'
        '"model.layers" = { low = 1, high = 4 }\n'
        '"model.dropout" = { low = 0, high = 0.5 }\n'
        "[model]\n"
        "dim = { choices = [64, 96] }\n",
        encoding="utf-8",
    )
    assert space_for(load_config("default"), (), path) == {
        "training.learning_rate": Range(0.0005, 0.01, log=True),
        "model.layers": Range(1, 4, whole=True),
        "model.dropout": Range(0, 0.5),
        "model.dim": Choices((64, 96)),
    }
    with pytest.raises(ValueError, match=r"model\.dim is in .* and is given with --set"):
        space_for(load_config("default"), ["model.dim"], path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"training.learning_rat" = { low = 1, high = 2 }', r"did you mean 'learning_rate'"),
        ('"model.dropout" = { low = 0.1, high = 1.5 }', r"model\.dropout = 1\.5"),
        ('"model.dropout" = { low = 0.4, high = 0.1 }', r"model\.dropout: low = 0\.4 is not lower"),
        ('"training.weight_decay" = { low = 0, high = 1, log = true }', r"weight_decay: low = 0"),
        ('"model.dim" = { choices = [] }', r"model\.dim: choices is a list of two or more"),
        ('"model.dim" = { choices = [32, "x"] }', r"model\.dim = 'x'"),
        ('"model.dim" = { from = 3 }', r"model\.dim is \{'from': 3\}: write \{ low"),
        ('"model.dim" = 64', r"model\.dim is 64: write"),
        ('"model.dim" = { low = 3 }', r"model\.dim needs low and high"),
        ('"model.heads" = { choices = [2, 3] }', r"model\.heads = 3 and model\.dim = 64"),
        ('"training.seed" = { low = 0, high = 9 }', r"training\.seed cannot be tuned: .* luck"),
        ('"data.min_rating" = { low = 1, high = 5 }', r"data\.min_rating cannot be tuned"),
        ("learning_rate = 3", r"learning_rate: write section\.key"),
        ("", r"is empty"),
        ("=", r"not a TOML file"),
    ],
)
def test_mistakes_in_a_space_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "space.toml"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        space_for(load_config("default"), (), path)


def test_every_recipe_survives_being_written_and_read(tmp_path: Path) -> None:
    for recipe in ("default", "demo", "paper-ml-1m"):
        config = load_config(recipe, None, ["learning_rate=1e-05", "patience=none"])
        path = tmp_path / f"{recipe}.toml"
        path.write_text(recipe_toml(config, "a\nb"), encoding="utf-8")
        assert load_config("paper-steam", path) == config
