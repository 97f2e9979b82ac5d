"""Ranks obey the tie law, negatives obey the paper's draw, and batches change nothing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from bert4rec import scoring
from bert4rec.data.splits import HeldOut, Spans
from bert4rec.evaluation.evaluate import evaluate
from bert4rec.evaluation.protocols import NO_ITEM, draw_negatives, sampled_rank
from bert4rec.evaluation.report import metric_table
from bert4rec.evaluation.result import Evaluation
from bert4rec.models.output import ScoreRows
from bert4rec.models.popularity import Popularity
from bert4rec.scoring import UNREACHABLE, HeldOutBatch, map_held_out, rank_held_out
from bert4rec.threads import WorkerThreads


def held_out_of(histories: Sequence[Sequence[int]], targets: Sequence[int]) -> HeldOut:
    lengths = np.array([len(history) for history in histories], dtype=np.int64)
    tokens = np.array([token for history in histories for token in history], dtype=np.int32)
    ends = np.cumsum(lengths)
    spans = Spans(tokens, ends - lengths, ends, np.arange(len(histories)))
    return HeldOut(spans, np.array(targets, dtype=np.int64))


def random_users(n_users: int, n_items: int, seed: int = 0) -> HeldOut:
    generator = np.random.default_rng(seed)
    chosen = [generator.permutation(n_items)[: generator.integers(2, 12)] for _ in range(n_users)]
    return held_out_of([items[:-1] for items in chosen], [items[-1] for items in chosen])


class Fixed(Popularity):
    """Scores by user row from a table: a model whose ranks are known beforehand."""

    max_history = None

    def __init__(self, table: Tensor) -> None:
        super().__init__(torch.ones(table.shape[1]))
        self.table = table

    def encode(self, users: Tensor, histories: Tensor) -> Tensor:
        return self.table[users]


SCORES = torch.tensor([[0.1, 0.9, 0.5, 0.5, 0.2]])


def test_sampled_rank_counts_ties_against_and_ignores_missing_negatives() -> None:
    target = torch.tensor([2])
    assert sampled_rank(SCORES, target, torch.tensor([[1, 3, 4, 0]])).tolist() == [3]
    assert sampled_rank(SCORES, target, torch.tensor([[4, NO_ITEM, NO_ITEM]])).tolist() == [1]


def test_constant_scores_earn_nothing() -> None:
    held_out = random_users(30, 200)
    found = evaluate(Fixed(torch.zeros(30, 200)), held_out, train_counts=np.ones(200, np.int64), bootstrap=0)
    for protocol in ("full", "popularity", "uniform"):
        assert found.value("HR@20", protocol) == 0
    assert (found.ranks["full"] == 200 - held_out.histories.lengths).all()


def test_one_nan_anywhere_is_refused() -> None:
    held_out = random_users(10, 40)
    table = torch.rand(10, 40)
    table[7, 3] = torch.nan
    with pytest.raises(ValueError, match="NaN for 1 of 10"):
        rank_held_out(Fixed(table), held_out, exclude_seen=True)
    with pytest.raises(ValueError, match="NaN"):
        evaluate(Fixed(table), held_out, train_counts=np.ones(40, np.int64))


def test_batches_hold_every_held_out_user_once_padded_at_the_end() -> None:
    held_out = random_users(23, 40)
    read: list[tuple[list[int], list[list[int]]]] = []

    class Noted(Fixed):
        def encode(self, users: Tensor, histories: Tensor) -> Tensor:
            read.append((users.tolist(), histories.tolist()))
            return super().encode(users, histories)

    def rows_of(batch: HeldOutBatch) -> list[int]:
        assert batch.targets.tolist() == held_out.targets[batch.rows].tolist()
        return batch.rows.tolist()

    model = Noted(torch.rand(23, 40))
    with WorkerThreads(1) as workers:
        found = list(map_held_out(rows_of, model, held_out, workers, exclude_seen=True, batch_size=5))
    assert sorted(row for rows in found for row in rows) == list(range(23))
    assert max(map(len, found)) == 5
    for rows, (users, padded) in zip(found, read, strict=True):
        assert users == held_out.users[rows].tolist()
        longest = max(held_out.histories.lengths[rows])
        for row, tokens in zip(rows, padded, strict=True):
            history = held_out.histories[row].tolist()
            assert tokens == history + [40] * (longest - len(history))


def test_batch_size_changes_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = random_users(60, 150)
    model = Fixed(torch.rand(60, 150, generator=torch.Generator().manual_seed(1)))
    counts = np.random.default_rng(0).integers(0, 30, 150)
    found = []
    for size in (1, 7, 60):
        monkeypatch.setattr(scoring, "SCORES_BYTES", size * 4 * 150)
        found.append(evaluate(model, held_out, train_counts=counts, bootstrap=50))
        ranks = rank_held_out(model, held_out, exclude_seen=True)
        assert ranks.tolist() == found[0].ranks["full"].tolist()
    for other in found[1:]:
        assert other.metrics == found[0].metrics
        assert other.extras == found[0].extras
        for protocol, ranks in other.ranks.items():
            assert ranks.tolist() == found[0].ranks[protocol].tolist()


def test_a_target_in_the_history_is_missed_and_reported_unless_seen_items_are_kept() -> None:
    held_out = held_out_of([[0, 1], [2, 3]], [1, 4])
    model = Fixed(torch.tensor([[0.0, 9, 1, 1, 1], [0, 0, 0, 0, 9]]))
    counts = np.ones(5, np.int64)
    found = evaluate(model, held_out, train_counts=counts, ks=(1, 5))
    assert found.ranks["full"].tolist() == [UNREACHABLE, 1]
    assert found.ranks["uniform"].tolist() == [1, 1]  # the target is always among the candidates
    assert found.extras["n_unreachable"] == 1
    assert "exclude_seen off" in shown(metric_table(found, "t"))
    kept = evaluate(model, held_out, train_counts=counts, ks=(1, 5), exclude_seen=False)
    assert kept.value("HR@1") == 1
    assert kept.extras["n_unreachable"] == 0


def test_negatives_are_never_own_items_nor_repeated_and_depend_on_the_seed_only() -> None:
    held_out = random_users(300, 400)
    counts = (1000 / np.arange(1, 401)).astype(np.int64)
    counts[50:60] = 0
    negatives = draw_negatives(held_out, counts, 100, seed=5)
    assert negatives.shape == (300, 100)
    for row, drawn in enumerate(negatives.tolist()):
        own = {*held_out.histories[row].tolist(), int(held_out.targets[row])}
        assert len(set(drawn)) == 100
        assert not own & set(drawn)
        assert counts[drawn].min() > 0
    assert (negatives == draw_negatives(held_out, counts, 100, seed=5)).all()
    assert (negatives != draw_negatives(held_out, counts, 100, seed=6)).any(axis=1).all()
    some = np.arange(40, 90, 7)
    fewer = HeldOut(held_out.histories.take(some), held_out.targets[some])
    assert (negatives[some] == draw_negatives(fewer, counts, 100, seed=5)).all()


def test_negatives_do_not_depend_on_how_many_rows_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = random_users(90, 60)
    counts = (300 / np.arange(1, 61)).astype(np.int64)
    at_once = draw_negatives(held_out, counts, 30, seed=0)
    monkeypatch.setattr("bert4rec.evaluation.protocols._CELLS_AT_ONCE", 16 * 90 * 7)
    assert (at_once == draw_negatives(held_out, counts, 30, seed=0)).all()


def test_too_few_eligible_items_are_all_taken() -> None:
    held_out = held_out_of([[0, 1], [2]], [2, 0])
    negatives = draw_negatives(held_out, np.array([5, 5, 5, 0, 1, 1000]), 100, seed=0)
    assert [sorted(i for i in row if i != NO_ITEM) for row in negatives.tolist()] == [[4, 5], [1, 4, 5]]
    assert (negatives[0, 2:] == NO_ITEM).all()


@pytest.mark.parametrize("tries", [0, 1, 3])  # the race alone, mostly the race, as shipped
def test_the_draw_is_sequential_sampling_without_replacement(tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordered pairs have exactly p_i * p_j / (1 - p_i), with the user's own item taken out."""
    monkeypatch.setattr("bert4rec.evaluation.protocols._TRIES_PER_NEGATIVE", tries)
    n_users, weights = 40_000, np.array([6, 3, 2, 1, 8])
    held_out = held_out_of([[4]] * n_users, [4] * n_users)
    pairs = Counter(map(tuple, draw_negatives(held_out, weights, 2, seed=1).tolist()))
    p = weights[:4] / weights[:4].sum()
    expected = {(i, j): n_users * p[i] * p[j] / (1 - p[i]) for i, j in permutations(range(4), 2)}
    assert set(pairs) == set(expected)
    chi_square = sum((pairs[pair] - mean) ** 2 / mean for pair, mean in expected.items())
    assert chi_square < 31.3  # 11 degrees of freedom: exceeded once in a thousand seeds


def test_popular_items_are_drawn_in_proportion_and_uniform_ones_alike() -> None:
    held_out = held_out_of([[0]] * 20_000, [1] * 20_000)
    weights = np.array([50, 50, 1, 2, 3, 4] + [1] * 90)
    shares = _shares(draw_negatives(held_out, weights, 1, seed=0), 96)
    assert shares[:2].tolist() == [0, 0]
    np.testing.assert_allclose(shares[2:6], np.array([1, 2, 3, 4]) / 100, atol=0.006)
    uniform = _shares(draw_negatives(held_out, np.ones(96, np.int64), 1, seed=0), 96)
    np.testing.assert_allclose(uniform[2:], 1 / 94, atol=0.004)


def _shares(drawn: NDArray[np.int32], n_items: int) -> NDArray[np.float64]:
    return np.bincount(drawn.ravel(), minlength=n_items) / drawn.size


def test_coverage_and_popularity_bias_equal_numbers_worked_by_hand() -> None:
    # 12 items with counts 11..0; both users are shown their unseen items from left to right.
    held_out = held_out_of([[0], [0, 1]], [11, 2])
    model = Fixed(-torch.arange(12.0).repeat(2, 1))
    found = evaluate(model, held_out, train_counts=np.arange(12)[::-1].copy(), ks=(1, 10))
    assert found.extras["coverage"] == {"1": pytest.approx(2 / 12), "10": pytest.approx(11 / 12)}
    bias = found.extras["popularity_bias"]
    shown_items = [*range(1, 11), *range(2, 12)]
    assert bias["recommended_mean_count"] == pytest.approx(np.mean([11 - i for i in shown_items]))
    assert bias["target_mean_count"] == pytest.approx((0 + 9) / 2)
    assert bias["target_mean_percentile"] == pytest.approx((0.5 + 9.5) / 2 / 12)
    assert found.extras["n_cold_targets"] == 1


def test_a_user_who_has_seen_nearly_everything_adds_no_seen_item_to_the_lists() -> None:
    held_out = held_out_of([[0, 1, 2, 3]], [4])
    found = evaluate(Fixed(torch.rand(1, 5)), held_out, train_counts=np.ones(5, np.int64))
    assert found.extras["coverage"]["20"] == pytest.approx(1 / 5)


def test_bad_settings_are_refused() -> None:
    held_out, model = random_users(5, 20), Fixed(torch.rand(5, 20))
    counts = np.ones(20, np.int64)
    with pytest.raises(ValueError, match="unknown protocol 'sampled'"):
        evaluate(model, held_out, train_counts=counts, protocols=("sampled",))
    with pytest.raises(ValueError, match="19 entries and the model knows 20"):
        evaluate(model, held_out, train_counts=counts[1:])
    with pytest.raises(ValueError, match="holds out no user"):
        evaluate(model, held_out_of([], []), train_counts=counts)
    with pytest.raises(ValueError, match="shape"):
        rank_held_out(Narrow(torch.rand(5, 20)), held_out, exclude_seen=True)


class Narrow(Fixed):
    def output_layer(self) -> ScoreRows:
        return ScoreRows(3)

    def encode(self, users: Tensor, histories: Tensor) -> Tensor:
        return torch.rand(5, 3)


def test_an_evaluation_survives_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SCORES_BYTES", 10 * 4 * 150)
    held_out = random_users(25, 150)
    model = Fixed(torch.rand(25, 150))
    steps: list[tuple[int, int]] = []
    found = evaluate(
        model,
        held_out,
        train_counts=np.arange(150),
        bootstrap=20,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert steps == [(10, 25), (20, 25), (25, 25)]
    found.save(tmp_path / "run", user_ids=[f"ü{i}" for i in range(25)], item_ids=range(500, 650))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.json", "per_user.parquet"]
    loaded = Evaluation.load(tmp_path / "run")
    assert loaded.metrics == found.metrics
    assert loaded.extras == found.extras
    for name in ("users", "targets", "history_lengths", "target_counts"):
        assert getattr(loaded, name).tolist() == getattr(found, name).tolist()
    for protocol in found.ranks:
        assert loaded.ranks[protocol].tolist() == found.ranks[protocol].tolist()
    (tmp_path / "run" / "per_user.parquet").unlink()
    with pytest.raises(ValueError, match=r"per_user\.parquet is missing"):
        Evaluation.load(tmp_path / "run")


def test_tables_show_the_figures_full_ranking_first() -> None:
    held_out = random_users(25, 150)
    found = evaluate(Fixed(torch.rand(25, 150)), held_out, train_counts=np.arange(150))
    text = shown(metric_table(found, "the title"))
    assert text.index("all items") < text.index("popularity") < text.index("uniform")
    cell = f"{found.value('NDCG@10', 'uniform'):.4f}".lstrip("0")
    assert cell in text
    assert "Recall@k is HR@k, MAP@k is MRR@k" in text
    assert "negatives could be drawn" not in text
    short = replace(found, extras=found.extras | {"n_short_of_negatives": 3})
    assert "For 3 users fewer than 100 negatives could be drawn" in shown(metric_table(short, "t"))


def shown(table: object) -> str:
    """What a terminal would show, on one line: captions are wrapped to the table's width."""
    file = StringIO()
    Console(file=file, width=200).print(table)
    return " ".join(file.getvalue().split())
