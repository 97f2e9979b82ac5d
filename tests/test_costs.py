"""The cost model: near what was measured, growing with what it should grow with, and helpful."""

import json
import math
import re
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import typer
from typer.testing import CliRunner

import bert4rec.cli
from bert4rec.cli import plan
from bert4rec.config import Config, load_config
from bert4rec.costs.advice import Advice, advise, as_dict
from bert4rec.costs.assumptions import assumptions
from bert4rec.costs.commands import commands
from bert4rec.costs.machines import Machine, exchange_seconds, layout_of, sent_bytes
from bert4rec.costs.memory import disk_seconds, training_bytes
from bert4rec.costs.model import measured_costs
from bert4rec.costs.words import count, duration, size
from bert4rec.costs.work import Step, step_of, work_of_step
from bert4rec.costs.workload import Workload, workload_of
from bert4rec.training.plan import plan_memory

SCALE = Path(__file__).resolve().parents[1] / "benchmarks" / "scale"
COSTS = measured_costs()
STEP = Step("bert4rec", 64, 2, 256, 50, 2560, 10_000, "cross-entropy", 1024, 2)
PLAN = {"users": 200_000, "items": 10_000, "length": 50.0}


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCALE))


def config(*overrides: str) -> Config:
    return load_config(overrides=["training.epochs=10", "second_stage.epochs=3", *overrides])


def advice(machine: Machine | None = None, **numbers: float) -> Advice:
    return advise(COSTS, workload_of(**numbers), config(), machine or Machine())  # type: ignore[arg-type]


# Measurements


def test_constants_are_what_the_points_say() -> None:
    import costs

    constants, errors = costs.fit([dict(point) for point in COSTS.points])
    assert errors == COSTS.errors
    for kind, values in constants.items():
        assert values == COSTS.constants[kind]


def test_the_model_is_as_near_to_its_points_as_it_says() -> None:
    import cost_points

    points = [p for p in COSTS.points if p["kind"] == "training" and "seconds" in p]
    assert len(points) > len(COSTS.constants["training"])
    errors = []
    for point in points:
        settings = load_config(overrides=cost_points.settings_of(point))
        step = step_of(settings, point["items"], point["batch"], point["length"], 2)
        errors.append(abs(COSTS.step_seconds(step) / point["seconds"] - 1))
    assert median(errors) <= COSTS.errors["training"]["typical"] + 0.001
    assert max(errors) <= COSTS.errors["training"]["worst"] + 0.001


def test_every_constant_is_a_cost() -> None:
    for kind, values in COSTS.constants.items():
        assert all(value >= 0 for value in values.values()), kind
        assert any(value > 0 for value in values.values()), kind


# Laws of a step


@pytest.mark.parametrize("name", ["items", "dim", "layers", "asked"])
def test_more_is_never_cheaper(name: str) -> None:
    times = [
        COSTS.step_seconds(replace(STEP, **{name: factor * getattr(STEP, name)}))
        for factor in (1, 2, 4, 16, 64)
    ]
    assert times == sorted(times)
    assert times[-1] > times[0]


def test_the_full_softmax_grows_with_the_catalogue_and_a_sampled_one_hardly() -> None:
    def seconds(loss: str, items: int) -> float:
        return COSTS.step_seconds(replace(STEP, loss=loss, items=items))

    assert seconds("cross-entropy", 10**6) > 20 * seconds("cross-entropy", 10**4)
    assert seconds("sampled-softmax", 10**6) < 4 * seconds("sampled-softmax", 10**5)
    assert seconds("sampled-softmax", 10**6) < seconds("cross-entropy", 10**6) / 10


def test_products_of_a_step_worked_by_hand() -> None:
    # One full block of 12 D² at 4 positions; of the last 2 D² there, 11 D² where it is asked.
    step = Step("bert4rec", 8, 2, 2, 2, 1, 100, "cross-entropy", 0, 1)
    work = work_of_step(step)
    assert work["products"] * 1e9 == pytest.approx(64 * (4 * 12 + 4 * 2 + 1 * 11))
    assert work["softmax products"] * 1e9 == pytest.approx(3 * 1 * 100 * 8)
    assert work["softmax exponentials"] * 1e9 == pytest.approx(100)


@pytest.mark.parametrize(
    ("rows", "workers", "busiest"),
    [(20, 1, 1.0), (20, 8, 1.0), (80, 2, 0.5), (120, 2, 2 / 3), (100, 2, 0.6), (80, 8, 0.5)],
)
def test_the_busiest_worker_worked_by_hand(rows: int, workers: int, busiest: float) -> None:
    """Histories of 50 come 40 to a piece."""
    assert replace(STEP, rows=rows, workers=workers).busiest == pytest.approx(busiest)


def test_one_process_sends_nothing_and_a_table_of_rows_less_than_a_dense_one() -> None:
    assert sent_bytes(STEP) == 0
    dense = replace(STEP, items=10**6, processes=4)
    rows = replace(dense, loss="sampled-softmax")
    assert sent_bytes(dense) == pytest.approx(2 * 0.75 * 4 * dense.dense_parameters)
    assert sent_bytes(replace(rows, is_sharded=True)) < sent_bytes(rows) < sent_bytes(dense) / 2


def test_a_slower_network_takes_longer() -> None:
    step = replace(STEP, processes=8, items=10**6)
    seconds = [
        exchange_seconds(COSTS, Machine(network=speed), layout_of(Machine(), 4, 2), step)
        for speed in (1, 10)
    ]
    assert seconds[0] > 2 * seconds[1] > 0


# Memory


def test_memory_is_that_of_the_plan_which_training_checks() -> None:
    settings = config("training.workers=8")
    workload = workload_of(**PLAN)
    alone = training_bytes(COSTS, settings, workload, layout_of(Machine(), 1, 1), is_sharded=False)
    planned = plan_memory(settings, workload.items, settings.model.max_len).total
    assert planned < alone < planned + 200 * workload.users + 500 * workload.items


def test_sharding_the_table_divides_what_a_process_keeps() -> None:
    settings = config("training.workers=8", "training.loss=sampled-softmax")
    workload = Workload(10**7, 10**7, 50, 5 * 10**8)
    layout = layout_of(Machine(), 8, 2)
    whole, part = (
        training_bytes(COSTS, settings, workload, layout, is_sharded=is_sharded)
        for is_sharded in (False, True)
    )
    assert whole - part > 0.9 * layout.processes * 4 * 4 * 64 * 10**7 * 15 / 16


# Advice


def test_small_data_needs_one_process() -> None:
    found = advice(**PLAN)
    assert found.run.layout.world == 1
    assert found.run.config.training.loss == "cross-entropy"
    assert not found.serving.uses_index


def test_a_large_catalogue_is_sampled_indexed_and_sharded_when_it_has_to_be() -> None:
    found = advice(Machine(memory=16e9), users=2 * 10**7, items=2 * 10**7, length=50.0)
    assert found.run.config.training.loss == "sampled-softmax"
    assert found.run.is_sharded
    assert found.run.layout.world > 1
    assert found.run.memory <= 16e9
    assert found.serving.uses_index
    typed = " ".join(each.words for each in commands(found, "default", load_config()))
    assert "training.shard_items=true" in typed


def test_more_data_takes_longer_on_the_same_machines() -> None:
    times = [
        advise(
            COSTS, workload_of(users=n, items=10_000, length=20.0), config(), Machine(), machines=1
        )
        for n in (10**4, 10**5, 10**6, 10**7)
    ]
    for less, more in pairwise(times):
        for key, seconds in as_dict(less)["seconds"].items():
            may_shrink = key in ("exchange_in_a_step", "evaluation")  # fewer users are asked
            assert may_shrink or seconds <= 1.001 * as_dict(more)["seconds"][key]


def test_a_run_that_would_take_too_long_gets_more_machines() -> None:
    numbers = {"users": 2 * 10**7, "items": 10_000, "length": 50.0}
    workload = workload_of(**numbers)  # type: ignore[arg-type]
    soon, late = (advise(COSTS, workload, config(), Machine(), hours=h) for h in (4.0, 240.0))
    assert soon.run.layout.machines > late.run.layout.machines
    assert soon.run.total < late.run.total


def test_a_long_evaluation_asks_fewer_users_and_no_baselines() -> None:
    many_epochs = config("training.epochs=100")
    short = advise(COSTS, workload_of(**PLAN), many_epochs, Machine())  # type: ignore[arg-type]
    long = advice(users=2 * 10**6, items=10**6, length=50.0)
    assert short.run.has_baselines
    assert short.run.evaluated == PLAN["users"]
    assert not long.run.has_baselines
    for found, is_limited in ((short, False), (long, True)):
        train = commands(found, "default", load_config())[1].words
        assert ("--set evaluation.users=20000" in train) == is_limited
        assert ("--no-baselines" in train) == is_limited
        assert 0 < found.run.evaluation < 0.2 * found.run.total
        assert found.run.whole == pytest.approx(
            found.run.total + found.run.evaluation + found.run.indexing
        )
    assert short.run.indexing == 0 < long.run.indexing


def test_users_that_were_asked_for_are_evaluated() -> None:
    workload = workload_of(users=2 * 10**6, items=10**6, length=50.0)
    found = advise(COSTS, workload, config("evaluation.users=500000"), Machine())
    assert found.run.evaluated == found.run.config.evaluation.users == 500_000


@pytest.mark.parametrize("memory", [20e9, 512e9])
def test_processes_that_score_fit_the_memory_and_are_those_of_the_command(memory: float) -> None:
    machine = Machine(memory=memory)
    for machines, items in ((1, 10**4), (1, 10**6), (8, 10**6), (8, 2 * 10**7)):
        workload = workload_of(users=2 * 10**7, items=items, length=50.0)
        found = advise(COSTS, workload, config(), machine, machines=machines)
        scoring, serving = found.scoring, found.serving
        assert 1 <= scoring.processes <= machine.cores
        assert scoring.memory == scoring.processes * serving.memory <= memory
        n_workers = machines * scoring.processes
        typed = next(
            each.words for each in commands(found, "default", load_config()) if "score" in each.what
        )
        asked = re.search(r"--workers (\d+)", typed)
        assert (int(asked[1]) if asked else 1) == n_workers
        n_cores = scoring.processes if machines > 1 else machine.cores
        at_best = COSTS.scoring_seconds(found.run.config, serving.compared, 50, n_cores)
        assert scoring.seconds >= 0.999 * at_best * workload.users / machines


def test_a_model_that_does_not_fit_is_compressed_and_searched_exactly() -> None:
    workload = workload_of(users=2 * 10**7, items=2 * 10**7, length=50.0)
    small, large = (
        advise(COSTS, workload, config(), Machine(memory=memory), machines=16)
        for memory in (14e9, 64e9)
    )
    assert large.serving.uses_index
    assert not large.serving.compresses
    assert small.serving.compresses
    assert not small.serving.uses_index
    assert small.serving.memory < large.serving.memory
    assert small.request > 5 * large.request
    typed = {each.what: each.words for each in commands(small, "default", load_config())}
    assert "--users 10000" in typed["make the item vectors smaller"]
    assert "recommend runs/model-int8 " in typed["score all users"]
    assert "first process needs" in " ".join(small.notes)


def test_preparing_starts_once_whatever_the_cores_and_reads_the_disk() -> None:
    assert COSTS.preparing_seconds(0, 64) == COSTS.constants["preparing"]["start"]
    few, many = (Workload(n, 100, 50, 50 * n) for n in (2 * 10**4, 2 * 10**8))
    spilled = disk_seconds(COSTS, many, 64e9)
    assert spilled > 2 * 10**4 * disk_seconds(COSTS, few, 64e9) > 0
    assert disk_seconds(COSTS, many, math.inf) < spilled


def test_assumptions_name_what_was_not_measured() -> None:
    found = advice(users=2 * 10**8, items=5 * 10**7, length=50.0)
    text = " ".join(assumptions(COSTS, found))
    for word in ("Gbit/s", "GPU", "cores", "typically", "index"):
        assert word in text
    assert found.beyond == ["items", "interactions"]
    assert "extrapolated" in " ".join(found.notes)


# The command


def run(*words: str) -> tuple[int, str]:
    app = typer.Typer()
    plan.add_to(app)
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, str(done.exception) if done.exit_code else done.output


def test_the_page_has_commands_figures_and_assumptions() -> None:
    code, text = run("--users", "200000", "--items", "10000", "--length", "50")
    assert code == 0
    for words in ("bert4rec data prepare", "bert4rec train", "--users all", "answer one request"):
        assert words in text
    assert "estimates" in text


def test_json_is_for_programs() -> None:
    words = "--users 200000 --items 1000000 --interactions 10000000 --epochs 5 --json --machines 4"
    code, text = run(*words.split())
    assert code == 0
    found = json.loads(text)
    assert found["epochs"] == 5
    assert found["machines"] == 4
    assert found["workload"]["length"] == 50
    assert found["seconds"]["training"] >= 5 * found["seconds"]["epoch"]
    assert found["commands"][1]["command"].startswith("torchrun --nnodes 4")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--users 0 --items 5 --length 5", "--users is 0"),
        ("--users 10 --items 5", "two of --users, --length and --interactions"),
        ("--users 10 --items 500 --length 5", "--items is 500"),
        ("--users 10 --items 1 --length 5", "nothing to choose from"),
        ("--users 10 --items 5 --length 2", "--length is 2"),
        ("--users 10 --items 5 --length 5 --interactions 500", "leave one of"),
        ("--users 100 --items 5 --length 5 --machines 0", "--machines is 0"),
        ("--users 10 --items 5 --length 5 --machines 40", "users of its own"),
        ("--users 100 --items 5 --length 5 --processes 40", "--processes is 40"),
        ("--users 100 --items 5 --length 5 --memory 0", "--memory is 0"),
        ("--users 100 --items 5 --length 5 --hours -1", "--hours is -1"),
        ("--users 100 --items 5 --length 5 --recipe gru4rec", "bert4rec and sasrec"),
        ("--users 100 --items 5 --length 5 --loss hinge", "training.loss"),
        ("--users 1000000 --items 50000000 --length 50 --memory 2 --machines 1", "do not hold"),
    ],
)
def test_wrong_numbers_are_named(words: str, message: str) -> None:
    code, error = run(*words.split())
    assert code != 0
    assert message in error


def test_every_command_of_a_plan_can_be_typed() -> None:
    """Options and settings exist, whatever the plan is."""
    known = typer.main.get_command(bert4rec.cli.app)
    for found in (
        advice(**PLAN),
        advice(users=10**6, items=10**6, length=50.0),
        advice(Machine(memory=16e9), users=2 * 10**7, items=2 * 10**7, length=50.0),
        advice(Machine(memory=14e9), users=2 * 10**7, items=2 * 10**7, length=50.0),
    ):
        for command in commands(found, "default", load_config()):
            words = command.words.partition("bert4rec ")[2].split()
            verb = known
            while words[0] in getattr(verb, "commands", {}):
                verb = verb.commands[words.pop(0)]  # type: ignore[attr-defined]
            options = {
                name
                for parameter in verb.params
                for name in (*parameter.opts, *parameter.secondary_opts)
            }
            assert {word for word in words if word.startswith("--")} <= options, command.words
            load_config(overrides=re.findall(r"--set (\S+)", command.words))


def test_settings_come_back_from_a_command_as_they_were() -> None:
    given = ["evaluation.ks=[5,10]", "training.learning_rate=0.00123456789", "model.dropout=0.1"]
    workload = workload_of(**PLAN)  # type: ignore[arg-type]
    found = advise(COSTS, workload, config(*given), Machine(), machines=1, processes=1)
    words = shlex.split(commands(found, "default", load_config())[1].words)
    typed = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    chosen = found.run.config
    assert chosen.evaluation.ks == (5, 10)
    again = load_config(overrides=[*typed, f"training.workers={chosen.training.workers}"])
    assert again == chosen


# The page


def test_the_docs_say_what_the_model_says() -> None:
    import scaling_page

    text = scaling_page.PAGE.read_text(encoding="utf-8")
    assert scaling_page.page(text) == text, "run python benchmarks/scale/scaling_page.py"


def test_figures_in_words() -> None:
    assert [duration(s) for s in (0.0012, 3, 90, 7200, 86_400, 864_000)] == [
        "1.2 ms",
        "3.0 s",
        "1.5 min",
        "2.0 h",
        "24 h",
        "10 days",
    ]
    assert [size(n) for n in (1e5, 3e6, 1.24e9, 2.5e13)] == ["0.1 MB", "3.0 MB", "1.2 GB", "25 TB"]
    assert [count(n) for n in (10**4, 5 * 10**7, 10**10, 1234)] == [
        "10 thousand",
        "50 million",
        "10 billion",
        "1,234",
    ]
