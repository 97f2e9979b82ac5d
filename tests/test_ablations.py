"""Table 5: BERT4Rec without one of its parts is what the equations without that part say."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from bert4rec.config import ModelConfig
from bert4rec.models.bert4rec import BERT4Rec

N_ITEMS, PAD, MASK, DIM, HEADS = 9, 9, 10, 8, 2
PARTS = ("positions", "feed_forward", "layer_norm", "residual")
WITHOUT = [(), *((part,) for part in PARTS), PARTS]


def model_without(parts: tuple[str, ...], layers: int = 2) -> BERT4Rec:
    off = dict.fromkeys(parts, False)
    torch.manual_seed(0)
    config = ModelConfig(dim=DIM, heads=HEADS, layers=layers, max_len=12, dropout=0.3, **off)
    model = BERT4Rec(N_ITEMS, config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


def plain(model: BERT4Rec, tokens: list[int], without: tuple[str, ...]) -> Tensor:
    """(L,) one history and no padding → (L, D), from the weights and the equations alone."""
    weights = model.state()

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, (DIM,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def dense(x: Tensor, name: str) -> Tensor:
        return linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def joined(x: Tensor, change: Tensor, name: str) -> Tensor:
        both = change if "residual" in without else x + change
        return both if "layer_norm" in without else norm(both, name)

    h = weights["items.weight"][tokens]
    if "positions" not in without:
        h = h + weights["positions.weight"][: len(tokens)]
    h = norm(h, "norm")
    for layer in range(len(model.blocks)):
        name = f"blocks.{layer}"
        qkv = dense(h, f"{name}.attention.query_key_value")
        size, heads = DIM // HEADS, []
        for head in range(HEADS):
            q, k, v = (
                qkv[:, DIM * part + size * head :][:, :size] for part in range(3)
            )  # each (L, D/H)
            heads.append((q @ k.T / size**0.5).softmax(-1) @ v)
        attended = dense(torch.cat(heads, -1), f"{name}.attention.output")
        h = joined(h, attended, f"{name}.norm_1")
        if "feed_forward" not in without:
            inner = gelu(dense(h, f"{name}.feed_forward.inner"))
            h = joined(h, dense(inner, f"{name}.feed_forward.output"), f"{name}.norm_2")
    return h


@pytest.mark.parametrize("without", WITHOUT, ids=lambda parts: "+".join(parts) or "whole")
def test_every_way_through_the_model_equals_the_plain_equations(without: tuple[str, ...]) -> None:
    model = model_without(without)
    history = [3, 1, 4, 1, 5]
    tokens = [*history, MASK]
    expected = plain(model, tokens, without)
    bare = torch.tensor([tokens])
    padded = torch.tensor([[*tokens, PAD, PAD], [2, 6, 5, 3, 5, 8, 7, MASK]])
    asked = gelu(linear(expected[-1], model.head.weight, model.head.bias))
    asked = model.head_norm(asked)
    scores = asked @ model.items.weight[:N_ITEMS].T + model.output_bias
    users = torch.zeros(1, dtype=torch.int64)
    torch.testing.assert_close(model.hidden(bare)[0], expected)
    torch.testing.assert_close(model.hidden(padded)[0, : len(tokens)], expected)
    torch.testing.assert_close(model.asked(bare, torch.tensor([5]), users)[0], asked)
    torch.testing.assert_close(model.asked(padded, torch.tensor([5, 15]), users)[0], asked)
    torch.testing.assert_close(model.asked(padded, torch.tensor([1, 5, 15]), users)[1], asked)
    with torch.inference_mode():  # one history goes through the fused block
        torch.testing.assert_close(model.hidden(bare)[0], expected)
    torch.testing.assert_close(model.score(users, torch.tensor([history]))[0], scores)


@pytest.mark.parametrize("without", WITHOUT[1:-1], ids=lambda parts: parts[0])
def test_a_part_that_is_off_matters_and_has_no_weights(without: tuple[str, ...]) -> None:
    whole, model = model_without(()), model_without(without)
    names = {
        "positions": {"positions.weight"},
        "feed_forward": {n for n in whole.state() if "feed_forward" in n or "norm_2" in n},
        "layer_norm": {n for n in whole.state() if "norm_1" in n or "norm_2" in n},
        "residual": set(),
    }
    assert whole.state().keys() - model.state().keys() == names[without[0]]
    assert model.state().keys() <= whole.state().keys()
    model.load_state_dict({name: whole.state()[name] for name in model.state()})
    tokens = torch.tensor([[3, 1, 4, MASK]])
    assert not torch.allclose(model.hidden(tokens), whole.hidden(tokens), atol=1e-2)


def test_without_positions_the_order_of_the_history_is_lost() -> None:
    users, forward = torch.zeros(1, dtype=torch.int64), torch.tensor([[1, 2, 3, 4]])
    blind, seeing = model_without(("positions",)), model_without(())
    torch.testing.assert_close(blind.score(users, forward), blind.score(users, forward.flip(1)))
    assert not torch.allclose(
        seeing.score(users, forward), seeing.score(users, forward.flip(1)), atol=1e-2
    )


def test_dropout_still_falls_on_what_is_left() -> None:
    """Without residual connections dropout has a way of its own."""
    model = model_without(("residual", "layer_norm", "feed_forward"), layers=1).train()
    torch.manual_seed(0)
    hidden = model.hidden(torch.tensor([[1, 2, 3, MASK]] * 500))
    assert abs(float((hidden == 0).float().mean()) - 77 / 256) < 0.02


def test_names_of_the_whole_model_are_those_of_models_that_were_saved_before() -> None:
    blocks = {
        f"blocks.{layer}.{part}.{kind}"
        for layer in range(2)
        for part in (
            *("attention.query_key_value", "attention.output", "norm_1", "norm_2"),
            *("feed_forward.inner", "feed_forward.output"),
        )
        for kind in ("weight", "bias")
    }
    around = {
        f"{part}.{kind}" for part in ("norm", "head", "head_norm") for kind in ("weight", "bias")
    }
    tables = {"items.weight", "positions.weight", "output_bias"}
    assert set(model_without(()).state()) == blocks | around | tables
