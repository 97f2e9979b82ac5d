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

from bert4rec.data.splits import Questions, Spans
from bert4rec.evaluation.evaluate import evaluate, full_ranks, question_batches
from bert4rec.evaluation.metrics import UNREACHABLE
from bert4rec.evaluation.protocols import NO_ITEM, draw_negatives, full_rank, sampled_rank
from bert4rec.evaluation.report import metric_table
from bert4rec.evaluation.result import Evaluation


def asked(histories: Sequence[Sequence[int]], targets: Sequence[int]) -> Questions:
    lengths = np.array([len(history) for history in histories], dtype=np.int64)
    tokens = np.array([token for history in histories for token in history], dtype=np.int32)
    ends = np.cumsum(lengths)
    spans = Spans(tokens, ends - lengths, ends, np.arange(len(histories)))
    return Questions(spans, np.array(targets, dtype=np.int64))


def random_questions(n_users: int, n_items: int, seed: int = 0) -> Questions:
    generator = np.random.default_rng(seed)
    chosen = [generator.permutation(n_items)[: generator.integers(2, 12)] for _ in range(n_users)]
    return asked([items[:-1] for items in chosen], [items[-1] for items in chosen])


class Fixed:
    """Scores by user row from a table: a model whose ranks are known beforehand."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.n_items = table, table.shape[1]

    def score(self, users: Tensor, history: Tensor) -> Tensor:
        return self.table[users]


PAD = 5
SCORES = torch.tensor([[0.1, 0.9, 0.5, 0.5, 0.2]])
HISTORY = torch.tensor([[1, 0, PAD, PAD]])


@pytest.mark.parametrize(
    ("target", "excluded", "rank"),
    [
        (1, None, 1),
        (2, None, 3),  # tied with 3, which goes first
        (3, None, 3),
        (0, None, 5),
        (2, HISTORY, 2),
        (4, HISTORY, 3),
        (1, HISTORY, UNREACHABLE),
    ],
)
def test_full_rank_equals_a_table_worked_by_hand(
    target: int, excluded: Tensor | None, rank: int
) -> None:
    assert full_rank(SCORES, torch.tensor([target]), excluded).tolist() == [rank]


def test_full_rank_follows_the_definition_also_with_infinities() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 6, (200, 12), generator=generator).float()  # many ties
    scores[scores == 0] = -torch.inf
    scores[scores == 5] = torch.inf
    history = torch.randint(0, 13, (200, 7), generator=generator)
    targets = torch.randint(0, 12, (200,), generator=generator)
    ranks = full_rank(scores, targets, history).tolist()
    for row, target in enumerate(targets.tolist()):
        seen = set(history[row].tolist())
        others = [j for j in range(12) if j != target and j not in seen]
        rank = 1 + sum(bool(scores[row, j] >= scores[row, target]) for j in others)
        assert ranks[row] == (UNREACHABLE if target in seen else rank)
    assert UNREACHABLE in ranks


def test_sampled_rank_counts_ties_against_and_ignores_missing_negatives() -> None:
    target = torch.tensor([2])
    assert sampled_rank(SCORES, target, torch.tensor([[1, 3, 4, 0]])).tolist() == [3]
    assert sampled_rank(SCORES, target, torch.tensor([[4, NO_ITEM, NO_ITEM]])).tolist() == [1]


def test_constant_scores_earn_nothing() -> None:
    questions = random_questions(30, 200)
    found = evaluate(
        Fixed(torch.zeros(30, 200)), questions, train_counts=np.ones(200, np.int64), bootstrap=0
    )
    for protocol in ("full", "popularity", "uniform"):
        assert found.value("HR@20", protocol) == 0
    assert (found.ranks["full"] == 200 - questions.histories.lengths).all()


def test_one_nan_anywhere_is_refused() -> None:
    questions = random_questions(10, 40)
    table = torch.rand(10, 40)
    table[7, 3] = torch.nan
    with pytest.raises(ValueError, match="NaN for 1 of 10"):
        full_ranks(Fixed(table), questions)
    with pytest.raises(ValueError, match="NaN"):
        evaluate(Fixed(table), questions, train_counts=np.ones(40, np.int64))


def test_batches_hold_every_question_once_padded_on_the_right() -> None:
    questions = random_questions(23, 40)
    seen_rows = []
    for batch in question_batches(questions, 40, batch_size=5):
        assert batch.history.shape[1] == max(questions.histories.lengths[batch.rows])
        for i, row in enumerate(batch.rows.tolist()):
            history = questions.histories[row].tolist()
            padding = [40] * (batch.history.shape[1] - len(history))
            assert batch.history[i].tolist() == history + padding
            assert batch.targets[i] == questions.targets[row]
            assert batch.users[i] == questions.users[row]
            seen_rows.append(row)
    assert sorted(seen_rows) == list(range(23))


def test_batch_size_changes_no_figure() -> None:
    questions = random_questions(60, 150)
    model = Fixed(torch.rand(60, 150, generator=torch.Generator().manual_seed(1)))
    counts = np.random.default_rng(0).integers(0, 30, 150)
    one, other = (
        evaluate(model, questions, train_counts=counts, batch_size=size, bootstrap=50)
        for size in (1, 60)
    )
    assert one.metrics == other.metrics
    assert one.extras == other.extras
    for protocol in one.ranks:
        assert one.ranks[protocol].tolist() == other.ranks[protocol].tolist()
    assert full_ranks(model, questions, batch_size=7).tolist() == one.ranks["full"].tolist()


def test_a_target_in_the_history_is_missed_and_reported_unless_seen_items_are_kept() -> None:
    questions = asked([[0, 1], [2, 3]], [1, 4])
    model = Fixed(torch.tensor([[0.0, 9, 1, 1, 1], [0, 0, 0, 0, 9]]))
    counts = np.ones(5, np.int64)
    found = evaluate(model, questions, train_counts=counts, ks=(1, 5))
    assert found.ranks["full"].tolist() == [UNREACHABLE, 1]
    assert found.ranks["uniform"].tolist() == [1, 1]  # the target is always among the candidates
    assert found.extras["n_unreachable"] == 1
    assert "exclude_seen off" in shown(metric_table(found, "t"))
    kept = evaluate(model, questions, train_counts=counts, ks=(1, 5), exclude_seen=False)
    assert kept.value("HR@1") == 1
    assert kept.extras["n_unreachable"] == 0


def test_negatives_are_never_own_items_nor_repeated_and_depend_on_the_seed_only() -> None:
    questions = random_questions(300, 400)
    counts = (1000 / np.arange(1, 401)).astype(np.int64)
    counts[50:60] = 0
    negatives = draw_negatives(questions, counts, 100, seed=5)
    assert negatives.shape == (300, 100)
    for row, drawn in enumerate(negatives.tolist()):
        own = {*questions.histories[row].tolist(), int(questions.targets[row])}
        assert len(set(drawn)) == 100
        assert not own & set(drawn)
        assert counts[drawn].min() > 0
    assert (negatives == draw_negatives(questions, counts, 100, seed=5)).all()
    assert (negatives != draw_negatives(questions, counts, 100, seed=6)).any(axis=1).all()
    some = np.arange(40, 90, 7)
    fewer = Questions(questions.histories.take(some), questions.targets[some])
    assert (negatives[some] == draw_negatives(fewer, counts, 100, seed=5)).all()


def test_negatives_do_not_depend_on_how_many_rows_fit_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    questions = random_questions(90, 60)
    counts = (300 / np.arange(1, 61)).astype(np.int64)
    at_once = draw_negatives(questions, counts, 30, seed=0)
    monkeypatch.setattr("bert4rec.evaluation.protocols._CELLS_AT_ONCE", 16 * 90 * 7)
    assert (at_once == draw_negatives(questions, counts, 30, seed=0)).all()


def test_too_few_eligible_items_are_all_taken() -> None:
    questions = asked([[0, 1], [2]], [2, 0])
    negatives = draw_negatives(questions, np.array([5, 5, 5, 0, 1, 1000]), 100, seed=0)
    assert [sorted(i for i in row if i != NO_ITEM) for row in negatives.tolist()] == [
        [4, 5],
        [1, 4, 5],
    ]
    assert (negatives[0, 2:] == NO_ITEM).all()


@pytest.mark.parametrize("tries", [0, 1, 3])  # the race alone, mostly the race, as shipped
def test_the_draw_is_sequential_sampling_without_replacement(
    tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordered pairs have exactly p_i * p_j / (1 - p_i), with the user's own item taken out."""
    monkeypatch.setattr("bert4rec.evaluation.protocols._TRIES_PER_NEGATIVE", tries)
    n_users, weights = 40_000, np.array([6, 3, 2, 1, 8])
    questions = asked([[4]] * n_users, [4] * n_users)
    pairs = Counter(map(tuple, draw_negatives(questions, weights, 2, seed=1).tolist()))
    p = weights[:4] / weights[:4].sum()
    expected = {(i, j): n_users * p[i] * p[j] / (1 - p[i]) for i, j in permutations(range(4), 2)}
    assert set(pairs) == set(expected)
    chi_square = sum((pairs[pair] - mean) ** 2 / mean for pair, mean in expected.items())
    assert chi_square < 31.3  # 11 degrees of freedom: exceeded once in a thousand seeds


def test_popular_items_are_drawn_in_proportion_and_uniform_ones_alike() -> None:
    questions = asked([[0]] * 20_000, [1] * 20_000)
    weights = np.array([50, 50, 1, 2, 3, 4] + [1] * 90)
    shares = _shares(draw_negatives(questions, weights, 1, seed=0), 96)
    assert shares[:2].tolist() == [0, 0]
    np.testing.assert_allclose(shares[2:6], np.array([1, 2, 3, 4]) / 100, atol=0.006)
    uniform = _shares(draw_negatives(questions, np.ones(96, np.int64), 1, seed=0), 96)
    np.testing.assert_allclose(uniform[2:], 1 / 94, atol=0.004)


def _shares(drawn: NDArray[np.int32], n_items: int) -> NDArray[np.float64]:
    return np.bincount(drawn.ravel(), minlength=n_items) / drawn.size


def test_coverage_and_popularity_bias_equal_numbers_worked_by_hand() -> None:
    # 12 items with counts 11..0; both users are shown their unseen items from left to right.
    questions = asked([[0], [0, 1]], [11, 2])
    model = Fixed(-torch.arange(12.0).repeat(2, 1))
    found = evaluate(model, questions, train_counts=np.arange(12)[::-1].copy(), ks=(1, 10))
    assert found.extras["coverage"] == {"1": pytest.approx(2 / 12), "10": pytest.approx(11 / 12)}
    bias = found.extras["popularity_bias"]
    shown_items = [*range(1, 11), *range(2, 12)]
    assert bias["recommended_mean_count"] == pytest.approx(np.mean([11 - i for i in shown_items]))
    assert bias["target_mean_count"] == pytest.approx((0 + 9) / 2)
    assert bias["target_mean_percentile"] == pytest.approx((0.5 + 9.5) / 2 / 12)
    assert found.extras["n_cold_targets"] == 1


def test_a_user_who_has_seen_nearly_everything_adds_no_seen_item_to_the_lists() -> None:
    questions = asked([[0, 1, 2, 3]], [4])
    found = evaluate(Fixed(torch.rand(1, 5)), questions, train_counts=np.ones(5, np.int64))
    assert found.extras["coverage"]["20"] == pytest.approx(1 / 5)


def test_bad_settings_are_refused() -> None:
    questions, model = random_questions(5, 20), Fixed(torch.rand(5, 20))
    counts = np.ones(20, np.int64)
    with pytest.raises(ValueError, match="unknown protocol 'sampled'"):
        evaluate(model, questions, train_counts=counts, protocols=("sampled",))
    with pytest.raises(ValueError, match="19 entries and the model knows 20"):
        evaluate(model, questions, train_counts=counts[1:])
    with pytest.raises(ValueError, match="no questions"):
        evaluate(model, asked([], []), train_counts=counts)
    with pytest.raises(ValueError, match="shape"):
        full_ranks(
            type("Narrow", (Fixed,), {"score": lambda *_: torch.rand(5, 3)})(torch.rand(5, 20)),
            questions,
        )


def test_an_evaluation_survives_saving(tmp_path: Path) -> None:
    questions = random_questions(25, 150)
    model = Fixed(torch.rand(25, 150))
    steps: list[tuple[int, int]] = []
    found = evaluate(
        model,
        questions,
        train_counts=np.arange(150),
        batch_size=10,
        bootstrap=20,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert steps == [(10, 25), (20, 25), (25, 25)]
    found.save(tmp_path / "run", user_ids=[f"ü{i}" for i in range(25)], item_ids=range(500, 650))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "metrics.json",
        "per_user.parquet",
    ]
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
    questions = random_questions(25, 150)
    found = evaluate(Fixed(torch.rand(25, 150)), questions, train_counts=np.arange(150))
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
