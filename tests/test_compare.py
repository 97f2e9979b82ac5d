"""A paired comparison finds a difference that is there, and none that is not."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console
from typer.testing import CliRunner

from bert4rec.cli import app
from bert4rec.data.database import write_parquet
from bert4rec.evaluation import result
from bert4rec.evaluation.compare import compare
from bert4rec.evaluation.report import comparison_table, figure
from bert4rec.evaluation.result import Evaluation
from bert4rec.scoring import UNREACHABLE


def saved(
    directory: Path,
    ranks: NDArray[np.int64],
    *,
    user_ids: list[str] | list[int] | None = None,
    targets: NDArray[np.int64] | None = None,
    exclude_seen: bool = True,
    seed: int = 0,
) -> Path:
    n = len(ranks)
    zeros = np.zeros(n, dtype=np.int64)
    found = Evaluation(
        users=np.arange(n),
        targets=zeros if targets is None else targets,
        history_lengths=zeros,
        target_counts=zeros,
        ranks={"full": ranks, "popularity": ranks},
        metrics={"full": {}, "popularity": {}},
        extras={"n_items": 100, "settings": {"exclude_seen": exclude_seen, "n_negatives": 100, "seed": seed}},
    )
    found.save(directory, user_ids=user_ids)
    return directory


def some_ranks(n: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(1, 60, n)


def test_identical_runs_differ_by_nothing(tmp_path: Path) -> None:
    a, b = (saved(tmp_path / name, some_ranks(200)) for name in "ab")
    found = compare(a, b, ["NDCG@10", "MRR"], n_boot=200)
    for row in found.differences:
        assert (row.difference, row.low, row.high, row.p_value) == (0, 0, 0, 1)
        assert (row.n_better, row.n_equal, row.n_worse) == (0, 200, 0)


def test_a_known_difference_is_recovered(tmp_path: Path) -> None:
    """B turns 100 of A's misses into first places and 40 of its first places into misses."""
    ranks_a = np.where(np.arange(1000) < 300, 1, 50)
    ranks_b = ranks_a.copy()
    ranks_b[:40] = UNREACHABLE
    ranks_b[300:400] = 1
    a, b = saved(tmp_path / "a", ranks_a), saved(tmp_path / "b", ranks_b)
    (row,) = compare(a, b, "HR@10").differences
    assert row.a == pytest.approx(0.3)
    assert row.b == pytest.approx(0.36)
    assert row.difference == pytest.approx(0.06)
    assert (row.n_better, row.n_equal, row.n_worse) == (100, 860, 40)
    half_width = 1.96 * np.sqrt((0.14 - 0.06**2) / 1000)  # variance of a step of -1, 0 or 1
    assert row.low == pytest.approx(0.06 - half_width, abs=0.003)
    assert row.high == pytest.approx(0.06 + half_width, abs=0.003)
    assert row.p_value < 0.001
    (back,) = compare(b, a, "HR@10").differences
    assert back.difference == pytest.approx(-0.06)
    assert back.p_value < 0.001


def test_noise_is_not_called_a_difference(tmp_path: Path) -> None:
    """Under no true difference the p-value is small only as often as it says."""
    p_values = []
    for seed in range(40):
        a = saved(tmp_path / "a", some_ranks(150, seed=2 * seed))
        b = saved(tmp_path / "b", some_ranks(150, seed=2 * seed + 1))
        p_values.append(compare(a, b, "MRR", n_boot=300).differences[0].p_value)
    assert sum(p < 0.05 for p in p_values) <= 7  # 2 expected; 8 or more: once in a thousand
    assert sum(p < 0.5 for p in p_values) >= 8  # 20 expected


def test_several_metrics_at_once_equal_one_at_a_time(tmp_path: Path) -> None:
    a, b = (saved(tmp_path / str(seed), some_ranks(100, seed)) for seed in (0, 1))
    together = compare(a, b, ["NDCG@10", "HR@1"], n_boot=100).differences
    for row in together:
        (alone,) = compare(a, b, row.metric, n_boot=100).differences
        assert (row.low, row.high) == pytest.approx((alone.low, alone.high))
        assert row.p_value == alone.p_value


def test_users_are_paired_by_raw_id_and_the_others_left_out(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", np.array([1, 2, 3, 4]), user_ids=[10, 20, 30, 40])
    b = saved(tmp_path / "b", np.array([3, 1, 9]), user_ids=["30", "10", "x"])
    found = compare(a, b, "MRR", n_boot=50)
    assert (found.n_users, found.n_only_a, found.n_only_b) == (2, 2, 1)
    assert found.differences[0].n_equal == 2
    file = StringIO()
    Console(file=file, width=200).print(comparison_table(found))
    shown = " ".join(file.getvalue().split())  # captions are wrapped to the table's width
    assert "Left out: 2 users that only A has, 1 that only B has" in shown


def test_the_command_prints_a_table_for_a_paper_or_an_issue(tmp_path: Path) -> None:
    a, b = (saved(tmp_path / str(seed), some_ranks(100, seed)) for seed in (0, 1))
    command = ["compare", str(a), str(b), "--metric", "NDCG@10"]
    markdown = CliRunner().invoke(app, [*command, "--markdown"])
    assert markdown.exit_code == 0
    heading, _, row = markdown.stdout.splitlines()
    assert heading.startswith("| metric | A | B | B - A | 95 % interval | p |")
    found = compare(a, b).differences[0]
    assert f"| NDCG@10 | {figure(found.a)} | {figure(found.b)} |" in row
    latex = CliRunner().invoke(app, [*command, "--latex"]).stdout
    assert rf"NDCG@10 & {figure(found.a)} & {figure(found.b)} &" in latex
    assert r"95 \% interval" in latex


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    ranks = some_ranks(20)
    a = saved(tmp_path / "a", ranks)
    other_targets = saved(tmp_path / "targets", ranks, targets=np.arange(20))
    with pytest.raises(ValueError, match="different targets for 19 of 20"):
        compare(a, other_targets)
    with pytest.raises(ValueError, match="exclude_seen is True in"):
        compare(a, saved(tmp_path / "seen", ranks, exclude_seen=False))
    other_seed = saved(tmp_path / "seed", ranks, seed=1)
    with pytest.raises(ValueError, match="seed is 0 in"):
        compare(a, other_seed, protocol="popularity")
    assert compare(a, other_seed, n_boot=10).n_users == 20  # full ranking draws nothing
    with pytest.raises(ValueError, match="no user in common"):
        compare(a, saved(tmp_path / "users", ranks, user_ids=[f"u{i}" for i in range(20)]))
    with pytest.raises(ValueError, match="not evaluated under protocol 'uniform'"):
        compare(a, a, protocol="uniform")
    with pytest.raises(ValueError, match="holds no evaluation"):
        compare(a, tmp_path / "nothing")
    for name, contents in {
        "metrics.json": [
            "",
            "[]",
            "{}",
            '{"format_version": 1}',
            '{"format_version": 1, "metrics": 3}',
            '{"format_version": 1, "metrics": {"full": {}}}',
            "\udcff",
        ],
        "per_user.parquet": ["", "PAR1 and nothing else"],
    }.items():
        for content in contents:
            broken = saved(tmp_path / "broken", ranks)
            (broken / name).write_bytes(content.encode("utf-8", "surrogateescape"))
            with pytest.raises(ValueError, match=f"{name} (is damaged|has format version None)"):
                compare(a, broken)
    write_parquet(broken / "per_user.parquet", {"user": [1]})
    with pytest.raises(ValueError, match=r"per_user\.parquet is damaged"):
        compare(a, broken)
    with pytest.raises(ValueError, match=r"per_user\.parquet is damaged"):
        Evaluation.load(broken)
    with pytest.raises(ValueError, match="more than one row"):
        compare(a, saved(tmp_path / "twice", ranks, user_ids=[0] * 20))


def test_a_killed_save_never_pairs_new_ranks_with_old_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = saved(tmp_path / "run", some_ranks(20))

    def killed(path: Path, content: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(result, "write_file", killed)
    with pytest.raises(KeyboardInterrupt):
        saved(run, some_ranks(20, seed=1))
    with pytest.raises(ValueError, match=r"metrics\.json is missing"):
        Evaluation.load(run)
