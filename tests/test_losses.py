"""Losses: the fast form is the plain one, and the sampled ones estimate what they say."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bert4rec.losses import LOSSES, Loss, LossSettings, cross_entropy, sampled
from bert4rec.losses.cross_entropy import CrossEntropy
from bert4rec.losses.formulas import gbce_beta
from bert4rec.losses.negatives import Negatives, by_popularity, random_groups
from bert4rec.models.output import DotProduct

DIM = 16
OF_GRU4REC = ["top1", "top1-max", "bpr-max"]
SAMPLED = [name for name in LOSSES if name not in ("auto", "cross-entropy")]


class Case:
    """Random vectors, an output layer with two rows that are no items, and targets."""

    def __init__(self, n_queries: int, n_items: int, size: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(n_queries + n_items)
        self.h = size * torch.randn(n_queries, DIM, generator=generator)
        self.weight = nn.Parameter(torch.randn(n_items + 2, DIM, generator=generator))
        self.bias = nn.Parameter(torch.randn(n_items, generator=generator))
        self.targets = torch.randint(0, n_items, (n_queries,), generator=generator)

    def gradients(self, loss: Loss, seed: int = 0) -> tuple[torch.Tensor, ...]:
        self.weight.grad = self.bias.grad = None
        generator = torch.Generator().manual_seed(seed)
        value, grad_h = loss(self.h, DotProduct(self.weight, self.bias), self.targets, scale=0.5, generator=generator)
        assert self.weight.grad is not None
        assert self.bias.grad is not None
        weight = self.weight.grad.to_dense() if self.weight.grad.is_sparse else self.weight.grad
        return value, grad_h, weight, self.bias.grad

    def plain(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
        h, weight, bias = (each.detach().to(dtype).requires_grad_() for each in (self.h, self.weight, self.bias))
        logits = h @ weight[: len(bias)].T + bias
        value = 0.5 * F.cross_entropy(logits, self.targets, reduction="sum")
        grads = torch.autograd.grad(value, (h, weight, bias))
        return tuple(each.detach().float() for each in (value, *grads))


def assert_exact(case: Case, memory: int) -> None:
    """To 1e-5 of the plain form in double precision, or as near as the plain form in single is."""
    ours = case.gradients(CrossEntropy(memory))
    exact, single = case.plain(), case.plain(torch.float32)
    torch.testing.assert_close(ours[0], exact[0], rtol=1e-5, atol=1e-5)
    for mine, theirs, rough in zip(ours[1:], exact[1:], single[1:], strict=True):
        allowed = 1e-5 + 3 * float((rough - theirs).abs().max())
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=allowed)


@pytest.mark.parametrize("memory", [2**26, 2**16])  # enough to go over the items once, or twice
@pytest.mark.parametrize(("n_queries", "n_items"), [(1, 2), (7, 100), (700, 3416), (90, 54_542), (3, 1_000_000)])
def test_cross_entropy_is_the_plain_one(n_queries: int, n_items: int, memory: int) -> None:
    assert_exact(Case(n_queries, n_items), memory)


@pytest.mark.slow
def test_five_million_items_within_bounded_memory() -> None:
    assert_exact(Case(2, 5_000_000), 2**20)


@pytest.mark.parametrize("memory", [2**26, 2**12])
@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_extreme_logits_stay_exact_and_finite(memory: int, size: float) -> None:
    case = Case(80, 3000, size)
    ours, plain = case.gradients(CrossEntropy(memory)), case.plain()
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.isfinite().all()
        scale = float(theirs.abs().max())
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * scale)


def test_gradients_are_added_to_what_is_there() -> None:
    case = Case(5, 50)
    once = case.gradients(CrossEntropy())
    value, _ = CrossEntropy()(
        case.h, DotProduct(case.weight, case.bias), case.targets, scale=0.5, generator=torch.Generator()
    )
    assert case.weight.grad is not None
    assert value == once[0]
    torch.testing.assert_close(case.weight.grad, 2 * case.plain()[2])
    assert not case.weight.grad[50:].any()  # no items there


def test_a_nan_is_not_hidden() -> None:
    case = Case(5, 50)
    case.h[2, 3] = torch.nan
    assert case.gradients(CrossEntropy())[0].isnan()


def test_only_one_tile_is_held_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = torch.Tensor.exp2_
    monkeypatch.setattr(torch.Tensor, "exp2_", lambda self: (sizes.append(self.numel()), real(self))[1])
    Case(600, 20_000).gradients(CrossEntropy(2**10))
    assert max(sizes) <= cross_entropy.TILE_ROWS * cross_entropy.TILE_ITEMS
    assert sum(sizes) == 2 * 600 * 20_000


def settings_of(name: str, **values: object) -> LossSettings:
    """Of the values those that this loss has."""
    cls = LOSSES[name]
    has = {key: value for key, value in values.items() if key in cls.model_fields}
    settings: LossSettings = cls.model_validate({"name": name, **has})
    return settings


def of_one_query(
    name: str, wanted: torch.Tensor, scores: torch.Tensor, expected: torch.Tensor, beta: float
) -> torch.Tensor:
    """The definition of a loss: the target's score, those of K negatives, and K · their shares."""
    if name == "sampled-softmax":
        return torch.log(wanted.exp() + (scores.exp() / expected).sum()) - wanted
    if name in ("bce", "gbce"):
        return -beta * torch.sigmoid(wanted).log() - (1 - torch.sigmoid(scores)).log().sum()
    if not len(scores):
        return 0 * wanted
    if name == "bpr":
        return -torch.sigmoid(wanted - scores).log().mean()
    hardness = scores.exp() / scores.exp().sum()
    top1 = 1 / (1 + torch.exp(wanted - scores)) + 1 / (1 + torch.exp(-(scores**2)))
    if name == "top1":
        return top1.sum() / len(scores)
    if name == "top1-max":
        return (hardness * top1).sum()
    assert name == "bpr-max"
    ahead = 1 / (1 + torch.exp(scores - wanted))
    return -torch.log((hardness * ahead).sum()) + 0.7 * (hardness * scores**2).sum()


def assert_is_the_formula(case: Case, settings: LossSettings, counts: np.ndarray, items: list[torch.Tensor]) -> None:
    """The loss of `settings` is the definition for each query with its negatives `items`."""
    ours = case.gradients(settings.build(counts), seed=5)
    h = case.h.clone().requires_grad_()
    weight, bias = (p.detach().clone().requires_grad_() for p in (case.weight, case.bias))
    values = settings.model_dump()
    is_drawn = values["negatives"] != "in-batch"
    share_of_item = torch.from_numpy((counts + is_drawn) ** values.get("power", 1.0)).float()
    share_of_item = share_of_item / share_of_item.sum()
    is_gbce = settings.name == "gbce"
    beta = gbce_beta(values["n_negatives"], len(counts), 0.75) if is_gbce else 1.0
    total = torch.zeros(())
    for i, target in enumerate(case.targets.tolist()):
        others = items[i][items[i] != target]
        wanted = h[i] @ weight[target] + bias[target]
        scores = weight[others] @ h[i] + bias[others]
        expected = len(items[i]) * share_of_item[others]
        total = total + of_one_query(settings.name, wanted, scores, expected, beta)
    plain = (0.5 * total).detach(), *torch.autograd.grad(0.5 * total, (h, weight, bias))
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("k", [3, 100])
@pytest.mark.parametrize("power", [1.0, 0.5])
def test_sampled_gradients_are_those_of_the_formula(name: str, k: int, power: float) -> None:
    """Against the definition, written out for one query at a time, with the same draws."""
    case, counts = Case(6, 40, size=0.5), np.arange(1, 41)
    is_shared = k >= sampled.SHARED_FROM
    drawn = Negatives((counts + 1) ** power).draw((1 if is_shared else 6, k), torch.Generator().manual_seed(5))
    items = [drawn[0 if is_shared else i] for i in range(6)]
    settings = settings_of(name, n_negatives=k, negatives="popularity", power=power, penalty=0.7)
    assert_is_the_formula(case, settings, counts, items)


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("k", [1, 3, 50])  # groups of two, of four with one filled up, of all
@pytest.mark.parametrize("at_once", [2**22, 1])
def test_negatives_of_the_batch_are_the_targets_of_others(
    name: str, k: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled, "AT_ONCE", at_once)
    n_queries, n_items = 10, 8  # some targets occur twice
    case, counts = Case(n_queries, n_items, size=0.5), np.arange(1, n_items + 1)
    groups = random_groups(n_queries, k, torch.Generator().manual_seed(5))
    items: list[torch.Tensor] = [torch.empty(0)] * n_queries
    for place, position in enumerate(groups.flatten()[:n_queries].tolist()):
        group = groups[place // groups.shape[1]]
        items[position] = case.targets[group[group != position]]
    settings = settings_of(name, n_negatives=k, negatives="in-batch", penalty=0.7)
    assert_is_the_formula(case, settings, counts, items)


def test_groups_hold_every_query_once_and_none_twice_in_a_group() -> None:
    for n_queries, k in ((1, 5), (10, 3), (12, 3), (5, 9)):
        groups = random_groups(n_queries, k, torch.Generator().manual_seed(1))
        assert groups.shape[1] == min(k + 1, n_queries)
        assert sorted(groups.flatten()[:n_queries].tolist()) == list(range(n_queries))
        assert all(len(set(group)) == len(group) for group in groups.tolist())


@pytest.mark.parametrize("name", ["bpr", *OF_GRU4REC])
@pytest.mark.parametrize("negatives", ["uniform", "in-batch"])
def test_a_query_whose_negatives_are_all_its_target_learns_nothing(name: str, negatives: str) -> None:
    case = Case(4, 1)  # one item: it is the target and every negative
    settings = settings_of(name, n_negatives=3, negatives=negatives)
    for each in case.gradients(settings.build(np.ones(1, dtype=np.int64))):
        assert not each.any()  # and no NaN, which would be true


@pytest.mark.parametrize("name", OF_GRU4REC)
def test_extreme_scores_give_finite_gradients(name: str) -> None:
    case = Case(6, 40, size=1000.0)
    loss = settings_of(name, n_negatives=100).build(np.ones(40, dtype=np.int64))
    assert all(each.isfinite().all() for each in case.gradients(loss))


def test_the_power_leads_from_uniform_to_popularity() -> None:
    counts = np.array([0, 3, 15])  # what was never trained on is drawn, too
    items = torch.arange(3)
    for power, expected in ((0.0, [1, 1, 1]), (0.5, [1, 2, 4]), (1.0, [1, 4, 16])):
        shares = by_popularity(counts, power).log_expected(items, 1).exp()
        wanted = torch.tensor(expected) / sum(expected)
        torch.testing.assert_close(shares, wanted, atol=1e-6, rtol=0)


def test_sampled_softmax_nears_the_full_one_as_negatives_grow() -> None:
    case = Case(4, 200, size=0.3)
    full = float(case.plain()[0])
    gaps = []
    for k in (64, 512, 20_000):
        loss = settings_of("sampled-softmax", n_negatives=k).build(np.ones(200, dtype=np.int64))
        values = [float(case.gradients(loss, seed)[0].detach()) for seed in range(40)]
        gaps.append(full - float(np.mean(values)))
    assert abs(gaps[2]) < 0.01 * full
    assert abs(gaps[2]) < abs(gaps[0])
    assert gaps[0] > 0  # too low on average, as documented


def test_negatives_come_in_proportion_and_their_expectation_is_known() -> None:
    negatives = Negatives(np.array([1.0, 0.0, 3.0]))
    drawn = negatives.draw((1, 100_000), torch.Generator().manual_seed(0)).flatten()
    shares = torch.bincount(drawn, minlength=3) / len(drawn)
    torch.testing.assert_close(shares, torch.tensor([0.25, 0.0, 0.75]), atol=0.01, rtol=0)
    expected = negatives.log_expected(torch.tensor([0, 2]), 8).exp()
    torch.testing.assert_close(expected, torch.tensor([2.0, 6.0]))


def test_gbce_runs_from_bce_to_full_calibration() -> None:
    assert gbce_beta(10, 1001, 0.0) == pytest.approx(1.0)
    assert gbce_beta(10, 1001, 1.0) == pytest.approx(0.01)
    assert math.isfinite(gbce_beta(5000, 1001, 0.75))


def test_sampled_gradients_leave_other_rows_alone() -> None:
    case = Case(3, 30_000)
    loss = settings_of("bce", n_negatives=2).build(np.ones(30_000, dtype=np.int64))
    *_, weight, _ = case.gradients(loss)
    assert loss.is_sparse
    assert 3 <= int(weight.abs().sum(1).count_nonzero()) <= 9
