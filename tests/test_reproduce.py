"""Published figures are what was published, and verdicts are what the numbers say."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from toys import quiet, random_histories
from typer.testing import CliRunner

from bert4rec.cli import app
from bert4rec.data.public import DATASETS
from bert4rec.data.splits import leave_one_out
from bert4rec.explanation import attention_weights
from bert4rec.lab.claims import (
    Claim,
    PublishedTraining,
    Reproduction,
    Tolerance,
    contenders_of,
    judge,
    load_reproduction,
    reproduction_names,
    shortfall,
)
from bert4rec.lab.judgement import to_text, write_judgement
from bert4rec.lab.lab_directory import LabTerms
from bert4rec.lab.lab_report import write_report
from bert4rec.lab.lab_result import MeanEstimate
from bert4rec.lab.report_text import commands
from bert4rec.lab.reproduction_figures import AttentionMaps, average_attention, write_maps
from bert4rec.lab.run_lab import run_lab
from bert4rec.models import MODELS
from bert4rec.models.bert4rec import BERT4Rec, BERT4RecSettings

# Typed again from the reference figures that all share: a slip in a TOML file would make a wrong
# verdict.
SPOT_CHECKS = [
    ("table-2-ml-1m", "popularity", "MRR", 0.0627),
    ("table-2-ml-1m", "gru4rec+", "HR@5", 0.5103),
    ("table-2-ml-1m", "caser", "HR@10", 0.6692),
    ("table-2-ml-1m", "bert4rec", "NDCG@10", 0.4818),
    ("table-2-ml-1m", "bert4rec-d256", "HR@1", 0.2863),
    ("table-2-beauty", "bpr-mf", "NDCG@5", 0.0814),
    ("table-2-beauty", "sasrec", "NDCG@10", 0.1633),
    ("table-2-beauty", "bert4rec", "MRR", 0.1701),
    ("table-2-steam", "neumf", "NDCG@10", 0.1026),
    ("table-2-steam", "bert4rec-d128", "HR@10", 0.4013),
    ("table-2-ml-20m", "fpmc", "HR@10", 0.5201),
    ("table-2-ml-20m", "bert4rec", "NDCG@10", 0.5340),
    ("table-3-ml-1m", "one-mask", "NDCG@10", 0.4696),
    ("table-3-beauty", "one-mask", "HR@10", 0.2940),
    ("table-5-ml-1m", "no-positions", "NDCG@10", 0.2155),
    ("table-5-ml-1m", "layers-4", "NDCG@10", 0.4898),
    ("table-5-beauty", "no-residual", "NDCG@10", 0.1619),
    ("table-5-beauty", "heads-1", "NDCG@10", 0.1853),
    ("curve-dim", "d-64", "NDCG@10", 0.4759),
    ("sasrec-vs-bert4rec", "sasrec+3000", "NDCG@10", 0.1857),
    ("sasrec-vs-bert4rec", "bert4rec", "HR@10", 0.2843),
    ("sasrec-vs-bert4rec-beauty", "sasrec+", "NDCG@10", 0.0327),
    ("full-ranking-ml-1m", "bpr-mf", "HR@10", 0.0740),
    ("full-ranking-ml-1m", "gsasrec", "NDCG@10", 0.1726),
]


@pytest.mark.parametrize(("name", "contender", "metric", "value"), SPOT_CHECKS)
def test_published_figures(name: str, contender: str, metric: str, value: float) -> None:
    known = {each.name: each for each in load_reproduction(name).contenders}
    assert known[contender].published[metric] == value


@pytest.mark.parametrize("name", reproduction_names())
def test_every_shipped_reproduction_can_be_run(name: str) -> None:
    reproduction = load_reproduction(name)
    assert reproduction.data in DATASETS
    assert all(each.startswith("data.") for each in reproduction.data_set)
    contenders = contenders_of(reproduction)
    settings = [each.config.model_dump_json() for each in contenders]
    assert len(set(settings)) == len(settings)  # no two are the same model under two names
    assert {each.config.model.name for each in contenders} <= set(MODELS)
    assert len({each.config.data for each in contenders}) == 1
    assert reproduction.curve_over is None or all(c.at for c in reproduction.contenders)


def test_the_reproductions_that_were_promised_are_there() -> None:
    tables = {f"table-2-{data}" for data in ("ml-1m", "beauty", "steam", "ml-20m")}
    tables |= {f"table-{n}-{data}" for n in (3, 5) for data in ("ml-1m", "beauty")}
    curves = {"curve-dim", "curve-mask-ratio", "curve-max-len"}
    others = {"figure-2", "sasrec-vs-bert4rec", "full-ranking-ml-1m"}
    assert tables | curves | others <= set(reproduction_names())


def test_table_5_changes_one_thing_at_a_time() -> None:
    whole, *others = contenders_of(load_reproduction("table-5-ml-1m"))
    model = whole.config.model.model_dump()
    assert (model["dim"], model["layers"], model["heads"]) == (64, 2, 2)
    for other in others:
        values = other.config.model.model_dump()
        assert len([key for key in model if values[key] != model[key]]) == 1, other.name
        assert other.config.training == whole.config.training
        assert other.config.stages == whole.config.stages


@pytest.mark.parametrize("name", ["sasrec-vs-bert4rec", "sasrec-vs-bert4rec-beauty"])
def test_sasrec_and_bert4rec_race_at_one_width_and_batch(name: str) -> None:
    configs = [each.config for each in contenders_of(load_reproduction(name))]
    models = [config.model.model_dump() for config in configs]
    assert {(each["dim"], each["layers"]) for each in models} == {(64, 2)}
    assert len({each["max_len"] for each in models}) == 1
    assert {c.training.batch_size for c in configs} == {128}


def test_tolerance_is_the_larger_of_share_and_floor() -> None:
    tolerance = Tolerance(relative=0.05, absolute=0.01)
    assert tolerance.of(0.4818) == pytest.approx(0.02409)
    assert tolerance.of(0.06) == 0.01


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (0.4818, "pass"),
        (0.4618, "pass"),  # just at the tolerance
        (0.5018, "pass"),
        (0.4518, "miss"),
        (0.5318, "miss"),  # far better than published is not a reproduction
        (None, "not run"),
    ],
)
def test_a_figure_passes_within_its_tolerance(ours: float | None, verdict: str) -> None:
    claim = Claim("BERT4Rec", "NDCG@10", 0.4818, 0.02, ("bert4rec",), "Table 2")
    assert judge(claim, None if ours is None else MeanEstimate(ours, 0.0, 1.0)).verdict == verdict


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [
        (MeanEstimate(0.012, 0.004, 0.020), "pass"),
        (MeanEstimate(0.012, -0.001, 0.025), "unclear"),
        (MeanEstimate(-0.012, -0.020, -0.004), "miss"),
        (MeanEstimate(0.0, 0.0, 0.0), "unclear"),  # two equal models
        (None, "not run"),
    ],
)
def test_an_order_passes_with_its_whole_interval(difference: MeanEstimate | None, verdict: str) -> None:
    claim = Claim("Cloze > one mask", "NDCG@10", None, None, ("cloze", "one-mask"), "Table 3")
    assert judge(claim, difference).verdict == verdict


def test_a_training_that_was_shorter_than_the_published_one_is_named() -> None:
    paper = PublishedTraining(says="400,000 steps of 256", sequences=102_400_000)
    assert shortfall(paper, 1_024_000, 20, planned=200, fitted=20) == [
        "trained on 1 % of the published sequences (400,000 steps of 256)",
        "the budget allowed 20 of 200 epochs",
    ]
    assert shortfall(None, 10, 15, planned=200, fitted=20) == []  # stopped by its patience
    longer = PublishedTraining(says="63 epochs", epochs=63)
    assert not shortfall(longer, 1, 63, planned=70, fitted=70)


CUSTOM = """
title = "A toy"
source = "nobody"
data = "steam"
data_note = "Ask the authors for it."
n_users = 41
protocol = "uniform"
tolerance = { relative = 0, absolute = 0.45 }
notes = "Of no consequence."
curve_over = "width"

[base]
recipe = "bert4rec"
set = ["model.dim=8", "model.layers=1", "model.max_len=12", "stages.0.epochs=2"]
training = { says = "a million epochs", epochs = 1_000_000 }

[[contenders]]
name = "popularity"
title = "POP"
recipe = "popularity"
published = { "HR@10" = 0.5, "HR@1" = 1.0 }

[[contenders]]
name = "tiny"
title = "Tiny BERT4Rec"
at = 8
published = { "HR@1" = 0.1 }

[[contenders]]
name = "never-run"
title = "Never run"
set = ["model.dim=16"]
at = 16
published = { "HR@1" = 0.1 }

[[order]]
says = "learning beats counting"
better = "tiny"
worse = ["popularity"]

[[order]]
says = "wide beats narrow"
better = "never-run"
worse = ["tiny"]
"""


TERMS = LabTerms("toy", n_seeds=1, minutes=0.05, reproduction="toy.toml")


@pytest.fixture(scope="module")
def custom(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reproduction, Path]:
    """A reproduction of the user, really run: two of its three contenders."""
    folder = tmp_path_factory.mktemp("reproduce")
    (folder / "toy.toml").write_text(CUSTOM, encoding="utf-8")
    reproduction = load_reproduction(str(folder / "toy.toml"))
    contenders = contenders_of(reproduction, ["popularity", "tiny"], ["ks=[1,5,10,20]"])
    out = folder / "out"
    run_lab(out / "lab", random_histories(0), contenders, TERMS, quiet())
    return reproduction, out


def test_a_reproduction_from_run_to_verdict(custom: tuple[Reproduction, Path]) -> None:
    reproduction, out = custom
    judgement = write_judgement(reproduction, out)
    assert judgement.failed == {}
    first, second, tiny, never, beats, wide = judgement.claims
    metrics = {
        name: json.loads((out / "lab" / "runs" / name / "seed-0" / "metrics.json").read_text())
        for name in ("tiny", "popularity")
    }
    ours = {name: content["metrics"]["uniform"] for name, content in metrics.items()}
    for claim, published in ((first, 0.5), (second, 1.0)):
        value = ours["popularity"][claim.metric]["value"]
        assert claim.ours is not None
        assert claim.ours.value == pytest.approx(value)
        assert claim.published == published
        assert claim.verdict == ("pass" if abs(value - published) <= 0.45 else "miss")
    assert second.verdict == "miss"
    assert second.missed_by == pytest.approx(1 - 0.45 - ours["popularity"]["HR@1"]["value"])
    assert tiny.notes[0].endswith("of the published epochs (a million epochs)")
    assert never.verdict == "not run"
    values = [ours[name]["NDCG@10"]["value"] for name in ("tiny", "popularity")]
    assert beats.ours is not None
    assert beats.ours.value == pytest.approx(values[0] - values[1])
    assert beats.verdict == judge(beats, beats.ours).verdict != "not run"
    assert wide.verdict == "not run"
    assert judgement.warnings == ("this is not the published data: it has 40 users instead of 41",)
    assert [point.at for point in judgement.curve] == [8]


def test_what_is_written_and_printed(custom: tuple[Reproduction, Path]) -> None:
    _, out = custom
    judge = ["reproduce", str(out.parent / "toy.toml"), "--out", str(out), "--judge-only"]
    done = CliRunner().invoke(app, judge)
    assert done.exit_code == 0, done.output
    assert CliRunner().invoke(app, [*judge, "--strict"]).exit_code == 2
    content = json.loads((out / "reproduction.json").read_text(encoding="utf-8"))
    assert content["lab"]["seeds"] == [0]
    assert content["lab"]["budget_minutes"] == 0.05
    assert content["lab"]["machine"]["cores"] >= 1
    assert content["settings"]["tiny"]["model.dim"] == 8
    assert content["claims"][1]["verdict"] == "miss"
    text = CliRunner().invoke(app, [*judge, "--markdown"]).stdout
    assert "| POP | HR@1 | 1.0000 | " in text
    assert "miss, " in text
    assert "not the published data" in text
    assert "never-run" in text
    assert "One seed: every figure" in text
    assert "One seed: every figure" in done.output
    assert CliRunner().invoke(app, [*judge, "--latex"]).stdout.startswith(r"\begin{tabular}")
    assert commands(write_report(out / "lab")) == [
        "bert4rec reproduce toy.toml --data toy --models popularity,tiny --seeds 1 --budget 0.05m "
        "--set 'ks=[1,5,10,20]'"
    ]
    assert (out / "curve.svg").read_text(encoding="utf-8").startswith("<?xml")
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert str(out) not in text + json.dumps(content)  # nothing about the machine's folders


def test_missing_seeds_are_named_and_text_is_no_markup(custom: tuple[Reproduction, Path], tmp_path: Path) -> None:
    reproduction, done = custom
    shutil.copytree(done, tmp_path / "out")
    lab = tmp_path / "out" / "lab"
    content = json.loads((lab / "lab.json").read_text())
    content["facts"]["seeds"] = [0, 1, 2]
    (lab / "lab.json").write_text(json.dumps(content))
    failed = lab / "runs" / "tiny" / "seed-2"
    failed.mkdir()
    (failed / "cost.json").write_text(json.dumps({"status": "failed", "error": "boom"}))
    cost = json.loads((lab / "runs" / "tiny" / "seed-0" / "cost.json").read_text())
    cost["cost"]["stopped_by_clock"] = True
    (lab / "runs" / "tiny" / "seed-0" / "cost.json").write_text(json.dumps(cost))
    hostile = reproduction.model_copy(update={"title": "# <b>*a*", "notes": "a|b_c_"})
    judgement = write_judgement(hostile, tmp_path / "out")
    assert judgement.failed == {"tiny": "seed 2 failed: boom"}
    popularity, _, tiny, *_ = judgement.claims
    assert tiny.notes[0] == "Tiny BERT4Rec: 1 of 3 seeds"
    assert tiny.notes[-1] == "Tiny BERT4Rec: stopped by the time limit before its learning rate had decayed"
    assert popularity.notes == ()  # deterministic: one seed is all there is
    text = to_text(judgement, "markdown")
    assert "- Tiny BERT4Rec: 1 of 3 seeds." in text
    assert "One seed:" not in text
    assert text.startswith("# \\# &lt;b&gt;\\*a\\*\n")
    assert "a\\|b\\_c\\_" in text


def test_contenders_share_the_evaluation_and_the_command_owns_seeds_and_time(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(CUSTOM.replace("model.dim=16", "evaluation.exclude_seen=false"))
    with pytest.raises(ValueError, match=r"never-run has settings of its own .*'evaluation'"):
        contenders_of(load_reproduction(str(path)))
    path.write_text(CUSTOM)
    for override in ("seed=3", "training.minutes=3"):
        with pytest.raises(ValueError, match=r"--set training\.(seed|minutes): "):
            contenders_of(load_reproduction(str(path)), (), [override])


def test_options_that_would_do_nothing_are_refused_and_strict_counts_for_figure_2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for given, name in (
        (["figure-2", "--judge-only", "--seeds", "2"], "--seeds does nothing with --judge-only"),
        (["figure-2", "--model", "x", "--budget", "2m"], "--budget does nothing with --model"),
        (["--out", "x"], "--out does nothing with no name"),
    ):
        done = CliRunner().invoke(app, ["reproduce", *given])
        assert isinstance(done.exception, ValueError)
        assert str(done.exception).startswith(name)
    monkeypatch.setattr("bert4rec.cli.reproduce_command._draw_attention", lambda *_: False)
    drawn = ["reproduce", "figure-2", "--model", "x"]
    assert CliRunner().invoke(app, drawn).exit_code == 0
    assert CliRunner().invoke(app, [*drawn, "--strict"]).exit_code == 2


def test_done_runs_are_kept_when_the_command_is_given_again(custom: tuple[Reproduction, Path]) -> None:
    reproduction, out = custom
    cost = out / "lab" / "runs" / "tiny" / "seed-0" / "cost.json"
    before = cost.stat().st_mtime_ns
    contenders = contenders_of(reproduction, ["popularity", "tiny"], ["ks=[1,5,10,20]"])
    run_lab(out / "lab", random_histories(0), contenders, TERMS, quiet())
    assert cost.stat().st_mtime_ns == before


def test_missing_data_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERT4REC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "toy.toml").write_text(CUSTOM, encoding="utf-8")
    arguments = ["reproduce", str(tmp_path / "toy.toml"), "--out", str(tmp_path / "out")]
    named = CliRunner().invoke(app, [*arguments, "--data", str(tmp_path / "no.csv")])
    assert isinstance(named.exception, ValueError | OSError)
    assert "no.csv" in str(named.exception)

    def offline(*_: object, **__: object) -> None:
        raise ValueError("no network")

    monkeypatch.setattr("bert4rec.data.public.download", offline)
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, ValueError)
    for words in ("no network", "'steam'", "--data", "Ask the authors for it."):
        assert words in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('title = "A toy"', 'titel = "A toy"', "titel"),
        ('better = "tiny"', 'better = "huge"', "'huge'"),
        ('{ "HR@1" = 0.1 }', '{ "HR@3" = 0.1 }', "HR@3"),
        ("title", "title title", "not a TOML file"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(CUSTOM.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=r"mine\.toml") as caught:
        load_reproduction(str(path))
    assert words in str(caught.value)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="table-3-ml-1m"):
        load_reproduction("table-9")
    with pytest.raises(ValueError, match="one-mask"):
        contenders_of(load_reproduction("table-3-ml-1m"), ["two-masks"])


def test_without_a_name_all_are_listed() -> None:
    done = CliRunner().invoke(app, ["reproduce"], env={"COLUMNS": "160"})
    assert done.exit_code == 0
    assert all(name in done.output for name in reproduction_names())
    assert "ml-20m (199 MB)" in done.output


def paper(max_len: int) -> BERT4RecSettings:
    return BERT4RecSettings(dim=16, heads=2, layers=2, max_len=max_len, initialization="paper", output_gain=1.0)


def test_attention_of_random_weights_is_about_uniform() -> None:
    torch.manual_seed(0)
    model = BERT4Rec(30, paper(max_len=30)).eval()
    histories = leave_one_out(random_histories(1, n_users=60)).test.histories
    longest = int(histories.lengths.max())
    maps = average_attention(model, histories, 6)
    assert maps.n_users == int((histories.lengths >= 5).sum())
    assert maps.weights.shape == (2, 2, 6, 6)
    used = histories.lengths[histories.lengths >= 5] + 1
    np.testing.assert_allclose(maps.weights, (1 / used).mean(), rtol=0.05)
    np.testing.assert_allclose(maps.to_the_left(), 0.5, atol=0.02)
    np.testing.assert_allclose(maps.to_recent(), 0.5, atol=0.02)
    whole = average_attention(model, histories, longest + 1)  # nothing is cut off
    np.testing.assert_allclose(whole.weights.sum(-1), 1, atol=1e-5)


def test_attention_maps_are_means_over_histories_aligned_at_the_mask() -> None:
    torch.manual_seed(0)
    model = BERT4Rec(30, paper(max_len=12)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()  # large weights: far from uniform
    sequences = random_histories(2, n_users=12)
    histories = leave_one_out(sequences).test.histories
    maps = average_attention(model, histories, 4)
    rows = [row for row in range(len(histories)) if histories.lengths[row] >= 3]
    cuts = [attention_weights(model, torch.tensor([histories[row].tolist()[-11:]]))[:, 0, :, -4:, -4:] for row in rows]
    np.testing.assert_allclose(maps.weights, torch.stack(cuts).mean(0).numpy(), atol=1e-6)
    assert average_attention(model, histories, 4, n_users=3).n_users == 3
    with pytest.raises(ValueError, match="max_len = 12"):
        average_attention(model, histories, 13)


def test_attention_files_and_what_is_read_out_of_them(tmp_path: Path) -> None:
    weights = np.full((2, 2, 5, 5), 0.001)
    weights[0, 0] += np.tril(np.ones((5, 5)), -1)  # attends to the past
    weights[0, 1] += np.triu(np.ones((5, 5)), 1)  # attends to the future
    weights[1, :, -1] = [0.1, 0.1, 0.3, 0.4, 0.1]
    weights[1, :, 0, 1] = 1
    maps = AttentionMaps(weights, 7)
    np.testing.assert_allclose(maps.to_the_left()[0], [1, 0], atol=0.01)
    np.testing.assert_allclose(maps.to_recent()[1], 0.7 / 0.9)
    write_maps(maps, tmp_path)
    content = json.loads((tmp_path / "attention.json").read_text(encoding="utf-8"))
    assert all(content["claims"].values())
    np.testing.assert_allclose(content["weights"], weights)
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "attention.svg").stat().st_size > 1000
    swapped = AttentionMaps(weights[::-1], 7)
    assert not all(swapped.claims().values())
