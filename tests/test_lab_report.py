"""A lab's report says what the runs say: checked by hand, in every format, and in a browser."""

import base64
import csv
import json
import math
import re
import shutil
import subprocess
from dataclasses import asdict, replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import TypeAdapter
from rich.console import Console

from bert4rec.evaluation.report import figure
from bert4rec.evaluation.result import Evaluation
from bert4rec.evaluation.text_tables import TextTable
from bert4rec.lab.charts import coloured
from bert4rec.lab.collect import collect, differences_to, holm, means_by_bin, quantile_bins
from bert4rec.lab.lab_report import columns, render, terminal_table, to_csv, to_html, to_text, write_report
from bert4rec.lab.lab_result import REPORTED, LabResult, RunCost, UserBin
from bert4rec.lab.report_text import commands, row_notes

N_USERS = 400
HOSTILE = "<script>alert(1)</script>|$x_{\\frac$ [b]`*"
# name -> (title, typical rank, seconds of training); ranks are geometric around it
MODELS = {
    "popularity": ("POP", 80.0, 0.02),
    "markov": ("Markov chain", 30.0, 0.5),
    "sasrec": ("SASRec", 20.0, 300.0),
    "sasrec+": ("SASRec+", 9.0, 600.0),
    "bert4rec": ("BERT4Rec", 11.0, 1200.0),
    "mine": (HOSTILE, 25.0, 60.0),
}
SEEDS = (0, 1)
COUNTED = ("popularity", "markov")


def some_ranks(typical: float, seed: int, n: int = N_USERS) -> NDArray[np.int64]:
    return np.random.default_rng(seed).geometric(1 / typical, n).astype(np.int64)


def save_run(
    lab: Path,
    name: str,
    seed: int,
    ranks: NDArray[np.int64],
    *,
    title: str | None = None,
    seconds: float = 60.0,
    budget: float = 20.0,
    targets: NDArray[np.int64] | None = None,
    exclude_seen: bool = True,
    stopped_by_clock: bool = False,
) -> Path:
    """A run as the lab leaves it, with users in a shuffled order."""
    run = lab / "runs" / name / f"seed-{seed}"
    n = len(ranks)
    users = np.random.default_rng(seed).permutation(n)
    sampled = np.maximum(1, ranks // 4)
    evaluation = Evaluation(
        users=users,
        targets=((np.arange(n) * 7) % 50 if targets is None else targets)[users],
        history_lengths=(2 + np.arange(n) % 40)[users],
        target_counts=((np.arange(n) ** 2) % 300)[users],
        ranks={p: r[users] for p, r in (("full", ranks), ("popularity", sampled), ("uniform", sampled))},
        metrics={p: {"NDCG@10": {"value": 0.0, "low": 0.25, "high": 0.75}} for p in ("full", "popularity", "uniform")},
        extras={"n_items": 50, "settings": {"exclude_seen": exclude_seen, "n_negatives": 100, "seed": 0}},
    )
    ids = [f"person-{i}" for i in range(n)]
    evaluation.save(run, user_ids=ids, item_ids=[f"secret-{i}" for i in range(50)])
    (run / "config.json").write_text(json.dumps({"model": {"name": name}}))
    if name not in COUNTED:
        quality = float((1 / np.log2(ranks[ranks <= 10] + 1)).sum() / n)
        events = [
            {"stage": "cloze", "epoch": e, "step": e * 9, "loss": 5 / e, "learning_rate": 0.001}
            | {"ndcg@10": quality * (1 - 0.7**e), "hr@10": 0.2, "seconds": seconds * e / 8}
            | {"sequences_per_second": 100.0}
            for e in range(1, 9)
        ]
        lines = [json.dumps(event) for event in [*events, {"note": "not a validation"}]]
        (run / "log.jsonl").write_text("\n".join(lines) + "\n")
    is_counted = name in COUNTED
    cost = RunCost(
        training_seconds=seconds,
        epochs=None if is_counted else 8 + seed,
        budget_minutes=budget,
        n_parameters=None if is_counted else 1_234_567,
        peak_memory_mb=512.0,
        scoring_users_per_second=4321.0,
        stopped_by_clock=stopped_by_clock,
    )
    settings = {"model.dim": 64, "training.seed": seed}
    content = {"status": "done", "settings": settings, "cost": asdict(cost)}
    (run / "cost.json").write_text(json.dumps(content))
    plan = {"title": name if title is None else title, "budget_minutes": budget}
    plan |= {"source": f"{name}.toml" if name == "mine" else name, "overrides": ["data.k_core=5"]}
    (run.parent / "plan.json").write_text(json.dumps(plan))
    return run


def save_lab(lab: Path, models: list[str], seeds: tuple[int, ...] = SEEDS, **known: Any) -> None:
    lab.mkdir(parents=True, exist_ok=True)
    data = {"name": "toy", "n_users": N_USERS, "n_items": 50, "n_interactions": 9000}
    facts = {
        "settings": {"data.k_core": 5},
        "split": "leave-one-out",
        "models": models,
        "seeds": seeds,
        "budget_minutes": 20.0,
        "machine": {"cpu": "a chip", "cores": 2, "memory_gb": 8.0},
        "versions": {"bert4rec": "0.1.0", "torch": "2.13.0", "python": "3.12"},
        "created": "2026-01-02T03:04:05+00:00",
    }
    content = {
        "format_version": 2,
        "data": data | {"fingerprint": "abc123", "directory": "/home/someone/data"},
        "facts": facts | known,
    }
    (lab / "lab.json").write_text(json.dumps(content))


def fake_lab(lab: Path) -> Path:
    """Six models with two seeds (counted ones have one), one that failed, one not finished."""
    save_lab(lab, [*MODELS, "narm", "caser"])
    for place, (name, (title, typical, seconds)) in enumerate(MODELS.items()):
        for seed in SEEDS[:1] if name in COUNTED else SEEDS:
            budget = {"bert4rec": 60.0, "markov": 5.0}.get(name, 20.0)
            ranks = some_ranks(typical, 10 * place + seed)
            save_run(lab, name, seed, ranks, title=title, seconds=seconds, budget=budget)
    failed = {"status": "failed", "error": "out of <memory>"}
    (lab / "runs" / "narm" / "seed-0").mkdir(parents=True)
    (lab / "runs" / "narm" / "seed-0" / "cost.json").write_text(json.dumps(failed))
    (lab / "runs" / "caser" / "seed-0").mkdir(parents=True)
    for name, title in (("narm", "NARM"), ("caser", "Caser")):
        plan = {"title": title, "source": name, "overrides": ["data.k_core=5"]}
        (lab / "runs" / name / "plan.json").write_text(json.dumps(plan))
    return lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = fake_lab(tmp_path_factory.mktemp("lab"))
    write_report(directory)
    return directory


@pytest.fixture(scope="module")
def result(lab: Path) -> LabResult:
    return TypeAdapter(LabResult).validate_json((lab / "report.json").read_text(encoding="utf-8"))


def ndcg(ranks: NDArray[np.int64], k: int) -> NDArray[np.float64]:
    return np.array([1 / math.log2(r + 1) if 1 <= r <= k else 0.0 for r in ranks.tolist()])


def test_figures_are_users_means_over_seeds(result: LabResult) -> None:
    a, b = some_ranks(9.0, 30), some_ranks(9.0, 31)
    model = next(m for m in result.models if m.name == "sasrec+")
    values = (ndcg(a, 10) + ndcg(b, 10)) / 2
    score = model.figures["full"]["NDCG@10"]
    assert score.value == pytest.approx(values.mean())
    # The interval of a mean of users: about two standard errors to each side.
    error = values.std() / math.sqrt(N_USERS)
    assert score.low == pytest.approx(values.mean() - 1.96 * error, abs=0.1 * error)
    assert score.high == pytest.approx(values.mean() + 1.96 * error, abs=0.1 * error)
    of_seeds = sorted([ndcg(a, 10).mean(), ndcg(b, 10).mean()])
    assert model.seed_range("NDCG@10") == pytest.approx(tuple(of_seeds))
    assert model.figures["full"]["HR@5"].value == pytest.approx(((a <= 5).mean() + (b <= 5).mean()) / 2)
    assert model.figures["uniform"]["MRR"].value == pytest.approx(
        ((1 / np.maximum(1, a // 4)).mean() + (1 / np.maximum(1, b // 4)).mean()) / 2
    )
    assert model.hit_rates[6] == pytest.approx(((a <= 7).mean() + (b <= 7).mean()) / 2)
    assert len(model.hit_rates) == 50
    assert [set(table) for table in model.figures.values()] == [set(REPORTED)] * 3
    assert model.mean_cost("epochs") == 8.5
    assert [len(curve) for curve in model.curves] == [8, 8]
    assert model.curves[0][-1].minutes == pytest.approx(10)
    assert model.settings == {"model.dim": 64}


def test_bins_hold_every_user_once_and_are_the_same_for_all(result: LabResult) -> None:
    lengths = 2 + np.arange(N_USERS) % 40
    for bins in result.bins.values():
        assert len(bins) == 5
        assert sum(each.n_users for each in bins) == N_USERS
    first, model = result.bins["history"][0], result.models[-1]
    assert model.name == "popularity"
    inside = (lengths >= first.low) & (lengths <= first.high)
    assert first.n_users == inside.sum()
    assert model.by_bin["history"][0] == pytest.approx(ndcg(some_ranks(80.0, 0), 10)[inside].mean())


def test_quantile_bins_by_hand() -> None:
    assert quantile_bins(np.array([3, 3, 3, 3, 3, 3, 3, 9, 9, 10])) == (
        UserBin(3, 3, 7),
        UserBin(4, 9, 2),
        UserBin(10, 10, 1),
    )
    assert quantile_bins(np.array([4, 4])) == (UserBin(4, 4, 2),)
    values = means_by_bin(np.array([1.0, 0.0, 0.5]), np.array([1, 1, 8]), (UserBin(1, 1, 2), UserBin(2, 8, 1)))
    assert values == (0.5, 0.5)


def test_models_are_sorted_and_compared_with_the_best(result: LabResult) -> None:
    scores = [model.score.value for model in result.models]
    assert scores == sorted(scores, reverse=True)
    best = result.models[0]
    assert best.name == "sasrec+"
    assert best.differences == {}
    for metric in ("NDCG@10", "HR@10"):
        raw = [model.differences[metric].p_value for model in result.models[1:]]
        assert [m.differences[metric].holm_p for m in result.models[1:]] == holm(raw)
        for model in result.models[1:]:
            found = model.differences[metric]
            assert found.value == pytest.approx(
                model.figures["full"][metric].value - best.figures["full"][metric].value
            )
            assert found.low <= found.value <= found.high


def test_holm_by_hand() -> None:
    # Sorted: .01 x 4 = .04; .02 x 3 = .06; .03 x 2 = .06; .5 x 1 = .5
    assert holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx([0.06, 0.04, 0.5, 0.06])
    # .03 x 2 = .06, and .04 x 1 may not come out below it.
    assert holm([0.04, 0.03]) == pytest.approx([0.06, 0.06])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([0.2]) == [0.2]
    assert holm([]) == []


def test_equal_models_are_not_told_apart_and_unequal_ones_are() -> None:
    good = ndcg(some_ranks(5.0, 1), 10)
    differences = differences_to("best", {"best": good, "same": good, "worse": 0.2 * good}, n_resamples=500)
    assert set(differences) == {"same", "worse"}
    same, worse = differences["same"], differences["worse"]
    assert (same.value, same.low, same.high, same.p_value, same.holm_p) == (0, 0, 0, 1, 1)
    assert worse.high is not None
    assert worse.high < 0
    assert worse.p_value == pytest.approx(2 / 501)
    assert worse.holm_p == pytest.approx(4 / 501)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"targets": np.arange(N_USERS) % 50}, "different targets"),
        ({"ranks": some_ranks(9.0, 1, N_USERS - 1)}, "different users"),
        ({"exclude_seen": False}, "exclude_seen is True in"),
    ],
)
def test_runs_on_different_held_out_items_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    save_lab(tmp_path, ["a", "b"], (0,))
    save_run(tmp_path, "a", 0, some_ranks(9.0, 1))
    save_run(tmp_path, "b", 0, **({"ranks": some_ranks(9.0, 1)} | changed))
    with pytest.raises(ValueError, match=message):
        collect(tmp_path, n_resamples=10)


def test_failed_unreadable_and_unfinished_runs_are_shown(lab: Path, result: LabResult) -> None:
    assert [(run.name, run.seed, run.error) for run in result.failed] == [("narm", 0, "out of <memory>")]
    unfinished = {(run.title, run.seed) for run in result.unfinished}
    # Counted models need no second seed.
    assert unfinished == {("NARM", 1), ("Caser", 0), ("Caser", 1)}
    page = (lab / "report.html").read_text(encoding="utf-8")
    assert "out of &lt;memory&gt;" in page
    assert "Caser" in page


def test_one_unreadable_run_does_not_hide_the_others(tmp_path: Path) -> None:
    save_lab(tmp_path, ["a", "b"], (0,))
    save_run(tmp_path, "a", 0, some_ranks(9.0, 1))
    (save_run(tmp_path, "b", 0, some_ranks(9.0, 1)) / "per_user.parquet").write_bytes(b"nonsense")
    found = collect(tmp_path, n_resamples=10)
    assert [model.name for model in found.models] == ["a"]
    assert "cannot be read" in (found.failed[0].error or "")
    assert str(tmp_path) not in found.to_json()


def test_a_lab_without_results_still_has_a_report(tmp_path: Path) -> None:
    save_lab(tmp_path, ["sasrec"], (0,))
    found = write_report(tmp_path)
    assert (found.models, len(found.unfinished)) == ((), 1)
    assert "No run is finished" in (tmp_path / "report.html").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"lab\.json is missing"):
        collect(tmp_path / "elsewhere")


def test_json_round_trip_renders_the_same_report(lab: Path, result: LabResult, tmp_path: Path) -> None:
    assert TypeAdapter(LabResult).validate_json(result.to_json()) == result
    render(result, tmp_path / "docs")
    for name in ("report.json", "report.csv", "report.html"):
        assert (tmp_path / "docs" / name).read_bytes() == (lab / name).read_bytes(), name
    newer = json.loads(result.to_json()) | {"format_version": 3}
    with pytest.raises(ValueError, match="format_version"):
        TypeAdapter(LabResult).validate_json(json.dumps(newer))


def test_reports_hold_nothing_about_single_users_items_or_machines(lab: Path) -> None:
    for name in ("report.json", "report.csv", "report.html"):
        text = (lab / name).read_text(encoding="utf-8")
        for private in ("person-", "secret-", "/home/someone", str(lab)):
            assert private not in text, name

    def longest(value: Any) -> int:
        if isinstance(value, dict):
            return max(map(longest, value.values()), default=0)
        return max([len(value), *map(longest, value)]) if isinstance(value, list) else 0

    # No list in it is long enough to have a number for each user.
    assert longest(json.loads((lab / "report.json").read_text(encoding="utf-8"))) <= 50


def cautions(result: LabResult) -> list[str]:
    """The sentences under "Cautions" on the page."""
    section = to_html(result).split("<h2>Cautions</h2>")[1].split("</ul>")[0]
    return [" ".join("".join(Page(line).text).split()) for line in section.split("<li>")[1:]]


def test_another_budget_is_said_in_the_row_and_in_the_commands(result: LabResult) -> None:
    for model, cell in zip(result.models, columns(result)[0].cells, strict=True):
        assert ("budget 60 min instead of 20 min" in cell.detail) == (model.name == "bert4rec")
    usual, longer, own = commands(result)
    assert longer == ("bert4rec lab toy --models bert4rec --seeds 2 --budget 60m --set data.k_core=5")
    # Markov has no epochs: the budget that it was run with means nothing.
    assert "--models popularity,markov,sasrec,sasrec+,mine.toml,narm,caser --seeds 2" in usual
    assert "--budget 20m" in usual
    assert own.startswith("# ")
    assert own.endswith(": mine.toml")
    about = [line for line in cautions(result) if "budget" in line]
    assert len(about) == 1
    assert "from 20 min to 60 min" in about[0]
    assert "not a fair comparison" in about[0]


def test_commands_are_what_was_typed(tmp_path: Path) -> None:
    save_lab(tmp_path, ["bert4rec", "mine"], (0,))
    for name, source in (("bert4rec", "bert4rec"), ("mine", "/home/someone/my models/mine.toml")):
        save_run(tmp_path, name, 0, some_ranks(9.0, 1))
        plan = {"source": source, "overrides": ["model.dim=8", "k_core=5"], "budget_minutes": 20}
        (tmp_path / "runs" / name / "plan.json").write_text(json.dumps(plan))
    typed = "--models bert4rec,mine.toml --seeds 1 --budget 20m --set model.dim=8 --set k_core=5"
    found = collect(tmp_path, n_resamples=10)
    assert commands(found)[0] == f"bert4rec lab toy {typed}"
    assert "someone" not in found.to_json()
    save_lab(tmp_path, ["bert4rec", "mine"], (0,), reproduction="table-9")
    assert commands(collect(tmp_path, n_resamples=10)) == [
        f"bert4rec reproduce table-9 --data toy {typed.replace('mine.toml', 'mine')}"
    ]


def test_models_that_tie_have_one_best_of_them(tmp_path: Path) -> None:
    """The same ranks in another order have means that differ by how they are summed up."""
    names = ["f", "e", "d", "c", "b", "a"]
    save_lab(tmp_path, names, (0,))
    for seed, name in enumerate(names):
        shuffled = np.random.default_rng(seed).permutation(some_ranks(9.0, 2))
        save_run(tmp_path, name, 0, shuffled)
    best, *others = collect(tmp_path, n_resamples=20).models
    assert best.differences == {}
    assert all(set(model.differences) == {"NDCG@10", "HR@10"} for model in others)


def test_no_path_of_this_machine_reaches_a_report(tmp_path: Path) -> None:
    save_lab(tmp_path, ["a"], (0,))
    save_run(tmp_path, "a", 0, some_ranks(9.0, 1))
    error = "cannot read '/var/cache/mia/ml-1m/items.parquet': see https://example.org/a/b or:/x/y"
    failed = {"status": "failed", "error": error}
    (tmp_path / "runs" / "a" / "seed-0" / "cost.json").write_text(json.dumps(failed))
    found = collect(tmp_path, n_resamples=10).failed[0].error
    assert found == "cannot read '…/items.parquet': see https://example.org/a/b or:…/y"


def test_single_trainings_and_those_that_the_clock_stopped_are_named(tmp_path: Path, result: LabResult) -> None:
    save_lab(tmp_path, ["a", "b"], (0,))
    save_run(tmp_path, "a", 0, some_ranks(9.0, 1), stopped_by_clock=True)
    save_run(tmp_path, "b", 0, some_ranks(9.0, 2), stopped_by_clock=False)
    found = collect(tmp_path, n_resamples=10)
    notes = {model.name: row_notes(found, model) for model in found.models}
    assert notes == {"a": ["stopped by the time limit before its learning rate had decayed"], "b": []}
    assert any("single trainings" in line for line in cautions(found))
    assert not any("single trainings" in line for line in cautions(result))


def test_csv_is_long_and_complete(result: LabResult) -> None:
    lines = list(csv.DictReader(StringIO(to_csv(result))))
    n_lines = 4 * 3 + 2 * 2  # a mean and two seeds, or a mean and one
    assert len(lines) == n_lines * 3 * len(REPORTED)
    by_key = {(x["model"], x["seed"], x["protocol"], x["metric"]): x for x in lines}
    mean = by_key["sasrec", "mean", "full", "NDCG@10"]
    one = by_key["sasrec", "1", "full", "NDCG@10"]
    values = [ndcg(some_ranks(20.0, 20 + seed), 10).mean() for seed in SEEDS]
    assert float(mean["value"]) == pytest.approx(sum(values) / 2)
    assert float(one["value"]) == pytest.approx(values[1])
    assert (one["low"], one["high"]) == ("0.25", "0.75")  # as its own evaluation saved them
    assert by_key["sasrec", "1", "full", "HR@1"]["low"] == ""


def test_every_format_shows_the_models_best_first(result: LabResult) -> None:
    console = Console(file=StringIO(), width=200)
    console.print(terminal_table(result, width=200))
    assert isinstance(console.file, StringIO)
    terminal = console.file.getvalue()
    markdown, latex = to_text(result, "markdown"), to_text(result, "latex")
    for text in (terminal, markdown, latex):
        places = [text.index(title) for title in ("SASRec+", "BERT4Rec", "Markov chain", "POP")]
        assert places == sorted(places)
        for model in result.models:
            assert figure(model.score.value) in text
    assert HOSTILE in terminal
    assert "users/s" in terminal
    assert "<script>" not in markdown
    table = [line for line in markdown.splitlines() if line.startswith("|")]
    n_cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table[: 2 + len(result.models)]}
    assert len(n_cells) == 1  # the hostile "|" opened no cell
    rows_of_latex = latex.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert len(rows_of_latex) == len(result.models)
    assert {len(re.findall(r"(?<!\\)&", line)) for line in rows_of_latex} == {len(columns(result)) - 1}


def test_text_tables_escape_what_their_format_would_read() -> None:
    table = TextTable(("a_b", "n"), [("50 % & $x", "-.5\n.1–.2"), ("a|b\t<i>", "2")])
    assert table.to_markdown() == (
        "| a\\_b | n |\n| --- | ---: |\n| 50 % &amp; \\$x | -.5 (.1–.2) |\n| a\\|b &lt;i&gt; | 2 |\n"
    )
    assert r"a\_b & n \\" in table.to_latex()
    assert r"50 \% \& \$x & $-$.5 (.1--.2) \\" in table.to_latex()
    assert r"a|b \textless{}i\textgreater{} & 2 \\" in table.to_latex()


def test_a_narrow_terminal_gets_fewer_columns_and_says_so(result: LabResult) -> None:
    console = Console(file=StringIO(), width=80)
    console.print(terminal_table(result, width=80))
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "NDCG@10" in text
    assert "Too wide to show here: seeds" in text
    for model in result.models:
        assert figure(model.score.value) in text  # neither cut nor folded


class Page(HTMLParser):
    """Tags, attributes that load something, and what a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "srcset", "href", "xlink:href", "data", "action", "poster"):
                self.loaded.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_loads_nothing_and_shows_hostile_titles_as_text(lab: Path) -> None:
    source = (lab / "report.html").read_text(encoding="utf-8")
    page = Page(source)
    assert all(target.startswith(("#", "data:")) for target in page.loaded)
    assert not re.search(r"@import|url\((?!#)", source)
    assert page.tags.count("script") == 1
    assert page.tags.count("img") == 6
    assert len(page.ids) == len(set(page.ids))
    assert any(HOSTILE in text for text in page.text)


def test_every_chart_explains_itself(lab: Path) -> None:
    source = (lab / "report.html").read_text(encoding="utf-8")
    parts = source.split("<figure")[1:]
    assert len(parts) == 6
    for part in parts:
        assert re.search(r"<h3>\S.*</h3>\n<figcaption>[A-Z][^<]*\.</figcaption>", part)
        assert re.search(r'<img [^>]*alt="[^"]{40,}"', part)
        code = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', part)
        assert code is not None
        # What the two axes are: "… in minutes", "NDCG@10 …", "k, the length of the list".
        svg = base64.b64decode(code[1]).decode("utf-8")
        texts = re.findall(r"<text[^>]*>([^<]+)</text>", svg)
        assert [text for text in texts if re.search(r"NDCG@10|HR@k", text)], texts
        assert [text for text in texts if re.search("minutes|items|length|training", text)], texts
        assert "mathdefault" not in svg  # TeX, which nobody renders
        assert "<script" not in svg


def test_the_best_and_popularity_have_a_colour_whatever_the_number_of_models(result: LabResult) -> None:
    assert set(coloured(result)) == set(MODELS)
    best, *others, popularity = result.models
    many = [replace(others[0], name=f"model {i}") for i in range(18)]
    chosen = coloured(replace(result, models=(best, *many, popularity)))
    assert list(chosen.values()) == list(range(8))
    assert next(iter(chosen)) == best.name
    assert [*chosen][-1] == "popularity"


def chromium(*arguments: str) -> subprocess.CompletedProcess[str]:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser: neither chromium nor google-chrome is installed")
    fixed = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
    return subprocess.run([browser, *fixed, *arguments], capture_output=True, text=True, timeout=120, check=True)


def test_a_browser_opens_the_page_and_sorts_the_table(lab: Path, tmp_path: Path) -> None:
    """The page's own script runs under its strict policy; a click sorts by training time."""
    source = (lab / "report.html").read_text(encoding="utf-8")
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    shot = tmp_path / "report.png"
    page = (lab / "report.html").as_uri()
    dom = chromium(profile, f"--screenshot={shot}", "--window-size=1366,900", "--dump-dom", page).stdout
    assert shot.read_bytes().startswith(b"\x89PNG")
    assert shot.stat().st_size > 20_000  # an empty page is far smaller
    assert order(dom) == ["SASRec+", "BERT4Rec", "SASRec", HOSTILE, "Markov chain", "POP"]
    assert '<button type="button">training</button>' in dom  # the script ran

    click = "[...table.tHead.rows[0].cells].find(c => c.innerText == 'training').firstChild.click()"
    clicked = re.sub(r"script-src 'sha256-[^']*'", "script-src 'unsafe-inline'", source)
    (tmp_path / "clicked.html").write_text(clicked.replace("</script>", click + "\n</script>"))
    dom = chromium(profile, "--dump-dom", (tmp_path / "clicked.html").as_uri()).stdout
    assert order(dom) == ["BERT4Rec", "SASRec+", "SASRec", HOSTILE, "Markov chain", "POP"]


def order(dom: str) -> list[str]:
    """Titles of the first table, from top to bottom."""
    body = dom.split("<tbody>", 1)[1].split("</tbody>", 1)[0]
    return [
        "".join(Page(row).text).split("\n")[1].removesuffix("budget 60 min instead of 20 min")
        for row in body.split("<tr>")[1:]
    ]


def test_an_empty_page_needs_no_numbers(result: LabResult) -> None:
    assert "No run is finished" in to_html(replace(result, models=(), protocols=(), n_users=0))
