"""The two baselines that only count: popularity and the first-order Markov chain."""

import gzip
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bert4rec.data.sequences import Sequences, Vocabulary
from bert4rec.data.splits import Spans, leave_one_out
from bert4rec.evaluation.evaluate import evaluate
from bert4rec.models.markov import PRIOR, MarkovChain
from bert4rec.models.popularity import Popularity
from bert4rec.scoring import score_rows

N_ITEMS, PAD = 5, 5
AnyModel = TypeVar("AnyModel", Popularity, MarkovChain)
HISTORIES = [[0, 1, 2], [0, 1, 3], [1, 2], [0], [0, 3]]


def spans(histories: list[list[int]]) -> Spans:
    lengths = np.array([len(history) for history in histories])
    ends = np.cumsum(lengths)
    tokens = np.array([token for history in histories for token in history], dtype=np.int32)
    return Spans(tokens, ends - lengths, ends, np.arange(len(histories)))


def fit(cls: type[AnyModel], train: Spans, n_items: int) -> AnyModel:
    return cls.fit(train, n_items, cls.settings_class())


def scores_after(model: Popularity | MarkovChain, *histories: list[int]) -> torch.Tensor:
    return score_rows(model, torch.full((len(histories),), -1), torch.tensor(histories))


@torch.inference_mode()
def test_popularity_is_the_log_of_the_training_count_whatever_the_history() -> None:
    model = fit(Popularity, spans(HISTORIES), N_ITEMS)
    scores = scores_after(model, [0, 1], [4, PAD])
    assert scores.dtype == torch.float32
    np.testing.assert_allclose(scores.exp().numpy(), [[4, 3, 2, 2, 0.5]] * 2, rtol=1e-6)
    scores[0] = -1  # a caller may write over its own scores
    assert torch.equal(scores_after(model, [0, 1])[0], scores[1])


def test_markov_probabilities_equal_those_worked_by_hand() -> None:
    model = fit(MarkovChain, spans(HISTORIES), N_ITEMS)
    share = np.array([4, 3, 2, 2, 0.5]) / 11.5
    after_0 = (np.array([0, 2, 0, 1, 0]) + PRIOR * share) / (3 + PRIOR)
    after_1 = (np.array([0, 0, 2, 1, 0]) + PRIOR * share) / (3 + PRIOR)
    scores = scores_after(model, [3, 0], [0, 1], [1, 4])
    assert scores.dtype == torch.float32
    # Spans touch in the flat array: no transition leads from one user's last item to the next's.
    np.testing.assert_allclose(scores.exp().numpy(), [after_0, after_1, share], rtol=1e-6)


def test_markov_probabilities_sum_to_one_and_back_off_stays_below_what_was_observed() -> None:
    generator = np.random.default_rng(0)
    histories = [(generator.zipf(1.3, 40) % 30).tolist() for _ in range(50)]
    model = fit(MarkovChain, spans(histories), 30)
    observed = {pair for history in histories for pair in pairwise(history)}
    scores = scores_after(model, *([item] for item in range(30)))
    np.testing.assert_allclose(scores.exp().sum(1).numpy(), 1, rtol=1e-5)
    for item in range(30):
        follows = torch.tensor([(item, other) in observed for other in range(30)])
        if follows.any() and not follows.all():
            assert scores[item, follows].min() > scores[item, ~follows].max()


def test_padding_and_earlier_items_do_not_change_the_chain() -> None:
    model = fit(MarkovChain, spans(HISTORIES), N_ITEMS)
    scores = scores_after(model, [3, 1, PAD, PAD], [2, 2, 0, 1], [1, *[PAD] * 3])
    for row in scores:
        assert torch.equal(row, scores[0])
    assert torch.equal(scores_after(model, [0], [1])[1], scores[0])


@pytest.mark.parametrize("length", [0, 3])
def test_an_empty_history_gets_popularity(length: int) -> None:
    empty = torch.full((2, length), PAD)
    users = torch.zeros(2, dtype=torch.int64)
    chain, counts = (score_rows(fit(cls, spans(HISTORIES), N_ITEMS), users, empty) for cls in (MarkovChain, Popularity))
    np.testing.assert_allclose(chain.numpy(), counts.log_softmax(1).numpy(), rtol=1e-6)


@pytest.mark.parametrize("cls", [Popularity, MarkovChain])
def test_saved_and_loaded_scores_are_equal(cls: type[Popularity] | type[MarkovChain], tmp_path: Path) -> None:
    model = fit(cls, spans(HISTORIES), N_ITEMS)
    save_file(model.state(), tmp_path / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    again = cls.restore(tensors, cls.settings_class(), N_ITEMS)
    assert again.n_items == N_ITEMS
    histories = [[0, 1], [4, PAD], [PAD, PAD]]
    assert torch.equal(scores_after(again, *histories), scores_after(model, *histories))


def test_a_cycle_is_known_to_the_chain() -> None:
    cycle = [0, 1, 2, 3, 4] * 3
    model = fit(MarkovChain, spans([cycle]), N_ITEMS)
    scores = scores_after(model, *([item] for item in range(5)))
    assert scores.argmax(1).tolist() == [1, 2, 3, 4, 0]


def test_popularity_on_ml_1m_reproduces_the_papers_table(shared_data: Path) -> None:
    """Table 2, POP: the counts, the split, the sampler and the metrics all have to be right."""
    with gzip.open(shared_data / "ml-1m" / "ml-1m.txt.gz") as file:
        pairs = np.array(file.read().split(), dtype=np.int64).reshape(-1, 2)
    users, row = np.unique(pairs[:, 0], return_inverse=True)
    items, token = np.unique(pairs[:, 1], return_inverse=True)
    tokens = token[np.argsort(row, kind="stable")].astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row))])
    vocabulary = Vocabulary([str(item) for item in items], np.bincount(tokens))
    split = leave_one_out(Sequences(tokens, offsets, vocabulary, [str(user) for user in users]))
    found = evaluate(
        fit(Popularity, split.train, split.n_items),
        split.test,
        train_counts=split.train_counts,
        protocols=("popularity",),
        bootstrap=0,
    )
    paper = {"HR@1": 0.0141, "HR@5": 0.0715, "HR@10": 0.1358, "NDCG@10": 0.0621, "MRR": 0.0627}
    for metric, value in paper.items():
        assert found.value(metric, "popularity") == pytest.approx(value, abs=0.006), metric
