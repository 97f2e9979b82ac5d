"""SASRec against the equations of its paper, written down again with plain loops."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from toys import randomize

from bert4rec.config import load_config
from bert4rec.losses.sampled import Sampled, SampledSettings
from bert4rec.models.sasrec import CausalBlock, SASRec, SASRecSettings
from bert4rec.scoring import log_probabilities_of, score_rows

N_ITEMS, DIM, MAX_LEN, PAD = 7, 4, 6, 7
HISTORY = [3, 0, 5, 5, 1]
UNKNOWN = torch.tensor([-1])
Vector = list[float]


def random_model(heads: int = 2, dropout: float = 0.0, attention_dropout: float = 0.0) -> SASRec:
    torch.manual_seed(3)
    settings = SASRecSettings(
        dim=DIM, heads=heads, layers=2, max_len=MAX_LEN, dropout=dropout, attention_dropout=attention_dropout
    )
    return randomize(SASRec(N_ITEMS, settings), 0.7)


def vectors_at(model: SASRec, tokens: list[int], at: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.encode_queries(torch.tensor([tokens]), torch.tensor(at), UNKNOWN)


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def plus(a: Vector, b: Vector) -> Vector:
    return [x + y for x, y in zip(a, b, strict=True)]


def times(a: Vector, b: Vector) -> Vector:
    return [x * y for x, y in zip(a, b, strict=True)]


def linear(layer: nn.Linear, x: Vector) -> Vector:
    return plus([dot(row, x) for row in layer.weight.tolist()], layer.bias.tolist())


def layer_norm(norm: nn.LayerNorm, x: Vector) -> Vector:
    mean = sum(x) / len(x)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in x) / len(x) + norm.eps)
    unit = [(each - mean) / deviation for each in x]
    return plus(times(unit, norm.weight.tolist()), norm.bias.tolist())


class Masks:
    """What each dropout multiplies with: ones, or those that it has drawn and will use again."""

    def __init__(self, model: SASRec, length: int, *, is_training: bool) -> None:
        model.train(is_training)
        by_element, by_pair = (1, length, DIM), (1, model.blocks[0].heads, length, length)

        def drawn(dropout: nn.Module, shape: tuple[int, ...], seed: int) -> list:
            dropout.reuse_masks(torch.Generator().manual_seed(seed) if is_training else None)
            return dropout(torch.ones(shape))[0].tolist()

        self.embedding = drawn(model.dropout, by_element, 1)
        self.attention, self.inner, self.outer = [], [], []
        for seed, block in enumerate(model.blocks):
            self.attention.append(drawn(block.attention_dropout, by_pair, 10 + seed))
            self.inner.append(drawn(block.dropout_inner, by_element, 20 + seed))
            self.outer.append(drawn(block.dropout_outer, by_element, 30 + seed))


def plain_attention(block: CausalBlock, xs: list[Vector], weights: list) -> list[Vector]:
    """softmax(q kᵀ / √d) v over the positions up to each one's own, head by head (Eq. 2–4)."""
    heads, d = block.heads, DIM // block.heads
    queries = [linear(block.query, layer_norm(block.norm_1, x)) for x in xs]
    both = [linear(block.key_value, x) for x in xs]
    keys, values = [kv[:DIM] for kv in both], [kv[DIM:] for kv in both]
    out = []
    for i, q in enumerate(queries):
        joined: Vector = []
        for head in range(heads):
            part = slice(head * d, (head + 1) * d)
            scores = [dot(q[part], keys[j][part]) / math.sqrt(d) for j in range(i + 1)]
            total = sum(math.exp(score) for score in scores)
            mixed = [0.0] * d
            for j, score in enumerate(scores):
                p = math.exp(score) / total * weights[head][i][j]
                mixed = plus(mixed, [p * each for each in values[j][part]])
            joined += mixed
        out.append(linear(block.output, joined))
    return out


def plain_vectors(model: SASRec, tokens: list[int], masks: Masks) -> list[Vector]:
    xs = []
    for i, token in enumerate(tokens):
        scaled = [math.sqrt(DIM) * each for each in model.item_embedding.weight[token].tolist()]
        xs.append(times(plus(scaled, model.position_embedding.weight[i].tolist()), masks.embedding[i]))
    for number, block in enumerate(model.blocks):
        attended = plain_attention(block, xs, masks.attention[number])
        for i, change in enumerate(attended):
            y = layer_norm(block.norm_2, plus(layer_norm(block.norm_1, xs[i]), change))
            inner = [max(each, 0.0) for each in linear(block.inner, y)]
            outer = linear(block.outer, times(inner, masks.inner[number][i]))
            xs[i] = plus(y, times(outer, masks.outer[number][i]))
    return [layer_norm(model.norm, x) for x in xs]


@pytest.mark.parametrize("heads", [1, 2])
def test_the_vectors_are_those_of_the_equations(heads: int) -> None:
    model = random_model(heads, dropout=0.5, attention_dropout=0.5)
    masks = Masks(model, len(HISTORY), is_training=False)
    assert set(masks.attention[0][0][0]) == {1.0}
    expected = torch.tensor(plain_vectors(model, HISTORY, masks))
    torch.testing.assert_close(vectors_at(model, HISTORY, [0, 1, 2, 3, 4]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("dropout", "attention_dropout"), [(0.0, 0.4), (0.4, 0.0), (0.3, 0.3)])
def test_dropout_acts_on_embeddings_probabilities_and_both_layers_of_the_net(
    heads: int, dropout: float, attention_dropout: float
) -> None:
    model = random_model(heads, dropout, attention_dropout)
    masks = Masks(model, len(HISTORY), is_training=True)
    dropped = [0.0 in row for head in masks.attention[0] for row in head]
    assert any(dropped) == (attention_dropout > 0)
    expected = torch.tensor(plain_vectors(model, HISTORY, masks))
    torch.testing.assert_close(vectors_at(model, HISTORY, [0, 1, 2, 3, 4]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [1, 2])
def test_both_ways_to_attend_are_one_where_nothing_is_dropped(heads: int) -> None:
    model = random_model(heads, attention_dropout=0.5)
    fused = vectors_at(model, HISTORY, [0, 2, 4])
    model.train()
    for block in model.blocks:
        assert not block.attention_dropout.is_identity  # so the fused kernel is not used
        block.attention_dropout.forward = lambda probabilities: probabilities
    torch.testing.assert_close(vectors_at(model, HISTORY, [0, 2, 4]), fused, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention_dropout", [0.0, 0.4])
def test_nothing_behind_a_query_position_changes_its_vector(attention_dropout: float) -> None:
    model = random_model(attention_dropout=attention_dropout)
    Masks(model, len(HISTORY), is_training=attention_dropout > 0)  # the same ones every time
    everywhere = vectors_at(model, HISTORY, [0, 1, 2, 3, 4])
    for at in range(len(HISTORY) - 1):
        n_behind = len(HISTORY) - at - 1
        for behind in ([PAD] * n_behind, [6, 2, 4, 0][:n_behind]):
            changed = HISTORY[: at + 1] + behind
            torch.testing.assert_close(vectors_at(model, changed, [at])[0], everywhere[at])
    changed = [HISTORY[0] + 1, *HISTORY[1:]]  # but what stands before does
    assert (vectors_at(model, changed, [4])[0] - everywhere[4]).abs().max() > 1e-3


def test_a_query_everywhere_is_every_prefix_scored_and_a_score_is_a_product_without_bias() -> None:
    model = random_model()
    h = vectors_at(model, HISTORY, [0, 1, 2, 3, 4])
    for n in range(1, len(HISTORY) + 1):
        scores = score_rows(model, UNKNOWN, torch.tensor([HISTORY[:n]]))[0]
        expected = [dot(h[n - 1].tolist(), model.item_embedding.weight[item].tolist()) for item in range(N_ITEMS)]
        assert scores.tolist() == pytest.approx(expected, abs=1e-4)


def test_of_a_longer_history_the_last_items_are_read() -> None:
    model, items = random_model(), list(range(N_ITEMS))
    long = [2, 6, 4, *HISTORY, 2]
    found = log_probabilities_of(model, model, [long, long[-MAX_LEN:]], items)
    torch.testing.assert_close(found[0], found[1])


def test_the_loss_of_the_recipe_is_the_papers_with_one_drawn_negative() -> None:
    """-log σ(r⁺) - log(1 - σ(r⁻)) (Eq. 7); a negative that is the target does not count."""
    settings = load_config("sasrec").loss
    assert settings == SampledSettings(name="bce", n_negatives=1, negatives="uniform")
    loss = settings.build(np.arange(1, N_ITEMS + 1))
    assert isinstance(loss, Sampled)
    model = random_model()
    rows = model.item_embedding.weight.tolist()
    with torch.no_grad():
        tokens = torch.tensor([HISTORY] * 8)
        h = model.encode_queries(tokens, torch.arange(tokens.numel()), UNKNOWN.expand(8))
    targets = torch.arange(len(h)) % N_ITEMS
    value, gradient = loss(h, model.output_layer(), targets, scale=0.5, generator=torch.Generator().manual_seed(4))
    drawn = loss.negatives.draw((len(h), 1), torch.Generator().manual_seed(4))[:, 0].tolist()
    assert set(drawn) == set(range(N_ITEMS))
    expected, expected_gradient, n_same = 0.0, [], 0
    for vector, target, negative in zip(h.tolist(), targets.tolist(), drawn, strict=True):
        wanted = 1 / (1 + math.exp(-dot(vector, rows[target])))
        expected -= 0.5 * math.log(wanted)
        slope = [0.5 * (wanted - 1) * each for each in rows[target]]
        if negative == target:
            n_same += 1
        else:
            unwanted = 1 / (1 + math.exp(-dot(vector, rows[negative])))
            expected -= 0.5 * math.log(1 - unwanted)
            slope = plus(slope, [0.5 * unwanted * each for each in rows[negative]])
        expected_gradient.append(slope)
    assert n_same > 0
    assert float(value) == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(gradient, torch.tensor(expected_gradient), rtol=1e-4, atol=1e-4)
