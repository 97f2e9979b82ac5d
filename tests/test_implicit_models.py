"""Item-kNN and BPR-MF, which the `implicit` library fits: neither reads the order of a history."""

import subprocess
import sys
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import cycle, random_histories, sequences_of

from bert4rec.config import load_config
from bert4rec.data.splits import Spans, leave_one_out
from bert4rec.models import item_knn
from bert4rec.models.bpr_mf import BPRMF, BPRMFSettings
from bert4rec.models.item_knn import ItemKNN, ItemKNNSettings
from bert4rec.models.markov import MarkovChain, MarkovSettings
from bert4rec.models.popularity import Popularity, PopularitySettings
from bert4rec.scoring import rank_held_out, score_rows

N_ITEMS, PAD = 5, 5
# Who had what: item 0 {0, 1, 2}, item 1 {0, 1}, item 2 {0, 3}, item 3 {1}, item 4 nobody.
HISTORIES = [[0, 1, 2], [3, 0, 1, 0], [0], [2]]
AnyModel = TypeVar("AnyModel", ItemKNN, BPRMF)
MODELS = [ItemKNN, BPRMF]


def spans(histories: list[list[int]], n_items: int = N_ITEMS) -> Spans:
    sequences = sequences_of(histories, n_items)
    rows = np.arange(len(histories))
    return Spans(sequences.tokens, sequences.offsets[:-1], sequences.offsets[1:], rows)


def settings_of(cls: type[AnyModel], **values: object) -> Any:
    few = {"epochs": 20, "dim": 16} if cls is BPRMF else {"similarity": "cosine"}
    return cls.settings_class.model_validate(few | values)


def fitted(cls: type[AnyModel], seed: int = 0, **values: object) -> AnyModel:
    toy = random_histories(0)
    return cls.fit(leave_one_out(toy).train, toy.n_items, settings_of(cls, **values), seed)


def knn(histories: list[list[int]], **values: object) -> ItemKNN:
    return ItemKNN.fit(spans(histories), N_ITEMS, settings_of(ItemKNN, **values))


def after(model: ItemKNN, *histories: list[int]) -> Tensor:
    return score_rows(model, torch.full((len(histories),), -1), torch.tensor(histories))


# What every model promises.


@pytest.mark.parametrize("cls", MODELS)
def test_padding_and_the_other_rows_of_a_batch_change_no_score(cls: type[ItemKNN] | type[BPRMF]) -> None:
    model, pad = fitted(cls), 30
    history = torch.tensor([[3, 9, 3, 29, pad, pad], [7, 1, 2, 3, pad, pad], [pad] * 6])
    users = torch.tensor([2, 0, 5])
    together = score_rows(model, users, history)
    assert together.shape == (3, 30)
    assert together.dtype == torch.float32
    assert together.isfinite().all()
    for row, short in enumerate(([3, 9, 3, 29], [7, 1, 2, 3], [])):
        alone = score_rows(model, users[row : row + 1], torch.tensor([short], dtype=torch.int64))
        torch.testing.assert_close(alone[0], together[row], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("cls", MODELS)
@torch.inference_mode()  # as all callers are, who write over scores
def test_a_caller_may_write_over_its_scores(cls: type[ItemKNN] | type[BPRMF]) -> None:
    model = fitted(cls)
    users, history = torch.tensor([1]), torch.tensor([[4, 5]])
    first = score_rows(model, users, history)
    kept = first.clone()
    first.fill_(-torch.inf)
    assert torch.equal(score_rows(model, users, history), kept)


@pytest.mark.parametrize("cls", MODELS)
def test_saved_and_loaded_scores_are_equal(cls: type[ItemKNN] | type[BPRMF], tmp_path: Path) -> None:
    model = fitted(cls)
    save_file(model.state(), tmp_path / "model.safetensors")
    again = cls.restore(load_file(tmp_path / "model.safetensors"), settings_of(cls), 30)
    assert again.n_items == 30
    users, history = torch.tensor([0, 3]), torch.tensor([[1, 2], [8, 30]])
    assert torch.equal(score_rows(again, users, history), score_rows(model, users, history))


@pytest.mark.parametrize("cls", MODELS)
def test_the_same_seed_gives_the_same_model(cls: type[ItemKNN] | type[BPRMF]) -> None:
    one, two = fitted(cls).state(), fitted(cls).state()
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def test_another_seed_gives_another_factorisation() -> None:
    one, two = fitted(BPRMF), fitted(BPRMF, seed=1)
    assert not torch.equal(one.state()["item_factors"], two.state()["item_factors"])


@pytest.mark.parametrize("cls", MODELS)
def test_a_missing_library_is_said_with_the_remedy(
    cls: type[ItemKNN] | type[BPRMF], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_knn, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'bert4rec\[lab\]'"):
        fitted(cls)


def test_scoring_a_saved_model_loads_neither_implicit_nor_scipy(tmp_path: Path) -> None:
    save_file(fitted(ItemKNN).state(), tmp_path / "knn.safetensors")
    save_file(fitted(BPRMF).state(), tmp_path / "bpr.safetensors")
    program = f"""
import sys, torch
from safetensors.torch import load_file
from bert4rec.models.bpr_mf import BPRMF
from bert4rec.models.item_knn import ItemKNN
from bert4rec.scoring import score_rows
for cls, name in ((ItemKNN, "knn"), (BPRMF, "bpr")):
    tensors = load_file(f"{tmp_path}/{{name}}.safetensors")
    model = cls.restore(tensors, cls.settings_class(), 30)
    assert score_rows(model, torch.tensor([0]), torch.tensor([[1, 2]])).shape == (1, 30)
assert not {{"implicit", "scipy"}} & set(sys.modules), "a fitting library was loaded"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# Item-kNN.


def test_cosine_similarities_equal_those_worked_by_hand() -> None:
    """|users of both| / sqrt(|users of one| · |users of the other|); never with itself."""
    scores = after(knn(HISTORIES), [0], [1], [2], [3], [4])
    similar = np.zeros((5, 5))
    similar[0, 1] = similar[1, 0] = 2 / np.sqrt(3 * 2)
    similar[0, 2] = similar[2, 0] = 1 / np.sqrt(3 * 2)
    similar[0, 3] = similar[3, 0] = 1 / np.sqrt(3 * 1)  # user 1 had item 0 twice: counts once
    similar[1, 2] = similar[2, 1] = 1 / np.sqrt(2 * 2)
    similar[1, 3] = similar[3, 1] = 1 / np.sqrt(2 * 1)
    np.testing.assert_allclose(scores.numpy(), similar, rtol=1e-6)


def test_a_history_scores_the_sum_over_its_distinct_items() -> None:
    model = knn(HISTORIES)
    each = after(model, [0], [1], [2], [3])
    both = after(model, [0, 2, PAD], [2, 0, 2], [PAD, PAD, PAD])
    torch.testing.assert_close(both[0], each[0] + each[2])
    assert torch.equal(both[0], both[1])
    assert both[2].count_nonzero() == 0


def test_only_the_nearest_neighbours_are_kept() -> None:
    """Item 0 is most like item 1, which is most like item 0; the others keep their best too."""
    scores = after(knn(HISTORIES, neighbours=1), [0], [1], [2], [3], [4])
    assert scores.count_nonzero(dim=1).tolist() == [1, 1, 1, 1, 0]
    assert scores.argmax(dim=1).tolist()[:4] == [1, 0, 1, 1]


@pytest.mark.parametrize("similarity", ["cosine", "tfidf", "bm25"])
@pytest.mark.parametrize("n_neighbours", [1, 3, 1000])
def test_no_item_has_more_neighbours_than_the_setting_or_itself(similarity: str, n_neighbours: int) -> None:
    model = fitted(ItemKNN, similarity=similarity, neighbours=n_neighbours)
    n_each = model.offsets.diff()
    assert n_each.max() == min(n_neighbours, 29)
    of = torch.repeat_interleave(n_each)
    assert (of != model.columns).all()
    assert (model.values != 0).all()


def test_tfidf_weighs_a_user_by_how_few_items_they_have() -> None:
    """idf(u) = ln(items) - ln(1 + items of u): a hand-worked cosine of weighted columns."""
    scores = after(knn(HISTORIES, similarity="tfidf"), [1])
    idf = np.log(5) - np.log1p([3, 3, 1, 1])
    norm_0, norm_1, norm_2 = (np.sqrt((idf[u] ** 2).sum()) for u in ([0, 1, 2], [0, 1], [0, 3]))
    expected = {0: (idf[0] ** 2 + idf[1] ** 2) / (norm_0 * norm_1)}
    expected[2] = idf[0] ** 2 / (norm_1 * norm_2)
    for item, value in expected.items():
        assert scores[0, item].item() == pytest.approx(value, rel=1e-5)


def test_users_of_no_weight_leave_scores_finite() -> None:
    """ln(5) - ln(1 + 4) = 0 for the only user: every TF-IDF norm would be 0/0."""
    scores = after(knn([[0, 1, 2, 3]], similarity="tfidf"), [0, 1])
    assert scores.count_nonzero() == 0


def test_long_histories_are_added_up_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fitted(ItemKNN)
    users = torch.full((30,), -1)
    history = torch.randint(0, 31, (30, 40), generator=torch.Generator().manual_seed(0))
    in_one_go = score_rows(model, users, history)
    for n_pairs in (1, 5000):
        monkeypatch.setattr(item_knn, "PAIRS_AT_ONCE", n_pairs)
        assert torch.equal(score_rows(model, users, history), in_one_go)


def test_item_knn_cannot_learn_an_order() -> None:
    """Any permutation of a history gives the same bits, so it cannot tell a → b from b → a."""
    toy = cycle()
    split = leave_one_out(toy)
    model = ItemKNN.fit(split.train, toy.n_items, ItemKNNSettings())
    generator = torch.Generator().manual_seed(0)
    history = torch.tensor([[0, 1, 2, 3, 4], [6, 7, 0, 1, 2]])
    users = torch.tensor([-1, -1])
    scores = score_rows(model, users, history)
    for _ in range(20):
        order = torch.randperm(5, generator=generator)
        assert torch.equal(score_rows(model, users, history[:, order]), scores)
    chain = MarkovChain.fit(split.train, toy.n_items, MarkovSettings())
    backwards = history.flip(1)
    assert not torch.equal(score_rows(chain, users, backwards), score_rows(chain, users, history))


# BPR-MF.


def test_bpr_mf_learns_two_communities_where_popularity_cannot() -> None:
    """Even users have 12 of the items 0..19, odd users 12 of the items 20..39."""
    generator, n_users, n_items = np.random.default_rng(0), 120, 40
    histories = [(generator.choice(20, size=12, replace=False) + 20 * (user % 2)).tolist() for user in range(n_users)]
    split = leave_one_out(sequences_of(histories, n_items))
    settings = BPRMFSettings(dim=16, epochs=100, regularization=0.05)
    model = BPRMF.fit(split.train, n_items, settings)
    users = torch.arange(n_users)
    scores = score_rows(model, users, torch.full((n_users, 1), n_items))
    is_own = torch.arange(n_items)[None] // 20 == users[:, None] % 2
    worst_own = scores.masked_fill(~is_own, torch.inf).amin(1)
    best_other = scores.masked_fill(is_own, -torch.inf).amax(1)
    assert (worst_own > best_other).all()
    # Of 29 unseen items 9 are of the own community: chance within it is rank 5, overall 15.
    popularity = Popularity.fit(split.train, n_items, PopularitySettings())
    assert rank_held_out(model, split.test, exclude_seen=True).double().mean() < 6
    assert rank_held_out(popularity, split.test, exclude_seen=True).double().mean() > 12


def test_the_score_is_the_product_of_factors_with_the_bias_last() -> None:
    model = fitted(BPRMF)
    assert model.user_factors.shape[1] == settings_of(BPRMF).dim + 1
    assert (model.user_factors[:, -1] == 1).all()
    user, items = model.user_factors[7], model.item_factors
    by_hand = (items[:, :-1] * user[:-1]).sum(1) + items[:, -1]
    found = score_rows(model, torch.tensor([7]), torch.tensor([[30]]))
    torch.testing.assert_close(found[0], by_hand)


def test_a_long_run_settles_where_the_gradient_of_the_paper_is_zero() -> None:
    """User 0 had item 0 and user 1 item 1, so each draws one pair (i, j) only.

    Then ∂/∂w_u = (1 - σ(x_uij)) (h_i - h_j) - λ w_u vanishes (Figure 4 of the paper).
    """
    decay = 0.05
    settings = BPRMFSettings(dim=2, epochs=3000, regularization=decay)
    model = BPRMF.fit(spans([[0], [1]], 2), 2, settings)
    users, items = model.user_factors.double(), model.item_factors.double()
    for user, (had, other) in enumerate([(0, 1), (1, 0)]):
        difference = items[had] - items[other]
        pull = (1 - torch.sigmoid(users[user] @ difference)) * difference[:-1]
        assert pull.abs().max() > 0.01
        torch.testing.assert_close(pull, decay * users[user, :-1], rtol=0.1, atol=1e-3)


@pytest.mark.parametrize("user", [-1, 3, 6, 100])
def test_unknown_users_are_refused(user: int) -> None:
    """-1 is unknown, row 3 is a user without training actions, 6 and 100 are past the last row."""
    toy = random_histories(0)
    train = leave_one_out(toy).train.take(np.array([0, 1, 2, 4, 5]))
    assert train.users.tolist() == [0, 1, 2, 4, 5]
    model = BPRMF.fit(train, toy.n_items, settings_of(BPRMF))
    assert BPRMF.needs_known_user
    assert not ItemKNN.needs_known_user
    history = torch.tensor([[1, 2], [3, 4]])
    assert score_rows(model, torch.tensor([5, 0]), history).isfinite().all()
    with pytest.raises(ValueError, match="knows only the users it was trained on"):
        score_rows(model, torch.tensor([5, user]), history)


def test_a_learning_rate_that_diverges_is_said() -> None:
    with pytest.raises(ValueError, match=r"model.learning_rate = 1e\+30"):
        fitted(BPRMF, learning_rate=1e30)


@pytest.mark.parametrize("recipe", ["bpr-mf", "item-knn"])
def test_the_recipes_name_their_model(recipe: str) -> None:
    assert load_config(recipe).model.name == recipe
