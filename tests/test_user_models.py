"""FPMC, NeuMF, Caser and CDAE: models with vectors of users, against their papers' equations."""

import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from toys import quiet, randomize, sequences_of

from bert4rec.config import Config, load_config
from bert4rec.data.sequences import Sequences
from bert4rec.losses.cross_entropy import CrossEntropy
from bert4rec.models import neumf
from bert4rec.models.caser import Caser
from bert4rec.models.cdae import CDAE
from bert4rec.models.fpmc import FPMC
from bert4rec.models.neumf import NeuMF
from bert4rec.models.sequence_model import SequenceModel
from bert4rec.pipeline import train_recommender
from bert4rec.scoring import log_probabilities_of, score_rows

N_ITEMS, N_USERS, DIM, PAD = 6, 3, 4, 6
MODELS: list[type[SequenceModel]] = [FPMC, NeuMF, Caser, CDAE]
READ_THE_HISTORY: list[type[SequenceModel]] = [FPMC, Caser, CDAE]
UNKNOWN = -1


def random_model(cls: type[SequenceModel], **values: int) -> SequenceModel:
    torch.manual_seed(7)
    settings = cls.settings_class.model_validate({"dim": DIM, "max_len": 8, "dropout": 0.5, **values})
    return randomize(cls(N_ITEMS, settings, N_USERS), 0.7)


def scored(model: SequenceModel, user: int, history: list[int]) -> list[float]:
    n = model.max_history or 0
    tokens = torch.tensor([history[max(0, len(history) - n) :]], dtype=torch.int64)
    scores: list[float] = score_rows(model, torch.tensor([user]), tokens)[0].tolist()
    return scores


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def relu(x: float) -> float:
    return max(x, 0.0)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def vector_of(table: Tensor, user: int) -> list[float]:
    """An unknown user's part is left out."""
    return [0.0] * table.shape[1] if user == UNKNOWN else table[user].tolist()


# The equations of the papers, written down again with plain loops.


@pytest.mark.parametrize("user", [1, UNKNOWN])
@pytest.mark.parametrize("history", [[4], [5, 0, 2], []])
def test_fpmc_is_what_a_user_likes_plus_what_follows_the_last_item(user: int, history: list[int]) -> None:
    model = random_model(FPMC)
    assert isinstance(model, FPMC)
    u = vector_of(model.users.weight, user)
    last = model.last_items.weight[history[-1]].tolist() if history else [0.0] * DIM
    expected = []
    for i in range(N_ITEMS):
        row = model.next_items.weight[i].tolist()
        expected.append(dot(u, row[:DIM]) + dot(row[DIM:], last))
    assert scored(model, user, history) == pytest.approx(expected, abs=1e-5)


def test_neumf_is_a_product_and_a_tower() -> None:
    model = random_model(NeuMF)
    assert isinstance(model, NeuMF)
    first = torch.cat([model.user_layer.weight, model.item_layer.weight], dim=1).tolist()
    final, c = model.final.weight[0].tolist(), model.final.bias.item()
    expected = []
    for i in range(N_ITEMS):
        p, q = model.users.weight[2].tolist(), model.item_embedding.weight[i].tolist()
        gmf = [p[k] * q[k] for k in range(DIM)]
        x = p[DIM:] + q[DIM:]  # [p' ; q'], 4 D wide
        assert len(x) == 4 * DIM
        for weight, bias in ((first, model.user_layer.bias), (model.tower.weight, model.tower.bias)):
            rows = weight if isinstance(weight, list) else weight.tolist()
            x = [relu(dot(row, x) + b) for row, b in zip(rows, bias.tolist(), strict=True)]
        assert len(x) == DIM
        expected.append(dot(final, gmf + x) + c)
    assert scored(model, 2, [0, 1]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("user", [0, UNKNOWN])
@pytest.mark.parametrize("history", [[4, 1, 5], [3, 3, 0, 2, 1, 5, 0], []])
def test_caser_is_convolutions_over_the_last_items(user: int, history: list[int]) -> None:
    model = random_model(Caser, window=4, horizontal_filters=3, vertical_filters=2)
    assert isinstance(model, Caser)
    recent = history[-4:]
    E = [[0.0] * DIM] * (4 - len(recent)) + [model.item_embedding.weight[i].tolist() for i in recent]
    o = []
    for height, layer in enumerate(model.horizontal, 1):
        for F, b in zip(layer.weight.tolist(), layer.bias.tolist(), strict=True):
            values = []
            for i in range(4 - height + 1):
                total = b
                for row in range(height):
                    for k in range(DIM):
                        total += F[row * DIM + k] * E[i + row][k]
                values.append(relu(total))
            o.append(max(values))  # each height's filters together: heights 1, 2, 3, 4
    filters = zip(model.vertical.weight.tolist(), model.vertical.bias.tolist(), strict=True)
    sums = [[sum(F[t] * E[t][k] for t in range(4)) + b for k in range(DIM)] for F, b in filters]
    o += [sums[f][k] for k in range(DIM) for f in range(2)]
    mixed = zip(model.mixed.weight.tolist(), model.mixed.bias.tolist(), strict=True)
    z = [relu(dot(row, o) + b) for row, b in mixed]
    both = z + vector_of(model.users.weight, user)
    expected = [dot(model.output_items.weight[i].tolist(), both) + model.output_bias[i].item() for i in range(N_ITEMS)]
    assert scored(model, user, history) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("user", [0, UNKNOWN])
@pytest.mark.parametrize("history", [[4, 1, 4, 5, 4], []])
def test_cdae_is_an_autoencoder_of_the_set_of_items(user: int, history: list[int]) -> None:
    model = random_model(CDAE)
    assert isinstance(model, CDAE)
    v = vector_of(model.users.weight, user)
    hidden = []
    for k in range(DIM):
        total = v[k] + model.bias[k].item()
        for j in set(history):
            total += model.item_embedding.weight[j, k].item() / math.sqrt(len(set(history)))
        hidden.append(sigmoid(total))
    expected = [
        dot(model.output_items.weight[i].tolist(), hidden) + model.output_bias[i].item() for i in range(N_ITEMS)
    ]
    assert scored(model, user, history) == pytest.approx(expected, abs=1e-5)


def test_cdae_scales_up_what_the_noise_has_left() -> None:
    """The paper's 1/(1 - q): three of five items hidden, so the other two count 2.5 times."""
    model = random_model(CDAE)
    assert isinstance(model, CDAE)
    model.train()
    model.dropout.dropped_of_256 = 0
    MASK = PAD + 1
    tokens = torch.tensor([[MASK, 3, MASK, 1, MASK], [0, MASK, 2, PAD, PAD]])
    at = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])  # the second row holds three items
    h = model.encode_queries(tokens, at, torch.tensor([0, 2]))
    W, V = model.item_embedding.weight, model.users.weight
    first = torch.sigmoid(2.5 * (W[3] + W[1]) / math.sqrt(5) + V[0] + model.bias)
    second = torch.sigmoid(1.5 * (W[0] + W[2]) / math.sqrt(3) + V[2] + model.bias)
    torch.testing.assert_close(h, torch.stack([first] * 5 + [second] * 3))


# What must not change a score, and what must.


def users_for(cls: type[SequenceModel]) -> list[int]:
    return [0, 2, 1, 2] if cls.needs_known_user else [0, 2, UNKNOWN, 1]


@pytest.mark.parametrize("cls", MODELS)
def test_padding_and_the_other_rows_of_a_batch_change_no_score(cls: type[SequenceModel]) -> None:
    model, users = random_model(cls), users_for(cls)
    histories: list[list[int]] = [[1], [4, 5, 0], [0, 1, 2, 3, 4, 5, 0, 1, 2], []]
    n = model.max_history or 0
    read = [history[-n:] for history in histories]
    rows = [history + [PAD] * (n - len(history)) for history in read]
    together = score_rows(model, torch.tensor(users), torch.tensor(rows))
    assert together.isfinite().all()
    for row, history in enumerate(histories):
        alone = scored(model, users[row], history)
        assert together[row].tolist() == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(("cls", "n"), [(FPMC, 1), (Caser, 5), (CDAE, 8)])
def test_only_the_last_items_are_read_and_all_of_them_count(cls: type[SequenceModel], n: int) -> None:
    model, history = random_model(cls), [0, 0, 1, 2, 3, 1, 2, 3, 1, 2]
    assert model.max_history == n
    changed, unread = history.copy(), history.copy()
    changed[-n] = 5
    unread[-n - 1] = 5
    items = list(range(N_ITEMS))
    whole, other, same = log_probabilities_of(model, model, [history, changed, unread], items)
    assert not torch.allclose(whole, other, atol=1e-3)
    torch.testing.assert_close(whole, same)


@pytest.mark.parametrize("cls", [FPMC, NeuMF, Caser])
def test_a_query_position_is_scored_as_the_end_of_a_history(cls: type[SequenceModel]) -> None:
    """Training queries what serving queries: nothing behind a position is read, its own item is.

    A position may be queried several times, as with several targets.
    """
    model, users = random_model(cls), torch.tensor([2, 0])
    histories = [[1, 4, 2, 0, 3, 5], [5, 5, 0, 1, PAD, PAD]]
    at = torch.tensor([0, 2, 2, 2, 5, 6, 6, 9])
    h = model.encode_queries(torch.tensor(histories), at, users)
    scores = model.output_layer().block_scores(h, 0, N_ITEMS)
    for row, place in enumerate(at.tolist()):
        user, column = divmod(place, 6)
        alone = scored(model, int(users[user]), histories[user][: column + 1])
        assert scores[row].tolist() == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("cls", READ_THE_HISTORY)
def test_users_differ_and_unknown_users_are_scored(cls: type[SequenceModel]) -> None:
    model = random_model(cls)
    answers = [scored(model, user, [1, 2, 3]) for user in (0, 1, UNKNOWN)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert answers[one] != pytest.approx(answers[other], abs=1e-2)


def test_neumf_says_that_it_cannot_score_unknown_users() -> None:
    model = random_model(NeuMF)
    assert model.needs_known_user
    with pytest.raises(ValueError, match="known user"):
        score_rows(model, torch.tensor([0, UNKNOWN]), torch.tensor([[1], [2]]))


@pytest.mark.parametrize("cls", [NeuMF, CDAE])
def test_the_order_of_a_history_changes_no_bit_of_a_score(cls: type[SequenceModel]) -> None:
    """So neither can learn that b follows a: it gives a, b and b, a the same answer."""
    model, history = random_model(cls), [0, 1, 1, 2, 3, 4, 5]
    expected = scored(model, 1, history)
    shuffle = random.Random(0)
    for _ in range(20):
        shuffle.shuffle(history)
        assert scored(model, 1, history) == expected


@pytest.mark.parametrize("cls", MODELS)
def test_a_restored_model_gives_the_same_scores(cls: type[SequenceModel]) -> None:
    model = random_model(cls)
    again = cls.restore(model.state(), model.settings, N_ITEMS)
    assert scored(again, 1, [3, 0]) == scored(model, 1, [3, 0])


# NeuMF's own output layer.


@pytest.fixture(params=[neumf.MOST_HIDDEN, 150, 1], ids=["one block", "some rows", "row by row"])
def in_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neumf, "MOST_HIDDEN", request.param)


@pytest.mark.usefixtures("in_blocks")
def test_neumfs_scores_of_all_items_are_those_of_each() -> None:
    output, h = random_model(NeuMF).output_layer(), torch.randn(7, 3 * DIM)
    everything = output.block_scores(h, 0, N_ITEMS)
    one_by_one = [output.scores(h, torch.full((7, 1), i)) for i in range(N_ITEMS)]
    torch.testing.assert_close(torch.cat(one_by_one, 1), everything)
    shared = torch.tensor([[4, 0, 4]])
    torch.testing.assert_close(output.scores(h, shared), everything[:, [4, 0, 4]])
    own = torch.randint(0, N_ITEMS, (7, 2))
    torch.testing.assert_close(output.scores(h, own), everything.gather(1, own))


@pytest.mark.usefixtures("in_blocks")
def test_neumfs_cross_entropy_has_the_same_gradients_in_blocks() -> None:
    model = random_model(NeuMF)
    h, targets = torch.randn(7, 3 * DIM), torch.tensor([0, 5, 1, 1, 2, 4, 3])
    loss, grad_h = CrossEntropy()(h, model.output_layer(), targets, scale=1.0, generator=torch.Generator())
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    leaf, output = h.clone().requires_grad_(), model.output_layer()
    assert isinstance(output, neumf.TwoPaths)
    q, q_tower = output.items[None, :, :DIM], output.item_layer(output.items[None, :, DIM:])
    expected = -output._block(leaf, q, q_tower).log_softmax(1)[range(7), targets].sum()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grad_h, leaf.grad)
    assert {"item_embedding.weight", "item_layer.weight", "tower.weight", "final.weight"} <= got.keys()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(got[name], parameter.grad)


# What they can learn.


def small(recipe: str) -> Config:
    quick = (
        "model.dim=16",
        "model.max_len=12",
        "model.dropout=0",
        "stages.0.epochs=30",
        "stages.0.learning_rate=3e-2",
        "training.workers=1",
        "training.batch_size=30",
        "training.warmup_steps=5",
        "training.validate_every=100",
        "training.validation_users=50",
    )
    return load_config(recipe, None, quick)


def communities(n_users: int = 120, n_items: int = 12) -> Sequences:
    """Two groups of users, each with eight of the twelve items of its own, in random order."""
    draw = random.Random(0)
    own = [range(n_items), range(n_items, 2 * n_items)]
    return sequences_of([draw.sample(own[user % 2], 8) for user in range(n_users)], 2 * n_items)


@pytest.mark.parametrize("name", ["neumf", "cdae"])
def test_two_communities_are_told_apart(name: str, tmp_path: Path) -> None:
    """Of the items that are left, five are of the own community, and come before the others."""
    outcome = train_recommender(communities(), small(name), tmp_path / "model", console=quiet())
    assert outcome.evaluation.value("HR@5") == 1.0
    assert outcome.baselines["popularity"].value("HR@5") < 0.6


@pytest.mark.parametrize(
    ("name", "loss", "n_negatives", "n_targets"),
    [("fpmc", "bpr", 1, 1), ("neumf", "bce", 4, 1), ("caser", "bce", 3, 3), ("cdae", "bce", 5, 1)],
)
def test_a_recipe_has_its_papers_loss(name: str, loss: str, n_negatives: int, n_targets: int) -> None:
    config = load_config(name)
    assert config.model.name == name
    assert config.model.model_dump().get("n_targets", 1) == n_targets
    expected = {"name": loss, "n_negatives": n_negatives, "negatives": "uniform"}
    assert expected.items() <= config.loss.model_dump().items()
