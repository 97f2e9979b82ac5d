"""The one scoring path: every way to a rank or a recommendation gives what the scores say.

What they say is worked out here in plain Python, from the scores of each history alone.
"""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from toys import random_histories, small_config

import bert4rec
from bert4rec.data.splits import HeldOut, Spans, leave_one_out
from bert4rec.evaluation.evaluate import evaluate
from bert4rec.item_mask import ExcludedItems, ItemMask
from bert4rec.models import MODELS, Model, is_trained
from bert4rec.models.popularity import Popularity
from bert4rec.recommender import RecommendationRequest, Recommendations, Recommender
from bert4rec.retrieval import item_index
from bert4rec.retrieval.item_index import IndexQuality, ItemIndex
from bert4rec.scoring import UNREACHABLE, Ranking, dot_product_of, rank_held_out, rank_of, score_rows
from bert4rec.training.setup import build_model

N_ITEMS, N_USERS, MAX_LEN = 30, 12, 12
SEQUENCES = random_histories(0, n_users=N_USERS, n_items=N_ITEMS)
ALL = frozenset(range(N_ITEMS))
UNKNOWN_USER = -1
# Empty, unknown ids alone, repeats, and longer than any model here reads.
HISTORIES = [[], [3], [4, 5, 4], list(range(8)), [*range(20), 7, 7], [9] * 15 + [11, 12], [29]]


@cache
def recommender(name: str) -> Recommender:
    """Random weights that give clearly different scores, or a model that is fitted."""
    config = small_config(recipe=name)
    model_class = MODELS[name]
    model: Model
    if not is_trained(model_class):
        model = model_class.fit(leave_one_out(SEQUENCES).train, N_ITEMS, config.model)
    else:
        network = build_model(config, N_ITEMS, N_USERS).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(std=0.3, generator=generator)
        model = network
    return Recommender(model, SEQUENCES.vocabulary, config, {})


READS_HISTORIES = [name for name in MODELS if not MODELS[name].needs_known_user]
HAS_PRODUCTS = [name for name in READS_HISTORIES if dot_product_of(recommender(name).model) is not None]


@cache
def indexed(name: str) -> Recommender:
    """By an index of five lists, all of which are searched."""
    exact = recommender(name)
    output = dot_product_of(exact.model)
    assert output is not None
    width = output.block(0, 1)[0].shape[1] + 1
    centroids = torch.randn(5, width, generator=torch.Generator().manual_seed(0))
    all_lists = IndexQuality(5, 50, 1.0, 1.0, 0, 0, 0.0, depth=float("inf"))
    index = ItemIndex(centroids, (torch.arange(N_ITEMS) % 5).int(), output, all_lists)
    return Recommender(exact.model, exact.vocabulary, exact.config, {}, index)


def scores_of(model: Model, history: list[int], user: int = UNKNOWN_USER) -> list[float]:
    """Of one history alone, cut to what the model reads."""
    n = len(history) if model.max_history is None else model.max_history
    read = history[len(history) - n :] if n < len(history) else history
    rows = torch.tensor([read], dtype=torch.int64)
    found: list[float] = score_rows(model, torch.tensor([user]), rows)[0].tolist()
    return found


class Limits(NamedTuple):
    """Which items may be recommended."""

    exclude_seen: bool = True
    allow: frozenset[int] | None = None
    block: frozenset[int] | None = None

    def of(self, history: list[int]) -> set[int]:
        allowed = set(ALL if self.allow is None else self.allow)
        seen = set(history) if self.exclude_seen else set()
        return allowed - seen - (self.block or set())

    def raw(self) -> tuple[bool, list[str] | None, list[str] | None]:
        return self.exclude_seen, _raw_or_none(self.allow), _raw_or_none(self.block)


LIMITS = [
    Limits(),
    Limits(exclude_seen=False),
    Limits(allow=frozenset({3, 7, 8, 21})),
    Limits(block=frozenset(range(5, 25))),
    Limits(False, frozenset({3, 7, 8, 21}), frozenset({7})),
    Limits(allow=frozenset()),
]


def raw(history: list[int]) -> list[object]:
    """With ids between that no model knows: they change nothing."""
    return ["unknown", *(f"item-{token}" for token in history), 7.5]


def _raw_or_none(items: frozenset[int] | None) -> list[str] | None:
    return None if items is None else [*(f"item-{token}" for token in sorted(items)), "unknown"]


def spans_of(histories: list[list[int]], users: list[int]) -> Spans:
    tokens = np.array([token for history in histories for token in history], dtype=np.int32)
    ends = np.cumsum([len(history) for history in histories])
    starts = np.concatenate([[0], ends[:-1]])
    return Spans(tokens, starts, ends, np.array(users, dtype=np.int64))


def check_best(items: list[int], scores: list[float], of: list[float], may: set[int]) -> None:
    """`items` are the best of those that may be recommended, in order, with their scores."""
    best = sorted((of[token] for token in may), reverse=True)[: len(items)]
    assert set(items) <= may
    assert len(set(items)) == len(items)
    assert scores == pytest.approx(best, rel=1e-4, abs=1e-3)
    assert [of[token] for token in items] == pytest.approx(best, rel=1e-4, abs=1e-3)


def check_named(found: Recommendations, of: list[float], may: set[int], k: int) -> None:
    items = [int(str(each.item).removeprefix("item-")) for each in found]
    assert len(items) == min(k, len(may))
    check_best(items, [each.score for each in found], of, may)


def check_arrays(found: Ranking, row: int, of: list[float], may: set[int], k: int) -> None:
    n = int(found.n_found[row])
    assert n == min(k, len(may))
    check_best(found.items[row, :n].tolist(), found.scores[row, :n].tolist(), of, may)


# Ranks

SCORES = torch.tensor([[0.1, 0.9, 0.5, 0.5, 0.2]])


@pytest.mark.parametrize(
    ("target", "seen", "rank"),
    [
        (1, [], 1),
        (2, [], 3),  # tied with 3, which goes first
        (3, [], 3),
        (0, [], 5),
        (2, [1, 0], 2),
        (4, [1, 0], 3),
        (1, [1, 0], UNREACHABLE),
        (2, [3], 2),  # no longer tied
    ],
)
def test_a_rank_equals_a_table_worked_by_hand(target: int, seen: list[int], rank: int) -> None:
    scores = SCORES.clone()
    ItemMask(5, torch.tensor(seen, dtype=torch.int64)).hide(scores)
    assert rank_of(scores, torch.tensor([target])).tolist() == [rank]


def test_a_rank_follows_its_definition_also_with_ties_and_infinities() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 6, (200, 12), generator=generator).float()  # many ties
    scores[scores == 0] = -torch.inf
    scores[scores == 5] = torch.inf
    targets = torch.randint(0, 12, (200,), generator=generator)
    histories = [torch.randint(0, 12, (i % 8,), generator=generator).tolist() for i in range(200)]
    masked = scores.clone()
    spans = spans_of(histories, [0] * 200)
    ItemMask.of_histories(spans, 12, exclude_seen=True).hide(masked)
    ranks = rank_of(masked, targets).tolist()
    for row, target in enumerate(targets.tolist()):
        seen = set(histories[row])
        others = [j for j in range(12) if j != target and j not in seen]
        rank = 1 + sum(bool(scores[row, j] >= scores[row, target]) for j in others)
        # An item without a finite score is never recommended, whether it was seen or not.
        is_reachable = target not in seen and scores[row, target] > -torch.inf
        assert ranks[row] == (rank if is_reachable else UNREACHABLE)
    assert UNREACHABLE in ranks


def held_out(users: list[int], histories: list[list[int]]) -> HeldOut:
    """Targets are of all kinds: seen, not seen, read and not read."""
    targets = (7 * np.arange(len(histories)) + 3) % N_ITEMS
    return HeldOut(spans_of(histories, users), targets.astype(np.int64))


def ranks_by_hand(model: Model, users: HeldOut, exclude_seen: bool) -> tuple[list[list[float]], list[int]]:
    scores, ranks = [], []
    for row, target in enumerate(users.targets.tolist()):
        history = users.histories[row].tolist()
        of = scores_of(model, history, int(users.users[row]))
        may = Limits(exclude_seen).of(history)
        rank = sum(of[token] >= of[target] for token in may)
        scores.append(of)
        ranks.append(rank if target in may else UNREACHABLE)
    return scores, ranks


@pytest.mark.parametrize("exclude_seen", [True, False])
@pytest.mark.parametrize("name", list(MODELS))
def test_validation_evaluation_and_top_k_agree_for_known_users(name: str, exclude_seen: bool) -> None:
    model = recommender(name).model
    histories = [SEQUENCES.tokens[a:b].tolist() for a, b in zip(*_bounds(), strict=True)]
    users = held_out(list(range(N_USERS)), histories)
    scores, ranks = ranks_by_hand(model, users, exclude_seen)
    assert UNREACHABLE in ranks or not exclude_seen
    assert max(map(len, histories)) > MAX_LEN
    assert rank_held_out(model, users, exclude_seen=exclude_seen).tolist() == ranks
    counts = np.ones(N_ITEMS, dtype=np.int64)
    found = evaluate(model, users, train_counts=counts, exclude_seen=exclude_seen, protocols=("full",))
    assert found.ranks["full"].tolist() == ranks
    [best] = recommender(name).top_k(users.histories, 8, exclude_seen=exclude_seen)
    for row, history in enumerate(histories):
        check_arrays(best, row, scores[row], Limits(exclude_seen).of(history), 8)


def _bounds() -> tuple[list[int], list[int]]:
    return SEQUENCES.offsets[:-1].tolist(), SEQUENCES.offsets[1:].tolist()


@pytest.mark.parametrize("exclude_seen", [True, False])
@pytest.mark.parametrize("name", READS_HISTORIES)
def test_the_rank_in_an_evaluation_is_the_place_in_the_recommendations(name: str, exclude_seen: bool) -> None:
    """Of items with the same score it is the last place: ties come before the target."""
    histories = [history for history in HISTORIES if history]
    users = held_out([UNKNOWN_USER] * len(histories), histories)
    ranks = rank_held_out(recommender(name).model, users, exclude_seen=exclude_seen).tolist()
    for history, target, rank in zip(histories, users.targets.tolist(), ranks, strict=True):
        found = list(recommender(name).recommend(raw(history), N_ITEMS, exclude_seen))
        scores = {each.item: each.score for each in found}
        score = scores.get(f"item-{target}")
        if score is None:
            assert rank == UNREACHABLE
        else:
            assert rank == sum(other >= score for other in scores.values())
            assert found[rank - 1].score == score


# Recommendations


def check_every_way(by: Recommender, limits: Limits, k: int) -> None:
    """recommend, recommend_many, answer_requests and top_k, for all histories."""
    fallback = Popularity(torch.from_numpy(SEQUENCES.vocabulary.counts))
    expected = [(scores_of(by.model if history else fallback, history), limits.of(history)) for history in HISTORIES]
    exclude_seen, allow, block = limits.raw()
    many = by.recommend_many(map(raw, HISTORIES), k, exclude_seen, allow, block)
    requests = [RecommendationRequest(raw(each), k, exclude_seen, allow, block) for each in HISTORIES]
    other = RecommendationRequest(["item-2"], 3)  # of another kind, in the same batch
    together = by.answer_requests([other, *requests, other])[1:-1]
    spans = spans_of(HISTORIES, [UNKNOWN_USER] * len(HISTORIES))
    excluded = by.excluded(allow, block)
    [arrays] = by.top_k(spans, k, exclude_seen=exclude_seen, excluded=excluded)
    for row, (history, found) in enumerate(zip(HISTORIES, many, strict=True)):
        alone = by.recommend(raw(history), k, exclude_seen, allow, block)
        for each in (found, together[row], alone):
            check_named(each, *expected[row], k)
            assert each.unknown == ["unknown", 7.5]
            assert each.is_fallback == (not history)
        check_arrays(arrays, row, *expected[row], k)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", READS_HISTORIES)
def test_every_way_to_recommend_gives_what_the_scores_say(name: str, limits: Limits) -> None:
    for k in (4, N_ITEMS):
        check_every_way(recommender(name), limits, k)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", HAS_PRODUCTS)
def test_an_index_that_searches_all_lists_gives_what_the_scores_say(
    name: str, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_index, "MOST_SEARCHED", 1)
    check_every_way(indexed(name), limits, 4)
    if limits == Limits():
        found = indexed(name).recommend(["item-3"], 4)
        assert all(np.isnan(each.probability) for each in found)  # by the index, not exactly


def test_items_that_are_too_old_to_be_read_are_seen_all_the_same() -> None:
    history = [*range(15), *[20] * MAX_LEN]
    found = recommender("sasrec").recommend(raw(history), N_ITEMS)
    assert {each.item for each in found} == {f"item-{i}" for i in ALL - set(history)}
    cut = recommender("sasrec").recommend(raw(history), N_ITEMS, exclude_seen=False)
    short = recommender("sasrec").recommend(["item-20"] * MAX_LEN, N_ITEMS, exclude_seen=False)
    assert [each.item for each in cut] == [each.item for each in short]


# Masks


def test_a_mask_hides_the_same_in_blocks_and_as_a_whole() -> None:
    spans = spans_of(HISTORIES, [0] * len(HISTORIES))
    excluded = torch.zeros(N_ITEMS, dtype=torch.bool)
    excluded[[1, 28]] = True
    seen = ItemMask.of_histories(spans, N_ITEMS, exclude_seen=True, excluded=ExcludedItems(excluded))
    mask = ItemMask(N_ITEMS, seen.hidden, seen.excluded, {2: torch.tensor([28, 6, 5, 0])})
    whole = torch.zeros(len(HISTORIES), N_ITEMS)
    mask.hide(whole)
    blocks = []
    for first in range(0, N_ITEMS, 7):
        block = torch.zeros(len(HISTORIES), min(7, N_ITEMS - first))
        mask.hide(block, first)
        blocks.append(block)
    assert torch.equal(torch.cat(blocks, 1), whole)
    for row, history in enumerate(HISTORIES):
        may = ALL - set(history) - {1, 28}
        kept = set((whole[row] == 0).nonzero()[:, 0].tolist())
        assert kept == (may & {28, 6, 5, 0} if row == 2 else may)
    without_list = ItemMask(N_ITEMS, seen.hidden, seen.excluded)
    keeps = without_list.keeps(torch.arange(-1, N_ITEMS).expand(len(HISTORIES), -1))
    hidden = torch.zeros(len(HISTORIES), N_ITEMS)
    without_list.hide(hidden)
    assert torch.equal(keeps, torch.nn.functional.pad(hidden == 0, (1, 0)))


def test_a_mask_of_some_rows_or_items_hides_what_the_whole_one_does() -> None:
    spans = spans_of(HISTORIES, [0] * len(HISTORIES))
    mask = ItemMask.of_histories(spans, N_ITEMS, exclude_seen=True)
    whole = hidden_by(mask, len(HISTORIES), N_ITEMS)
    rows, items = torch.tensor([4, 1, 5]), torch.tensor([0, 3, 4, 11, 29])
    assert torch.equal(hidden_by(mask.of_rows(rows), 3, N_ITEMS), whole[rows])
    assert torch.equal(hidden_by(mask.among(items), len(HISTORIES), 5), whole[:, items])
    nobody = ItemMask.of_histories(spans, N_ITEMS, exclude_seen=False)
    assert not hidden_by(nobody, len(HISTORIES), N_ITEMS).any()


def hidden_by(mask: ItemMask, n_rows: int, n_items: int) -> Tensor:
    scores = torch.zeros(n_rows, n_items)
    mask.hide(scores)
    return scores == -torch.inf


# The shape of the code


def test_histories_are_cut_and_items_hidden_in_one_place() -> None:
    """Whoever cuts reads `max_history`, and whoever hides makes an `ItemMask`.

    Besides the scoring path only the training with sharded items does, which has no whole row of
    scores. The service shows the number to its users.
    """
    source = Path(bert4rec.__file__).parent
    allowed = {"scoring.py", "item_mask.py", "distributed/sharded_items.py"}
    allowed.add("serving/http/api_routes.py")
    doing_so = re.compile(r"\.max_history\b|\bItemMask\(")
    for path in source.rglob("*.py"):
        place = path.relative_to(source).as_posix()
        if place not in allowed and not place.startswith("models/"):  # which define max_history
            assert not doing_so.search(path.read_text(encoding="utf-8")), place
