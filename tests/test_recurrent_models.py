"""GRU4Rec, NARM and STAMP: their papers' equations, what they may read, what they learn."""

import math
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn
from toys import cycle, quiet, randomize, small_config

from bert4rec.config import load_config
from bert4rec.data.sequences import Sequences
from bert4rec.models.gru4rec import GRU4Rec
from bert4rec.models.narm import NARM
from bert4rec.models.sequence_model import SequenceModel
from bert4rec.models.stamp import STAMP
from bert4rec.pipeline import RunOptions, train_recommender
from bert4rec.scoring import score_rows

N_ITEMS = 9
TOKENS = [4, 0, 8, 4, 2]
UNKNOWN = torch.full((1,), -1)
AnyModel = TypeVar("AnyModel", bound=SequenceModel)
MODELS: list[type[SequenceModel]] = [GRU4Rec, NARM, STAMP]


def random_model(cls: type[AnyModel], **values: object) -> AnyModel:
    torch.manual_seed(3)
    settings = cls.settings_class.model_validate({"dim": 4, "max_len": 6, "dropout": 0.3, **values})
    return randomize(cls(N_ITEMS, settings), 0.7)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def times(matrix: Tensor, vector: list[float]) -> list[float]:
    return [sum(w * x for w, x in zip(row, vector, strict=True)) for row in matrix.tolist()]


def plus(*vectors: list[float]) -> list[float]:
    return [sum(numbers) for numbers in zip(*vectors, strict=True)]


def gru_states(gru: nn.GRU, inputs: list[list[float]], layer: int = 0) -> list[list[float]]:
    """Number by number: gates r, z, the candidate n, and the next state between old and n."""
    w, u, b, c = (
        getattr(gru, f"{name}_l{layer}").detach() for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
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


def scores_by_the_model(model: SequenceModel) -> Tensor:
    return score_rows(model, UNKNOWN, torch.tensor([TOKENS]))[0]


@pytest.mark.parametrize("settings", [{}, {"layers": 2}])
def test_gru4rec_equals_its_equations(settings: dict[str, object]) -> None:
    model = random_model(GRU4Rec, **settings)
    states = model.item_embedding.weight[TOKENS].tolist()
    for layer in range(model.gru.num_layers):
        states = gru_states(model.gru, states, layer)
    expected = plus(times(model.output_items.weight, states[-1]), model.output_bias.tolist())
    torch.testing.assert_close(scores_by_the_model(model), torch.tensor(expected))


def test_narm_equals_its_equations() -> None:
    model = random_model(NARM, hidden=3)
    states = gru_states(model.gru, model.item_embedding.weight[TOKENS].tolist())
    last, local = states[-1], [0.0] * 3
    for state in states:
        inner = plus(times(model.query.weight, last), times(model.key.weight, state))
        alpha = sum(v * sigmoid(x) for v, x in zip(model.v.tolist(), inner, strict=True))
        local = plus(local, [alpha * x for x in state])
    c = [*last, *local]
    expected = [
        sum(e * x for e, x in zip(vector, times(model.decoder.weight, c), strict=True))
        for vector in model.item_embedding.weight[:N_ITEMS].tolist()
    ]
    torch.testing.assert_close(scores_by_the_model(model), torch.tensor(expected))


def test_stamp_equals_its_equations() -> None:
    model = random_model(STAMP)
    x = model.item_embedding.weight[TOKENS].tolist()
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
        for vector in model.item_embedding.weight[:N_ITEMS].tolist()
    ]
    torch.testing.assert_close(scores_by_the_model(model), torch.tensor(expected))


@pytest.mark.parametrize("cls", MODELS)
def test_nothing_behind_a_query_position_is_read(cls: type[SequenceModel]) -> None:
    model = random_model(cls)
    tokens = torch.tensor([[4, 0, 8, 4, 2], [1, 2, 3, 5, 7]])
    at, users = torch.tensor([1, 2, 5, 7]), torch.tensor([-1, -1])
    before = model.encode_queries(tokens, at, users)
    for later in (torch.tensor([[6, 6], [6, 6]]), torch.full((2, 2), N_ITEMS)):
        changed = torch.cat([tokens[:, :3], later], 1)
        torch.testing.assert_close(model.encode_queries(changed, at, users), before)
    tokens[0, 0] = 7  # while what stands before counts, from the first item on
    assert not torch.allclose(model.encode_queries(tokens, at, users)[:2], before[:2], atol=1e-3)


@pytest.mark.parametrize("cls", MODELS)
def test_all_positions_at_once_are_the_prefixes_one_by_one(cls: type[SequenceModel]) -> None:
    model = random_model(cls)
    together = model.encode_queries(torch.tensor([TOKENS]), torch.arange(len(TOKENS)), UNKNOWN)
    for t in range(len(TOKENS)):
        alone = model.encode_queries(torch.tensor([TOKENS[: t + 1]]), torch.tensor([t]), UNKNOWN)
        torch.testing.assert_close(together[t], alone[0])


def learned(sequences: Sequences, out: Path, *overrides: str) -> float:
    config = small_config(
        "model.name=gru4rec",
        "stages.0.learning_rate=2e-2",
        "training.workers=1",
        "stages.0.epochs=20",
        "model.dropout=0",
        "training.validate_every=100",
        "evaluation.exclude_seen=false",  # the next item of a cycle has been seen before
        *overrides,
    )
    outcome = train_recommender(sequences, config, out, RunOptions(baselines=False), console=quiet())
    return outcome.evaluation.value("HR@1")


@pytest.mark.parametrize(("loss", "negatives"), [("bpr", "in-batch"), ("top1-max", "popularity")])
def test_a_toy_cycle_is_learned_by_the_losses_of_gru4rec(loss: str, negatives: str, tmp_path: Path) -> None:
    settings = [f"loss.name={loss}", f"loss.negatives={negatives}", "loss.n_negatives=20"]
    assert learned(cycle(), tmp_path / "model", *settings) > 0.95


@pytest.mark.parametrize("recipe", ["gru4rec", "gru4rec+", "gru4rec-ce", "narm", "stamp"])
def test_recipes_read_the_last_items_of_a_history_and_name_their_model(recipe: str) -> None:
    config = load_config(recipe)
    (stage,) = config.stages
    assert stage.model_dump()["window_stride"] is None
    assert config.model.name in recipe
    assert config.model.model_dump().get("layers", 1) == 1
