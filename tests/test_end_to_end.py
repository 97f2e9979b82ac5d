"""A newcomer's way: the demo, then the commands it suggests, in real processes."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
from served import serve

from bert4rec import __version__
from bert4rec.data import demo
from bert4rec.data.sources import open_data
from bert4rec.evaluation.result import Evaluation
from bert4rec.recommender import Recommender

COMMAND = [sys.executable, "-c", "from bert4rec.cli import main; main()"]


def bert4rec(*arguments: object, cache: Path, fails: bool = False) -> str:
    """Standard output of a command that must succeed, or standard error of one that must not."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=os.environ | {"BERT4REC_CACHE": str(cache), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=550,  # below that of a test; two processes of tests share the machine
    )
    assert "Traceback" not in done.stderr
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr if fails else done.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("runs") / "demo"
    return out, bert4rec("demo", "--out", out, cache=cache)


def test_the_demo_beats_popularity_and_the_markov_chain(demo_run: tuple[Path, str]) -> None:
    """By these factors of NDCG@10 over all items; the run is fixed by its seed."""
    out, _ = demo_run
    ours = Evaluation.load(out).value("NDCG@10")
    assert ours > 1.5 * Evaluation.load(out / "baselines" / "markov").value("NDCG@10")
    assert ours > 5 * Evaluation.load(out / "baselines" / "popularity").value("NDCG@10")
    assert ours < demo.best_possible()["NDCG@10"]


def test_the_demo_prints_metrics_recommendations_and_what_to_do_next(demo_run: tuple[Path, str]) -> None:
    out, printed = demo_run
    assert "NDCG@10" in printed
    assert "all items" in printed
    assert "100 popularity negatives" in printed
    assert len(re.findall(r"│ +\d+ +│ .+ │ +\d+\.\d% +│", printed)) == 10
    assert f"bert4rec recommend {out} --history" in printed


def test_the_commands_that_the_demo_suggests_work(demo_run: tuple[Path, str], cache: Path) -> None:
    out, printed = demo_run
    suggested = re.findall(r"^  bert4rec (.+)$", printed, re.MULTILINE)
    assert len(suggested) == 5
    answers = [bert4rec(*command.split(), cache=cache) for command in suggested[:3]]
    assert "probability" in answers[0]
    assert "influence" in answers[1]
    assert "B - A" in answers[2]
    verb, model, *options, last = suggested[3].split()
    assert (verb, model, last) == ("serve", str(out), "--open")
    with serve(out, *options) as server, server.client() as client:
        names = [each["name"] for each in client.get("/v1/model").json()["models"]]
        assert names == ["popularity", "demo", "markov"]
        assert "<title>" in client.get("/").text


def test_batch_recommendations_equal_the_librarys(demo_run: tuple[Path, str], cache: Path, tmp_path: Path) -> None:
    out, _ = demo_run
    files = [tmp_path / f"recs{suffix}" for suffix in (".parquet", ".csv", ".jsonl")]
    for file in files:
        bert4rec("recommend", out, "--users", "all", "-k", 3, "--out", file, cache=cache)
    rows = [
        duckdb.sql(f"SELECT user, rank, item, title FROM '{file}' ORDER BY user, rank").fetchall() for file in files
    ]
    assert rows[0] == rows[1] == rows[2]
    assert len(rows[0]) == 3 * 3000
    recommender = Recommender.load(out)
    sequences = open_data(demo.write_csv(tmp_path)[0], out=tmp_path / "prepared")
    history = [sequences.vocabulary.raw(token) for token in sequences[5].tolist()]
    expected = [each.item for each in recommender.recommend(history, k=3)]
    user = sequences.user_ids[5]
    assert [row[2] for row in rows[0] if row[0] == user] == expected


def test_users_from_a_table_may_be_strangers_with_unknown_items(
    demo_run: tuple[Path, str], cache: Path, tmp_path: Path
) -> None:
    out, _ = demo_run
    table, recs = tmp_path / "visitors.csv", tmp_path / "recs.jsonl"
    table.write_text("user,item,time\nnew,m0001,2\nnew,m0002,1\nlost,nothing-known,1\n")
    bert4rec("recommend", out, "--users", table, "-k", 4, "--out", recs, cache=cache)
    rows = [json.loads(line) for line in recs.read_text().splitlines()]
    recommender = Recommender.load(out)
    expected = [each.item for each in recommender.recommend(["m0002", "m0001"], k=4)]
    assert [row["item"] for row in rows if row["user"] == "new"] == expected
    assert all(row["is_fallback"] for row in rows if row["user"] == "lost")
    assert len(rows) == 8


def test_evaluating_again_gives_the_saved_numbers(demo_run: tuple[Path, str], cache: Path, tmp_path: Path) -> None:
    out, _ = demo_run
    bert4rec("evaluate", out, "--out", tmp_path / "again", cache=cache)
    assert Evaluation.load(tmp_path / "again").metrics == Evaluation.load(out).metrics


def test_evaluating_into_the_models_own_directory_keeps_it_loadable(
    demo_run: tuple[Path, str], cache: Path, tmp_path: Path
) -> None:
    model = tmp_path / "copy"
    shutil.copytree(demo_run[0], model)
    setting = ("--set", "evaluation.ks=[3]", "--set", "evaluation.exclude_seen=false")
    bert4rec("evaluate", model, "--out", model, "--on", "validation", *setting, cache=cache)
    assert Evaluation.load(model).value("HR@3") > 0
    Recommender.load(model)
    error = bert4rec("evaluate", model, "--set", "model.dim=32", cache=cache, fails=True)
    assert "only settings of the section" in error


def test_ctrl_c_saves_and_says_how_to_go_on(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    words = ["train", "demo", "--recipe", "demo", "--out", str(out), "--set", "stages.0.epochs=1"]
    words += ["--set", "stages.1.epochs=0", "--threads", "1"]
    environment = os.environ | {"BERT4REC_CACHE": str(cache), "COLUMNS": "300"}
    with subprocess.Popen([*COMMAND, *words], env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("training on"):
                process.send_signal(signal.SIGINT)
                break
        said = process.stderr.read()
    assert process.returncode == 130
    assert "To resume" in said
    suggested = said.strip().splitlines()[-1].split("bert4rec ", 1)[1]
    assert suggested.endswith("--resume")
    assert "NDCG@10" in bert4rec(*shlex.split(suggested), cache=cache)


def test_the_data_commands(cache: Path, tmp_path: Path) -> None:
    table, items = demo.write_csv(tmp_path / "files")
    prepared = tmp_path / "prepared"
    bert4rec("data", "prepare", table, "--items", items, "--out", prepared, cache=cache)
    checks = json.loads(bert4rec("data", "audit", prepared, "--json", cache=cache))
    assert checks
    assert "training after the test time" in bert4rec("data", "audit", table, cache=cache)
    listed = bert4rec("data", "list", cache=cache)
    assert all(name in listed for name in ("demo", "ml-100k", "ml-1m", "ml-20m", "beauty", "steam"))
    assert bert4rec("--version", cache=cache) == f"bert4rec {__version__}\n"
    assert "stages.1.bidirectional_prefix" in bert4rec("settings", cache=cache)
    recipes = bert4rec("recipes", cache=cache)
    assert "paper-beauty" in recipes
    assert "mask_ratio = 0.6" in bert4rec("recipes", "paper-beauty", cache=cache)
    words = ["train", prepared, "--out", tmp_path / "model", "--set", "data.k_core=5"]
    assert "filters cannot be changed" in bert4rec(*words, cache=cache, fails=True)


def test_training_on_a_table_of_ones_own(cache: Path, tmp_path: Path) -> None:
    """String ids of any script, ISO dates, a title table, filters, a global-time split."""
    lines = ["Customer ID;sku;date"]
    for user in range(40):
        for step in range(8):
            day = (user % 20) + step + 1
            lines.append(f"клиент {user};商品-{(user + step) % 12};2024-01-{day:02d}T10:00:00Z")
    (tmp_path / "shop.csv").write_text("\n".join(lines), encoding="utf-8")
    titles = "sku,title\n" + "".join(f"商品-{i},Ware № {i} [b]\n" for i in range(12))
    (tmp_path / "wares.csv").write_text(titles, encoding="utf-8")
    small = ["dim=16", "stages.0.epochs=2", "stages.1.epochs=1", "data.split=global-time"]
    options = [word for setting in small for word in ("--set", setting)]
    out = tmp_path / "model"
    printed = bert4rec(
        "train",
        tmp_path / "shop.csv",
        *("--user", "Customer ID", "--items", tmp_path / "wares.csv", "--out", out),
        *options,
        cache=cache,
    )
    assert "NDCG@10" in printed
    answer = bert4rec("recommend", out, "--history", "商品-3,商品-4", "-k", 2, cache=cache)
    assert "Ware №" in answer
    assert "[b]" in answer  # a title is text, not markup


BAD = {
    "missing file": (["train", "nowhere.csv"], "nowhere.csv"),
    "missing column": (["train", "{folder}/odd.csv"], "--item"),
    "empty file": (["train", "{folder}/empty.csv"], "empty"),
    "bad time": (["train", "{folder}/bad_time.csv"], "--on-bad-rows skip"),
    "unknown setting": (["train", "demo", "--set", "stages.0.epoch=1"], "did you mean 'epochs'"),
    "unknown recipe": (["train", "demo", "--recipe", "paper-ml1m"], "did you mean 'paper-ml-1m'"),
    "no model": (["recommend", "{folder}/none", "--history", "a"], "train a model there first"),
    "for whom": (["recommend", "{folder}"], "--history"),
    "unknown data set": (["data", "get", "ml-1"], "did you mean"),
    "runs without results": (["compare", "{folder}", "{folder}"], "metrics.json is missing"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_mistakes_get_one_clear_error(case: str, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.csv").write_text("user,thing\n1,2\n")
    (tmp_path / "empty.csv").write_text("")
    rows = "".join(f"{u},{i},{i}\n" for u in range(5) for i in range(5))
    (tmp_path / "bad_time.csv").write_text("user,item,time\n" + rows + "1,2,soon\n")
    arguments, words = BAD[case]
    before = sorted(tmp_path.iterdir())
    error = bert4rec(*(argument.format(folder=tmp_path) for argument in arguments), cache=cache, fails=True)
    assert words in " ".join(error.split())
    assert sorted(tmp_path.iterdir()) == before  # nothing half-written
