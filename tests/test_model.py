"""Laws of BERT4Rec: what must not change a score, its equations, and what must be learnable."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear
from toys import cycle, quiet, random_histories, randomize, small_run, untrained_recommender

from bert4rec.data.splits import leave_one_out
from bert4rec.explanation import attention_weights
from bert4rec.models.bert4rec import BERT4Rec, BERT4RecSettings, CausalBERT4Rec
from bert4rec.models.kernels.byte_dropout import ByteDropout
from bert4rec.models.output import DotProduct
from bert4rec.pipeline import train_recommender
from bert4rec.scoring import log_probabilities_of, rank_held_out, score_rows

N_ITEMS, DIM, HEADS = 9, 8, 2
PAD, MASK = N_ITEMS, N_ITEMS + 1
UNKNOWN = torch.tensor([-1])
PARTS = ("positions", "feed_forward", "layer_norm", "residual")
ABLATIONS = [(), *((part,) for part in PARTS), PARTS]


def model_without(ablation: tuple[str, ...], layers: int = 2, cls: type[BERT4Rec] = BERT4Rec) -> BERT4Rec:
    torch.manual_seed(3)
    settings = BERT4RecSettings(
        dim=DIM,
        heads=HEADS,
        layers=layers,
        max_len=24,
        dropout=0.3,
        initialization="paper",
        output_gain=1,
        ablation=ablation,
    )
    return randomize(cls(N_ITEMS, settings), 0.5)


def scores_of(model: BERT4Rec, *histories: list[int], padding: int = 0) -> Tensor:
    longest = max(map(len, histories)) + padding
    rows = [history + [model.pad_token] * (longest - len(history)) for history in histories]
    tokens = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), longest)
    return score_rows(model, torch.full((len(rows),), -1), tokens)


# What must not change a score, and what must.


@pytest.mark.parametrize("history", [[3], [1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1]])
def test_padding_changes_no_score(history: list[int]) -> None:
    model = model_without(())
    bare = scores_of(model, history)
    together = scores_of(model, history, [5], padding=7)[:1]
    torch.testing.assert_close(together, bare, atol=1e-5, rtol=1e-5)


def test_alone_equals_in_a_batch() -> None:
    model = model_without(())
    histories = [[1], [4, 5, 6], list(range(9)), [7, 7, 7, 7], []]
    together = scores_of(model, *histories)
    for row, history in enumerate(histories):
        torch.testing.assert_close(together[row], scores_of(model, history)[0], atol=1e-5, rtol=1e-5)


def test_only_the_last_items_that_fit_are_read_and_all_of_them_count() -> None:
    model = model_without(())
    n = model.max_len - 1  # and [MASK]
    assert model.max_history == n

    def scored(history: list[int]) -> Tensor:
        return log_probabilities_of(model, model, [history], list(range(N_ITEMS)))

    history = [token % 8 for token in range(n + 5)]
    whole = scored(history)
    torch.testing.assert_close(whole, scored(history[-n:]))
    changed = history.copy()
    changed[-n] = 8  # the oldest item that fits
    assert not torch.allclose(whole, scored(changed), atol=1e-3)
    changed = history.copy()
    changed[-n - 1] = 8  # the one before it
    torch.testing.assert_close(whole, scored(changed))


def test_order_matters_but_not_without_positions() -> None:
    seeing, blind = model_without(()), model_without(("positions",))
    forward, backward = [1, 2, 3, 4], [4, 3, 2, 1]
    assert not torch.allclose(scores_of(seeing, forward), scores_of(seeing, backward), atol=1e-2)
    torch.testing.assert_close(scores_of(blind, forward), scores_of(blind, backward))


def test_the_causal_model_hides_later_items_from_earlier_ones() -> None:
    """With one block only [MASK] reads, and it sees everything in both models."""
    history = [1, 2, 3, 4]
    for layers, is_same in ((1, True), (2, False)):
        both = [model_without((), layers, cls) for cls in (BERT4Rec, CausalBERT4Rec)]
        one, other = (scores_of(model, history) for model in both)
        assert torch.allclose(one, other, atol=1e-5) == is_same


def test_the_output_is_tied_to_the_item_embedding() -> None:
    model = model_without(())
    output = model.output_layer()
    assert isinstance(output, DotProduct)
    assert output.weight is model.item_embedding.weight
    assert output.weight.shape == (N_ITEMS + 2, DIM)
    assert output.bias.shape == (N_ITEMS,)


def test_dropout_is_off_when_scoring() -> None:
    model = model_without(()).train()
    assert torch.equal(scores_of(model, [1, 2]), scores_of(model, [1, 2]))


def test_attention_weights_are_distributions_over_what_is_visible() -> None:
    history = torch.tensor([[1, 2, 3], [4, 5, 6]])
    weights = attention_weights(model_without(()), history)
    assert weights.shape == (2, 2, HEADS, 4, 4)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, HEADS, 4))
    assert (weights > 0).all()
    causal = attention_weights(model_without((), cls=CausalBERT4Rec), history)
    torch.testing.assert_close(causal.sum(-1), torch.ones(2, 2, HEADS, 4))
    assert torch.equal(causal > 0, torch.ones(2, 2, HEADS, 4, 4).tril() > 0)


# The equations of the paper, with every part, and without some as in Table 5.


def plain(model: BERT4Rec, tokens: list[int]) -> Tensor:
    """(L,) one history and no padding → (L, V), from the weights and the equations alone."""
    weights, without = model.state(), model.settings.ablation

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, (DIM,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def dense(x: Tensor, name: str) -> Tensor:
        return linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def joined(x: Tensor, change: Tensor, name: str) -> Tensor:
        both = change if "residual" in without else x + change
        return both if "layer_norm" in without else norm(both, name)

    h = weights["item_embedding.weight"][tokens]
    if "positions" not in without:
        h = h + weights["position_embedding.weight"][: len(tokens)]
    h = norm(h, "norm")
    hidden = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
    for layer in range(len(model.blocks)):
        name = f"blocks.{layer}"
        qkv = dense(h, f"{name}.attention.query_key_value")
        size, heads = DIM // HEADS, []
        for head in range(HEADS):
            q, k, v = (qkv[:, DIM * part + size * head :][:, :size] for part in range(3))  # each (L, D/H)
            products = q @ k.T / size**0.5
            if model.is_causal:
                products = products.masked_fill(hidden, -torch.inf)
            heads.append(products.softmax(-1) @ v)
        attended = dense(torch.cat(heads, -1), f"{name}.attention.output")
        h = joined(h, attended, f"{name}.norm_1")
        if "feed_forward" not in without:
            inner = dense(h, f"{name}.feed_forward.inner")
            inner = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))  # GELU
            h = joined(h, dense(inner, f"{name}.feed_forward.output"), f"{name}.norm_2")
    h = norm(gelu(dense(h, "output_projection")), "output_norm")
    return h @ weights["item_embedding.weight"][:N_ITEMS].T + weights["output_bias"]


@pytest.mark.parametrize("cls", [BERT4Rec, CausalBERT4Rec])
@pytest.mark.parametrize("ablation", ABLATIONS, ids=lambda parts: "+".join(parts) or "whole")
def test_forward_equals_the_equations(ablation: tuple[str, ...], cls: type[BERT4Rec]) -> None:
    model = model_without(ablation, cls=cls)
    tokens = [3, 1, 4, MASK, 5, MASK]
    expected = plain(model, tokens)
    torch.testing.assert_close(model(torch.tensor([tokens]))[0], expected)
    padded = torch.tensor([[*tokens, PAD, PAD], [2, 6, 5, 3, 5, 8, 7, MASK]])
    torch.testing.assert_close(model(padded)[0, : len(tokens)], expected)
    history = [3, 1, 4, 1, 5]
    torch.testing.assert_close(scores_of(model, history)[0], plain(model, [*history, MASK])[-1])


@pytest.mark.parametrize("ablation", ABLATIONS[1:-1], ids=lambda parts: parts[0])
def test_a_part_that_is_left_out_matters_and_has_no_weights(ablation: tuple[str, ...]) -> None:
    whole, model = model_without(()), model_without(ablation)
    names = {
        "positions": {"position_embedding.weight"},
        "feed_forward": {n for n in whole.state() if "feed_forward" in n or "norm_2" in n},
        "layer_norm": {n for n in whole.state() if "norm_1" in n or "norm_2" in n},
        "residual": set(),
    }
    assert whole.state().keys() - model.state().keys() == names[ablation[0]]
    assert model.state().keys() <= whole.state().keys()
    model.load_state_dict({name: whole.state()[name] for name in model.state()})
    tokens = torch.tensor([[3, 1, 4, MASK]])
    assert not torch.allclose(model(tokens), whole(tokens), atol=1e-2)


def test_names_of_weights_are_those_of_saved_models() -> None:
    blocks = {
        f"blocks.{layer}.{part}.{kind}"
        for layer in range(2)
        for part in (
            *("attention.query_key_value", "attention.output", "norm_1", "norm_2"),
            *("feed_forward.inner", "feed_forward.output"),
        )
        for kind in ("weight", "bias")
    }
    around = {f"{part}.{kind}" for part in ("norm", "output_projection", "output_norm") for kind in ("weight", "bias")}
    tables = {"item_embedding.weight", "position_embedding.weight", "output_bias"}
    assert set(model_without(()).state()) == blocks | around | tables


# Dropout.


def test_dropout_drops_the_stated_share_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    dropout = ByteDropout(0.3).train()
    out = dropout(torch.ones(1000, 999))
    assert abs(float((out == 0).float().mean()) - 77 / 256) < 0.002
    assert abs(float(out.mean()) - 1) < 0.003
    assert torch.equal(dropout.eval()(out), out)


def test_a_reused_mask_is_the_same_for_all_microbatches_until_the_next_draw() -> None:
    dropout, x = ByteDropout(0.5).train(), torch.ones(40, 16)
    dropout.reuse_masks(torch.Generator().manual_seed(3))
    first = dropout(x)
    assert torch.equal(dropout(x), first)
    assert torch.equal(dropout(x[:7]), first[:7])
    assert torch.equal(dropout.add(x, x), x + first)
    dropout.reuse_masks(torch.Generator().manual_seed(4))
    assert not torch.equal(dropout(x), first)
    dropout.reuse_masks(None)
    assert not torch.equal(dropout(x), dropout(x))


def test_dropout_falls_on_what_an_ablation_leaves() -> None:
    """Without residual connections dropout has a way of its own."""
    model = model_without(("residual", "layer_norm", "feed_forward"), layers=1).train()
    torch.manual_seed(0)
    x, block = model.embed(torch.tensor([[1, 2, 3, MASK]] * 500)), model.blocks[0]
    assert abs(float((block(x, None) == 0).float().mean()) - 77 / 256) < 0.02


# What it learns.


def test_a_toy_cycle_is_learned_perfectly(tmp_path: Path) -> None:
    config = small_run(
        "stages.0.epochs=100",
        "training.validate_every=100",  # at the end: the first perfect validation may come by luck
        "stages.0.learning_rate=2e-3",
        "model.dropout=0",
        "stages.1.epochs=15",
        "evaluation.exclude_seen=false",  # the next item of a cycle has been seen before
    )
    outcome = train_recommender(cycle(), config, tmp_path / "model", console=quiet())
    assert outcome.evaluation.value("HR@1") == 1.0
    assert outcome.baselines["popularity"].value("HR@1") < 0.5


def test_the_rank_in_an_evaluation_is_the_place_in_recommend() -> None:
    recommender = untrained_recommender()
    held_out = leave_one_out(random_histories(3)).test
    ranks = rank_held_out(recommender.model, held_out, exclude_seen=True).tolist()
    n_checked = 0
    for row, rank in enumerate(ranks):
        history = [recommender.vocabulary.raw(t) for t in held_out.histories[row].tolist()]
        found = recommender.recommend(history, k=30)
        target = recommender.vocabulary.raw(int(held_out.targets[row]))
        if target in history:
            assert rank == 0
            continue
        assert [each.item for each in found].index(target) + 1 == rank
        n_checked += 1
    assert n_checked > 10
