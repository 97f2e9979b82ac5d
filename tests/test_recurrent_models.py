"""GRU4Rec, NARM and STAMP: their papers' equations, what they may read, what they learn."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from toys import cycle, small_config

from bert4rec.config import ModelConfig, load_config
from bert4rec.data.sequences import Sequences
from bert4rec.models import additive_attention
from bert4rec.models.additive_attention import mixed_by_addition
from bert4rec.models.gru4rec import GRU4Rec
from bert4rec.models.learned import Learned
from bert4rec.models.narm import NARM
from bert4rec.models.stamp import STAMP
from bert4rec.pipeline import train_recommender

N_ITEMS = 9
TOKENS = [4, 0, 8, 4, 2]
NOBODY = torch.full((1,), -1)
KINDS = [GRU4Rec, NARM, STAMP]


def random_model(kind: type[Learned], **settings: object) -> Learned:
    torch.manual_seed(3)
    config = ModelConfig.model_validate(
        {"dim": 4, "layers": 1, "max_len": 6, "dropout": 0.3, **settings}
    )
    model = kind(N_ITEMS, config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.7)
    return model


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def times(matrix: Tensor, vector: list[float]) -> list[float]:
    return [sum(w * x for w, x in zip(row, vector, strict=True)) for row in matrix.tolist()]


def plus(*vectors: list[float]) -> list[float]:
    return [sum(numbers) for numbers in zip(*vectors, strict=True)]


def gru_states(gru: nn.GRU, inputs: list[list[float]], layer: int = 0) -> list[list[float]]:
    """Number by number: gates r, z, the candidate n, and the next state between old and n."""
    w, u, b, c = (
        getattr(gru, f"{name}_l{layer}").detach()
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    n = gru.hidden_size
    h, states = [0.0] * n, []
    for x in inputs:
        of_input, of_state = plus(times(w, x), b.tolist()), plus(times(u, h), c.tolist())
        new = []
        for i in range(n):
            r = sigmoid(of_input[i] + of_state[i])
            z = sigmoid(of_input[n + i] + of_state[n + i])
            candidate = math.tanh(of_input[2 * n + i] + r * of_state[2 * n + i])
            new.append((1 - z) * candidate + z * h[i])
        h = new
        states.append(h)
    return states


def scores_by_the_model(model: Learned) -> Tensor:
    return model.score(NOBODY, torch.tensor([TOKENS]))[0]


@pytest.mark.parametrize("settings", [{}, {"hidden": 3}, {"tied_output": True}, {"layers": 2}])
def test_gru4rec_equals_its_equations(settings: dict[str, object]) -> None:
    model = random_model(GRU4Rec, **settings)
    assert isinstance(model, GRU4Rec)
    states = model.items.weight[TOKENS].tolist()
    for layer in range(model.gru.num_layers):
        states = gru_states(model.gru, states, layer)
    table = model.items if model.output_items is None else model.output_items
    assert (model.output_items is None) == ("tied_output" in settings)
    expected = plus(times(table.weight[:N_ITEMS], states[-1]), model.output_bias.tolist())
    torch.testing.assert_close(scores_by_the_model(model), torch.tensor(expected))


def test_gru4recs_output_is_only_tied_where_the_widths_agree() -> None:
    with pytest.raises(ValueError, match=r"hidden = 3 .*dim = 4"):
        random_model(GRU4Rec, hidden=3, tied_output=True)


def test_narm_equals_its_equations() -> None:
    model = random_model(NARM, hidden=3)
    assert isinstance(model, NARM)
    states = gru_states(model.gru, model.items.weight[TOKENS].tolist())
    last, local = states[-1], [0.0] * 3
    for state in states:
        inner = plus(times(model.query.weight, last), times(model.key.weight, state))
        alpha = sum(v * sigmoid(x) for v, x in zip(model.v.tolist(), inner, strict=True))
        local = plus(local, [alpha * x for x in state])
    c = [*last, *local]
    expected = [
        sum(e * x for e, x in zip(vector, times(model.decoder.weight, c), strict=True))
        for vector in model.items.weight[:N_ITEMS].tolist()
    ]
    torch.testing.assert_close(scores_by_the_model(model), torch.tensor(expected))


def test_stamp_equals_its_equations() -> None:
    model = random_model(STAMP)
    assert isinstance(model, STAMP)
    x = model.items.weight[TOKENS].tolist()
    last, mean = x[-1], [total / len(x) for total in plus(*x)]
    attended = [0.0] * 4
    for item in x:
        inner = plus(
            times(model.of_item.weight, item),
            times(model.of_last.weight, last),
            times(model.of_mean.weight, mean),
            model.of_mean.bias.tolist(),
        )
        alpha = sum(w * sigmoid(each) for w, each in zip(model.v.tolist(), inner, strict=True))
        attended = plus(attended, [alpha * each for each in item])
    h_s = plus(times(model.session.weight, attended), model.session.bias.tolist())
    h_t = plus(times(model.last.weight, last), model.last.bias.tolist())
    expected = [
        sum(math.tanh(s) * math.tanh(t) * each for s, t, each in zip(h_s, h_t, vector, strict=True))
        for vector in model.items.weight[:N_ITEMS].tolist()
    ]
    torch.testing.assert_close(scores_by_the_model(model), torch.tensor(expected))


@pytest.mark.parametrize("at_once", [2**20, 40, 1])  # all in one part, some rows, one question
def test_attention_in_parts_is_the_plain_one_with_its_gradients(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(additive_attention, "AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(2)
    at = torch.tensor([0, 3, 4, 6, 14])  # rows of five: two, two, and one question
    given = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((5, 4), (3, 5, 4), (4,), (3, 5, 2))
    ]
    queries, keys, v, values = given
    ours = mixed_by_addition(queries, keys, v, values, at)
    plain = []
    for i, flat in enumerate(at.tolist()):
        row, t = divmod(flat, 5)
        weights = [torch.sigmoid(queries[i] + keys[row, j]) @ v for j in range(t + 1)]
        plain.append(sum(weight * values[row, j] for j, weight in enumerate(weights)))
    together = torch.stack(plain)  # type: ignore[arg-type]
    torch.testing.assert_close(ours, together)
    weight = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad((ours * weight).sum(), given),
        torch.autograd.grad((together * weight).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_behind_an_asked_position_is_read(kind: type[Learned]) -> None:
    model = random_model(kind)
    tokens = torch.tensor([[4, 0, 8, 4, 2], [1, 2, 3, 5, 7]])
    at, users = torch.tensor([1, 2, 5, 7]), torch.tensor([-1, -1])
    before = model.asked(tokens, at, users)
    for later in (torch.tensor([[6, 6], [6, 6]]), torch.full((2, 2), N_ITEMS)):
        changed = torch.cat([tokens[:, :3], later], 1)
        torch.testing.assert_close(model.asked(changed, at, users), before)
    tokens[0, 0] = 7  # while what stands before counts, from the first item on
    assert not torch.allclose(model.asked(tokens, at, users)[:2], before[:2], atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_all_positions_at_once_are_the_prefixes_one_by_one(kind: type[Learned]) -> None:
    model = random_model(kind)
    together = model.asked(torch.tensor([TOKENS]), torch.arange(len(TOKENS)), NOBODY)
    for t in range(len(TOKENS)):
        alone = model.asked(torch.tensor([TOKENS[: t + 1]]), torch.tensor([t]), NOBODY)
        torch.testing.assert_close(together[t], alone[0])


def learned(sequences: Sequences, out: Path, *settings: str) -> float:
    config = small_config(
        "learning_rate=2e-2",
        "training.workers=1",
        "epochs=20",
        "dropout=0",
        "model.layers=1",
        "validate_every=100",
        "evaluation.exclude_seen=false",  # the next item of a cycle has been seen before
        *settings,
    )
    outcome = train_recommender(sequences, config, out, baselines=False)
    return outcome.evaluation.value("HR@1")


@pytest.mark.parametrize(
    ("loss", "negatives"),
    [("bpr", "in-batch"), ("top1-max", "popularity")],
)
def test_a_toy_cycle_is_learned_by_the_losses_of_gru4rec(
    loss: str, negatives: str, tmp_path: Path
) -> None:
    settings = ["model.name=gru4rec", f"loss={loss}", f"negatives={negatives}", "n_negatives=20"]
    assert learned(cycle(), tmp_path / "model", *settings) > 0.95


@pytest.mark.parametrize("recipe", ["gru4rec", "gru4rec+", "gru4rec-ce", "narm", "stamp"])
def test_recipes_read_the_last_items_of_a_history_and_name_their_model(recipe: str) -> None:
    config = load_config(recipe)
    assert config.training.window_step is None
    assert config.model.name in recipe
    assert config.model.layers == 1 or config.model.name == "stamp"
