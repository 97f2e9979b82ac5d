"""What the weights and the output bias of BERT4Rec are before training."""

from pathlib import Path

import numpy as np
import pytest
import torch
from toys import random_histories, small_run

from bert4rec.config import load_config
from bert4rec.data.splits import Split, leave_one_out
from bert4rec.distributed.shard_parameters import ShardParameters
from bert4rec.explanation import attention_weights
from bert4rec.models.bert4rec import BERT4Rec, BERT4RecSettings
from bert4rec.models.initialization import clear_reserved, popularity_bias
from bert4rec.models.sequence_model import SequenceModel
from bert4rec.pipeline import train
from bert4rec.scoring import score_rows
from bert4rec.training.checkpoint import RunDirectory
from bert4rec.training.process_group import ProcessGroup
from bert4rec.training.run_log import RunLog

UNKNOWN = torch.tensor([-1])


def hardly_trained(run: Path, split: Split, *overrides: str) -> SequenceModel:
    """One epoch at a learning rate of next to nothing: as good as before training."""
    run.mkdir(exist_ok=True)
    config = small_run(*overrides, "stages.0.epochs=1", "stages.0.learning_rate=1e-7")
    with RunLog(run, None, is_shown=False) as log:
        model, _ = train(config, split, len(split.train), RunDirectory(run, {}), log)
    return model


# The output bias.


def test_the_popularity_bias_alone_would_draw_items_as_they_occur() -> None:
    chances = torch.softmax(popularity_bias(np.array([7, 0, 1, 30])), 0)
    torch.testing.assert_close(chances, torch.tensor([8, 1, 2, 31]) / 42)


@pytest.mark.parametrize("name", ["bert4rec", "bert4rec-causal"])
def test_training_begins_at_popularity(name: str, tmp_path: Path) -> None:
    split = leave_one_out(random_histories(0))
    overrides = [f"model.name={name}"]
    if name == "bert4rec":
        overrides.append("stages.1.epochs=0")
    popular = hardly_trained(tmp_path / "a", split, *overrides, "model.output_bias=popularity")
    expected = popularity_bias(split.train_counts)
    assert expected.std() > 0.1
    torch.testing.assert_close(popular.get_parameter("output_bias"), expected, atol=1e-4, rtol=0)
    plain = hardly_trained(tmp_path / "b", split, *overrides, "model.output_bias=zero")
    assert plain.get_parameter("output_bias").abs().max() < 1e-4


def test_validation_items_count_where_they_are_trained_on(tmp_path: Path) -> None:
    split = leave_one_out(random_histories(0))
    overrides = ("model.output_bias=popularity", "training.on_validation=true", "stages.1.epochs=0")
    model = hardly_trained(tmp_path, split, *overrides)
    expected = popularity_bias(split.training_on_validation().train_counts)
    assert not torch.allclose(expected, popularity_bias(split.train_counts), atol=1e-2)
    torch.testing.assert_close(model.get_parameter("output_bias"), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["sasrec", "gru4rec", "caser", "cdae"])
def test_other_models_begin_at_zero_or_have_no_bias(name: str, tmp_path: Path) -> None:
    split = leave_one_out(random_histories(0))
    model = hardly_trained(tmp_path, split, f"model.name={name}")
    bias = model.state().get("output_bias", model.no_bias)
    assert bias.abs().max() < 1e-4
    with pytest.raises(ValueError, match=r"unknown setting 'model\.output_bias'"):
        small_run(f"model.name={name}", "model.output_bias=popularity")


@pytest.mark.parametrize("recipe", ["default", "demo", "best-beauty"])
def test_recipes_for_any_data_begin_at_popularity(recipe: str) -> None:
    assert load_config(recipe).model.output_bias == "popularity"


@pytest.mark.parametrize("recipe", ["paper-ml-1m", "best-ml-1m"])  # the latter: docs/experiments/2026-11-quality.md
def test_others_do_not(recipe: str) -> None:
    assert load_config(recipe).model.output_bias == "zero"


# Sharded items.


def test_sharded_items_and_biases_begin_as_those_of_one_process() -> None:
    run, bias = small_run("model.output_bias=popularity"), popularity_bias(np.arange(51))
    small = BERT4Rec(20, run.model)
    biases, embeddings = torch.full((51,), torch.nan), torch.full((53, 16), torch.nan)
    for rank in range(2):
        own = ShardParameters(small, ProcessGroup(2, rank), bias, run.training.seed)
        assert own.output_bias is not None
        biases[rank::2] = own.output_bias.detach()
        embeddings[rank::2] = own.item_embedding.weight.detach()
    assert torch.equal(biases, bias)
    assert torch.equal(embeddings[51:], small.item_embedding.weight[20:])  # PAD and MASK
    deviation = small.item_embedding.weight[:20].std()
    torch.testing.assert_close(embeddings[:51].std(), deviation, atol=0, rtol=0.2)
    assert len(embeddings[:51, 0].unique()) > 45


# The other weights.


def passes_items_on(weight: torch.Tensor, heads: int) -> bool:
    """Whether (D, D) is the identity in the dimensions of the items, and zero in the others."""
    dim = len(weight)
    items = torch.ones(1, dim)
    clear_reserved(items, heads)
    return torch.equal(weight, items[0].diag())


def test_values_and_head_begin_by_passing_items_on() -> None:
    settings = small_run("model.initialization=local").model
    model = BERT4Rec(30, settings)
    assert passes_items_on(model.output_projection.weight, settings.heads)
    for block in model.blocks:
        value = block.attention.query_key_value.weight[2 * settings.dim :]
        assert passes_items_on(value, settings.heads)
        assert torch.equal(block.attention.output.weight, torch.eye(settings.dim))
    assert not model.item_embedding.weight[:30].any(0).reshape(settings.heads, -1)[:, :3].any()


def test_the_papers_weights_are_a_truncated_normal() -> None:
    model = BERT4Rec(300, BERT4RecSettings(initialization="paper", output_gain=1))
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            assert parameter.eq(1).all()
        elif parameter.ndim == 1:
            assert not parameter.any()
        else:
            assert parameter.abs().max() <= 0.04
            assert 0.015 < parameter.std() < 0.02  # of 0.02, the tails cut off


def test_attention_begins_with_near_items_and_without_the_mask() -> None:
    """The item before has the largest share, and nobody attends to [MASK]."""
    torch.manual_seed(0)
    settings = BERT4RecSettings(initialization="local", output_gain=1, max_len=40)
    model = BERT4Rec(300, settings)
    history = torch.randperm(300)[None, :30]
    weights = attention_weights(model, history)[0, 0, :, -1]  # of [MASK], (heads, 31)
    to_items, to_itself = weights.split([30, 1], -1)
    assert (to_items.argmax(-1) == 29).all()
    assert (to_itself < to_items.mean(-1, keepdim=True)).all()
    by_distance = to_items.flip(-1)
    near, far = by_distance.split([10, 20], -1)
    assert (near.mean(-1) > 2 * far.mean(-1)).all()
    even = BERT4Rec(300, settings.model_copy(update={"initialization": "paper"}))
    assert attention_weights(even, history)[0, 0, :, -1].std() < 0.01


def test_a_mask_begins_as_a_mean_of_the_items() -> None:
    torch.manual_seed(0)
    model = BERT4Rec(300, BERT4RecSettings(initialization="local", output_gain=1))
    history = torch.randperm(300)[None, :30]
    scores = score_rows(model, UNKNOWN, history)
    assert scores[0, history[0]].mean() > scores.mean() + scores.std() / 2


def test_the_softmax_begins_as_sharp_as_the_output_gain() -> None:
    history, scores = torch.tensor([[1, 2, 3]]), []
    for gain in (1, 4):
        torch.manual_seed(0)
        model = BERT4Rec(30, small_run(f"model.output_gain={gain}").model)
        scores.append(score_rows(model, UNKNOWN, history))
    torch.testing.assert_close(scores[1], 4 * scores[0])
