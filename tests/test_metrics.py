"""Metrics equal numbers worked by hand, and those of an independent implementation."""

import math
import warnings

import numpy as np
import pytest
import torch

from bert4rec.evaluation.metrics import METRICS, estimates, interval, metric_names, per_user, resampled_means
from bert4rec.scoring import UNREACHABLE

RANKS = torch.tensor([1, 2, 3, 10, 11, UNREACHABLE])


@pytest.mark.parametrize(
    ("metric", "by_hand"),
    [
        ("HR@1", [1, 0, 0, 0, 0, 0]),
        ("HR@10", [1, 1, 1, 1, 0, 0]),
        ("Recall@3", [1, 1, 1, 0, 0, 0]),
        ("NDCG@1", [1, 0, 0, 0, 0, 0]),
        ("NDCG@10", [1, 1 / math.log2(3), 1 / 2, 1 / math.log2(11), 0, 0]),
        ("MRR", [1, 1 / 2, 1 / 3, 1 / 10, 1 / 11, 0]),
        ("MRR@2", [1, 1 / 2, 0, 0, 0, 0]),
        ("MAP@10", [1, 1 / 2, 1 / 3, 1 / 10, 0, 0]),
    ],
)
def test_metrics_equal_a_table_worked_by_hand(metric: str, by_hand: list[float]) -> None:
    assert per_user(RANKS, metric).tolist() == pytest.approx(by_hand, abs=1e-12)
    assert float(per_user(RANKS, metric).mean()) == pytest.approx(sum(by_hand) / 6, abs=1e-12)


def test_an_unreachable_target_earns_nothing_anywhere() -> None:
    nothing = torch.full((3,), UNREACHABLE)
    for metric in [*metric_names([1, 1000]), *METRICS]:
        assert per_user(nothing, metric).tolist() == [0, 0, 0], metric


def test_metrics_agree_with_ir_measures() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not ours: whatever a third party says at import
        import ir_measures
        from ir_measures import AP, RR, R, Success, nDCG

    generator = np.random.default_rng(3)
    n_users, n_items = 40, 60
    scores = np.stack([generator.permutation(n_items) for _ in range(n_users)])
    targets = generator.integers(0, n_items, n_users)
    ranks = 1 + (scores > scores[np.arange(n_users), targets][:, None]).sum(axis=1)
    qrels = {f"u{u}": {f"i{targets[u]}": 1} for u in range(n_users)}
    run = {f"u{u}": {f"i{i}": float(scores[u, i]) for i in range(n_items)} for u in range(n_users)}
    theirs = {
        "HR@10": Success @ 10,
        "Recall@5": R @ 5,
        "NDCG@10": nDCG @ 10,
        "NDCG@20": nDCG @ 20,
        "MRR": RR,
        "MAP@10": AP @ 10,
    }
    values = {(v.query_id, str(v.measure)): v.value for v in ir_measures.iter_calc(list(theirs.values()), qrels, run)}
    for ours, measure in theirs.items():
        expected = [values[f"u{u}", str(measure)] for u in range(n_users)]
        assert per_user(torch.from_numpy(ranks), ours).tolist() == pytest.approx(expected), ours
        assert 0 < sum(expected) < n_users


@pytest.mark.parametrize("metric", ["ndcg@10", "HR@0", "HR@", "Precision@5", "HR@1.5", ""])
def test_an_unknown_metric_is_refused_by_name(metric: str) -> None:
    with pytest.raises(ValueError, match="unknown metric") as error:
        per_user(RANKS, metric)
    assert repr(metric) in str(error.value)


def test_a_cut_off_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="k is 0"):
        metric_names([10, 0])


def test_bootstrap_interval_of_a_share_is_the_binomial_one() -> None:
    n_users, share = 2000, 0.3
    values = np.zeros((n_users, 1))
    values[: int(share * n_users)] = 1
    low, high = interval(resampled_means(values, 4000, np.random.default_rng(0)))
    half_width = 1.96 * math.sqrt(share * (1 - share) / n_users)
    assert low[0] == pytest.approx(share - half_width, abs=0.1 * half_width)
    assert high[0] == pytest.approx(share + half_width, abs=0.1 * half_width)


def test_bootstrap_does_not_depend_on_how_many_resamples_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).random((50, 3))
    at_once = resampled_means(values, 20, np.random.default_rng(7))
    monkeypatch.setattr("bert4rec.evaluation.metrics._RESAMPLED_AT_ONCE", 150)
    in_parts = resampled_means(values, 20, np.random.default_rng(7))
    np.testing.assert_allclose(at_once, in_parts, rtol=1e-12)
    assert at_once.std(axis=0).min() > 0


def test_intervals_hold_the_value_and_are_fixed_by_the_seed() -> None:
    ranks = {"full": torch.randint(1, 50, (300,), generator=torch.Generator().manual_seed(0))}
    metrics = metric_names([5, 10])
    one = estimates(ranks, metrics, n_resamples=200, seed=1)
    assert one == estimates(ranks, metrics, n_resamples=200, seed=1)
    assert one != estimates(ranks, metrics, n_resamples=200, seed=2)
    for metric in metrics:
        estimate = one["full"][metric]
        assert estimate["low"] is not None
        assert estimate["high"] is not None
        assert estimate["low"] < estimate["value"] < estimate["high"], metric
        assert estimate["value"] == pytest.approx(float(per_user(ranks["full"], metric).mean()))


def test_no_resamples_give_no_interval() -> None:
    estimate = estimates({"full": RANKS}, ["MRR"], n_resamples=0, seed=0)["full"]["MRR"]
    assert estimate == {"value": pytest.approx(float(per_user(RANKS, "MRR").mean())), "low": None, "high": None}
